"""Hopper's forward kernel in 8 bits on a CPU, thread by thread, against float64.

As test_emulated.py: the very sources that a GPU runs, launchers too, here with clusters
and with V transposed on the way. What lies beside arrays is NaN. The bars are those of
fp8/test_fp8_kernels.py, which asks the same of a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_launches import E4M3, I8, SM90, Attention, BlockScales, workspace_bytes
from paged_problems import HostMemory

pytestmark = pytest.mark.wide

NARROW = ml_dtypes.float8_e4m3fn
NAN = 0x7F
BLOCK = 128  # rows that share a scale
ROW = LSE = 0.09  # of a row's size, and of lse, that random rows may be off by


@pytest.fixture(params=[3, 40])
def emulated(request, fp8_library: Path) -> Iterator[ctypes.CDLL]:
    """The library, for a GPU of so many multiprocessors; of three: one cluster."""
    loaded = ctypes.CDLL(str(fp8_library))
    loaded.emulator_set_multiprocessors(request.param)
    loaded.emulator_clustered_ctas()
    yield loaded
    loaded.emulator_set_multiprocessors(3)


@dataclasses.dataclass
class Problem:
    """Arrays of e4m3, or q and k of int8, `[B, T, heads, dim]`; scales, and options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scales: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    window: tuple[int, int] = (-1, -1)
    q_lens: np.ndarray | None = None
    kv_lens: np.ndarray | None = None
    shift: np.ndarray | None = None
    segments: tuple[np.ndarray, np.ndarray] | None = None
    sinks: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in "qkv":
            heads = getattr(self, name).shape[2]
            self.scales.setdefault(name, np.ones((1, heads, 1), np.float32))

    def mask(self) -> np.ndarray:
        """Who attends to whom, `[B, T, S]`."""
        batch, t = self.q.shape[:2]
        i, j = np.arange(t)[:, None], np.arange(self.k.shape[1])

        def column(x: np.ndarray | None, other: int) -> np.ndarray:
            return (np.full(batch, other) if x is None else x)[:, None, None]

        at = i + column(self.shift, 0)
        left, right = self.window
        mask = (i < column(self.q_lens, t)) & (j < column(self.kv_lens, len(j)))
        mask = (
            mask & ((left < 0) | (j >= at - left)) & ((right < 0) | (j <= at + right))
        )
        if self.segments:
            own, other = self.segments
            mask &= own[:, :, None] == other[:, None]
        return mask

    def exact(self, name: str) -> np.ndarray:
        """What an array stands for, in float64."""
        x, scales = getattr(self, name), self.scales[name].astype(np.float64)
        scales = np.repeat(scales, len(x) // len(scales), 0).swapaxes(1, 2)
        if scales.shape[1] > 1:
            scales = np.repeat(scales, BLOCK, 1)[:, : x.shape[1]]
        return x.astype(np.float64) * scales[..., None]

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """out `[B, T, N, E]` and lse `[B, N, T]`."""
        mask = self.mask()[:, None]
        q, k, v = (self.exact(name).swapaxes(1, 2) for name in "qkv")
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = mask.any(2)[..., None]
        k, v = np.where(seen, k, 0), np.where(seen, v, 0)
        scores = np.where(mask, self.scale * q @ k.swapaxes(2, 3), -np.inf)
        sinks = np.full(q.shape[1], -np.inf) if self.sinks is None else self.sinks
        lens = np.full(len(q), q.shape[2]) if self.q_lens is None else self.q_lens
        there = np.arange(q.shape[2])[:, None] < lens[:, None, None, None]
        sink = np.where(there, sinks[:, None, None], -np.inf)  # a score with no value
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.maximum(top, -1e30)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True) + np.exp(sink - top)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(total == 0, 0, p @ v / total)
            return out.swapaxes(1, 2), (np.log(total) + top)[..., 0]


