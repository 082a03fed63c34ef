"""Attention among pieces of tiles, summed into tiles.

A piece is some queries or keys in a row that one vector stands for. Products of these
are scores; a softmax over all pieces of keys makes them shares of attention, which are
summed over the pieces of a tile of keys and averaged over those of a tile of queries.

    queries [B, T / side, N, F], keys [B, S / side, K, F] -> shares [B, N, R, C]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import as_int, shown
from jax_kvblock.sparse import plain, primitive
from jax_kvblock.sparse.grid import Grid

# Under a causal mask plain JAX takes rows in so many groups, each with the keys that
# its last row sees: 9/16 of the products. More groups are more programs for less to
# win.
GROUPS = 8
LEAST_ROWS = 8  # of a group: with few rows there is little to win


@dataclasses.dataclass(frozen=True)
class Nearness:
    """What scores have added to them, by where pieces lie.

    Attributes:
      distance: float32 `[N, 32]`, by how many pieces lie between, in classes: 0, 1, 2,
        3, 4–5, 6–7, 8–11, …
      first: float32 `[N]`, of the first piece that is seen.
    """

    distance: jax.Array
    first: jax.Array


def check_side(where: str, name: str, side: Any, blocks: tuple[int, int]) -> None:
    """A piece's side divides those of a tile."""
    number = as_int(side)
    if number is None or number < 1 or any(block % number for block in blocks):
        serve = "16" if any(block % 32 for block in blocks) else "16 or 32"
        raise ValueError(
            f"{where}: {name} must divide block_q and block_kv, {blocks[0]} and "
            f"{blocks[1]}, got {shown(side)}; {serve} would do"
        )


def tile_shares(
    queries: jax.Array,
    keys: jax.Array,
    grid: Grid,
    side: int,
    scale: float,
    nearness: Nearness | None = None,
) -> jax.Array:
    """Each tile's share of its row of tiles.

    Products take the inputs' dtype and are summed in float32.

    Args:
      queries: `[B, R · block_q / side, N, F]`: what stands for pieces of queries.
      keys: `[B, C · block_kv / side, K, F]`, of keys.
      side: rows of a piece.
      scale: of the products.
      nearness: what is added to them.

    Returns:
      Float32 `[B, N, R, C]`.
    """
    fine = in_pieces(grid, side)
    batch, rows = queries.shape[:2]
    bounds, ranges = _seen(fine, batch, (rows, keys.shape[1]), nearness is not None)
    near: tuple[jax.Array, ...] = ()
    if nearness is not None:
        places = jnp.asarray(fine.places(), jnp.int32)[:, 0, :, 0]
        places = _to_length(places, rows)
        scores = (nearness.distance, nearness.first)
        added = (places, *(x.astype(jnp.float32)[None] for x in scores))
        near = tuple(jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in added)
    return primitive.weigh_tiles(
        queries,
        keys,
        bounds,
        ranges=ranges,
        near=near,
        scale=scale,
        tiles=(grid.rows, grid.cols),
        parts=tuple(_groups(grid)),
    )


def pool_pieces(
    x: jax.Array, end: Any, side: int, count: int, wanted: plain.Pooled
) -> jax.Array:
    """What stands for pieces of x.

    Args:
      x: `[B, length, H, D]`, floats.
      end: int32 `[B|1, 1, 1]`: rows from there on do not count.
      side: rows of a piece.
      count: how many pieces; one without rows is 0.
      wanted: "rounded": means, which are taken in float32, in the dtype of x; "normed":
        mean, largest and smallest numbers in float32, each brought to a mean square of
        1, one beside the other.

    Returns:
      `[B, count, H, D]`, or normed `[B, count, H, 3 D]`.
    """
    ends = jnp.broadcast_to(jnp.asarray(end, jnp.int32)[:, 0, 0], x.shape[:1])
    (made,) = primitive.pool_pieces(x, ends, side=side, pieces=count, wanted=wanted)
    return made


def in_pieces(grid: Grid, side: int) -> Grid:
    """The same call in tiles of `side` × `side`."""
    return dataclasses.replace(grid, block_q=side, block_kv=side)


def _seen(
    fine: Grid, batch: int, lengths: tuple[int, int], first_counts: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Which pieces of keys each piece of queries sees: bounds and ranges of segments.

    Two pieces see each other where some of their pairs do; of segments as `Grid` has
    it.

    Args:
      fine: a grid whose tiles are pieces.
      lengths: how many pieces of queries and of keys there are, with those of whole
        tiles that are empty.
      first_counts: whether what comes first in the bounds has to be seen by segments,
        too.

    Returns:
      Int32 `[B, T', 2]`, the first piece and the end; and with segments the smallest
      and largest of each piece of queries and of keys, `[B, T', 2]` and `[B, S', 2]`.
    """
    side = fine.block_q
    q_end, kv_end = (jnp.asarray(end)[:, 0] for end in fine.ends())  # [B|1, 1]
    shift = jnp.reshape(jnp.asarray(fine.shift, jnp.int32), (-1, 1))
    start = side * jnp.arange(lengths[0], dtype=jnp.int32)
    first = jnp.zeros_like(start)
    end = jnp.where(start < q_end, -(-kv_end // side), 0)
    if fine.reach is not None:
        last = jnp.minimum(start + side, q_end) - 1 + shift + fine.reach
        end = jnp.minimum(end, last // side + 1)
    if fine.left is not None:
        left = start + shift - fine.left
        first = jnp.maximum(left // side, 0)
        end = jnp.where(left < kv_end, end, 0)
    bounds = jnp.stack(jnp.broadcast_arrays(first, end), -1)
    bounds = jnp.broadcast_to(bounds, (batch, lengths[0], 2))
    if fine.q_segments is None:
        return bounds, ()
    ranges = tuple(
        _to_length(jnp.stack(of, -1)[:, 0], length)
        for of, length in zip((fine.q_ranges(), fine.kv_ranges()), lengths, strict=True)
    )
    if first_counts:
        allowed = plain.pieces_seen(bounds, ranges, lengths[1])
        first = jnp.argmax(allowed, -1).astype(jnp.int32)
        bounds = jnp.stack([first, bounds[..., 1]], -1)
    return bounds, ranges


def _to_length(x: jax.Array, length: int) -> jax.Array:
    """Zeros behind what there is of axis 1."""
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, length - x.shape[1])
    return jnp.pad(x, missing)


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
