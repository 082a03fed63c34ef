"""The cases of `append_cases.py` through the C interface of `kvblock/append.h`.

    python append_launches.py LIBRARY [short]

launches them all on a GPU, for compute-sanitizer to watch, and judges what comes out;
`short` has a k that ends too early. Elsewhere the library is the emulator's, and arrays
lie between guards.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np
from append_cases import CASES, KEPT, MANY, MANY_KEPT, Drawn
from attention_launches import Arrays, connect, driver, fields
from model import lay, unlay

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
NUMBERS = {name: i for i, name in enumerate(DTYPES)}
GUARD = 256  # bytes before and after each array


class CAppend(ctypes.Structure):
    """kvblock_append."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype cache_dtype"),
        *fields(ctypes.c_int64, "tokens"),
        *fields(ctypes.c_int32, "num_heads num_kv_heads head_dim num_outer"),
        *fields(ctypes.c_void_p, "q k v q_out slots"),
        *fields(ctypes.c_int64, "q_token_stride kv_token_stride"),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        *fields(ctypes.c_int64, "num_buffers buffer_bytes"),
        *fields(ctypes.c_int64, "num_layers num_blocks block_size layer layers"),
        *fields(ctypes.c_void_p, "layer_at"),
        *fields(ctypes.c_int64, "layer_table_stride layer_stride block_stride"),
        *fields(ctypes.c_int64, "outer_stride token_stride head_stride dim_stride"),
        *fields(ctypes.c_void_p, "k_scale v_scale"),
        *fields(ctypes.c_int32, "k_scale_heads v_scale_heads"),
        *fields(ctypes.c_void_p, "k_scales v_scales"),
        *fields(ctypes.c_int32, "scale_layers rotary_dim interleaved"),
        *fields(ctypes.c_void_p, "positions inv_freq cos_sin"),
        *fields(ctypes.c_int64, "cos_sin_rows"),
        *fields(ctypes.c_void_p, "q_norm k_norm"),
        *fields(ctypes.c_int32, "q_norm_dtype k_norm_dtype"),
        *fields(ctypes.c_float, "norm_eps"),
        *fields(ctypes.c_int32, "zero_tail"),
    ]


class Guarded:
    """Copies of arrays between guards, `skew`: an element beyond an aligned address."""

    def __init__(self, skew: bool = False) -> None:
        self.skew = skew
        self.held: dict[int, tuple[np.ndarray, int, np.ndarray]] = {}

    def place(self, x: np.ndarray) -> int:
        """The address of a copy."""
        x = np.ascontiguousarray(x)
        room = np.full(x.nbytes + 2 * GUARD + 64, 0xA5, np.uint8)
        begin = -room.ctypes.data % 64 + GUARD + (x.itemsize if self.skew else 0)
        room[begin : begin + x.nbytes] = x.reshape(-1).view(np.uint8)
        address = room.ctypes.data + begin
        self.held[address] = (room, begin, x)
        return address

    def contents(self, address: int) -> np.ndarray:
        room, begin, x = self.held[address]
        return room[begin : begin + x.nbytes].copy().view(x.dtype).reshape(x.shape)

    def finish(self) -> None:
        for room, begin, x in self.held.values():
            for guard in (room[:begin], room[begin + x.nbytes :]):
                assert (guard == 0xA5).all(), "written outside of an array"


class OnGpu:
    """Copies of arrays in allocations of exactly their size, for memcheck."""

    def __init__(self) -> None:
        self.arrays = Arrays()
        self.held: dict[int, np.ndarray] = {}

    def place(self, x: np.ndarray) -> int:
        x = np.ascontiguousarray(x)
        if not x.size:
            return 0
        address = self.arrays.of(x)
        self.held[address] = x
        return address

    def contents(self, address: int) -> np.ndarray:
        x = np.empty_like(self.held[address])
        size = ctypes.c_size_t(x.nbytes)
        place = ctypes.c_void_p(x.ctypes.data)
        driver("cuMemcpyDtoH_v2", place, ctypes.c_uint64(address), size)
        return x

    def finish(self) -> None:
        driver("cuCtxSynchronize")


def strides(drawn: Drawn) -> dict[str, int]:
    """Bytes between neighbours along each axis, read off a numbered pool."""
    c = drawn.case
    shape = drawn.before.shape
    laid = lay(np.arange(math.prod(shape)).reshape(shape), c.kind[0])
    if not c.kind[1]:
        laid = laid[:, 1 % c.layers]
    place = np.full(math.prod(shape), -1)
    place[laid.reshape(-1)] = np.arange(laid.size)
    place = place.reshape(shape)
    base = 0 if c.kind[1] else 1 % c.layers
    made = {}
    for axis, name in enumerate("BLOTHD"):
        one = [0, base, 0, 0, 0, 0]
        first = place[tuple(one)]
        one[axis] += 1
        inside = shape[axis] > 1 and (name != "L" or c.kind[1])
        step = place[tuple(one)] - first if inside else 0
        made[name] = int(step) * drawn.before.itemsize
    if made["D"] == 0:
        made["D"] = drawn.before.itemsize
    return made


def beside(place: Any, parts: list[np.ndarray], padding: int) -> tuple[int, int]:
    """The address of an array of all parts' heads, a token's padded; its row's size."""
    rows = [x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in parts]
    rows.append(np.full((*rows[0].shape[:-1], padding), 77, rows[0].dtype))
    whole = np.concatenate(rows, -1)
    return place(whole), whole.shape[-1]