def attend(library: ctypes.CDLL, x: Problem) -> tuple[np.ndarray, np.ndarray]:
    """out and lse in float64; nothing is written beside them."""
    memory = HostMemory()
    (batch, t, heads, dim), (_, s, kv_heads, value_dim) = x.q.shape, x.v.shape
    dtype = I8 if x.q.dtype == np.int8 else E4M3
    a = Attention(kernels=SM90, dtype=dtype, batch=batch, num_heads=heads)
    a.num_kv_heads, a.q_len, a.kv_len = kv_heads, t, s
    a.head_dim, a.value_dim, a.scale = dim, value_dim, x.scale
    a.window_left, a.window_right = x.window
    for name in "qkv":
        setattr(a, name, memory.give(getattr(x, name)))
        scales = x.scales[name].astype(np.float32)
        described = BlockScales(memory.give(scales), len(scales), scales.shape[2])
        setattr(a, f"{name}_scales", described)
    for name in ("q_lens", "kv_lens", "shift"):
        if (given := getattr(x, name)) is not None:
            setattr(a, name, memory.give(given.astype(np.int32)))
    for side, ids in zip(("q", "kv"), x.segments or (), strict=False):
        chunks = [ids[:, i : i + 64] for i in range(0, ids.shape[1], 64)]
        ranges = np.array([[c.min(1), c.max(1)] for c in chunks], np.int32)
        setattr(a, f"{side}_segments", memory.give(ids.astype(np.int32)))
        ranges_at = memory.give(ranges.transpose(2, 0, 1))
        setattr(a, f"{side}_segment_ranges", ranges_at)
    if x.sinks is not None:
        a.sinks, a.sink_batch = memory.give(x.sinks.astype(np.float32)), 1
    out = memory.empty(batch * t * heads * value_dim * 2)
    lse = memory.empty(batch * heads * t * 4)
    workspace = memory.empty(workspace_bytes(library, a, "forward"))
    a.o, a.lse, a.workspace = (y.ctypes.data for y in (out, lse, workspace))
    launch = library.kvblock_attention_forward
    launch.restype = ctypes.c_char_p
    error = launch(ctypes.byref(a.of("forward")), None)
    assert error is None, error
    assert memory.untouched(), "a write beside an array"
    wide = out.view(ml_dtypes.bfloat16).astype(np.float64)
    return (
        wide.reshape(batch, t, heads, value_dim),
        lse.view(np.float32).astype(np.float64).reshape(batch, heads, t),
    )


def agree(library: ctypes.CDLL, x: Problem) -> None:
    (out, lse), (out_is, lse_is) = attend(library, x), x.truth()
    off = np.linalg.norm(out - out_is, axis=-1)
    size = np.linalg.norm(out_is, axis=-1)
    assert (off <= ROW * size + 1e-6 * size.max()).all(), (off / (size + 1e-30)).max()
    nothing = np.isinf(lse_is)
    assert (lse[nothing] == -np.inf).all()
    assert (out[out_is.any(-1) == 0] == 0).all()
    assert (np.abs(lse[~nothing] - lse_is[~nothing]) <= LSE).all()


def narrowed(
    x: np.ndarray, shared: str, dtype: Any = NARROW
) -> tuple[np.ndarray, np.ndarray]:
    """`[B, T, heads, dim]` in 8 bits, and scales: of each head, or of its blocks."""
    largest = 127 if dtype == np.int8 else 448
    rows = max(x.shape[1], 1) if shared == "head" else BLOCK
    parts = [x[:, i : i + rows] for i in range(0, x.shape[1], rows)]
    parts = parts or [np.zeros_like(x, shape=(len(x), 1, *x.shape[2:]))]
    scales = np.stack([np.abs(part).max((1, 3)) / largest for part in parts], -1)
    scales = np.maximum(scales, 1e-9).astype(np.float32)
    each = np.repeat(scales.swapaxes(1, 2), rows, 1)[:, : x.shape[1], :, None]
    exact = x / each
    return (np.rint(exact) if dtype == np.int8 else exact).astype(dtype), scales


