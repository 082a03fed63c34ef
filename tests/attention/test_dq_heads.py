"""Sums of dq in float32 are of a few heads at a time where that costs little."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention.cuda import KERNELS, OPTIONAL, unserved_by_gpu
from jax_kvblock.core import ffi
from jax_kvblock.sparse.plain import list_tiles

PACKED = 1 << OPTIONAL.index("cu_q")
LISTED = 1 << OPTIONAL.index("tile_indices")
TILE = 64  # queries whose sums lie together
COUNTERS = 12  # bytes beside a tile
LANES = 2  # launches that have sums at the same time
ALIGNED = 128  # bytes, of a lane


def heads_at_once(batch, q_len, kv_len, heads, kv_heads, dim=128, present=0):
    """Query heads whose sums the workspace of a backward call has room for."""
    sm90, bfloat16 = KERNELS["cuda_sm90"], 0
    sizes = batch, q_len, kv_len, heads, kv_heads, dim, dim
    room = ffi.attention_workspace(sm90, bfloat16, *sizes, present, True)
    per_head = -(-q_len // TILE) * (TILE * dim * 4 + COUNTERS) * batch
    count, rest = divmod(room, per_head)
    assert rest < LANES * ALIGNED
    return count


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((1, 8192, 8192, 32, 8), 32),  # 128 MiB of all heads
        ((1, 11520, 11520, 32, 8), 32),  # two lanes of four KV heads are all of them
        ((1, 11648, 11648, 32, 8), 16),  # more: 91 tiles of keys, two lanes of two
        ((1, 16384, 16256, 32, 8), 16),  # 127 tiles a head
        ((1, 16320, 16384, 32, 8), 16),  # 255 tiles of 64 queries
        ((1, 16384, 16384, 32, 8), 8),  # two lanes of a KV head, for 4 of queries each
        ((1, 1 << 20, 1 << 20, 32, 8), 8),
        ((1, 16384, 16384, 32, 32), 8),  # a quarter of the steps that are enough a head
        ((2, 8192, 8192, 32, 32), 16),  # an eighth
        ((4, 16384, 4096, 32, 8), 8),  # batch members are tiles, too
        ((1, 131_072, 8192, 12, 6), 8),
        ((1, 131_072, 5504, 12, 6), 12),  # two lanes of three are all six
        ((1, 131_072, 4096, 12, 6), 12),  # 4 do not divide 6
        ((1, 131_072, 131_072, 16, 2), 16),  # two lanes of one are both
        ((1, 65536, 512, 32, 8), 32),  # few keys
        ((1, 16, 1 << 20, 32, 8), 32),  # small sums, whatever the keys
        ((1, 8192, 1 << 20, 32, 8), 32),
        ((1, 8256, 1 << 20, 32, 8), 8),
    ],
)
def test_room_is_for_some_heads(sizes, heads):
    assert heads_at_once(*sizes) == heads


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((1, 8192, 8192, 32, 8), 32),  # 128 MiB of all heads
        ((1, 16256, 16256, 32, 8), 32),  # 127 tiles of keys: two lanes of four KV heads
        ((1, 16384, 16384, 32, 8), 16),  # 128: two lanes of two
        ((1, 32640, 32640, 32, 8), 16),
        ((1, 32768, 32768, 32, 8), 8),  # 256: two lanes of one
        ((4, 16384, 8192, 32, 8), 8),
    ],
)
def test_launches_over_lists_have_more_tiles(sizes, heads):
    assert heads_at_once(*sizes, present=LISTED) == heads


def test_packed_rows_count_once():
    sm90, bfloat16 = KERNELS["cuda_sm90"], 0
    sizes = 4, 65536, 65536, 32, 8, 128, 128
    packed = ffi.attention_workspace(sm90, bfloat16, *sizes, PACKED, True)
    tiles = (65536 + TILE * 4) // TILE
    lane = 4 * tiles * (TILE * 128 * 4 + COUNTERS)
    assert packed == LANES * -(-lane // ALIGNED) * ALIGNED


on_hopper = pytest.mark.skipif(
    bool(unserved_by_gpu("cuda_sm90", True)), reason="not the GPU of cuda_sm90"
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "kind", ["batch", "tall", "window", "deterministic", "packed", "lists"]
)
def test_gradients_of_heads_in_turn(kind):
    """As those of each KV head by itself, whose sums are in one launch."""
    batch = 2 if kind == "batch" else 1
    length, heads, kv_heads, dim = 65536 // batch, 16, 4, 128
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
        bounds = jnp.array([0, 35_001, 65_000], jnp.int32)
        options["cu_seqlens"] = (bounds, bounds)
        args = [a[0] for a in args]

    present = 0
    if kind == "lists":  # of all heads
        options["tiles"], present = lists_of_a_sixteenth(1, length), LISTED

    @jax.jit
    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)[1](d_out)

    sizes = *shape[:2], length, heads, kv_heads
    assert heads_at_once(*sizes, present=present) == 8
    whole = gradients(*args)
    for kv_head in range(kv_heads):
        own = slice(4 * kv_head, 4 * kv_head + 4), slice(kv_head, kv_head + 1)
        q, k, v, d_out = args
        part = gradients(
            q[..., own[0], :],
            k[..., own[1], :],
            v[..., own[1], :],
            d_out[..., own[0], :],
        )
        for name, a, b, where in zip("qkv", whole, part, (0, 1, 1), strict=True):
            # dk and dv have the same bits; dq's sums differ in their order.
            exact = name != "q" or kind == "deterministic"
            what = f"d{name} of KV head {kv_head}"
            hold(a[..., own[where], :], b, exact, what)


def hold(got, want, exact, what):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    off = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    assert off <= (0.0 if exact else 2.0**-7), f"{what} is off by {off:.2g}"


def lists_of_a_sixteenth(heads, length):
    """Of each row of tiles its own and some before it, by chance."""
    rows = jnp.arange(length // 128)
    chances = jax.random.uniform(jax.random.key(5), (1, heads, rows.size, rows.size))
    own = rows[:, None] == rows
    listed = (own | (chances < 1 / 16)) & (rows <= rows[:, None])
    return AttentionTiles(*list_tiles(listed, width=rows.size))


def gradients_in_lanes(seed, lists=False, **options):
    """Of a call in four rounds; the compiled function, its arguments, what it gives."""
    sizes = 1, 24576, 24576, 8, 8
    assert heads_at_once(*sizes, dim=256, present=LISTED if lists else 0) == 4
    tiles = lists_of_a_sixteenth(8, 24576) if lists else None
    keys = jax.random.split(jax.random.key(seed), 4)
    args = [jax.random.normal(key, (1, 24576, 8, 256), jnp.bfloat16) for key in keys]

    def gradients(q, k, v, d_out):
        attend = lambda *x: flash_attention(  # noqa: E731
            *x,
            causal=True,
            tiles=tiles,
            deterministic=not lists,  # of lists, dq would have a pass of its own
            implementation="cuda_sm90",
        )
        return jax.vjp(attend, q, k, v)[1](d_out)

    compiled = jax.jit(gradients).lower(*args).compile(options)
    return compiled, args, jax.block_until_ready(compiled(*args))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("lists", [False, True])
def test_lanes_in_a_graph(lists):
    """XLA records them as a CUDA graph, and runs that."""
    alone, graph = "2000000000", "1"
    _, _, want = gradients_in_lanes(1, lists, xla_gpu_graph_min_graph_size=alone)
    run, args, got = gradients_in_lanes(1, lists, xla_gpu_graph_min_graph_size=graph)
    for _ in range(3):
        for name, a, b in zip("qkv", got, want, strict=True):
            hold(a, b, name != "q" or not lists, f"d{name}")
        got = run(*args)


@pytest.mark.gpu
@on_hopper
def test_lanes_of_threads():
    """Threads launch at the same time: each has a second stream of its own."""
    kinds = [False, True, True]  # whether over lists
    calls = [gradients_in_lanes(seed, lists) for seed, lists in enumerate(kinds)]
    wrong = []

    def repeat(lists, run, args, want):
        for _ in range(8):
            for name, a, b in zip("qkv", run(*args), want, strict=True):
                try:
                    hold(a, b, name != "q" or not lists, f"d{name}")
                except AssertionError as error:
                    wrong.append(str(error))

    threads = [
        threading.Thread(target=repeat, args=(lists, *call))
        for lists, call in zip(kinds, calls, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
