"""What ragged drop-ins share: sequences that count, new keys appended, attention.

the first n sequences count, and n is traced
append: token t of sequence b goes to position kv_len - q_len + t of b's pages
attend: paged_attention over the pages that come of it
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import accumulator
from jax_kvblock.paged.attention import attend_pages
from jax_kvblock.paged.pages import PageLayout, Pages


@dataclasses.dataclass(frozen=True)
class Ragged:
    """What is compiled in.

    Attributes:
      where: the function, for messages.
      layout: of the cache.
      scale: of scores.
      out_dtype: of the result.
      causal, window, softcap: as in `paged_attention`.
      q_scale: queries are divided by it and rounded to the cache's dtype.
      k_scale, v_scale: factors of all keys and of all values.
      temperature: the length beyond which scores grow, log2(position) / log2(length).
      append: whether new keys are written ahead.
      cache_only: queries see the keys ahead of the new ones, and nothing is written.
    """

    where: str
    layout: PageLayout
    scale: float
    out_dtype: np.dtype
    causal: bool = True
    window: tuple[int, None] | None = None
    softcap: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    temperature: float | None = None
    append: bool = False
    cache_only: bool = False


class Step(NamedTuple):
    """The operands beside the cache.

    Attributes:
      q: `[tokens, N, D]`.
      k, v: `[tokens, K, D]` of the cache's dtype, where there are new ones.
      tables: int32 `[S, W]`; with table_first `[W]`.
      kv_lens: int32 `[S]`, the new keys among them.
      starts: int32 `[S + 1]`, each sequence's first token.
      num_seqs: int32 `[n]`, whose last says how many sequences count; None for all.
      sinks: float32 `[N]`.
      table_first: int32 `[S]`, where each sequence's table begins.
    """

    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    tables: jax.Array
    kv_lens: jax.Array
    starts: jax.Array
    num_seqs: jax.Array | None
    sinks: jax.Array | None = None
    table_first: jax.Array | None = None


@functools.partial(jax.jit, static_argnums=0)
def attend(
    config: Ragged, x: Step, cache: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """out `[tokens, N, D]` and lse `[tokens, N]`; zeros and −inf of no sequence."""
    return _attend(config, _valid(x), cache)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def append_and_attend(
    config: Ragged, x: Step, cache: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out, lse and the cache with the new keys, in place: its argument is gone."""
    x = _valid(x)
    arrays: tuple[jax.Array, ...] = (cache,)
    if config.append:
        assert x.k is not None and x.v is not None
        page, token = _places(config, x, arrays)
        arrays = config.layout.append(arrays, x.k, x.v, page, token)
    out, lse = _attend(config, x, arrays)
    return out, lse, arrays[0]


def _valid(x: Step) -> Step:
    """Sequences beyond `num_seqs` get no tokens; starts rise, inside of q."""
    sequences = x.kv_lens.shape[0]
    count = sequences if x.num_seqs is None else jnp.clip(x.num_seqs[-1], 0, sequences)
    at = jnp.minimum(jnp.arange(x.starts.shape[0], dtype=jnp.int32), count)
    starts = jax.lax.cummax(jnp.clip(x.starts[at], 0, x.q.shape[0]))
    first, width = x.table_first, x.tables.shape[0]
    if first is not None:  # one that begins nowhere has no pages, as at the end
        first = jnp.where((first >= 0) & (first < width), first, width)
    return x._replace(starts=starts, table_first=first)


def _sequence(x: Step) -> tuple[jax.Array, jax.Array]:
    """Of each token: its sequence, and its position there; below 0 for no sequence."""
    tokens = jnp.arange(x.q.shape[0], dtype=jnp.int32)
    b = jnp.searchsorted(x.starts[1:], tokens, side="right").astype(jnp.int32)
    there = (b < x.kv_lens.shape[0]) & (tokens >= x.starts[0])
    b = jnp.minimum(b, x.kv_lens.shape[0] - 1)
    return b, jnp.where(there, x.kv_lens[b] - x.starts[b + 1] + tokens, -1)


def _places(
    config: Ragged, x: Step, arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """The page and the place in it of each new token; −1 for none."""
    size = config.layout.sizes(config.where, [a.shape for a in arrays]).page_size
    b, position = _sequence(x)
    entry = jnp.where(position < 0, -1, position // size)
    width = x.tables.shape[-1]
    if x.table_first is None:
        inside = (entry >= 0) & (entry < width)
        page = x.tables[b, jnp.clip(entry, 0, width - 1)]
    else:
        inside = (entry >= 0) & (entry < width - x.table_first[b])
        page = x.tables[jnp.clip(x.table_first[b] + entry, 0, width - 1)]
    return jnp.where(inside, page, -1), jnp.where(inside, position % size, -1)


def _attend(
    config: Ragged, x: Step, arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    q, kv_lens = _scaled(config, x, arrays[0].dtype), x.kv_lens
    scales = config.scale, config.q_scale, config.k_scale
    if config.cache_only:
        kv_lens = kv_lens - (x.starts[1:] - x.starts[:-1])
    out, lse = attend_pages(
        config.where,
        q,
        Pages(arrays, config.layout),
        x.tables,
        kv_lens,
        query_start=x.starts,
        causal=config.causal and not config.cache_only,
        window=config.window,
        softcap=config.softcap,
        sinks=x.sinks,
        scale=math.prod(scale for scale in scales if scale is not None),
        table_first=x.table_first,
    )
    if config.v_scale is not None:
        out = out * config.v_scale
    return out.astype(config.out_dtype), lse


def _scaled(config: Ragged, x: Step, stored: Any) -> jax.Array:
    """The queries; in the sums' dtype where the result needs its bits."""
    q, wide = x.q, accumulator(x.q.dtype)
    if config.q_scale is not None:
        q = q.astype(wide) / config.q_scale
        if jnp.issubdtype(stored, jnp.floating):
            ends = jnp.finfo(stored)
            q = jnp.clip(q, float(ends.min), float(ends.max))
        # Without the barrier XLA's GPU backend leaves out the rounding.
        q = jax.lax.optimization_barrier(q.astype(stored)).astype(wide)
    if config.temperature is not None:
        _, position = _sequence(x)
        grown = jnp.log2(jnp.maximum(position, 1).astype(wide))
        grown = grown / np.log2(config.temperature)
        grown = jnp.where(position > math.floor(config.temperature), grown, 1.0)
        q = q.astype(wide) * grown[:, None, None]
    if config.v_scale is not None or config.out_dtype != x.q.dtype:
        q = q.astype(wide)
    return q
