"""How good a selection is, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.arguments import check_window
from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.flash import flash_attention
from jax_kvblock.attention.tile_arguments import check_entries
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.sparse.arguments import check_qk, grid_of
from jax_kvblock.sparse.attention import SparseOptions, mask_options
from jax_kvblock.sparse.budget import check_count
from jax_kvblock.sparse.select import map_of
from jax_kvblock.sparse.selector import MaskOptions, Selector

if TYPE_CHECKING:
    from jaxtyping import Float


class Seconds(NamedTuple):
    """Medians: attention to the listed tiles, the selection, and attention to all."""

    attention: float
    selection: float  # 0 where tiles are given instead of a selector
    dense: float

    @property
    def speedup(self) -> float:
        """Dense attention's time beside that of selection and attention together."""
        return self.dense / (self.attention + self.selection)


@dataclasses.dataclass(frozen=True)
class Quality:
    """What `evaluate_selector` found.

    Attributes:
      recall: the share of a row's attention to keys that lies in its listed tiles, the
        mean over rows, heads and batch.
      worst: the smallest of any row.
      head_recall, head_worst: the same for each query head, float32 `[N]`.
      error: the output's distance from dense attention's, relative to its length.
      head_error: the same for each query head, float32 `[N]`.
      share: tiles listed of those that the mask visits.
      tiles_listed, tiles_visible: how many these are, of all heads.
      rows_short: rows of tiles whose capacity was too small for tau.
      seconds: None where nothing was timed.
    """

    recall: float
    worst: float
    head_recall: np.ndarray
    head_worst: np.ndarray
    error: float
    head_error: np.ndarray
    share: float
    tiles_listed: int
    tiles_visible: int
    rows_short: int
    seconds: Seconds | None


