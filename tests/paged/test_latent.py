"""Latent caches: a value is the first columns of its key, and all heads share one key.

Against float64, row by row. What nobody may read is NaN: slots beyond the lengths,
blocks that no table names, other layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kvblock import (
    BlockSpec,
    KVPool,
    KVScales,
    append_kv,
    paged_attention,
)

BARS = {"float64": 1e-13, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged call: for each sequence (queries, keys)."""

    sequences: tuple[tuple[int, int], ...] = ((1, 37), (6, 20), (3, 3), (1, 64))
    block_size: int = 16
    heads: int = 4
    dim: int = 24
    value_dim: int = 16
    dtype: str = "float32"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None


class Drawn:
    """Its arrays."""

    def __init__(
        self, case: Case, rng: np.random.Generator, implementation: str = "xla"
    ) -> None:
        self.case = c = case
        self.implementation = implementation
        dtype = jnp.dtype(c.dtype)
        self.kv_lens = np.array([n for _, n in c.sequences], np.int32)
        self.starts = np.cumsum([0, *(n for n, _ in c.sequences)]).astype(np.int32)
        pages = -(-self.kv_lens // c.block_size)
        blocks = int(pages.sum()) + 3
        order = iter(rng.permutation(blocks))
        self.tables = np.full((len(pages), max(int(pages.max()), 1)), -1, np.int32)
        self.pages = np.full((blocks, c.block_size, c.dim), np.nan, dtype)
        self.keys = []
        for b, length in enumerate(self.kv_lens):
            keys = rng.standard_normal((length, c.dim)).astype(dtype)
            self.keys.append(keys)
            for p in range(int(pages[b])):
                self.tables[b, p] = block = next(order)
                part = keys[p * c.block_size : (p + 1) * c.block_size]
                self.pages[block, : len(part)] = part
        shape = (int(self.starts[-1]), c.heads, c.dim)
        self.q = rng.standard_normal(shape).astype(dtype)
        self.sinks = rng.standard_normal(c.heads).astype(np.float32)

    def pool(self, contiguous: bool = True, layout: str = "NHD") -> KVPool:
        """The pages as layer 1 of three."""
        spec = BlockSpec(
            3, 1, *self.pages.shape[1:2], 1, self.case.dim, self.pages.dtype,
            layout=layout,
        )  # fmt: skip
        blocks = np.full(
            (len(self.pages), 3, 1, *self.pages.shape[1:2], 1, self.case.dim),
            np.nan,
            self.pages.dtype,
        )
        blocks[:, 1, 0, :, 0] = self.pages
        order = "".join(axis for group in spec.block_layout.groups for axis in group)
        data = jnp.asarray(blocks.transpose(0, *(1 + "LOTHD".index(a) for a in order)))
        return KVPool(data if contiguous else tuple(data[:, i] for i in range(3)), spec)

    def run(self, **changes: Any) -> tuple[jax.Array, jax.Array]:
        c = self.case
        given = {
            "q": self.q,
            "pages": self.pages,
            "layer": None,
            "block_tables": self.tables,
            "kv_lens": self.kv_lens,
            "query_start": self.starts,
            "value_dim": c.value_dim,
            "causal": c.causal,
            "window": c.window,
            "softcap": c.softcap,
            "scale": c.scale,
            "sinks": jnp.asarray(self.sinks) if c.sinks else None,
            "implementation": self.implementation,
        }
        return paged_attention(**given | changes, return_lse=True)

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64, a row at a time."""
        c = self.case
        out = np.zeros((*self.q.shape[:2], c.value_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        scale = c.scale if c.scale is not None else c.dim**-0.5
        left, right = c.window or (None, None)
        for b, k in enumerate(self.keys):
            first, end = self.starts[b : b + 2]
            k, at = k.astype(np.float64), np.arange(len(k))
            for row in range(first, end):
                position = int(len(k) - end + row)
                seen = np.ones(len(k), bool)
                if c.causal:
                    seen &= at <= position
                if left is not None:
                    seen &= at >= position - left
                if right is not None:
                    seen &= at <= position + right
                scores = self.q[row].astype(np.float64) @ k[seen].T * scale
                if c.softcap:
                    scores = c.softcap * np.tanh(scores / c.softcap)
                if c.sinks:
                    scores = np.c_[scores, self.sinks]
                if not scores.shape[1]:
                    continue
                top = scores.max(1, keepdims=True)
                lse[row] = top[:, 0] + np.log(np.exp(scores - top).sum(1))
                weights = np.exp(scores - lse[row][:, None])[:, : seen.sum()]
                out[row] = weights @ k[seen, : c.value_dim]
        return out, lse

    def hold(self, out: Any, lse: Any) -> None:
        want, want_lse = self.truth()
        bar = BARS[self.case.dtype]
        assert out.dtype == self.case.dtype and out.shape == want.shape
        np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=bar)
        bar = 1e-13 if self.case.dtype == "float64" else 1e-5
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=bar)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["xla", CUDA])
def draw(request: Any, rng: np.random.Generator) -> Any:
    """Draws a case for plain JAX, or for the kernel, which has dims and dtypes."""

    def drawn(case: Case) -> Drawn:
        if request.param == "cuda":
            dtype = "bfloat16" if case.dtype == "float32" else case.dtype
            dims = {} if case.dim == 576 else {"dim": 192, "value_dim": 128}
            case = dataclasses.replace(case, dtype=dtype, **dims)
        return Drawn(case, rng, request.param)

    return drawn


CASES = {
    "mixed": Case(),
    "DeepSeek's, decode": Case(
        sequences=((1, 70), (1, 300), (1, 0), (2, 5)),
        heads=16,
        dim=576,
        value_dim=512,
        scale=192**-0.5,
    ),
    "128 heads": Case(
        sequences=((1, 70), (2, 33)), heads=128, dim=576, value_dim=512, dtype="float16"
    ),
    "more than a step of keys": Case(sequences=((1, 1500), (2, 513), (1, 512))),
    "more than a tile of queries": Case(sequences=((150, 300), (1, 70), (65, 65))),
    "no keys, no queries": Case(
        sequences=((1, 0), (0, 40), (2, 2), (0, 0)), sinks=True
    ),
    "fewer keys than queries": Case(sequences=((9, 4), (1, 5))),
    "not causal": Case(causal=False),
    "both sides": Case(causal=False, window=(3, 4), sequences=((9, 40), (20, 20))),
    "a window, a softcap, sinks": Case(
        window=(5, None), softcap=2.5, sinks=True, sequences=((1, 700), (70, 90))
    ),
    "all columns": Case(value_dim=24),
    "one column": Case(value_dim=1, heads=1),
    "20 heads, blocks of 1": Case(heads=20, block_size=1, dtype="bfloat16"),
    "blocks of 5": Case(block_size=5, sequences=((1, 523), (4, 12))),
    "blocks longer than a step": Case(block_size=600, sequences=((1, 700), (4, 12))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, draw):
    drawn = draw(CASES[name])
    drawn.hold(*drawn.run())


def test_float64(rng):
    with jax.enable_x64(True):
        drawn = Drawn(Case(dtype="float64", sinks=True), rng)
        drawn.hold(*drawn.run())


LAYOUTS = [("NHD", True), ("NHD", False), ("HND", True), ("universal", True)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
def test_pools(layout, contiguous, traced, draw):
    drawn = draw(Case())
    layer = jnp.int32(1) if traced else 1
    drawn.hold(*drawn.run(pages=drawn.pool(contiguous, layout), layer=layer))


def test_a_padded_batch(draw):
    drawn = draw(Case(sequences=((2, 9), (2, 33), (2, 2))))
    q = drawn.q.reshape(3, 2, *drawn.q.shape[1:])
    out, lse = drawn.run(q=q, query_start=None)
    drawn.hold(out.reshape(6, *out.shape[2:]), lse.reshape(6, -1))


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_was_appended_is_attended_to(contiguous, rng):
    """`append_kv` takes the latents as k, and no v."""
    spec = BlockSpec(2, 1, 16, 1, 24, "float32")
    pool = KVPool.zeros(spec, 4, contiguous=contiguous)
    drawn = Drawn(Case(sequences=((3, 40),)), rng)

    @jax.jit
    def step(pool: KVPool, layer: Any, k: Any, slots: Any) -> Any:
        pool = append_kv(pool, layer, k, None, slots)
        return drawn.run(pages=pool, layer=layer, block_tables=[[2, 0, 3]])

    slots = np.r_[32:48, 0:16, 48:56]
    drawn.hold(*step(pool, jnp.int32(1), drawn.keys[0][:, None], slots))


# ---- caches of 8 bits ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "scales"),
    [
        ("float8_e4m3fn", "a number"),
        ("float8_e5m2", "the head's"),
        ("int8", "tokens"),
        ("float8_e4m3fn", "all layers"),
    ],
)
def test_caches_of_8_bits(stored, scales, rng):
    """Values have their keys' scale."""
    drawn = Drawn(Case(sequences=((1, 37), (6, 20), (1, 0), (40, 90))), rng)
    blocks, size, _ = drawn.pages.shape
    form = {"a number": (), "the head's": (1,), "tokens": (blocks, size, 1)}
    shape = form.get(scales, (3, blocks, size, 1))
    of_int = 30.0 if stored == "int8" else 1.0
    scale = (rng.uniform(0.5, 2.0, shape) / of_int).astype(np.float32)
    own = np.broadcast_to(
        scale[1] if scales == "all layers" else scale, (blocks, size, 1)
    )
    numbers = np.nan_to_num(drawn.pages) / own
    if stored == "int8":
        numbers = np.rint(numbers).clip(-127, 127)
    drawn.pages = numbers.astype(jnp.dtype(stored))
    real = drawn.pages.astype(np.float64) * own
    for b, length in enumerate(drawn.kv_lens):
        at = np.arange(length)
        drawn.keys[b] = real[drawn.tables[b, at // size], at % size]
    given: dict[str, Any] = {"k_scale": scale if scale.ndim else float(scale)}
    if scales == "all layers":
        spec = BlockSpec(3, 1, size, 1, 24, stored)
        data = np.zeros((blocks, *spec.block_shape), drawn.pages.dtype)
        data[:, 1, 0, :, 0] = drawn.pages
        given |= {"pages": KVPool(jnp.asarray(data), spec), "layer": jnp.int32(1)}
    drawn.hold(*drawn.run(**given))


def test_latents_that_were_quantized_on_their_way_into_a_pool(rng):
    spec = BlockSpec(2, 1, 16, 1, 24, "int8")
    pool, scales = KVPool.zeros(spec, 6), KVScales.zeros(spec, 6)
    drawn = Drawn(Case(sequences=((3, 40),)), rng)
    k = drawn.keys[0][:, None]
    pool, scales = append_kv(pool, 1, k, None, np.arange(40), scales=scales)
    given = {"pages": pool, "layer": 1, "block_tables": [[0, 1, 2]]}
    out, _ = drawn.run(**given, k_scale=scales.k)
    np.testing.assert_allclose(out, drawn.truth()[0], rtol=0, atol=0.03)


# ---- data that is wrong --------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_that_is_no_block_is_not_seen(bad, draw):
    drawn = draw(Case(sequences=((1, 48), (3, 20))))
    drawn.tables[0, 1] = bad
    drawn.pages[-1], drawn.pages[0] = (
        np.where(np.isin(i, drawn.tables), drawn.pages[i], np.nan)
        for i in (len(drawn.pages) - 1, 0)
    )
    out, lse = drawn.run()
    drawn.keys[0] = drawn.keys[0][np.r_[0:16, 32:48]]
    drawn.hold(out, lse)


def test_lengths_end_with_the_table(draw):
    drawn = draw(Case(sequences=((1, 64), (2, 64), (1, 64))))
    exact = drawn.run()
    huge = drawn.run(kv_lens=np.array([65, 2**31 - 1, 64], np.int32))
    for got, want in zip(huge, exact, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layer", [3, -1])
def test_of_a_layer_outside_the_pool_nobody_sees_a_key(layer, draw):
    drawn = draw(Case())
    out, lse = drawn.run(pages=drawn.pool(), layer=jnp.int32(layer))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_rows_of_no_sequence_are_zeros(draw):
    drawn = draw(Case(sequences=((4, 20), (4, 30))))
    q = np.concatenate([drawn.q, np.full_like(drawn.q[:3], np.nan)])
    out, lse = drawn.run(q=q)
    drawn.hold(out[:8], lse[:8])
    np.testing.assert_array_equal(out[8:], 0)
    out, lse = drawn.run(query_start=np.array([1, 4, 3], np.int32))
    assert np.isneginf(lse).all() and (np.asarray(out) == 0).all()


# ---- inside JAX ----------------------------------------------------------------------


@pytest.mark.parametrize("over", ["q", "pages", "everything"])
def test_vmap(over, draw):
    drawn = [draw(Case(sequences=((2, 30), (1, 9)))) for _ in range(3)]
    names = {"q": ["q"], "pages": ["pages"]}.get(over, ["q", "pages", "tables"])
    for one in drawn[1:]:
        for name in {"q", "tables", "pages"} - set(names):
            setattr(one, name, getattr(drawn[0], name))
    want = [one.run() for one in drawn]
    arrays = {name: np.stack([getattr(one, name) for one in drawn]) for name in names}

    def run(given: dict[str, Any]) -> Any:
        x = {n: given.get(n, getattr(drawn[0], n)) for n in ("q", "pages", "tables")}
        return drawn[0].run(q=x["q"], pages=x["pages"], block_tables=x["tables"])

    got = jax.jit(jax.vmap(run))(arrays)
    for i, one in enumerate(want):
        for x, y in zip(got, one, strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x[i], y))
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


def of_devices() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))


def test_query_heads_over_devices(rng, four_cpus):
    """Each device has some of them and all of the cache: nothing travels."""
    drawn = Drawn(Case(heads=8, sinks=True), rng)
    cut, whole = PartitionSpec(None, "heads"), PartitionSpec()

    def local(q: Any, sinks: Any, pages: Any) -> Any:
        return drawn.run(q=q, sinks=sinks, pages=pages)

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=of_devices(),
            in_specs=(cut, PartitionSpec("heads"), whole),
            out_specs=(cut, cut),
        )
    )
    drawn.hold(*run(drawn.q, drawn.sinks, drawn.pages))
    text = run.lower(drawn.q, drawn.sinks, drawn.pages).compile().as_text()
    assert "all-" not in text and "collective" not in text


