"""The launcher's own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from quantize_launches import CQuantize

from jax_kvblock.core.ffi import BUILD

PLACE = 4096  # nothing lies there: a check that looked at an array would crash
HEAD, TENSOR = 1, 2
BYTES = 4 * (2 * 2 * 3 * 64 * 2)  # sums of 3 blocks of 2 heads of 2 members, turned too


def valid(changes: dict[str, Any]) -> CQuantize:
    """Two members of 300 rows of 2 heads of 64, which are centred and turn."""
    call = CQuantize(dtype=0, num_arrays=1, batch=2)
    a = call.arrays[0]
    a.x = a.out = a.scales = a.mean = PLACE
    a.rows, a.heads, a.dim, a.turns = 300, 2, 64, 1
    a.batch_stride, a.row_stride, a.head_stride = 300 * 256, 256, 128
    a.out_batch_stride, a.out_row_stride, a.out_head_stride = 300 * 128, 128, 64
    call.workspace, call.workspace_bytes = PLACE, BYTES
    for name, value in changes.items():
        setattr(call if hasattr(call, name) else a, name, value)
    return call


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"lens": PLACE}, "ok"),
    ({"shared": HEAD, "workspace_bytes": BYTES + 4 * 2 * 2 * 3}, "ok"),
    ({"mean": None, "workspace": None, "workspace_bytes": 0}, "ok"),
    ({"batch": 0, "x": None, "out": None, "scales": None, "workspace": None}, "ok"),
    ({"rows": 0, "x": None, "out": None}, "ok"),
    ({"dtype": 2}, "dtype must be KVBLOCK_QUANTIZE_BF16 or F16, got 2"),
    ({"num_arrays": 0}, "num_arrays must be 1 to 4, got 0"),
    ({"num_arrays": 5}, "num_arrays must be 1 to 4, got 5"),
    ({"batch": -1}, "batch must be 0 to 2^31 - 1, got -1"),
    ({"rows": -1}, "array 0: rows must be 0 to 2^30, got -1"),
    ({"rows": (1 << 30) + 1}, "array 0: rows must be 0 to 2^30, got 1073741825"),
    ({"heads": 0}, "array 0: heads must be positive, got 0"),
    ({"dim": 0}, "array 0: dim must be a multiple of 16 up to 128, got 0"),
    ({"dim": 72}, "array 0: dim must be a multiple of 16 up to 128, got 72"),
    ({"dim": 144}, "array 0: dim must be a multiple of 16 up to 128, got 144"),
    ({"shared": 3}, "shared must be KVBLOCK_QUANTIZE_BLOCK, HEAD or TENSOR, got 3"),
    ({"shared": -1}, "shared must be KVBLOCK_QUANTIZE_BLOCK, HEAD or TENSOR, got -1"),
    ({"turns": 2}, "turns must be 0 or 1, got 2"),
    ({"batch": 1 << 30}, "there must be fewer than 2^31 blocks of 128 rows"),
    ({"shared": TENSOR, "heads": 1 << 26, "batch": 1}, "fewer than 2^26"),
    ({"row_stride": -16}, "row_stride must not be negative, got -16"),
    ({"row_stride": 1 << 32}, "row_stride must be below 2^32, got 4294967296"),
    ({"out_row_stride": 1 << 32}, "out_row_stride must be below 2^32"),
    ({"head_stride": 120}, "head_stride must be a multiple of 16, got 120"),
    ({"out_head_stride": 60}, "out_head_stride must be a multiple of 8, got 60"),
    ({"batch_stride": 1 << 62}, "batch_stride is too large to address"),
    ({"out_batch_stride": 1 << 62}, "out_batch_stride is too large to address"),
    ({"x": None}, "array 0: x is NULL"),
    ({"out": None}, "array 0: out is NULL"),
    ({"scales": None}, "array 0: scales is NULL"),
    ({"x": PLACE + 8}, "array 0: x must be aligned to 16 bytes"),
    ({"out": PLACE + 4}, "array 0: out must be aligned to 8 bytes"),
    ({"scales": PLACE + 2}, "scales, mean and lens must be aligned to 4 bytes"),
    ({"mean": PLACE + 2}, "scales, mean and lens must be aligned to 4 bytes"),
    ({"lens": PLACE + 2}, "scales, mean and lens must be aligned to 4 bytes"),
    ({"workspace": None}, "workspace is NULL"),
    ({"workspace": PLACE + 2}, "workspace must be aligned to 4 bytes"),
    (
        {"workspace_bytes": BYTES - 1},
        f"workspace_bytes must be at least {BYTES}, got {BYTES - 1}",
    ),
    ({"shared": HEAD}, f"workspace_bytes must be at least {BYTES + 48}, got {BYTES}"),
]


def check(call: CQuantize | None) -> str:
    library = load_library()
    said = library.kvblock_quantize_check(None if call is None else ctypes.byref(call))
    return "ok" if said is None else said.decode()


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_every_number_is_checked(changes: dict[str, Any], words: str) -> None:
    said = check(valid(changes))
    assert said == "ok" == words or (said.startswith("quantize: ") and words in said)


def test_no_struct() -> None:
    assert check(None) == "quantize: the struct is NULL"


def test_arrays_of_a_call_share_the_blocks_of_a_grid() -> None:
    call = valid({"batch": 1, "mean": None})
    for i in range(2):
        call.arrays[i] = call.arrays[0]
        call.arrays[i].rows, call.arrays[i].heads = 1 << 30, 200
    assert check(call) == "ok"
    call.num_arrays = 2
    assert "all arrays must have fewer than 2^31 blocks" in check(call)
    call.arrays[1].dim = 8
    assert "array 1: dim must be" in check(call)


def test_the_workspace_is_told() -> None:
    sized = load_library().kvblock_quantize_workspace
    assert sized(ctypes.byref(valid({}))) == BYTES
    assert sized(ctypes.byref(valid({"turns": 0}))) == BYTES // 2
    assert sized(ctypes.byref(valid({"mean": None}))) == 0
    assert sized(ctypes.byref(valid({"rows": 32 * 128, "mean": None}))) == 0
    of_parts = {"mean": None, "shared": HEAD, "heads": 1, "batch": 1}
    for rows, parts in ((32 * 128, 32), (32 * 128 + 1, 17), (1 << 20, 32)):
        assert sized(ctypes.byref(valid({**of_parts, "rows": rows}))) == 4 * parts
    assert sized(ctypes.byref(valid({"dim": 8}))) == -1
    assert sized(None) == -1


def test_the_launcher_checks_first() -> None:
    library = load_library()
    said = library.kvblock_quantize_cuda(ctypes.byref(valid({"dim": 8})), None).decode()
    assert said == "quantize: array 0: dim must be a multiple of 16 up to 128, got 8"
    if not BUILD["cuda"]:
        said = library.kvblock_quantize_cuda(ctypes.byref(valid({})), None).decode()
        assert "no CUDA kernels; rebuild it where nvcc is on the PATH" in said
