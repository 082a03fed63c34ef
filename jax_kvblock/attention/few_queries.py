"""Attention of few queries on a CPU: keys and values are read once, where they lie.

`blocked.forward` first lays out K and V as `[B, K, S, D]`, which pays where many blocks
of queries visit each block of keys. Here all queries are one block, so each block of
keys is visited once at most. It is cut from `[B, S, K, D]` and widened, zeroed and laid
out on the way into the cache; nothing of K's or V's size is made. Batch members come
one after the other, each with the visits of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention import blocked
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    Sizes,
    accumulator,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.ops import LogSumExp

# Of keys, and again of values, a step holds about this much. On two Xeon cores with
# 2 MiB of second-level cache each 256 keys of 8 heads of 64 in float32 were the best.
_STEP_BYTES = 2**19


def serves(config: AttentionConfig, x: Operands, platform: str | None) -> bool:
    """Whether all queries are one block, on a CPU, without tile lists."""
    size = sizes_of(config, x)
    most, _ = blocked.default_blocks(platform)
    few = 0 < size.q_len <= (config.xla_block_q or most)
    batch = 1 if config.packed else size.batch
    some = batch and size.kv_len and size.head_dim and size.value_dim
    return platform == "cpu" and few and bool(some) and x.tile_indices is None


def forward(
    config: AttentionConfig, x: Operands, compute: Any = None
) -> tuple[jax.Array, LogSumExp]:
    """As `blocked.forward`: o `[B, T, N, Dv]`, and lse `[B, N, T]`."""
    size = sizes_of(config, x)
    if config.packed:
        x = x._replace(q=x.q[None], k=x.k[None], v=x.v[None])
    members, block_kv = _steps(config, x, size)
    batch, blocks = x.q.shape[0], -(-size.kv_len // block_kv)

    labels = blocked._labels(config, x, size, batch, size.q_len, blocks * block_kv)
    some_queries = config.packed or x.q_lens is not None
    q = blocked._filled(x.q, size.q_len, labels[0], some_queries)
    q = jnp.moveaxis(q, 1, 2).astype(compute or x.q.dtype)
    sinks = None if x.sinks is None else row_of_each(x.sinks, batch)

    def attend(first: Any) -> tuple[Any, ...]:
        """o and the parts of lse of the members from `first` on."""
        mine = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, members, 0),
            (q, labels, sinks),
        )
        whole = blocked._Problem(
            size, size.q_len, block_kv, mine[0], None, None, x.bias, *mine[1], None
        )
        # Then it takes less to lay out the result anew than the keys.
        fewer = 4 * size.group * size.q_len <= size.head_dim
        whole = whole._replace(keys_on_left=fewer)
        x_mine = x._replace(sinks=mine[2])

        def add(j: Any, state: Any) -> Any:
            block = _block_of_keys(config, x, whole, first, j)
            return blocked.add_block(config, x_mine, block, 0, 0, state)

        state = blocked.no_keys(x_mine, whole, size.value_dim)
        if blocks == 1:
            state = add(0, state)
        elif blocks == 2:  # to find out whom to visit takes as long as to visit
            state = blocked._loop(blocks, add, state)
        else:
            order, counts = blocked._visits(config, whole)
            visit = lambda c, state: add(order[0, c], state)  # noqa: E731
            state = blocked._loop(counts[0], visit, state)
        o, lse = blocked._finish(x_mine, whole, 0, *state)
        return (o, *lse.parts)

    if members == batch:
        made = attend(0)
    else:

        def put(c: Any, carry: Any) -> Any:
            at = c * members
            return jax.tree.map(
                lambda all_, a: jax.lax.dynamic_update_slice_in_dim(all_, a, at, 0),
                carry,
                attend(at),
            )

        zero = jnp.zeros((), jnp.int32)
        carry = tuple(
            jnp.zeros((batch, *a.shape[1:]), a.dtype)
            for a in jax.eval_shape(attend, zero)
        )
        made = blocked._loop(batch // members, put, carry)
    o, *parts = (a.reshape(batch, size.num_heads, *a.shape[3:]) for a in made)
    o = jnp.moveaxis(o, 1, 2)
    if config.packed:
        o, parts = o[0], [a[0] for a in parts]
    return o, LogSumExp(*parts)


def _steps(config: AttentionConfig, x: Operands, size: Sizes) -> tuple[int, int]:
    """(members, keys) of a step: about as many as `_STEP_BYTES` hold."""
    width = accumulator(x.q.dtype).itemsize
    of_a_key = width * size.num_kv_heads * max(size.head_dim, size.value_dim)
    most = min(max(_STEP_BYTES // of_a_key, 256), 1024)
    block_kv = config.xla_block_kv or 1 << (most.bit_length() - 1)
    if size.kv_len > block_kv:
        return 1, block_kv
    some_share_a_bias = x.bias is not None and 1 < x.bias.shape[0] < x.q.shape[0]
    batch = 1 if some_share_a_bias else x.q.shape[0]
    fit = max(most // size.kv_len, 1)
    members = next(n for n in range(min(fit, batch), 0, -1) if batch % n == 0)
    return members, size.kv_len


def _block_of_keys(
    config: AttentionConfig, x: Operands, p: blocked._Problem, first: Any, j: Any
) -> blocked._Problem:
    """Block j as a problem of its own.

    The last block ends with the keys; those that it shares with the one before do not
    count again.
    """
    length, s, members = p.block_kv, x.k.shape[1], p.q.shape[0]
    start = j * length
    if s % length:
        start = jnp.minimum(start, s - length)
    labels = blocked._Labels(
        *(jax.lax.dynamic_slice_in_dim(a, start, length, 1) for a in p.kv_labels)
    )

    def cut(a: jax.Array) -> jax.Array:
        """`[members, K, length, D]`; what nobody may read is zeroed on the way."""
        shape = (members, length, *a.shape[2:])
        a = _slice(a, (first, start, 0, 0), shape).astype(p.q.dtype)
        if config.packed or x.kv_lens is not None:
            a = jnp.where(labels.valid[..., None, None], a, 0)
        return jnp.moveaxis(a, 1, 2)

    bias = x.bias
    if bias is not None:
        rows = min(bias.shape[0], members)
        row = first * bias.shape[0] // x.q.shape[0]
        shape = (rows, *bias.shape[1:3], length)
        bias = _slice(bias, (row, 0, 0, start), shape)
    if s % length:
        index = start + jnp.arange(length, dtype=jnp.int32)
        labels = labels._replace(valid=labels.valid & (index >= j * length))
    return p._replace(k=cut(x.k), v=cut(x.v), bias=bias, kv_labels=labels)


def _slice(a: jax.Array, starts: tuple, shape: tuple[int, ...]) -> jax.Array:
    """`dynamic_slice` that reads no more than the slice. It has no derivative.

    XLA's CPU backend has none of 16-bit floats: it would widen the whole array ahead of
    the loop. It slices integers as they are; the barrier ties the array to the step, so
    that they, too, are not made ahead of the loop.
    """
    if a.shape == shape:
        return a
    if a.dtype.itemsize != 2:
        return jax.lax.dynamic_slice(a, starts, shape)
    a, starts = jax.lax.optimization_barrier((a, starts))
    bits = jax.lax.bitcast_convert_type(a, jnp.uint16)
    bits = jax.lax.dynamic_slice(bits, starts, shape)
    return jax.lax.bitcast_convert_type(bits, a.dtype)
