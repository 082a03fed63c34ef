"""`paged_attention` against float64, row by row, whatever tables and lengths are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import (
    BlockSpec,
    KVPool,
    KVScales,
    append_kv,
    flash_attention,
    merge_attention,
    paged_attention,
)

BARS = {"float64": 1e-13, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged call: for each sequence (queries, keys)."""

    sequences: tuple[tuple[int, int], ...] = ((1, 37), (6, 20), (3, 3), (1, 64))
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    ranges: bool = False
    tree: int = 0  # words of bits


class Drawn:
    """Its arrays. Slots and blocks that nobody may read are NaN."""

    def __init__(
        self, case: Case, rng: np.random.Generator, implementation: str = "xla"
    ) -> None:
        self.case = c = case
        self.implementation = implementation
        dtype = jnp.dtype(c.dtype)
        self.kv_lens = np.array([n for _, n in c.sequences], np.int32)
        lens = [n for n, _ in c.sequences]
        self.starts = np.cumsum([0, *lens]).astype(np.int32)
        pages = -(-self.kv_lens // c.block_size)
        blocks = int(pages.sum()) + 3
        order = iter(rng.permutation(blocks))
        self.tables = np.full((len(lens), max(int(pages.max()), 1)), -1, np.int32)
        self.k = np.full((blocks, c.block_size, c.kv_heads, c.dim), np.nan, dtype)
        self.v = np.full((*self.k.shape[:3], c.value_dim), np.nan, dtype)
        self.keys, self.values = [], []
        for b, length in enumerate(self.kv_lens):
            k, v = (
                rng.standard_normal((length, c.kv_heads, d)).astype(dtype)
                for d in (c.dim, c.value_dim)
            )
            self.keys.append(k)
            self.values.append(v)
            for p in range(int(pages[b])):
                self.tables[b, p] = block = next(order)
                part = slice(p * c.block_size, (p + 1) * c.block_size)
                self.k[block, : len(k[part])] = k[part]
                self.v[block, : len(v[part])] = v[part]
        shape = (int(self.starts[-1]), c.heads, c.dim)
        self.q = rng.standard_normal(shape).astype(dtype)
        self.sinks = rng.standard_normal(c.heads).astype(np.float32)
        rows = shape[0]
        ends = self.kv_lens.max() * rng.uniform(-0.2, 1.2, (rows, 2))
        self.ranges = np.sort(ends.astype(np.int32), 1)
        for i, wild in enumerate(
            [(9, 5), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31))]
        ):
            self.ranges[3 + i :: 9] = wild
        self.seen = rng.random((rows, 32 * c.tree)) < 0.7  # of the sequence's queries

    @property
    def options(self) -> dict[str, Any]:
        c = self.case
        given = {"causal": c.causal, "window": c.window, "softcap": c.softcap}
        sinks = jnp.asarray(self.sinks) if c.sinks else None
        if c.ranges:
            given["ranges"] = self.ranges
        if c.tree:
            given["tree_mask"] = packed(self.seen)
        return given | {"scale": c.scale, "sinks": sinks}

    def run(self, **changes: Any) -> tuple[jax.Array, jax.Array]:
        given = {
            "q": self.q,
            "pages": (self.k, self.v),
            "layer": None,
            "block_tables": self.tables,
            "kv_lens": self.kv_lens,
            "query_start": self.starts,
            "implementation": self.implementation,
            **self.options,
        }
        return paged_attention(**given | changes, return_lse=True)

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64, a row at a time."""
        c = self.case
        out = np.zeros((*self.q.shape[:2], c.value_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        scale = c.scale if c.scale is not None else c.dim**-0.5
        left, right = c.window or (None, None)
        for b, (first, end) in enumerate(
            zip(self.starts, self.starts[1:], strict=False)
        ):
            k, v = (
                np.repeat(a[b].astype(np.float64), c.heads // c.kv_heads, 1)
                for a in (self.keys, self.values)
            )
            at = np.arange(len(k))
            for row in range(first, end):
                position = int(len(k) - end + row)
                seen = np.ones(len(k), bool)
                if c.causal:
                    seen &= at <= position
                if left is not None:
                    seen &= at >= position - left
                if right is not None:
                    seen &= at <= position + right
                if c.ranges:
                    seen &= (at >= self.ranges[row, 0]) & (at < self.ranges[row, 1])
                new = at - (len(k) - end + first)
                tree = (new >= 0) & (new < 32 * c.tree)
                seen[tree] &= self.seen[row, new[tree]]
                scores = np.einsum("nd,snd->ns", self.q[row].astype(np.float64), k)
                scores = scores[:, seen] * scale
                if c.softcap:
                    scores = c.softcap * np.tanh(scores / c.softcap)
                if c.sinks:
                    scores = np.c_[scores, self.sinks]
                if not scores.shape[1]:
                    continue
                top = scores.max(1, keepdims=True)
                lse[row] = top[:, 0] + np.log(np.exp(scores - top).sum(1))
                weights = np.exp(scores - lse[row][:, None])[:, : seen.sum()]
                out[row] = np.einsum("ns,snd->nd", weights, v[seen])
        return out, lse

    def hold(self, out: Any, lse: Any) -> None:
        want, want_lse = self.truth()
        bar = BARS[self.case.dtype]
        assert out.dtype == self.case.dtype
        np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=bar)
        bar = 1e-13 if self.case.dtype == "float64" else 1e-5
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=bar)


def packed(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)


WHO = [
    "xla",
    pytest.param("emulator", marks=pytest.mark.wide),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WHO)
def draw(request: Any, rng: np.random.Generator) -> Any:
    """Draws a case for plain JAX, or for the kernels, which have 16-bit floats.

    A CPU has the kernels, too: from the FFI handler on, thread by thread.
    """
    who = "xla" if request.param == "xla" else "cuda"
    if request.param == "emulator":
        request.getfixturevalue("paged_as_cuda")

    def drawn(case: Case) -> Drawn:
        if who == "cuda" and case.dtype == "float32":
            case = dataclasses.replace(case, dtype="bfloat16")
        return Drawn(case, rng, who)

    return drawn


CASES = {
    "mixed": Case(),
    "decode": Case(sequences=((1, 9), (1, 130), (1, 1), (1, 16), (1, 17))),
    "more than a step of keys": Case(sequences=((1, 1500), (2, 513), (1, 512))),
    "more than a tile of queries": Case(sequences=((150, 300), (1, 70), (65, 65))),
    "no keys, no queries": Case(sequences=((1, 0), (0, 40), (2, 2), (0, 0))),
    "fewer keys than queries": Case(sequences=((9, 4), (1, 5))),
    "not causal": Case(causal=False),
    "a window": Case(window=(5, None), sequences=((1, 700), (70, 90))),
    "both sides": Case(causal=False, window=(3, 4), sequences=((9, 40), (20, 20))),
    "endless windows": Case(causal=False, window=(2**31 - 1, 2**31 - 1)),
    "beyond int32": Case(window=(2**40, None), sequences=((1, 70), (9, 4))),
    "softcap": Case(softcap=2.5),
    "sinks": Case(sinks=True, sequences=((1, 0), (3, 30))),
    "scale": Case(scale=-0.3),
    "one key head": Case(heads=16, kv_heads=1),
    "groups of 7": Case(heads=14, kv_heads=2, dim=24, value_dim=24),
    "no groups": Case(heads=3, kv_heads=3),
    "another value dim": Case(value_dim=40),
    "blocks of 1": Case(block_size=1),
    "blocks of 5": Case(block_size=5, sequences=((1, 523), (4, 12))),
    "blocks of 48": Case(block_size=48, sequences=((1, 523), (4, 12))),
    "blocks of 256": Case(block_size=256, sequences=((1, 600), (4, 12))),
    "blocks longer than a step": Case(block_size=600, sequences=((1, 700), (4, 12))),
    "ranges": Case(ranges=True, sequences=((6, 300), (1, 37), (9, 20), (1, 64))),
    "ranges, not causal": Case(
        ranges=True, causal=False, sinks=True, sequences=((70, 600), (9, 20))
    ),
    "8 drafts": Case(tree=1, sequences=((8, 300), (8, 8), (1, 64), (8, 41))),
    "70 drafts of two words": Case(tree=2, sequences=((70, 90), (33, 40), (1, 9))),
    "drafts, not causal": Case(tree=1, causal=False, sequences=((8, 300), (40, 41))),
    "drafts longer than keys": Case(tree=1, sequences=((9, 4), (40, 20), (3, 0))),
    "ranges, drafts, a window": Case(
        ranges=True,
        tree=1,
        block_size=5,
        window=(30, None),
        softcap=2.0,
        sequences=((8, 300), (20, 70)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, draw):
    drawn = draw(CASES[name])
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        drawn = Drawn(Case(dtype=dtype, sinks=True), rng)
        drawn.hold(*drawn.run())


# One array, or one for each layer, which a universal layout cannot be.
LAYOUTS = [("NHD", True), ("NHD", False), ("HND", True), ("HND", False)]
LAYOUTS += [("universal", True)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
def test_pools(layout, contiguous, traced, draw):
    drawn = draw(Case())
    pool = pool_of(drawn, contiguous, layout)
    layer = jnp.int32(1) if traced else 1
    drawn.hold(*drawn.run(pages=pool, layer=layer))


def pool_of(
    drawn: Drawn, contiguous: bool = True, layout: str = "NHD", layers: int = 3
) -> KVPool:
    """Its keys and values in layer 1; the others hold NaN."""
    dtype = drawn.k.dtype
    spec = BlockSpec(layers, 2, 16, 2, 16, dtype, layout=layout)
    blocks = np.full((len(drawn.k), layers, 2, *drawn.k.shape[1:]), np.nan, dtype)
    blocks[:, 1, 0], blocks[:, 1, 1] = drawn.k, drawn.v
    order = "".join(axis for group in spec.block_layout.groups for axis in group)
    axes = [0, *(1 + "LOTHD".index(axis) for axis in order)]
    data = jnp.asarray(blocks.transpose(axes))
    if contiguous:
        return KVPool(data, spec)
    return KVPool(tuple(data[:, i] for i in range(layers)), spec)


def test_a_padded_batch(draw):
    """q [B, T, N, D]: the rows beyond q_lens are zeros and −inf."""
    drawn = draw(Case())
    lens = np.diff(drawn.starts)
    padded = np.full((len(lens), 7, *drawn.q.shape[1:]), np.nan, drawn.q.dtype)
    for b, n in enumerate(lens):
        padded[b, :n] = drawn.q[drawn.starts[b] : drawn.starts[b + 1]]
    out, lse = drawn.run(q=padded, query_start=None, q_lens=lens)
    assert out.shape == padded.shape and lse.shape == padded.shape[:3]
    inside = np.arange(7) < lens[:, None]
    drawn.hold(np.asarray(out)[inside], np.asarray(lse)[inside])
    np.testing.assert_array_equal(np.asarray(out)[~inside], 0)
    np.testing.assert_array_equal(np.asarray(lse)[~inside], -np.inf)


def test_all_queries_of_a_batch_count_unless_told(draw):
    drawn = draw(Case(sequences=((2, 9), (2, 33), (2, 2))))
    out, lse = drawn.run(q=drawn.q.reshape(3, 2, 4, 16), query_start=None)
    drawn.hold(out.reshape(-1, 4, 16), lse.reshape(-1, 4))


# ---- ranges and drafts ---------------------------------------------------------------

BOTH = Case(ranges=True, tree=1, sequences=((4, 40), (4, 61), (4, 9)))


def test_a_batch_with_ranges_and_drafts(draw):
    drawn = draw(BOTH)
    given = {"q": drawn.q, "ranges": drawn.ranges, "tree_mask": packed(drawn.seen)}
    given = {name: a.reshape(3, 4, *a.shape[1:]) for name, a in given.items()}
    out, lse = drawn.run(**given, query_start=None)
    drawn.hold(out.reshape(-1, 4, 16), lse.reshape(-1, 4))


def test_bits_are_bits_whatever_their_dtype_is(draw):
    """int32 and uint32, of NumPy and JAX; and lists of integers."""
    drawn = draw(BOTH)
    drawn.seen[:, 31] = True  # below 0 as int32
    drawn.seen[:, 8:] = True
    words = packed(drawn.seen)
    assert words.max() > 2**31
    made = [words.view(np.int32), jnp.asarray(words), words.view(np.int32).tolist()]
    for tree_mask in [words, *made]:
        drawn.hold(*drawn.run(tree_mask=tree_mask))
    drawn.hold(*jax.jit(lambda bits: drawn.run(tree_mask=bits))(words))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        drawn.hold(*drawn.run(ranges=drawn.ranges.astype(np.int64)))


def test_without_bits_and_with_all_of_them_is_the_same(draw):
    drawn = draw(Case(sequences=((40, 90), (1, 37), (8, 20))))
    rows = len(drawn.q)
    _, lse = drawn.run()
    everything = np.tile(np.array([-(2**31), 2**31 - 1], np.int32), (rows, 1))
    for words in (0, 1, 2):
        again = drawn.run(
            tree_mask=np.full((rows, words), -1, np.int32), ranges=everything
        )
        drawn.hold(*again)
        np.testing.assert_allclose(again[1], lse, rtol=0, atol=1e-6)


def test_a_tree_of_drafts_is_its_branches(draw):
    """Each node sees what the sequence of its ancestors would see."""
    parents = [-1, 0, 0, 1, 1, 2, 5, 3]  # node 0 is the last token
    drawn = draw(Case(tree=1, sequences=((8, 50),)))
    drawn.seen[:] = False
    branches = []
    for node, parent in enumerate(parents):
        if parent >= 0:
            drawn.seen[node] = drawn.seen[parent]
        drawn.seen[node, node] = True
        branches.append(np.flatnonzero(drawn.seen[node]))
    out, lse = drawn.run()
    drawn.hold(out, lse)
    keys, values = drawn.keys[0], drawn.values[0]
    for node, branch in enumerate(branches):
        at = np.r_[0:42, 42 + branch]
        alone, _ = flash_attention(
            drawn.q[None, node : node + 1], keys[None, at], values[None, at],
            return_lse=True, implementation="xla",
        )  # fmt: skip
        bar = BARS[drawn.case.dtype]
        got = np.asarray(out[node], np.float32)
        np.testing.assert_allclose(
            got, np.asarray(alone[0, 0], np.float32), rtol=0, atol=bar
        )


def test_what_no_range_has_may_be_nan(rng):
    drawn = Drawn(Case(ranges=True, sequences=((2, 700), (1, 90))), rng)
    drawn.ranges = np.array([[300, 310], [290, 305], [20, 30]], np.int32)
    seen = [np.arange(290, 310), np.arange(20, 30)]
    for b, keys in enumerate(seen):
        gone = np.delete(np.arange(drawn.kv_lens[b]), keys)
        ids = drawn.tables[b, gone // 16]
        drawn.k[ids, gone % 16] = drawn.v[ids, gone % 16] = np.nan
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("over", ["ranges", "tree_mask", "both", "everything"])
def test_vmap_over_ranges_and_drafts(over, draw):
    drawn = [draw(BOTH) for _ in range(3)]
    names = {
        "both": ["ranges", "tree_mask"],
        "everything": ["q", "ranges", "tree_mask"],
    }
    mapped = names.get(over, [over])
    for one in drawn[1:]:
        one.k, one.v, one.keys = drawn[0].k, drawn[0].v, drawn[0].keys
        one.values, one.tables = drawn[0].values, drawn[0].tables
        for name, held in {"q": "q", "ranges": "ranges", "tree_mask": "seen"}.items():
            if name not in mapped:
                setattr(one, held, getattr(drawn[0], held))

    def run(given: dict[str, Any]) -> Any:
        return drawn[0].run(**given)

    arrays = [{"q": x.q, **x.options} for x in drawn]
    stacked = {n: np.stack([a[n] for a in arrays]) for n in mapped}
    out, lse = jax.jit(jax.vmap(run))(stacked)
    for i, one in enumerate(drawn):
        one.hold(out[i], lse[i])


def test_new_ranges_and_drafts_do_not_compile_again(draw):
    drawn, other = draw(BOTH), draw(BOTH)
    traced = []

    @jax.jit
    def step(ranges: Any, bits: Any) -> Any:
        traced.append(1)
        return drawn.run(ranges=ranges, tree_mask=bits)

    for x in (drawn, other):
        drawn.ranges, drawn.seen = x.ranges, x.seen
        drawn.hold(*step(x.ranges, packed(x.seen)))
    assert len(traced) == 1


def test_ranges_and_drafts_in_a_scan_and_exported(rng):
    drawn = Drawn(BOTH, rng)

    @jax.jit
    def steps(ranges: Any, bits: Any) -> Any:
        def one(carry: None, given: Any) -> Any:
            return carry, drawn.run(ranges=given[0], tree_mask=given[1])

        return jax.lax.scan(one, None, (ranges, bits))[1]

    given = drawn.ranges[None].repeat(2, 0), packed(drawn.seen)[None].repeat(2, 0)
    out, lse = jax.export.export(steps)(*given).call(*given)
    drawn.hold(out[1], lse[1])


def test_no_array_of_queries_and_keys_is_made(rng):
    drawn = Drawn(Case(ranges=True, tree=1, sequences=((64, 4096),)), rng)
    run = jax.jit(lambda q: drawn.run(q=q))
    memory = run.lower(drawn.q).compile().memory_analysis()
    plain = jax.jit(lambda q: drawn.run(q=q, ranges=None, tree_mask=None))
    without = plain.lower(drawn.q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < without.temp_size_in_bytes + 64 * 4096


# ---- caches of 8 bits ----------------------------------------------------------------

NARROW = ["float8_e4m3fn", "float8_e5m2", "int8"]
SCALES = ["a number", "heads", "tokens", "all layers"]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("stored", NARROW)
def test_caches_of_8_bits(stored, scales, draw, rng):
    """What they hold, times its scale, is what float64 attends to."""
    drawn = draw(Case(sequences=((1, 37), (6, 20), (1, 0), (40, 90)), sinks=True))
    blocks, size, heads, _ = drawn.k.shape
    form = {"a number": (), "heads": (heads,), "tokens": (blocks, size, heads)}
    shape = form.get(scales, (3, blocks, size, heads))
    of_int = 30.0 if stored == "int8" else 1.0
    made = [
        (rng.uniform(0.5, 2.0, shape) / of_int).astype(np.float32) for _ in range(2)
    ]
    pools = []
    for array, parts, scale in (
        (drawn.k, drawn.keys, made[0]),
        (drawn.v, drawn.values, made[1]),
    ):
        own = scale[1] if scales == "all layers" else scale
        whole = np.broadcast_to(own, (blocks, size, heads))[..., None]
        numbers = np.nan_to_num(array.astype(np.float32)) / whole
        if stored == "int8":
            numbers = np.rint(numbers).clip(-127, 127)
        small = numbers.astype(jnp.dtype(stored))
        pools.append(small)
        real = small.astype(np.float64) * whole
        for b, length in enumerate(drawn.kv_lens):
            ids = drawn.tables[b, np.arange(length) // size]
            parts[b] = real[ids, np.arange(length) % size]
    given: dict[str, Any] = {"pages": tuple(pools)}
    if scales == "all layers":
        spec = BlockSpec(3, 2, size, heads, 16, stored)
        data = np.zeros((blocks, 3, 2, size, heads, 16), jnp.dtype(stored))
        data[:, 1, 0], data[:, 1, 1] = pools
        pool = KVPool(jnp.asarray(data), spec)
        given = {"pages": pool, "layer": jnp.int32(1)}
        static = drawn.run(pages=pool, layer=1, k_scale=made[0], v_scale=made[1])
        drawn.hold(*static)
    k_scale, v_scale = (float(a) if a.ndim == 0 else a for a in made)
    drawn.hold(*drawn.run(**given, k_scale=k_scale, v_scale=v_scale))


def test_keys_that_were_quantized_on_their_way_into_a_pool(rng):
    """`append_kv` and `paged_attention` mean the same by scales."""
    spec = BlockSpec(2, 2, 16, 2, 32, "int8")
    pool, scales = KVPool.zeros(spec, 6), KVScales.zeros(spec, 6)
    k, v = (rng.standard_normal((40, 2, 32)).astype(np.float32) for _ in range(2))
    pool, scales = append_kv(pool, 1, k, v, np.arange(40), scales=scales)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    out = paged_attention(
        q, pool, 1, [[0, 1, 2]], [40], query_start=[0, 3], k_scale=scales.k,
        v_scale=scales.v,
    )  # fmt: skip
    want = flash_attention(q[None], k[None], v[None], causal=True, q_offset=37)[0]
    np.testing.assert_allclose(out, want, rtol=0, atol=0.02)


# ---- data that is wrong --------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -(2**31), 10**6, 2**31 - 1])
def test_an_id_that_is_no_block_is_not_seen(bad, draw):
    """As if the sequence had no keys there; nothing is read in its place."""
    drawn = draw(Case(sequences=((1, 48), (3, 20))))
    drawn.tables[0, 1] = bad
    out, lse = drawn.run()
    without = [np.r_[0:16, 32:48], np.arange(20)]
    drawn.keys = [k[i] for k, i in zip(drawn.keys, without, strict=True)]
    drawn.values = [v[i] for v, i in zip(drawn.values, without, strict=True)]
    drawn.hold(out, lse)


def test_lengths_end_with_the_table(draw):
    drawn = draw(Case(sequences=((1, 64), (2, 64), (1, 64))))
    exact = drawn.run()
    huge = drawn.run(kv_lens=np.array([65, 2**31 - 1, 64], np.int32))
    for got, want in zip(huge, exact, strict=True):
        np.testing.assert_array_equal(got, want)
    out, lse = drawn.run(kv_lens=np.array([-1, -(2**31), 0], np.int32))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a_table_of_more_keys_than_an_int32(draw):
    """2**31 of them: lengths end with int32 then."""
    drawn = draw(Case(block_size=2**14, sequences=((1, 30),), heads=1, kv_heads=1))
    tables = np.full((1, 2**17), -1, np.int32)
    tables[0, 0] = drawn.tables[0, 0]
    drawn.hold(*drawn.run(block_tables=tables))


def test_rows_of_no_sequence_are_zeros(draw):
    """Before the first, after the last, and where query_start falls."""
    drawn = draw(Case(sequences=((4, 20), (4, 30), (4, 9))))
    q = np.concatenate([drawn.q, np.full_like(drawn.q[:3], np.nan)])
    out, lse = drawn.run(q=q)
    drawn.hold(out[:12], lse[:12])
    np.testing.assert_array_equal(out[12:], 0)
    # No sequence has rows where a start falls.
    for starts in ([1, 4, 3, 12], [0, 4, 9, 8], [5, -1, 8, 12]):
        out, lse = drawn.run(q=q[:12], query_start=np.array(starts, np.int32))
        assert np.isneginf(lse).all() and (np.asarray(out) == 0).all()
    # Beyond the tokens it is their end, and below 0 the first of them.
    wild = np.array([-(2**31), 4, 2**31 - 1, 10**9], np.int32)
    out, lse = drawn.run(q=q[:12], query_start=wild)
    want = drawn.run(q=q[:12], query_start=np.array([0, 4, 12, 12], np.int32))
    for got, exact in zip((out, lse), want, strict=True):
        np.testing.assert_array_equal(got, exact)


def test_starts_of_one_member_of_a_vmap_that_fall(draw):
    """The others have their rows."""
    drawn = draw(Case(sequences=((4, 20), (4, 30))))
    starts = jnp.array([[0, 4, 8], [0, 9, 3], [0, 4, 8]])
    out, lse = jax.vmap(lambda s: drawn.run(query_start=s))(starts)
    drawn.hold(out[0], lse[0])
    drawn.hold(out[2], lse[2])
    assert np.isneginf(lse[1]).all() and (np.asarray(out[1]) == 0).all()


def test_two_sequences_may_share_blocks(draw):
    drawn = draw(Case(sequences=((1, 40), (1, 40))))
    drawn.tables[1] = drawn.tables[0]
    drawn.keys[1], drawn.values[1] = drawn.keys[0], drawn.values[0]
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("layer", [3, -1, 2**31 - 1])
@pytest.mark.parametrize("contiguous", [True, False])
def test_of_a_layer_outside_the_pool_nobody_sees_a_key(contiguous, layer, draw):
    drawn = draw(Case())
    pool = pool_of(drawn, contiguous)
    out, lse = drawn.run(pages=pool, layer=jnp.int32(layer))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_nothing_at_all(draw):
    """No sequences, no tokens, or tables without columns."""
    drawn = draw(Case())
    none = np.zeros(0, np.int32)
    out, lse = drawn.run(block_tables=drawn.tables[:0], kv_lens=none, query_start=[0])
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()
    out, _ = drawn.run(q=drawn.q[:0])
    assert out.shape == (0, 4, 16)
    out, lse = drawn.run(block_tables=drawn.tables[:, :0])
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


# ---- inside JAX ----------------------------------------------------------------------


def test_new_tables_and_lengths_do_not_compile_again(draw):
    drawn = draw(Case())
    traced = []

    @jax.jit
    def step(tables: Any, lens: Any, starts: Any) -> Any:
        traced.append(1)
        given = {"block_tables": tables, "kv_lens": lens, "query_start": starts}
        return drawn.run(**given)

    drawn.hold(*step(drawn.tables, drawn.kv_lens, drawn.starts))
    step(drawn.tables[::-1].copy(), drawn.kv_lens[::-1].copy(), drawn.starts)
    assert len(traced) == 1


def test_scan_over_layers(draw):
    drawn = draw(Case())
    pool = pool_of(drawn)

    @jax.jit
    def layers(pool: KVPool) -> Any:
        def one(carry: None, layer: Any) -> Any:
            return carry, drawn.run(pages=pool, layer=layer)

        return jax.lax.scan(one, None, jnp.arange(3))[1]

    out, lse = layers(pool)
    drawn.hold(out[1], lse[1])


@pytest.mark.parametrize("over", ["q", "tables", "pages", "everything"])
def test_vmap(over, draw):
    """Members differ in what is mapped."""
    drawn = [draw(Case(sequences=((2, 30), (1, 9)))) for _ in range(3)]
    names = {"q": ["q"], "tables": ["tables"], "pages": ["k", "v"]}
    mapped = names.get(over, ["q", "tables", "k", "v"])
    for one in drawn[1:]:
        for name in {"q", "tables", "k", "v"} - set(mapped):
            setattr(one, name, getattr(drawn[0], name))
    if over == "tables":  # the second sequence has another block of the pool
        drawn[1].tables = drawn[0].tables[:, ::-1].copy()
        drawn[2].tables = np.roll(drawn[0].tables, 1, 0)
    want = [one.run(block_tables=one.tables) for one in drawn]
    arrays = {n: np.stack([getattr(one, n) for one in drawn]) for n in mapped}

    def run(given: dict[str, Any]) -> Any:
        x = {n: given.get(n, getattr(drawn[0], n)) for n in ("q", "tables", "k", "v")}
        pages = (x["k"], x["v"])
        return drawn[0].run(q=x["q"], block_tables=x["tables"], pages=pages)

    got = jax.jit(jax.vmap(run))(arrays)
    for i, one in enumerate(want):
        for x, y in zip(got, one, strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x[i], y))
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("over", ["layers", "queries"])
def test_vmap_over_a_pool(over, contiguous, draw):
    """Of some layers one holds what is sought; the others NaN."""
    drawn = draw(Case())
    pool = pool_of(drawn, contiguous)
    layer: Any = jnp.int32(1)
    if over == "layers":
        out, lse = jax.vmap(lambda i: drawn.run(pages=pool, layer=i))(jnp.arange(3))
        drawn.hold(out[1], lse[1])
    else:
        q = jnp.stack([jnp.asarray(drawn.q), -jnp.asarray(drawn.q)])
        out, lse = jax.vmap(lambda q: drawn.run(q=q, pages=pool, layer=layer))(q)
        drawn.hold(out[0], lse[0])


@pytest.mark.parametrize("contiguous", [True, False])
def test_vmap_over_pools(contiguous, draw):
    drawn = [draw(Case(sequences=((2, 30), (1, 9)))) for _ in range(2)]
    pools = [pool_of(one, contiguous) for one in drawn]
    many = jax.tree.map(lambda *a: jnp.stack(a), *pools)
    arrays = [np.stack([getattr(one, n) for one in drawn]) for n in ("q", "tables")]

    def run(pool: KVPool, q: Any, tables: Any) -> Any:
        return drawn[0].run(pages=pool, layer=jnp.int32(1), q=q, block_tables=tables)

    out, lse = jax.jit(jax.vmap(run))(many, *arrays)
    for i, one in enumerate(drawn):
        one.hold(out[i], lse[i])


@pytest.mark.parametrize("setting", ["disable_jit", "debug_nans", "x64", "strict"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings(dtype, setting, rng):
    drawn = Drawn(Case(sequences=((1, 37), (5, 20), (1, 0)), dtype=dtype), rng)
    with {
        "disable_jit": jax.disable_jit(),
        "debug_nans": jax.debug_nans(True),
        "x64": jax.enable_x64(True),
        "strict": jax.numpy_dtype_promotion("strict"),
    }[setting]:
        drawn.hold(*drawn.run())


def test_wide_and_traced_integers(rng):
    drawn = Drawn(Case(), rng)
    with jax.enable_x64(True):
        wide = {
            "block_tables": jnp.asarray(drawn.tables, jnp.int64),
            "kv_lens": list(map(int, drawn.kv_lens)),
            "query_start": jnp.asarray(drawn.starts, jnp.uint16),
        }
        drawn.hold(*drawn.run(**wide))


@pytest.mark.torch
def test_tensors_of_torch(rng):
    import torch

    drawn = Drawn(Case(), rng)
    k, v, q, tables, lens, starts = (
        torch.from_numpy(a)
        for a in (drawn.k, drawn.v, drawn.q, drawn.tables, drawn.kv_lens, drawn.starts)
    )
    given = {"block_tables": tables, "kv_lens": lens, "query_start": starts}
    drawn.hold(*drawn.run(q=q, pages=(k, v), **given))


@pytest.mark.parametrize("rows", ["alike", "ranges and drafts"])
def test_heads_over_devices(rows, rng, four_cpus):
    """Each device has its own key heads: nothing travels."""
    of_rows = {"ranges": True, "tree": 1} if rows != "alike" else {}
    drawn = Drawn(Case(heads=8, kv_heads=4, **of_rows), rng)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))
    q_cut, kv_cut = (jax.sharding.PartitionSpec(*[None] * n, "heads") for n in (1, 2))

    def local(q: Any, k: Any, v: Any) -> Any:
        return drawn.run(q=q, pages=(k, v))

    run = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(q_cut, kv_cut, kv_cut), out_specs=(q_cut, q_cut)
        )
    )
    drawn.hold(*run(drawn.q, drawn.k, drawn.v))
    text = run.lower(drawn.q, drawn.k, drawn.v).compile().as_text()
    assert "all-" not in text and "collective" not in text


@pytest.mark.parametrize("cut", [True, False])
def test_ranges_and_drafts_of_a_program_that_is_partitioned(cut, rng, four_cpus):
    """They are whole on every device, however they came."""
    drawn = Drawn(Case(heads=8, kv_heads=4, ranges=True, tree=1), rng)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))

    def lay(a: Any, axis: int | None) -> jax.Array:
        names = ["x" if i == axis else None for i in range(a.ndim)]
        spec = jax.sharding.PartitionSpec(*names)
        return jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))

    q, k, v = lay(drawn.q, 1), lay(drawn.k, 2), lay(drawn.v, 2)
    more = -len(drawn.q) % 4  # rows of no sequence, so that devices can share them out
    q = jnp.pad(q, ((0, more), (0, 0), (0, 0)))
    at = 0 if cut else None
    ranges = lay(np.pad(drawn.ranges, ((0, more), (0, 0))), at)
    bits = lay(np.pad(packed(drawn.seen), ((0, more), (0, 0))), at)

    @jax.jit
    def run(q: Any, k: Any, v: Any, ranges: Any, bits: Any) -> Any:
        return drawn.run(q=q, pages=(k, v), ranges=ranges, tree_mask=bits)

    out, lse = run(q, k, v, ranges, bits)
    rows = len(drawn.q)
    drawn.hold(np.asarray(out)[:rows], np.asarray(lse)[:rows])
    assert out.sharding.spec[1] == "x"


@pytest.mark.parametrize("held", ["pool", "pair"])
def test_jit_cuts_heads(held, rng, four_cpus):
    """As q and the cache are cut, results are, and nothing travels."""
    drawn = Drawn(Case(heads=4, kv_heads=2), rng)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("heads",))

    def cut(a: Any, *axes: str | None) -> Any:
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))

    if held == "pool":
        pages: Any = cut(pool_of(drawn), *[None] * 4, "heads")
    else:
        pages = cut((drawn.k, drawn.v), None, None, "heads")
    layer = 1 if held == "pool" else None
    step = jax.jit(lambda q, pages: drawn.run(q=q, pages=pages, layer=layer))
    q = cut(drawn.q, None, "heads")
    out, lse = step(q, pages)
    drawn.hold(out, lse)
    assert out.sharding.shard_shape(out.shape)[1] == 2
    assert "all-gather" not in step.lower(q, pages).compile().as_text()


def test_it_has_no_derivative(rng):
    drawn = Drawn(Case(), rng)
    with pytest.raises(NotImplementedError, match="paged_attention has no derivative"):
        jax.grad(lambda q: drawn.run(q=q)[0].sum())(drawn.q)


def test_a_shared_prefix_is_a_part_of_its_own(rng):
    """Its keys, seen by all as a block without a mask, and each one's own, merged."""
    drawn = Drawn(Case(sequences=((1, 50), (1, 61))), rng)
    for of in (drawn.keys, drawn.values):
        of[1][:32] = of[0][:32]
    shared = drawn.tables[:1, :2]
    tables = [shared.repeat(2, 0), drawn.tables[:, 2:]]
    lens = [np.full(2, 32, np.int32), drawn.kv_lens - 32]
    parts = [
        drawn.run(block_tables=t, kv_lens=n, causal=False)
        for t, n in zip(tables, lens, strict=True)
    ]
    drawn.hold(*merge_attention(parts))


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.cpu), "bfloat16"]
)
@pytest.mark.parametrize("held", ["pool", "pair"])
def test_nothing_of_the_cache_is_copied(held, dtype):
    """A step's pages are all the memory that it takes, whatever the lengths are."""
    if held == "pool":
        pages: Any = KVPool.zeros(BlockSpec(2, 2, 16, 8, 64, dtype), 2048)
    else:
        pages = (jnp.zeros((2048, 16, 8, 64), dtype),) * 2
    args = [
        jnp.zeros((16, 32, 64), dtype),
        jnp.zeros((16, 128), jnp.int32),
        jnp.zeros(16, jnp.int32),
        jnp.arange(17, dtype=jnp.int32),
    ]

    def step(pages: Any, layer: Any, q: Any, tables: Any, lens: Any, starts: Any):
        layer = layer if held == "pool" else None
        return paged_attention(q, pages, layer, tables, lens, query_start=starts)

    compiled = jax.jit(step).lower(pages, jnp.int32(1), *args).compile()
    gathered = 2 * 16 * 128 * 16 * 8 * 64 * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < gathered / 10


