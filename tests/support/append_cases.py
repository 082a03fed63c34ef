"""Calls of `rope_append` and `append_kv`, their arrays, and the truth in float64.

The truth is written in loops over tokens and heads, and shares no code with the
package. The tests of the package, of the kernel on the emulator, and of the kernel on
a GPU draw the same calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from model import CONTIGUOUS, LAYERED, make_pool, random_bits, read_pool

import jax_kvblock as kv

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SLACK = 4e-6  # of a row's largest number: what float32 may cost on the way


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. `stored` is the pool's dtype, that of q unless told."""

    tokens: int = 9
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dtype: str = "float32"
    stored: str | None = None
    kind: tuple[str, bool] = ("NHD", True)  # layout, one array or one for each layer
    layers: int = 3
    layer: int | None = 1
    traced: bool = False
    blocks: int = 7
    block_size: int = 4
    outer: int = 2
    angles: str | None = "theta"  # inv_freq, table, rows, or None: nothing turns
    rotary_dim: int | None = None
    interleaved: bool = False
    norms: str | None = None  # the dtype of the weights
    scale: str | None = None  # tensor, head, computed, computed for one layer
    zero_tail: bool = False
    most: int = 100  # positions are below
    joined: bool = False  # q, k and v in one array
    padding: int = 0  # by the C interface: elements behind each token's row of q
    wild: bool = False  # NaN, infinities and large numbers among the rows

    def replaced(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


class Drawn:
    """Its arrays, in NumPy."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        self.case = c = case
        dtype = jnp.dtype(c.dtype)
        self.stored = jnp.dtype(c.stored or c.dtype)
        lead = (c.layers,) if c.layer is None else ()

        def rows(*shape: int) -> np.ndarray:
            x = rng.standard_normal(shape).astype(np.float32)
            if c.wild:
                odd = rng.choice([np.nan, np.inf, -np.inf, 0, 1e30, -3e38], shape)
                x = np.where(rng.random(shape) < 0.1, odd, x)
            with np.errstate(over="ignore"):
                return x.astype(dtype)

        self.q = rows(c.tokens, c.heads, c.dim)
        self.k = rows(*lead, c.tokens, c.kv_heads, c.dim)
        self.v = rows(*lead, c.tokens, c.kv_heads, c.dim) if c.outer == 2 else None
        if c.tokens:
            self.k[..., 0, 0, :] = 0  # a row of zeros has a scale, too
        dims = (c.layers, c.outer, c.block_size, c.kv_heads, c.dim)
        self.before = random_bits(rng, (c.blocks, *dims), self.stored)
        # Places of their own, and some that are dropped.
        size = c.blocks * c.block_size
        self.slots = rng.permutation(size)[: c.tokens].astype(np.int32)
        self.slots = np.resize(self.slots, c.tokens)
        bad = [-1, size, 2**31 - 1, -(2**31), -7]
        beyond = max(0, c.tokens - size)
        self.slots[len(self.slots) - beyond :] = -1
        for i, slot in zip(range(2, c.tokens, 3), bad, strict=False):
            self.slots[i] = slot
        self.positions = rng.integers(0, c.most, c.tokens).astype(np.int32)
        if c.tokens:
            self.positions[-1] = c.most - 1
        self.rotary = 0 if c.angles is None else c.rotary_dim or c.dim
        half = self.rotary // 2
        self.inv_freq = np.float32(
            1e4 ** -(np.arange(half, dtype=np.float64) / max(half, 1))
        )
        count = {"rows": c.tokens, "table": c.most}.get(c.angles or "", 0)
        angle = np.arange(count)[:, None] * self.inv_freq.astype(np.float64)
        self.table = np.float32(np.concatenate([np.cos(angle), np.sin(angle)], 1))
        self.q_norm, self.k_norm = (
            rng.uniform(0.5, 2, c.dim).astype(jnp.dtype(c.norms or "float32"))
            for _ in range(2)
        )
        self.k_scale, self.v_scale = np.float32(rng.uniform(0.01, 0.05, 2))
        if c.scale == "head":
            self.k_scale, self.v_scale = np.float32(
                rng.uniform(0.01, 0.05, (2, c.kv_heads))
            )
        shape = (c.layers, c.blocks, c.block_size, c.kv_heads)
        shape = shape[1:] if c.scale == "computed for one layer" else shape
        self.scales_before = [
            rng.random(shape).astype(np.float32) for _ in range(c.outer)
        ]

    @property
    def computed(self) -> bool:
        return (self.case.scale or "").startswith("computed")

    # ---- the call of the package -----------------------------------------------------

    def pool(self) -> kv.KVPool:
        return make_pool(self.before, *self.case.kind)

    def scales(self) -> kv.KVScales:
        return kv.KVScales(*(jnp.asarray(a) for a in self.scales_before))

    def storing(self) -> dict[str, Any]:
        c = self.case
        given: dict[str, Any] = {"zero_tail": c.zero_tail}
        if self.computed:
            given["scales"] = self.scales()
        elif c.scale:
            given["k_scale"] = self.k_scale
            if c.outer == 2:
                given["v_scale"] = self.v_scale
        return given

    def rotation(self) -> dict[str, Any]:
        c = self.case
        given: dict[str, Any] = {"interleaved": c.interleaved}
        if c.angles == "theta":
            given |= {"theta": 10000, "rotary_dim": c.rotary_dim}
        elif c.angles == "inv_freq":
            given["inv_freq"] = self.inv_freq
        elif c.angles in ("table", "rows"):
            given["cos_sin"] = self.table
        else:
            given["rotary_dim"] = 0
        if c.norms:
            given |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return given

    @property
    def layer(self) -> Any:
        return jnp.int32(self.case.layer) if self.case.traced else self.case.layer

    def joined(self) -> np.ndarray:
        """q, k and v in one array, one head after the other."""
        return np.concatenate([self.q, self.k, self.v], 1)

    def tokens(self) -> dict[str, Any]:
        """q, k and v as they are passed."""
        if self.case.joined:
            return {"q": self.joined(), "k": None, "v": None}
        return {"q": self.q, "k": self.k, "v": self.v}

    def rope_append(self, **changes: Any) -> tuple[Any, ...]:
        """q, the pool and the scales, None where there are none."""
        given = {
            **self.tokens(),
            "pool": self.pool(),
            "layer": self.layer,
            "slots": self.slots,
            "positions": None if self.case.angles == "rows" else self.positions,
            **self.storing(),
            **self.rotation(),
        }
        made = kv.rope_append(**given | changes)
        return made if self.computed else (*made, None)

    def append_kv(self, **changes: Any) -> tuple[Any, ...]:
        """None, the pool and the scales."""
        given = {
            "pool": self.pool(),
            "layer": self.layer,
            "k": self.k,
            "v": self.v,
            "slots": self.slots,
            **self.storing(),
        }
        made = kv.append_kv(**given | changes)
        return (None, *made) if self.computed else (None, made, None)

    # ---- the truth -------------------------------------------------------------------

    def turned(self, x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        """Rows `[tokens, heads, D]` in float64, normed and rotated."""
        c = self.case
        y = x.astype(np.float64)
        if c.norms:
            mean = np.mean(y * y, -1, keepdims=True)
            y = y / np.sqrt(mean + 1e-6) * norm.astype(np.float64)
        half = self.rotary // 2
        for token in range(len(y)):
            angle = self.positions[token] * self.inv_freq.astype(np.float64)
            cos, sin = np.cos(angle), np.sin(angle)
            if c.angles in ("table", "rows"):
                row = self.table[
                    token if c.angles == "rows" else self.positions[token]
                ].astype(np.float64)
                cos, sin = row[:half], row[half:]
            for i in range(half):
                pair = [2 * i, 2 * i + 1] if c.interleaved else [i, i + half]
                a, b = y[token, :, pair].copy()
                y[token, :, pair[0]] = a * cos[i] - b * sin[i]
                y[token, :, pair[1]] = b * cos[i] + a * sin[i]
        return y

    def hold(self, q: Any, pool: Any, scales: Any, turns: bool = True) -> None:
        """q, the pool's blocks and the arrays of scales, against the truth."""
        c = self.case
        if q is not None:
            assert q.dtype == jnp.dtype(c.dtype) and q.shape == self.q.shape
            assert_near(np.asarray(q), self.turned(self.q, self.q_norm), 1.0)
        blocks = pool if isinstance(pool, np.ndarray) else read_pool(pool)
        want, want_scales = self.before.copy(), [a.copy() for a in self.scales_before]
        layers = range(c.layers) if c.layer is None else [c.layer]
        places = self.places()
        first = [block for block, offset in places.values() if offset == 0]
        for layer in layers:
            if not 0 <= layer < c.layers:
                continue
            for outer, x in enumerate((self.k, self.v)[: c.outer]):
                x = x[layer] if c.layer is None else x
                y = x.astype(np.float64)
                if outer == 0 and turns:
                    y = self.turned(x, self.k_norm)
                of = want_scales[outer]
                of = of[layer] if of.ndim == 4 else of
                if c.zero_tail:
                    want[first, layer, outer] = 0
                    of[first] = 0
                for token, (block, offset) in places.items():
                    got = blocks[block, layer, outer, offset]
                    scale = self.scale_of(outer)
                    if self.computed:
                        told = scales[outer]
                        told = told[layer] if told.ndim == 4 else told
                        scale = np.asarray(told)[block, offset]
                        assert_scales(scale, y[token], self.stored)
                        of[block, offset] = scale
                    assert_near(
                        got, y[token], np.broadcast_to(scale, c.kv_heads)[:, None]
                    )
                    want[block, layer, outer, offset] = got
        # Whatever else the pool holds is what it held, bit for bit.
        np.testing.assert_array_equal(blocks.view(np.uint8), want.view(np.uint8))
        for got, all_ in zip(scales or [], want_scales, strict=False):
            np.testing.assert_array_equal(got, all_)

    def places(self) -> dict[int, tuple[int, int]]:
        """Block and offset of each token that is written."""
        size = self.case.block_size
        inside = [
            (t, divmod(int(slot), size))
            for t, slot in enumerate(self.slots)
            if 0 <= slot < self.case.blocks * size
        ]
        return dict(inside)

    def scale_of(self, outer: int) -> Any:
        if not self.case.scale:
            return np.float32(1)
        return (self.k_scale, self.v_scale)[outer]


def assert_scales(scale: np.ndarray, y: np.ndarray, dtype: Any) -> None:
    """Each head's largest number by the dtype's."""
    size = np.abs(np.where(np.isnan(y), 0, y)).max(-1)
    size = np.minimum(size, np.finfo(np.float32).max)
    want = np.maximum(size / LARGEST[dtype.name], 2.0**-126)
    np.testing.assert_allclose(scale, want, rtol=SLACK)


def assert_near(got: np.ndarray, y: np.ndarray, scale: Any) -> None:
    """`got` is y / scale, rounded to nearest but for what float32 costs on the way."""
    dtype = got.dtype
    with np.errstate(all="ignore"):
        want = y / np.asarray(scale, np.float64)
    finite = got.astype(np.float64)
    limit = LARGEST.get(dtype.name)
    if dtype == np.int8:
        want = np.rint(np.clip(np.where(np.isnan(want), 0, want), -128, 127))
        exact = np.clip(y / np.asarray(scale, np.float64), -128, 127)
        exact = np.where(np.isnan(exact), 0, exact)
    else:
        if limit is not None:
            want = np.clip(want, -limit, limit)
        exact, want = want, nearest(want, dtype)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(finite), nan)
    with np.errstate(all="ignore"):
        largest = np.where(np.isfinite(exact), np.abs(exact), 0).max(-1, keepdims=True)
        bar = np.abs(want - exact) + SLACK * largest + 1e-30
        error = np.abs(finite - exact)
    same = (finite == want) | nan  # infinities, too
    assert np.all(same | (error <= bar)), (
        f"{dtype}: off by {np.max(np.where(same, 0, error - bar))}"
    )