def drawn(
    rng: np.random.Generator,
    sizes: tuple[int, ...],
    shared: str = "block",
    dtype: Any = NARROW,
    **options: Any,
) -> Problem:
    """Random numbers; blocks differ in size, and so do rows of q. dtype: of q and k."""
    b, t, s, n, k, d, e = (*sizes, sizes[5])[:7]
    q = rng.normal(size=(b, t, n, d)) * rng.uniform(0.1, 3, (b, t, 1, 1))
    keys = rng.normal(size=(b, s, k, d))
    keys *= np.repeat(rng.uniform(0.3, 1.7, (b, s, 1, 1))[:, ::BLOCK], BLOCK, 1)[:, :s]
    values = rng.normal(size=(b, s, k, e)) * rng.uniform(0.5, 2, (b, 1, k, 1))
    arrays, scales = {}, {}
    for name, x in (("q", q), ("k", keys), ("v", values)):
        how = ("head", NARROW) if name == "v" else (shared, dtype)
        arrays[name], scales[name] = narrowed(x, *how)
    return Problem(**arrays, scales=scales, scale=d**-0.5, **options)


CAUSAL = {"window": (-1, 0)}
# Sizes, options, and whether CTAs are clusters.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], bool]] = {
    "neighbours": ((2, 256, 200, 4, 2, 64), {}, True),
    "neighbours past the end": ((1, 2060, 40, 1, 1, 64), {}, True),
    "heads": ((1, 300, 300, 4, 2, 128), CAUSAL, True),
    "a window of heads": ((1, 260, 260, 2, 1, 64), {"window": (60, 9)}, True),
    "rounds": ((5, 140, 140, 4, 2, 64), CAUSAL, True),
    "causal": ((1, 300, 300, 2, 2, 128), CAUSAL, False),
    "a window": ((1, 390, 390, 2, 2, 128), {"window": (100, 17)}, False),
    "96 by 80": ((1, 200, 390, 2, 2, 96, 80), CAUSAL, False),
    "16": ((1, 130, 140, 2, 1, 16), {}, True),
    "few queries": ((3, 5, 390, 8, 2, 128), {}, False),
    "many blocks of keys": ((1, 20, 4500, 1, 1, 64), {}, False),
    "no keys": ((1, 20, 0, 1, 1, 64), {}, False),
}


OF_SCORES = pytest.mark.parametrize("dtype", [NARROW, np.int8], ids=["e4m3", "int8"])


@OF_SCORES
@pytest.mark.parametrize("shared", ["head", "block"])
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, shared, dtype, rng, emulated):
    sizes, options, clustered = CASES[name]
    agree(emulated, drawn(rng, sizes, shared, dtype, **options))
    assert (emulated.emulator_clustered_ctas() > 0) == clustered


LENGTHS = {
    "q_lens": np.array([300, 17, 0, 299]),
    "kv_lens": np.array([390, 129, 50, 0]),
    "shift": np.array([100, 0, 7, 3]),
}


@OF_SCORES
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (150, 20)])
def test_what_lies_beyond_lengths_is_never_seen(window, dtype, rng, emulated):
    x = drawn(rng, (4, 300, 390, 2, 1, 64), dtype=dtype, window=window, **LENGTHS)
    for name, lens in (("q", x.q_lens), ("k", x.kv_lens), ("v", x.kv_lens)):
        array = getattr(x, name).view(np.uint8)
        for b, length in enumerate(lens):
            array[b, length:] = NAN
    agree(emulated, x)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)])
def test_segments(window, rng, emulated):
    x = drawn(rng, (2, 300, 300, 2, 2, 64), window=window)
    ids = np.sort(rng.integers(0, 4, (2, 300)), axis=1)
    x.segments = (ids, ids)
    agree(emulated, x)


def test_sinks(rng, emulated):
    x = drawn(rng, (2, 130, 300, 2, 1, 64), window=(100, 0))
    agree(emulated, dataclasses.replace(x, sinks=np.array([0.5, 6.0])))


