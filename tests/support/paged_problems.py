"""Calls of the C interface of paged attention: drawn, described, and judged in float64.

NumPy alone. Whatever nobody may read is NaN, and so is everything between arrays: an
array lies in the middle of a larger one.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import judge
import ml_dtypes
import numpy as np
from attention_launches import BF16, F16, fields

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NUMBERS = {"bfloat16": BF16, "float16": F16, "e4m3": 3, "e5m2": 4, "int8": 5}
# Of a cache of 8 bits, and the largest number of each.
NARROW = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "int8": (np.int8, 127.0),
}
# The end of the workspace (host/paged_call.h) of launches that run side by side.
COUNTERS = np.dtype(
    [
        ("next_tile", np.uint32),
        ("ctas", np.int32),
        ("taken", np.int32),
        ("gone", np.int32),
        ("piece_there", np.int32, 640),
        ("arrived", np.int32, 320),
    ]
)
CAUSAL = (-1, 0)
GAP = 256  # bytes of NaN on either side of an array
ACCURACY = 3e-6  # of a probability, relative: float32 and a fast exponential


class Strides(ctypes.Structure):
    """kvblock_page_strides."""

    _fields_ = fields(ctypes.c_int64, "block token head")


class Scales(ctypes.Structure):
    """kvblock_scales."""

    _fields_ = [
        *fields(ctypes.c_void_p, "data"),
        *fields(ctypes.c_int64, "layer block"),
        *fields(ctypes.c_int32, "token head each"),
    ]


class Paged(ctypes.Structure):
    """kvblock_paged_attention."""

    _fields_ = [
        *fields(ctypes.c_int32, "dtype cache_dtype calls sequences"),
        *fields(ctypes.c_int64, "rows"),
        *fields(ctypes.c_int32, "num_heads num_kv_heads head_dim value_dim"),
        *fields(ctypes.c_float, "scale softcap"),
        *fields(ctypes.c_int32, "window_left window_right"),
        *fields(ctypes.c_void_p, "q query_start q_lens kv_lens block_tables"),
        *fields(ctypes.c_void_p, "table_first"),
        *fields(ctypes.c_int32, "table_width block_size"),
        *fields(ctypes.c_void_p, "sinks"),
        *fields(ctypes.c_int32, "sink_batch"),
        *fields(ctypes.c_void_p, "ranges tree_mask"),
        *fields(ctypes.c_int32, "tree_words"),
        *fields(ctypes.c_void_p, "k v"),
        *fields(ctypes.c_int32, "num_arrays num_layers"),
        *fields(ctypes.c_void_p, "layer"),
        *fields(ctypes.c_int32, "layer_batch"),
        *fields(ctypes.c_int64, "layer_stride num_blocks"),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("k_scale", Scales),
        ("v_scale", Scales),
        *fields(ctypes.c_int32, "split_size values_in_keys"),
        *fields(ctypes.c_void_p, "o lse workspace"),
        *fields(ctypes.c_int32, "narrow_queries"),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """sequences: (queries, keys) of each, those of one call after the other.

    layout: an order of axes, B blocks, L layers, O keys and values, T tokens, H heads,
    D. padded: q [B, T, N, D] with q_lens, instead of query_start; full: without them,
    too, so that all of T count. starts: query_start itself, where it is not the sum of
    the queries. bad_ids: (sequence, page, id). ranges: those of rows, one after the
    other and again; tree: words of bits that each row has, of which about `seen` are 1.
    latent: values are columns of the keys, and there is one key head.
    narrow: queries of sequences with many of them are rounded to e4m3.
    """

    sequences: tuple[tuple[int, int], ...] = ((1, 37), (6, 20), (3, 3), (1, 64))
    dtype: str = "bfloat16"
    head_dim: int = 64
    value_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16
    layout: str = "B L O T H D"
    layers: int = 1
    layer: int | None = None
    calls: int = 1
    padded: int = 0
    full: bool = False
    more_rows: int = 0
    starts: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    bad_ids: tuple[tuple[int, int, int], ...] = ()
    window: tuple[int, int] = CAUSAL
    softcap: float = 0.0
    sinks: int = 0
    scale: float | None = None
    seed: int = 0
    cache: str = ""  # one of NARROW
    scales: str = "all"  # of a narrow cache: "all", "heads", "tokens" or "none"
    large: float = 1.0  # times larger is q
    split_size: int = 0
    flat: bool = False  # tables one after the other
    ranges: tuple[tuple[int, int], ...] = ()
    tree: int = 0
    seen: float = 0.5
    latent: bool = False
    narrow: bool = False


class Problem:
    """The arrays of a case, on the host, and what comes out."""

    def __init__(self, case: Case) -> None:
        self.case = c = case
        rng = np.random.default_rng(c.seed)
        self.dtype = DTYPES[c.dtype]
        queries = np.array([n for n, _ in c.sequences], np.int64)
        keys = np.array([n for _, n in c.sequences], np.int64)
        each = len(queries) // c.calls
        by_call = queries.reshape(c.calls, each)
        if c.padded:
            self.rows = c.padded
            ends = [[0, n] for n in queries]
        else:
            ends = [np.r_[0, np.cumsum(one)] for one in by_call]
            self.rows = max(int(e[-1]) for e in ends) + c.more_rows
        self.starts = np.array([c.starts] if c.starts else ends, np.int32)
        self.kv_lens = np.array(c.kv_lens or keys, np.int32)
        self.scale = c.head_dim**-0.5 if c.scale is None else c.scale
        q = rng.standard_normal((c.calls, self.rows, c.heads, c.head_dim))
        self.q = (q * c.large).astype(self.dtype)
        self.sinks = rng.standard_normal((max(c.sinks, 1), c.heads)).astype(np.float32)
        self.got: tuple[np.ndarray, np.ndarray] | None = None  # the last results
        self.counters: np.void | None = None  # of the last call, COUNTERS
        self.layers = (
            None if c.layer is None else [c.layer]
        )  # one, or one for each call
        self._draw_pages(rng, keys)
        self.ranges = np.resize(
            np.array(c.ranges or [[0, 0]], np.int32), (c.calls, self.rows, 2)
        )
        self.bits = rng.random((c.calls, self.rows, 32 * c.tree)) < c.seen

    def _draw_pages(self, rng: np.random.Generator, keys: np.ndarray) -> None:
        c = self.case
        pages = -(-keys // c.block_size)
        self.blocks = int(pages.sum()) + 2
        order = iter(rng.permutation(self.blocks))
        width = max(int(pages.max(initial=0)), 1)
        self.tables = np.full((len(keys), width), -1, np.int32)
        outer = 1 if c.latent else 2
        sizes = {"B": self.blocks, "L": c.layers, "O": outer, "T": c.block_size}
        sizes |= {"H": c.kv_heads, "D": max(c.head_dim, c.value_dim)}
        axes = c.layout.split()
        stored, most = NARROW.get(c.cache, (self.dtype, 0.0))
        poison = -128 if c.cache == "int8" else np.nan
        self.pages = np.full([sizes[a] for a in axes], poison, stored)
        shape = {
            "all": (1, 1, 1, 1),
            "heads": (1, 1, 1, c.kv_heads),
            "tokens": (c.layers, self.blocks, c.block_size, c.kv_heads),
        }.get(c.scales, (1, 1, 1, 1))
        self.scales = [
            (rng.uniform(0.5, 2.0, shape) * 4 / (most or 1)).astype(np.float32)
            for _ in range(2)
        ]
        if c.scales == "none":
            self.scales = [np.full(shape, 1, np.float32) for _ in range(2)]
        view = self.pages.transpose([axes.index(a) for a in "BLOTHD"])
        layer = c.layer or 0
        self.keys, self.values = [], []
        for b, length in enumerate(keys):
            k, v = (
                rng.standard_normal((length, c.kv_heads, d)).astype(
                    np.float32 if c.cache else self.dtype
                )
                for d in (c.head_dim, c.value_dim)
            )
            if c.latent:
                v = k[..., : c.value_dim]
            self.keys.append(k)
            self.values.append(v)
            for p in range(int(pages[b])):
                self.tables[b, p] = block = next(order)
                part = slice(p * c.block_size, (p + 1) * c.block_size)
                if 0 <= layer < c.layers:
                    rows = view[block, layer]
                    for i, x in enumerate((k, v)[:outer]):
                        self._store(rows[i], x[part], (i, layer, block))
        for b, p, block in c.bad_ids:
            self.tables[b, p] = block

    def _store(self, rows: np.ndarray, x: np.ndarray, at: tuple[int, int, int]) -> None:
        """Writes a block's keys or values; of a narrow cache x becomes what is read."""
        c, (i, layer, block) = self.case, at
        if c.cache:
            scales = np.broadcast_to(
                self.scales[i], (c.layers, self.blocks, c.block_size, c.kv_heads)
            )[layer, block, : len(x)][..., None]
            most = NARROW[c.cache][1]
            small = (x.astype(np.float32) / scales).clip(-most, most)
            if c.cache == "int8":
                small = np.rint(small)
            small = small.astype(rows.dtype)
            x[...] = small.astype(np.float32) * scales
            rows[: len(x), :, : x.shape[-1]] = small
        else:
            rows[: len(x), :, : x.shape[-1]] = x

    def describe(self, give: Callable[[np.ndarray], int]) -> Paged:
        """The call without results; `give` puts an array where it tells.

        The struct's tables of addresses live as long as the problem.
        """
        c = self.case
        a = Paged(dtype=NUMBERS[c.dtype], calls=c.calls, rows=self.rows)
        a.cache_dtype = NUMBERS[c.cache or c.dtype]
        a.sequences = 1 if c.padded else self.starts.shape[1] - 1
        a.num_heads, a.num_kv_heads = c.heads, c.kv_heads
        a.head_dim, a.value_dim = c.head_dim, c.value_dim
        a.scale, a.softcap = self.scale, c.softcap
        a.split_size, a.narrow_queries = c.split_size, c.narrow
        a.window_left, a.window_right = c.window
        a.q = give(self.q)
        if c.padded and not c.full:
            a.q_lens = give(self.starts[:, 1])
        elif not c.padded:
            a.query_start = give(self.starts)
        a.kv_lens, a.block_size = give(self.kv_lens), c.block_size
        if c.flat:
            tables, first = self._flat_tables()
            a.block_tables, a.table_width = give(tables), len(tables)
            a.table_first = give(first)
        else:
            a.block_tables, a.table_width = give(self.tables), self.tables.shape[1]
        if c.sinks:
            a.sinks, a.sink_batch = give(self.sinks), c.sinks
        if c.ranges:
            a.ranges = give(self.ranges)
        if c.tree:
            words = np.packbits(self.bits, axis=-1, bitorder="little").view(np.uint32)
            a.tree_mask, a.tree_words = give(words), c.tree
        axes = c.layout.split()
        separate = axes[0] == "L"  # an array for each layer
        arrays = list(self.pages) if separate else [self.pages]
        stride = dict(zip(axes, self.pages.strides, strict=True))
        addresses = [give(x) for x in arrays]
        self.k = (ctypes.c_void_p * len(arrays))(*addresses)
        self.v = (ctypes.c_void_p * len(arrays))(*(x + stride["O"] for x in addresses))
        a.k, a.v = ctypes.addressof(self.k), ctypes.addressof(self.v)
        if c.latent:
            a.v, a.values_in_keys = None, 1
        a.num_arrays, a.num_layers = len(arrays), c.layers
        a.layer_stride = 0 if separate else stride["L"]
        if self.layers is not None:
            a.layer = give(np.array(self.layers, np.int32))
            a.layer_batch = len(self.layers)
        a.num_blocks = self.blocks
        for strides in (a.k_strides, a.v_strides):
            strides.block, strides.token = stride["B"], stride["T"]
            strides.head = stride["H"]
        if c.cache and c.scales != "none":
            for to, scales in zip((a.k_scale, a.v_scale), self.scales, strict=True):
                to.data, to.each = give(scales), c.scales == "tokens"
                strides = [n // 4 for n in scales.strides]
                to.layer, to.block, to.token, to.head = strides
                to.head = 0 if c.scales == "all" else to.head
        return a

    def _flat_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of all sequences in a row, the last one first."""
        tables, first = [np.zeros(0, np.int32)], []
        at = 0
        for b in reversed(range(len(self.tables))):
            pages = -(-len(self.keys[b]) // self.case.block_size)
            first.append(at)
            tables.append(self.tables[b, :pages])
            at += pages
        return np.concatenate(tables), np.array(first[::-1], np.int32)

    def alone(self, b: int) -> Problem:
        """Sequence b of the same cache in a call of its own, with a table that fits."""
        c, other = self.case, copy.copy(self)
        call, first, end = self.sequence_rows(b)
        other.case = dataclasses.replace(
            c,
            sequences=(c.sequences[b],),
            calls=1,
            padded=0,
            more_rows=0,
            sinks=min(c.sinks, 1),
        )
        other.q, other.rows = self.q[call : call + 1, first:end], end - first
        other.starts = np.array([[0, end - first]], np.int32)
        other.ranges = self.ranges[call : call + 1, first:end]
        other.bits = self.bits[call : call + 1, first:end]
        other.kv_lens = self.kv_lens[b : b + 1]
        width = max(-(-int(self.kv_lens[b]) // c.block_size), 1)
        other.tables = self.tables[b : b + 1, :width]
        other.keys, other.values = [self.keys[b]], [self.values[b]]
        if c.sinks:
            row = call * c.sinks // c.calls
            other.sinks = self.sinks[row : row + 1]
        return other

    def sequence_rows(self, b: int) -> tuple[int, int, int]:
        """(call, first row, end) of sequence b; none where a start falls."""
        call, i = divmod(b, self.starts.shape[1] - 1)
        starts = self.starts.clip(0, self.rows)
        if (np.diff(starts) < 0).any():
            return call, 0, 0
        return call, int(starts[call, i]), int(starts[call, i + 1])

    def truth(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of out and lse what is wanted, and the bar of each."""
        c = self.case
        shape = (c.calls, self.rows, c.heads)
        out, lse = np.zeros((*shape, c.value_dim)), np.full(shape, -np.inf)
        bars, lse_bars = np.full(out.shape, 1e-30), np.full(shape, 1e-30)
        width = self.tables.shape[1] * c.block_size
        q = narrow_queries(self) if c.narrow else self.q
        for b in range(len(self.tables)):
            call, first, end = self.sequence_rows(b)
            length = int(np.clip(self.kv_lens[b], 0, width))
            known = min(length, len(self.keys[b]))
            ids = self.tables[b, np.arange(known) // c.block_size]
            there = (ids >= 0) & (ids < self.blocks)
            there &= 0 <= (c.layer or 0) < c.layers
            group = c.heads // c.kv_heads
            k, v = (
                np.repeat(a[b][:known].astype(np.float64), group, 1)
                for a in (self.keys, self.values)
            )
            at = np.arange(known)
            for row in range(first, end):
                position = length - end + row
                seen = there.copy()
                left, right = c.window
                if left >= 0:
                    seen &= at >= position - left
                if right >= 0:
                    seen &= at <= position + right
                if c.ranges:
                    low, high = self.ranges[call, row]
                    seen &= (at >= low) & (at < high)
                new = at - (length - end + first)  # of the sequence's queries
                tree = (new >= 0) & (new < 32 * c.tree)
                seen[tree] &= self.bits[call, row, new[tree]]
                own = q[call, row].astype(np.float64), k[seen], v[seen]
                self._row(call, row, *own, out, lse, bars, lse_bars)
        return {"out": (out, bars), "lse": (lse[..., None], lse_bars[..., None])}

    def _row(self, call, row, q, k, v, out, lse, bars, lse_bars) -> None:
        c = self.case
        scores = np.einsum("nd,snd->ns", q, k) * self.scale
        size = abs(self.scale) * np.linalg.norm(q, axis=-1)
        size = size * np.linalg.norm(k, axis=-1).max(initial=0.0)
        if c.softcap:
            scores = c.softcap * np.tanh(scores / c.softcap)
        if c.sinks:
            sinks = self.sinks[call * c.sinks // c.calls].astype(np.float64)
            scores = np.c_[scores, sinks]
        if not scores.shape[1]:
            return
        top = scores.max(1, keepdims=True)
        lse[call, row] = top[:, 0] + np.log(np.exp(scores - top).sum(1))
        p = np.exp(scores - lse[call, row][:, None])[:, : len(k)]
        out[call, row] = np.einsum("ns,snd->nd", p, v)
        terms = np.sqrt(np.einsum("ns,snd->nd", p * p, v * v))
        accuracy = ACCURACY + 2 * judge.EPS["float32"] * size.max(initial=0)
        accuracy += 2e-6 * c.softcap
        noise = accuracy * np.einsum("ns,snd->nd", p, abs(v)) + 1e-7
        # P is rounded to float16 beside a narrow cache, and q to fewer digits.
        if c.cache and c.dtype == "bfloat16":
            noise = noise + 2.0**-10 * np.einsum("ns,snd->nd", p, abs(v))
        bars[call, row] = judge.bar_of_terms(out[call, row], terms, noise, c.dtype)
        lse_bars[call, row] = judge.bar_of_lse(lse[call, row], size) + 2e-6 * c.softcap

    def rows_of_long(self, most: int) -> np.ndarray:
        """[calls, rows]: whether a row's sequence has more packed rows than `most`."""
        long = np.zeros((self.case.calls, self.rows), bool)
        for b in range(len(self.tables)):
            call, first, end = self.sequence_rows(b)
            if (end - first) * (self.case.heads // self.case.kv_heads) > most:
                long[call, first:end] = True
        return long

    def hold(
        self, out: np.ndarray, lse: np.ndarray, but: np.ndarray | None = None
    ) -> float:
        """Judges results; the largest error in parts of its bar. `but`: rows that do
        not count."""
        got = {"out": out, "lse": lse[..., None]}
        truth = self.truth()
        wanted = {name: want for name, (want, _) in truth.items()}
        if self.case.narrow:
            but = self.rows_of_long(few_rows(self))
            hold_narrow(*(a[but] for a in (out, lse, *wanted.values())))
        if but is not None:
            wide = but[:, :, None, None]
            got = {name: np.where(wide, wanted[name], got[name]) for name in got}
        worst = 0.0
        for name, (want, bar) in truth.items():
            verdict = judge.judge(name, got[name], want, bar)
            assert not verdict.wrong, f"{self.case}: {verdict.wrong}"
            worst = max(worst, verdict.worst)
        return worst


ROW = LSE = 0.09  # of a row's size, and of lse, that rows in 8 bits may be off by


def few_rows(x: Problem) -> int:
    """Packed rows up to which a sequence is not computed in 8 bits."""
    c = x.case
    group = c.heads // c.kv_heads
    most = max(64, 16 * group)
    more = x.rows > (1 if c.padded else x.starts.shape[1] - 1) or c.split_size > 0
    return most if more and x.rows * group > most else 2**31 - 1


def narrow_queries(x: Problem) -> np.ndarray:
    """q as it is multiplied: of sequences with many queries rounded, tile by tile."""
    c, q = x.case, x.q.astype(np.float32)
    group, made = c.heads // c.kv_heads, x.q.astype(np.float32)
    fits = [n for n in range(1, group + 1) if group % n == 0]
    pack = max(n for n in fits if n <= 128 and 128 // n * n >= 115.2)
    many = x.rows_of_long(few_rows(x))
    for b in range(len(x.tables)):
        call, first, end = x.sequence_rows(b)
        if first == end or not many[call, first]:
            continue
        for row in range(first, end, 128 // pack):
            for head in range(0, c.heads, pack):
                at = (
                    call,
                    slice(row, min(row + 128 // pack, end)),
                    slice(head, head + pack),
                )
                made[at] = narrowed(q[at])
    return made


def narrowed(x: np.ndarray) -> np.ndarray:
    """What numbers that share a scale are in e4m3; NaN where they are not finite."""
    finite = np.isfinite(x)
    largest = np.abs(x[finite]).max(initial=0)
    scale = np.maximum(largest * np.float32(1 / 448), np.float32(2.0**-126))
    scale = np.float32(scale if largest else 1)
    with np.errstate(invalid="ignore"):
        small = (np.where(finite, x, np.nan) / scale).clip(-448, 448)
    return small.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def hold_narrow(out: np.ndarray, lse: np.ndarray, out_is: Any, lse_is: Any) -> None:
    """Rows that are computed in 8 bits."""
    off = np.linalg.norm(out.astype(np.float64) - out_is, axis=-1)
    size = np.linalg.norm(out_is, axis=-1)
    assert (off <= ROW * size + 1e-6 * size.max(initial=0)).all(), (
        off / (size + 1e-30)
    ).max()
    lse_is = lse_is[..., 0]
    nothing = np.isinf(lse_is)
    assert (lse[nothing] == -np.inf).all()
    assert (out[out_is.any(-1) == 0] == 0).all()
    assert (np.abs(lse[~nothing] - lse_is[~nothing]) <= LSE).all()


class HostMemory:
    """Arrays of a CPU with NaN around them, which must stay as it is."""

    def __init__(self) -> None:
        self.held: list[tuple[np.ndarray, int]] = []

    def empty(self, size: int) -> np.ndarray:
        """So many bytes, all of them 0xFF, aligned to 64."""
        whole = np.full(size + 2 * GAP + 64, 0xFF, np.uint8)
        start = GAP + -(whole.ctypes.data + GAP) % 64
        self.held.append((whole[:start], 0))
        self.held.append((whole[start + size :], 0))
        return whole[start : start + size]

    def give(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        place = self.empty(array.nbytes)
        place[:] = array.reshape(-1).view(np.uint8)
        self.held.append((place, 1))
        return place.ctypes.data

    def untouched(self) -> bool:
        return all((gap == 0xFF).all() for gap, used in self.held if not used)


def run_on_host(
    library: ctypes.CDLL, x: Problem, times: int = 2, few_rows: int | None = None
) -> float:
    """The call by a library of a CPU, held to the truth; the same bits every time.

    few_rows: the launch alone that leaves the sequences with more packed rows than
    these; nothing of theirs is written.
    """
    c, memory = x.case, HostMemory()
    a = x.describe(memory.give)
    sized = library.kvblock_paged_attention_workspace
    sized.restype = ctypes.c_int64
    launch = library.kvblock_paged_attention_forward
    launch.restype = ctypes.c_char_p
    results = []
    for _ in range(times):
        out = memory.empty(c.calls * x.rows * c.heads * c.value_dim * 2)
        lse = memory.empty(c.calls * x.rows * c.heads * 4)
        workspace = memory.empty(sized(ctypes.byref(a)))
        a.o, a.lse = out.ctypes.data, lse.ctypes.data
        a.workspace = workspace.ctypes.data
        if few_rows is None:
            error = launch(ctypes.byref(a), None)
        else:
            of_few = library.emulator_paged_attention_of_few
            of_few.restype = ctypes.c_char_p
            error = of_few(ctypes.byref(a))
        assert error is None, error
        results.append((out, lse))
    assert memory.untouched(), "a write beside an array"
    for out, lse in results[1:]:
        assert (out == results[0][0]).all() and (lse == results[0][1]).all()
    shape = (c.calls, x.rows, c.heads)
    left = None if few_rows is None else x.rows_of_long(few_rows)
    for written in results[0]:
        by_row = written.reshape(c.calls, x.rows, -1)
        assert left is None or (by_row[left] == 0xFF).all(), "a row of others"
    x.counters = workspace[-COUNTERS.itemsize :].view(COUNTERS)[0]
    out, lse = results[0]
    x.got = (
        out.view(x.dtype).reshape(*shape, c.value_dim),
        lse.view(np.float32).reshape(shape),
    )
    return x.hold(*x.got, left)


def hold_alone(library: ctypes.CDLL, whole: Problem) -> None:
    """The call, and each sequence alone on a smaller GPU: rows have the same bits."""
    library.emulator_set_multiprocessors(20)
    run_on_host(library, whole, times=1)
    library.emulator_set_multiprocessors(3)
    assert whole.got
    for b in range(len(whole.tables)):
        call, first, end = whole.sequence_rows(b)
        if first == end:
            continue
        alone = whole.alone(b)
        run_on_host(library, alone, times=1)
        assert alone.got
        for a, part in zip(whole.got, alone.got, strict=True):
            assert a[call, first:end].tobytes() == part[0].tobytes(), b


def with_nan_in_front_of_windows(case: Case) -> Problem:
    """Some of the keys lie in a tile, and in a block, with keys that are seen."""
    x = Problem(case)
    axes = case.layout.split()
    view = x.pages.transpose([axes.index(a) for a in "BLOTHD"])
    for b, (queries, keys) in enumerate(case.sequences):
        for key in range(keys - queries - case.window[0]):
            block, slot = x.tables[b, key // 16], key % 16
            view[block, 0, :, slot] = float("nan")
    return x