def launch(
    library: ctypes.CDLL, drawn: Drawn, rope: bool, memory: Guarded | OnGpu
) -> tuple[Any, np.ndarray, Any]:
    """q or None, the canonical blocks, and the arrays of scales."""
    c, at = drawn.case, memory.place
    a = CAppend(dtype=NUMBERS[c.dtype], cache_dtype=NUMBERS[drawn.stored.name])
    a.tokens, a.num_kv_heads, a.head_dim = c.tokens, c.kv_heads, c.dim
    a.num_outer = c.outer

    def one(x: Any) -> int:
        return at(np.asarray(x).reshape(-1))

    a.slots = at(drawn.slots)
    heads = c.kv_heads * c.dim * drawn.k.itemsize  # bytes of a token's keys
    a.q = a.k = a.v = None
    if c.joined:
        parts = [drawn.q, drawn.k, drawn.v] if rope else [drawn.k, drawn.v]
        place, a.kv_token_stride = beside(at, parts, c.padding)
        if rope:
            a.q, a.q_token_stride = place, a.kv_token_stride
            place += c.heads * c.dim * drawn.q.itemsize
        a.k, a.v = place, place + heads
    else:
        a.k = at(drawn.k)
        a.v = at(drawn.v) if drawn.v is not None else None
        if rope and c.padding:
            a.q, a.q_token_stride = beside(at, [drawn.q], c.padding)
        elif rope:
            a.q = at(drawn.q)
    q_out = 0
    if rope:
        q_out = at(np.full_like(drawn.q, 7))
        a.num_heads, a.q_out = c.heads, q_out
    laid = lay(drawn.before, c.kind[0])
    pools = [laid] if c.kind[1] else [laid[:, i] for i in range(c.layers)]
    places = [at(x) for x in pools]
    a.buffers = (ctypes.c_void_p * len(places))(*places)
    a.num_buffers, a.buffer_bytes = len(pools), pools[0].nbytes
    a.num_layers, a.num_blocks, a.block_size = c.layers, c.blocks, c.block_size
    a.layers = c.layers if c.layer is None else 1
    if c.traced:
        a.layer_at = one(np.int32(c.layer))
    else:
        a.layer = c.layer or 0
    a.layer_table_stride = int(not c.kind[1])
    step = strides(drawn)
    a.layer_stride, a.block_stride, a.outer_stride = step["L"], step["B"], step["O"]
    a.token_stride, a.head_stride, a.dim_stride = step["T"], step["H"], step["D"]
    kept = []
    if drawn.computed:
        kept = [at(x) for x in drawn.scales_before]
        a.k_scales, a.v_scales = kept[0], kept[1] if c.outer == 2 else None
        a.scale_layers = c.layers if drawn.scales_before[0].ndim == 4 else 1
    elif c.scale:
        a.k_scale, a.k_scale_heads = one(drawn.k_scale), np.size(drawn.k_scale)
        if c.outer == 2:
            a.v_scale, a.v_scale_heads = one(drawn.v_scale), np.size(drawn.v_scale)
    if rope and drawn.rotary:
        a.rotary_dim, a.interleaved = drawn.rotary, c.interleaved
        if c.angles in ("table", "rows"):
            a.cos_sin, a.cos_sin_rows = at(drawn.table), len(drawn.table)
        else:
            a.inv_freq = at(drawn.inv_freq)
        if c.angles != "rows":
            a.positions = at(drawn.positions)
    a.q_norm_dtype = a.k_norm_dtype = a.dtype
    if rope and c.norms:
        weights = [drawn.q_norm, drawn.k_norm]
        if c.norms not in (c.dtype, "float32"):
            weights = [w.astype(np.float32) for w in weights]
        a.q_norm, a.k_norm = map(at, weights)
        a.q_norm_dtype = a.k_norm_dtype = NUMBERS[weights[0].dtype.name]
    a.norm_eps, a.zero_tail = 1e-6, c.zero_tail
    error = library.kvblock_append_cuda(ctypes.byref(a), None)
    assert error is None, error.decode()
    memory.finish()
    made = [memory.contents(place) for place in places]
    whole = made[0] if c.kind[1] else np.stack(made, 1)
    blocks = unlay(whole, drawn.before.shape[1:], c.kind[0])
    q = memory.contents(q_out) if q_out else None
    return q, blocks, [memory.contents(place) for place in kept] or None


def main(path: str, *only: str) -> None:
    """Launches every case on a GPU, and holds it to the truth; `short`: k is."""
    connect()
    library = ctypes.CDLL(path)
    library.kvblock_append_cuda.restype = ctypes.c_char_p
    rng, launches = np.random.default_rng(1), 0
    for cases, rope in ((CASES | MANY, True), (KEPT | MANY_KEPT, False)):
        for case in cases.values():
            if not case.tokens or (case.joined and "short" in only):
                continue
            drawn, memory = Drawn(case, rng), OnGpu()
            if "short" in only:
                drawn.k = drawn.k[:-1]
            made = launch(library, drawn, rope, memory)
            memory.arrays.free()
            if "short" in only:
                continue
            drawn.hold(*made, turns=rope)
            launches += 1
    print(launches, "launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