# ---- messages ------------------------------------------------------------------------

Q, PAGES = np.zeros((5, 4, 16), np.float32), np.zeros((9, 16, 2, 16), np.float32)
GIVEN = {
    "q": Q,
    "pages": (PAGES, PAGES),
    "layer": None,
    "block_tables": np.zeros((2, 3), np.int32),
    "kv_lens": np.zeros(2, np.int32),
    "query_start": np.zeros(3, np.int32),
}
SPEC = BlockSpec(3, 2, 16, 2, 16, "float32")
STANDIN = KVPool(jax.ShapeDtypeStruct((9, *SPEC.block_shape), jnp.float32), SPEC)
WRONG = {
    "q of rank 4": ({"q": Q[None]}, ValueError, r"q must be \[tokens, N, D\], got"),
    "q of rank 3": (
        {"query_start": None},
        ValueError,
        r"q must be \[B, T, N, D\].*pass query_start",
    ),
    "integers": ({"q": Q.astype(int)}, TypeError, "q must be floats"),
    "another dtype": (
        {"q": Q.astype(np.float16)},
        TypeError,
        r"one dtype, got float16 and float32; cast q with .astype\('float32'\)",
    ),
    "pages": ({"pages": PAGES}, TypeError, r"a KVPool or a pair \(k_pages, v_pages\)"),
    "pages of rank 5": (
        {"pages": (PAGES[None], PAGES)},
        ValueError,
        r"pages\[0\], k_pages, must be \[P, T, K, D\]",
    ),
    "pages that differ": (
        {"pages": (PAGES, PAGES[:1])},
        ValueError,
        "must be alike but for their last dim",
    ),
    "no blocks": (
        {"pages": (PAGES[:0], PAGES[:0])},
        ValueError,
        "blocks of at least one token, got",
    ),
    "heads": (
        {"q": Q[:, :3]},
        ValueError,
        "a multiple of the blocks' 2 KV heads, got 3",
    ),
    "head dim": ({"q": Q[..., :8]}, ValueError, "must have one head dim"),
    "a layer of a pair": ({"layer": 0}, ValueError, "layer must be None with a pair"),
    "no layer": ({"pages": STANDIN}, TypeError, "layer must be an integer or an int32"),
    "layer 3": ({"pages": STANDIN, "layer": 3}, IndexError, "must be 0 to 2, got 3"),
    "no tables": (
        {"block_tables": np.zeros(3, np.int32)},
        ValueError,
        r"block_tables must be int32\[B, W\]",
    ),
    "float tables": (
        {"block_tables": np.zeros((2, 3))},
        TypeError,
        r"block_tables must be int32\[B, W\].*cast",
    ),
    "no lengths": ({"kv_lens": None}, TypeError, "kv_lens is missing; pass int32"),
    "three lengths": (
        {"kv_lens": np.zeros(3, np.int32)},
        ValueError,
        r"kv_lens must be int32\[2\]",
    ),
    "two starts": (
        {"query_start": np.zeros(2, np.int32)},
        ValueError,
        r"query_start must be int32\[3\], the first row of each",
    ),
    "both": (
        {"q_lens": np.zeros(2, np.int32)},
        ValueError,
        "query_start and q_lens say the same",
    ),
    "another batch": (
        {"q": Q[:, None], "query_start": None},
        ValueError,
        "one batch, got .* and 2 rows of block_tables",
    ),
    "a window": ({"window": 4}, ValueError, r"window must be a pair \(left, right\)"),
    "an implementation": (
        {"implementation": "cudnn"},
        ValueError,
        "implementation must be one of None, 'cuda', 'xla'",
    ),
    "ranges of rank 3": (
        {"ranges": np.zeros((1, 5, 2), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\], got",
    ),
    "ranges of other rows": (
        {"ranges": np.zeros((4, 2), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\] = \[5, 2\], of each row .*got .*; stack",
    ),
    "ranges of one number": (
        {"ranges": np.zeros((5, 1), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\] = \[5, 2\]",
    ),
    "ranges of a batch": (
        {
            "q": np.zeros((2, 3, 4, 16), np.float32),
            "query_start": None,
            "ranges": np.zeros((2, 2), np.int32),
        },
        ValueError,
        r"ranges must be int32\[B, T, 2\]",
    ),
    "float ranges": (
        {"ranges": np.zeros((5, 2))},
        TypeError,
        r"ranges must be int32\[tokens, 2\].*cast",
    ),
    "a mask of booleans": (
        {"tree_mask": np.zeros((5, 32), bool)},
        TypeError,
        r"tree_mask must be bits in int32 or uint32\[tokens, words\], got .*packbits",
    ),
    "bits in int64": (
        {"tree_mask": np.zeros((5, 1), np.int64)},
        TypeError,
        "tree_mask must be bits in int32 or uint32",
    ),
    "bits of other rows": (
        {"tree_mask": np.zeros((4, 1), np.uint32)},
        ValueError,
        r"tree_mask must be .* with a row for each of q's \[5\], got .*; rows without",
    ),
    "bits of rank 1": (
        {"tree_mask": np.zeros(5, np.uint32)},
        ValueError,
        r"tree_mask must be int32\[tokens, words\]",
    ),
    "bits beyond int32 in a list": (
        {"tree_mask": [[2**32 - 1]] * 5},
        ValueError,
        "tree_mask must fit in int32",
    ),
    "a flag": ({"causal": 1}, TypeError, "causal must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match="^paged_attention: .*" + message):
        jax.eval_shape(lambda: paged_attention(**GIVEN | changes))
