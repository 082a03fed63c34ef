"""Calls of `kvblock/quantize.h`, through ctypes, held to the truth.

    python quantize_launches.py LIBRARY [short]

launches every case on a GPU, for compute-sanitizer to watch; `short` has rows that end
too early. Elsewhere the library is the emulator's, and NaN lies between arrays.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from typing import Any

import ml_dtypes
import numpy as np
from attention_launches import Arrays, connect, driver, fields
from quantize_truth import BLOCK, E4M3, hold

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHARED = ("block", "head", "tensor")
MOST_ARRAYS = 4


class CArray(ctypes.Structure):
    """kvblock_quantize_array."""

    _fields_ = [
        *fields(ctypes.c_void_p, "x out scales mean lens"),
        *fields(ctypes.c_int64, "rows"),
        *fields(ctypes.c_int32, "heads dim"),
        *fields(ctypes.c_int64, "batch_stride row_stride head_stride"),
        *fields(ctypes.c_int64, "out_batch_stride out_row_stride out_head_stride"),
        *fields(ctypes.c_int32, "shared turns integers"),
    ]


class CQuantize(ctypes.Structure):
    """kvblock_quantize."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype num_arrays"),
        *fields(ctypes.c_int64, "batch"),
        ("arrays", CArray * MOST_ARRAYS),
        *fields(ctypes.c_void_p, "workspace"),
        *fields(ctypes.c_int64, "workspace_bytes"),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """An array of a call.

    padded: rows of x and of the codes lie apart. heads_first: `[B, heads, rows, dim]`.
    size: of the numbers; around: what they lie around. integers: codes are int8.
    """

    rows: int
    heads: int
    dim: int
    shared: str = "block"
    centred: bool = False
    turned: bool = False
    lens: tuple[int, ...] | None = None
    padded: bool = False
    heads_first: bool = False
    size: float = 1.0
    around: float = 0.0
    integers: bool = False


DEFAULT = [
    Case(300, 4, 128, turned=True),
    Case(260, 2, 128, centred=True, turned=True, around=3.0),
    Case(260, 2, 128, "head"),
]
DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
CASES: dict[str, list[Case]] = {
    "default": DEFAULT,
    **{
        f"{dim}, {shared}": [
            Case(150, 2, dim, shared, centred, turned, around=2.0 * centred)
            for centred in (False, True)
            for turned in (False, True)
        ]
        for dim in DIMS
        for shared in SHARED
    },
    "lengths": [
        dataclasses.replace(c, lens=lens)
        for c, lens in zip(
            DEFAULT, ((300, 130, 0), (259, 17, 128), (1, 260, 999)), strict=True
        )
    ],
    "lengths below 0": [Case(40, 2, 32, "head", True, lens=(-3, 40))],
    "several dims": [
        Case(200, 3, 96, "head", turned=True),
        Case(140, 1, 96, "tensor", True, True),
        Case(140, 1, 80, "head"),
        Case(10, 2, 16, "head", turned=True),
    ],
    "as it is, beside a largest of turned rows": [
        Case(200, 2, 64, "head", turned=True),
        Case(200, 2, 64, "tensor"),
    ],
    "one row": [Case(1, 1, 128, centred=True, turned=True), Case(1, 3, 64, "tensor")],
    "no rows": [Case(0, 2, 128, centred=True), Case(0, 2, 64, "tensor", turned=True)],
    "many parts": [
        Case(32 * BLOCK + 300, 1, 16, "head", True, True, around=1.0),
        Case(65 * BLOCK, 1, 16, "tensor"),
        Case(33 * BLOCK + 5, 2, 32, "tensor", turned=True),
    ],
    "padded": [dataclasses.replace(c, padded=True) for c in DEFAULT],
    "heads first": [
        dataclasses.replace(c, heads_first=True, padded=True) for c in DEFAULT
    ],
    "large": [Case(130, 1, 64, turned=True, size=4e3)],
    "small": [Case(130, 1, 64, size=3e-5), Case(130, 1, 64, turned=True, size=3e-5)],
    "integers": [dataclasses.replace(c, integers=i < 2) for i, c in enumerate(DEFAULT)],
    **{
        f"integers, {shared}": [
            Case(150, 2, 96, shared, centred, turned, (130, 150), integers=True)
            for centred in (False, True)
            for turned in (False, True)
        ]
        for shared in SHARED
    },
    "far from zero": [Case(200, 2, 128, "head", True, True, around=500.0)],
}


class Drawn:
    """Arrays of random numbers; what lies beyond their lengths is NaN."""

    def __init__(self, cases: list[Case], dtype: str, rng: np.random.Generator) -> None:
        self.cases, self.dtype = cases, dtype
        self.batch = next((len(c.lens) for c in cases if c.lens), 2)
        self.arrays = []
        for c in cases:
            shape = self.batch, c.rows, c.heads, c.dim
            x = rng.normal(c.around, c.size, shape) * rng.uniform(
                0.5, 2, (self.batch, c.rows, c.heads, 1)
            )
            if c.lens:
                beyond = np.arange(c.rows) >= np.array(c.lens)[:, None]
                x[beyond] = np.nan
            self.arrays.append(x.astype(DTYPES[dtype]))

    def hold(self, results: list[Any]) -> None:
        for c, x, (codes, scales, mean) in zip(
            self.cases, self.arrays, results, strict=True
        ):
            lens = None if c.lens is None else np.array(c.lens)
            how = {"shared": c.shared, "turned": c.turned, "integers": c.integers}
            hold(x, codes, scales, mean, lens=lens, **how)


