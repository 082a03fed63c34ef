"""`paged_attention` in plain JAX: one tile of queries after the other.

    for each tile: the next queries of a sequence
      for each block of the keys that some of them see:
        gather the pages that hold it; flash_attention's blocks take it in

Lengths lie on the device, so both loops end where the data says. Beside the result
there is nothing larger than a step's pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import blocked
from jax_kvblock.attention.block_problem import Labels, Problem, keys_on_left
from jax_kvblock.attention.config import Operands, Sizes, accumulator
from jax_kvblock.attention.dense import window_of
from jax_kvblock.blocks import gather_kv
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes

# Queries of a tile, and keys of a step, at most (of a page that is larger, all).
TILE_ROWS, STEP_KEYS = 64, 256


class _Tile(NamedTuple):
    """Rows of one sequence: which, and where they are in q."""

    sequence: Any
    row: Any
    labels: Labels  # [1, length]


def forward(config: PagedConfig, x: Paged) -> tuple[jax.Array, jax.Array]:
    """out `[rows, N, Dv]` and lse `[rows, N]`; zeros and −inf where nothing is seen."""
    leaves, structure = jax.tree.flatten(x)
    x = jax.tree.unflatten(structure, vary_alike(leaves))
    rows, heads, _ = x.q.shape
    dim = page_shapes(x.pages)[1][3]
    out = jnp.zeros((rows, heads, dim), x.q.dtype)
    lse = jnp.full((rows, heads), -jnp.inf, accumulator(x.q.dtype))
    if 0 in (rows, x.tables.shape[0]):
        return out, lse
    length = min(TILE_ROWS, 1 << (config.mean_rows - 1).bit_length(), rows)
    counts = -(-x.q_lens // length)
    ends = jnp.cumsum(counts, dtype=jnp.int32)

    def step(i: Any, made: Any) -> Any:
        tile = _find(config, x, ends, counts, length, i)
        return _write(made, tile, _attend(config, x, tile, length))

    return blocked.loop(ends[-1], step, _varying(x, out, lse))


def _varying(x: Paged, *state: jax.Array) -> tuple[jax.Array, ...]:
    """What a loop begins with: inside shard_map it varies as the operands do."""
    return tuple(vary_alike([*state, x.q])[:-1])


def _find(
    config: PagedConfig, x: Paged, ends: Any, counts: Any, length: int, i: Any
) -> _Tile:
    """Tile i. It is moved back where it would pass the end of q."""
    b = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
    first = (i - (ends[b] - counts[b])) * length
    row = jnp.minimum(x.q_first[b] + first, x.q.shape[0] - length)
    query = row - x.q_first[b] + jnp.arange(length, dtype=jnp.int32)
    valid = (query >= first) & (query < x.q_lens[b])
    window = window_of(config.scores, query, x.kv_lens[b] - x.q_lens[b])
    none = jnp.zeros_like(query)
    return _Tile(b, row, Labels(*(a[None] for a in (*window, none, none, valid))))


def _attend(
    config: PagedConfig, x: Paged, tile: _Tile, length: int
) -> tuple[jax.Array, jax.Array]:
    """out `[length, N, Dv]` and lse `[length, N]` of a tile."""
    (blocks, size, heads, dim), (*_, value_dim) = page_shapes(x.pages)
    width, kv_len = x.tables.shape[1], x.kv_lens[tile.sequence]
    pages = max(1, min(STEP_KEYS // size, width))
    keys = pages * size
    more = max(-width % pages, pages - width)
    table = jnp.pad(x.tables[tile.sequence], (0, more), constant_values=-1)
    q = jax.lax.dynamic_slice_in_dim(x.q, tile.row, length, 0)
    compute = accumulator(q.dtype)
    sizes = Sizes(1, length, keys, q.shape[1], heads, dim, value_dim)
    problem = Problem(
        size=sizes,
        block_q=length,
        block_kv=keys,
        q=jnp.moveaxis(q, 0, 1)[None].astype(compute),
        k=None,
        v=None,
        bias=None,
        q_labels=tile.labels,
        kv_labels=tile.labels,
        listed=None,
        keys_on_left=keys_on_left(sizes),
    )
    operands = Operands(q, q, q, sinks=x.sinks)

    def add(s: Any, state: Any) -> Any:
        ids = jax.lax.dynamic_slice_in_dim(table, s * pages, pages)
        key = s * keys + jnp.arange(keys, dtype=jnp.int32)
        there = jnp.repeat((ids >= 0) & (ids < blocks), size) & (key < kv_len)
        k, v = (
            jnp.moveaxis(jnp.where(there[:, None, None], a, 0), 0, 1)[None]
            for a in _gather(config, x, ids)
        )
        none = jnp.zeros_like(key)
        labels = Labels(*(a[None] for a in (key, key, none, none, there)))
        block = problem._replace(
            k=k.astype(compute), v=v.astype(compute), kv_labels=labels
        )
        return blocked.add_block(config.scores, operands, block, 0, 0, state)

    begin = jnp.maximum(
        jnp.where(tile.labels.valid, tile.labels.first, kv_len).min(), 0
    )
    last = jnp.where(tile.labels.valid, tile.labels.last, -1).max()
    end = jnp.minimum(last, kv_len - 1) + 1
    state = _varying(x, *blocked.no_keys(operands, problem, value_dim))
    state = jax.lax.fori_loop(begin // keys, -(-end // keys), add, state)
    o, lse = blocked.finish(operands, problem, 0, *state)
    o, rows = (a.reshape(-1, *a.shape[3:]) for a in (o, lse.value))
    return jnp.moveaxis(o, 0, 1), rows.T


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
        valid = tile.labels.valid[0].reshape(-1, *[1] * (own.ndim - 1))
        new = jnp.where(valid, own, old)
        return jax.lax.dynamic_update_slice_in_dim(all_, new, tile.row, 0)

    return tuple(put(all_, own) for all_, own in zip(made, results, strict=True))
