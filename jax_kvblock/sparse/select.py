"""From scores of tiles to lists of tiles, in static shapes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.core import debug
from jax_kvblock.core.checks import to_jax
from jax_kvblock.sparse import plain, primitive
from jax_kvblock.sparse.grid import Grid, marked
from jax_kvblock.sparse.plain import ALWAYS, FREE, HIDDEN

# Sums in float32 differ by their order; what is this near to tau has reached it.
ROUNDING = 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What a selection did, row of tiles by row of tiles.

    Attributes:
      listed: int32 `[B|1, N|1, rows]`, how many tiles each row lists.
      visible: int32 `[B|1, 1, rows]`, how many tiles the mask alone would visit.
      mass: float32, shaped like `listed`: the share of a row's attention that its tiles
        hold by the selector's own estimate; None of patterns, which have none. Tiles
        whose share is NaN count for nothing: a row that has no other is told to hold 1.
      short: bool, shaped like `listed`: rows whose capacity was too small for tau; None
        where there is no tau.
    """

    listed: jax.Array
    visible: jax.Array
    mass: jax.Array | None = None
    short: jax.Array | None = None

    @property
    def share(self) -> jax.Array:
        """Tiles listed of those that the mask visits, float32 `[]`; 0 of none."""
        every = jnp.broadcast_to(self.visible, self.listed.shape)
        total = jnp.sum(every.astype(jnp.float32))
        return jnp.sum(self.listed.astype(jnp.float32)) / jnp.maximum(total, 1)

    @property
    def rows_short(self) -> jax.Array:
        """How many rows have a capacity that is too small for tau, int32 `[]`."""
        if self.short is None:
            return jnp.zeros((), jnp.int32)
        return jnp.sum(self.short, dtype=jnp.int32)


class Selection(NamedTuple):
    """What a selector chose, and what it says of it."""

    tiles: AttentionTiles
    report: Report


class Choice(NamedTuple):
    """Tiles as a map: bool `[B|1, N|1, rows, cols]`; NumPy's where it is known."""

    kept: Any
    mass: Any = None  # as in Report
    short: Any = None
    unknown: Any = None  # scores that are NaN, where debug_checks look at them


def keep(
    scores: Any,
    visible: Any,
    always: Any,
    limit: Any,
    tau: float | None = None,
) -> Choice:
    """The best tiles of each row, at most `limit`: as many, or until they hold tau.

    Args:
      scores: floats `[B|1, N|1, R, C]`; with tau they are attention's mass, at least 0.
      visible, always: bools that broadcast to it: what may be kept, and what always is.
      limit: int32 `[B|1, N|1, R]`; `always` is not cut by it.
      tau: the share of a row's visible mass that is enough, above 0.

    Of tiles that are equal the first ones are kept.
    """
    scores, visible = jnp.asarray(scores), jnp.asarray(visible)
    shape = jnp.broadcast_shapes(scores.shape, visible.shape)
    states = jnp.where(always & visible, ALWAYS, jnp.where(visible, FREE, HIDDEN))
    kept, *held = primitive.keep_tiles(
        jnp.broadcast_to(scores, shape).astype(jnp.float32),
        jnp.broadcast_to(states, shape).astype(jnp.uint8),
        jnp.broadcast_to(limit, shape[:-1]).astype(jnp.int32),
        tau or 0.0,
    )
    if tau is None:
        return Choice(kept)
    (mass,) = held
    short = visible.any(-1) & (mass < tau - ROUNDING)
    unknown = visible & jnp.isnan(scores) if debug.enabled() else None
    return Choice(kept, mass, short, unknown)


def keep_on_host(priority: Any, visible: Any, always: Any, limit: Any) -> Choice:
    """`keep` of what is known while a program is traced, in NumPy."""
    shape = np.broadcast_shapes(priority.shape, visible.shape)
    order = np.where(always & visible, np.inf, np.where(visible, priority, -np.inf))
    order = np.argsort(-np.broadcast_to(order, shape), axis=-1, kind="stable")
    rank = np.empty(shape, np.int32)
    np.put_along_axis(rank, order, np.arange(shape[-1], dtype=np.int32), axis=-1)
    return Choice(visible & (rank < limit[..., None]))


