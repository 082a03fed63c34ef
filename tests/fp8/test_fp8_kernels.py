"""Hopper's kernel in 8 bits, by JAX, against float64 of what its operands stand for.

Probabilities are rounded to codes of e4m3, so a row of random numbers is within a few
per cent of the truth; calls whose probabilities are exact in e4m3 are held to bfloat16.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served_kernels import skip_unless_served

from jax_kvblock import AttentionScales, flash_attention
from jax_kvblock.fp8 import FP8AttentionConfig, fp8_attention, quantize_qkv
from jax_kvblock.fp8.quantize import QuantizedQKV

E4M3 = jnp.float8_e4m3fn
ROW = 0.09  # of a row's size, that a row may be off by
LSE = 0.09

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    skip_unless_served("cuda_sm90", backward=False)


def arrays(rng, b, t, s, n, k, d, e=None, size=1.0):
    e = e or d
    shapes = (b, t, n, d), (b, s, k, d), (b, s, k, e)
    return [jnp.asarray(rng.normal(0, size, x), jnp.bfloat16) for x in shapes]


def widened(x, scales):
    """float64, of `[B, T, H, D]` and scales `[b, H, blocks]`."""
    x, scales = np.asarray(x.astype(jnp.float32), np.float64), np.asarray(scales)
    scales = np.repeat(scales, x.shape[0] // scales.shape[0], 0).swapaxes(1, 2)
    if scales.shape[1] > 1:
        scales = np.repeat(scales, 128, 1)[:, : x.shape[1]]
    return x * scales[..., None]


def truth(x, mask, scale):
    """out and lse `[B, T, N]` in float64; mask: `[B or 1, T, S]`."""
    q, k, v = (
        widened(x.q, x.scales.q),
        widened(x.k, x.scales.k),
        widened(x.v, x.scales.v),
    )
    group = q.shape[2] // k.shape[2]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3])
    for n in range(q.shape[2]):
        scores = scale * q[:, :, n] @ k[:, :, n // group].swapaxes(1, 2)
        scores = np.where(mask, scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse[..., n] = (np.log(total) + top)[..., 0]
            v_here = np.where(mask.any(1)[..., None], v[:, :, n // group], 0)
            out[..., n, :] = np.where(total > 0, p @ v_here / total, 0)
    return out, lse


def agree(got, want, row=ROW, lse_bar=LSE):
    (out, lse), (out_is, lse_is) = got, want
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    out, lse = np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse)
    off = np.linalg.norm(out - out_is, axis=-1)
    size = np.linalg.norm(out_is, axis=-1)
    assert (off <= row * size + 1e-6 * size.max()).all(), (off / (size + 1e-30)).max()
    nothing = np.isinf(lse_is)
    assert (lse[nothing] == -np.inf).all() and (out[nothing] == 0).all()
    assert np.abs(lse[~nothing] - lse_is[~nothing]).max() <= lse_bar


CASES = {
    "wide": ((2, 256, 256, 4, 2, 128), {}),
    "causal": ((1, 1000, 1000, 4, 2, 128), {"causal": True}),
    "neighbours": ((1, 2304, 2304, 3, 1, 128), {"causal": True}),
    "64": ((2, 520, 700, 6, 3, 64), {}),
    "96 by 80": ((1, 300, 500, 2, 2, 96, 80), {"causal": True}),
    "16": ((1, 130, 140, 2, 1, 16), {}),
    "window": ((1, 900, 900, 4, 4, 128), {"window": (200, 17)}),
    "few queries": ((3, 5, 1300, 8, 2, 128), {}),
    "rounds": ((40, 200, 200, 16, 2, 64), {"causal": True}),
    "long": ((1, 512, 9000, 2, 1, 128), {}),
}


OF_SCORES = pytest.mark.parametrize("qk_dtype", ["float8_e4m3fn", "int8"])


@OF_SCORES
@pytest.mark.parametrize("shared", ["tensor", "head", "block"])
@pytest.mark.parametrize("name", CASES)
def test_as_float64(name, shared, qk_dtype, rng):
    sizes, options = CASES[name]
    q, k, v = arrays(rng, *sizes)
    q = q * jnp.asarray(rng.uniform(0.1, 3, (*q.shape[:2], 1, 1)), jnp.bfloat16)
    config = FP8AttentionConfig(shared, shared, qk_dtype=qk_dtype)
    x = quantize_qkv(q, k, v, config)
    attend = jax.jit(functools.partial(flash_attention, return_lse=True, **options))
    got = attend(x.q, x.k, x.v, scales=x.scales)
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    left, right = options.get("window", (None, None))
    mask = np.ones((1, len(i), j.size), bool)
    mask &= (j <= i) | (not options.get("causal"))
    mask &= (left is None or j >= i - left) & (right is None or j <= i + right)
    agree(got, truth(x, mask, q.shape[-1] ** -0.5))


@OF_SCORES
def test_lengths_offsets_and_what_is_never_read(qk_dtype, rng):
    q, k, v = arrays(rng, 4, 300, 400, 4, 2, 128)
    q_lens, kv_lens = np.array([300, 17, 0, 299]), np.array([400, 129, 50, 0])
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    x = quantize_qkv(q, k, v, config, q_lens=q_lens, kv_lens=kv_lens)

    def spoiled(a, lens):
        beyond = np.arange(a.shape[1])[None] >= lens[:, None]
        bad = 127 if a.dtype == jnp.int8 else jnp.nan
        return jnp.where(beyond[..., None, None], jnp.asarray(bad, a.dtype), a)

    q8, k8, v8 = (
        spoiled(a, lens) for a, lens in ((x.q, q_lens), (x.k, kv_lens), (x.v, kv_lens))
    )
    options = dict(q_lens=q_lens, kv_lens=kv_lens, q_offset=np.array([100, 0, 7, 3]))
    got = flash_attention(
        q8, k8, v8, scales=x.scales, causal=True, return_lse=True, **options
    )
    i, j = np.arange(300)[None, :, None], np.arange(400)[None, None]
    mask = j <= i + options["q_offset"][:, None, None]
    mask &= (i < q_lens[:, None, None]) & (j < kv_lens[:, None, None])
    agree(got, truth(x, mask, 128**-0.5))


def test_segments(rng):
    q, k, v = arrays(rng, 2, 700, 700, 4, 4, 64)
    ids = np.sort(rng.integers(0, 5, (2, 700)), axis=1)
    x = quantize_qkv(q, k, v)
    got = flash_attention(
        x.q, x.k, x.v, scales=x.scales, segment_ids=ids, causal=True, return_lse=True
    )
    mask = (ids[:, :, None] == ids[:, None]) & np.tril(np.ones((700, 700), bool))
    agree(got, truth(x, mask, 64**-0.5))


def ones(b, heads):
    return jnp.ones((b, heads, 1), jnp.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_equal_scores_give_the_mean_to_the_last_bit_but_one(dim, causal, rng):
    """All probabilities are one number, exact in e4m3: no key is lost or twice."""
    t = s = 1500
    v = jnp.asarray(rng.integers(-8, 9, (2, s, 2, dim)), E4M3)
    q, k = jnp.zeros((2, t, 4, dim), E4M3), jnp.ones((2, s, 2, dim), E4M3)
    scales = AttentionScales(ones(1, 4), ones(1, 2), ones(1, 2) / 4)
    out, lse = flash_attention(
        q, k, v, scales=scales, causal=causal, return_lse=True, scale=1.0
    )
    wide = np.asarray(v.astype(jnp.float32), np.float64) / 4
    counts = np.arange(1, t + 1) if causal else np.full(t, s)
    total = np.cumsum(wide, 1) if causal else wide.sum(1, keepdims=True)
    mean = np.repeat(total / counts[None, :, None, None], 2, axis=2)
    off = np.abs(np.asarray(out.astype(jnp.float32)) - mean)
    assert (off <= 2.0**-8 * np.abs(mean) + 1e-5).all()
    assert np.abs(lse - np.log(counts)[None, :, None]).max() < 1e-4


def test_the_largest_sums_of_integers(rng):
    """Rows of one number each: scores are the largest there are, and less."""
    rows, keys = rng.choice([-128, 127], (300, 2)), rng.choice([-128, 127], 700)
    q, k = (np.repeat(x[..., None], 128, -1).astype(np.int8) for x in (rows, keys))
    assert (q.astype(int) @ k.astype(int).T).max() == 2**21
    v = jnp.asarray(rng.normal(size=(1, 700, 1, 128)), E4M3)
    scales = AttentionScales(ones(1, 2), ones(1, 1), ones(1, 1))
    q, k = jnp.asarray(q[None]), jnp.asarray(k[None, :, None])
    x = QuantizedQKV(q, k, v, scales, None)
    got = flash_attention(
        q, k, v, scales=scales, causal=True, scale=2.0**-19, return_lse=True
    )
    agree(got, truth(x, np.tri(300, 700, dtype=bool)[None], 2.0**-19))


@OF_SCORES
@pytest.mark.parametrize("dim", [64, 128])
def test_each_query_finds_its_key(dim, qk_dtype, rng):
    """One key's probability is 1, the others' vanish: no key is another's."""
    t = s = 1111
    signs = rng.choice([-1.0, 1.0], (s, dim))
    mine = rng.integers(0, s, t)
    q, k = jnp.asarray(signs[mine] * 4, qk_dtype), jnp.asarray(signs, qk_dtype)
    v = jnp.asarray(rng.normal(size=(s, dim)), E4M3)
    scales = AttentionScales(*(jnp.float32(1),) * 3)
    out = flash_attention(
        q[None, :, None], k[None, :, None], v[None, :, None], scales=scales, scale=1.0
    )
    assert (out[0, :, 0] == v[mine].astype(jnp.bfloat16)).all()


