"""The bounds check of a copy, to the byte: what just fits passes, one more does not."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import CCopy, load_library

UNITS, UNIT = 6, 4
LIBRARY = load_library()


def copy(**of_source: Any) -> CCopy:
    """6 units in a row, from one buffer to another of just that size."""
    c = CCopy()
    c.rank, c.unit, c.dims[0] = 1, UNIT, UNITS
    c.buffers = [ctypes.create_string_buffer(64) for _ in "ab"]  # kept alive
    for side, buffer in zip((c.src, c.dst), c.buffers, strict=True):
        side.buffers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        side.num_buffers, side.buffer_bytes = 1, UNITS * UNIT
        side.strides[0], side.id_inner = UNIT, 1
    for name, value in of_source.items():
        setattr(c.src, name, value)
    return c


def check(c: CCopy) -> str:
    said = LIBRARY.kvblock_copy_check(ctypes.byref(c))
    return said.decode() if said else ""


def ids() -> Any:
    return (ctypes.c_int32 * UNITS)()


# Of the source: what just fits, and what is one more.
EDGES = {
    "the buffer": ({"buffer_bytes": 24}, {"buffer_bytes": 23}),
    "an offset": (
        {"buffer_bytes": 28, "offset": 4},
        {"buffer_bytes": 28, "offset": 8},
    ),
    "a start": (
        {"buffer_bytes": 40, "start_limit": 5, "start_stride": 4},
        {"buffer_bytes": 40, "start_limit": 6, "start_stride": 4},
    ),
    "ids": (
        {"buffer_bytes": 40, "id_limit": 10, "id_outer_stride": 4},
        {"buffer_bytes": 40, "id_limit": 11, "id_outer_stride": 4},
    ),
}


@pytest.mark.parametrize("fits, beyond", EDGES.values(), ids=EDGES)
def test_the_last_byte_counts(fits: dict[str, int], beyond: dict[str, int]) -> None:
    for given in fits, beyond:
        c = copy(**given)
        if "start_limit" in given:
            c.src.start = ctypes.pointer(ctypes.c_int32(0))
        if "id_limit" in given:
            c.src.ids, c.src.strides[0] = ids(), 0
        said = check(c)
        assert said == "" if given is fits else "reach past the end" in said, given


def test_a_copy_has_no_more_than_its_destination_holds() -> None:
    c = copy(buffer_bytes=64)
    c.dims[0] = UNITS + 1
    c.dst.strides[0] = 0
    assert "more elements than its buffers hold" in check(c)
