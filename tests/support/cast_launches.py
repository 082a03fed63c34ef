"""Casts to 8 bits by the C interface, and what has to come out of them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np
from append_launches import OnGpu
from attention_launches import connect, fields
from training_truth import DTYPES as FORMATS
from training_truth import narrowed

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
TILE = (256, 128)  # KVBLOCK_CAST_TILE_ROWS, KVBLOCK_CAST_TILE_COLUMNS
SHAPES = ((16, 16), (256, 128), (48, 144), (400, 32), (16, 1040), (272, 528))


class CCast(ctypes.Structure):
    """kvblock_cast."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype format"),
        *fields(ctypes.c_int64, "rows columns"),
        *fields(ctypes.c_void_p, "x scale out transposed largest"),
    ]


def tiles_of(shape: tuple[int, int]) -> tuple[int, int]:
    """How many tiles lie below one another, and side by side."""
    return -(-shape[0] // TILE[0]), -(-shape[1] // TILE[1])


def launch(
    library: ctypes.CDLL,
    x: np.ndarray,
    scale: float,
    form: str,
    memory: Any,
    orders: str = "out transposed",
    short: bool = False,
) -> dict[str, np.ndarray]:
    """The results by name; what is not in `orders` is left out.

    short: x lacks its last row, as a mistake would have it.
    """
    rows, columns = x.shape
    call = CCast(rows=rows, columns=columns, format=list(FORMATS).index(form))
    call.dtype = [np.dtype(t) for t in DTYPES.values()].index(x.dtype)
    call.x = memory.place(x[:-1] if short else x)
    call.scale = memory.place(np.float32([scale]))
    places = {}
    for name, shape in (("out", (rows, columns)), ("transposed", (columns, rows))):
        if name in orders.split():
            codes = np.full(shape, 0x55, np.uint8).view(FORMATS[form])
            places[name] = memory.place(codes)
            setattr(call, name, places[name])
    sizes = np.full(tiles_of(x.shape), -1, np.float32)
    call.largest = places["largest"] = memory.place(sizes)
    library.kvblock_cast_cuda.restype = ctypes.c_char_p
    error = library.kvblock_cast_cuda(ctypes.byref(call), None)
    assert error is None, error.decode()
    memory.finish()
    return {name: memory.contents(place) for name, place in places.items()}


def hold(made: dict[str, np.ndarray], x: np.ndarray, scale: float, form: str) -> None:
    """Every code and size is what it has to be."""
    want = narrowed(x, scale, form)
    for name, codes in made.items():
        if name == "largest":
            for i, j in np.ndindex(codes.shape):
                down, across = i * TILE[0], j * TILE[1]
                part = x[down : down + TILE[0], across : across + TILE[1]]
                size = np.abs(part.astype(np.float32)).max()
                np.testing.assert_array_equal(codes[i, j], size)
        else:
            wide = codes.astype(np.float64)
            np.testing.assert_array_equal(wide if name == "out" else wide.T, want)


def main(path: str, *only: str) -> None:
    """Casts every shape on a GPU, and holds it to the truth; `short`: x is."""
    connect()
    library = ctypes.CDLL(path)
    rng, launches = np.random.default_rng(1), 0
    for shape in SHAPES:
        for dtype in DTYPES:
            for form in FORMATS:
                x = (rng.standard_normal(shape) * 3).astype(DTYPES[dtype])
                memory = OnGpu()
                made = launch(library, x, 8.0, form, memory, short="short" in only)
                memory.arrays.free()
                if "short" not in only:
                    hold(made, x, 8.0, form)
                    launches += 1
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
