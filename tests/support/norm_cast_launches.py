"""Norms in 8 bits by the C interface, and what has to come out of them."""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import numpy as np
from append_launches import OnGpu
from attention_launches import connect, fields
from cast_launches import DTYPES, FORMATS
from training_truth import narrowed

ROWS, PART, PARTS = 32, 512, 16  # KVBLOCK_NORM_CAST_ROWS, _COLUMNS, _PARTS
SHAPES = ((16, 16), (48, 48), (1040, 48), (16, 512), (48, 1040), (32, 4096), (16, 8192))
WIDEST = (16, 16384)  # of 16 bits
EPS = 1e-5
# Of float32's sums of squares, all positive: up to 36 numbers in a row are added, half
# a unit each, and the root halves that; five more roundings. Relative.
BAR = 2.0**-19


class CNormCast(ctypes.Structure):
    """kvblock_norm_cast."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype gamma_dtype format"),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int64, "rows columns"),
        *fields(ctypes.c_void_p, "x residual gamma scale"),
        *fields(ctypes.c_void_p, "sum out transposed largest inverse_rms"),
    ]


def part_of(columns: int) -> int:
    return next(p for i in range(64) if (p := PART << i) * PARTS >= columns)


def draw(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: str,
    residual: bool = True,
    gamma_dtype: str = "float32",
) -> list[Any]:
    """x, a residual or None, and gamma."""
    x, other = (
        (rng.standard_normal(shape) * 3).astype(DTYPES[dtype]) for _ in range(2)
    )
    gamma = 1 + rng.standard_normal(shape[1]) / 4
    return [x, other if residual else None, gamma.astype(DTYPES[gamma_dtype])]


def launch(
    library: ctypes.CDLL,
    drawn: list[Any],
    scale: float,
    form: str,
    memory: Any,
    outputs: str = "out transposed inverse_rms",
    short: bool = False,
    eps: float = EPS,
) -> dict[str, np.ndarray]:
    """The results by name; what is not in `outputs` is left out.

    short: x lacks its last row, as a mistake would have it.
    """
    x, residual, gamma = drawn
    rows, columns = x.shape
    call = CNormCast(rows=rows, columns=columns, eps=eps)
    call.format = list(FORMATS).index(form)
    dtypes = [np.dtype(t) for t in DTYPES.values()]
    call.dtype, call.gamma_dtype = dtypes.index(x.dtype), dtypes.index(gamma.dtype)
    call.x = memory.place(x[:-1] if short else x)
    call.gamma = memory.place(gamma)
    call.scale = memory.place(np.float32([scale]))
    tiles = -(-rows // ROWS), -(-columns // part_of(columns))
    made = {
        "out": np.full((rows, columns), 0x55, np.uint8).view(FORMATS[form]),
        "transposed": np.full((columns, rows), 0x55, np.uint8).view(FORMATS[form]),
        "inverse_rms": np.full(rows, -1, np.float32),
    }
    made = {name: made[name] for name in outputs.split()}
    made["largest"] = np.full(tiles, -1, np.float32)
    if residual is not None:
        call.residual = memory.place(residual)
        made["sum"] = np.full_like(x, -777)
    places = {name: memory.place(array) for name, array in made.items()}
    for name, place in places.items():
        setattr(call, name, place)
    library.kvblock_norm_cast_cuda.restype = ctypes.c_char_p
    error = library.kvblock_norm_cast_cuda(ctypes.byref(call), None)
    assert error is None, error.decode()
    memory.finish()
    return {name: memory.contents(place) for name, place in places.items()}


def truth(drawn: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sum as it is rounded; 1 / rms of each row, and what is normed, in float64."""
    x, residual, gamma = drawn
    with np.errstate(invalid="ignore"):
        if residual is not None:
            wide = x.astype(np.float32) + residual.astype(np.float32)
            x = wide.astype(x.dtype)
        wide = x.astype(np.float64)
        inverse = 1 / np.sqrt(np.mean(wide**2, axis=1) + np.float32(EPS))
        return x, inverse, wide * inverse[:, None] * gamma.astype(np.float64)


def hold(
    made: dict[str, np.ndarray], drawn: list[Any], scale: float, form: str
) -> None:
    """Every number is what it has to be.

    The sum is, bit for bit. So is every code of which float64 is no nearer to the
    middle of two codes than `BAR`; any other is one of the two.
    """
    total, inverse, normed = truth(drawn)
    near = dict(rtol=BAR, atol=0)
    lower, upper = (narrowed(normed * (1 + b), scale, form) for b in (-BAR, BAR))
    lower, upper = np.minimum(lower, upper), np.maximum(lower, upper)
    missing = np.isnan(normed)
    for name, got in made.items():
        if name == "sum":
            wide, want = (t.astype(np.float32) for t in (got, total))
            np.testing.assert_array_equal(wide, want)
        elif name == "inverse_rms":
            np.testing.assert_allclose(got, inverse, **near)
        elif name == "largest":
            part = part_of(normed.shape[1])
            for i, j in np.ndindex(got.shape):
                tile = normed[i * ROWS : (i + 1) * ROWS, j * part : (j + 1) * part]
                np.testing.assert_allclose(got[i, j], np.abs(tile).max(), **near)
        else:
            wide = (got if name == "out" else got.T).astype(np.float64)
            np.testing.assert_array_equal(np.isnan(wide), missing)
            right = missing | (lower <= wide) & (wide <= upper)
            assert right.all(), f"{name}: {np.argwhere(~right)[:5].tolist()} are wrong"


def cases() -> Any:
    """Shape, dtype, format, whether there is a residual, the dtype of gamma."""
    for shape in (*SHAPES, WIDEST):
        for dtype, form in itertools.product(DTYPES, FORMATS):
            if shape == WIDEST and dtype == "float32":
                continue
            for residual in (False, True):
                yield shape, dtype, form, residual, dtype if residual else "float32"


def main(path: str, *only: str) -> None:
    """Norms every case on a GPU, and holds it to the truth; `short`: x is."""
    connect()
    library = ctypes.CDLL(path)
    rng, launches = np.random.default_rng(1), 0
    for shape, dtype, form, residual, gamma_dtype in cases():
        drawn = draw(rng, shape, dtype, residual, gamma_dtype)
        memory = OnGpu()
        made = launch(library, drawn, 8.0, form, memory, short="short" in only)
        memory.arrays.free()
        if "short" not in only:
            hold(made, drawn, 8.0, form)
            launches += 1
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
