"""The selector that knows: attention's own map of tiles."""

from __future__ import annotations

import dataclasses

import jax

from jax_kvblock.sparse.distill import mass_of
from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.scored import ScoredSelector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(ScoredSelector):
    """The tiles that hold the most of attention, by computing all of its scores.

    It saves no time: it is what other selectors are measured by. At as many tiles
    nothing has a higher recall, but for the tiles that are always listed.

    Example:
      >>> best = evaluate_selector(q, k, v, Oracle(sparsity_ratio=0.9), causal=True)
    """

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        return mass_of(q, k, grid, scale)