@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("held", ["pool", "array"])
def test_jit_cuts_query_heads(held, heads, rng, four_cpus):
    """As q is cut, results are; where heads do not divide, they are whole."""
    drawn = Drawn(Case(heads=heads, sinks=True), rng)
    mesh = of_devices()
    cut = heads % 4 == 0
    names = PartitionSpec(None, "heads" if cut else None)
    q = jax.device_put(drawn.q, NamedSharding(mesh, names))
    pages = drawn.pool() if held == "pool" else drawn.pages
    pages = jax.device_put(pages, NamedSharding(mesh, PartitionSpec()))

    def step(q: Any, pages: Any) -> Any:
        return drawn.run(q=q, pages=pages, layer=1 if held == "pool" else None)

    out, lse = jax.jit(step)(q, pages)
    drawn.hold(out, lse)
    if cut:
        assert out.sharding.shard_shape(out.shape)[1] == heads // 4
        text = jax.jit(step).lower(q, pages).compile().as_text()
        assert "all-gather" not in text


def test_explicit_sharding_says_how_results_are_cut(rng, four_cpus):
    drawn = Drawn(Case(heads=8), rng)
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("heads",), kind, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        q = jax.device_put(
            drawn.q, NamedSharding(mesh, PartitionSpec(None, "heads", None))
        )
        out, lse = jax.jit(lambda q: drawn.run(q=q))(q)
    assert out.sharding.spec[1] == "heads" and lse.sharding.spec[1] == "heads"
    drawn.hold(out, lse)


