"""Pieces, maps and lists of tiles by the C interface, and what has to come out."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from append_launches import OnGpu
from attention_launches import connect, fields

HIDDEN, FREE, ALWAYS = range(3)  # kvblock_tile_state
SHAPES = ((1, 1), (5, 31), (3, 512), (4, 513), (2, 1000), (2, 8192), (1, 16384))
TAUS = (0.0, 0.5, 0.9375, 1.0)


DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Members, rows, columns; rows of a piece, pieces.
POOLS = (
    ((1, 1, 8), 1, 1),
    ((2, 40, 16), 16, 3),
    ((3, 33, 1032), 8, 6),
    ((2, 64, 2056), 32, 2),
    ((1, 300, 24), 128, 4),
)


class CPoolPieces(ctypes.Structure):
    """kvblock_pool_pieces."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype side"),
        *fields(ctypes.c_int64, "members length width pieces"),
        *fields(ctypes.c_void_p, "x ends means largest smallest"),
    ]


class CKeepTiles(ctypes.Structure):
    """kvblock_keep_tiles."""

    _fields_ = [
        *fields(ctypes.c_int64, "rows columns"),
        *fields(ctypes.c_void_p, "scores states limits kept masses"),
        *fields(ctypes.c_float, "tau"),
    ]


class CListTiles(ctypes.Structure):
    """kvblock_list_tiles."""

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


def launch_pool_pieces(
    library: ctypes.CDLL,
    x: np.ndarray,
    ends: np.ndarray | None,
    side: int,
    pieces: int,
    memory: Any,
    extremes: bool = True,
    short: bool = False,
) -> list[np.ndarray]:
    """Means, and with `extremes` the largest and smallest numbers.

    short: x lacks its last row, as a mistake would have it.
    """
    members, length, width = x.shape
    call = CPoolPieces(
        members=members, length=length, width=width, side=side, pieces=pieces
    )
    call.dtype = [np.dtype(t) for t in DTYPES.values()].index(x.dtype)
    call.x = memory.place(x[:, :-1] if short else x)
    call.ends = None if ends is None else memory.place(np.int32(ends))
    places = []
    for name in ("means", "largest", "smallest")[: 3 if extremes else 1]:
        places.append(memory.place(np.full((members, pieces, width), -7, np.float32)))
        setattr(call, name, places[-1])
    _run(library.kvblock_pool_pieces_cuda, call)
    memory.finish()
    return [memory.contents(place) for place in places]


def hold_pool(
    made: list[np.ndarray], x: np.ndarray, ends: np.ndarray | None, side: int
) -> None:
    """Every mean is right to some bits, every extreme to all."""
    members, length, _ = x.shape
    ends = np.full(members, length) if ends is None else np.clip(ends, 0, length)
    for i, j in np.ndindex(made[0].shape[:2]):
        piece = x[i, j * side : min((j + 1) * side, ends[i])].astype(np.float64)
        if not len(piece):
            assert all((found[i, j] == 0).all() for found in made)
            continue
        size = np.abs(piece).max()
        np.testing.assert_allclose(made[0][i, j], piece.mean(0), 0, side * 1e-7 * size)
        for found, most in zip(made[1:], (piece.max(0), piece.min(0)), strict=False):
            np.testing.assert_array_equal(found[i, j], most.astype(np.float32))


def launch_keep_tiles(
    library: ctypes.CDLL, rows: Rows, tau: float, memory: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """The map, and with tau the rows' masses."""
    call = CKeepTiles(rows=rows.scores.shape[0], columns=rows.scores.shape[1], tau=tau)
    call.scores, call.states, call.limits = map(memory.place, rows)
    call.kept = kept = memory.place(np.full(rows.scores.shape, 9, np.uint8))
    masses = None
    if tau:
        masses = memory.place(np.full(len(rows.limits), -1, np.float32))
        call.masses = masses
    _run(library.kvblock_keep_tiles_cuda, call)
    memory.finish()
    return memory.contents(kept), None if masses is None else memory.contents(masses)


def launch_list_tiles(
    library: ctypes.CDLL, kept: np.ndarray, width: int, memory: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and counts."""
    call = CListTiles(rows=kept.shape[0], columns=kept.shape[1], width=width)
    call.map = memory.place(kept.astype(np.uint8))
    indices = memory.place(np.full((len(kept), width), -7, np.int32))
    counts = memory.place(np.full(len(kept), -7, np.int32))
    call.indices, call.counts = indices, counts
    _run(library.kvblock_list_tiles_cuda, call)
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
    """Pools, keeps and lists on a GPU, as it has to be; `short`: an array is."""
    connect()
    library = ctypes.CDLL(path)
    rng, launches = np.random.default_rng(1), 0
    short = "short" in only
    for shape, side, pieces in POOLS:
        if short and shape[1] == 1:
            continue  # nothing would be left
        for dtype in DTYPES.values():
            x = (rng.standard_normal(shape) * 3).astype(dtype)
            ends = rng.integers(0, shape[1] + 1, shape[0])
            for of_rows in (None, ends):
                memory = OnGpu()
                made = launch_pool_pieces(
                    library, x, of_rows, side, pieces, memory, short=short
                )
                memory.arrays.free()
                if not short:
                    hold_pool(made, x, of_rows, side)
                    launches += 1
    for shape in () if short else SHAPES:
        rows = draw(rng, shape)
        for tau in TAUS:
            memory = OnGpu()
            kept = launch_keep_tiles(library, rows, tau, memory)
            memory.arrays.free()
            hold_keep(kept, rows, tau)
            memory = OnGpu()
            width = 1 + int(rng.integers(shape[1]))
            lists = launch_list_tiles(library, kept[0], width, memory)
            memory.arrays.free()
            hold_lists(lists, kept[0], width)
            launches += 2
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
