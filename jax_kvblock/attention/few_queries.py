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

from jax_kvblock.attention import block_problem, blocked
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    Sizes,
    members_of_a_row,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.ops import LogSumExp


def forward(
    config: AttentionConfig, x: Operands, compute: Any = None
) -> tuple[jax.Array, LogSumExp]:
    """As `blocked.forward`: o `[B, T, N, Dv]`, and lse `[B, N, T]`."""
    size = sizes_of(config, x)
    if config.packed:
        x = x._replace(q=x.q[None], k=x.k[None], v=x.v[None])
    batch = x.q.shape[0]
    if x.sinks is not None:
        x = x._replace(sinks=row_of_each(x.sinks, batch))
    members, block_kv = steps(config, x, size)
    p = _whole_problem(config, x, size, block_kv, compute)

    def attend(first: Any) -> tuple[Any, ...]:
        return _attend(config, *_members_from(first, members, x, p), first)

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

        parts = jax.eval_shape(attend, jnp.zeros((), jnp.int32))
        carry = tuple(jnp.zeros((batch, *a.shape[1:]), a.dtype) for a in parts)
        made = blocked.loop(batch // members, put, carry)
    o, *lse = (a.reshape(batch, size.num_heads, *a.shape[3:]) for a in made)
    o = jnp.moveaxis(o, 1, 2)
    if config.packed:
        o, lse = o[0], [a[0] for a in lse]
    return o, LogSumExp(*lse)


def _whole_problem(
    config: AttentionConfig, x: Operands, size: Sizes, block_kv: int, compute: Any
) -> block_problem.Problem:
    """All of the call but its keys and values, which stay where they lie."""
    batch, padded = x.q.shape[0], -(-size.kv_len // block_kv) * block_kv
    labels = block_problem.labels_of(config, x, size, batch, size.q_len, padded)
    some = config.packed or x.q_lens is not None
    q = block_problem.filled(x.q, size.q_len, labels[0], some)
    return block_problem.Problem(
        size=size,
        block_q=size.q_len,
        block_kv=block_kv,
        q=jnp.moveaxis(q, 1, 2).astype(compute or x.q.dtype),
        k=None,
        v=None,
        bias=x.bias,
        q_labels=labels[0],
        kv_labels=labels[1],
        listed=None,
        keys_on_left=block_problem.keys_on_left(size),
    )


def _members_from(
    first: Any, members: int, x: Operands, p: block_problem.Problem
) -> tuple[Operands, block_problem.Problem]:
    """Their queries, labels and sinks; keys, values and bias stay whole."""
    mine = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, first, members, 0),
        {"q": p.q, "q_labels": p.q_labels, "kv_labels": p.kv_labels, "sinks": x.sinks},
    )
    return x._replace(sinks=mine.pop("sinks")), p._replace(**mine)


def _attend(
    config: AttentionConfig, x: Operands, p: block_problem.Problem, first: Any
) -> tuple[Any, ...]:
    """o `[members, K, G, T, Dv]`, and the parts of lse, of the members from `first`."""

    def add(j: Any, state: Any) -> Any:
        block = _block_of_keys(config, x, p, first, j)
        return blocked.add_block(config, x, block, 0, 0, state)

    state = blocked.no_keys(x, p, p.size.value_dim)
    blocks = p.kv_labels.valid.shape[1] // p.block_kv
    if blocks == 1:
        state = add(0, state)
    elif blocks == 2:  # to find out which to visit takes as long as to visit both
        state = blocked.loop(blocks, add, state)
    else:
        order, counts = block_problem.visits(config, p)
        visit = lambda c, state: add(order[0, c], state)  # noqa: E731
        state = blocked.loop(counts[0], visit, state)
    o, lse = blocked.finish(x, p, 0, *state)
    return (o, *lse.parts)


def steps(config: AttentionConfig, x: Operands, size: Sizes) -> tuple[int, int]:
    """(members, keys) of a step: one member, or several short ones whole."""
    keys = block_problem.keys_of_a_step(config, x.q.dtype, size)
    if size.kv_len > keys:
        return 1, keys
    some_share_a_bias = x.bias is not None and 1 < x.bias.shape[0] < x.q.shape[0]
    batch = 1 if some_share_a_bias else x.q.shape[0]
    members = min(keys // size.kv_len, batch)
    return next(n for n in range(members, 0, -1) if batch % n == 0), size.kv_len


def _block_of_keys(
    config: AttentionConfig, x: Operands, p: block_problem.Problem, first: Any, j: Any
) -> block_problem.Problem:
    """Block j as a problem of its own.

    The last block ends with the keys; those that it shares with the one before do not
    count again.
    """
    length, s, members = p.block_kv, x.k.shape[1], p.q.shape[0]
    start = j * length
    if s % length:
        start = jnp.minimum(start, s - length)
    labels = block_problem.Labels(
        *(jax.lax.dynamic_slice_in_dim(a, start, length, 1) for a in p.kv_labels)
    )

    def cut(a: jax.Array) -> jax.Array:
        """`[members, K, length, D]`; what nobody may read is zeroed on the way."""
        shape = (members, length, *a.shape[2:])
        a = _slice(a, (first, start, 0, 0), shape).astype(p.q.dtype)
        if config.packed or x.kv_lens is not None:
            a = jnp.where(labels.used[..., None, None], a, 0)
        return jnp.moveaxis(a, 1, 2)

    bias = x.bias
    if bias is not None:
        rows = min(bias.shape[0], members)
        row = first // members_of_a_row(x.q.shape[0], bias.shape[0])
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
    starts = tuple(jnp.asarray(start, jnp.int32) for start in starts)
    if a.dtype.itemsize != 2:
        return jax.lax.dynamic_slice(a, starts, shape)
    a, starts = jax.lax.optimization_barrier((a, starts))
    bits = jax.lax.bitcast_convert_type(a, jnp.uint16)
    bits = jax.lax.dynamic_slice(bits, starts, shape)
    return jax.lax.bitcast_convert_type(bits, a.dtype)
