"""The launcher's own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from cast_launches import CCast

from jax_kvblock.core.ffi import BUILD

PLACE = 4096  # nothing lies there: a check that looked at an array would crash
NAMES = ("x", "scale", "out", "transposed", "largest")
MULTIPLE = "must be a multiple of 16 from 0 to 2^31 - 1, got"


def valid(changes: dict[str, Any]) -> CCast:
    call = CCast(dtype=0, format=0, rows=48, columns=32, **dict.fromkeys(NAMES, PLACE))
    for name, value in changes.items():
        setattr(call, name, value)
    return call


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"dtype": 2, "format": 1}, "ok"),
    ({"out": None, "transposed": None}, "ok"),
    ({"rows": 0, **dict.fromkeys(NAMES)}, "ok"),
    ({"columns": 0, **dict.fromkeys(NAMES)}, "ok"),
    ({"dtype": 3}, "dtype must be KVBLOCK_CAST_BF16, F16 or F32, got 3"),
    ({"dtype": -1}, "dtype must be KVBLOCK_CAST_BF16, F16 or F32, got -1"),
    ({"format": 2}, "format must be KVBLOCK_CAST_E4M3 or E5M2, got 2"),
    ({"rows": 40}, f"rows {MULTIPLE} 40"),
    ({"rows": -16}, f"rows {MULTIPLE} -16"),
    ({"columns": 24}, f"columns {MULTIPLE} 24"),
    ({"columns": 1 << 32}, f"columns {MULTIPLE} 4294967296"),
    ({"rows": 1 << 30, "columns": 1 << 30}, "fewer than 2^31 tiles"),
    ({"x": None}, "x is NULL"),
    ({"scale": None}, "scale is NULL"),
    ({"largest": None}, "largest is NULL"),
    *(
        ({name: PLACE + 8}, "x, out and transposed must be aligned to 16 bytes")
        for name in ("x", "out", "transposed")
    ),
    ({"scale": PLACE + 2}, "scale and largest must be aligned to 4 bytes"),
    ({"largest": PLACE + 2}, "scale and largest must be aligned to 4 bytes"),
]


def check(call: CCast | None) -> str:
    library = load_library()
    library.kvblock_cast_check.restype = ctypes.c_char_p
    said = library.kvblock_cast_check(None if call is None else ctypes.byref(call))
    return "ok" if said is None else said.decode()


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_every_number_is_checked(changes: dict[str, Any], words: str) -> None:
    said = check(valid(changes))
    assert said == "ok" == words or (said.startswith("cast: ") and words in said)


def test_no_struct() -> None:
    assert check(None) == "cast: the struct is NULL"


def test_the_launcher_checks_first() -> None:
    library = load_library()
    library.kvblock_cast_cuda.restype = ctypes.c_char_p
    said = library.kvblock_cast_cuda(ctypes.byref(valid({"rows": 8})), None).decode()
    assert said == f"cast: rows {MULTIPLE} 8"
    if not BUILD["cuda"]:
        said = library.kvblock_cast_cuda(ctypes.byref(valid({})), None).decode()
        assert "no CUDA kernels; rebuild it where nvcc is on the PATH" in said
