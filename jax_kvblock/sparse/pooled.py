"""Scores of tiles by mean queries and mean keys of pieces, and the selector for them.

The product of two means is the mean of all products between a piece of queries and one
of keys. Sums along antidiagonals are means of a few of them, at `side` times the cost:
what many queries or many keys share, both meet alike.

    q [B, T, N, D] -> means [B, T / side, N, D]
    k [B, S, K, D] -> means [B, S / side, K, D]
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.pieces import check_side, pool_pieces, tile_shares
from jax_kvblock.sparse.scored import ScoredSelector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledThreshold(ScoredSelector):
    """Tiles that hold tau of attention, as means of pieces estimate it.

    Attributes:
      piece: how many queries or keys a mean is of, a divisor of both block sizes. Small
        ones see more and cost more: scores take `1 / piece²` of attention's first
        product.
      tau: 0.9 unless given.

    Example:
      >>> selector = PooledThreshold(tau=None, sparsity_ratio=0.9)
      >>> tiles, report = selector.select(q, k, causal=True)

    Source: the pooled blocks of Jiang et al., MInference (arXiv:2407.02490). There a
    block is a tile; here pieces are smaller, and their shares are summed.
    """

    tau: float | None = dataclasses.field(default=0.9, metadata={"static": True})
    piece: int = dataclasses.field(default=16, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_side(self.name, "piece", self.piece, (self.block_q, self.block_kv))

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        return pooled_mass(q, k, grid, scale, self.piece)


def pooled_mass(
    q: jax.Array, k: jax.Array, grid: Grid, scale: float, side: int
) -> jax.Array:
    """Each tile's estimated share of its row: float32 `[B, N, R, C]`.

    Means are taken in float32, and their products in the inputs' dtype.
    """
    if q.dtype == jnp.float64:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    q_end, kv_end = grid.ends()
    per_q, per_kv = grid.block_q // side, grid.block_kv // side
    queries = pool_pieces(q, q_end, side, grid.rows * per_q, "rounded")
    keys = pool_pieces(k, kv_end, side, grid.cols * per_kv, "rounded")
    return tile_shares(queries, keys, grid, side, scale)