def nearest(x: np.ndarray, dtype: Any) -> np.ndarray:
    """The nearest number of a dtype, in float64."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(dtype).astype(np.float64)


POOLS = [(name, True) for name in CONTIGUOUS] + [(name, False) for name in LAYERED]
BASE = Case()
FP8 = Case(dtype="bfloat16", stored="float8_e4m3fn", scale="tensor")
CASES = {
    "halves": BASE,
    "pairs": BASE.replaced(interleaved=True),
    "a part": BASE.replaced(rotary_dim=8, dim=20),
    "a part, pairs": BASE.replaced(rotary_dim=6, dim=16, interleaved=True),
    "bfloat16": BASE.replaced(dtype="bfloat16", dim=64),
    "float16": BASE.replaced(dtype="float16", dim=64, interleaved=True),
    "d128": BASE.replaced(dtype="bfloat16", dim=128, heads=8),
    "d256, a part": BASE.replaced(dtype="bfloat16", dim=256, rotary_dim=64),
    "d80": BASE.replaced(dtype="float16", dim=80, heads=5, kv_heads=5),
    "d6": BASE.replaced(dtype="bfloat16", dim=6, heads=3, kv_heads=3),
    "d576": BASE.replaced(dtype="bfloat16", dim=576, rotary_dim=64, kv_heads=1),
    "d500, float32": BASE.replaced(dim=500, heads=2, interleaved=True),
    "inverse frequencies": BASE.replaced(angles="inv_freq", rotary_dim=12),
    "a table": BASE.replaced(angles="table", dtype="bfloat16"),
    "a row each": BASE.replaced(angles="rows", rotary_dim=10, interleaved=True),
    "nothing turns": BASE.replaced(angles=None, norms="float32"),
    "norms": BASE.replaced(norms="float32", dtype="bfloat16", dim=64),
    "norms of 16 bits": BASE.replaced(norms="bfloat16", dtype="bfloat16", dim=96),
    "norms of other 16 bits": BASE.replaced(norms="float16", dtype="bfloat16"),
    "far positions": BASE.replaced(most=2**20, dim=64, angles="inv_freq"),
    "farther positions": BASE.replaced(most=2**24, dim=64, dtype="bfloat16"),
    "e4m3": FP8,
    "e4m3 by heads": FP8.replaced(scale="head", kind=("HND", True), dim=64),
    "e4m3 computed": FP8.replaced(scale="computed", dim=128, norms="float32"),
    "e4m3 computed for one layer": FP8.replaced(
        scale="computed for one layer", kind=("HND", False), dtype="float32"
    ),
    "e5m2": FP8.replaced(stored="float8_e5m2", dtype="float16"),
    "e5m2 computed": FP8.replaced(
        stored="float8_e5m2", scale="computed", kind=("universal", True)
    ),
    "int8": FP8.replaced(stored="int8", scale="head", dtype="float32"),
    "int8 computed": FP8.replaced(stored="int8", scale="computed", interleaved=True),
    "wild numbers": BASE.replaced(angles=None, wild=True, dtype="bfloat16"),
    "wild numbers, e4m3": FP8.replaced(angles=None, wild=True, dtype="float32"),
    "wild numbers, e5m2 computed": FP8.replaced(
        angles=None, wild=True, stored="float8_e5m2", scale="computed"
    ),
    "wild numbers, int8": FP8.replaced(angles=None, wild=True, stored="int8"),
    "zeros behind": BASE.replaced(zero_tail=True, tokens=12),
    "zeros behind, 8 bits": FP8.replaced(
        zero_tail=True, scale="computed", tokens=12, kind=("HND", True)
    ),
    "zeros behind, long blocks": BASE.replaced(
        zero_tail=True, block_size=70, blocks=4, tokens=150
    ),
    "zeros behind, blocks of 1": BASE.replaced(zero_tail=True, block_size=1),
    "no tokens": BASE.replaced(tokens=0),
    "joined": BASE.replaced(joined=True),
    "joined, d64": BASE.replaced(
        joined=True, dtype="bfloat16", heads=9, kv_heads=3, dim=64, angles="rows"
    ),
    "joined, d6": BASE.replaced(
        joined=True, dtype="float16", heads=3, kv_heads=3, dim=6, norms="float16"
    ),
    "joined, e4m3": FP8.replaced(
        joined=True, norms="float32", scale="computed", zero_tail=True, traced=True
    ),
    "joined, as they are": BASE.replaced(
        joined=True, angles=None, kind=("HND", False), wild=True, dtype="bfloat16"
    ),
    "joined, d64, padded": BASE.replaced(
        joined=True, dtype="bfloat16", dim=64, padding=4
    ),
    "joined, d64, padded by 8": BASE.replaced(
        joined=True, dtype="bfloat16", dim=64, padding=8, angles="rows"
    ),
    "queries padded": BASE.replaced(dtype="bfloat16", dim=64, padding=4),
    "joined, no tokens": BASE.replaced(joined=True, tokens=0),
    "one KV head": BASE.replaced(heads=16, kv_heads=1, dtype="bfloat16"),
    "many heads": BASE.replaced(heads=72, kv_heads=24, tokens=3),
    "a traced layer": BASE.replaced(traced=True),
    "a traced layer of 8 bits": FP8.replaced(traced=True, scale="computed", layer=2),
    "a layer beyond": BASE.replaced(traced=True, layer=3, zero_tail=True),
    "a layer beyond, scales of one": FP8.replaced(
        traced=True, layer=3, scale="computed for one layer", zero_tail=True
    ),
    "a layer below": FP8.replaced(traced=True, layer=-1, scale="computed"),
    **{
        f"{layout}, {'one array' if whole else 'by layers'}, {stored}": Case(
            kind=(layout, whole), stored=stored, scale=scale, dtype="bfloat16",
            zero_tail=True, dim=32, traced=i % 2 == 0, tokens=12,
        )
        for i, (layout, whole) in enumerate(POOLS)
        for stored, scale in ((None, None), ("float8_e4m3fn", "computed"))
    },
}  # fmt: skip
# What `append_kv` takes: no q, no rotation; all layers, one of K and V.
KEPT = {
    "e4m3": FP8,
    "e5m2 by heads": FP8.replaced(stored="float8_e5m2", scale="head"),
    "all layers": FP8.replaced(layer=None, scale="computed", zero_tail=True),
    "all layers, by layers": FP8.replaced(
        layer=None, scale="head", kind=("HND", False), zero_tail=True
    ),
    "joined, all layers": FP8.replaced(
        layer=None, joined=True, scale="head", padding=3
    ),
    "combined": FP8.replaced(outer=1, scale="computed", dim=576, kv_heads=1),
    "combined, all layers": FP8.replaced(outer=1, layer=None, stored="int8"),
    "wild numbers": FP8.replaced(wild=True, dtype="float16", scale="computed"),
    "bfloat16, zeros behind": BASE.replaced(dtype="bfloat16", zero_tail=True),
    "float32, all layers, zeros behind": BASE.replaced(layer=None, zero_tail=True),
    "a traced layer, by layers": FP8.replaced(
        traced=True, kind=("NHD", False), zero_tail=True, scale="computed", tokens=14
    ),
}
# So many that a CTA has several tokens, and the last one fewer, or rows that a group of
# lanes takes one after the other.
PROMPT = BASE.replaced(tokens=4099, heads=3, kv_heads=1, blocks=1030, layers=1, layer=0)
MANY = {
    "four tokens a CTA": PROMPT.replaced(dtype="bfloat16", dim=64),
    "pairs, computed, zeros behind": PROMPT.replaced(
        dim=24, interleaved=True, dtype="bfloat16", stored="float8_e4m3fn",
        scale="computed", zero_tail=True, norms="float32",
    ),
    "an angle each, zeros behind": PROMPT.replaced(
        dim=20, angles="rows", rotary_dim=10, zero_tail=True, block_size=8
    ),
    "long rows": PROMPT.replaced(
        tokens=2051, dim=1000, dtype="bfloat16", rotary_dim=20, interleaved=True
    ),
    "long blocks, joined": PROMPT.replaced(
        dtype="float16", dim=16, block_size=2500, blocks=2, zero_tail=True, joined=True
    ),
    "a few rows a group": BASE.replaced(
        tokens=600, heads=72, kv_heads=24, dim=64, dtype="bfloat16", blocks=200,
        norms="float32",
    ),
    "a few rows a group, zeros behind": BASE.replaced(
        tokens=600, heads=40, kv_heads=40, dim=32, dtype="bfloat16", blocks=200,
        zero_tail=True, stored="int8", scale="head", angles=None,
    ),
}  # fmt: skip
MANY_KEPT = {
    "many tokens of all layers": FP8.replaced(
        tokens=1501, layer=None, scale="computed", zero_tail=True, blocks=400, dim=32
    ),
}