def test_the_cache_is_read_once():
    """A step takes its latents once: half of what keys and values of their own take."""
    q = jnp.zeros((16, 16, 576), jnp.float32)
    pages = jnp.zeros((512, 16, 576), jnp.float32)
    tables, lens = jnp.zeros((16, 64), jnp.int32), jnp.zeros(16, jnp.int32)
    starts = jnp.arange(17)

    def latent(pages: Any) -> Any:
        return paged_attention(
            q, pages, None, tables, lens, query_start=starts, value_dim=512
        )

    compiled = jax.jit(latent).lower(pages).compile()
    assert compiled.as_text().count(" gather(") <= 2  # tables, and latents
    gathered = 16 * 64 * 16 * 576 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < gathered / 10


# ---- messages ------------------------------------------------------------------------

Q, PAGES = np.zeros((5, 4, 24), np.float32), np.zeros((9, 16, 24), np.float32)
GIVEN = {
    "q": Q,
    "pages": PAGES,
    "layer": None,
    "block_tables": np.zeros((2, 3), np.int32),
    "kv_lens": np.zeros(2, np.int32),
    "query_start": np.zeros(3, np.int32),
    "value_dim": 16,
}


def standin(num_outer: int, heads: int, dtype: str = "float32") -> KVPool:
    spec = BlockSpec(3, num_outer, 16, heads, 24, dtype)
    return KVPool(jax.ShapeDtypeStruct((9, *spec.block_shape), spec.dtype), spec)