def test_long_sums_are_float32(rng):
    """Sums of positive numbers: the tensor cores' own sums would lose their ends."""
    s = 1 << 17
    v = jnp.asarray(rng.uniform(0.5, 1.5, (1, s, 1, 128)), E4M3)
    q, k = jnp.zeros((1, 128, 1, 128), E4M3), jnp.zeros((1, s, 1, 128), E4M3)
    scales = AttentionScales(*(jnp.float32(1),) * 3)
    out, lse = flash_attention(q, k, v, scales=scales, return_lse=True)
    mean = np.asarray(v.astype(jnp.float32), np.float64).mean(1)[0, 0]
    assert np.abs(np.asarray(out.astype(jnp.float32))[0, :, 0] / mean - 1).max() < 2**-8
    assert np.abs(lse - np.log(s)).max() < 1e-4


@OF_SCORES
def test_scores_that_grow_from_tile_to_tile(qk_dtype, rng):
    """References move with every tile, and O with them."""
    q, k, v = arrays(rng, 1, 256, 2048, 2, 2, 128)
    k = k * jnp.linspace(0.1, 8, 2048, dtype=jnp.bfloat16)[None, :, None, None]
    config = FP8AttentionConfig(smooth_keys=False, qk_dtype=qk_dtype)
    x = quantize_qkv(q, k, v, config)
    got = flash_attention(x.q, x.k, x.v, scales=x.scales, return_lse=True)
    agree(got, truth(x, np.ones((1, 256, 2048), bool), 128**-0.5))


