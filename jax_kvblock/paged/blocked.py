"""`paged_attention` in plain JAX: one tile of queries after the other.

    for each tile: the next queries of a sequence
      for each block of the keys that some of them see:
        gather the pages that hold it; flash_attention's blocks take it in

Lengths lie on the device, so both loops end where the data says. Beside the result
there is nothing larger than a step's pages.

With `split_size` all tiles have one shape, and begin with a sequence's first query:
then what is computed for a row is the same program on the same numbers in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import blocked
from jax_kvblock.attention.block_problem import Labels, Problem, keys_on_left
from jax_kvblock.attention.config import Operands, Sizes, accumulator, row_of_each
from jax_kvblock.attention.dense import window_of
from jax_kvblock.blocks import gather_kv
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.paged import narrow
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes, value_dim_of
from jax_kvblock.paged.heads import HeadPart

# Queries of a tile, and keys of a step, at most (of a page that is larger, all).
TILE_ROWS, STEP_KEYS = 64, 256
# Queries of a tile where its shape must not depend on the call (`split_size`).
SPLIT_ROWS = 8


class _Rows(NamedTuple):
    """The rows of all calls, one after the other, and which are whose.

    Attributes:
      q: `[C R, N, D]`, and a tile beyond them where they all begin with a sequence.
      first, lens: int32 `[B]`, a sequence's first row and how many it has.
      kv_lens: int32 `[B]`, from 0 to W T.
      ranges, tree_mask: int32 `[C R, 2]` and `[C R, words]`, with as many rows as q, or
        None.
    """

    q: jax.Array
    first: jax.Array
    lens: jax.Array
    kv_lens: jax.Array
    ranges: Any
    tree_mask: Any


class _Tile(NamedTuple):
    """Rows of one sequence: which, and where they are in q."""

    sequence: Any
    row: Any
    labels: Labels  # [1, length]
    bits: Any  # of tree_mask, [length, words], or None


def forward(
    config: PagedConfig, x: Paged, part: HeadPart | None = None
) -> tuple[jax.Array, jax.Array]:
    """out `[C, R, N, Dv]`, lse `[C, R, N]`; zeros and −inf where nothing is seen."""
    lead, heads, dtype = x.q.shape[:2], x.q.shape[2], x.q.dtype
    rows, batch = lead[0] * lead[1], x.kv_lens.shape[0]
    dim = value_dim_of(config, x)
    mean = -(-rows // max(batch, 1))
    length = min(TILE_ROWS, 1 << (mean - 1).bit_length(), rows)
    if config.split_size:
        length = SPLIT_ROWS
    beyond = length if config.split_size else 0  # no tile needs to be moved back
    if config.quantize_queries and rows and batch:
        of = _rows_of(x, beyond)
        x = narrow.rounded(config, x, of.first, of.lens, part)
    out = jnp.zeros((rows + beyond, heads, dim), x.q.dtype)
    lse = jnp.full((rows + beyond, heads), -jnp.inf, accumulator(x.q.dtype))
    if rows and batch:
        of = _rows_of(x, beyond)
        counts = -(-of.lens // length)
        ends = jnp.cumsum(counts, dtype=jnp.int32)

        def step(i: Any, made: Any) -> Any:
            tile = _find(config, of, ends, counts, length, i)
            return _write(made, tile, _attend(config, x, of, tile, length, part))

        out, lse = blocked.loop(ends[-1], step, _varying(x, out, lse))
    out = out[:rows].astype(dtype)
    return out.reshape(*lead, heads, dim), lse[:rows].reshape(*lead, heads)


def _rows_of(x: Paged, beyond: int) -> _Rows:
    """Nothing of what the operands say is trusted."""
    calls, length = x.q.shape[:2]
    (_, size, *_), _ = page_shapes(x.pages)
    width, most = x.tables.shape[-1], 2**31 - 1
    longest: Any = min(width * size, most)
    if x.table_first is not None:
        longest = jnp.minimum(width - x.table_first, most // size) * size
    if x.query_start is not None:
        starts = jnp.clip(x.query_start, 0, length)
        falls = (starts[:, 1:] < starts[:, :-1]).any()
        starts = jnp.where(falls, 0, starts)
        first, end = starts[:, :-1], starts[:, 1:]
    else:
        lens = jnp.full(calls, length, jnp.int32) if x.q_lens is None else x.q_lens
        end = jnp.clip(lens, 0, length)[:, None]
        first = jnp.zeros_like(end)
    call = jnp.arange(calls, dtype=jnp.int32)[:, None] * length
    first, lens = (call + first).reshape(-1), (end - first).reshape(-1)
    kv_lens = jnp.clip(x.kv_lens, 0, longest)
    # Where they are constants, XLA's GPU backend would put them into the loops' bodies,
    # and then fails to count the loops' steps.
    first, lens, kv_lens = jax.lax.optimization_barrier((first, lens, kv_lens))

    def rows(a: jax.Array) -> jax.Array:
        a = a.reshape(calls * length, *a.shape[2:])
        return jnp.pad(a, [(0, beyond), *[(0, 0)] * (a.ndim - 1)])

    ranges, tree_mask = (
        None if a is None else rows(a) for a in (x.ranges, x.tree_mask)
    )
    return _Rows(rows(x.q), first, lens, kv_lens, ranges, tree_mask)


def _varying(x: Paged, *state: jax.Array) -> tuple[jax.Array, ...]:
    """What a loop begins with: inside shard_map it varies as the operands do."""
    return tuple(vary_alike([*state, x.q])[:-1])


def _find(
    config: PagedConfig,
    of: _Rows,
    ends: Any,
    counts: Any,
    length: int,
    i: Any,
) -> _Tile:
    """Tile i. It is moved back where it would pass the end of q."""
    b = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
    first = (i - (ends[b] - counts[b])) * length
    row = jnp.minimum(of.first[b] + first, of.q.shape[0] - length)
    query = row - of.first[b] + jnp.arange(length, dtype=jnp.int32)
    valid = (query >= first) & (query < of.lens[b])
    first_key, last_key = window_of(config.scores, query, of.kv_lens[b] - of.lens[b])

    def own(a: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, row, length, 0)

    if of.ranges is not None:
        begin, end = own(of.ranges).T
        first_key = jnp.maximum(first_key, begin)
        last_key = jnp.minimum(last_key, jnp.maximum(end, -(2**31) + 1) - 1)
    none = jnp.zeros_like(query)
    labels = (first_key, last_key, none, none, valid, valid)
    bits = None if of.tree_mask is None else own(of.tree_mask)
    return _Tile(b, row, Labels(*(a[None] for a in labels)), bits)


def _attend(
    config: PagedConfig,
    x: Paged,
    of: _Rows,
    tile: _Tile,
    length: int,
    part: HeadPart | None,
) -> tuple[jax.Array, jax.Array]:
    """out `[length, N, Dv]` and lse `[length, N]` of a tile."""
    blocks, size, heads, dim = page_shapes(x.pages)[0]
    value_dim = value_dim_of(config, x)
    if part is not None:
        heads = part.heads
    width, kv_len = x.tables.shape[-1], of.kv_lens[tile.sequence]
    call = tile.sequence // x.sequences
    layer = _layer_of(config, x, call)
    pages = max(1, STEP_KEYS // size)
    if not config.split_size:
        pages = max(1, min(pages, width))
    keys = pages * size
    find = _finder(x, tile, pages)
    q = jax.lax.dynamic_slice_in_dim(of.q, tile.row, length, 0)
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
    sinks = x.sinks
    if sinks is not None:
        sinks = row_of_each(sinks, x.calls)[call][None]
    operands = Operands(q, q, q, sinks=sinks)

    some = tile.labels.valid & (tile.labels.first <= tile.labels.last)
    begin = jnp.maximum(jnp.where(some, tile.labels.first, kv_len).min(), 0)
    last = jnp.where(some, tile.labels.last, -1).max()
    end = jnp.minimum(last, kv_len - 1) + 1

    def add(s: Any, state: Any) -> Any:
        ids = find(s)
        key = s * keys + jnp.arange(keys, dtype=jnp.int32)
        there = jnp.repeat((ids >= 0) & (ids < blocks), size)
        there &= (key >= begin) & (key < end)  # nobody reads the others, not even a NaN
        if isinstance(x.pages, KVPool) and isinstance(layer, jax.Array):
            there &= (layer >= 0) & (layer < x.pages.spec.num_layers)
        seen = None
        if x.ranges is not None or x.tree_mask is not None:
            seen = _seen(tile, key, key - (kv_len - of.lens[tile.sequence]))
            there &= seen.any(0)
            seen = seen[None]
        k, *v = (
            jnp.moveaxis(jnp.where(there[:, None, None], a, 0), 0, 1)[None]
            for a in _gather(x, layer, ids, part)
        )
        k, *v = (a.astype(compute) for a in (k, *v))
        values = v[0] if v else k[..., :value_dim]
        none = jnp.zeros_like(key)
        labels = Labels(*(a[None] for a in (key, key, none, none, there, there)))
        block = problem._replace(k=k, v=values, kv_labels=labels, seen=seen)
        return blocked.add_block(config.scores, operands, block, 0, 0, state)

    state = _varying(x, *blocked.no_keys(operands, problem, value_dim))
    state = jax.lax.fori_loop(begin // keys, -(-end // keys), add, state)
    o, lse = blocked.finish(operands, problem, 0, *state)
    o, rows = (a.reshape(-1, *a.shape[3:]) for a in (o, lse.value))
    return jnp.moveaxis(o, 0, 1), rows.T


def _seen(tile: _Tile, key: jax.Array, new: jax.Array) -> jax.Array:
    """bool `[length, keys]`: who sees which. `new`: of the sequence's own queries."""
    row = Labels(*(a[0][:, None] for a in tile.labels))
    seen = row.valid & (key >= row.first) & (key <= row.last)
    if tile.bits is None:
        return seen
    words = tile.bits.shape[-1]
    word = new >> 5
    bits = jnp.take(tile.bits, word, axis=1, mode="clip") >> (new & 31)
    return seen & ((word < 0) | (word >= words) | (bits & 1 == 1))


