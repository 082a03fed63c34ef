"""Patterns that look at no values: random, block sparse, strided, local + global,
streaming.

A pattern is a priority of each tile of a row; a row lists as many of the best as its
budget holds. Where the mask is known while a program is traced all of it happens on the
host, once; with lengths, segments or traced offsets on the device, by the same rule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jax_kvblock.attention.arguments import check_flags
from jax_kvblock.core.checks import check_positive
from jax_kvblock.sparse.budget import (
    check_count,
    check_ratio,
    forced_tiles,
    list_width,
    row_limits,
)
from jax_kvblock.sparse.grid import Grid, array_module, running_count
from jax_kvblock.sparse.select import Choice, keep, keep_on_host
from jax_kvblock.sparse.selector import Selector


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern(Selector):
    """A selector that looks at no values.

    Each row of tiles lists the nearest number to `1 - sparsity_ratio` of the tiles that
    the mask visits in it, one at least, and under a causal mask, a window or segments
    those of its own positions, which count. So a call's total is what the ratio says,
    to within half a tile a row where a row's own are not more than that.

    Attributes:
      sparsity_ratio: from 0 to 0.95.
    """

    sparsity_ratio: float = _static(0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = check_ratio(self.name, self.sparsity_ratio)
        object.__setattr__(self, "sparsity_ratio", ratio)

    @property
    def always(self) -> int:
        """How many of a row's first tiles it always lists."""
        return 0

    def priority(self, grid: Grid, heads: int, visible: Any, limit: Any) -> Any:
        """Floats `[1 or B, 1 or N, R, C]`: higher ones are listed first."""
        raise NotImplementedError

    def width(self, grid: Grid) -> int:
        return list_width(self.name, grid, self.sparsity_ratio, None, self.always)

    def choose(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> Choice:
        heads = q.shape[2]
        if grid.on_host:
            return Choice(_on_host(self, grid.key, heads))
        visible = grid.visible()
        always = forced_tiles(grid, visible, self.always)
        limit = row_limits(grid, visible, always, self.sparsity_ratio, None)
        priority = self.priority(grid, heads, visible, limit)
        return keep(priority, visible, always, limit)


@functools.lru_cache(maxsize=32)
def _on_host(pattern: Pattern, key: tuple[Any, ...], heads: int) -> np.ndarray:
    """The map of a pattern; layers of a model ask for the same one again and again."""
    grid = Grid(*key)
    visible = grid.visible()
    always = forced_tiles(grid, visible, pattern.always)
    limit = row_limits(grid, visible, always, pattern.sparsity_ratio, None)
    priority = pattern.priority(grid, heads, visible, limit)
    kept: np.ndarray = keep_on_host(priority, visible, always, limit).kept
    kept.setflags(write=False)
    return kept


def nearness(grid: Grid) -> Any:
    """`[B|1, 1, R, C]`, above −1: higher for tiles nearer to the queries' own."""
    cols = np.arange(grid.cols, dtype=np.int32)
    far = abs(cols - grid.places())
    return far.astype(np.float32) * np.float32(-1 / (2 * grid.cols + 2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Pattern):
    """Tiles drawn at random, without putting any back (S2's RANDOM).

    Attributes:
      seed: what is drawn; the same tiles everywhere and every time, for as many heads.
        In a `jax.shard_map` over heads these count from 0 on each device: make the
        tiles outside, and pass them in cut as the heads are.
      per_head: each head has its own; else all heads share them.

    Example:
      >>> Random(sparsity_ratio=0.75)(q, k, causal=True).counts.shape
      (1, 8, 32)
    """

    seed: int = _static(0)
    per_head: bool = _static(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, "seed", self.seed)
        check_flags(self.name, per_head=self.per_head)

    def priority(self, grid: Grid, heads: int, visible: Any, limit: Any) -> Any:
        shape = (1, heads if self.per_head else 1, grid.rows, grid.cols)
        return np.random.default_rng(self.seed).random(shape, np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSparse(Pattern):
    """Random squares of `run × run` tiles (S2's BLOCK_SPARSE).

    The squares of a row come in a random order; the last one that the budget reaches
    is cut.

    Attributes:
      run: the side of a square, in tiles.
      seed: what is drawn, as in `Random`.
      per_head: each head has its own; else all heads share them.

    Source: the random blocks of Zaheer et al., BigBird (arXiv:2007.14062).
    """

    run: int = _static(4)
    seed: int = _static(0)
    per_head: bool = _static(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, run=self.run)
        check_count(self.name, "seed", self.seed)
        check_flags(self.name, per_head=self.per_head)

    def priority(self, grid: Grid, heads: int, visible: Any, limit: Any) -> Any:
        rows, cols = (np.arange(n) // self.run for n in (grid.rows, grid.cols))
        heads = heads if self.per_head else 1
        shape = (1, heads, int(rows[-1]) + 1, int(cols[-1]) + 1)
        # Whole numbers, so that the tiles of a square are equal and no others are.
        rng = np.random.default_rng(self.seed)
        order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
        return order.astype(np.float32)[:, :, rows][..., cols]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """The nearest tiles, and others at even distances (S2's STRIDED).

    Half of a row's budget goes to the tiles nearest to its own, the rest is spread
    evenly over all that it sees.

    Source: Child et al., Sparse Transformers (arXiv:1904.10509), whose stride is fixed;
    here the budget decides, so that a row's share is the ratio's everywhere.
    """

    def priority(self, grid: Grid, heads: int, visible: Any, limit: Any) -> Any:
        near = nearness(grid)
        spread = limit - limit // 2
        # Of n tiles m are even: those at which the whole part of r m / n rises.
        rank = (running_count(visible) - 1).astype(np.float32)
        n = array_module(visible).maximum(visible.sum(-1, dtype=np.int32), 1)
        step = (spread.astype(np.float32) / n.astype(np.float32))[..., None]
        # float32 is exact enough: a step more or less moves a tile to its neighbour.
        even = ((rank + 1) * step + 1e-4) // 1 > (rank * step + 1e-4) // 1
        return near + 2 * even.astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGlobal(Pattern):
    """The first tiles of the keys, and the nearest ones (S2's LOCAL_GLOBAL).

    Attributes:
      num_global: how many of a row's first tiles it lists, as long as its budget holds
        them; the rest of the budget is the nearest tiles.

    Source: Beltagy et al., Longformer (arXiv:2004.05150). There, global queries also
    see everything; here every row keeps to its budget.
    """

    num_global: int = _static(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, num_global=self.num_global)

    def priority(self, grid: Grid, heads: int, visible: Any, limit: Any) -> Any:
        first = running_count(visible) <= self.num_global
        return nearness(grid) + 2 * first.astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Selector):
    """Attention sinks and a window: a fixed number of tiles, however long the sequence.

    Attributes:
      sinks: how many of a row's first tiles it lists.
      window: how many of the nearest tiles it lists, its own among them.

    Source: Xiao et al., StreamingLLM (arXiv:2309.17453).
    """

    sinks: int = _static(1)
    window: int = _static(4)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, window=self.window)
        check_count(self.name, "sinks", self.sinks)

    def width(self, grid: Grid) -> int:
        return min(grid.cols, max(self.window, grid.most_always) + self.sinks)

    def choose(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> Choice:
        visible = grid.visible()
        near = forced_tiles(grid, visible, 0)
        first = visible & (running_count(visible) <= self.sinks)
        own = near.sum(-1, dtype=np.int32)
        limit = array_module(own).maximum(own, np.int32(self.window))
        best = keep_on_host if grid.on_host else keep
        kept = best(nearness(grid), visible, near, limit).kept
        return Choice(kept | first)
