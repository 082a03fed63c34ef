"""Decode over many devices: each holds every n-th block of a sequence's cache.

Over n devices of a mesh axis, block g of a sequence lies on device g % n, as the
(g // n)-th of the blocks that this one holds of it. Lengths differ by a block at most,
wherever a sequence ends. Every device attends to its own keys, and the parts merge by
their log-sum-exp: out and lse are all that travels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.merge import merge_attention
from jax_kvblock.attention.options import Output, Rows
from jax_kvblock.core.checks import check_int32, check_positive, show
from jax_kvblock.core.types import ArrayIn, Integers, LayerIndex
from jax_kvblock.paged import arguments
from jax_kvblock.paged.attention import PagedOptions
from jax_kvblock.paged.call import page_shapes
from jax_kvblock.paged.data import check_data
from jax_kvblock.paged.primitive import attend
from jax_kvblock.parallel.axes import axis_size, hashable
from jax_kvblock.parallel.interleaved import Deal, local_call, sequence_of_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from jax_kvblock.paged.attention import Bits, Pages, Ranges, Scale, Tables

AxisName: TypeAlias = Hashable | Sequence[Hashable]


def interleaved_lens(
    kv_lens: Integers, block_size: int, axis_name: AxisName
) -> Int[jax.Array, "..."]:
    """How many keys of each sequence this device holds; inside of `jax.shard_map`.

    They are those of its blocks i, i + n, i + 2 n, … of n devices, i its place on the
    axis.

    Args:
      kv_lens: int32 of any shape, the keys of whole sequences; below 0 is 0.
      block_size: keys of a block.
      axis_name: the mesh axis, or axes, over which sequences are dealt out.

    Returns:
      int32, shaped like kv_lens. Over all devices they add up to it.

    Example:
      >>> interleaved_lens(jnp.array([37]), 4, "cp")  # 12, 12, 9, 4 on four devices
    """
    where = "interleaved_lens"
    deal = _deal(where, block_size, axis_name)
    return deal.local_len(_integers(where, "kv_lens", kv_lens))


def interleaved_tables(
    block_tables: Tables, axis_name: AxisName
) -> Int[jax.Array, "B width"]:
    """This device's block tables, from those of whole sequences; inside of `shard_map`.

    Who hands out blocks has one free list for each device, and one table: block g of a
    sequence is taken from the list of device g % n.

    Args:
      block_tables: int32 `[B, W]`, the same on all devices: in column g the id of block
        g in the pool of its own device, g % n.
      axis_name: the mesh axis, or axes, over which sequences are dealt out.

    Returns:
      int32 `[B, ceil(W / n)]`: columns i, i + n, …, and −1 where there are none.

    Example:
      >>> tables = interleaved_tables([[5, 3, 5, 0, 2]], "cp")  # [[5, 2]] on device 0
    """
    where = "interleaved_tables"
    size = axis_size(where, hashable(axis_name))
    tables = check_int32(where, "block_tables", block_tables, "[B, W]", 2)
    batch, width = tables.shape
    tables = jnp.pad(tables, ((0, 0), (0, -width % size)), constant_values=-1)
    dealt = tables.reshape(batch, -(-width // size), size)
    own = jax.lax.axis_index(hashable(axis_name))
    return jax.lax.dynamic_index_in_dim(dealt, own, 2, keepdims=False)


def interleaved_slots(
    positions: Integers,
    block_tables: Tables,
    block_size: int,
    axis_name: AxisName,
    *,
    query_start: Integers | None = None,
) -> Int[jax.Array, "..."]:
    """Where new tokens go in this device's pool, −1 for those of other devices.

    `append_kv` and `rope_append` drop −1: all devices are given the same tokens, and
    each writes its own. Call it inside of `jax.shard_map`.

    Args:
      positions: int32 `[B]` or `[B, T]`, the positions of new tokens in their whole
        sequences; with query_start `[tokens]`, sequences one after the other.
      block_tables: int32 `[B, width]`, this device's (`interleaved_tables`).
      block_size: keys of a block.
      axis_name: the mesh axis, or axes, over which sequences are dealt out.
      query_start: int32 `[B + 1]`, the first token of each sequence and the end of the
        last.

    Returns:
      int32, shaped like positions. −1, too, for positions below 0 or beyond the table,
      ids below 0, and tokens of no sequence.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit.

    Example:
      >>> slots = interleaved_slots(lens - 1, tables, 16, "cp")  # a decode step
      >>> pool = append_kv(pool, layer, k, v, slots)
    """
    where = "interleaved_slots"
    deal = _deal(where, block_size, axis_name)
    positions = _integers(where, "positions", positions)
    tables = check_int32(where, "block_tables", block_tables, "[B, width]", 2)
    batch, width = tables.shape
    _check_positions(where, positions, batch, ragged=query_start is not None)
    if not batch or not width:
        return jnp.full_like(positions, -1)
    if query_start is None:
        row = jnp.arange(batch, dtype=jnp.int32)
        row = row.reshape(-1, *[1] * (positions.ndim - 1))
    else:
        starts = _starts(where, query_start, batch)
        row = sequence_of_rows(starts[None], positions.shape[0])[0]
    number = deal.number(positions)
    block, place = jnp.divmod(number, deal.block_size)
    there = (number >= 0) & (row >= 0) & (block < width)
    ids = tables.at[row, block].get(mode="clip")
    there &= (ids >= 0) & (ids < (2**31 - 1) // deal.block_size)
    return jnp.where(there, ids * deal.block_size + place, -1)


@overload
def interleaved_paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    axis_name: AxisName,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> Output: ...
@overload
def interleaved_paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    axis_name: AxisName,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Output, Rows]: ...
@overload
def interleaved_paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    axis_name: AxisName,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Output | tuple[Output, Rows]: ...
def interleaved_paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    axis_name: AxisName,
    query_start: Integers | None = None,
    q_lens: Integers | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[ArrayIn, " N"] | None = None,
    scale: float | None = None,
    ranges: Ranges | None = None,
    tree_mask: Bits | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    split_size: int | None = None,
    q_heads: tuple[int | jax.Array, int] | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Output | tuple[Output, Rows]:
    """`paged_attention` over sequences whose blocks are dealt out to devices.

    Call it inside of `jax.shard_map`. Block g of a sequence lies on device g % n of the
    axis, as its (g // n)-th: each device has a pool and block tables of its own. It
    attends to the keys that it holds, by `paged_attention`, and `merge_attention` puts
    the parts together over the axis. One all-reduce is all that travels, of n times out
    and lse in float32; where that is more than 1 MiB, three: one of out's size, two of
    lse's.

    Attention over a cache that is cut by positions is context-parallel decode (Yang et
    al., "Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783,
    2024); parts of keys whose results merge are flash-decoding (Dao et al., 2023), and
    the sum itself the online softmax of Milakov and Gimelshein (2018). A token's keys
    are dealt out by blocks, so that all devices have equal shares of every sequence.

    Args:
      q: `[tokens, N, D]` with query_start, else `[B, T, N, D]`; the same on all devices
        of the axis.
      pages: this device's: all that `paged_attention` takes, a latent cache, too.
      layer: of the pool, None without one.
      block_tables: int32 `[B, width]`, this device's (`interleaved_tables`): ids of its
        own pool, in column c that of block c n + i of the sequence.
      kv_lens: int32 `[B]`, the keys of whole sequences, the new ones among them, not
        this device's; the same on all of them. Lengths beyond `n width T` are that.
      axis_name: the mesh axis, or axes, over which sequences are dealt out; or an axis
        of `jax.vmap`.
      query_start, q_lens, causal, window, softcap, scale: as in `paged_attention`.
        Positions are those of the whole sequence.
      sinks: as there, the same on all devices. They count once.
      ranges: as there; positions of the whole sequence.
      tree_mask: as there. With query_start, sequences of more queries than there are
        bits see as without it.
      k_scale, v_scale: as there, of this device's blocks. One number, or one for each
        head, is the same on all devices.
      split_size, q_heads, value_dim, implementation: as there, of each device's part.
      return_lse: also return the log-sum-exp, float32.

    Returns:
      out, shaped like q but for its last dim, Dv, in q's dtype; with `return_lse` the
      pair `(out, lse)`. The same on all devices of the axis, which `shard_map` knows
      (`out_specs` without it, also with `check_vma`).

    Raises:
      TypeError, ValueError, IndexError: an argument's dtype, shape or value does not
        fit, or there is no such axis.

    Wrong data is as safe as in `paged_attention`: ids of no block, lengths beyond the
    tables, NaN in slots that nobody may read. It has no derivative.

    Which of a device's keys a query sees is worked out where a sequence may have
    several queries, or where there is a window: then it calls `paged_attention` with
    `ranges`. A plain decode step is q `[B, 1, N, D]` without a window. Of a long chunk
    the keys before it need no ranges, so Hopper's faster kernel has them: pass the
    lengths before the chunk with `causal=False` and `return_lse=True`, attend to the
    chunk's own k and v by `flash_attention`, and merge both.

    Example:
      >>> @functools.partial(jax.shard_map, mesh=mesh, out_specs=P(),
      ...     in_specs=(P(), P("cp"), P(), P()))
      ... def decode(q, pool, tables, lens):  # q [B, 1, N, D]; the pool cut by blocks
      ...     own = interleaved_tables(tables, "cp")
      ...     return interleaved_paged_attention(q, pool, 0, own, lens, axis_name="cp")
    """
    where = "interleaved_paged_attention"
    axis_name = hashable(axis_name)
    config, x, lead = arguments.normalize(
        where,
        q,
        pages,
        layer,
        block_tables,
        kv_lens,
        query_start=query_start,
        q_lens=q_lens,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        ranges=ranges,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        split_size=split_size,
        q_heads=q_heads,
        value_dim=value_dim,
        return_lse=return_lse,
        implementation=implementation,
    )
    deal = _deal(where, page_shapes(x.pages)[0][1], axis_name)
    config, x = local_call(config, x, deal)
    check_data(where, config, x)
    out, lse = merge_attention([attend(config, x)], axis_name=axis_name)
    if len(lead) == 1:  # one call, of ragged sequences
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _deal(where: str, block_size: Any, axis_name: Any) -> Deal:
    (block_size,) = check_positive(where, block_size=block_size)
    size = axis_size(where, hashable(axis_name))
    return Deal(block_size, size, jax.lax.axis_index(hashable(axis_name)))


def _integers(where: str, name: str, x: Any) -> jax.Array:
    """int32 of any shape."""
    x = getattr(x, "ids", x)
    return check_int32(where, name, x, "[...]", _rank(x))


def _rank(x: Any) -> int:
    if isinstance(x, (list, tuple, range)):
        return 1 + (_rank(x[0]) if len(x) else 0)
    return np.ndim(x)


def _starts(where: str, query_start: Any, batch: int) -> jax.Array:
    starts = check_int32(where, "query_start", query_start, f"[{batch + 1}]", 1)
    if starts.shape != (batch + 1,):
        raise ValueError(
            f"{where}: query_start must be int32[{batch + 1}], the first token of each "
            f"row of block_tables and the end of the last, got {show(starts)}"
        )
    return starts


def _check_positions(where: str, positions: Any, batch: int, *, ragged: bool) -> None:
    if ragged and positions.ndim != 1:
        raise ValueError(
            f"{where}: with query_start positions must be int32[tokens], got "
            f"{show(positions)}; flatten them, or leave query_start out for [B, T]"
        )
    if not ragged and (positions.ndim not in (1, 2) or positions.shape[0] != batch):
        raise ValueError(
            f"{where}: positions must be int32[{batch}] or [{batch}, T], those of each "
            f"row of block_tables, got {show(positions)}; pass query_start for "
            "sequences of different lengths, one after the other"
        )
