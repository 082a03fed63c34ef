"""Attention written out plainly: the specification, and the tests' truth.

O(T S) memory. Computed in the inputs' precision, or in `dtype` (float64, say).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention import dropout
from jax_kvblock.attention.config import (
    OPEN,
    AttentionConfig,
    Operands,
    Sizes,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.mask_tiles import FULL, WORD_BITS


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
    p = weights / safe[..., None]
    if config.dropout:
        p = jnp.where(_kept(config, x, size), p * dropout.scale_of(config), 0)
    o = jnp.einsum("bnts,bsne->btne", p, v, precision=high)
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


def _kept(config: AttentionConfig, x: Operands, size: Sizes) -> jax.Array:
    """Which pairs dropout keeps, bool `[B, N, T, S]`."""
    owners: list[Any] = []
    if config.packed:
        owners = [
            jnp.clip(_owner(cu, length), 0, size.batch - 1)[None]
            for cu, length in ((x.cu_q, size.q_len), (x.cu_kv, size.kv_len))
        ]
    parts = dropout.parts_of(config, x, size, *owners)
    of_heads = {
        name: getattr(parts, name)[:, None]
        for name in ("row_shifts", "column_shifts", "factors")
    }
    return dropout.kept(config, parts._replace(**of_heads))


def _owner(cu: jax.Array, length: int) -> jax.Array:
    """The sequence of each packed row."""
    rows = jnp.arange(length)
    return jnp.searchsorted(cu, rows, side="right").astype(jnp.int32) - 1


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
        tiles = tile_map(config, x, size.kv_len)
        in_tiles = _in_tiles(config, x, tiles)[:, :, : size.q_len, : size.kv_len]
        visible = visible & row_of_each(in_tiles, size.batch)
    return visible


def _in_tiles(config: AttentionConfig, x: Operands, tiles: jax.Array) -> jax.Array:
    """The pairs that a map of tiles lets attend, bool `[b, n, T, S]` in whole tiles."""
    if x.tile_masks is None:
        listed = jnp.repeat(tiles != NOT_LISTED, config.block_q, axis=2)
        return jnp.repeat(listed, config.block_kv, axis=3)
    bits = jnp.swapaxes(tile_bits(x.tile_masks, tiles, config.block_kv), 3, 4)
    b, n, i, rows, j, keys = bits.shape
    return bits.reshape(b, n, i * rows, j * keys)


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


NOT_LISTED = -2  # beside FULL and rows of the masks, in a tile map


def tile_map(config: AttentionConfig, x: Operands, kv_len: int) -> jax.Array:
    """What each tile is, int32 `[b, n, ceil(T / block_q), ceil(S / block_kv)]`.

    NOT_LISTED, FULL, or the row of its bits in the masks. Of a tile that is listed
    twice, which the caller promised not to do, the largest counts.
    """
    num_kv = -(-kv_len // config.block_kv)
    entries = x.tile_indices
    used = jnp.arange(entries.shape[-1], dtype=jnp.int32) < x.tile_counts[..., None]
    used &= (entries >= 0) & (entries < num_kv)
    kinds = jnp.full_like(entries, FULL)
    if x.tile_masks is not None:
        used &= x.tile_partial < x.tile_masks.shape[0]
        kinds = jnp.maximum(x.tile_partial, FULL)
    hits = jnp.where(used, entries, num_kv)
    tiles = jnp.full((*entries.shape[:-1], num_kv + 1), NOT_LISTED, jnp.int32)
    at = jnp.ogrid[tuple(slice(n) for n in entries.shape[:-1])]
    tiles = tiles.at[(*(a[..., None] for a in at), hits)].max(kinds)
    return tiles[..., :num_kv]


def tile_bits(masks: jax.Array, tiles: jax.Array, block_kv: int) -> jax.Array:
    """Which pairs of these tiles attend, as far as a map of tiles says it.

    `tiles` is a map, or a part of one: bool `[*tiles.shape, block_q, block_kv]`.
    """
    listed, full = tiles != NOT_LISTED, tiles == FULL
    rows = jnp.clip(tiles, 0, max(masks.shape[0] - 1, 0))
    if masks.shape[0]:
        words = masks[rows]
    else:
        words = jnp.zeros((*tiles.shape, *masks.shape[1:]), jnp.uint32)
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits = (words[..., None] >> shifts & jnp.uint32(1)).astype(bool)
    bits = bits.reshape(*words.shape[:-1], words.shape[-1] * WORD_BITS)[..., :block_kv]
    return listed[..., None, None] & (full[..., None, None] | bits)
