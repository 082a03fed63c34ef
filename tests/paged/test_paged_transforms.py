"""`paged_attention` inside JAX: transforms, meshes, settings, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_model import Case, Drawn, packed, pool_of
from settings import SETTINGS

from jax_kvblock import (
    BlockSpec,
    KVPool,
    merge_attention,
    paged_attention,
)


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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings(dtype, setting, rng):
    drawn = Drawn(Case(sequences=((1, 37), (5, 20), (1, 0)), dtype=dtype), rng)
    with SETTINGS[setting]():
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
