"""libkvblock.so through ctypes, and guarded buffers to call it with."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from attention_launches import Attention
from fuzz_copies import Side, contents

import jax_kvblock


class CSide(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("num_buffers", ctypes.c_int64),
        ("buffer_bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 8),
        ("table_strides", ctypes.c_int64 * 8),
        ("ids", ctypes.POINTER(ctypes.c_int32)),
        ("id_limit", ctypes.c_int64),
        ("id_inner", ctypes.c_int64),
        ("id_outer_stride", ctypes.c_int64),
        ("id_inner_stride", ctypes.c_int64),
        ("start", ctypes.POINTER(ctypes.c_int32)),
        ("start_limit", ctypes.c_int64),
        ("start_stride", ctypes.c_int64),
        ("start_table_stride", ctypes.c_int64),
    ]


class CCopy(ctypes.Structure):
    _fields_ = [
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_int64 * 8),
        ("unit", ctypes.c_int64),
        ("src", CSide),
        ("dst", CSide),
    ]


# The passes of attention, the last three as kvblock_backward_pass numbers them, and the
# launcher of each. attention_launches.py has the structs.
FORWARD, BACKWARD_KV, BACKWARD_Q, BACKWARD_BIAS = range(4)
LAUNCHERS = ("forward", "backward_kv", "backward_q", "backward_bias")

GUARD = 64  # bytes before and after each buffer
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SCHEDULE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def load_library() -> ctypes.CDLL:
    folder = Path(jax_kvblock.__file__).parent / "lib"
    library = ctypes.CDLL(str(folder / "libkvblock.so"))
    library.kvblock_copy_check.restype = ctypes.c_char_p
    library.kvblock_copy_check.argtypes = [ctypes.c_void_p]
    library.kvblock_copy_cpu.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p, ctypes.c_int64, SCHEDULE, ctypes.c_void_p]
    library.kvblock_copy_cpu.argtypes = pointers
    library.kvblock_attention_check_forward.restype = ctypes.c_char_p
    library.kvblock_attention_check_forward.argtypes = [ctypes.c_void_p]
    library.kvblock_attention_check_backward.restype = ctypes.c_char_p
    backward = [ctypes.c_void_p, ctypes.c_int]
    library.kvblock_attention_check_backward.argtypes = backward
    library.kvblock_append_check.restype = ctypes.c_char_p
    library.kvblock_append_check.argtypes = [ctypes.c_void_p]
    library.kvblock_append_cuda.restype = ctypes.c_char_p
    library.kvblock_append_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.kvblock_quantize_workspace.restype = ctypes.c_int64
    library.kvblock_quantize_workspace.argtypes = [ctypes.c_void_p]
    library.kvblock_quantize_check.restype = ctypes.c_char_p
    library.kvblock_quantize_check.argtypes = [ctypes.c_void_p]
    library.kvblock_quantize_cuda.restype = ctypes.c_char_p
    library.kvblock_quantize_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for launcher in LAUNCHERS:
        launch = getattr(library, f"kvblock_attention_{launcher}")
        launch.restype = ctypes.c_char_p
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def check_attention(
    library: ctypes.CDLL, a: Attention | None, which: int
) -> bytes | None:
    """What kvblock_attention_check_* says of a struct before a pass."""
    if which == FORWARD:
        struct = None if a is None else ctypes.byref(a.of("forward"))
        return library.kvblock_attention_check_forward(struct)
    struct = None if a is None else ctypes.byref(a.of("backward"))
    return library.kvblock_attention_check_backward(struct, which)


class Memory:
    """Buffers for one side, each between two guards."""

    def __init__(self, side: Side, seed: int, skew: int) -> None:
        self.first = GUARD + skew
        self.before = contents(tuple(n + 2 * GUARD + skew for n in side.sizes), seed)
        self.arrays = [np.frombuffer(b, np.uint8).copy() for b in self.before]
        places = [a.ctypes.data + self.first for a in self.arrays]
        self.buffers = (ctypes.c_void_p * len(places))(*places)
        self.ids = (ctypes.c_int32 * len(side.ids))(*side.ids) if side.ids else None
        self.start = None if side.start is None else ctypes.c_int32(side.start)
        self.sizes = side.sizes

    def inner(self) -> list[bytes]:
        sizes = zip(self.before, self.sizes, strict=True)
        return [b[self.first : self.first + n] for b, n in sizes]

    def describe(self, side: Side, rank: int) -> CSide:
        numbers, c = side.numbers, CSide()
        c.buffers, c.num_buffers = self.buffers, len(side.sizes)
        c.buffer_bytes, c.offset = min(side.sizes), numbers[0]
        c.id_limit, c.id_inner, c.id_outer_stride, c.id_inner_stride = numbers[1:5]
        c.start_limit, c.start_stride, c.start_table_stride = numbers[5:8]
        c.strides[:rank] = numbers[8 : 8 + rank]
        c.table_strides[:rank] = numbers[8 + rank : 8 + 2 * rank]
        c.ids = self.ids
        c.start = None if self.start is None else ctypes.pointer(self.start)
        return c
