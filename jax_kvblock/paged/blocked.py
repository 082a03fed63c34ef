"""`paged_attention` in plain JAX: one tile of queries after the other.

    for each tile: the next queries of a sequence
      for each block of the keys that some of them see:
        gather the pages that hold it; an online softmax takes it in

Lengths lie on the device, so both loops end where the data says. Beside the result
there is nothing larger than a step's pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.blocks import gather_kv
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes

# Queries of a tile, and keys of a step, at most (of a page that is larger, all).
TILE_ROWS, STEP_KEYS = 64, 256


class _Tile(NamedTuple):
    """Rows of one sequence: which, where they are, and the keys that each sees."""

    sequence: Any
    row: Any
    valid: Any  # [rows]
    begin: Any  # [rows]
    end: Any


def forward(config: PagedConfig, x: Paged) -> tuple[jax.Array, jax.Array]:
    """out `[rows, N, Dv]` and lse `[rows, N]`; zeros and −inf where nothing is seen."""
    leaves, structure = jax.tree.flatten(x)
    x = jax.tree.unflatten(structure, vary_alike(leaves))
    rows, heads, _ = x.q.shape
    dim = page_shapes(x.pages)[1][3]
    compute = jnp.promote_types(x.q.dtype, jnp.float32)
    out = _full(x, (rows, heads, dim), 0, x.q.dtype)
    lse = _full(x, (rows, heads), -jnp.inf, compute)
    if 0 in (rows, x.tables.shape[0]):
        return out, lse
    length = min(TILE_ROWS, 1 << (config.mean_rows - 1).bit_length(), rows)
    counts = -(-x.q_lens // length)
    ends = jnp.cumsum(counts, dtype=jnp.int32)

    def step(i: Any, made: Any) -> Any:
        tile = _find(config, x, ends, counts, length, i)
        return _write(made, tile, _attend(config, x, tile, length, compute))

    return jax.lax.fori_loop(jnp.int32(0), ends[-1], step, (out, lse))


def _full(x: Paged, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
    """What a loop begins with: inside shard_map it varies as the operands do."""
    return vary_alike([jnp.full(shape, value, dtype), x.q])[0]


def _find(
    config: PagedConfig, x: Paged, ends: Any, counts: Any, length: int, i: Any
) -> _Tile:
    """Tile i. It is moved back where it would pass the end of q."""
    b = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
    first = (i - (ends[b] - counts[b])) * length
    wanted = x.q_first[b] + first
    row = jnp.minimum(wanted, x.q.shape[0] - length)
    query = row - x.q_first[b] + jnp.arange(length, dtype=jnp.int32)
    valid = (query >= first) & (query < x.q_lens[b])
    position = x.kv_lens[b] - x.q_lens[b] + query
    left, right = config.scores.window_left, config.scores.window_right
    begin, end = jnp.zeros_like(position), jnp.full_like(position, x.kv_lens[b])
    # No sum passes the ends of int32, whatever the window is.
    if left >= 0:
        begin = jnp.maximum(jnp.maximum(position, 0) - left, 0)
    if right >= 0:
        end = position + jnp.minimum(min(right, 2**31 - 2) + 1, end - position)
    return _Tile(b, row, valid, begin, jnp.where(valid, end, 0))


def _attend(
    config: PagedConfig, x: Paged, tile: _Tile, length: int, compute: Any
) -> tuple[jax.Array, jax.Array]:
    """out `[length, N, Dv]` and lse `[length, N]` of a tile."""
    (blocks, size, heads, _), (*_, dim) = page_shapes(x.pages)
    width = x.tables.shape[1]
    pages = max(1, min(STEP_KEYS // size, width))
    keys = pages * size
    more = max(-width % pages, pages - width)
    table = jnp.pad(x.tables[tile.sequence], (0, more), constant_values=-1)
    q = jax.lax.dynamic_slice_in_dim(x.q, tile.row, length, 0).astype(compute)
    q = q.reshape(length, heads, -1, q.shape[-1]) * config.scores.scale
    group = q.shape[2]

    def add(s: Any, state: Any) -> Any:
        top, total, o = state
        ids = jax.lax.dynamic_slice_in_dim(table, s * pages, pages)
        there = jnp.repeat((ids >= 0) & (ids < blocks), size)
        key = s * keys + jnp.arange(keys, dtype=jnp.int32)
        there &= key < x.kv_lens[tile.sequence]
        k, v = (
            jnp.where(there[:, None, None], a, 0).astype(compute)
            for a in _gather(config, x, ids)
        )
        scores = jnp.einsum("tkgd,skd->tkgs", q, k, precision="highest")
        if cap := config.scores.softcap:
            scores = cap * jnp.tanh(scores / cap)
        seen = there & (key >= tile.begin[:, None]) & (key < tile.end[:, None])
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new = jnp.maximum(top, scores.max(-1))
        reference = jnp.where(jnp.isneginf(new), 0, new)
        p = jnp.exp(scores - reference[..., None])
        factor = jnp.exp(top - reference)
        added = jnp.einsum("tkgs,skd->tkgd", p, v, precision="highest")
        return new, total * factor + p.sum(-1), o * factor[..., None] + added

    per_head = (length, heads, group)
    state = (
        _full(x, per_head, -jnp.inf, compute),
        _full(x, per_head, 0, compute),
        _full(x, (*per_head, dim), 0, compute),
    )
    first = jnp.where(tile.valid, tile.begin, jnp.iinfo(jnp.int32).max).min()
    top, total, o = jax.lax.fori_loop(
        first // keys, -(-tile.end.max() // keys), add, state
    )
    if x.sinks is not None:
        sink = x.sinks.reshape(1, heads, group).astype(compute)
        joint = jnp.maximum(top, sink)
        reference = jnp.where(jnp.isneginf(joint), 0, joint)
        factor = jnp.exp(top - reference)
        total = total * factor + jnp.exp(sink - reference)
        top, o = joint, o * factor[..., None]
    nothing = total == 0
    some = jnp.where(nothing, 1, total)
    out = (o / some[..., None]).reshape(length, heads * group, dim)
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(some))
    return out.astype(x.q.dtype), lse.reshape(length, heads * group)


def _gather(config: PagedConfig, x: Paged, ids: Any) -> tuple[jax.Array, jax.Array]:
    """Keys `[n T, K, D]` and values of these blocks; of a bad id, anything."""
    if isinstance(x.pages, KVPool):
        layer: Any = x.layer if config.layer is None else config.layer
        k, v = gather_kv(x.pages, layer, ids)
        assert v is not None  # num_outer is 2
        return k, v
    k, v = (_rows(a, ids) for a in x.pages)
    return k, v


def _rows(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """`[n T, K, D]` of these blocks.

    XLA's CPU backend has no gather of 16-bit floats: it would widen all pages ahead of
    the loop. It gathers integers as they are.
    """
    dtype = pages.dtype
    bits = jnp.uint16 if dtype.itemsize == 2 else dtype
    pages, ids = jax.lax.optimization_barrier((pages, ids))
    made = jax.lax.bitcast_convert_type(pages, bits).at[ids].get(mode="clip")
    return jax.lax.bitcast_convert_type(made, dtype).reshape(-1, *pages.shape[2:])


def _write(made: Any, tile: _Tile, results: Any) -> Any:
    """The tile's valid rows; beside them lie those of others."""

    def put(all_: jax.Array, own: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_slice_in_dim(all_, tile.row, own.shape[0], 0)
        valid = tile.valid.reshape(-1, *[1] * (own.ndim - 1))
        new = jnp.where(valid, own, old)
        return jax.lax.dynamic_update_slice_in_dim(all_, new, tile.row, 0)

    return tuple(put(all_, own) for all_, own in zip(made, results, strict=True))
