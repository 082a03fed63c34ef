"""Launches the attention kernels on small arrays, for compute-sanitizer to watch.

    python attention_launches.py LIBRARY KERNELS [DIMS] [OPTION]

It calls the C interface, on allocations of the driver's of exactly an array's size, so
that memcheck knows where each one ends. Nobody looks at the results. KERNELS are
"generic", "sm90", "float32" (generic), "e4m3" or "int8" (sm90; of queries and keys), or
"short": generic, and q ends a row too early. Prints how many launches there were.
test_attention_sanitizer.py runs it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

BF16, F16, F32, E4M3 = range(4)
I8 = 5  # of q and k; v is e4m3
SIZES = {BF16: 2, F16: 2, F32: 4, E4M3: 1, I8: 1}
HIGHEST, DEFAULT = range(2)  # of float32
GENERIC, SM90 = range(2)
# Of keys and of values: all that the kernels are compiled for.
DIMS = ("64x64", "96x96", "128x128", "192x128", "192x192", "256x256")
RNG = np.random.default_rng(1)


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Call(ctypes.Structure):
    """kvblock_attention: what both passes have."""

    _fields_ = [
        *fields(ctypes.c_int32, "kernels dtype batch num_heads num_kv_heads precision"),
        *fields(ctypes.c_int64, "q_len kv_len"),
        *fields(ctypes.c_int32, "head_dim value_dim"),
        *fields(ctypes.c_float, "scale softcap"),
        *fields(ctypes.c_int32, "window_left window_right"),
        *fields(ctypes.c_void_p, "q k v cu_q cu_kv q_lens kv_lens shift"),
        *fields(ctypes.c_void_p, "q_segments kv_segments"),
        *fields(ctypes.c_void_p, "q_segment_ranges kv_segment_ranges bias"),
        *fields(ctypes.c_int32, "bias_dtype bias_batch bias_heads"),
        *fields(ctypes.c_void_p, "sinks"),
        *fields(ctypes.c_int32, "sink_batch"),
        *fields(ctypes.c_void_p, "tile_indices tile_counts"),
        *fields(ctypes.c_void_p, "tile_indices_t tile_counts_t"),
        *fields(ctypes.c_int32, "tile_batch tile_heads tile_q tile_kv"),
        *fields(ctypes.c_int32, "max_tiles max_tiles_t"),
        *fields(ctypes.c_void_p, "tile_map tile_masks"),
        *fields(ctypes.c_int32, "num_tile_masks dropout"),
        *fields(ctypes.c_void_p, "dropout_keys"),
    ]


class BlockScales(ctypes.Structure):
    """kvblock_block_scales."""

    _fields_ = [
        ("scales", ctypes.c_void_p),
        *fields(ctypes.c_int32, "batch blocks"),
    ]


SCALES = [(name, BlockScales) for name in ("q_scales", "k_scales", "v_scales")]


class Forward(ctypes.Structure):
    """kvblock_forward."""

    _fields_ = [
        ("call", Call),
        *fields(ctypes.c_void_p, "o lse base workspace"),
        ("joins", ctypes.c_int32),
        *SCALES,
    ]


class Backward(ctypes.Structure):
    """kvblock_backward."""

    _fields_ = [
        ("call", Call),
        *fields(ctypes.c_void_p, "lse base d_o delta"),
        *fields(ctypes.c_void_p, "dq_accum dq dk dv dbias workspace"),
        *fields(ctypes.c_int32, "deterministic joins"),
    ]


class Attention(ctypes.Structure):
    """Everything that a call of either pass may have; `of` makes the pass's struct."""

    _fields_ = [
        *Call._fields_,
        ("o", ctypes.c_void_p),
        *Backward._fields_[1:],
        *SCALES,
    ]

    def of(self, launcher: str) -> Forward | Backward:
        """The struct that kvblock_attention_{launcher} takes."""
        made = Forward() if launcher == "forward" else Backward()
        for name, _ in Call._fields_:
            setattr(made.call, name, getattr(self, name))
        for name, _ in made._fields_[1:]:
            setattr(made, name, getattr(self, name))
        return made


