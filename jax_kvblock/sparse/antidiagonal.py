"""Scores of tiles by sums along antidiagonals, and the selector that uses them.

A stride is s queries or keys in a row. Of the s × s products between a stride of
queries and one of keys those on the antidiagonal are summed: each query and each key is
in one of them, so that a column (a key that many queries attend to) or a diagonal (a
distance that many share) that crosses the square is met. With the queries of a stride
in reverse order the sum is one product of rows of s · D numbers: 1 / s of what the
scores of attention take.

    q [B, T, N, D] -> [B, K, G, T / s, s D], reversed within a stride
    k [B, S, K, D] -> [B, K, S / s, s D]
    scores [T / s, S / s] -> softmax over keys -> sums over tiles
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_int, shown
from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.scored import ScoredSelector

# What the scores of one step take at most, if it is more than one row of tiles: they
# are read several times, and stay in the second-level cache of a GPU (50 MiB).
STEP_BYTES = 1 << 25
# Under a causal mask rows go in so many groups, each with the keys that its last row
# sees: 9/16 of the products. More groups are more programs for less to win.
GROUPS = 8
LEAST_ROWS = 8  # of a group: with few rows there is little to win


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
        stride = as_int(self.stride)
        if (
            stride is None
            or stride < 1
            or self.block_q % stride
            or (self.block_kv % stride)
        ):
            raise ValueError(
                f"{self.name}: stride must divide block_q and block_kv, "
                f"{self.block_q} and {self.block_kv}, got {shown(self.stride)}; "
                "8 or 16 serve"
            )

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        return antidiagonal_mass(q, k, grid, scale, self.stride)


def antidiagonal_mass(
    q: jax.Array, k: jax.Array, grid: Grid, scale: float, stride: int
) -> jax.Array:
    """Each tile's estimated share of its row: float32 `[B, N, R, C]`.

    Products take the inputs' dtype and are summed in float32. Memory is that of the
    inputs once more, of the result, and `STEP_BYTES` or one row of tiles.
    """
    if q.dtype == jnp.float64:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    batch, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q_end, kv_end = grid.ends()
    q = _real(q, q_end, grid.rows * grid.block_q)
    k = _real(k, kv_end, grid.cols * grid.block_kv)
    per_q, per_kv = grid.block_q // stride, grid.block_kv // stride
    wide = stride * dim
    # Rows of tiles come first: they are what is walked.
    q = q.reshape(batch, grid.rows, per_q, stride, kv_heads, group, dim)
    q = q[:, :, :, ::-1].transpose(1, 0, 4, 5, 2, 3, 6)
    q = q.reshape(grid.rows, batch, kv_heads, group, per_q, wide)
    k = k.reshape(batch, grid.cols * per_kv, stride, kv_heads, dim)
    k = k.transpose(0, 3, 1, 2, 4).reshape(batch, kv_heads, -1, wide)
    seen = _strides_seen(grid, stride)
    step = batch * heads * per_q * k.shape[2] * 4

    def of_rows(first: int, last: int, cols: int) -> jax.Array:
        keys = k[:, :, : cols * per_kv]

        def of_row(of: tuple[jax.Array, jax.Array]) -> jax.Array:
            queries, row = of
            scores = jnp.einsum(
                "bkgtd,bksd->bkgts",
                queries,
                keys,
                preferred_element_type=jnp.float32,
            )
            allowed = seen(row, cols)[:, None, None]
            scores = jnp.where(allowed, scores * (scale / stride), -jnp.inf)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
            tiles = weights.reshape(*weights.shape[:-1], cols, per_kv).sum(-1)
            total = tiles.sum(-1, keepdims=True)
            shares = tiles / jnp.where(total > 0, total, 1)
            return shares.mean(-2).reshape(batch, heads, cols)

        rows = jnp.arange(first, last, dtype=jnp.int32)
        at_a_time = max(1, STEP_BYTES // step)
        if at_a_time >= last - first:
            made = jax.vmap(of_row)((q[first:last], rows))
        else:
            made = jax.lax.map(of_row, (q[first:last], rows), batch_size=at_a_time)
        return jnp.pad(made, ((0, 0),) * 3 + ((0, grid.cols - cols),))

    parts = [of_rows(*part) for part in _groups(grid)]
    mass = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return mass.transpose(1, 2, 0, 3)


def _real(x: jax.Array, end: Any, length: int) -> jax.Array:
    """Rows up to `end` `[B|1, 1, 1]`, then zeros, in whole tiles."""
    missing = length - x.shape[1]
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
    if isinstance(end, np.ndarray):  # all of them are real
        return x
    real = jnp.arange(length, dtype=jnp.int32) < end[:, 0]
    return jnp.where(real[..., None, None], x, 0)


def _strides_seen(grid: Grid, stride: int) -> Callable[[Any, int], jax.Array]:
    """A function of a row of tiles, and how many tiles of keys: bool `[B|1, T', S']`.

    Two strides see each other where some of their pairs do. Segments are looked at tile
    by tile.
    """
    q_end, kv_end = (jnp.asarray(end)[:, 0] for end in grid.ends())  # [B|1, 1]
    shift = jnp.reshape(jnp.asarray(grid.shift, jnp.int32), (-1, 1))
    by_segment = None if grid.q_segments is None else grid.visible()[:, 0]

    def seen(row: Any, cols: int) -> jax.Array:
        per_q, per_kv = grid.block_q // stride, grid.block_kv // stride
        start = row * grid.block_q + stride * jnp.arange(per_q, dtype=jnp.int32)
        keys = stride * jnp.arange(cols * per_kv, dtype=jnp.int32)
        allowed = (start < q_end)[..., None] & (keys < kv_end)[:, None]
        if grid.causal:
            last = jnp.minimum(start + stride, q_end) - 1 + shift
            allowed = allowed & (keys <= last[..., None])
        if by_segment is not None:
            tiles = jax.lax.dynamic_index_in_dim(by_segment, row, 1, keepdims=False)
            allowed = allowed & jnp.repeat(tiles[:, :cols], per_kv, axis=1)[:, None]
        return allowed

    return seen


def _groups(grid: Grid) -> list[tuple[int, int, int]]:
    """Rows of tiles, from and to, and how many tiles of keys the last of them sees."""
    rows = grid.rows
    if not grid.causal or not isinstance(grid.shift, int):
        return [(0, rows, grid.cols)]
    count = max(1, min(GROUPS, rows // LEAST_ROWS))
    ends = [rows * (i + 1) // count for i in range(count)]
    groups = []
    for first, last in zip([0, *ends], ends, strict=False):
        position = min(last * grid.block_q, grid.q_len) - 1 + grid.shift
        cols = min(grid.cols, max(1, position // grid.block_kv + 1))
        groups.append((first, last, cols))
    return groups