WRONG = {
    "no value_dim": (
        {"value_dim": None},
        TypeError,
        r"pages must be a KVPool or a pair .*, got float32\[9, 16, 24\]; with value_dim"
        r" it may be one array \[P, T, D\]",
    ),
    "a latent pool without value_dim": (
        {"pages": standin(1, 1), "layer": 0, "value_dim": None},
        ValueError,
        "num_outer=2, got num_outer=1; pass value_dim",
    ),
    "a pool of keys and values": (
        {"pages": standin(2, 1), "layer": 0},
        ValueError,
        "num_outer=1 and num_kv_heads=1, got num_outer=2 and num_kv_heads=1; leave",
    ),
    "two key heads": (
        {"pages": standin(1, 2), "layer": 0},
        ValueError,
        "got num_outer=1 and num_kv_heads=2",
    ),
    "a pair": (
        {"pages": (PAGES, PAGES)},
        TypeError,
        r"with value_dim pages must be a KVPool or one array \[P, T, D\], got tuple",
    ),
    "an axis of heads": (
        {"pages": PAGES[:, :, None]},
        ValueError,
        r"pages must be \[P, T, D\].*got float32\[9, 16, 1, 24\]; pages\[:, :, 0\]",
    ),
    "no blocks": ({"pages": PAGES[:0]}, ValueError, "none of them 0, got"),
    "integers": (
        {"pages": PAGES.astype(np.int32)},
        TypeError,
        "pages must hold floats",
    ),
    "another head dim": ({"q": Q[..., :8]}, ValueError, "must have one head dim"),
    "another dtype": ({"q": Q.astype(np.float16)}, TypeError, "must have one dtype"),
    "a layer": (
        {"layer": 0},
        ValueError,
        "layer must be None with a pair of pages or one array",
    ),
    "no layer": ({"pages": standin(1, 1)}, TypeError, "layer must be an integer"),
    "value_dim 25": (
        {"value_dim": 25},
        ValueError,
        "value_dim must be an integer from 1 to the head dim 24, got 25; values are",
    ),
    "value_dim 0": ({"value_dim": 0}, ValueError, "from 1 to .*, got 0"),
    "value_dim 1.5": ({"value_dim": 1.5}, TypeError, "from 1 to .*, got 1.5"),
    "v_scale": (
        {"pages": PAGES.astype(np.int8), "v_scale": 2.0},
        ValueError,
        "v_scale must be None with value_dim, got float; values are columns",
    ),
    "a scale of floats": ({"k_scale": 2.0}, ValueError, "k_scale is for blocks of"),
    "the kernel": (
        {"implementation": "cuda"},
        ValueError,
        "implementation='cuda' does not serve",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match="^paged_attention: .*" + message):
        jax.jit(lambda: paged_attention(**GIVEN | changes)).lower()
