"""The launcher's own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
from c_interface import load_library
from norm_cast_launches import CNormCast, part_of

from jax_kvblock.core.ffi import BUILD

PLACE = 4096  # nothing lies there: a check that looked at an array would crash
INPUTS = ("x", "residual", "gamma", "scale")
NAMES = (*INPUTS, "sum", "out", "transposed", "largest", "inverse_rms")
ROWS = "rows must be a multiple of 16 from 0 to 2^31 - 1, got"
WIDE = "columns must be a multiple of 16 from 0 to 16384, got"
ALIGNED = "x, residual, gamma, sum, out and transposed must be aligned to 16 bytes"
NARROW = "columns must be a multiple of 16 from 0 to 8192, to 16384 where dtype has 16"


def valid(changes: dict[str, Any]) -> CNormCast:
    places = dict.fromkeys(NAMES, PLACE)
    call = CNormCast(eps=1e-6, rows=48, columns=32, **places)
    for name, value in changes.items():
        setattr(call, name, value)
    return call


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"dtype": 2, "gamma_dtype": 2, "format": 1}, "ok"),
    ({"gamma_dtype": 2, "columns": 16384}, "ok"),
    ({"residual": None, "sum": None}, "ok"),
    ({"out": None, "transposed": None, "inverse_rms": None, "eps": 0}, "ok"),
    ({"rows": 0, **dict.fromkeys(NAMES)}, "ok"),
    ({"columns": 0, **dict.fromkeys(NAMES)}, "ok"),
    ({"dtype": 3}, "dtype must be KVBLOCK_CAST_BF16, F16 or F32, got 3"),
    ({"dtype": -1}, "dtype must be KVBLOCK_CAST_BF16, F16 or F32, got -1"),
    ({"gamma_dtype": 1}, "gamma_dtype must be dtype or KVBLOCK_CAST_F32, got 1"),
    ({"format": 2}, "format must be KVBLOCK_CAST_E4M3 or E5M2, got 2"),
    ({"eps": -1e-6}, "eps must be finite and not negative"),
    ({"eps": math.nan}, "eps must be finite and not negative"),
    ({"rows": 40}, f"{ROWS} 40"),
    ({"rows": -16}, f"{ROWS} -16"),
    ({"rows": 1 << 31}, f"{ROWS} 2147483648"),
    ({"columns": 24}, f"{WIDE} 24"),
    ({"columns": 16400}, f"{WIDE} 16400"),
    ({"columns": 8208, "dtype": 2, "gamma_dtype": 2}, NARROW),
    ({"x": None}, "x is NULL"),
    ({"gamma": None}, "gamma is NULL"),
    ({"scale": None}, "scale is NULL"),
    ({"largest": None}, "largest is NULL"),
    ({"sum": None}, "sum is NULL, and there is a residual"),
    ({"residual": None}, "sum must be NULL where residual is: it would be x"),
    *(
        ({name: PLACE + 8}, ALIGNED)
        for name in ("x", "residual", "gamma", "sum", "out", "transposed")
    ),
    *(
        ({name: PLACE + 2}, "scale, largest and inverse_rms must be aligned to 4 bytes")
        for name in ("scale", "largest", "inverse_rms")
    ),
]


def check(call: CNormCast | None) -> str:
    library = load_library()
    library.kvblock_norm_cast_check.restype = ctypes.c_char_p
    given = None if call is None else ctypes.byref(call)
    said = library.kvblock_norm_cast_check(given)
    return "ok" if said is None else said.decode()


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_every_number_is_checked(changes: dict[str, Any], words: str) -> None:
    said = check(valid(changes))
    right = said.startswith("norm_cast: ") and words in said
    assert said == "ok" == words or right, said


def test_no_struct() -> None:
    assert check(None) == "norm_cast: the struct is NULL"


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        *((0, 512), (16, 512), (4112, 512), (8192, 512), (8208, 1024), (16384, 1024)),
        (2**63 - 1, 2**59),
    ],
)
def test_parts_of_columns(columns: int, part: int) -> None:
    library = load_library()
    library.kvblock_norm_cast_part.restype = ctypes.c_int64
    said = library.kvblock_norm_cast_part(ctypes.c_int64(columns))
    assert said == part == part_of(columns)


def test_the_launcher_checks_first() -> None:
    library = load_library()
    library.kvblock_norm_cast_cuda.restype = ctypes.c_char_p
    launch = library.kvblock_norm_cast_cuda
    said = launch(ctypes.byref(valid({"rows": 8})), None).decode()
    assert said == f"norm_cast: {ROWS} 8"
    if not BUILD["cuda"]:
        said = launch(ctypes.byref(valid({})), None).decode()
        assert "no sm_90a kernels; rebuild it where nvcc is on the PATH" in said