def _layer_of(config: PagedConfig, x: Paged, call: Any) -> Any:
    if x.layer is None:
        return config.layer
    return x.layer[call] if x.layer.shape[0] > 1 else x.layer[0]


def _finder(x: Paged, tile: _Tile, pages: int) -> Callable[[Any], jax.Array]:
    """A function of a step: the ids `[pages]` of its blocks, −1 beyond the table."""
    if x.table_first is None:
        width = x.tables.shape[1]
        more = max(-width % pages, pages - width)
        table = jnp.pad(x.tables[tile.sequence], (0, more), constant_values=-1)
        return lambda s: jax.lax.dynamic_slice_in_dim(table, s * pages, pages)
    first = x.table_first[tile.sequence]
    at = first + jnp.arange(pages, dtype=jnp.int32)
    return lambda s: x.tables.at[at + s * pages].get(mode="fill", fill_value=-1)


def _gather(
    x: Paged, layer: Any, ids: Any, part: HeadPart | None
) -> tuple[jax.Array, ...]:
    """Keys `[n T, K, D]` and values of these blocks; of a bad id, anything.

    Of a latent cache there are keys alone: they are read once.
    """
    rows = _gather_all(x, layer, ids)
    return rows if part is None else tuple(part.of(a, 1) for a in rows)


