"""Calls of the C interface drawn at random, their truth in float64, and their bars.

`Problem` is a call: arrays as kernels get them, with NaN wherever nobody may look.
`truth` computes what has to come out, and what each row may be off by (judge.py). Both
work on NumPy arrays (`Host`) and on torch tensors (`Gpu`). There is no jax here.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import judge
import numpy as np

ALIGNED = 64  # positions that one segment range covers
# Relative error of a probability in float32, by the exponential and the sums.
ACCURACY = {"bfloat16": 3e-5, "float16": 3e-5, "float32": 4e-6}
# Error of dP = dO V^T, a sum in float32, in parts of the vectors' lengths.
DP_ACCURACY = 4 * 2.0**-23
# A softcap's polynomials: absolute errors of a score, in caps, and of its slope.
CAP_ACCURACY, SLOPE_ACCURACY = 1e-6, 1e-4
LARGE_SOFTCAP = 1024.0  # from here on tanh itself is computed
# What 16 bits lose of a number too small for them.
TINY = {"bfloat16": 0.0, "float16": 2.0**-24, "float32": 0.0}
# The spacing of TF32 from 1 on, times the root of two: both operands of a product are
# rounded.
TF32 = 2.0**-10 * 2.0**0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A call but for its numbers, which follow from `seed`."""

    dtype: str  # "bfloat16", "float16" or "float32"
    head_dim: int
    value_dim: int
    batch: int  # packed: sequences
    heads: int
    kv_heads: int
    q_len: int  # packed: of all sequences
    kv_len: int
    seed: int
    window: tuple[int, int] = (-1, -1)  # -1 is open; causal is (-1, 0)
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0
    shift: bool = False
    lengths: bool | str = False  # "one long": other keys are a hundredth
    packed: bool = False
    segments: str = ""  # "sorted" or "scattered"
    # Of a bias the dtype, the rows that members share, whether heads have their own;
    # of sinks the rows; of tile lists the rows, and whether heads have their own.
    bias: tuple[str, int, bool] | None = None
    sinks: int = 0
    tiles: tuple[int, bool] | None = None
    masks: int = 0  # bits of so many partial tiles, which half of the tiles have
    dropout: int = 0  # of 128 probabilities, how many become 0
    precision: str = "highest"  # of float32: or "default"
    name: str = ""  # its options, for people

    def __str__(self) -> str:
        dims = f"D{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f"/{self.value_dim}"
        return (
            f"{self.name} {self.kind} {dims} B{self.batch} "
            f"H{self.heads}/{self.kv_heads} T{self.q_len} S{self.kv_len} "
            f"seed {self.seed}"
        )

    @property
    def kind(self) -> str:
        """The dtype, and how products of it are computed where that differs."""
        return "tf32" if self.has_tf32 else self.dtype

    @property
    def has_tf32(self) -> bool:
        """Whether products are of numbers rounded to TF32."""
        return self.dtype == "float32" and self.precision == "default"

    @property
    def has_gradients(self) -> bool:
        """Whether the kernels have them: not of wide rows of float32."""
        return self.dtype != "float32" or max(self.head_dim, self.value_dim) <= 128

    @property
    def hopper_serves(self) -> bool:
        """Whether Hopper's kernels do."""
        plain = not (self.softcap or self.bias or self.tiles)
        plain &= self.scale is None or self.scale > 0
        return self.dtype != "float32" and (not self.dropout or plain)

    @property
    def members(self) -> int:
        """Batch members of the arrays."""
        return 1 if self.packed else self.batch

    @property
    def has_base(self) -> bool:
        """Whether lse comes in two parts, which half of the calls with a bias ask."""
        return self.bias is not None and self.seed % 2 == 1


# ---- where arrays lie ----------------------------------------------------------------


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 that `dtype` can hold."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest, halves to even
        x = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x.astype(np.float32 if dtype == "bfloat16" else dtype).astype(np.float64)


class Host:
    """NumPy arrays, floats as float64 that the dtype holds."""

    xp: Any = np

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        return rounded(self.rng.standard_normal(shape), dtype)

    def put(self, x: np.ndarray) -> Any:
        return x


