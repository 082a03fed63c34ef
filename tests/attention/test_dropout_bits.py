"""The bits of dropout: what they are, by numbers, and how alike they are to chance."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import dropout_numbers

from jax_kvblock.attention import dropout
from jax_kvblock.attention.config import AttentionConfig, Operands, Sizes

SIDE = 1024  # of the square of pairs that is looked at


def keys_of(seed, batch=1, heads=1, **offsets):
    words = dropout.check_seed("", seed, batch, heads)
    return np.asarray(dropout.keys_of(words, batch, heads, **offsets))


def square(key, side=SIDE):
    """The numbers of the pairs of `side` queries and keys, uint32 `[side, side]`."""
    at = np.arange(side)[None]
    words = np.asarray(key, np.uint32).reshape(2, 1, 1, 1)
    return dropout_numbers(at, at, words[0], words[1])[0, 0]


# Keys that hide nothing, and those of seeds.
KEYS = [(0, 0), (1, 2), (2**31, 0), (0, 2**32 - 1)]
KEYS += [tuple(keys_of(seed)[0, 0]) for seed in (0, 1, 123456789)]
by_key = pytest.mark.parametrize("key", KEYS, ids=str)
OF_HEADS = ("row_shifts", "column_shifts", "factors")
THRESHOLDS = (1, 13, 64, 100)


# ---- what they are -------------------------------------------------------------------


def test_the_keys_of_seeds_stay_what_they_are():
    """What a seed drops is the same in every release: these were written down."""
    found = keys_of(42, 2, 2)
    np.testing.assert_array_equal(found, WRITTEN)
    key = keys_of(jax.random.wrap_key_data(jnp.uint32([1, 2])))[0, 0]
    np.testing.assert_array_equal(key, WRITTEN_OF_A_KEY)
    np.testing.assert_array_equal(square(found[0, 0], 32)[7, :20], WRITTEN_NUMBERS)


WRITTEN = [
    [[0x8C3E93BC, 0x5A4EE6DF], [0xEC3EC129, 0x05547924]],
    [[0x6D0DAC12, 0x7FCE41CC], [0x1BF64983, 0x1CB2D06F]],
]
WRITTEN_OF_A_KEY = [0x1E033871, 0x13F07EE1]
WRITTEN_NUMBERS = [17, 75, 108, 29, 115, 81, 42, 101, 17, 48]
WRITTEN_NUMBERS += [5, 23, 45, 22, 71, 16, 63, 110, 73, 35]


def test_plain_jax_computes_the_function_that_the_header_defines():
    keys = jnp.asarray(KEYS[4:6], jnp.uint32)[None]
    config = AttentionConfig(scale=1.0, dropout=50)
    size = Sizes(1, 70, 90, 2, 2, 8, 8)
    parts = dropout.parts_of(
        config, Operands(None, None, None, dropout_keys=keys), size
    )
    alike = {n: getattr(parts, n)[:, None] for n in OF_HEADS}
    got = np.asarray(dropout.kept(config, parts._replace(**alike)))
    for head in range(2):
        want = square(KEYS[4 + head], 96)[:70, :90] >= 50
        np.testing.assert_array_equal(got[0, head], want)


def test_offsets_are_another_key():
    """Positions from 48 and 160 on are those of a larger square."""
    whole = square(keys_of(3)[0, 0], 256)
    for offsets in (
        {"q_offset": 48, "kv_offset": 160},
        {"kv_offset": jnp.int32([165])},
    ):
        at = [int(np.asarray(offsets.get(n, 0)).item()) // 16 * 16
              for n in ("q_offset", "kv_offset")]  # fmt: skip
        part = square(keys_of(3, **offsets)[0, 0], 64)
        np.testing.assert_array_equal(
            part, whole[at[0] : at[0] + 64, at[1] : at[1] + 64]
        )


# ---- what they are like --------------------------------------------------------------

SIGMAS = 5.5  # of a number of which a test looks at up to a million


def deviations(bits, threshold):
    """Of what is dropped, with a mean of 0 and a variance of 1 if it is by chance."""
    p = threshold / 128
    return ((bits < threshold) - p) / np.sqrt(p * (1 - p))


@by_key
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_rates_of_all_of_rows_and_of_columns(key, threshold):
    d = deviations(square(key), threshold)
    assert abs(d.mean()) * SIDE < SIGMAS
    for axis in (0, 1):
        sums = d.sum(axis) / np.sqrt(SIDE)
        assert np.abs(sums).max() < SIGMAS
        # Their squares: a chi-square of as many degrees.
        assert abs((sums**2).sum() - SIDE) < SIGMAS * np.sqrt(2 * SIDE)


@by_key
def test_numbers_are_uniform_in_every_place_of_a_word(key):
    bits = square(key)
    rows, columns = (np.arange(SIDE) // 8 % 2,) * 2
    for q, k in itertools.product((0, 1), repeat=2):
        assert_uniform(bits[rows == q][:, columns == k], 128)


def assert_uniform(numbers, levels):
    counts = np.bincount(numbers.ravel(), minlength=levels)
    expected = numbers.size / levels
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - (levels - 1)) < SIGMAS * np.sqrt(2 * (levels - 1))


# From a pair to another one: of its word, of the next key's, with which it shares a
# product, and of the next query's.
TO_ANOTHER = [(0, 8), (8, 0), (8, 8), (0, 1), (8, 1), (0, 9), (8, 9), (1, 0), (1, 1)]


@by_key
@pytest.mark.parametrize("by", TO_ANOTHER, ids=str)
@pytest.mark.parametrize("bits", ["upper", "lower"])
def test_two_numbers_are_independent(key, by, bits):
    """Of their halves all 256 combinations are as frequent."""
    halves = square(key) >> (3 if bits == "upper" else 0) & 15
    blocks = halves.reshape(SIDE // 16, 16, SIDE // 16, 16)
    here = blocks[:, : 16 - by[0], :, : 16 - by[1]]
    there = blocks[:, by[0] :, :, by[1] :]
    assert_uniform(here * 16 + there, 256)


@by_key
@pytest.mark.parametrize("threshold", THRESHOLDS[1:])
def test_no_pair_says_anything_about_another(key, threshold):
    """Of all distances at once: the largest correlation is that of chance."""
    d = deviations(square(key), threshold)
    spectrum = np.abs(np.fft.rfft2(d)) ** 2
    correlations = np.fft.irfft2(spectrum, s=d.shape) / SIDE
    correlations[0, 0] = 0
    assert np.abs(correlations).max() < 6.5
    # Nor is there a period.
    assert spectrum[1:, 1:].max() / SIDE**2 < 25


def test_members_heads_and_seeds_are_independent():
    """Correlations at every distance between the squares of neighbours."""
    side = 256
    keys = [
        *keys_of(0, 2, 4).reshape(-1, 2),
        *(keys_of(s)[0, 0] for s in (1, 2, 2**31)),
    ]
    keys += [keys_of(jax.random.key(s))[0, 0] for s in (0, 1)]
    spectra = [np.fft.rfft2(deviations(square(key, side), 64)) for key in keys]
    for a, b in itertools.combinations(spectra, 2):
        found = np.fft.irfft2(a * b.conj(), s=(side, side)) / side
        assert np.abs(found).max() < 6.5


def test_keys_differ():
    """Of many members, heads and seeds; no word comes twice among 2**17 of 32 bits."""
    keys = np.concatenate([keys_of(seed, 64, 64).reshape(-1, 2) for seed in range(16)])
    assert len(np.unique(keys, axis=0)) == len(keys)
    for words in keys.T:  # birthdays: about half a pair of so many is expected
        assert len(words) - len(np.unique(words)) <= 6
        bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
        assert np.abs(bits.mean(0) - 0.5).max() < SIGMAS * 0.5 / np.sqrt(len(words))
