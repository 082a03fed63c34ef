"""A call of `paged_attention` as those take it who compute it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jax_kvblock.attention.config import AttentionConfig
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.paged.pages import Pages


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """What is compiled in.

    Attributes:
      scores: scale, softcap and window, as in `flash_attention`.
      layer: of the pool, where it is static; None for a traced one, or for `Pages`.
      split_size: keys of a piece; 0 where they may be any.
      implementation: who is asked to compute it.
      query_heads: how many the cache's key heads serve, with q_first.
      value_dim: of a latent cache, a `KVPool` with num_outer 1 and one key head: values
        are so many of the first columns of its keys. None: keys and values lie apart.
      quantize_queries: both products in 8 bits, of sequences with many queries.
    """

    scores: AttentionConfig
    layer: int | None
    implementation: str | None = None
    split_size: int = 0
    query_heads: int | None = None
    value_dim: int | None = None
    quantize_queries: bool = False


class Paged(NamedTuple):
    """The operands: C calls that are computed together, of S sequences each.

    A batch `[B, T, N, D]` is B calls of one sequence; `jax.vmap` makes more calls. What
    is in them is checked by those who compute: lengths, starts and ids may be anything.

    Attributes:
      q: `[C, R, N, D]`, the rows of a call's sequences.
      pages: a `KVPool`, or one layer's arrays and how they lie; of all calls.
      layer: int32 `[1]`, or `[C]` with one for each call, where it is traced.
      tables: int32 `[C S, W]`; with table_first `[W]`, the tables one after the other.
      kv_lens: int32 `[C S]`.
      query_start: int32 `[C, S + 1]`, or None where S is 1.
      q_lens: int32 `[C]`, or None. With neither all rows count.
      sinks: float32 `[rows, N]`; call c has row c // (C / rows).
      table_first: int32 `[C S]`, where in `tables` that of each sequence begins, from 0
        to W; or None.
      scales: a factor of each key and value, in a layout without D, or None.
      ranges: int32 `[C, R, 2]`, the keys that a row sees, first and end; or None.
      tree_mask: int32 `[C, R, words]`, bits of the new keys that it sees; or None.
      k_scale, v_scale: what numbers of a cache of 8 bits are multiplied by, float32:
        `[1]` of all, `[K]` of each head, `[P, T, K]` of each token and head, `[L, P, T,
        K]` of all layers of a pool; or None. A latent cache has k_scale alone.
      q_first: int32 `[1]`, where q has some of the query heads that the cache's key
        heads serve: the first of them, a multiple of their number; or None.
    """

    q: jax.Array
    pages: KVPool | Pages
    layer: jax.Array | None
    tables: jax.Array
    kv_lens: jax.Array
    query_start: jax.Array | None
    q_lens: jax.Array | None
    sinks: jax.Array | None
    table_first: jax.Array | None = None
    scales: Pages | None = None
    ranges: jax.Array | None = None
    tree_mask: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    q_first: jax.Array | None = None

    @property
    def calls(self) -> int:
        return self.q.shape[0]

    @property
    def sequences(self) -> int:
        """Of a call."""
        return self.kv_lens.shape[0] // max(self.calls, 1)


def dtype_of(pages: KVPool | Pages) -> np.dtype:
    """Of keys and values."""
    if isinstance(pages, KVPool):
        return np.dtype(pages.spec.dtype)
    return np.dtype(pages.arrays[0].dtype)


Cache = TypeVar("Cache", KVPool, Pages)


def cut_heads(pages: Cache, shards: int) -> Cache:
    """The same leaves as a cache that has one part of so many of the key heads."""
    if isinstance(pages, KVPool):
        spec = pages.spec.replace(num_kv_heads=pages.spec.num_kv_heads // shards)
        return KVPool.tree_unflatten(spec, [pages.data])
    heads = pages.layout.heads
    if heads is None:  # the arrays tell
        return pages
    layout = dataclasses.replace(pages.layout, heads=heads // shards)
    return Pages(pages.arrays, layout)


def value_dim_of(config: PagedConfig, x: Paged) -> int:
    """Dv."""
    return config.value_dim or page_shapes(x.pages)[1][3]


def page_shapes(pages: KVPool | Pages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`(P, T, K, D)` of keys and of values; of a latent cache, twice that of keys."""
    if isinstance(pages, KVPool):
        spec, blocks = pages.spec, pages.arrays[0].shape[0]
        shape = (blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return shape, shape
    sizes = pages.layout.sizes("paged_attention", [a.shape for a in pages.arrays])
    return sizes[:4], (*sizes[:3], sizes.value_dim)