def _gather_all(x: Paged, layer: Any, ids: Any) -> tuple[jax.Array, ...]:
    if isinstance(x.pages, KVPool):
        k, v = gather_kv(x.pages, layer, ids)
        k = _times(x, k, x.k_scale, layer, ids)
        return (k,) if v is None else (k, _times(x, v, x.v_scale, layer, ids))
    k, v = x.pages.layout.take(x.pages.arrays, ids)
    if x.scales is not None:
        wide = accumulator(x.q.dtype)
        k, v = (
            a.astype(wide) * scale.astype(wide)
            for a, scale in zip(
                (k, v), x.scales.layout.take(x.scales.arrays, ids), strict=True
            )
        )
    k, v = (a.reshape(-1, *a.shape[2:]) for a in (k, v))
    return _times(x, k, x.k_scale, None, ids), _times(x, v, x.v_scale, None, ids)


def _times(x: Paged, a: jax.Array, scale: Any, layer: Any, ids: Any) -> jax.Array:
    """Keys or values `[n T, K, D]` of these blocks: what they stand for."""
    if scale is None:
        return a
    if scale.ndim == 4:
        scale = scale.at[layer, ids].get(mode="clip")
    elif scale.ndim == 3:
        scale = scale.at[ids].get(mode="clip")
    wide = accumulator(x.q.dtype)
    return a.astype(wide) * scale.reshape(-1, scale.shape[-1], 1).astype(wide)


def _write(made: Any, tile: _Tile, results: Any) -> Any:
    """The tile's valid rows; beside them lie those of others."""

    def put(all_: jax.Array, own: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_slice_in_dim(all_, tile.row, own.shape[0], 0)
        valid = tile.labels.valid[0].reshape(-1, *[1] * (own.ndim - 1))
        new = jnp.where(valid, own, old)
        return jax.lax.dynamic_update_slice_in_dim(all_, new, tile.row, 0)

    return tuple(put(all_, own) for all_, own in zip(made, results, strict=True))
