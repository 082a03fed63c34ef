"""Attention among pieces of tiles, summed into tiles.

A piece is some queries or keys in a row that one vector stands for. Products of these
are scores; a softmax over all pieces of keys makes them shares of attention, which are
summed over the pieces of a tile of keys and averaged over those of a tile of queries.

    queries [R, B, K, G, P, F], keys [B, K, S / side, F]
    scores [P, S / side], row of tiles by row of tiles -> shares [B, N, R, C]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import as_int, shown
from jax_kvblock.sparse import primitive
from jax_kvblock.sparse.grid import Grid

# What the scores of one step take at most, if it is more than one row of tiles: they
# are read several times, and stay in the second-level cache of a GPU (50 MiB).
STEP_BYTES = 1 << 25
# Under a causal mask rows go in so many groups, each with the keys that its last row
# sees: 9/16 of the products. More groups are more programs for less to win.
GROUPS = 8
LEAST_ROWS = 8  # of a group: with few rows there is little to win

# What is added to scores, `[B|1, K, G, P, pieces]`: a function of a row of tiles, how
# many tiles of keys, and who may see whom, bool `[B|1, P, pieces]`.
Bias = Callable[[Any, int, jax.Array], jax.Array]


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
    bias: Bias | None = None,
) -> jax.Array:
    """Each tile's share of its row of tiles: float32 `[B, N, R, C]`.

    Products take the inputs' dtype and are summed in float32. In memory are the result
    and `STEP_BYTES`, or the scores of one row of tiles.
    """
    batch, kv_heads, group, per_q = queries.shape[1:5]
    heads, per_kv = kv_heads * group, grid.block_kv // side
    seen = _pieces_seen(grid, side)
    step = batch * heads * per_q * keys.shape[2] * 4

    def of_rows(first: int, last: int, cols: int) -> jax.Array:
        some = keys[:, :, : cols * per_kv]

        def of_row(of: tuple[jax.Array, jax.Array]) -> jax.Array:
            mine, row = of
            scores = jnp.einsum(
                "bkgtd,bksd->bkgts", mine, some, preferred_element_type=jnp.float32
            )
            allowed = seen(row, cols)
            scores = scores * scale
            if bias is not None:
                scores = scores + bias(row, cols, allowed)
            scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
            tiles = weights.reshape(*weights.shape[:-1], cols, per_kv).sum(-1)
            total = tiles.sum(-1, keepdims=True)
            shares = tiles / jnp.where(total > 0, total, 1)
            return shares.mean(-2).reshape(batch, heads, cols)

        rows = jnp.arange(first, last, dtype=jnp.int32)
        at_a_time = max(1, STEP_BYTES // step)
        if at_a_time >= last - first:
            made = jax.vmap(of_row)((queries[first:last], rows))
        else:
            made = jax.lax.map(
                of_row, (queries[first:last], rows), batch_size=at_a_time
            )
        return jnp.pad(made, ((0, 0),) * 3 + ((0, grid.cols - cols),))

    parts = [of_rows(*part) for part in _groups(grid)]
    mass = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return mass.transpose(1, 2, 0, 3)


def pool_pieces(
    x: jax.Array, end: Any, side: int, count: int, *, extremes: bool = False
) -> list[jax.Array]:
    """Means of pieces, and their largest and smallest numbers where wanted.

    Args:
      x: `[B, length, H, D]`, floats.
      end: int32 `[B|1, 1, 1]`: rows from there on do not count.
      side: rows of a piece.
      count: how many pieces; one without rows is 0.

    Returns:
      Float32 `[B, count, H, D]` each.
    """
    ends = jnp.broadcast_to(jnp.asarray(end, jnp.int32)[:, 0, 0], x.shape[:1])
    return primitive.pool_pieces(x, ends, side, count, extremes)


def in_pieces(grid: Grid, side: int) -> Grid:
    """The same call in tiles of `side` × `side`."""
    return dataclasses.replace(grid, block_q=side, block_kv=side)


def _pieces_seen(grid: Grid, side: int) -> Callable[[Any, int], jax.Array]:
    """A function of a row of tiles, and how many tiles of keys: bool `[B|1, P, S']`.

    Two pieces see each other where some of their pairs do; of segments as `Grid` has
    it.
    """
    q_end, kv_end = (jnp.asarray(end)[:, 0] for end in grid.ends())  # [B|1, 1]
    shift = jnp.reshape(jnp.asarray(grid.shift, jnp.int32), (-1, 1))
    per_q, per_kv = grid.block_q // side, grid.block_kv // side
    fine = in_pieces(grid, side)
    ranges = None
    if grid.q_segments is not None:
        ranges = [x[:, 0] for x in (*fine.q_ranges(), *fine.kv_ranges())]
        wanted = (grid.rows * per_q,) * 2 + (grid.cols * per_kv,) * 2
        ranges = [
            jnp.pad(x, ((0, 0), (0, length - x.shape[1])))
            for x, length in zip(ranges, wanted, strict=True)
        ]

    def seen(row: Any, cols: int) -> jax.Array:
        start = row * grid.block_q + side * jnp.arange(per_q, dtype=jnp.int32)
        keys = side * jnp.arange(cols * per_kv, dtype=jnp.int32)
        allowed = (start < q_end)[..., None] & (keys < kv_end)[:, None]
        if grid.reach is not None:
            last = jnp.minimum(start + side, q_end) - 1 + shift + grid.reach
            allowed = allowed & (keys <= last[..., None])
        if grid.left is not None:
            first = start + shift - grid.left
            ends = jnp.minimum(keys + side, kv_end)
            allowed = allowed & (ends[:, None] > first[..., None])
        if ranges is not None:
            q_low, q_high = (
                jax.lax.dynamic_slice_in_dim(x, row * per_q, per_q, 1)[..., None]
                for x in ranges[:2]
            )
            low, high = (x[:, None, : cols * per_kv] for x in ranges[2:])
            allowed = allowed & (q_high >= low) & (q_low <= high)
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
