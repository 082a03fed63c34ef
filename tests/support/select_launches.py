"""Maps and lists of tiles by the C interface, and what has to come out of them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np
from append_launches import OnGpu
from attention_launches import connect, fields

HIDDEN, FREE, ALWAYS = range(3)  # kvblock_tile_state
SHAPES = ((1, 1), (5, 31), (3, 256), (4, 257), (2, 1000), (2, 8192), (1, 8200))
TAUS = (0.0, 0.5, 0.9375, 1.0)


class CKeep(ctypes.Structure):
    """kvblock_keep."""

    _fields_ = [
        *fields(ctypes.c_int64, "rows columns"),
        *fields(ctypes.c_void_p, "scores states limits kept masses"),
        *fields(ctypes.c_float, "tau"),
    ]


class CLists(ctypes.Structure):
    """kvblock_lists."""

    _fields_ = [
        *fields(ctypes.c_int64, "rows columns width"),
        *fields(ctypes.c_void_p, "map indices counts"),
    ]


class Rows(NamedTuple):
    """What rows of tiles choose from."""

    scores: np.ndarray
    states: np.ndarray
    limits: np.ndarray


def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Rows:
    """Scores of which many are equal, and whose sums in float32 are exact."""
    scores = rng.integers(-8, 64, shape).astype(np.float32) / 64
    states = rng.choice([HIDDEN, FREE, FREE, FREE, ALWAYS], shape).astype(np.uint8)
    states[0] = HIDDEN if shape[0] > 2 else FREE
    always = (states == ALWAYS).sum(-1)
    limits = always + rng.integers(0, shape[1] + 1, shape[0])
    return Rows(scores, states, limits.astype(np.int32))


def truth(rows: Rows, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """The map and the rows' masses, one tile after the other."""
    kept = rows.states == ALWAYS
    masses = np.ones(len(kept), np.float32)
    mass = np.nan_to_num(np.maximum(rows.scores, 0), nan=0.0).astype(np.float64)
    for i, row in enumerate(kept):
        free = np.flatnonzero(rows.states[i] == FREE)
        order = free[np.argsort(-rows.scores[i, free], kind="stable")]  # NaN last
        total = mass[i, rows.states[i] != HIDDEN].sum()
        need = tau * total - mass[i, row].sum() if tau and total > 0 else np.inf
        for j in order[: max(rows.limits[i] - row.sum(), 0)]:
            if need <= 0:
                break
            row[j] = True
            need -= mass[i, j]
        if total > 0:
            masses[i] = mass[i, row].sum() / total
    return kept, masses


def launch_keep(
    library: ctypes.CDLL, rows: Rows, tau: float, memory: Any, short: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """The map, and with tau the rows' masses.

    short: scores lack their last row, as a mistake would have it.
    """
    call = CKeep(rows=rows.scores.shape[0], columns=rows.scores.shape[1], tau=tau)
    call.scores = memory.place(rows.scores[:-1] if short else rows.scores)
    call.states, call.limits = map(memory.place, rows[1:])
    call.kept = kept = memory.place(np.full(rows.scores.shape, 9, np.uint8))
    masses = None
    if tau:
        masses = memory.place(np.full(len(rows.limits), -1, np.float32))
        call.masses = masses
    _run(library.kvblock_keep_cuda, call)
    memory.finish()
    return memory.contents(kept), None if masses is None else memory.contents(masses)


def launch_lists(
    library: ctypes.CDLL, kept: np.ndarray, width: int, memory: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and counts."""
    call = CLists(rows=kept.shape[0], columns=kept.shape[1], width=width)
    call.map = memory.place(kept.astype(np.uint8))
    indices = memory.place(np.full((len(kept), width), -7, np.int32))
    counts = memory.place(np.full(len(kept), -7, np.int32))
    call.indices, call.counts = indices, counts
    _run(library.kvblock_lists_cuda, call)
    memory.finish()
    return memory.contents(indices), memory.contents(counts)


def _run(launcher: Any, call: ctypes.Structure) -> None:
    launcher.restype = ctypes.c_char_p
    error = launcher(ctypes.byref(call), None)
    assert error is None, error.decode()


def hold_keep(made: Any, rows: Rows, tau: float) -> None:
    """Every tile and every mass is what it has to be."""
    kept, masses = truth(rows, tau)
    np.testing.assert_array_equal(made[0], kept.astype(np.uint8))
    if tau:
        np.testing.assert_array_equal(made[1], masses)


def hold_lists(made: Any, kept: np.ndarray, width: int) -> None:
    """Every entry is, and every count."""
    for row, of_row, count in zip(kept, *made, strict=True):
        places = np.flatnonzero(row)[:width]
        assert count == len(places)
        np.testing.assert_array_equal(of_row[:count], places)
        assert (of_row[count:] == -1).all()


def main(path: str, *only: str) -> None:
    """Keeps and lists on a GPU, and holds it to the truth; `short`: scores are."""
    connect()
    library = ctypes.CDLL(path)
    rng, launches = np.random.default_rng(1), 0
    for shape in SHAPES:
        rows = draw(rng, shape)
        for tau in TAUS:
            memory = OnGpu()
            made = launch_keep(library, rows, tau, memory, short="short" in only)
            memory.arrays.free()
            if "short" in only:
                continue
            hold_keep(made, rows, tau)
            memory = OnGpu()
            width = 1 + int(rng.integers(shape[1]))
            lists = launch_lists(library, made[0], width, memory)
            memory.arrays.free()
            hold_lists(lists, made[0], width)
            launches += 2
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
