"""Tensor maps: how Hopper's and newer kernels copy boxes of an array in bulk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# As the driver counts them (CUtensorMapDataType and the enumerations beside it).
DTYPES = {
    "uint8": 0,
    "int8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
MAX_RANK = 5


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """How an array travels to a kernel as a `CUtensorMap`, by value.

    Attributes:
        box: elements of a copy in each dimension of the array, outermost first; each up
            to 256. The innermost have a multiple of 16 bytes, and with `swizzle` at
            most that many.
        swizzle: bytes of the pattern in shared memory: 0, 32, 64 or 128.
        l2_promotion: bytes that L2 fetches at least: 0, 64, 128 or 256.
        nan_outside: elements outside of the array are NaN, not 0.
    """

    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 128
    nan_outside: bool = False

    def numbers(self, where: str, shape: Sequence[int], dtype: Any) -> list[int]:
        """What the handler is told; mirrored in kernel_call_ffi.cc (kMapNumbers)."""
        self.check(where, shape, dtype)
        size = np.dtype(dtype).itemsize
        sizes = list(shape)[::-1]
        strides, step = [], size
        for n in sizes[:-1]:
            step *= n
            strides.append(step)
        pad = MAX_RANK - len(sizes)
        return [
            DTYPES[np.dtype(dtype).name],
            len(sizes),
            *sizes,
            *[0] * pad,
            *strides,
            *[0] * pad,
            *self.box[::-1],
            *[0] * pad,
            *[1] * MAX_RANK,
            0,
            SWIZZLES[self.swizzle],
            PROMOTIONS[self.l2_promotion],
            int(self.nan_outside),
        ]

    def check(self, where: str, shape: Sequence[int], dtype: Any) -> None:
        name, size = np.dtype(dtype).name, np.dtype(dtype).itemsize
        shown = f"{where}: {self} of {name}{list(shape)}"
        if name not in DTYPES:
            raise TypeError(f"{shown}: tensor maps are of {', '.join(DTYPES)}")
        if len(self.box) != len(shape) or not 1 <= len(shape) <= MAX_RANK:
            raise ValueError(
                f"{shown}: box has a size for each dimension of the array, one to five"
            )
        if self.swizzle not in SWIZZLES or self.l2_promotion not in PROMOTIONS:
            raise ValueError(
                f"{shown}: swizzle is one of {tuple(SWIZZLES)} and l2_promotion of "
                f"{tuple(PROMOTIONS)}"
            )
        if any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(f"{shown}: a box has 1 to 256 elements in each dimension")
        inner = self.box[-1] * size
        if inner % 16 or (self.swizzle and inner > self.swizzle):
            raise ValueError(
                f"{shown}: the box's innermost {inner} bytes must be a multiple of 16"
                + (f" and at most {self.swizzle}" if self.swizzle else "")
            )
        if len(shape) > 1 and shape[-1] * size % 16:
            raise ValueError(f"{shown}: the array's rows must be multiples of 16 bytes")
