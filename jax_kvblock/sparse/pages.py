"""Decoding that skips: the pages of a cache that a step reads.

`paged_attention` reads what a table names, so a list of pages is a shorter table. Pages
keep their order, and those of a step's own positions are always last; before them
causal attention asks no position of a key but that it came earlier. A table is of a
sequence, so all heads of a sequence read the same pages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import default_scale
from jax_kvblock.blocks import KVPool, gather_kv
from jax_kvblock.core.checks import (
    as_array,
    check_array,
    check_int32,
    check_positive,
    show,
    shown,
    to_jax,
)
from jax_kvblock.core.types import ArrayIn, Integers, LayerIndex
from jax_kvblock.sparse.budget import check_count, check_number
from jax_kvblock.sparse.gate import shares
from jax_kvblock.sparse.select import keep, lists_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Keys: TypeAlias = KVPool | Float[ArrayIn, "P T K D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageSummary:
    """Between what a page's keys lie, number by number: float32 `[P, K, D]` each.

    Attributes:
      low, high: the smallest and the largest numbers.
      block_size: tokens to a page, which `select_pages` compares; None is not known.
    """

    low: jax.Array
    high: jax.Array
    block_size: int | None = dataclasses.field(default=None, metadata={"static": True})


class PageChoice(NamedTuple):
    """What `paged_attention` is given in place of the whole table.

    Attributes:
      block_tables: int32 `[B, num_pages]`, −1 behind a sequence's last page.
      kv_lens: int32 `[B]`, the keys in them.
      mass: float32 `[B]`, the share of a sequence's estimated attention, apart from
        the pages that are always read, that the chosen ones hold. It has no gradient.
    """

    block_tables: jax.Array
    kv_lens: jax.Array
    mass: jax.Array


def summarize_pages(
    keys: Keys, layer: LayerIndex | None = None, ids: Integers | None = None
) -> PageSummary:
    """The smallest and largest numbers of each page's keys.

    Args:
      keys: a `KVPool` with a layer, or one layer's pages `[P, T, K, D]`.
      layer: of the pool, an integer or traced; None without a pool.
      ids: int32 `[n]`: these pages alone; all of them unless given. Those outside of 0
        to P − 1 give zeros.

    Returns:
      A `PageSummary` of `[P, K, D]`, or `[n, K, D]`. Slots that are not written yet
      count; nobody asks of a page before it is full.

    Raises:
      TypeError, ValueError: arguments do not fit.

    Example:
      >>> summary = summarize_pages(pool, layer)

    Source: Tang et al., Quest (arXiv:2406.10774).
    """
    return _summarized("summarize_pages", keys, layer, ids)


def _summarized(where: str, keys: Any, layer: Any, ids: Any) -> PageSummary:
    if isinstance(keys, KVPool):
        if layer is None:
            raise TypeError(
                f"{where}: layer must be an integer beside a KVPool, got None; a "
                "summary is of one layer"
            )
        wanted = range(keys.num_blocks) if ids is None else ids
        k, _ = gather_kv(keys, layer, wanted)
        pages = k.reshape(-1, keys.spec.block_size, *k.shape[1:])
    elif layer is not None:
        raise ValueError(
            f"{where}: layer must be None with the pages of one layer, got "
            f"{shown(layer)}; a KVPool has layers"
        )
    else:
        pages = to_jax(check_array(where, "keys", keys))
        if pages.ndim != 4:
            raise ValueError(
                f"{where}: keys must be [P, T, K, D], got {show(pages)}; pass the "
                "pages of one layer, or a KVPool and a layer"
            )
        if ids is not None:
            ids = check_int32(where, "ids", ids, "[n]", 1)
            at = jnp.where(ids < 0, len(pages), ids)
            pages = pages.at[at].get(mode="fill", fill_value=0)
    size = pages.shape[1]
    pages = pages.astype(jnp.float32)
    return PageSummary(pages.min(1), pages.max(1), size)


def refresh_summary(
    summary: PageSummary,
    keys: Keys,
    ids: Integers,
    layer: LayerIndex | None = None,
) -> PageSummary:
    """A summary of all pages after these were written.

    Args:
      summary: of all pages, `[P, K, D]`; donate it to update it in place.
      keys, layer: as in `summarize_pages`.
      ids: int32 `[n]`, the pages that were written; those outside of 0 to P − 1 do
        nothing.

    Raises:
      TypeError, ValueError: arguments do not fit.

    Example:
      >>> summary = refresh_summary(summary, pool, slots // block_size, layer)
    """
    where = "refresh_summary"
    _check_summary(where, summary)
    ids = check_int32(where, "ids", ids, "[n]", 1)
    count = summary.low.shape[0]
    inside = (ids >= 0) & (ids < count)
    new = _summarized(where, keys, layer, jnp.where(inside, ids, 0))
    if new.low.shape[1:] != summary.low.shape[1:]:
        raise ValueError(
            f"{where}: summary must be of pages of {list(new.low.shape[1:])}, KV heads "
            f"and head dim, got {show(summary.low)}; summarize_pages makes it of the "
            "same keys"
        )
    _check_size(where, summary, new.block_size)
    at = jnp.where(inside, ids, count)
    return PageSummary(
        summary.low.at[at].set(new.low, mode="drop"),
        summary.high.at[at].set(new.high, mode="drop"),
        summary.block_size,
    )


def select_pages(
    q: Float[ArrayIn, "B T N D"],
    summary: PageSummary,
    block_tables: Int[ArrayIn, "B W"],
    kv_lens: Integers,
    *,
    num_pages: int,
    block_size: int,
    sinks: int = 1,
    scale: float | None = None,
) -> PageChoice:
    """The pages that a step of decoding reads: at most `num_pages` a sequence.

    A page's score is the most that a query's product with any key in it can be. Each
    head and query spreads one vote over a sequence's pages by a softmax of these; the
    pages with most votes are read. Always read are those that hold the step's own
    positions, the last ones, and the first `sinks`.

    The result is for causal attention without a window: positions of keys are those in
    the shorter table.

    Args:
      q: `[B, T, N, D]`, the queries of each sequence's last T positions.
      summary: of one layer's pages, K a divisor of N.
      block_tables: int32 `[B, W]`, as `paged_attention` takes them. An id that is no
        page is not chosen.
      kv_lens: int32 `[B]`, the new keys among them.
      num_pages: the width of the table that comes out.
      block_size: tokens to a page, the summary's.
      sinks: how many first pages are always read.
      scale: of the scores, `1 / sqrt(D)` unless given.

    Returns:
      A `PageChoice`. A sequence with at most `num_pages` pages reads all of them.

    Raises:
      TypeError, ValueError: shapes do not fit; pages have another size; num_pages is
        less than what is always read.

    Example:
      >>> chosen = select_pages(q, summary, tables, lens, num_pages=64, block_size=16)
      >>> out = paged_attention(q, pool, layer, chosen.block_tables, chosen.kv_lens)

    Source: Tang et al., Quest (arXiv:2406.10774), where each head reads pages of its
    own.
    """
    where = "select_pages"
    q, tables, lens = _checked(where, q, summary, block_tables, kv_lens)
    width, size = check_positive(where, num_pages=num_pages, block_size=block_size)
    _check_size(where, summary, size)
    first = check_count(where, "sinks", sinks)
    q, summary = jax.lax.stop_gradient((q, summary))
    batch, steps, _, dim = q.shape
    own = (steps - 1 + size - 1) // size + 1
    if width < min(own + first, tables.shape[1]):
        raise ValueError(
            f"{where}: num_pages must be at least {own + first}, the first {first} and "
            f"those that {steps} new positions may lie in, got {width}"
        )
    number = default_scale(dim)
    if scale is not None:
        number = check_number(where, "scale", scale, -1e30, 1e30)
    lens = jnp.clip(lens, 0, tables.shape[1] * size)[:, None]
    place = jnp.arange(tables.shape[1], dtype=jnp.int32)
    used = place * size < lens
    last = used & ((place + 1) * size > lens - steps)
    page = (tables >= 0) & (tables < summary.low.shape[0])
    visible = used & (page | last)
    free = visible & ~last
    always = last | (free & (jnp.cumsum(free, -1, dtype=jnp.int32) <= first))

    at = jnp.where(free, tables, 0)
    # Scaled ahead: by a scale below 0 the smallest product is the largest score.
    scaled = q.astype(jnp.float32) * number
    grouped = scaled.reshape(batch, steps, summary.low.shape[1], -1, dim)
    # max(q low, q high) of each number is what its positive and negative part give.
    most = sum(
        jnp.einsum("btkgd,bwkd->btkgw", part, bound[at])
        for part, bound in (
            (jnp.maximum(grouped, 0), summary.high),
            (jnp.minimum(grouped, 0), summary.low),
        )
    )
    most = jnp.where(free[:, None, None, None], most, -jnp.inf)
    votes = shares(most).mean((1, 2, 3))[:, None, None]
    limit = jnp.full((batch, 1, 1), width, jnp.int32)
    kept = keep(votes, visible[:, None, None], always[:, None, None], limit).kept
    at, counts = (a[:, 0, 0] for a in lists_of(kept, width))
    chosen = jnp.take_along_axis(tables, jnp.maximum(at, 0), 1)
    missing = jnp.where(used, 1, 0).sum(-1, keepdims=True) * size - lens
    return PageChoice(
        jnp.where(at >= 0, chosen, -1),
        jnp.maximum(counts * size - missing[:, 0], 0),
        jnp.where(kept[:, 0, 0], votes[:, 0, 0], 0).sum(-1),
    )


def _check_summary(where: str, summary: Any) -> None:
    if not isinstance(summary, PageSummary):
        raise TypeError(
            f"{where}: summary must be a PageSummary, got {type(summary).__name__}; "
            "summarize_pages makes one"
        )


def _check_size(where: str, summary: PageSummary, size: int | None) -> None:
    if summary.block_size not in (None, size):
        raise ValueError(
            f"{where}: summary must be of pages of {size} tokens, got one of pages of "
            f"{summary.block_size}; summarize_pages makes it of the same keys"
        )


def _checked(
    where: str, q: Any, summary: Any, tables: Any, lens: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = as_array(where, "q", q)
    if q.ndim != 4:
        raise ValueError(
            f"{where}: q must be [B, T, N, D], got {show(q)}; a step of decoding has "
            "T = 1: q[:, None]"
        )
    if not q.size:
        raise ValueError(
            f"{where}: q must not be empty, got {show(q)}; leave the call out"
        )
    _check_summary(where, summary)
    _, kv_heads, dim = summary.low.shape
    if dim != q.shape[3] or not kv_heads or q.shape[2] % kv_heads:
        raise ValueError(
            f"{where}: summary must have a head dim of {q.shape[3]} and a number of "
            f"heads that divides {q.shape[2]}, got {show(summary.low)} beside {show(q)}"
        )
    tables = check_int32(where, "block_tables", tables, "[B, W]", 2)
    lens = check_int32(where, "kv_lens", lens, "[B]", 1)
    batch = q.shape[0]
    if tables.shape[0] != batch or lens.shape != (batch,) or not tables.shape[1]:
        raise ValueError(
            f"{where}: block_tables and kv_lens must be int32[{batch}, W] and "
            f"int32[{batch}], got {show(tables)} and {show(lens)}; one row for each "
            "sequence"
        )
    return q, tables, lens