class Gpu:
    """torch tensors of the dtypes themselves, on a GPU (or on another device)."""

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self.xp, self.device = torch, device
        if device == "cpu":  # small arrays: threads would wait for each other
            torch.set_num_threads(1)
        self.generator = torch.Generator(device)

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        torch = self.xp
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(getattr(torch, dtype))

    def put(self, x: np.ndarray) -> Any:
        return self.xp.from_numpy(np.array(x)).to(self.device)  # contiguous, its own


# ---- a problem -----------------------------------------------------------------------


def documents(cu: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each packed row (-1: none), and its position there."""
    owner, position = np.full(length, -1), np.zeros(length, np.int64)
    for i, (start, end) in enumerate(itertools.pairwise(cu)):
        owner[start:end], position[start:end] = i, np.arange(end - start)
    return owner, position


def boundaries(rng: np.random.Generator, sequences: int, length: int) -> np.ndarray:
    """Sequences of any length, also of none, and rows that none of them owns."""
    cu = np.sort(rng.integers(0, length + 1, sequences + 1))
    if rng.random() < 0.5:
        cu[0], cu[-1] = 0, length
    return cu.astype(np.int32)


def ranges(ids: np.ndarray) -> np.ndarray:
    """The smallest and largest segment of each chunk, `[B, chunks, 2]`."""
    chunks = [ids[:, i : i + ALIGNED] for i in range(0, ids.shape[1], ALIGNED)]
    return np.stack([[c.min(1), c.max(1)] for c in chunks]).transpose(2, 0, 1)


TILE_Q, TILE_KV = 128, 128
PARTIAL = 1 << 30  # KVBLOCK_ATTENTION_PARTIAL


@np.errstate(over="ignore")
def dropout_numbers(
    rows: np.ndarray, columns: np.ndarray, of_rows: np.ndarray, of_columns: np.ndarray
) -> np.ndarray:
    """What attention.h says of dropout: a number for each pair, `[B, N, T, S]`.

    Positions `[B|1, T]`, `[B|1, S]`, and words of keys `[B, N, T|1]`, `[B, N, S|1]`.
    """
    u = np.uint32
    place = lambda p: (p // 16 * 8 + p % 8)[:, None]  # noqa: E731
    half = lambda p: (p // 8 % 2).astype(u)[:, None]  # noqa: E731
    row = of_rows + u(0x9E3779B9) * place(rows).astype(u)
    column = of_columns + u(0x6A09E667) * (place(columns) // 2).astype(u)
    factor = np.where(place(columns) % 2 == 0, u(0x846CA68B), u(0xA54FF53B))
    word = (row[..., None] ^ column[:, :, None]) * u(0x7FEB352D)
    word = (word ^ word >> u(15)) * factor[:, :, None]
    word ^= word >> u(16)
    shift = 16 * half(rows)[..., None] + 8 * half(columns)[:, :, None]
    return word >> shift.astype(u) & u(127)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Which pairs of tiles are listed, and the lists."""

    listed: np.ndarray  # bool [tile_batch, tile_heads, query tiles, key tiles]
    indices: np.ndarray
    counts: np.ndarray
    indices_t: np.ndarray
    counts_t: np.ndarray
    map: np.ndarray | None = None  # of each tile its row of bits; below 0: all attend
    bits: np.ndarray | None = None  # bool [masks, TILE_Q, TILE_KV]


def draw_tiles(rng: np.random.Generator, case: Case) -> Tiles:
    """Tiles listed by chance, in any order, among them numbers that are none."""
    members, own_heads = case.tiles or (1, False)
    rows, columns = -(-case.q_len // TILE_Q), -(-case.kv_len // TILE_KV)
    lead = members, case.heads if own_heads else 1, rows, columns
    listed = rng.random(lead) < 0.6

    def lists(listed: np.ndarray, none: int) -> tuple[np.ndarray, np.ndarray]:
        # Without bits an entry from PARTIAL on is one that is none, too.
        skipped = [none] if case.masks else [none, PARTIAL]
        length = listed.shape[-1] + len(skipped)
        indices = np.full((*listed.shape[:-1], length), 0, np.int32)
        counts = np.zeros(listed.shape[:-1], np.int32)
        for at in np.ndindex(counts.shape):
            found = rng.permutation([*np.flatnonzero(listed[at]), *skipped])
            indices[at][: len(found)] = found
            counts[at] = len(found)
        return indices, counts

    forward, backward = lists(listed, -1), lists(listed.swapaxes(2, 3), rows + 3)
    if not case.masks:
        return Tiles(listed, *forward, *backward)
    partial = rng.integers(-case.masks, case.masks, lead, np.int32)
    flag_partial(forward[0], partial)
    flag_partial(backward[0], partial.swapaxes(2, 3))
    bits = rng.random((case.masks, TILE_Q, TILE_KV)) < rng.random((case.masks, 1, 1))
    return Tiles(listed, *forward, *backward, np.maximum(partial, -1), bits)


def words(bits: np.ndarray) -> np.ndarray:
    """Bits `[.., n]` as uint32 `[.., n / 32]`, the first one lowest (in an int32)."""
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32).view(np.int32)


def flag_partial(indices: np.ndarray, partial: np.ndarray) -> None:
    """Entries of tiles that have bits say so."""
    for at in np.ndindex(indices.shape[:-1]):
        row, entries = partial[at], indices[at]
        known = (entries >= 0) & (entries < len(row))
        entries[known] += np.where(row[entries[known]] >= 0, PARTIAL, 0)


class Problem:
    """A case with its numbers.

    given: what a launcher gets, by the names of `kvblock_attention`, floats of the
    case's dtype. exact: float64 of q, k, v, d_o, bias and sinks, where 0 stands for
    what nobody may look at. d_lse is the gradient of lse, float64.
    """

    def __init__(self, case: Case, place: Any) -> None:
        self.case, self.place = case, place
        place.seed(case.seed)
        rng = np.random.default_rng(case.seed)
        self.scale = case.head_dim**-0.5 if case.scale is None else case.scale
        self.given: dict[str, Any] = {}
        self.exact: dict[str, Any] = {}
        put, c, xp = place.put, case, place.xp
        self.integers: dict[str, np.ndarray] = {}
        if c.packed:
            for name, length in (("cu_q", c.q_len), ("cu_kv", c.kv_len)):
                self.integers[name] = boundaries(rng, c.batch, length)
        if c.lengths:
            for name, length in (("q_lens", c.q_len), ("kv_lens", c.kv_len)):
                least, most = 0, length
                if c.lengths == "one long":  # and it has all its queries
                    least, most = (
                        (length, length) if name == "q_lens" else (0, length // 100)
                    )
                drawn = rng.integers(least, most + 1, c.batch, np.int32)
                drawn[0] = length
                self.integers[name] = rng.permutation(drawn)
        if c.shift:
            span = max(c.q_len, c.kv_len)
            drawn = rng.integers(-span, span + 1, c.batch, np.int32)
            self.integers["shift"] = drawn
        if c.segments:
            for name, length in (("q_segments", c.q_len), ("kv_segments", c.kv_len)):
                ids = rng.integers(0, 4, (c.batch, length), np.int32)
                ids = np.sort(ids, 1) if c.segments == "sorted" else ids
                self.integers[name] = ids
        self.tiles = draw_tiles(rng, case) if c.tiles is not None else None
        self.given |= {name: put(x) for name, x in self.integers.items()}
        for side in ("q", "kv") if c.segments else ():
            ids = self.integers[f"{side}_segments"]
            self.given[f"{side}_segment_ranges"] = put(ranges(ids))
        if self.tiles is not None:
            for name in ("indices", "counts", "indices_t", "counts_t"):
                self.given[f"tile_{name}"] = put(getattr(self.tiles, name))
            if self.tiles.bits is not None:
                self.given["tile_map"] = put(self.tiles.map)
                self.given["tile_masks"] = put(words(self.tiles.bits))

        self.rows, self.keys, alive, exists = self._positions()
        self.alive, self.exists = put(alive), put(exists)
        m, n, k = c.members, c.heads, c.kv_heads
        shapes = {
            "q": (m, c.q_len, n, c.head_dim),
            "k": (m, c.kv_len, k, c.head_dim),
            "v": (m, c.kv_len, k, c.value_dim),
            "d_o": (m, c.q_len, n, c.value_dim),
        }
        for name, shape in shapes.items():
            x = place.normal(c.dtype, *shape)
            there = self.exists if name in "kv" else self.alive
            there = there[:, :, None, None]
            self.given[name] = xp.where(there, x, float("nan"))
            self.exact[name] = judge.f64(xp.where(there, x, 0.0))
        if c.bias is not None:
            dtype, members, own_heads = c.bias
            lead = members, n if own_heads else 1
            self.given["bias"] = place.normal(dtype, *lead, c.q_len, c.kv_len)
            self.exact["bias"] = judge.f64(self.given["bias"])
        if c.sinks:
            self.given["sinks"] = place.normal("float32", c.sinks, n)
            self.exact["sinks"] = judge.f64(self.given["sinks"])
        self.d_lse = judge.f64(place.normal("float32", m, n, c.q_len))
        if c.dropout:
            self.dropout_keys = rng.integers(0, 2**32, (c.batch, n, 2), np.uint32)
            self.given["dropout_keys"] = put(self.dropout_keys.view(np.int32))

    def _positions(self) -> tuple[np.ndarray, ...]:
        """Of each row and key its place in the band; whether it takes part."""
        c = self.case
        shift = self.integers.get("shift", np.zeros(c.batch, np.int32))
        if c.packed:
            q_owner, rows = documents(self.integers["cu_q"], c.q_len)
            kv_owner, keys = documents(self.integers["cu_kv"], c.kv_len)
            self.owners = q_owner[None], kv_owner[None]
            rows = rows + np.where(q_owner >= 0, shift[q_owner], 0)
            return rows[None], keys[None], (q_owner >= 0)[None], (kv_owner >= 0)[None]
        rows = np.arange(c.q_len) + shift[:, None]
        keys = np.broadcast_to(np.arange(c.kv_len), (c.batch, c.kv_len))
        full = [np.full(c.batch, n) for n in (c.q_len, c.kv_len)]
        q_lens = self.integers.get("q_lens", full[0])
        kv_lens = self.integers.get("kv_lens", full[1])
        alive = np.arange(c.q_len) < q_lens[:, None]
        return rows, keys, alive, np.arange(c.kv_len) < kv_lens[:, None]

    def kept(self) -> Any:
        """What dropout multiplies probabilities by, `[members, N, T, S]`."""
        c, keys = self.case, self.dropout_keys
        if not c.packed:
            rows, columns = (np.arange(n)[None] for n in (c.q_len, c.kv_len))
            of_rows = of_columns = keys[:, :, None]
        else:
            rows, columns = (
                documents(self.integers[f"cu_{side}"], length)[1][None]
                for side, length in (("q", c.q_len), ("kv", c.kv_len))
            )
            of_rows, of_columns = (keys[x].swapaxes(1, 2) for x in self.owners)
        bits = dropout_numbers(rows, columns, of_rows[..., 0], of_columns[..., 1])
        return self.place.put((bits >= c.dropout) * (128 / (128 - c.dropout)))

    def _bits(self) -> np.ndarray:
        """Those of every tile side by side, as `listed` lies."""
        tiles = np.where(
            self.tiles.map[..., None, None] < 0, True, self.tiles.bits[self.tiles.map]
        )
        lead, (rows, columns) = tiles.shape[:2], tiles.shape[2:4]
        flat = tiles.swapaxes(3, 4)
        return flat.reshape(*lead, rows * TILE_Q, columns * TILE_KV)

    def mask(self) -> Any:
        """Who attends to whom: bool `[members, 1 or heads, T, S]`."""
        c, put = self.case, self.place.put
        ahead = put(self.keys)[:, None, :] - put(self.rows)[:, :, None]
        mask = self.alive[:, :, None] & self.exists[:, None, :]
        left, right = c.window
        if left >= 0:
            mask = mask & (ahead >= -left)
        if right >= 0:
            mask = mask & (ahead <= right)
        ids = None
        if c.packed:
            ids = tuple(put(x) for x in self.owners)
        elif c.segments:
            ids = self.given["q_segments"], self.given["kv_segments"]
        if ids is not None:
            mask = mask & (ids[0][:, :, None] == ids[1][:, None, :])
        mask = mask[:, None]
        if self.tiles is not None:
            listed = self.tiles.listed.repeat(TILE_Q, 2).repeat(TILE_KV, 3)
            if self.tiles.bits is not None:
                listed = listed & self._bits()
            listed = listed.repeat(c.batch // len(listed), 0)
            mask = mask & put(listed[:, :, : c.q_len, : c.kv_len])
        return mask


# ---- the truth -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Truth:
    """What has to come out, by name, and its bars; rows are the last axis.

    out, dq `[M, T, N, D]`, dk, dv `[M, S, K, D]`, lse `[M, N, T, 1]`, dbias as bias.
    What the backward passes are given: lse and delta, `[M, N, T]`.
    """

    want: dict[str, Any]
    bars: dict[str, Any]
    lse: Any
    delta: Any


@np.errstate(invalid="ignore", divide="ignore")
def truth(x: Problem, backward: bool = True) -> Truth:
    """Everything in float64, with gradients by hand."""
    c, xp = x.case, x.place.xp
    einsum, where = xp.einsum, xp.where
    m, t, s, n, heads = c.members, c.q_len, c.kv_len, c.heads, c.kv_heads
    group = n // heads
    grouped = (m, t, heads, group)
    q = x.exact["q"].reshape(*grouped, c.head_dim)
    k, v = x.exact["k"], x.exact["v"]

    def spread(a: Any) -> Any:
        """[1 or M, 1 or N, T, S] as [.., KV heads, group, T, S]."""
        lead = a.shape[:2]
        return a.reshape(lead[0], *((1, 1) if lead[1] == 1 else (heads, group)), t, s)

    def by_member(a: Any) -> Any:
        """A row for each batch member of what members share."""
        return a[[b * a.shape[0] // m for b in range(m)]]

    mask = spread(x.mask())
    product = x.scale * einsum("btkgd,bskd->bkgts", q, k)
    bent = xp.tanh(product / c.softcap) if c.softcap else None
    score = product if bent is None else c.softcap * bent
    if c.bias is not None:
        score = score + spread(by_member(x.exact["bias"]))
    score = where(mask, score, -np.inf)
    top = xp.amax(score, axis=-1, keepdims=True) if s else score.sum(-1)[..., None] * 0
    if c.sinks:
        sinks = by_member(x.exact["sinks"]).reshape(m, heads, group, 1, 1)
        top = where(top > sinks, top, sinks)
    top = where(xp.isneginf(top), 0.0, top)
    p = xp.exp(score - top)
    total = p.sum(-1)[..., None]
    if c.sinks:
        total = total + xp.exp(sinks - top)
    empty = ~x.alive[:, None, None, :, None] | (total == 0)
    total = where(empty, 1.0, total)
    p = where(empty, 0.0, p / total)
    kept = x.kept().reshape(m, heads, group, t, s) if c.dropout else 1.0
    dropped = p * kept
    lse = where(empty, -np.inf, xp.log(total) + top).reshape(m, n, t)
    out = einsum("bkgts,bske->btkge", dropped, v)

    # What float32 costs: by the products that a score sums up, and by a softcap.
    length = lambda a: xp.sqrt((a * a).sum(-1))  # noqa: E731
    reach = largest(length(k)) * abs(x.scale)
    sums = (reach * length(x.exact["q"])).swapaxes(1, 2)  # [M, N, T]
    capped = 0.0
    if c.softcap:
        large = c.softcap >= LARGE_SOFTCAP
        capped = CAP_ACCURACY * (largest(sums) if large else c.softcap)
    scores_off: Any = 0.0  # `[M, N, T, 1]` where operands of products are rounded
    if c.has_tf32 and s:
        squares = xp.amax(einsum("btkgd,bskd->bkgts", q * q, k * k), axis=-1)
        scores_off = 2 * TF32 * abs(x.scale) * xp.sqrt(squares).reshape(m, n, t, 1)
    accuracy = ACCURACY[c.dtype] + 2 * judge.EPS["float32"] * largest(sums) + 2 * capped
    accuracy += largest(scores_off) if c.has_tf32 and s else 0.0
    # With dropout, sums are made larger in the end, and what was lost with them.
    tiny = TINY[c.dtype] * 128 / (128 - c.dropout)
    pairs = mask * where(empty, 0.0, 1.0)

    def bar(want: Any, terms: Any, noise: Any, count: Any, size: float) -> Any:
        noise = accuracy * noise * size + tiny * (xp.sqrt(count) * size + 0.5) + 1e-30
        if c.has_tf32:
            noise = noise + 2 * TF32 * terms
        return judge.bar_of_terms(want, terms, noise, c.dtype)

    flat = lambda a: a.reshape(m, t, n, -1)  # noqa: E731
    rows = lambda a: flat(einsum("bkgt->btkg", a.sum(-1)))  # noqa: E731
    columns = lambda a: einsum("bkgts->bsk", a)[..., None]  # noqa: E731
    root = lambda what, a, b: xp.sqrt(einsum(what, a * a, b * b))  # noqa: E731
    want = {"out": flat(out), "lse": lse[..., None]}
    off = capped + scores_off
    bars = {"lse": judge.bar_of_lse(want["lse"], sums[..., None]) + off}
    terms = flat(root("bkgts,bske->btkge", dropped, v))
    bars["out"] = bar(want["out"], terms, rows(dropped), rows(pairs), largest(v))
    if not backward:
        return Truth(want, bars, lse, lse)

    d_o = x.exact["d_o"].reshape(*grouped, c.value_dim)
    dp = einsum("btkge,bske->bkgts", d_o, v) * kept
    delta = (x.exact["d_o"] * want["out"]).sum(-1).swapaxes(1, 2) - x.d_lse
    d_row = delta.reshape(m, heads, group, t, 1)
    d_score = where(mask, p * (dp - d_row), 0.0)
    # Of the two that may cancel, and of the sum of products that dp is.
    reach = length(x.exact["d_o"]).swapaxes(1, 2).reshape(d_row.shape)
    reach = reach * largest(length(v)) * (DP_ACCURACY / accuracy)
    if c.has_tf32 and s:
        squares = xp.amax(einsum("btkge,bske->bkgts", d_o * d_o, v * v), axis=-1)
        reach = reach + 2 * TF32 / accuracy * xp.sqrt(squares)[..., None]
    size = p * (abs(dp) + abs(d_row) + reach)
    # Each dS is rounded; before that, where it goes by shared memory, its P.
    losses = pairs * (1 + where(mask, dp - d_row, 0.0) ** 2)
    if bent is not None:
        slope = where(mask, 1 - bent * bent, 0.0)
        # The slope's own error, where accuracy is that of a probability.
        ds, weight = d_score * slope, size * (slope + SLOPE_ACCURACY / accuracy)
    else:
        ds, weight = d_score, size
    scale = abs(x.scale)
    want["dq"] = flat(x.scale * einsum("bkgts,bskd->btkgd", ds, k))
    terms = scale * flat(root("bkgts,bskd->btkgd", ds, k))
    bars["dq"] = bar(want["dq"], terms, rows(weight), rows(losses), scale * largest(k))
    want["dk"] = x.scale * einsum("bkgts,btkgd->bskd", ds, q)
    terms = scale * root("bkgts,btkgd->bskd", ds, q)
    counts = columns(losses)
    bars["dk"] = bar(want["dk"], terms, columns(weight), counts, scale * largest(q))
    want["dv"] = einsum("bkgts,btkge->bske", dropped, d_o)
    terms = root("bkgts,btkge->bske", dropped, d_o)
    bars["dv"] = bar(want["dv"], terms, columns(dropped), columns(pairs), largest(d_o))
    if c.bias is not None:
        dtype, members, own_heads = c.bias

        def share(a: Any) -> Any:
            a = a.reshape(members, m // members, n, t, s).sum(1)
            return a if own_heads else a.sum(1)[:, None]

        want["dbias"] = share(d_score)
        rounding = judge.EPS[dtype] * abs(want["dbias"])
        bars["dbias"] = accuracy * share(size) + rounding + tiny + 1e-30
    return Truth(want, bars, lse, delta)


def largest(x: Any) -> float:
    return float(abs(x).max()) if 0 not in x.shape else 0.0
