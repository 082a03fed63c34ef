"""Pieces, shares, maps and lists of tiles by the C interface, and what comes out."""

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
    ((2, 40, 1536), 16, 3),  # heads of 256 and 128 numbers, a warp's lanes each
    ((1, 300, 24), 128, 4),
)


class CPoolPieces(ctypes.Structure):
    """kvblock_pool_pieces."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype side"),
        *fields(ctypes.c_int64, "members length width pieces"),
        *fields(ctypes.c_void_p, "x ends means largest smallest"),
        *fields(ctypes.c_int32, "rounded normed"),
    ]


WEIGHED = ("bfloat16", "float16")
# Members, heads, key heads, dim; tiles of queries and of keys; pieces of each; whether
# there are ranges, what is added by distance,
# and factors; the scale, over sqrt(dim).
WEIGHS = (
    ((1, 1, 1, 8), (1, 1), (1, 1), False, False, False, 2),
    ((2, 4, 2, 16), (5, 7), (8, 4), True, True, True, 2),
    ((1, 3, 1, 64), (7, 11), (4, 8), False, False, True, 2),
    ((1, 8, 2, 72), (3, 9), (32, 32), True, False, False, -2),
    ((2, 2, 2, 128), (4, 21), (16, 16), False, True, False, -1),
    ((1, 2, 1, 32), (70, 140), (2, 1), False, True, True, 2),
    ((1, 6, 2, 24), (40, 33), (1, 2), True, True, False, 0),
    ((1, 4, 1, 256), (4, 9), (4, 16), False, False, False, 0),
)


class CWeighTiles(ctypes.Structure):
    """kvblock_weigh_tiles."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype q_pieces kv_pieces"),
        *fields(ctypes.c_float, "scale"),
        *fields(ctypes.c_int64, "members heads kv_heads dim rows columns"),
        *fields(ctypes.c_void_p, "queries keys factors bounds q_ranges kv_ranges"),
        *fields(ctypes.c_void_p, "places distance first shares"),
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
    rounded: bool = False,
    normed: int = 0,
) -> list[np.ndarray]:
    """Means, `rounded` to x's dtype, and with `extremes` the largest and smallest
    numbers; or all three `normed`, of so many numbers a head, in one array.

    short: x lacks its last row, as a mistake would have it.
    """
    members, length, width = x.shape
    call = CPoolPieces(
        members=members, length=length, width=width, side=side, pieces=pieces
    )
    call.dtype = [np.dtype(t) for t in DTYPES.values()].index(x.dtype)
    call.rounded, call.normed = rounded, normed
    call.x = memory.place(x[:, :-1] if short else x)
    call.ends = None if ends is None else memory.place(np.int32(ends))
    places = []
    shape = (members, pieces, 3 * width if normed else width)
    for name in ("means", "largest", "smallest")[: 3 if extremes else 1]:
        dtype = x.dtype if rounded and name == "means" else np.float32
        places.append(memory.place(np.full(shape, -7, dtype)))
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
        means, wanted = made[0][i, j].astype(np.float64), piece.mean(0)
        error = side * 1e-7 * size
        if made[0].dtype != np.float32:  # half a unit of the last digit
            error = error + np.abs(wanted) * ml_dtypes.finfo(made[0].dtype).eps / 2
        assert (np.abs(means - wanted) <= error).all()
        for found, most in zip(made[1:], (piece.max(0), piece.min(0)), strict=False):
            np.testing.assert_array_equal(found[i, j], most.astype(np.float32))


def heads_of(x: np.ndarray) -> list[int]:
    """How many numbers a head may have that is normed."""
    held = 16 // x.itemsize
    return [n for n in (held << i for i in range(6)) if x.shape[-1] % n == 0]


