"""Packed documents in an order in which contiguous parts are even work.

Documents of a batch may stand in any order. Most then lie whole on one device, and
attention within them is that of one device: nothing of them travels, and none is cut
into pieces of few rows, as zigzag cuts each over all devices. What it costs is that
work is only as even as an order can make it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.integers import known_on_host
from jax_kvblock.core.checks import (
    as_array,
    check_int32,
    check_positive,
    show,
)
from jax_kvblock.core.types import ArrayIn, Integers
from jax_kvblock.parallel.sequence import boundaries_on_host, check_axis, taken

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

GOAL = 1.01  # times the mean: no search for more
# Of so many orders at a time one move each is tried, so often; less for many documents.
CHAINS, MOVES, MOST = 32, 400, 40_000
_SEED = 0  # all processes find the same order


def document_order(
    cu_seqlens: Any, size: int, *, rows: int | None = None, causal: bool = True
) -> Int[np.ndarray, " documents"]:
    """An order of packed documents in which `size` equal parts are as much work.

    Each device then has rows `i R` to `(i + 1) R` of the R a device, as
    `context_parallel_attention(..., layout="contiguous")` takes them. A document may
    lie on two devices, one that is longer than R on more. Where some are so long that
    no order is even, `to_zigzag` cuts each over all devices: `device_work` says.

    Args:
      cu_seqlens: integers `[documents + 1]` on the host: the first row of each document
        and the end of the last, which comes from all of them being in a row from 0.
      size: how many devices the rows are cut over, in equal parts.
      rows: how many there are, with padding behind the last document; its end unless
        given.
      causal: whether a row sees the keys up to its own, or all of its document.

    Returns:
      int32 `[documents]`: which document comes first, second and so on. The same for
      the same arguments, in each process.

    The search is simulated annealing (Kirkpatrick et al., 1983): documents change
    places, at first also where that makes the busiest device busier. It ends where it
    is within 1 % of even, and took two slow cores up to 1.2 s for hundreds of
    documents where it never was: make batches ahead of time.

    Example:
      >>> order = document_order(cu, 4)
      >>> tokens, new_cu = reorder_documents(tokens, cu, order)
      >>> targets, _ = reorder_documents(targets, cu, order)
    """
    where = "document_order"
    (size,) = check_positive(where, size=size)
    lens = _lens(where, cu_seqlens)
    each = _rows_of_each(where, lens, rows, size)
    return _search(tuple(map(int, lens)), size, each, bool(causal)).copy()


def device_work(
    cu_seqlens: Any, size: int, *, rows: int | None = None, causal: bool = True
) -> Float[np.ndarray, " size"]:
    """What each device has to do, of the mean: pairs of rows and keys that they see.

    For contiguous parts; the step takes as long as the largest says.

    Args:
      cu_seqlens, size, rows, causal: as in `document_order`.

    Returns:
      float64 `[size]`; 1 everywhere is even.

    Example:
      >>> device_work([0, 4, 8, 12, 16], 2)
      array([1., 1.])
      >>> device_work([0, 8, 12, 16], 2)
      array([1.28571429, 0.71428571])
    """
    where = "device_work"
    (size,) = check_positive(where, size=size)
    lens = _lens(where, cu_seqlens)
    each = _rows_of_each(where, lens, rows, size)
    work = _work(lens, size, each, bool(causal))
    mean = work.mean()
    return work / mean if mean else np.ones(size)


def reorder_documents(
    x: Shaped[ArrayIn, "..."],
    cu_seqlens: Any,
    order: Integers,
    *,
    axis: int = 0,
) -> tuple[Shaped[jax.Array, "..."], Int[np.ndarray, " documents+1"]]:
    """Packed documents in another order, and their boundaries.

    Args:
      x: an array whose `axis` holds the documents, one behind the other from row 0.
      cu_seqlens: integers `[documents + 1]` on the host.
      order: integers `[documents]` on the host, each document once (`document_order`).
      axis: the documents'.

    Returns:
      x with the documents in that order, rows behind the last where they were; and
      their boundaries, int32. The way back is the same with these boundaries and
      `np.argsort(order)`.

    Raises:
      TypeError, ValueError: cu_seqlens or order is not on the host, or does not fit.

    Example:
      >>> reorder_documents(jnp.arange(6), [0, 2, 5], [1, 0])
      (Array([2, 3, 4, 0, 1, 5], dtype=int32), array([0, 3, 5], dtype=int32))
    """
    where = "reorder_documents"
    x = as_array(where, "x", x)
    axis = check_axis(where, axis, x) % x.ndim
    total = x.shape[axis]
    lens = _lens(where, cu_seqlens, total)
    order = _checked_order(where, order, len(lens))
    starts = np.cumsum(lens) - lens
    rows = [np.arange(starts[i], starts[i] + lens[i]) for i in order]
    source = np.concatenate([*rows, np.arange(lens.sum(), total)])
    bounds = np.concatenate([[0], np.cumsum(lens[order])]).astype(np.int32)
    return taken(x, jnp.asarray(source, jnp.int32), axis, unique_indices=True), bounds


# ---- checks --------------------------------------------------------------------------


def _lens(where: str, cu_seqlens: Any, total: int | None = None) -> np.ndarray:
    """Rows of each document, int64; they lie in a row from row 0."""
    why = "an order is made where batches are"
    given = boundaries_on_host(where, cu_seqlens, total, why)
    return np.diff(given).astype(np.int64)


def _rows_of_each(where: str, lens: np.ndarray, rows: int | None, size: int) -> int:
    """How many rows a device has, the last ones perhaps fewer."""
    own = int(lens.sum())
    if rows is not None:
        (rows,) = check_positive(where, rows=rows)
        if rows < own:
            raise ValueError(
                f"{where}: rows must be at least the end of the last document, {own}, "
                f"got {rows}; it counts the padding behind it, too"
            )
    return max(-(-(own if rows is None else rows) // size), 1)


def _checked_order(where: str, order: Any, count: int) -> np.ndarray:
    check_int32(where, "order", order, "[documents]", 1)
    given = known_on_host(where, "order", order)
    if given is None:
        raise TypeError(
            f"{where}: order must be integers on the host, got a traced or a device's "
            "array; document_order gives one"
        )
    if not np.array_equal(np.sort(given), np.arange(count)):
        raise ValueError(
            f"{where}: order must have each of the {count} documents once, got "
            f"{show(given)} with {given.tolist()[:8]}; document_order gives one"
        )
    return given.astype(np.int64)


# ---- the search ----------------------------------------------------------------------


def _work(lens: np.ndarray, size: int, rows: int, causal: bool) -> np.ndarray:
    """What devices of so many rows compute, `[..., size]`, of lengths `[..., n]`."""
    ends = np.cumsum(lens, -1, dtype=np.float64)[..., None, :]
    first = rows * np.arange(size, dtype=np.float64)[:, None]
    whole = lens[..., None, :].astype(np.float64)
    starts = ends - whole
    begin = np.clip(first - starts, 0, whole)
    end = np.clip(first + rows - starts, 0, whole)
    if causal:  # a row sees itself and those before
        return ((end * (end + 1) - begin * (begin + 1)) / 2).sum(-1)
    return ((end - begin) * whole).sum(-1)


@functools.lru_cache(maxsize=64)
def _search(lens: tuple[int, ...], size: int, rows: int, causal: bool) -> np.ndarray:
    sizes = np.asarray(lens, np.int64)
    count = len(sizes)
    best = _dealt(sizes, size, rows, causal)
    work = _work(sizes[best], size, rows, causal)
    goal, cost = GOAL * work.mean(), work.max()
    draw = np.random.default_rng(_SEED)
    chains = np.repeat(best[None], CHAINS, 0)
    chains[1:] = draw.permuted(chains[1:], axis=1)
    costs = _work(sizes[chains], size, rows, causal).max(-1)
    moves = min(MOVES, MOST // count) if count > 1 else 0
    for move in range(moves):
        if costs.min() < cost:
            best, cost = chains[costs.argmin()].copy(), costs.min()
        if cost <= goal:
            break
        heat = 0.1 * work.mean() * (1 - move / moves) ** 3
        tried = _moved(chains, draw)
        new = _work(sizes[tried], size, rows, causal).max(-1)
        accepted = draw.random(CHAINS) < np.exp(
            np.minimum((costs - new) / (heat + 1), 0)
        )
        chains[accepted], costs[accepted] = tried[accepted], new[accepted]
    return best.astype(np.int32)


def _dealt(lens: np.ndarray, size: int, rows: int, causal: bool) -> np.ndarray:
    """The longest first, each to the device with the least to do that has room."""
    room = np.clip(lens.sum() - rows * np.arange(size), 0, rows)
    work = np.zeros(size)
    parts: list[list[int]] = [[] for _ in range(size)]
    for document in np.argsort(-lens, kind="stable"):
        length = lens[document]
        fits = length <= room
        device = np.where(fits, work, np.inf).argmin() if fits.any() else room.argmax()
        parts[device].append(document)
        room[device] -= length
        work[device] += length * (length + 1) / 2 if causal else length**2
    return np.concatenate(parts).astype(np.int64)


def _moved(chains: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Of each order two documents change places, or one goes somewhere else."""
    count = chains.shape[1]
    one, other = draw.integers(0, count, (2, len(chains)))
    chain = np.arange(len(chains))
    tried = chains.copy()
    tried[chain, one], tried[chain, other] = chains[chain, other], chains[chain, one]
    at = np.arange(count)
    for i in range(0, len(chains), 2):
        a, b = sorted((one[i], other[i]))
        run = np.roll(at[a : b + 1], 1 if one[i] > other[i] else -1)
        tried[i] = chains[i, np.concatenate([at[:a], run, at[b + 1 :]])]
    return tried
