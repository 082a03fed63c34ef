"""Sums of dq in float32 are of a few heads at a time where that costs little."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jax_kvblock import flash_attention
from jax_kvblock.attention.cuda import KERNELS, OPTIONAL, unserved_by_gpu
from jax_kvblock.core import ffi

PACKED = 1 << OPTIONAL.index("cu_q")
TILE = 64  # queries whose sums lie together
COUNTERS = 12  # bytes beside a tile


def heads_at_once(batch, q_len, kv_len, heads, kv_heads, dim=128, present=0):
    """Query heads whose sums the workspace of a backward call has room for."""
    sm90, bfloat16 = KERNELS["cuda_sm90"], 0
    sizes = batch, q_len, kv_len, heads, kv_heads, dim, dim
    room = ffi.attention_workspace(sm90, bfloat16, *sizes, present, True)
    per_head = -(-q_len // TILE) * (TILE * dim * 4 + COUNTERS) * batch
    assert room % per_head == 0
    return room // per_head


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((1, 8192, 8192, 32, 8), 32),
        ((1, 32768, 32768, 32, 8), 32),  # 512 MiB of all heads
        ((1, 33_280, 33_280, 32, 8), 16),  # more: 260 tiles of keys a head
        ((1, 65536, 65536, 32, 8), 8),
        ((1, 1 << 20, 1 << 20, 32, 8), 4),  # a KV head has 4 queries' heads
        ((4, 32768, 32768, 32, 8), 4),  # batch members are tiles, too
        ((1, 131_072, 24_576, 12, 6), 12),  # 192 tiles a head: of 6, since 5 is none
        ((1, 131_072, 32_768, 12, 6), 12),  # 4 and 5 do not divide 6
        ((1, 131_072, 65_536, 12, 6), 4),
        ((1, 65536, 512, 32, 8), 32),  # few keys
        ((1, 16, 1 << 20, 32, 8), 32),  # small sums, whatever the keys
        ((1, 32768, 1 << 20, 32, 8), 32),
        ((1, 32_832, 1 << 20, 32, 8), 4),
    ],
)
def test_room_is_for_some_heads(sizes, heads):
    assert heads_at_once(*sizes) == heads


def test_packed_rows_count_once():
    sm90, bfloat16 = KERNELS["cuda_sm90"], 0
    sizes = 4, 65536, 65536, 32, 8, 128, 128
    packed = ffi.attention_workspace(sm90, bfloat16, *sizes, PACKED, True)
    tiles = (65536 + TILE * 4) // TILE
    assert packed == 8 * tiles * (TILE * 128 * 4 + COUNTERS)


@pytest.mark.gpu
@pytest.mark.skipif(
    bool(unserved_by_gpu("cuda_sm90", True)), reason="not the GPU of cuda_sm90"
)
@pytest.mark.parametrize("kind", ["batch", "tall", "window", "deterministic", "packed"])
def test_gradients_of_heads_in_turn(kind):
    """As those of each KV head by itself, whose sums are in one launch."""
    batch = 2 if kind == "batch" else 1
    length, heads, kv_heads, dim = 131072 // batch, 16, 2, 128
    shape = batch, length, heads, dim
    keys = jax.random.split(jax.random.key(7), 4)

    def draw(key, n):
        return jax.random.normal(key, (*shape[:2], n, dim), jnp.bfloat16)

    args = [
        draw(key, n)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    ]
    options = {"causal": True, "implementation": "cuda_sm90"}
    if kind == "window":
        options["window"] = (3000, 0)
    if kind == "deterministic":
        options["deterministic"] = True
    if kind == "packed":
        bounds = jnp.array([0, 70_001, 130_000], jnp.int32)
        options["cu_seqlens"] = (bounds, bounds)
        args = [a[0] for a in args]

    @jax.jit
    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)[1](d_out)

    assert heads_at_once(*shape[:2], length, heads, kv_heads) == 8
    whole = gradients(*args)
    for kv_head in range(kv_heads):
        own = slice(8 * kv_head, 8 * kv_head + 8), slice(kv_head, kv_head + 1)
        q, k, v, d_out = args
        part = gradients(
            q[..., own[0], :],
            k[..., own[1], :],
            v[..., own[1], :],
            d_out[..., own[0], :],
        )
        for name, a, b, where in zip("qkv", whole, part, (0, 1, 1), strict=True):
            got, want = a[..., own[where], :].astype(jnp.float32), b.astype(jnp.float32)
            off = float(jnp.abs(got - want).max() / jnp.abs(want).max())
            # dk and dv have the same bits; dq's sums differ in their order.
            bar = 0.0 if name != "q" or kind == "deterministic" else 2.0**-7
            assert off <= bar, f"d{name} of KV head {kv_head} is off by {off:.2g}"
