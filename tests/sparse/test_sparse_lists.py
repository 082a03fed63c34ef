"""Lists of tiles as they are given: twice, in any order, wrong; through the kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_exact
from attention_model import BF16, F16, F32, KERNELS, draw_tiles, jit
from attention_model import draw as draw_call
from messages import check
from sparse_cases import TILES, draw, listed, spread, truth

import jax_kvblock
from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    LearnedGate,
    PooledThreshold,
    Random,
    Streaming,
    init_gate,
    sparse_attention,
)

pytestmark = pytest.mark.usefixtures("exact_products")

BUDGET = {"sparsity_ratio": 0.6, **TILES}
RANDOM = Random(**BUDGET)
THRESHOLD = AntidiagonalThreshold(tau=0.7, stride=8, **TILES)


@pytest.fixture
def qkv(rng):
    return draw(rng)


# ---- twice ---------------------------------------------------------------------------

# On the host, where they are looked at.
TWICE = AttentionTiles(
    np.zeros((1, 1, 8, 2), np.int32), np.full((1, 1, 8), 2, np.int32), 16, 16
)


@pytest.mark.usefixtures("forgotten")
def test_debug_checks_of_lists_that_only_a_device_knows(qkv):
    """A tile twice: an error under `debug_checks`, inside of jit, too."""

    def run(tiles):
        return sparse_attention(*qkv, tiles)

    tiles = jax.tree.map(jnp.asarray, TWICE)
    once = dataclasses.replace(tiles, indices=tiles.indices.at[..., 1].set(3))
    with jax_kvblock.debug_checks():
        words = "list a tile once|tile 0 twice in indices[0, 0, 0]"
        check("flash_attention", ValueError, words, lambda: run(tiles))
        with pytest.raises(jax.errors.JaxRuntimeError, match="tile 0 twice"):
            jax.block_until_ready(jit(run)(tiles))
        jax.block_until_ready(jit(run)(once))


def counted(x, times, by_keys, by_queries):
    """What comes out where pairs are counted `times` in out and lse, in float64.

    by_keys, by_queries: as often as gradients of k and v, and of q, count them.
    """
    q, k, v, d_out, d_lse = (np.float64(a) for a in x)
    k, v = (np.repeat(a, 2, axis=2) for a in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) / 8
    lse = np.log((times * np.exp(scores)).sum(-1))
    p = np.exp(scores - lse[..., None])
    out = np.einsum("bnts,bsnd->btnd", times * p, v)
    delta = (d_out * out).sum(-1) - d_lse
    d_p = np.einsum("btnd,bsnd->bnts", d_out, v)
    d_scores = p * (d_p - delta.transpose(0, 2, 1)[..., None]) / 8
    d_q = np.einsum("bnts,bsnd->btnd", by_queries * d_scores, k)
    d_k = np.einsum("bnts,btnd->bsnd", by_keys * d_scores, q)
    d_v = np.einsum("bnts,btnd->bsnd", by_keys * p, d_out)
    of_pairs = (a.reshape(1, -1, 1, 2, 64).sum(3) for a in (d_k, d_v))
    return out, lse.transpose(0, 2, 1), d_q, *of_pairs


def on_gpus(implementation):
    missing, reason = implementation not in KERNELS, f"no {implementation} here"
    return pytest.mark.gpu, pytest.mark.skipif(missing, reason=reason)


# By name: who serves, in which dtype, whether every time alike, and on the emulator.
ONCE_OR_TWICE = {
    "plain JAX": ("xla", F32, False, False),
    "emulated kernels": pytest.param("cuda", F32, False, True, marks=pytest.mark.cpu),
    "emulated, deterministic": pytest.param(
        "cuda", F32, True, True, marks=pytest.mark.cpu
    ),
    **{
        f"{name}, {dtype.__name__}{', deterministic' * again}": pytest.param(
            name, dtype, again, False, marks=on_gpus(name)
        )
        for name, dtype in (("cuda", F32), ("cuda", BF16), ("cuda_sm90", BF16))
        for again in (False, True)
    },
}


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("implementation", "dtype", "deterministic", "emulated"),
    ONCE_OR_TWICE.values(),
    ids=ONCE_OR_TWICE,
)
def test_a_tile_that_only_a_device_knows_to_be_listed_twice(
    request, rng, implementation, dtype, deterministic, emulated
):
    """As docs/attention.md has it."""
    if emulated:
        request.getfixturevalue("float32_as_cuda")
    sizes = {"batch": 1, "q_len": 150, "kv_len": 300, "heads": 2, "kv_heads": 1}
    q, k, v = draw(rng, **sizes, dim=64, dtype=dtype)
    d_out, d_lse = (jnp.asarray(rng.standard_normal(s), t) for s, t in (
        (q.shape, dtype), (q.shape[:3], F32)
    ))  # fmt: skip
    lists = AttentionTiles(jnp.int32([[[[2, 0, 2], [1, 1, 1]]]]), jnp.int32([[[3, 2]]]))

    @jit
    def run(qkv, tiles, cotangents):
        how = {"deterministic": deterministic, "implementation": implementation}
        attend = lambda *x: flash_attention(*x, tiles=tiles, return_lse=True, **how)  # noqa: E731
        made, pull = jax.vjp(attend, *qkv)
        return *made, *pull(cotangents)

    got = run((q, k, v), lists, (d_out, d_lse))
    twice = np.repeat(np.repeat([[1, 0, 2], [0, 2, 0]], 128, 0), 128, 1)[:150, :300]
    once = np.minimum(twice, 1)
    by_list = once if implementation == "xla" else twice
    of_q = by_list if deterministic else once
    want = counted((q, k, v, d_out, d_lse), by_list, once, of_q)
    for one, other in zip(got, want, strict=True):
        one, off = np.float64(one), 2e-5 if dtype == F32 else 2e-2 * abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=off)


# ---- what is refused, and what has a meaning -----------------------------------------

BAD = {
    "selector": (
        lambda q, k, v: sparse_attention(q, k, v, 0.9),
        "sparse_attention",
        TypeError,
        "Selector or AttentionTiles|float",
    ),
    "packed": (
        lambda q, k, v: sparse_attention(
            q[0], k[0], v[0], RANDOM, cu_seqlens=([0, 100, 128],) * 2
        ),
        "sparse_attention",
        ValueError,
        "cu_seqlens|segment_ids|q[None]",
    ),
    "twice": (
        lambda q, k, v: sparse_attention(q, k, v, TWICE),
        "flash_attention",
        ValueError,
        "list a tile once|tile 0 twice",
    ),
    "rank": (
        lambda q, k, v: RANDOM(q[0], k[0]),
        "Random",
        ValueError,
        "[B, T, N, D]|segment_ids",
    ),
    "dtype": (
        lambda q, k, v: RANDOM(q.astype(jnp.int32), k),
        "Random",
        TypeError,
        "bfloat16, float16 or float32",
    ),
    "heads": (
        lambda q, k, v: RANDOM(q, k[:, :, [0, 1, 0]]),
        "Random",
        ValueError,
        "divides q's, 4",
    ),
    "dtypes": (
        lambda q, k, v: RANDOM(q, k.astype(jnp.bfloat16)),
        "Random",
        ValueError,
        "q's B, D and dtype",
    ),
    "gate": (
        lambda q, k, v: LearnedGate(init_gate(4, 4, 16), **BUDGET)(q, k),
        "LearnedGate",
        ValueError,
        "4 heads on 2 of 16|4 on 4 of 16",
    ),
    "no gate": (
        lambda q, k, v: LearnedGate({}, **BUDGET)(q, k),
        "LearnedGate",
        TypeError,
        "must be a Gate|init_gate",
    ),
    "stride": (
        lambda q, k, v: AntidiagonalThreshold(stride=12, **TILES),
        "AntidiagonalThreshold",
        ValueError,
        "stride must divide|12",
    ),
    "capacity": (
        lambda q, k, v: AntidiagonalThreshold(capacity=1, stride=8, **TILES)(
            q, k, causal=True
        ),
        "AntidiagonalThreshold",
        ValueError,
        "capacity must be at least 2",
    ),
    "empty": (
        lambda q, k, v: RANDOM(q, k[:, :0]),
        "Random",
        ValueError,
        "must not be empty",
    ),
    "scale": (
        lambda q, k, v: THRESHOLD(q, k, scale="1"),
        "AntidiagonalThreshold",
        TypeError,
        "scale",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(qkv, name):
    call, where, error, words = BAD[name]
    check(where, error, words, lambda: call(*qkv))


@pytest.mark.parametrize(
    "indices", [[[5, -1, 2]], [[2, 5, -1]], [[9, 2, 5]]], ids=["hole", "order", "range"]
)
def test_lists_that_are_unsorted_or_out_of_range_have_a_meaning(qkv, indices):
    """Any order; entries outside of the tiles of keys are skipped."""
    indices = jnp.broadcast_to(jnp.int32(indices), (1, 1, 8, 3))
    tiles = AttentionTiles(indices, jnp.full((1, 1, 8), 3, jnp.int32), 16, 16)
    got = sparse_attention(*qkv, tiles)
    kept = np.isin(np.arange(8), [2, 5])[None, None, None].repeat(8, 2)
    allowed = spread(kept, 128, 128, tiles)
    np.testing.assert_allclose(got, truth(*qkv, allowed), rtol=0, atol=3e-6)


# ---- on a GPU ------------------------------------------------------------------------

WIDE = {"block_q": 128, "block_kv": 128}
# Of a head dim; six tiles a row, the last one cut.
OF_KERNELS = {
    "random": lambda dim: Random(sparsity_ratio=0.5, **WIDE),
    "streaming": lambda dim: Streaming(window=2, **WIDE),
    "threshold": lambda dim: AntidiagonalThreshold(tau=0.6, **WIDE),
    "pooled": lambda dim: PooledThreshold(tau=None, capacity=3, **WIDE),
    "learned": lambda dim: LearnedGate(
        init_gate(4, 2, dim), piece=32, sparsity_ratio=0.5, **WIDE
    ),
}
MASKED = {
    "full": (F16, 64, {}),
    "causal": (BF16, 128, {"causal": True}),
    "causal, lengths": (
        BF16,
        64,
        {"causal": True, "kv_lens": np.int32([700, 300])},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation", [k for k in KERNELS if k != "xla"] or ["cuda"]
)
@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("name", OF_KERNELS)
def test_lists_of_selectors_through_the_kernels(rng, name, mask, implementation):
    """As the selector makes them, of grouped heads: out, lse and gradients."""
    dtype, dim, options = MASKED[mask]
    call = draw_call(rng, dtype, q_len=700, kv_len=700, dim=dim, **options)
    selector = OF_KERNELS[name](dim)
    select = jit(lambda q, k: tuple(selector.select(q, k, **options)))
    tiles, report = select(call.arrays["q"], call.arrays["k"])
    assert 0.2 < report.share < 0.9
    assert len({x.tobytes() for x in listed(tiles, 6)[0, 0]}) > 1, "all rows are alike"
    assert_exact(call.replace(tiles=tiles), implementation)


# More entries than a warp has lanes, in a row of either side's lists; more tiles of
# keys than are ranked together (longest_first.cuh).
LONG = {
    "keys": (20, 128 * 520, BF16, 128),
    "queries": (128 * 72, 130, BF16, 128),
    "queries, D64": (128 * 72, 130, F16, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation", [k for k in KERNELS if k != "xla"] or ["cuda"]
)
@pytest.mark.parametrize("name", LONG)
def test_long_lists_through_the_kernels(rng, name, implementation):
    """Of heads that share keys, in any order: out, lse and gradients."""
    q_len, kv_len, dtype, dim = LONG[name]
    sizes = {"batch": 1, "q_len": q_len, "kv_len": kv_len, "heads": 2, "kv_heads": 1}
    call = draw_call(rng, dtype, **sizes, dim=dim)
    tiles = draw_tiles(rng, call)
    by_keys = (tiles.indices == 1).any(-1).sum(-1)  # rows that list the second tile
    assert (tiles.counts if name == "keys" else by_keys).max() > 32
    assert_exact(call.replace(tiles=tiles), implementation)