def evaluate_selector(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    tiles: Selector | AttentionTiles,
    *,
    repeats: int = 0,
    **options: Unpack[SparseOptions],
) -> Quality:
    """Recall of attention's mass, the output's error, tiles visited, and time.

    Attention is computed twice, to the listed tiles and to all. A row's recall is
    exp(lse of its listed scores - lse of all), exactly the share of its keys'
    probabilities that is listed; so nothing of T × S is in memory, and every option
    counts. `sinks`, which are no keys, count for the error alone: then both are
    computed without them once more, for recall.

    Args:
      q, k, v: as in `flash_attention`, with values: nothing here is traced.
      tiles: a selector, or tiles that one has made.
      repeats: time selection, attention and dense attention so often, in turns, each
        compiled and waited for, and report medians; 0 times nothing.
      **options: as in `sparse_attention`.

    Returns:
      A `Quality`. Rows that attend to nothing in dense attention do not count.

    Raises:
      TypeError, ValueError: as `sparse_attention`; a number of repeats below 0; a tile
        that is listed twice; a call under jit, or a selector that is no pytree.

    Example:
      >>> selector = AntidiagonalThreshold(sparsity_ratio=0.9)
      >>> found = evaluate_selector(q, k, v, selector, causal=True, repeats=5)
      >>> found.recall, found.error, found.share, found.seconds.speedup
    """
    where = "evaluate_selector"
    times = check_count(where, "repeats", repeats)
    mask = mask_options(where, _operands(options))
    _check_values(where, q, k, v, tiles, options)
    check_window(where, False, options.get("window"))  # an array would be traced
    options = _operands(options)
    select = None
    if isinstance(tiles, Selector):
        _check_pytree(where, tiles)
        select = jax.jit(_select, static_argnames=tuple(_static(options)))
    elif not isinstance(tiles, AttentionTiles):
        raise TypeError(
            f"{where}: tiles must be a Selector or AttentionTiles, got "
            f"{type(tiles).__name__}; AntidiagonalThreshold(), say"
        )
    q, k = check_qk(where, q, k)
    v = jnp.asarray(v)
    found, short = tiles, 0
    chosen: Callable[[], Any] | None = None
    if select is not None:
        of_mask = {"scale": options.get("scale"), **mask}
        chosen = functools.partial(select, tiles, q, k, **of_mask)
        found, report = chosen()
        short = int(report.rows_short)
    assert isinstance(found, AttentionTiles)

    attend = jax.jit(_attend, static_argnames=tuple(_static(options)))
    sparse = functools.partial(attend, q, k, v, found, **options)
    dense = functools.partial(attend, q, k, v, None, **options)
    (out, lse), (want, want_lse) = sparse(), dense()
    if select is None:
        check_entries(where, jax.device_get(found), -(-k.shape[1] // found.block_kv))
    if options.get("sinks") is not None:
        keys = {n: x for n, x in options.items() if n != "sinks"}
        lse = attend(q, k, v, found, **keys)[1]
        want_lse = attend(q, k, v, None, **keys)[1]
    compared = _compare(out, lse, want, want_lse)
    measured = {n: np.asarray(x) for n, x in compared.items()}
    listed, visible = _tiles(where, q, k, found, mask)
    seconds = None
    if times:
        seconds = Seconds(*_medians((sparse, chosen, dense), times))
    return Quality(
        recall=float(measured["recall"]),
        worst=float(measured["worst"]),
        head_recall=measured["head_recall"],
        head_worst=measured["head_worst"],
        error=float(measured["error"]),
        head_error=measured["head_error"],
        share=listed / max(visible, 1),
        tiles_listed=listed,
        tiles_visible=visible,
        rows_short=short,
        seconds=seconds,
    )


def _check_values(where: str, *given: Any) -> None:
    if any(map(_is_traced, jax.tree.leaves(given))):
        raise TypeError(
            f"{where}: arrays must have values, got traced ones; it compiles and waits "
            "by itself: call it outside of jit, vmap and derivatives"
        )


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _check_pytree(where: str, selector: Selector) -> None:
    """Selectors are arguments of a program."""
    for leaf in jax.tree.leaves(selector):
        if isinstance(leaf, Selector):
            raise TypeError(
                f"{where}: {leaf.name} must be a pytree to be compiled; put "
                "@jax.tree_util.register_dataclass and "
                "@dataclasses.dataclass(frozen=True, kw_only=True) above the class"
            )


def _operands(options: Any) -> Any:
    """Lists of integers as arrays, which a program takes, a window as a tuple, and
    numbers that are compiled in as Python's.
    """
    integers = ("q_lens", "kv_lens", "q_offset", "kv_offset", "dropout_seed")
    numbers = ("scale", "softcap", "dropout_rate")
    made = dict(options)
    for name, x in options.items():
        if name in integers and isinstance(x, (list, tuple, range)):
            made[name] = np.asarray(x)
        elif name == "window" and isinstance(x, list):
            made[name] = tuple(x)
        elif name in numbers and isinstance(x, (jax.Array, np.ndarray)):
            made[name] = x if x.ndim or _is_traced(x) else x.item()
    return made


def _static(options: Any) -> list[str]:
    """Options that are compiled in."""
    operands = ("segment_ids", "q_lens", "kv_lens", "sinks", "bias")
    return [
        name
        for name, x in options.items()
        if name not in operands and not isinstance(x, (jax.Array, np.ndarray))
    ]


def _select(selector: Selector, q: Any, k: Any, **options: Any) -> Any:
    return tuple(selector.select(q, k, **options))


def _attend(q: Any, k: Any, v: Any, tiles: Any, **options: Any) -> Any:
    return flash_attention(q, k, v, tiles=tiles, return_lse=True, **options)


@jax.jit
def _compare(out: Any, lse: Any, want: Any, want_lse: Any) -> dict[str, jax.Array]:
    """Recall and error of rows, over rows and batch, head by head and together."""
    rows = ~jnp.isneginf(want_lse)  # [B, T, N]
    recall = jnp.exp(lse - jnp.where(rows, want_lse, 0))
    recall = jnp.where(rows, jnp.minimum(recall, 1), 0)
    count = jnp.maximum(rows.sum((0, 1)), 1)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    want = want.astype(wide)
    apart = jnp.square(out.astype(wide) - want).sum((0, 1, 3))
    length = jnp.square(want).sum((0, 1, 3))

    def ratio(a: Any, b: Any) -> Any:
        return jnp.sqrt(a / jnp.where(b > 0, b, 1))

    return {
        "recall": recall.sum() / jnp.maximum(rows.sum(), 1),
        "worst": jnp.where(rows, recall, 1).min(),
        "head_recall": recall.sum((0, 1)) / count,
        "head_worst": jnp.where(rows, recall, 1).min((0, 1)),
        "error": ratio(apart.sum(), length.sum()),
        "head_error": ratio(apart, length),
    }


def _tiles(
    where: str, q: Any, k: Any, tiles: AttentionTiles, mask: MaskOptions
) -> tuple[int, int]:
    """Tiles that are listed and visited, and those that the mask visits, of all heads.

    A tile that the mask does not visit does not count.
    """
    batch, heads = q.shape[0], q.shape[2]
    grid = grid_of(
        where,
        (batch, q.shape[1], k.shape[1]),
        (tiles.block_q, tiles.block_kv),
        **mask,
    )
    visible = np.asarray(grid.visible())
    # From the host, wherever on a mesh they lie.
    both = np.asarray(map_of(jax.device_get(tiles), grid.cols)) & visible

    def count(kept: np.ndarray) -> int:
        return int(kept.sum()) * (batch // kept.shape[0]) * (heads // kept.shape[1])

    return count(both), count(visible)


def _medians(calls: Any, repeats: int) -> list[float]:
    """In turns, so that the clock and the neighbours are alike for all; 0 for None."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):  # the first round compiles
        for call, times in zip(calls, taken, strict=True):
            if call is not None:
                start = time.perf_counter()
                jax.block_until_ready(call())
                times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) if times else 0.0 for times in taken]
