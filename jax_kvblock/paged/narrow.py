"""`quantize_queries`: which queries are rounded to e4m3, and what they are then.

Mirrors `cpp/host/paged_call.h` and `hopper/forward/narrow_pages.cuh`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import accumulator
from jax_kvblock.attention.eight_bits import DTYPE
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes
from jax_kvblock.paged.heads import HeadPart

# Packed rows and queries up to which a sequence has few, and rows of a tile.
FEW_ROWS, FEW_QUERIES, TILE_ROWS = 64, 16, 128
LARGEST = 448.0  # of e4m3
INVERSE = np.float32(1 / LARGEST)
SMALLEST = np.float32(2.0**-126)  # of a scale: float32's smallest with all its digits


def most_few_rows(group: int) -> int:
    """Packed rows up to which a sequence has few queries."""
    return max(FEW_ROWS, FEW_QUERIES * group)


def may_be_many(config: PagedConfig, x: Paged, part: HeadPart | None = None) -> bool:
    """Whether the call's shapes leave room for a sequence with many queries."""
    rows, group = x.q.shape[1], _group(x, part)
    more = rows > x.sequences or config.split_size > 0
    return more and rows * group > most_few_rows(group)


def heads_of_tile(group: int) -> int:
    """Of a group's query heads, how many are rows of one tile."""
    fits = (n for n in range(1, min(group, TILE_ROWS) + 1) if group % n == 0)
    return max(n for n in fits if TILE_ROWS // n * n * 10 >= TILE_ROWS * 9)


def rounded(
    config: PagedConfig,
    x: Paged,
    first: jax.Array,
    lens: jax.Array,
    part: HeadPart | None,
) -> Paged:
    """The call with queries in float32 that are what their codes in e4m3 stand for.

    Those of a tile share a scale. What is not finite becomes NaN. `first`, `lens`:
    where each sequence's rows begin, of all calls, and how many it has.
    """
    if not may_be_many(config, x, part):
        return x
    group, wide = _group(x, part), accumulator(x.q.dtype)
    pack = heads_of_tile(group)
    queries = TILE_ROWS // pack
    shape = x.q.shape
    rows = shape[0] * shape[1]
    q = x.q.reshape(rows, shape[2] // pack, pack, shape[3]).astype(wide)
    row = jnp.arange(rows, dtype=jnp.int32)
    # The last that begins there: those before it that do are empty.
    b = jnp.maximum(jnp.searchsorted(first, row, side="right") - 1, 0)
    query = row - first[b]
    many = (query >= 0) & (query < lens[b]) & (lens[b] * group > most_few_rows(group))
    tile = jnp.where(many, first[b] + query // queries * queries, row)
    finite = jnp.isfinite(q)
    largest = jnp.max(jnp.where(finite, jnp.abs(q), 0), axis=(2, 3))
    largest = jax.ops.segment_max(largest, tile, rows)[tile]
    scale = jnp.where(largest == 0, 1, jnp.maximum(largest * INVERSE, SMALLEST))
    scale = scale[:, :, None, None].astype(wide)
    codes = jnp.clip(jnp.where(finite, q, jnp.nan) / scale, -LARGEST, LARGEST)
    # The barrier holds XLA to the codes: it drops a conversion there and back.
    made = jax.lax.optimization_barrier(codes.astype(DTYPE)).astype(wide) * scale
    # The kernel takes the sign of a score from its product.
    if x.k_scale is not None:
        of = x.k_scale
        if part is not None and of.shape[-1] > 1:
            of = part.of(of, 0)
        of = jnp.repeat(of, shape[2] // pack // of.shape[-1])[:, None, None]
        made = jnp.where(of >= 0, made, jnp.nan)
    made = jnp.where(many[:, None, None, None], made, q)
    return x._replace(q=made.reshape(shape))


def _group(x: Paged, part: HeadPart | None) -> int:
    """Query heads that share a KV head."""
    kv_heads = page_shapes(x.pages)[0][2] if part is None else part.heads
    return max(x.q.shape[2] // max(kv_heads, 1), 1)
