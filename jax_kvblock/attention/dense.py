"""Attention written out plainly: the specification, and the tests' truth.

O(T S) memory. Computed in the inputs' precision, or in `dtype` (float64, say).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import (
    OPEN,
    AttentionConfig,
    Operands,
    Sizes,
    row_of_each,
    sizes_of,
)


def dense_attention(
    config: AttentionConfig, x: Operands, dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(o, lse) of the call; o `[B, T, N, Dv]`, lse `[B, N, T]` (packed: `[T, N, Dv]`,
    `[N, T]`).
    """
    size = sizes_of(config, x)
    dtype = dtype or x.q.dtype
    q, k, v = (a if a.ndim == 4 else a[None] for a in (x.q, x.k, x.v))
    visible = attends(config, x)

    # Rows and keys that nobody may read hold anything, also NaN: they are not read.
    q = jnp.where(visible.any((1, 3))[..., None, None], q, 0).astype(dtype)
    seen = jnp.moveaxis(visible.any(2), 1, 2)[..., None]
    k, v = (
        jnp.where(seen, jnp.repeat(a, size.group, axis=2), 0).astype(dtype)
        for a in (k, v)
    )
    high = jax.lax.Precision.HIGHEST
    scores = config.scale * jnp.einsum("btnd,bsnd->bnts", q, k, precision=high)
    if config.softcap:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    if x.bias is not None:
        bias = row_of_each(x.bias, q.shape[0])
        scores = scores + jnp.where(visible, bias, 0).astype(dtype)
    scores = jnp.where(visible, scores, -jnp.inf)

    top = jnp.max(scores, axis=-1, initial=-jnp.inf)
    sinks = None
    if x.sinks is not None:
        sinks = row_of_each(x.sinks, q.shape[0]).astype(dtype)[:, :, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    o = jnp.einsum("bnts,bsne->btne", weights / safe[..., None], v, precision=high)
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe) + top)
    lse = jnp.where(_real_rows(config, x, size), lse, -jnp.inf)
    return (o[0], lse[0]) if config.packed else (o, lse)


def _real_rows(config: AttentionConfig, x: Operands, size: Sizes) -> jax.Array:
    """Rows that are queries of a sequence, bool `[B|1, 1, T]`."""
    i = jnp.arange(size.q_len)[None, None]
    if config.packed:
        return (i >= x.cu_q[0]) & (i < x.cu_q[-1])
    if x.q_lens is not None:
        return i < x.q_lens[:, None, None]
    return jnp.ones((1, 1, size.q_len), bool)


def attends(config: AttentionConfig, x: Operands) -> jax.Array:
    """Which query attends to which key, bool `[B, 1|N, T, S]`."""
    size = sizes_of(config, x)
    i, j = jnp.arange(size.q_len)[:, None], jnp.arange(size.kv_len)[None, :]
    if config.packed:
        owner_q = jnp.searchsorted(x.cu_q, i, side="right") - 1
        owner_kv = jnp.searchsorted(x.cu_kv, j, side="right") - 1
        visible = (owner_q == owner_kv) & (owner_q >= 0) & (owner_q < size.batch)
        visible = visible[None, None]
        owner = jnp.clip(owner_q, 0, size.batch - 1)
        position = i - x.cu_q[owner]
        shift = x.shift[owner] if x.shift is not None else jnp.zeros((), jnp.int32)
        j = j - x.cu_kv[jnp.clip(owner_kv, 0, size.batch - 1)]
        position, j = position[None, None], j[None, None]
    else:
        visible = jnp.ones((size.batch, 1, size.q_len, size.kv_len), bool)
        position = i[None, None]
        shift = jnp.zeros((), jnp.int32)
        if x.shift is not None:
            shift = x.shift[:, None, None, None]
    first, last = window_of(config, position.astype(jnp.int32), shift)
    visible &= (j >= first) & (j <= last)
    if x.q_segments is not None:
        same = x.q_segments[:, :, None] == x.kv_segments[:, None, :]
        visible &= same[:, None]
    if x.q_lens is not None:
        visible &= (i < x.q_lens[:, None, None])[:, None]
    if x.kv_lens is not None:
        visible &= (j < x.kv_lens[:, None, None])[:, None]
    if x.tile_indices is not None:
        listed = listed_tiles(config, x, size.kv_len)
        listed = jnp.repeat(listed, config.block_q, axis=2)[:, :, : size.q_len]
        listed = jnp.repeat(listed, config.block_kv, axis=3)[..., : size.kv_len]
        visible = visible & row_of_each(listed, size.batch)
    return visible


def window_of(
    config: AttentionConfig, position: jax.Array, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first and the last key that queries at these positions see, int32.

    Sums beyond int32 stop at its ends, which lie beyond every key.
    """
    first, last = jnp.int32(-(2**31)), jnp.int32(2**31 - 1)
    if config.window_left != OPEN:
        first = saturating_add(shift, jnp.int32(-config.window_left))
        first = saturating_add(first, position)
    if config.window_right != OPEN:
        last = saturating_add(shift, jnp.int32(config.window_right))
        last = saturating_add(last, position)
    shape = jnp.broadcast_shapes(position.shape, shift.shape)
    return jnp.broadcast_to(first, shape), jnp.broadcast_to(last, shape)


def saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """int32 a + b, at the end of int32 where it would wrap."""
    total = a + b
    wrapped = ((a ^ total) & (b ^ total)) < 0
    end = jnp.where(total < 0, jnp.int32(2**31 - 1), jnp.int32(-(2**31)))
    return jnp.where(wrapped, end, total)


def listed_tiles(config: AttentionConfig, x: Operands, kv_len: int) -> jax.Array:
    """The tile lists as bool `[b, n, ceil(T / block_q), ceil(S / block_kv)]`."""
    num_kv = -(-kv_len // config.block_kv)
    counts = x.tile_counts[..., None]
    entries = x.tile_indices
    used = jnp.arange(entries.shape[-1], dtype=jnp.int32) < counts
    used &= (entries >= 0) & (entries < num_kv)
    hits = jnp.where(used, entries, num_kv)
    rows = jnp.zeros((*entries.shape[:-1], num_kv + 1), bool)
    rows = jnp.put_along_axis(rows, hits, True, axis=-1, inplace=False)
    return rows[..., :num_kv]