def hold_normed(
    made: np.ndarray, x: np.ndarray, ends: np.ndarray | None, side: int, head: int
) -> None:
    """Each of the three has a mean square of 1, but where it has hardly any."""
    members, length, width = x.shape
    ends = np.full(members, length) if ends is None else np.clip(ends, 0, length)
    made = made.reshape(*made.shape[:2], width // head, 3, head)
    for i, j in np.ndindex(made.shape[:2]):
        piece = x[i, j * side : min((j + 1) * side, ends[i])].astype(np.float64)
        if not len(piece):
            assert (made[i, j] == 0).all()
            continue
        three = np.stack([piece.mean(0), piece.max(0), piece.min(0)])
        three = three.reshape(3, -1, head).swapaxes(0, 1)
        square = np.mean(three**2, axis=-1, keepdims=True)
        wanted = three / np.sqrt(np.maximum(square, 1e-30))
        error = 2e-6 * np.abs(wanted) + side * 1e-7 * np.abs(piece).max() / np.sqrt(
            np.maximum(square, 1e-30)
        )
        assert (np.abs(made[i, j] - wanted) <= error).all()


class Weighed(NamedTuple):
    """What tiles' shares come of; None is left out."""

    queries: np.ndarray
    keys: np.ndarray
    factors: np.ndarray | None
    bounds: np.ndarray
    q_ranges: np.ndarray | None
    kv_ranges: np.ndarray | None
    places: np.ndarray | None
    distance: np.ndarray | None
    first: np.ndarray | None
    scale: float
    tiles: tuple[int, int]


def draw_weighed(rng: np.random.Generator, case: Any, dtype: str) -> Weighed:
    """Of pieces of queries some see all, some a window, some less than nothing."""
    (members, heads, kv_heads, dim), (rows, columns), (down, across), *flags = case
    ranged, near, factored, scale = flags
    q_length, kv_length = rows * down, columns * across
    queries, keys = (
        rng.standard_normal((members, length, n, dim)).astype(DTYPES[dtype])
        for length, n in ((q_length, heads), (kv_length, kv_heads))
    )
    at = np.arange(q_length) * kv_length // q_length
    bounds = np.empty((members, q_length, 2), np.int32)
    late = at > kv_length * 7 // 8
    bounds[..., 0] = np.where((rng.random(bounds.shape[:2]) < 0.5) & ~late, 0, at // 2)
    bounds[..., 1] = np.where(
        rng.random(bounds.shape[:2]) < 0.7, at + 1, rng.integers(-3, kv_length + 5)
    )
    bounds[0, 0] = -2, kv_length + 3
    if q_length > 1:
        bounds[-1, -1] = 1, 1
    factors = None
    if factored:
        factors = (0.5 + rng.random((members, heads))).astype(np.float32)
    more: list[Any] = [None] * 5
    if ranged:
        more[:2] = (
            np.sort(rng.integers(0, 4, (members, length, 2)), -1).astype(np.int32)
            for length in (q_length, kv_length)
        )
    if near:
        more[2] = (at + rng.integers(-3, 4, (members, q_length))).astype(np.int32)
        more[3] = rng.standard_normal((members, heads, 32)).astype(np.float32)
        more[4] = rng.standard_normal((members, heads)).astype(np.float32)
    return Weighed(
        queries, keys, factors, bounds, *more, scale / np.sqrt(dim), (rows, columns)
    )


def weighed_truth(given: Weighed) -> np.ndarray:
    """Float64 shares, piece by piece of queries."""
    members, q_length, heads, _ = given.queries.shape
    kv_length, kv_heads = given.keys.shape[1:3]
    rows, columns = given.tiles
    q, k = (x.astype(np.float64) for x in given[:2])
    shares = np.zeros((members, heads, rows, columns))
    at = np.arange(kv_length)
    for b, n, t in np.ndindex(members, heads, q_length):
        first, end = given.bounds[b, t]
        first = max(first, 0)
        sees = (at >= first) & (at < end)
        if given.q_ranges is not None:
            low, high = given.q_ranges[b, t]
            sees &= (given.kv_ranges[b, :, 0] <= high) & (
                given.kv_ranges[b, :, 1] >= low
            )
        if not sees.any():
            continue
        scores = k[b, :, n * kv_heads // heads] @ q[b, t, n] * given.scale
        if given.factors is not None:
            scores *= given.factors[b, n]
        if given.places is not None:
            apart = np.abs(at - given.places[b, t])
            octave = np.log2(np.maximum(apart, 1)).astype(int)
            of = np.where(apart < 2, apart, 2 * octave + (apart >= 1.5 * 2.0**octave))
            scores += given.distance[b, n][np.minimum(of, 31)]
            scores += given.first[b, n] * (at == first)
        weights = np.where(sees, np.exp(scores - scores[sees].max()), 0)
        of_tiles = (weights / weights.sum()).reshape(columns, -1).sum(-1)
        shares[b, n, t * rows // q_length] += of_tiles * rows / q_length
    return shares


def launch_weigh_tiles(
    library: ctypes.CDLL, given: Weighed, memory: Any, short: bool = False
) -> np.ndarray:
    """Shares; short: keys lack their last piece, as a mistake would have it."""
    members, q_length, heads, dim = given.queries.shape
    rows, columns = given.tiles
    call = CWeighTiles(
        members=members,
        heads=heads,
        kv_heads=given.keys.shape[2],
        dim=dim,
        rows=rows,
        columns=columns,
        q_pieces=q_length // rows,
        kv_pieces=given.keys.shape[1] // columns,
        scale=given.scale,
    )
    call.dtype = [np.dtype(t) for t in DTYPES.values()].index(given.queries.dtype)
    for name, x in given._asdict().items():
        if name in ("scale", "tiles") or x is None:
            continue
        setattr(call, name, memory.place(x[:, :-1] if short and name == "keys" else x))
    shape = (members, heads, rows, columns)
    call.shares = shares = memory.place(np.full(shape, np.nan, np.float32))
    _run(library.kvblock_weigh_tiles_cuda, call)
    memory.finish()
    return memory.contents(shares)


def hold_weighed(made: np.ndarray, given: Weighed) -> None:
    """Every share is what float64 has, but for the rounding of products and powers."""
    wanted = weighed_truth(given)
    np.testing.assert_allclose(made, wanted, rtol=2e-5, atol=2e-7)
    assert ((made == 0) == (wanted == 0)).all()


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
    """Pools, weighs, keeps and lists on a GPU; `short`: an array lacks something."""
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
                rounded = of_rows is None
                made = launch_pool_pieces(
                    library, x, of_rows, side, pieces, memory, True, short, rounded
                )
                memory.arrays.free()
                if not short:
                    hold_pool(made, x, of_rows, side)
                    launches += 1
            memory, head = OnGpu(), heads_of(x)[-1]
            (made,) = launch_pool_pieces(
                library, x, ends, side, pieces, memory, False, short, normed=head
            )
            memory.arrays.free()
            if not short:
                hold_normed(made, x, ends, side, head)
                launches += 1
    for case in WEIGHS:
        for dtype in WEIGHED:
            given = draw_weighed(rng, case, dtype)
            memory = OnGpu()
            made = launch_weigh_tiles(library, given, memory, short)
            memory.arrays.free()
            if not short:
                hold_weighed(made, given)
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