@OF_SCORES
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("scale", [-1.0, np.nan])
def test_bad_scales_make_nan_of_what_they_reach(name, scale, qk_dtype, rng):
    config = FP8AttentionConfig("head", qk_dtype=qk_dtype)
    x = quantize_qkv(*arrays(rng, 2, 200, 200, 4, 2, 64), config)
    given = {n: getattr(x.scales, n) for n in "qkv"}
    given[name] = given[name].at[1, 1].set(scale)
    out, lse = flash_attention(
        x.q, x.k, x.v, scales=AttentionScales(**given), return_lse=True
    )
    reached = np.zeros((2, 4), bool)
    reached[1, [1] if name == "q" else [2, 3]] = True
    assert (jnp.isnan(out).all((1, 3)) == reached).all()
    assert (jnp.isnan(out).any((1, 3)) == reached).all()
    if name != "v":
        assert (jnp.isnan(lse).any(1) == reached).all()


@OF_SCORES
def test_scales_of_zero(qk_dtype, rng):
    """Keys that stand for zeros: all scores are equal."""
    config = FP8AttentionConfig(qk_dtype=qk_dtype)
    x = quantize_qkv(*arrays(rng, 1, 200, 300, 2, 2, 64), config)
    zeros = AttentionScales(x.scales.q, x.scales.k * 0, x.scales.v)
    out, lse = flash_attention(x.q, x.k, x.v, scales=zeros, return_lse=True)
    mean = widened(x.v, x.scales.v).mean(1, keepdims=True)
    assert np.abs(np.asarray(out.astype(jnp.float32)) - mean).max() < 2e-3
    assert np.abs(lse - np.log(300)).max() < 1e-4