def workspace_bytes(library: ctypes.CDLL, a: Attention, launcher: str) -> int:
    """What kvblock_attention_{launcher} works in."""
    if launcher not in ("forward", "backward_kv"):
        return 0
    sized = library.kvblock_attention_workspace
    sized.restype = ctypes.c_int64
    call = a.of("forward").call
    return sized(ctypes.byref(call), ctypes.c_int32(launcher != "forward"))


@functools.cache
def load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver(function: str, *arguments: Any) -> None:
    status = load_driver()[function](*arguments)
    assert status == 0, f"{function} returned {status}"


def connect() -> ctypes.c_int:
    """Makes the first GPU that of this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver("cuInit", 0)
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)
    return device


class Arrays:
    """Allocations on the GPU, freed together."""

    def __init__(self) -> None:
        self.pointers: list[ctypes.c_uint64] = []

    def empty(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self.pointers.append(pointer)
        return pointer.value

    def of(self, values: np.ndarray) -> int:
        values = np.ascontiguousarray(values)
        pointer, size = self.empty(values.nbytes), ctypes.c_size_t(values.nbytes)
        source = ctypes.c_void_p(values.ctypes.data)
        driver("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), source, size)
        return pointer

    def ints(self, *values: int) -> int:
        return self.of(np.array(values, np.int32))

    def normal(self, dtype: int, *shape: int) -> int:
        if SIZES[dtype] == 1:  # up to 128 in size
            return self.of(RNG.integers(0, 0x70, shape, np.uint8))
        x = RNG.standard_normal(shape, np.float32)
        if dtype == BF16:
            return self.of((x.view(np.uint32) >> 16).astype(np.uint16))
        return self.of(x.astype(np.float16 if dtype == F16 else np.float32))

    def free(self) -> None:
        driver("cuCtxSynchronize")
        for pointer in self.pointers:
            driver("cuMemFree_v2", pointer)


def plain(a: Attention, arrays: Arrays) -> None:
    a.kv_len = 360


def causal(a: Attention, arrays: Arrays) -> None:
    a.window_right = 0


def lengths(a: Attention, arrays: Arrays) -> None:
    a.batch, a.window_left, a.window_right = 2, 70, 30
    a.q_lens, a.kv_lens = arrays.ints(a.q_len, 90), arrays.ints(a.kv_len - 3, 70)
    a.shift = arrays.ints(-20, 40)


def packed(a: Attention, arrays: Arrays) -> None:
    a.batch, a.window_right = 3, 0
    a.cu_q, a.cu_kv = arrays.ints(2, 70, 70, 130), arrays.ints(3, 60, 65, 130)


def segments(a: Attention, arrays: Arrays) -> None:
    for side, length in ("q", a.q_len), ("kv", a.kv_len):
        ids = np.sort(RNG.integers(0, 3, (a.batch, length), np.int32), axis=1)
        chunks = [ids[:, i : i + 64] for i in range(0, length, 64)]
        ranges = np.array([[c.min(axis=1), c.max(axis=1)] for c in chunks], np.int32)
        setattr(a, f"{side}_segments", arrays.of(ids))
        setattr(a, f"{side}_segment_ranges", arrays.of(ranges.transpose(2, 0, 1)))


def softcap(a: Attention, arrays: Arrays) -> None:
    a.softcap = 20.0


def bias(a: Attention, arrays: Arrays) -> None:
    a.bias_dtype, a.bias_batch, a.bias_heads = a.dtype, 1, a.num_heads
    a.bias = arrays.normal(a.dtype, a.num_heads, a.q_len, a.kv_len)
    a.dbias = arrays.empty(a.num_heads * a.q_len * a.kv_len * SIZES[a.dtype])


def everything(a: Attention, arrays: Arrays) -> None:
    a.q_len = a.kv_len = 131
    lengths(a, arrays)
    segments(a, arrays)
    a.softcap, a.scale = 30.0, -a.scale
    a.bias_dtype, a.bias_batch, a.bias_heads = F32, 1, 1
    a.bias = arrays.normal(F32, a.q_len, a.kv_len)
    a.dbias = arrays.empty(a.q_len * a.kv_len * 4)
    a.sinks, a.sink_batch = arrays.normal(F32, 1, a.num_heads), 1


def tiles(a: Attention, arrays: Arrays) -> None:
    a.tile_batch, a.tile_heads, a.tile_q, a.tile_kv = 1, 1, 128, 128
    a.max_tiles = a.max_tiles_t = 3
    lists, lists_t = [[1, -1, 0], [1, 9, 9]], [[0, 9, 9], [0, 1, 9]]  # 9: there is none
    a.tile_indices = arrays.of(np.array(lists, np.int32))
    a.tile_indices_t = arrays.of(np.array(lists_t, np.int32))
    a.tile_counts, a.tile_counts_t = arrays.ints(3, 1), arrays.ints(1, 2)


def partial(a: Attention, arrays: Arrays) -> None:
    tiles(a, arrays)
    flag = 1 << 30  # KVBLOCK_ATTENTION_PARTIAL, of tiles 0, 0 and 1, 1
    lists, lists_t = [[1, -1, flag], [1 + flag, 9, 9]], [[flag, 9, 9], [0, 1 + flag, 9]]
    a.tile_indices = arrays.of(np.array(lists, np.int32))
    a.tile_indices_t = arrays.of(np.array(lists_t, np.int32))
    a.tile_map, a.num_tile_masks = arrays.ints(1, -1, -1, 0), 2
    a.tile_masks = arrays.of(RNG.integers(0, 2**32, (2, 128, 4), np.uint32))


# Dropout, with a key for each sequence and head.
def drop(a: Attention, arrays: Arrays, parts: int) -> None:
    a.dropout = parts
    keys = RNG.integers(0, 2**32, (a.batch, a.num_heads, 2), np.uint32)
    a.dropout_keys = arrays.of(keys)


def dropped(a: Attention, arrays: Arrays) -> None:
    plain(a, arrays)
    drop(a, arrays, 13)


def dropped_causal(a: Attention, arrays: Arrays) -> None:
    causal(a, arrays)
    drop(a, arrays, 64)


def dropped_lengths(a: Attention, arrays: Arrays) -> None:
    lengths(a, arrays)
    drop(a, arrays, 100)


def dropped_packed(a: Attention, arrays: Arrays) -> None:
    """Rows of no sequence have no key."""
    packed(a, arrays)
    drop(a, arrays, 1)


def dropped_everything(a: Attention, arrays: Arrays) -> None:  # but for Hopper's
    everything(a, arrays)
    drop(a, arrays, 127)


# Few queries, whose keys are shared out.
def few(a: Attention, arrays: Arrays) -> None:
    a.q_len, a.kv_len, a.batch = 3, 1700, 2


def few_wide(a: Attention, arrays: Arrays) -> None:
    """About as many as an H200 has multiprocessors: a CTA each, several tiles."""
    a.q_len, a.kv_len, a.batch, a.num_heads, a.num_kv_heads = 1, 700, 128, 4, 1


def few_lengths(a: Attention, arrays: Arrays) -> None:
    a.q_len, a.kv_len, a.batch, a.num_heads, a.window_right = 16, 700, 70, 6, 0
    a.kv_lens = arrays.of(np.arange(a.batch, dtype=np.int32) * 10)
    a.shift = arrays.of(np.arange(a.batch, dtype=np.int32) * 10 - 16)


# What only the Hopper kernels have: rings of up to eight steps, which come round, ...
def long_q(a: Attention, arrays: Arrays) -> None:
    a.q_len, a.num_heads = 1160, 1


def long_kv(a: Attention, arrays: Arrays) -> None:
    a.q_len, a.kv_len, a.num_heads = 60, 1700, 1


# ... and CTAs that compute several tiles of queries, in rounds or counted, where there
# are more tiles than multiprocessors.
def rounds(a: Attention, arrays: Arrays) -> None:
    a.batch, a.num_heads, a.q_len, a.kv_len, a.window_right = 50, 8, 40, 300, 0
    a.shift = arrays.of(np.full(a.batch, 260, np.int32))


def rounds_alone(a: Attention, arrays: Arrays) -> None:  # no heads to form clusters
    rounds(a, arrays)
    a.num_kv_heads = a.num_heads


def counted(a: Attention, arrays: Arrays) -> None:
    rounds(a, arrays)
    a.kv_lens = arrays.of(np.arange(a.batch, dtype=np.int32) * 6)


def dropped_counted(a: Attention, arrays: Arrays) -> None:
    counted(a, arrays)
    drop(a, arrays, 26)


DROPPED = (dropped, dropped_causal, dropped_lengths, dropped_packed)
OPTIONS = (
    *(plain, causal, lengths, packed, segments, softcap, bias, everything, tiles),
    *(partial, few, few_wide, few_lengths, *DROPPED),
)
GENERIC_OPTIONS = (dropped_everything,)
NARROW_OPTIONS = (long_q, long_kv, rounds, rounds_alone, counted)
HOPPER_OPTIONS = (*NARROW_OPTIONS, dropped_counted)
FORWARD_ONLY = (
    *(rounds, rounds_alone, counted, dropped_counted, few, few_wide, few_lengths),
)
# dq is added in turns.
TURNS = (causal, lengths, packed, dropped_causal, dropped_lengths, dropped_packed)
NO_DQ = (tiles, partial)
# Joined with what they gave before, on Hopper; the forward pass up to a head dim, and
# without dropout.
JOINED = (
    *(plain, causal, lengths, packed, segments, long_q, rounds, counted),
    *(dropped, dropped_causal),
)
MOST_JOINED_DIM = 128


# In 8 bits.
NARROW_DIMS = ("64x64", "128x128", "96x80")
NARROW = (plain, causal, lengths, segments, few, *NARROW_OPTIONS)


def run_narrow(library: Any, option: Any, dims: str, dtype: int = E4M3) -> int:
    """A forward call in 8 bits; dtype: of queries and keys."""
    arrays = Arrays()
    a = Attention(kernels=SM90, dtype=dtype)
    a.batch, a.num_heads, a.num_kv_heads, a.q_len, a.kv_len = 1, 2, 1, 136, 136
    a.head_dim, a.value_dim = map(int, dims.split("x"))
    a.scale, a.window_left, a.window_right = a.head_dim**-0.5, -1, -1
    option(a, arrays)
    rows, keys = a.batch * a.q_len, a.batch * a.kv_len
    a.q = arrays.normal(dtype, rows, a.num_heads, a.head_dim)
    a.k = arrays.normal(dtype, keys, a.num_kv_heads, a.head_dim)
    a.v = arrays.normal(E4M3, keys, a.num_kv_heads, a.value_dim)
    a.o = arrays.empty(rows * a.num_heads * a.value_dim * SIZES[BF16])
    a.lse = arrays.empty(rows * a.num_heads * SIZES[F32])
    blocks = {"q_scales": -(-a.q_len // 128), "k_scales": -(-a.kv_len // 128)}
    for name, heads in (
        ("q_scales", a.num_heads),
        ("k_scales", a.num_kv_heads),
        ("v_scales", a.num_kv_heads),
    ):
        shape = (a.batch, heads, blocks.get(name, 1))
        scales = arrays.of(np.full(shape, 0.01, np.float32))
        setattr(a, name, BlockScales(scales, shape[0], shape[2]))
    a.workspace = arrays.empty(workspace_bytes(library, a, "forward"))
    launch = library.kvblock_attention_forward
    launch.restype = ctypes.c_char_p
    error = launch(ctypes.byref(a.of("forward")), None)
    assert error is None, f"{option.__name__} {dims}: {error.decode()}"
    arrays.free()
    return 1


def run(
    library: Any,
    kernels: str,
    option: Any,
    dims: str,
    dtype: int,
    precision: int = HIGHEST,
    backward: bool = True,
) -> int:
    """Every pass of one call, or of forward ones; how many launches that were."""
    arrays = Arrays()
    a = Attention(kernels=SM90 if kernels == "sm90" else GENERIC, dtype=dtype)
    a.batch, a.num_heads, a.num_kv_heads, a.q_len, a.kv_len = 1, 2, 1, 136, 136
    a.head_dim, a.value_dim = map(int, dims.split("x"))
    a.precision, size = precision, SIZES[dtype]
    a.scale = a.head_dim**-0.5
    a.window_left = a.window_right = -1
    option(a, arrays)

    members = 1 if a.cu_q else a.batch
    rows, keys = members * a.q_len, members * a.kv_len
    a.q = arrays.normal(dtype, rows - (kernels == "short"), a.num_heads, a.head_dim)
    a.k = arrays.normal(dtype, keys, a.num_kv_heads, a.head_dim)
    a.v = arrays.normal(dtype, keys, a.num_kv_heads, a.value_dim)
    a.d_o = arrays.normal(dtype, rows, a.num_heads, a.value_dim)
    a.delta = arrays.normal(F32, rows, a.num_heads)
    a.o = arrays.empty(rows * a.num_heads * a.value_dim * size)
    a.lse = arrays.empty(rows * a.num_heads * 4)
    a.dk = arrays.empty(keys * a.num_kv_heads * a.head_dim * size)
    a.dv = arrays.empty(keys * a.num_kv_heads * a.value_dim * size)
    if a.kernels == GENERIC or option not in NO_DQ:
        a.dq = arrays.empty(rows * a.num_heads * a.head_dim * size)
    if option not in NO_DQ and a.kernels == GENERIC:
        a.dq_accum = arrays.empty(-(-rows // 8) * 8 * a.num_heads * a.head_dim * 4)
    a.deterministic = a.kernels == SM90 and option in TURNS
    joins = a.kernels == SM90 and option in JOINED
    narrow = max(a.head_dim, a.value_dim) <= MOST_JOINED_DIM
    passes = ["forward"] + ["forward, joined"] * (joins and narrow and not a.dropout)
    wide_float32 = dtype == F32 and max(a.head_dim, a.value_dim) > 128
    if backward and option not in FORWARD_ONLY and not wide_float32:
        passes += ["backward_kv"] + ["backward_kv, joined"] * joins
        if a.kernels == GENERIC:  # these serve both kinds
            passes += ["backward_q"] + ["backward_bias"] * bool(a.dbias)
    for name in passes:
        a.workspace, a.joins = None, name.endswith("joined")
        name = name.removesuffix(", joined")
        if room := workspace_bytes(library, a, name):
            a.workspace = arrays.empty(room)
        launch = library[f"kvblock_attention_{name}"]
        launch.restype = ctypes.c_char_p
        error = launch(ctypes.byref(a.of(name)), None)
        assert error is None, error
        driver("cuCtxSynchronize")
    arrays.free()
    return len(passes)


def main(path: str, kernels: str, *only: str) -> None:
    connect()
    library = ctypes.CDLL(path)
    launches = 0
    if narrow := {"e4m3": E4M3, "int8": I8}.get(kernels):
        for dims in NARROW_DIMS:
            for option in NARROW:
                if {dims, option.__name__} >= set(only):
                    launches += run_narrow(library, option, dims, narrow)
        print(launches, "launches")
        return
    options = OPTIONS + (HOPPER_OPTIONS if kernels == "sm90" else GENERIC_OPTIONS)
    for i, dims in enumerate(DIMS):
        for j, option in enumerate(options):
            if {dims, option.__name__} >= set(only):
                how = ((i + j) % 2,) if kernels != "float32" else (F32, (i + j) % 2)
                launches += run(library, kernels, option, dims, *how)
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