def lists_of(kept: Any, width: int) -> tuple[Any, Any]:
    """(indices `[..., width]`, counts) of a map; no row has more than `width`.

    −1 fills the rest.
    """
    width = max(width, 1)
    if not isinstance(kept, np.ndarray):
        indices, counts = primitive.list_tiles(kept, width)
        return indices, counts
    counts = plain.count(kept)
    first = np.argsort(~kept, axis=-1, kind="stable")[..., :width]
    missing = width - first.shape[-1]
    first = np.pad(first, [(0, 0)] * (kept.ndim - 1) + [(0, missing)])
    real = np.arange(width) < counts[..., None]
    return np.where(real, first, -1).astype(np.int32), counts


def map_of(tiles: AttentionTiles, cols: int) -> jax.Array:
    """Which tiles are listed: bool `[B|1, N|1, rows, cols]`."""
    entry = jnp.arange(tiles.indices.shape[-1], dtype=jnp.int32)
    used = (entry < tiles.counts[..., None]) & (tiles.indices >= 0)
    return marked(jnp.where(used, tiles.indices, cols), cols)


def selection(where: str, grid: Grid, choice: Choice, width: int) -> Selection:
    """Lists of a choice, and the report."""
    indices, counts = map(to_jax, lists_of(choice.kept, width))
    tiles = AttentionTiles(indices, counts, grid.block_q, grid.block_kv)
    visible = to_jax(grid.visible().sum(-1, dtype=np.int32))
    report = Report(counts, visible, choice.mass, choice.short)
    if choice.unknown is not None:
        debug.check(_look_known, where, unknown=choice.unknown)
    if choice.short is not None:
        debug.check(_look, where, short=choice.short, mass=choice.mass)
    return Selection(tiles, report)


def nothing(grid: Grid, rows: tuple[int, ...], width: int) -> Selection:
    """The selection of a call without members or queries, lists of `rows`."""
    counts = jnp.zeros(rows, jnp.int32)
    indices = jnp.full((*rows, max(width, 1)), -1, jnp.int32)
    tiles = AttentionTiles(indices, counts, grid.block_q, grid.block_kv)
    return Selection(tiles, Report(counts, counts[:, :1]))


def warn_if_short(
    where: str, report: Report, fix: str, bounded: bool, level: int = 3
) -> None:
    """Of a report that is not returned: rows short of tau, or that nobody will know.

    `bounded` says whether there may be such rows. A text is always the same, so that
    Python shows it once for a place in the text of the caller, `level` calls from here.
    """
    short = report.short
    if short is None:
        return
    look = f"{fix} and look at report.rows_short"
    if isinstance(short, jax.core.Tracer):
        if not bounded or debug.enabled():  # then the program looks, and fails
            return
        said = (
            "capacity or sparsity_ratio may be too small for tau in some rows of "
            "tiles, which list less than it asks for then, and under jit the call "
            f"cannot tell; {look}"
        )
    elif np.any(short):
        said = (
            "capacity or sparsity_ratio is too small for tau in some rows of tiles, "
            "which list less than it asks for; list more tiles, ask for less, or "
            f"{look}"
        )
    else:
        return
    warnings.warn(f"{where}: {said}", UserWarning, stacklevel=level)


def _look_known(where: str, *, unknown: np.ndarray) -> None:
    at = debug.first_bad(unknown)
    if at is not None:
        raise ValueError(
            f"{where}: the share of a tile must be a number with tau, got NaN at "
            f"[{', '.join(map(str, at))}]; a row of tiles with a NaN in its queries or "
            "keys lists what it may, whatever tau is"
        )


def _look(where: str, *, short: np.ndarray, mass: np.ndarray | None = None) -> None:
    at = debug.first_bad(short)
    if at is not None:
        one = f"{debug.place('short', at)} is True"
        if mass is not None:
            one = f"{debug.place('mass', at)} is {float(mass[at]):.3f}"
        raise ValueError(
            f"{where}: capacity is too small for tau in {int(short.sum())} of "
            f"{short.size} rows of tiles: {one}; list more tiles, or ask for less"
        )