def test_nan_stays(rng):
    q, k, v = arrays(rng, 1, 300, 300, 2, 2, 128)
    x = quantize_qkv(q, k, v)
    q8 = x.q.at[0, 7, 1, 5].set(jnp.nan)
    out, lse = flash_attention(q8, x.k, x.v, scales=x.scales, return_lse=True)
    hit = np.zeros((300, 2), bool)
    hit[7, 1] = True
    assert (jnp.isnan(out[0]).all(-1) == hit).all()
    assert (jnp.isnan(lse[0]) == hit).all()


def test_under_vmap_and_with_gradients(rng):
    q, k, v = arrays(rng, 3, 256, 256, 4, 2, 128)

    def loss(q, k, v):
        return jnp.sum(fp8_attention(q, k, v, causal=True).astype(jnp.float32) ** 2)

    def exact(q, k, v):
        out = fp8_attention(q, k, v, causal=True)
        made, transpose = jax.vjp(lambda *x: flash_attention(*x, causal=True), q, k, v)
        return transpose((2 * out.astype(jnp.float32)).astype(made.dtype))

    got = jax.vmap(jax.grad(loss, (0, 1, 2)))(q[:, None], k[:, None], v[:, None])
    for mine, its in zip(got, exact(q, k, v), strict=True):
        off = jnp.linalg.norm((mine[:, 0] - its).astype(jnp.float32))
        assert off <= 0.02 * jnp.linalg.norm(its.astype(jnp.float32))


def test_smoothing_changes_no_lse(rng):
    q, k, v = arrays(rng, 1, 400, 400, 2, 2, 128)
    k = k + jnp.asarray(rng.normal(0, 4, (1, 1, 2, 128)), jnp.bfloat16)
    exact = flash_attention(q, k, v, causal=True, return_lse=True)
    smooth = fp8_attention(q, k, v, causal=True, return_lse=True)
    rough = fp8_attention(
        q, k, v, FP8AttentionConfig(smooth_keys=False), causal=True, return_lse=True
    )
    off = [jnp.abs(x[1] - exact[1]).mean() for x in (smooth, rough)]
    assert off[0] < 0.03 and off[0] < 0.5 * off[1]
    sizes = [
        jnp.linalg.norm((x[0] - exact[0]).astype(jnp.float32)) for x in (smooth, rough)
    ]
    assert sizes[0] < 0.6 * sizes[1]
