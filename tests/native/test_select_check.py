"""What the launchers that choose tiles check by themselves: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from select_launches import CKeepTiles, CListTiles, CPoolPieces, CWeighTiles

from jax_kvblock.core.ffi import BUILD

POOL, WEIGH = "pool_pieces", "weigh_tiles"
KEEP, LISTS = "keep_tiles", "list_tiles"
PLACE = 4096  # nothing lies there: a check that looked at an array would crash
ARRAYS = {
    POOL: ("x", "ends", "means", "largest", "smallest"),
    WEIGH: (
        *("queries", "keys", "bounds", "shares"),
        *("factors", "q_ranges", "kv_ranges", "places", "distance", "first"),
    ),
    KEEP: ("scores", "states", "limits", "kept", "masses"),
    LISTS: ("map", "indices", "counts"),
}
SIZES = ("members", "length", "width", "pieces")
STRUCTS: dict[str, Any] = {
    POOL: lambda: CPoolPieces(side=4, members=2, length=9, width=16, pieces=3),
    WEIGH: lambda: CWeighTiles(
        q_pieces=4,
        kv_pieces=8,
        scale=0.5,
        members=2,
        heads=6,
        kv_heads=3,
        dim=64,
        rows=3,
        columns=5,
    ),
    KEEP: lambda: CKeepTiles(rows=3, columns=5, tau=0.5),
    LISTS: lambda: CListTiles(rows=3, columns=5, width=4),
}
ROWS = "rows must be from 0 to 2^31 - 1, got"
COLUMNS = "columns must be from 0 to KVBLOCK_MOST_COLUMNS, 16384, got"
WIDTH = "width must be a multiple of 8 up to 2^24, got"
MEANS = {"largest": None, "smallest": None}  # alone
NORMED = "normed must be 0, or 1, 2, 4, 8, 16 or 32 times"
CASES: list[tuple[str, dict[str, Any], str]] = [
    (POOL, {}, "ok"),
    (POOL, {"ends": None, "largest": None, "smallest": None}, "ok"),
    (POOL, {"length": 0, "x": None}, "ok"),
    *(
        (POOL, {name: 0, **dict.fromkeys(ARRAYS[POOL])}, "ok")
        for name in ("members", "width", "pieces")
    ),
    (
        POOL,
        {"dtype": 3},
        "dtype must be KVBLOCK_PIECES_BF16, F16 or F32, got 3",
    ),
    (
        POOL,
        {"dtype": -1},
        "dtype must be KVBLOCK_PIECES_BF16, F16 or F32, got -1",
    ),
    (POOL, {"rounded": 1}, "ok"),
    (POOL, {"rounded": 2}, "rounded must be 0 or 1, got 2"),
    (POOL, {"rounded": -1}, "rounded must be 0 or 1, got -1"),
    *((POOL, {"normed": n, **MEANS}, "ok") for n in (8, 16)),
    *(
        (POOL, {"normed": n, **MEANS, **more}, f"{NORMED} 8 and divide the width")
        for n, more in ((-8, {}), (4, {}), (24, {"width": 48}), (32, {}))
    ),
    (POOL, {"normed": 512, "width": 512, **MEANS}, f"{NORMED} 8 and divide the width"),
    (POOL, {"normed": 128, "width": 128, "dtype": 2, **MEANS}, "ok"),
    (POOL, {"normed": 4, "dtype": 2, **MEANS}, "ok"),
    (POOL, {"normed": 8}, "largest and smallest must be NULL, and rounded 0"),
    (
        POOL,
        {"normed": 8, "rounded": 1, **MEANS},
        "largest and smallest must be NULL, and rounded 0",
    ),
    (POOL, {"side": 0}, "side must be at least 1, got 0"),
    *(
        (POOL, {name: size}, f"{name} must be from 0 to 2^31 - 1, got {size}")
        for name in SIZES
        for size in (-1, 1 << 31)
    ),
    (POOL, {"width": 12}, f"{WIDTH} 12"),
    (POOL, {"width": 12, "dtype": 2}, "ok"),
    (
        POOL,
        {"width": 10, "dtype": 2},
        "width must be a multiple of 4 up to",
    ),
    (POOL, {"width": (1 << 24) + 8}, f"{WIDTH} 16777224"),
    (POOL, {"members": 1 << 20, "pieces": 1 << 20}, "fewer than 2^31 pieces"),
    (POOL, {"side": 1 << 20, "pieces": 1 << 20}, "fewer than 2^31 pieces"),
    (POOL, {"x": None}, "x is NULL"),
    (POOL, {"means": None}, "means is NULL"),
    (POOL, {"largest": None}, "one of largest and smallest is NULL"),
    (POOL, {"smallest": None}, "one of largest and smallest is NULL"),
    *(
        (
            POOL,
            {name: PLACE + 8},
            "x, means, largest and smallest must be aligned",
        )
        for name in ("x", "means", "largest", "smallest")
    ),
    (POOL, {"ends": PLACE + 2}, "ends must be aligned to 4 bytes"),
    (WEIGH, {}, "ok"),
    (WEIGH, {"q_ranges": None, "kv_ranges": None}, "ok"),
    (WEIGH, dict.fromkeys(ARRAYS[WEIGH][7:]), "ok"),
    (WEIGH, {"factors": None}, "ok"),
    *(
        (WEIGH, {name: 0, **dict.fromkeys(ARRAYS[WEIGH])}, "ok")
        for name in ("members", "heads", "rows", "columns")
    ),
    *(
        (WEIGH, {"dtype": x}, f"dtype must be KVBLOCK_PIECES_BF16 or F16, got {x}")
        for x in (-1, 2)
    ),
    *(
        (WEIGH, {name: pieces}, f"{name} must be a power of two up to")
        for name in ("q_pieces", "kv_pieces")
        for pieces in (-4, 0, 3, 64)
    ),
    (WEIGH, {"q_pieces": 32, "kv_pieces": 1}, "ok"),
    *(
        (WEIGH, {"scale": float(x)}, "scale must be finite")
        for x in ("inf", "-inf", "nan")
    ),
    *(
        (WEIGH, {name: size}, f"{name} must be from 0 to 2^31 - 1, got {size}")
        for name in ("members", "heads", "kv_heads", "rows")
        for size in (-1, 1 << 31)
    ),
    *(
        (WEIGH, {"columns": size}, f"columns must be from 0 to 2^24, got {size}")
        for size in (-1, (1 << 24) + 1)
    ),
    *(
        (WEIGH, {"dim": dim}, "dim must be a multiple of 8 up to K")
        for dim in (0, 4, 60, 264)
    ),
    (WEIGH, {"dim": 256, "dtype": 1}, "ok"),
    (WEIGH, {"dim": 8}, "ok"),
    (WEIGH, {"kv_heads": 0}, "kv_heads must divide heads, 6, got 0"),
    (WEIGH, {"kv_heads": 4}, "kv_heads must divide heads, 6, got 4"),
    (WEIGH, {"rows": 1 << 24}, "fewer than 2^26 rows of tiles of all heads"),
    (
        WEIGH,
        {"members": 1 << 30, "heads": 1 << 30, "kv_heads": 1, "rows": 16, "columns": 1},
        "fewer than 2^26 rows of tiles of all heads",
    ),
    (WEIGH, {"members": 1 << 27}, "fewer than 2^26 rows of tiles of all heads"),
    *((WEIGH, {name: None}, f"{name} is NULL") for name in ARRAYS[WEIGH][:4]),
    *(
        (WEIGH, {name: None}, "one of q_ranges and kv_ranges is NULL")
        for name in ("q_ranges", "kv_ranges")
    ),
    *(
        (WEIGH, {name: None}, "some of places, distance and first are NULL")
        for name in ("places", "distance", "first")
    ),
    *(
        (WEIGH, {name: PLACE + 8}, "queries and keys must be aligned to 16 bytes")
        for name in ("queries", "keys")
    ),
    *(
        (WEIGH, {name: PLACE + 4}, "bounds and ranges must be aligned to 8 bytes")
        for name in ("bounds", "q_ranges", "kv_ranges")
    ),
    *(
        (WEIGH, {name: PLACE + 2}, "shares must be aligned to 4 bytes")
        for name in ("factors", "places", "distance", "first", "shares")
    ),
    (KEEP, {}, "ok"),
    (KEEP, {"tau": 1.0, "columns": 16384}, "ok"),
    (KEEP, {"tau": 0.0, "masses": None}, "ok"),
    (KEEP, {"rows": 0, **dict.fromkeys(ARRAYS[KEEP])}, "ok"),
    (KEEP, {"columns": 0, **dict.fromkeys(ARRAYS[KEEP])}, "ok"),
    (KEEP, {"rows": -1}, f"{ROWS} -1"),
    (KEEP, {"rows": 1 << 31}, f"{ROWS} 2147483648"),
    (KEEP, {"columns": -1}, f"{COLUMNS} -1"),
    (KEEP, {"columns": 16385}, f"{COLUMNS} 16385"),
    (KEEP, {"tau": -0.5}, "tau must be from 0 to 1"),
    (KEEP, {"tau": 1.5}, "tau must be from 0 to 1"),
    (KEEP, {"tau": float("nan")}, "tau must be from 0 to 1"),
    (KEEP, {"masses": None}, "masses is NULL, and tau is not 0"),
    *((KEEP, {name: None}, f"{name} is NULL") for name in ARRAYS[KEEP][:-1]),
    *(
        (KEEP, {name: PLACE + 2}, "must be aligned to 4 bytes")
        for name in ("scores", "limits", "masses")
    ),
    (KEEP, {"states": PLACE + 1, "kept": PLACE + 3}, "ok"),
    (LISTS, {}, "ok"),
    (LISTS, {"rows": 0, **dict.fromkeys(ARRAYS[LISTS])}, "ok"),
    (LISTS, {"columns": 0, "map": None}, "ok"),
    (LISTS, {"rows": -1}, f"{ROWS} -1"),
    (LISTS, {"columns": 16385}, f"{COLUMNS} 16385"),
    (LISTS, {"width": 0}, "width must be from 1 to 2^31 - 1, got 0"),
    (
        LISTS,
        {"width": 1 << 31},
        "width must be from 1 to 2^31 - 1, got 2147483648",
    ),
    *((LISTS, {name: None}, f"{name} is NULL") for name in ARRAYS[LISTS]),
    *(
        (
            LISTS,
            {name: PLACE + 1},
            "indices and counts must be aligned to 4 bytes",
        )
        for name in ("indices", "counts")
    ),
]


def valid(what: str, changes: dict[str, Any]) -> Any:
    call = STRUCTS[what]()
    for name, value in {**dict.fromkeys(ARRAYS[what], PLACE), **changes}.items():
        setattr(call, name, value)
    return call


def said(function: str, call: Any, *stream: None) -> str:
    launcher = getattr(load_library(), f"kvblock_{function}")
    launcher.restype = ctypes.c_char_p
    answer = launcher(None if call is None else ctypes.byref(call), *stream)
    return "ok" if answer is None else answer.decode()


@pytest.mark.parametrize(("what", "changes", "words"), CASES)
def test_every_number_is_checked(
    what: str, changes: dict[str, Any], words: str
) -> None:
    answer = said(f"{what}_check", valid(what, changes))
    right = answer.startswith(f"{what}: ") and words in answer
    assert right or answer == "ok" == words


@pytest.mark.parametrize("what", STRUCTS)
def test_no_struct(what: str) -> None:
    assert said(f"{what}_check", None) == f"{what}: the struct is NULL"


@pytest.mark.parametrize("what", STRUCTS)
def test_the_launcher_checks_first(what: str) -> None:
    axis = "members" if what in (POOL, WEIGH) else "rows"
    wrong = said(f"{what}_cuda", valid(what, {axis: -1}), None)
    assert wrong == f"{what}: {axis} must be from 0 to 2^31 - 1, got -1"
    if not BUILD["cuda"]:
        without = said(f"{what}_cuda", valid(what, {}), None)
        assert "no CUDA kernels; rebuild it where nvcc is on the PATH" in without
