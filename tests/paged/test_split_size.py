"""`split_size`: a row of `paged_attention` has the same bits in every call."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvblock as kv

HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 8, 2, 64, 16, 400
# (queries, keys) of each sequence.
SEQUENCES = ((1, 1500), (3, 20), (40, 300), (1, 700), (9, 257), (1, 0), (2, 1024))


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def cache(request) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    spec = kv.BlockSpec(2, 2, SIZE, KV_HEADS, DIM, request.param)
    blocks = rng.standard_normal((BLOCKS, *spec.block_shape))
    pool = kv.KVPool(jnp.asarray(blocks, request.param), spec)
    order, tables = iter(rng.permutation(BLOCKS)), []
    for _, keys in SEQUENCES:
        tables.append([int(next(order)) for _ in range(-(-keys // SIZE))])
    q = [
        jnp.asarray(rng.standard_normal((n, HEADS, DIM)), request.param)
        for n, _ in SEQUENCES
    ]
    return {"pool": pool, "tables": tables, "q": q}


def attend(cache, members, more_width=0, rows_after=0, **options):
    """The rows of these sequences, in this order, and lse; of each a pair."""
    tables = [cache["tables"][b] for b in members]
    width = max(max(map(len, tables)), 1) + more_width
    starts = np.cumsum([0, *(SEQUENCES[b][0] for b in members)])
    q = jnp.concatenate([cache["q"][b] for b in members])
    out, lse = kv.paged_attention(
        jnp.pad(q, ((0, rows_after), (0, 0), (0, 0)), constant_values=jnp.nan),
        cache["pool"],
        jnp.int32(1),
        np.array([t + [-1] * (width - len(t)) for t in tables]),
        np.array([SEQUENCES[b][1] for b in members]),
        query_start=starts,
        return_lse=True,
        **options,
    )
    out, lse = (np.asarray(a.astype(jnp.float32)) for a in (out, lse))
    return [(out[i:j], lse[i:j]) for i, j in itertools.pairwise(starts)]


def same(a, b) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_a_row_has_the_same_bits_in_any_batch(cache):
    """Alone, in another order, with other widths of tables and padding behind."""
    everyone = range(len(SEQUENCES))
    whole = attend(cache, everyone, split_size=256)
    others = attend(cache, everyone, more_width=77, rows_after=50, split_size=256)
    turned = attend(cache, everyone[::-1], split_size=256)[::-1]
    for b in everyone:
        (alone,) = attend(cache, [b], split_size=256)
        assert same(whole[b], alone), b
        assert same(whole[b], others[b]), b
        assert same(whole[b], turned[b]), b


def test_the_padded_form_and_vmap_have_the_same_bits(cache):
    whole = attend(cache, range(len(SEQUENCES)), split_size=256)
    width, longest = max(map(len, cache["tables"])), max(n for n, _ in SEQUENCES)
    tables = np.array([t + [-1] * (width - len(t)) for t in cache["tables"]])
    q = jnp.stack(
        [jnp.pad(a, ((0, longest - len(a)), (0, 0), (0, 0))) for a in cache["q"]]
    )
    lens = np.array([n for _, n in SEQUENCES])
    q_lens = np.array([n for n, _ in SEQUENCES])

    def padded(q, tables, lens, q_lens):
        return kv.paged_attention(
            q,
            cache["pool"],
            jnp.int32(1),
            tables,
            lens,
            q_lens=q_lens,
            split_size=256,
            return_lse=True,
        )

    one_each = (a[:, None] for a in (q, tables, lens, q_lens))
    by_vmap = jax.vmap(padded)(*map(jnp.asarray, one_each))
    for out, lse in (padded(q, tables, lens, q_lens), (a[:, 0] for a in by_vmap)):
        out, lse = (np.asarray(a.astype(jnp.float32)) for a in (out, lse))
        for b, (n, _) in enumerate(SEQUENCES):
            assert same(whole[b], (out[b, :n], lse[b, :n])), b


def test_it_changes_rounding_alone(cache):
    everyone = range(len(SEQUENCES))
    bar = 2e-2 if cache["q"][0].dtype == jnp.bfloat16 else 1e-5
    plain, split = attend(cache, everyone), attend(cache, everyone, split_size=512)
    for a, b in zip(plain, split, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=bar, atol=bar)


@pytest.mark.parametrize("name", ["ranges", "tree_mask"])
@pytest.mark.parametrize("members", [[1], [2, 4]])
def test_every_row_keeps_its_own_mask(cache, name, members):
    """Rows that fill no whole tile, in all or behind the last whole one."""
    rng = np.random.default_rng(5)
    rows = sum(SEQUENCES[b][0] for b in members)
    keys = max(SEQUENCES[b][1] for b in members)
    masks = {
        "ranges": np.sort(rng.integers(0, keys, (rows, 2))).astype(np.int32),
        "tree_mask": rng.integers(0, 2**32, (rows, 2), np.uint32),
    }
    given = {name: masks[name]}
    bar = 2e-2 if cache["q"][0].dtype == jnp.bfloat16 else 1e-5
    plain = attend(cache, members, **given)
    split = attend(cache, members, split_size=256, **given)
    for a, b in zip(plain, split, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=bar, atol=bar)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16"], indirect=True)
def test_the_kernels_keep_bits(cache):
    """By name, so that plain JAX does not stand in."""
    options = {"split_size": 256, "implementation": "cuda"}
    whole = attend(cache, range(len(SEQUENCES)), **options)
    for b in range(len(SEQUENCES)):
        (alone,) = attend(cache, [b], more_width=b, **options)
        assert same(whole[b], alone), b


@pytest.mark.parametrize("split_size", [0, -1, 2**31, 2.5, True, "256"])
def test_a_wrong_one_is_told(cache, split_size):
    with pytest.raises(ValueError, match="split_size must be a positive integer"):
        attend(cache, [0], split_size=split_size)
