"""Scores of tiles by sums along antidiagonals, and the selector that uses them.

A stride is s queries or keys in a row. Of the s × s products between a stride of
queries and one of keys those on the antidiagonal are summed: each query and each key is
in one of them, so that a column (a key that many queries attend to) or a diagonal (a
distance that many share) that crosses the square is met. With the queries of a stride
in reverse order the sum is one product of rows of s · D numbers: 1 / s of what the
scores of attention take.

    q [B, T, N, D] -> [B, T / s, N, s D], reversed within a stride
    k [B, S, K, D] -> [B, S / s, K, s D]
    scores [T / s, S / s] -> softmax over keys -> sums over tiles
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.pieces import check_side, tile_shares
from jax_kvblock.sparse.scored import ScoredSelector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AntidiagonalThreshold(ScoredSelector):
    """Tiles that hold tau of attention, as sums along antidiagonals estimate it.

    S2's DYNAMIC_THRESHOLD. Each head of each batch member has lists of its own.

    Attributes:
      stride: how many positions are summed, a divisor of both block sizes. Small ones
        see more and cost more: scores take 1 / stride of attention's first product.
      tau: 0.9 unless given.

    Example:
      >>> selector = AntidiagonalThreshold(tau=0.95)
      >>> tiles, report = selector.select(q, k, causal=True)
      >>> out = flash_attention(q, k, v, causal=True, tiles=tiles)

    Source: Xu et al., XAttention (arXiv:2503.16428).
    """

    tau: float | None = dataclasses.field(default=0.9, metadata={"static": True})
    stride: int = dataclasses.field(default=16, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_side(self.name, "stride", self.stride, (self.block_q, self.block_kv))

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        return antidiagonal_mass(q, k, grid, scale, self.stride)


def antidiagonal_mass(
    q: jax.Array, k: jax.Array, grid: Grid, scale: float, stride: int
) -> jax.Array:
    """Each tile's estimated share of its row: float32 `[B, N, R, C]`.

    In memory are the inputs once more, and what `plain.weigh_tiles` takes.
    """
    if q.dtype == jnp.float64:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    q_end, kv_end = grid.ends()
    queries = _in_strides(_real(q, q_end, grid.rows * grid.block_q), stride)
    keys = _in_strides(_real(k, kv_end, grid.cols * grid.block_kv), stride)
    turned = queries[:, :, ::-1]
    queries, keys = (_as_vectors(x) for x in (turned, keys))
    return tile_shares(queries, keys, grid, stride, scale / stride)


def _in_strides(x: jax.Array, stride: int) -> jax.Array:
    """`[B, length / stride, stride, H, D]`."""
    return x.reshape(x.shape[0], -1, stride, *x.shape[2:])


def _as_vectors(x: jax.Array) -> jax.Array:
    """The rows of a stride side by side: `[B, strides, H, stride · D]`."""
    x = x.swapaxes(2, 3)
    return x.reshape(*x.shape[:3], -1)


def _real(x: jax.Array, end: Any, length: int) -> jax.Array:
    """Rows up to `end` `[B|1, 1, 1]`, then zeros, in whole tiles."""
    missing = length - x.shape[1]
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
    if isinstance(end, np.ndarray):  # all of them are real
        return x
    real = jnp.arange(length, dtype=jnp.int32) < end[:, 0]
    return jnp.where(real[..., None, None], x, 0)