@OF_SCORES
def test_scores_that_grow_from_tile_to_tile(dtype, rng, emulated):
    """References move with every tile, and with them O, and sums of tiles before."""
    x = drawn(rng, (1, 130, 900, 2, 2, 128), dtype=dtype)
    x.scales["k"] = x.scales["k"] * np.float32([0.1, 1, 2, 3, 4, 5, 7, 9])
    agree(emulated, x)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_integers_of_which_one_is_many_bits(window, rng, emulated):
    """Of some tiles a step of an integer is a large part of an exponent.

    Their scores are small numbers, with few steps; a row's reference goes on from tiles
    of the one kind to tiles of the other.
    """
    q = rng.integers(-2, 3, (1, 500, 2, 64)).astype(np.int8)
    k = rng.integers(-2, 3, (1, 500, 1, 64)).astype(np.int8)
    k[:, 128:256] = rng.integers(-127, 128, (1, 128, 1, 64))
    v, v_scales = narrowed(rng.normal(size=(1, 500, 1, 64)), "head")
    k_scales = np.float32([[[0.1, 0.002, 0.15, 0.05]]])
    scales = {"k": k_scales, "v": v_scales}
    agree(emulated, Problem(q, k, v, scales, window=window))


@pytest.mark.parametrize("deviation", [0.5, 1.0, 1.3])
def test_rows_of_normal_scores_keep_their_first_reference(deviation, rng, emulated):
    """Rows look at their maxima once, in their first tile, and hardly ever again.

    The largest of 2,048 scores is well above that of the first 128.
    """
    q, k, v = (rng.normal(size=(1, n, 2, 64)) for n in (128, 2048, 2048))
    q *= deviation * 8 / np.linalg.norm(q, axis=-1, keepdims=True)
    arrays = {name: narrowed(x, "head") for name, x in (("q", q), ("k", k), ("v", v))}
    scales = {name: scales for name, (_, scales) in arrays.items()}
    x = Problem(*(array for array, _ in arrays.values()), scales, scale=64**-0.5)
    emulated.emulator_references()
    agree(emulated, x)
    once = 128 * 2 * 4 // 2  # of each head: a row has four threads, a thread two rows
    looked = emulated.emulator_references()
    assert once <= looked < 1.5 * once


@pytest.mark.parametrize(
    ("large", "score", "keys"),
    [(1, 13.5, 4100), (10, 12.9, 8200), (49, 12.0, 33000)],
    ids=["one", "ten", "many"],
)
def test_many_small_probabilities_stay_beside_large_ones(
    large, score, keys, rng, emulated
):
    """Keys of 2^-13 of the largest probability count, as there are thousands of them.

    One key that stands out, as a sink does; or more, so that the first tile looks as if
    even larger ones were to come, and room for these would cost the small ones.
    """
    k = np.zeros((1, keys, 1, 64))
    k[0, :large, 0, 0] = score  # as a power of 2
    k[0, :, 0, 1] = rng.normal(size=keys) * 0.2
    v = rng.normal(size=(1, keys, 1, 64))
    q = np.zeros((1, 70, 1, 64), NARROW)
    q[..., :2] = 1
    (k, k_scales), (v, v_scales) = narrowed(k, "head"), narrowed(v, "head")
    x = Problem(q, k, v, {"k": k_scales, "v": v_scales}, scale=np.log(2))
    (_, lse), (_, lse_is) = attend(emulated, x), x.truth()
    of_small = np.log1p(keys / large * 2.0**-score)
    assert of_small > 0.1
    assert np.abs(lse - lse_is).max() < 0.2 * of_small


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_equal_scores_give_the_mean(dim, causal, rng, emulated):
    """All probabilities are one number, exact in e4m3: no key is lost or twice."""
    s = 390
    v = rng.integers(-8, 9, (2, s, 1, dim)).astype(NARROW)
    q, k = np.zeros((2, s, 2, dim), NARROW), np.ones((2, s, 1, dim), NARROW)
    scales = {"v": np.full((1, 1, 1), 0.25, np.float32)}
    x = Problem(q, k, v, scales, window=(-1, 0 if causal else -1))
    out, lse = attend(emulated, x)
    mean, lse_is = x.truth()
    assert (np.abs(out - mean) <= 2.0**-8 * np.abs(mean) + 1e-5).all()
    assert np.abs(lse - lse_is).max() < 1e-4


@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("largest", [-128, 127])
def test_the_largest_sums_of_integers(largest, value_dim, rng, emulated):
    """Of all columns the same sign: a score is the largest there is, or the least."""
    q = np.full((1, 130, 2, 128), largest, np.int8)
    q[:, ::3] = -127
    k = np.full((1, 300, 1, 128), largest, np.int8)
    k[:, rng.random(300) < 0.5] = 127
    v, scales = narrowed(rng.normal(size=(1, 300, 1, value_dim)), "head")
    agree(emulated, Problem(q, k, v, {"v": scales}, scale=2.0**-19, window=(-1, 0)))


