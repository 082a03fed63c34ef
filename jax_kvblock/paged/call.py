"""A call of `paged_attention` as those take it who compute it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from jax_kvblock.attention.config import AttentionConfig
from jax_kvblock.blocks.pool import KVPool


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """What is compiled in.

    Attributes:
      scores: scale, softcap and window, as in `flash_attention`.
      layer: of the pool, where it is static; None for a traced one, or for a pair.
      mean_rows: queries of a sequence, on average, were there no padding.
    """

    scores: AttentionConfig
    layer: int | None
    mean_rows: int


class Paged(NamedTuple):
    """The operands: queries that lie one after the other, and where keys are.

    Attributes:
      q: `[rows, N, D]`.
      pages: a `KVPool`, or the pair of `[P, T, K, D]` and `[P, T, K, Dv]`.
      layer: int32 `[]`, where it is traced.
      tables: int32 `[B, W]`.
      kv_lens: int32 `[B]`, from 0 to W T.
      q_first, q_lens: int32 `[B]`: a sequence's first row of q and how many it has;
        they lie inside of q.
      sinks: float32 `[1, N]`.
    """

    q: jax.Array
    pages: KVPool | tuple[jax.Array, jax.Array]
    layer: jax.Array | None
    tables: jax.Array
    kv_lens: jax.Array
    q_first: jax.Array
    q_lens: jax.Array
    sinks: jax.Array | None


def page_shapes(pages: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`(P, T, K, D)` of keys and of values."""
    if isinstance(pages, KVPool):
        spec = pages.spec
        shape = (pages.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return shape, shape
    return pages[0].shape, pages[1].shape
