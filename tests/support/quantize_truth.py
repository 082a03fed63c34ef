"""What quantization has to come out as: float64, and codes that may stand for it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK = 128  # rows that share a scale
E4M3 = ml_dtypes.float8_e4m3fn
INT8 = np.dtype(np.int8)
LARGEST = {np.dtype(E4M3): 448.0, INT8: 127.0}
SIGNS = 0x0370734413198A2E85A308D3243F6A88  # bit i: column i's is minus


def matrix(dim: int) -> np.ndarray:
    """M of kvblock/quantize.h, element by element."""
    power = dim & -dim
    rest = dim // power
    made = np.empty((dim, dim))
    for i in range(dim):
        sign = -1 if SIGNS >> i % 128 & 1 else 1
        for j in range(dim):
            angle = 2 * np.pi * (i // power) * (j // power) / rest
            outer = (np.cos(angle) + np.sin(angle)) / np.sqrt(rest)
            inner = (-1) ** ((i % power) & (j % power)).bit_count() / np.sqrt(power)
            made[i, j] = sign * outer * inner
    return made


def shares(x: np.ndarray, shared: str) -> np.ndarray:
    """The largest size of what shares a scale, `[B, heads, 1 or blocks]`."""
    sizes = np.abs(x).max(3, initial=0)  # of rows; a NaN stays one
    if shared == "block":
        starts = range(0, max(x.shape[1], 1), BLOCK)
        return np.stack([sizes[:, i : i + BLOCK].max(1, initial=0) for i in starts], 2)
    largest = sizes.max(1, initial=0)
    if shared == "tensor":
        largest = np.broadcast_to(largest.max(1, keepdims=True), largest.shape)
    return largest[:, :, None]


def of_rows(scales: np.ndarray, rows: int) -> np.ndarray:
    """`[B, rows, heads, 1]` of scales `[B, heads, blocks]`."""
    each = np.repeat(scales, BLOCK if scales.shape[2] > 1 else max(rows, 1), 2)
    return each[:, :, :rows].swapaxes(1, 2)[..., None]


def narrowed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The codes of numbers that have been divided; NaN is 0 among integers."""
    held = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    return (np.nan_to_num(np.rint(held)) if dtype == INT8 else held).astype(dtype)


def hold(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    mean: np.ndarray | None = None,
    *,
    shared: str,
    turned: bool = False,
    integers: bool = False,
    lens: np.ndarray | None = None,
) -> None:
    """Holds results to x; a code may be that of a number a float32 sum away."""
    rows, dim = x.shape[1], x.shape[3]
    dtype = INT8 if integers else np.dtype(E4M3)
    most = LARGEST[dtype]
    x = x.astype(np.float32)
    counts = np.full(len(x), rows) if lens is None else np.clip(lens, 0, rows)
    there = (np.arange(rows) < counts[:, None])[..., None, None]
    x = np.where(there, x, 0)
    assert codes.shape == x.shape and codes.dtype == dtype
    assert scales.dtype == np.float32
    if mean is None and not turned:
        return _hold_as_it_is(x, codes, scales, shared)
    y = x.astype(np.float64)
    if mean is not None:
        truth = y.sum(1) / np.maximum(counts, 1)[:, None, None]
        size = np.abs(y).sum(1) / np.maximum(counts, 1)[:, None, None]
        assert mean.dtype == np.float32 and mean.shape == truth.shape
        assert (np.abs(mean - truth) <= 2e-6 * size).all()
        y = np.where(there, y - truth[:, None], 0)
    y = y @ matrix(dim) if turned else y
    largest = shares(y, shared)
    want = np.where(largest == 0, 1, np.maximum(largest / most, 2.0**-126))
    assert scales.shape == want.shape
    # Where all rows are one but for rounding, so is what is left of them.
    noise = 1e-6 * np.sqrt(dim) * shares(x, shared) / most
    near = np.abs(scales - want) <= 1e-6 * want + noise
    assert (near | ((largest == 0) & (scales <= noise))).all()
    exact = y / of_rows(scales, rows)
    off = most * (2e-6 + of_rows(noise / scales, rows))
    low, high = (
        narrowed(exact + side, dtype).astype(np.float64) for side in (-off, off)
    )
    got = codes.astype(np.float64)
    assert ((low <= got) & (got <= high)).all(), np.argwhere((got < low) | (got > high))
    sure = np.broadcast_to(off < 0.01, got.shape)
    same = (got == narrowed(exact, dtype).astype(np.float64))[sure]
    assert same.size == 0 or same.mean() > 0.99


def _hold_as_it_is(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, shared: str
) -> None:
    """Every bit; NaN is NaN, whatever its sign."""
    with np.errstate(all="ignore"):
        want = shares(x, shared)
        inverse = np.float32(1 / LARGEST[codes.dtype])
        want = np.where(want == 0, 1, np.maximum(want * inverse, np.float32(2**-126)))
        np.testing.assert_array_equal(scales, want.astype(np.float32))
        each = of_rows(scales, x.shape[1])
        divided = x * (1 / each) if codes.dtype == INT8 else x / each
        made = narrowed(divided, codes.dtype)
    nan = np.isnan(made.astype(np.float32))
    assert (np.isnan(codes.astype(np.float32)) == nan).all()
    np.testing.assert_array_equal(codes.view(np.uint8)[~nan], made.view(np.uint8)[~nan])
