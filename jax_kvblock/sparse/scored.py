"""Selectors that score tiles by what lies in them: a budget, a threshold, or both."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_array, check_positive, show
from jax_kvblock.sparse.arguments import check_blocks, grid_of
from jax_kvblock.sparse.budget import (
    check_count,
    check_number,
    check_ratio,
    cuts,
    forced_tiles,
    list_width,
    row_limits,
)
from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.select import Choice, Selection, keep, selection
from jax_kvblock.sparse.selector import Selector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredSelector(Selector):
    """A selector that estimates each tile's share of attention, and takes the largest.

    One of one's own defines `mass`.

    Attributes:
      tau: the smallest set whose estimated mass reaches this share of a row's, above
        0 and up to 1; None takes as many tiles as the other two allow.
      sparsity_ratio: from 0 to 0.95: a row lists at most the nearest number to
        `1 - sparsity_ratio` of the tiles that the mask visits in it. None is no bound.
      capacity: a row lists at most so many tiles, and as many as its queries need where
        keys do not lie at their positions (see `select`). None is no bound.
      sinks: how many of a row's first tiles it always lists; they count.

    Where a bound comes before tau, the row lists as much as the bound allows, and the
    report says so (`Report.short`); under `debug_checks` it is an error. Without bounds
    lists have room for all tiles, and none is short. Nor is a row of which nothing is
    known, whose shares are all 0 or NaN: it lists as many tiles as its bounds allow.
    NaN with tau is an error under `debug_checks`.
    """

    tau: float | None = dataclasses.field(default=None, metadata={"static": True})
    sparsity_ratio: float | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        checked = check_choice_of_tiles(
            self.name, self.tau, self.sparsity_ratio, self.capacity, self.sinks
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        """Each tile's share of its row's attention: floats `[B, N, R, C]`, at least 0.

        What the mask does not visit may be anything.
        """
        raise NotImplementedError

    def width(self, grid: Grid) -> int:
        bounds = (self.sparsity_ratio, self.capacity, self.sinks)
        return list_width(self.name, grid, *bounds)

    def may_be_short(self, kv_len: int) -> bool:
        cols = -(-kv_len // self.block_kv)
        return self.tau is not None and cuts(cols, self.sparsity_ratio, self.capacity)

    def choose(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> Choice:
        return chosen(
            self.mass(q, k, grid, scale),
            grid,
            self.tau,
            self.sparsity_ratio,
            self.capacity,
            self.sinks,
        )


def check_choice_of_tiles(
    where: str, tau: Any, ratio: Any, capacity: Any, sinks: Any
) -> dict[str, Any]:
    """The fields that say how many tiles are taken."""
    if tau is not None:
        tau = check_number(where, "tau", tau, 0.0, 1.0)
        if tau < np.finfo(np.float32).tiny:  # kernels are told it in float32
            raise ValueError(
                f"{where}: tau must be above 0 in float32, got {tau}; a row that lists "
                "no tile gives zeros"
            )
    if ratio is not None:
        ratio = check_ratio(where, ratio)
    if capacity is not None:
        (capacity,) = check_positive(where, capacity=capacity)
    if tau is ratio is capacity is None:
        raise ValueError(
            f"{where}: tau, sparsity_ratio or capacity must be given, got None for all "
            "of them; tau=0.9 takes what holds nine tenths of attention"
        )
    return {
        "tau": tau,
        "sparsity_ratio": ratio,
        "capacity": capacity,
        "sinks": check_count(where, "sinks", sinks),
    }


def chosen(
    mass: Any,
    grid: Grid,
    tau: float | None,
    ratio: float | None,
    capacity: int | None,
    sinks: int,
) -> Choice:
    visible = grid.visible()
    always = forced_tiles(grid, visible, sinks)
    limit = row_limits(grid, visible, always, ratio, capacity)
    return keep(mass, visible, always, limit, tau)


def select_tiles(
    scores: Any,
    *,
    q_len: int,
    kv_len: int,
    tau: float | None = None,
    sparsity_ratio: float | None = None,
    capacity: int | None = None,
    sinks: int = 1,
    block_q: int = 128,
    block_kv: int = 128,
    **mask: Any,
) -> Selection:
    """Lists of tiles from scores of any kind.

    Args:
      scores: floats `[B, N|1, ceil(q_len / block_q), ceil(kv_len / block_kv)]`, higher
        ones are listed first, NaN last; with tau they are masses, and what is below 0
        counts as 0.
      q_len, kv_len: T and S.
      tau, sparsity_ratio, capacity, sinks: as in `ScoredSelector`.
      block_q, block_kv: the tiles' sides.
      **mask: `causal`, `window`, `q_offset`, `kv_offset`, `q_lens`, `kv_lens`,
        `segment_ids`, as in `flash_attention`.

    Returns:
      `Selection(tiles, report)`.

    Raises:
      TypeError, ValueError: shapes, dtypes or numbers do not fit.

    Example:
      >>> scores = jax.random.uniform(jax.random.key(0), (1, 8, 32, 32))
      >>> tiles, report = select_tiles(
      ...     scores, q_len=4096, kv_len=4096, tau=0.9, causal=True)
    """
    where = "select_tiles"
    fields = check_choice_of_tiles(where, tau, sparsity_ratio, capacity, sinks)
    check_blocks(where, block_q, block_kv)
    q_len, kv_len = check_positive(where, q_len=q_len, kv_len=kv_len)
    scores = as_array(where, "scores", scores)
    form = f"[B, N, {-(-q_len // block_q)}, {-(-kv_len // block_kv)}]"
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(
            f"{where}: scores must be floats {form}, got {show(scores)}; cast them "
            "with .astype(jnp.float32)"
        )
    sizes = (scores.shape[0] if scores.ndim else 1, q_len, kv_len)
    grid = grid_of(where, sizes, (block_q, block_kv), **mask)
    if scores.ndim != 4 or scores.shape[2:] != (grid.rows, grid.cols):
        raise ValueError(
            f"{where}: scores must be {form} for T = {q_len} and S = {kv_len}, got "
            f"{show(scores)}; one for each tile of queries and tile of keys"
        )
    if not scores.size:
        raise ValueError(
            f"{where}: scores must not be empty, got {show(scores)}; leave the call out"
        )
    ratio, most = fields["sparsity_ratio"], fields["capacity"]
    width = list_width(where, grid, ratio, most, fields["sinks"])
    scores = jax.lax.stop_gradient(scores)
    choice = chosen(scores, grid, fields["tau"], ratio, most, fields["sinks"])
    return selection(where, grid, choice, width)