def laid(x: np.ndarray, c: Case) -> tuple[np.ndarray, list[int], Any]:
    """x as it lies in memory, its strides of batch, rows, heads; the way back."""
    pad = 16 // x.itemsize if c.padded else 0
    wide = np.full((*x.shape[:3], x.shape[3] + pad), -1, np.int8).astype(x.dtype)
    wide[..., : x.shape[3]] = x
    order = (0, 2, 1, 3) if c.heads_first else (0, 1, 2, 3)
    whole = np.ascontiguousarray(wide.transpose(order))
    strides = [whole.transpose(order).strides[i] for i in range(3)]

    def back(bits: np.ndarray) -> np.ndarray:
        made = bits.view(x.dtype).reshape(whole.shape).transpose(order)
        return np.ascontiguousarray(made[..., : x.shape[3]])

    return whole, strides, back


def launch(library: ctypes.CDLL, drawn: Drawn, memory: Any) -> list[Any]:
    """Of each array its codes, scales and mean (or None)."""
    call = CQuantize(dtype=list(DTYPES).index(drawn.dtype), batch=drawn.batch)
    call.num_arrays = len(drawn.cases)
    outs = []
    for i, (c, x) in enumerate(zip(drawn.cases, drawn.arrays, strict=True)):
        a = call.arrays[i]
        a.rows, a.heads, a.dim = x.shape[1:]
        a.shared, a.turns = SHARED.index(c.shared), c.turned
        a.integers = c.integers
        whole, strides, _ = laid(x, c)
        a.x = memory.place(whole)
        a.batch_stride, a.row_stride, a.head_stride = strides
        of = np.int8 if c.integers else E4M3
        codes, strides, back = laid(np.full(x.shape, 0x55, np.uint8).view(of), c)
        a.out_batch_stride, a.out_row_stride, a.out_head_stride = strides
        blocks = max(-(-a.rows // BLOCK), 1) if c.shared == "block" else 1
        a.out = memory.place(codes)
        scales = np.full((drawn.batch, a.heads, blocks), np.nan, np.float32)
        a.scales = memory.place(scales)
        if c.centred:
            a.mean = memory.place(
                np.full((drawn.batch, a.heads, a.dim), np.nan, np.float32)
            )
        if c.lens:
            a.lens = memory.place(np.array(c.lens, np.int32))
        outs.append((a.out, a.scales, a.mean, codes, back))
    library.kvblock_quantize_workspace.restype = ctypes.c_int64
    size = library.kvblock_quantize_workspace(ctypes.byref(call))
    assert size >= 0
    call.workspace, call.workspace_bytes = 0, size
    if size:
        call.workspace = memory.place(np.full(size // 4, np.nan, np.float32))
    library.kvblock_quantize_cuda.restype = ctypes.c_char_p
    error = library.kvblock_quantize_cuda(ctypes.byref(call), None)
    assert error is None, error.decode()
    memory.finish()
    results = []
    for out, scales_at, mean_at, before, back in outs:
        bits = memory.contents(out)
        between = before.astype(np.float32) == -1
        assert (bits.astype(np.float32)[between] == -1).all(), "written between rows"
        mean = memory.contents(mean_at) if mean_at else None
        results.append((back(bits), memory.contents(scales_at), mean))
    return results


class OnGpu:
    """Copies of arrays in allocations of exactly their size, for memcheck.

    shortened: arrays of this dtype lack the end of each batch member.
    """

    def __init__(self) -> None:
        self.arrays = Arrays()
        self.held: dict[int, np.ndarray] = {}
        self.empty = 0
        self.shortened: Any = None

    def place(self, x: np.ndarray) -> int:
        if self.shortened is not None and x.dtype == self.shortened:
            x = x[:, :-1]
        x = np.ascontiguousarray(x)
        if not x.size:  # nothing lies there, and nobody looks
            self.empty += 16
            self.held[self.empty] = x
            return self.empty
        address = self.arrays.of(x)
        self.held[address] = x
        return address

    def contents(self, address: int) -> np.ndarray:
        x = np.empty_like(self.held[address])
        if x.size:
            size, place = ctypes.c_size_t(x.nbytes), ctypes.c_void_p(x.ctypes.data)
            driver("cuMemcpyDtoH_v2", place, ctypes.c_uint64(address), size)
        return x

    def finish(self) -> None:
        driver("cuCtxSynchronize")


def main(path: str, *only: str) -> None:
    """Launches every case on a GPU, and holds it to the truth; `short`: x is."""
    connect()
    library = ctypes.CDLL(path)
    rng, launches = np.random.default_rng(1), 0
    for cases in CASES.values():
        for dtype in DTYPES:
            drawn, memory = Drawn(cases, dtype, rng), OnGpu()
            if "short" in only:
                memory.shortened = DTYPES[dtype]
            made = launch(library, drawn, memory)
            memory.arrays.free()
            if "short" not in only:
                drawn.hold(made)
                launches += 1
    print(launches, "calls")


if __name__ == "__main__":
    main(*sys.argv[1:])
