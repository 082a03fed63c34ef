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
from paged_model import Case, Drawn

from jax_kvblock import (
    BlockSpec,
    KVPool,
    KVScales,
    append_kv,
    paged_attention,
)

WIDTHS = {"kv_heads": 1, "dim": 24, "value_dim": 16}


def latent(**given: Any) -> Case:
    return Case(**WIDTHS | given)


class Latent(Drawn):
    """Its keys `[length, D]` and pages `[P, T, D]`: there is one array of both."""

    def __init__(
        self, case: Case, rng: np.random.Generator, implementation: str = "xla"
    ) -> None:
        super().__init__(case, rng, implementation)
        self.keys = [k[:, 0] for k in self.keys]
        self.pages = self.k[:, :, 0]

    def rows_of(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        k = self.keys[b][:, None]
        return k, k[..., : self.case.value_dim]

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
        given = {"pages": self.pages, "value_dim": self.case.value_dim}
        return super().run(**given | changes)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["xla", CUDA])
def draw(request: Any, rng: np.random.Generator) -> Any:
    """Draws a case for plain JAX, or for the kernel, which has dims and dtypes."""

    def drawn(case: Case) -> Latent:
        if request.param == "cuda":
            dtype = "bfloat16" if case.dtype == "float32" else case.dtype
            dims = {} if case.dim == 576 else {"dim": 192, "value_dim": 128}
            case = dataclasses.replace(case, dtype=dtype, **dims)
        return Latent(case, rng, request.param)

    return drawn


CASES = {
    "mixed": latent(),
    "DeepSeek's, decode": latent(
        sequences=((1, 70), (1, 300), (1, 0), (2, 5)),
        heads=16,
        dim=576,
        value_dim=512,
        scale=192**-0.5,
    ),
    "128 heads": latent(
        sequences=((1, 70), (2, 33)), heads=128, dim=576, value_dim=512, dtype="float16"
    ),
    "128 heads, more tiles than multiprocessors": latent(
        sequences=tuple((1, 20 + 2 * n) for n in range(70)),
        heads=128,
        dim=576,
        value_dim=512,
    ),
    "more than a step of keys": latent(sequences=((1, 1500), (2, 513), (1, 512))),
    "more than a tile of queries": latent(sequences=((150, 300), (1, 70), (65, 65))),
    "no keys, no queries": latent(
        sequences=((1, 0), (0, 40), (2, 2), (0, 0)), sinks=True
    ),
    "fewer keys than queries": latent(sequences=((9, 4), (1, 5))),
    "not causal": latent(causal=False),
    "both sides": latent(causal=False, window=(3, 4), sequences=((9, 40), (20, 20))),
    "a window, a softcap, sinks": latent(
        window=(5, None), softcap=2.5, sinks=True, sequences=((1, 700), (70, 90))
    ),
    "all columns": latent(value_dim=24),
    "one column": latent(value_dim=1, heads=1),
    "20 heads, blocks of 1": latent(heads=20, block_size=1, dtype="bfloat16"),
    "blocks of 5": latent(block_size=5, sequences=((1, 523), (4, 12))),
    "blocks longer than a step": latent(block_size=600, sequences=((1, 700), (4, 12))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, draw):
    drawn = draw(CASES[name])
    drawn.hold(*drawn.run())


def test_float64(rng):
    with jax.enable_x64(True):
        drawn = Latent(latent(dtype="float64", sinks=True), rng)
        drawn.hold(*drawn.run())


LAYOUTS = [("NHD", True), ("NHD", False), ("HND", True), ("universal", True)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
def test_pools(layout, contiguous, traced, draw):
    drawn = draw(latent())
    layer = jnp.int32(1) if traced else 1
    drawn.hold(*drawn.run(pages=drawn.pool(contiguous, layout), layer=layer))


def test_a_padded_batch(draw):
    drawn = draw(latent(sequences=((2, 9), (2, 33), (2, 2))))
    q = drawn.q.reshape(3, 2, *drawn.q.shape[1:])
    out, lse = drawn.run(q=q, query_start=None)
    drawn.hold(out.reshape(6, *out.shape[2:]), lse.reshape(6, -1))


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_was_appended_is_attended_to(contiguous, rng):
    """`append_kv` takes the latents as k, and no v."""
    spec = BlockSpec(2, 1, 16, 1, 24, "float32")
    pool = KVPool.zeros(spec, 4, contiguous=contiguous)
    drawn = Latent(latent(sequences=((3, 40),)), rng)

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
    drawn = Latent(latent(sequences=((1, 37), (6, 20), (1, 0), (40, 90))), rng)
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
    drawn = Latent(latent(sequences=((3, 40),)), rng)
    k = drawn.keys[0][:, None]
    pool, scales = append_kv(pool, 1, k, None, np.arange(40), scales=scales)
    given = {"pages": pool, "layer": 1, "block_tables": [[0, 1, 2]]}
    out, _ = drawn.run(**given, k_scale=scales.k)
    np.testing.assert_allclose(out, drawn.truth()[0], rtol=0, atol=0.03)


# ---- data that is wrong --------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_that_is_no_block_is_not_seen(bad, draw):
    drawn = draw(latent(sequences=((1, 48), (3, 20))))
    drawn.tables[0, 1] = bad
    drawn.pages[-1], drawn.pages[0] = (
        np.where(np.isin(i, drawn.tables), drawn.pages[i], np.nan)
        for i in (len(drawn.pages) - 1, 0)
    )
    out, lse = drawn.run()
    drawn.keys[0] = drawn.keys[0][np.r_[0:16, 32:48]]
    drawn.hold(out, lse)


def test_lengths_end_with_the_table(draw):
    drawn = draw(latent(sequences=((1, 64), (2, 64), (1, 64))))
    exact = drawn.run()
    huge = drawn.run(kv_lens=np.array([65, 2**31 - 1, 64], np.int32))
    for got, want in zip(huge, exact, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layer", [3, -1])
def test_of_a_layer_outside_the_pool_nobody_sees_a_key(layer, draw):
    drawn = draw(latent())
    out, lse = drawn.run(pages=drawn.pool(), layer=jnp.int32(layer))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_rows_of_no_sequence_are_zeros(draw):
    drawn = draw(latent(sequences=((4, 20), (4, 30))))
    q = np.concatenate([drawn.q, np.full_like(drawn.q[:3], np.nan)])
    out, lse = drawn.run(q=q)
    drawn.hold(out[:8], lse[:8])
    np.testing.assert_array_equal(out[8:], 0)
    out, lse = drawn.run(query_start=np.array([1, 4, 3], np.int32))
    assert np.isneginf(lse).all() and (np.asarray(out) == 0).all()


# ---- inside JAX ----------------------------------------------------------------------


@pytest.mark.parametrize("over", ["q", "pages", "everything"])
def test_vmap(over, draw):
    drawn = [draw(latent(sequences=((2, 30), (1, 9)))) for _ in range(3)]
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
    drawn = Latent(latent(heads=8, sinks=True), rng)
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
    drawn = Latent(latent(heads=heads, sinks=True), rng)
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
    drawn = Latent(latent(heads=8), rng)
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("heads",), kind, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        q = jax.device_put(
            drawn.q, NamedSharding(mesh, PartitionSpec(None, "heads", None))
        )
        out, lse = jax.jit(lambda q: drawn.run(q=q))(q)
    assert out.sharding.spec[1] == "heads" and lse.sharding.spec[1] == "heads"
    drawn.hold(out, lse)


@pytest.mark.cpu
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
