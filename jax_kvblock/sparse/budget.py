"""How many tiles a row may list: ratios and capacities, checked."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_int, check_positive, shown
from jax_kvblock.sparse.grid import Grid, array_module, running_count

MOST_SPARSE = 0.95


def check_number(where: str, name: str, value: Any, low: float, high: float) -> float:
    """A Python float between two bounds, both of which are allowed."""
    must = f"{where}: {name} must be a number from {low:g} to {high:g}, got"
    if isinstance(value, (bool, str, bytes, jax.core.Tracer)):
        raise TypeError(f"{must} {shown(value)}; it decides about shapes")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{must} {shown(value)}; pass a float") from None
    if math.isnan(number) or not low <= number <= high:
        raise ValueError(f"{must} {number}")
    return number


def check_count(where: str, name: str, value: Any) -> int:
    """An integer of at least 0."""
    number = as_int(value)
    if number is None or number < 0:
        raise ValueError(
            f"{where}: {name} must be an integer of at least 0, got {shown(value)}"
        )
    return number


def check_ratio(where: str, value: Any) -> float:
    """A sparsity ratio: the share of the mask's tiles that are left out."""
    return check_number(where, "sparsity_ratio", value, 0.0, MOST_SPARSE)


def tiles_kept(ratio: float, count: int) -> np.ndarray:
    """Of rows with 0 to `count` visible tiles, how many they list, int32 [count + 1].

    The nearest number to `(1 - ratio) n`, and one tile at least: a row that listed none
    would give zeros.
    """
    n = np.arange(count + 1)
    kept = np.floor((1.0 - ratio) * n + 0.5)
    return np.minimum(n, np.maximum(kept, 1)).astype(np.int32)


def cuts(cols: int, ratio: float | None, capacity: int | None) -> bool:
    """Whether some row of `cols` tiles has a budget for fewer than it sees."""
    by_ratio = ratio is not None and tiles_kept(ratio, cols)[-1] < cols
    return bool(by_ratio) or (capacity is not None and capacity < cols)


def row_limits(
    grid: Grid, visible: Any, always: Any, ratio: float | None, capacity: int | None
) -> Any:
    """How many tiles each row may list, int32 `[B|1, 1, R]`; `always` fits in."""
    xp = array_module(visible)
    limit = visible.sum(-1, dtype=np.int32)
    if ratio is not None:
        table = tiles_kept(ratio, grid.cols)
        limit = table[limit] if xp is np else jnp.asarray(table)[limit]
    if capacity is not None:
        limit = xp.minimum(limit, np.int32(capacity))
    return xp.maximum(limit, always.sum(-1, dtype=np.int32))


def list_width(
    where: str, grid: Grid, ratio: float | None, capacity: int | None, sinks: int
) -> int:
    """Entries that every list has room for, what is always listed among them.

    Raises ValueError for a capacity that does not hold own positions and sinks.
    """
    most = min(grid.cols, grid.most_always + sinks)
    forced = min(grid.cols, grid.most_own + sinks)
    width = grid.cols
    if ratio is not None:
        width = max(int(tiles_kept(ratio, grid.cols)[-1]), most)
    if capacity is None:
        return width
    (capacity,) = check_positive(where, capacity=capacity)
    if capacity < forced:
        raise ValueError(
            f"{where}: capacity must be at least {forced}, the tiles that are always "
            f"listed, got {capacity}; with tiles of {grid.block_q} queries and "
            f"{grid.block_kv} keys a row's own positions lie in up to {grid.most_own}"
        )
    return min(width, max(capacity, most))


def forced_tiles(grid: Grid, visible: Any, sinks: int) -> Any:
    """The tiles that are always listed: `Grid.own`, and the first of each row."""
    always = grid.own(visible)
    if sinks:
        always = always | (visible & (running_count(visible) <= sinks))
    return always