@OF_SCORES
@pytest.mark.parametrize("dim", [64, 128])
def test_each_query_finds_its_key(dim, dtype, rng, emulated):
    """One key's probability is 1, the others' vanish: no key is another's."""
    s = 300
    signs = rng.choice([-1.0, 1.0], (s, dim))
    mine = rng.permutation(s)
    v = rng.normal(size=(s, dim)).astype(NARROW)
    q, k = (signs[mine] * 4).astype(dtype), signs.astype(dtype)
    x = Problem(q[None, :, None], k[None, :, None], v[None, :, None])
    out, lse = attend(emulated, x)
    assert (out[0, :, 0] == v[mine].astype(np.float64)).all()
    assert (np.abs(lse - 4 * dim) < LSE).all()


@OF_SCORES
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("scale", [-1.0, np.nan])
def test_bad_scales_make_nan_of_what_they_reach(name, scale, dtype, rng, emulated):
    x = drawn(rng, (2, 130, 140, 4, 2, 64), "head", dtype)
    x.scales[name][1, 1] = scale
    out, lse = attend(emulated, x)
    reached = np.zeros((2, 4), bool)
    reached[1, [1] if name == "q" else [2, 3]] = True
    assert (np.isnan(out).all((1, 3)) == reached).all()
    assert (np.isnan(out).any((1, 3)) == reached).all()
    if name != "v":
        assert (np.isnan(lse).all(2) == reached).all()


@OF_SCORES
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (60, 9)])
def test_scales_of_zero(window, dtype, rng, emulated):
    """Keys that stand for zeros: all scores are equal."""
    x = drawn(rng, (1, 260, 260, 2, 2, 64), dtype=dtype, window=window)
    x.scales["k"][:] = 0
    out, lse = attend(emulated, x)
    mean, lse_is = x.truth()
    assert (np.abs(out - mean) <= 2.0**-8 * np.abs(mean) + 1e-5).all()
    assert np.abs(lse - lse_is).max() < 1e-4


@pytest.mark.parametrize("row", [7, 140])
def test_nan_in_a_query_stays(row, rng, emulated):
    x = drawn(rng, (1, 260, 300, 2, 2, 128))
    x.q.view(np.uint8)[0, row, 1, 5] = NAN
    out, lse = attend(emulated, x)
    hit = np.zeros((260, 2), bool)
    hit[row, 1] = True
    assert (np.isnan(out[0]).all(-1) == hit).all()
    assert (np.isnan(out[0]).any(-1) == hit).all()
    assert (np.isnan(lse[0].T) == hit).all()


@pytest.mark.parametrize("key", [7, 140])
def test_nan_in_a_key_stays(key, rng, emulated):
    """Of all queries that see it, in the first tile or later."""
    x = drawn(rng, (1, 200, 200, 1, 1, 64), window=(-1, 0))
    x.k.view(np.uint8)[0, key, 0, 5] = NAN
    out, lse = attend(emulated, x)
    hit = np.arange(200) >= key
    assert (np.isnan(out[0, :, 0]).all(-1) == hit).all()
    assert (np.isnan(lse[0, 0]) == hit).all()


@pytest.mark.parametrize("key", [7, 140])
def test_nan_in_a_value_stays_in_its_column(key, rng, emulated):
    x = drawn(rng, (1, 200, 200, 1, 1, 64), window=(-1, 0))
    x.v.view(np.uint8)[0, key, 0, 5] = NAN
    out, _ = attend(emulated, x)
    assert np.isnan(out[0, key:, 0, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=-1)).all()
    assert np.isfinite(out[0, : key // BLOCK * BLOCK]).all()  # earlier tiles' rows


def test_other_dims_are_not_served(rng, emulated):
    x = drawn(rng, (1, 20, 20, 1, 1, 64))
    with pytest.raises(AssertionError, match="multiples of 16 up to 128"):
        attend(emulated, dataclasses.replace(x, q=x.q[..., :40], k=x.k[..., :40]))
