"""What the launchers that choose tiles check by themselves: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from select_launches import CKeep, CLists, CPool

from jax_kvblock.core.ffi import BUILD

PLACE = 4096  # nothing lies there: a check that looked at an array would crash
ARRAYS = {
    "pool": ("x", "ends", "means", "largest", "smallest"),
    "keep": ("scores", "states", "limits", "kept", "masses"),
    "lists": ("map", "indices", "counts"),
}
SIZES = ("members", "length", "width", "pieces")
STRUCTS: dict[str, Any] = {
    "pool": lambda: CPool(side=4, members=2, length=9, width=16, pieces=3),
    "keep": lambda: CKeep(rows=3, columns=5, tau=0.5),
    "lists": lambda: CLists(rows=3, columns=5, width=4),
}
ROWS = "rows must be from 0 to 2^31 - 1, got"
COLUMNS = "columns must be from 0 to KVBLOCK_MOST_COLUMNS, 16384, got"
WIDTH = "width must be a multiple of 8 up to 2^24, got"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("pool", {}, "ok"),
    ("pool", {"ends": None, "largest": None, "smallest": None}, "ok"),
    ("pool", {"length": 0, "x": None}, "ok"),
    *(
        ("pool", {name: 0, **dict.fromkeys(ARRAYS["pool"])}, "ok")
        for name in ("members", "width", "pieces")
    ),
    ("pool", {"dtype": 3}, "dtype must be KVBLOCK_POOL_BF16, F16 or F32, got 3"),
    ("pool", {"dtype": -1}, "dtype must be KVBLOCK_POOL_BF16, F16 or F32, got -1"),
    ("pool", {"side": 0}, "side must be at least 1, got 0"),
    *(
        ("pool", {name: size}, f"{name} must be from 0 to 2^31 - 1, got {size}")
        for name in SIZES
        for size in (-1, 1 << 31)
    ),
    ("pool", {"width": 12}, f"{WIDTH} 12"),
    ("pool", {"width": 12, "dtype": 2}, "ok"),
    (
        "pool",
        {"width": 10, "dtype": 2},
        "width must be a multiple of 4 up to",
    ),
    ("pool", {"width": (1 << 24) + 8}, f"{WIDTH} 16777224"),
    ("pool", {"members": 1 << 20, "pieces": 1 << 20}, "fewer than 2^31 pieces"),
    ("pool", {"side": 1 << 20, "pieces": 1 << 20}, "fewer than 2^31 pieces"),
    ("pool", {"x": None}, "x is NULL"),
    ("pool", {"means": None}, "means is NULL"),
    ("pool", {"largest": None}, "one of largest and smallest is NULL"),
    ("pool", {"smallest": None}, "one of largest and smallest is NULL"),
    *(
        ("pool", {name: PLACE + 8}, "x, means, largest and smallest must be aligned")
        for name in ("x", "means", "largest", "smallest")
    ),
    ("pool", {"ends": PLACE + 2}, "ends must be aligned to 4 bytes"),
    ("keep", {}, "ok"),
    ("keep", {"tau": 1.0, "columns": 16384}, "ok"),
    ("keep", {"tau": 0.0, "masses": None}, "ok"),
    ("keep", {"rows": 0, **dict.fromkeys(ARRAYS["keep"])}, "ok"),
    ("keep", {"columns": 0, **dict.fromkeys(ARRAYS["keep"])}, "ok"),
    ("keep", {"rows": -1}, f"{ROWS} -1"),
    ("keep", {"rows": 1 << 31}, f"{ROWS} 2147483648"),
    ("keep", {"columns": -1}, f"{COLUMNS} -1"),
    ("keep", {"columns": 16385}, f"{COLUMNS} 16385"),
    ("keep", {"tau": -0.5}, "tau must be from 0 to 1"),
    ("keep", {"tau": 1.5}, "tau must be from 0 to 1"),
    ("keep", {"tau": float("nan")}, "tau must be from 0 to 1"),
    ("keep", {"masses": None}, "masses is NULL, and tau is not 0"),
    *(("keep", {name: None}, f"{name} is NULL") for name in ARRAYS["keep"][:-1]),
    *(
        ("keep", {name: PLACE + 2}, "must be aligned to 4 bytes")
        for name in ("scores", "limits", "masses")
    ),
    ("keep", {"states": PLACE + 1, "kept": PLACE + 3}, "ok"),
    ("lists", {}, "ok"),
    ("lists", {"rows": 0, **dict.fromkeys(ARRAYS["lists"])}, "ok"),
    ("lists", {"columns": 0, "map": None}, "ok"),
    ("lists", {"rows": -1}, f"{ROWS} -1"),
    ("lists", {"columns": 16385}, f"{COLUMNS} 16385"),
    ("lists", {"width": 0}, "width must be from 1 to 2^31 - 1, got 0"),
    ("lists", {"width": 1 << 31}, "width must be from 1 to 2^31 - 1, got 2147483648"),
    *(("lists", {name: None}, f"{name} is NULL") for name in ARRAYS["lists"]),
    *(
        ("lists", {name: PLACE + 1}, "indices and counts must be aligned to 4 bytes")
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
    axis = "members" if what == "pool" else "rows"
    wrong = said(f"{what}_cuda", valid(what, {axis: -1}), None)
    assert wrong == f"{what}: {axis} must be from 0 to 2^31 - 1, got -1"
    if not BUILD["cuda"]:
        without = said(f"{what}_cuda", valid(what, {}), None)
        assert "no CUDA kernels; rebuild it where nvcc is on the PATH" in without
