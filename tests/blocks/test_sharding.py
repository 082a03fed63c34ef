"""Sharded blocks stay on their devices: right values, sharded results, no traffic."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of, put
from model import PoolModel, assert_same_bits, lay, random_bits, read_pool

import jax_kvblock as kv

NL, NO, NT, NH, HD = DIMS = (2, 2, 3, 4, 5)
SPEC = kv.BlockSpec(*DIMS, jnp.float32)
HND = SPEC.replace(layout="HND")
IDS = np.int32([4, -1, 0, 5, 9, 2])
UNIQUE = np.int32([5, -1, 1, 8, 3, 0])
SLOTS = np.int32([17, -1, 3, 40])
TRAFFIC = re.compile(
    r"all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|"
    r"collective-broadcast|\bsend\b|\brecv\b"
)


pytestmark = pytest.mark.usefixtures("four_cpus")


def assert_no_traffic(compiled) -> None:
    found = TRAFFIC.findall(compiled.as_text())
    assert not found, found


def run(function, *args, donate=()):
    """The result of a jitted function that must not talk between devices."""
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    assert_no_traffic(compiled)
    return compiled(*args)


def assert_sharded(x, mesh, *spec) -> None:
    want = NamedSharding(mesh, P(*spec))
    assert x.sharding.is_equivalent_to(want, x.ndim), (x.sharding, want)


def test_the_traffic_check_sees_traffic():
    mesh = mesh_of()
    x = put(jnp.arange(8.0), mesh, "b")
    gathered = NamedSharding(mesh, P())
    compiled = jax.jit(lambda x: x * 2, out_shardings=gathered).lower(x).compile()
    with pytest.raises(AssertionError):
        assert_no_traffic(compiled)


# ---- conversions ---------------------------------------------------------------------

CONVERSIONS = {  # source, destination, how a stack of blocks is sharded on both sides
    "NHD to universal": ("NHD", "universal", ("b", 0, 0, 0, "h"), ("b", "h")),
    "universal to NHD": ("universal", "NHD", ("b", "h"), ("b", 0, 0, 0, "h")),
    "HND to universal": ("HND", "universal", ("b", 0, 0, "h"), ("b", "h")),
    "universal to HND": ("universal", "HND", ("b", "h"), ("b", 0, 0, "h")),
    "NHD to HND": ("NHD", "HND", ("b", 0, 0, 0, "h"), ("b", 0, 0, "h")),
    "HND to operational": ("HND", "operational", ("b", 0, 0, "h"), ("b", 0, 0, "h")),
    "NHD to operational": ("NHD", "operational", ("b",), ("b",)),
    "both axes on blocks": ("NHD", "universal", (("b", "h"),), (("b", "h"),)),
    "heads alone": ("NHD", "universal", (None, 0, 0, 0, "h"), (None, "h")),
    "heads on two axes": (
        "NHD", "universal", (None, 0, 0, 0, ("b", "h")), (None, ("b", "h")),
    ),
}  # fmt: skip


def spec_of(entries):
    return [None if entry == 0 else entry for entry in entries]


@by_axis_type
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_under_jit(rng, name, axis_type):
    src, dst, src_shards, dst_shards = CONVERSIONS[name]
    mesh = mesh_of(axis_type)
    blocks = random_bits(rng, (4, *DIMS), "float32")
    spec = HND if "HND" in (src, dst) else SPEC
    x = put(lay(blocks, src, spec.layout), mesh, *spec_of(src_shards))
    with jax.set_mesh(mesh):
        got = run(lambda x: kv.convert_blocks(x, src, dst, spec), x)
    assert_sharded(got, mesh, *spec_of(dst_shards))
    assert_same_bits(got, lay(blocks, dst, spec.layout))


LEADING = {  # how leading axes are cut, ways to run the conversion over them
    "the first": (("b", None), "call"),
    "the second": ((None, "b"), "call"),
    "both": (("b", "h"), "call"),
    "the last of three": ((None, None, "b"), "call"),
    "one of vmap, one of the call": (("b", "h"), "vmap"),
    "two of vmap": (("h", "b"), "vmap vmap"),
    "five, two of vmap": ((None, "b", None, "h", None), "vmap vmap"),
}


@by_axis_type
@pytest.mark.parametrize("name", LEADING)
def test_any_leading_axis_may_be_cut(rng, name, axis_type):
    shards, how = LEADING[name]
    mesh = mesh_of(axis_type)
    blocks = random_bits(rng, (*[2] * len(shards), *DIMS), "float32")
    heads = [] if "h" in shards else ["h"]
    x = put(blocks, mesh, *shards, *[None] * 3, *heads)
    convert = kv.block_to_universal
    for _ in range(how.count("vmap")):
        convert = jax.vmap(convert)
    with jax.set_mesh(mesh):
        got = run(convert, x)
        back = run(jax.vmap(kv.universal_to_block), got)
    assert_sharded(got, mesh, *shards, *heads)
    assert_same_bits(got, lay(blocks, "universal"))
    assert_same_bits(back, blocks)


@by_axis_type
def test_lists_stay_sharded_by_heads(rng, axis_type):
    mesh = mesh_of(axis_type)
    blocks = random_bits(rng, (2, *DIMS), "float32")
    pieces = [
        [put(p, mesh, None, "h") for p in x.reshape(-1, NT, NH, HD)] for x in blocks
    ]
    with jax.set_mesh(mesh):
        got = run(kv.block_to_universal, pieces)
    for x, want in zip(got, lay(blocks, "universal"), strict=True):
        assert_sharded(x, mesh, "h")
        assert_same_bits(x, want)


@by_axis_type
def test_vmap_and_grad_stay_sharded(rng, axis_type):
    mesh = mesh_of(axis_type)
    x = jnp.asarray(rng.integers(-8, 9, (4, 3, *DIMS)).astype(np.float32))
    sharded = put(x, mesh, "b", None, None, None, None, "h")

    def slope(x):
        y, pull = jax.vjp(jax.vmap(kv.block_to_universal), x)
        return pull(y * 2)[0]

    with jax.set_mesh(mesh):
        got = run(slope, sharded)
    assert_sharded(got, mesh, "b", None, None, None, None, "h")
    np.testing.assert_array_equal(got, 2 * x)


# ---- pools ---------------------------------------------------------------------------

POOL_SHARDS = {"NHD": (0, 0, 0, 0, "h"), "HND": (0, 0, 0, "h"), "universal": (0, "h")}


def pool_on(mesh, blocks, layout, contiguous=True):
    spec = SPEC.replace(layout=layout)
    laid, shards = lay(blocks, layout), spec_of(POOL_SHARDS[layout])
    if contiguous:
        return kv.KVPool.wrap(put(laid, mesh, *shards), spec)
    layers = [put(laid[:, i], mesh, shards[0], *shards[2:]) for i in range(NL)]
    return kv.KVPool.wrap(layers, spec)


def assert_pool(pool, before, model) -> None:
    for x, y in zip(pool.arrays, before.arrays, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, y.ndim), (x.sharding, y.sharding)
    assert_same_bits(read_pool(pool), model.blocks)


@pytest.fixture(params=["NHD", "NHD layered", "HND", "universal"])
def held(request):
    layout, *layered = request.param.split()
    return layout, not layered


@by_axis_type
def test_gather_from_a_pool_sharded_by_heads(rng, held, axis_type):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    with jax.set_mesh(mesh):
        got = run(kv.gather_blocks, pool, put(IDS, mesh))
    assert_sharded(got, mesh, None, "h")
    assert_same_bits(got, lay(model.gather(IDS), "universal"))


@by_axis_type
def test_gather_with_sharded_ids(rng, held, axis_type):
    """Ids over one mesh axis, heads over the other: each device its own part."""
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    with jax.set_mesh(mesh):
        got = run(kv.gather_blocks, pool, put(IDS, mesh, "b"))
    assert_sharded(got, mesh, "b", "h")
    assert_same_bits(got, lay(model.gather(IDS), "universal"))


@by_axis_type
def test_the_gradient_of_a_gather(rng, axis_type):
    """Blocks may repeat, so XLA adds them up, and for Auto axes XLA says where."""
    mesh = mesh_of(axis_type)
    blocks = rng.integers(-8, 9, (6, *DIMS)).astype(np.float32)
    pool, ids = pool_on(mesh, blocks, "NHD"), put(np.int32([4, 4, -1, 0]), mesh)

    def energy(pool, ids):
        return jnp.sum(kv.gather_blocks(pool, ids) ** 2)

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(energy))(pool, ids)
    if axis_type == AxisType.Explicit:
        assert_sharded(got.data, mesh, None, None, None, None, "h")
    want = np.zeros_like(blocks)
    want[4], want[0] = 4 * blocks[4], 2 * blocks[0]
    np.testing.assert_array_equal(got.data, want)


@by_axis_type
def test_scatter_into_a_pool_sharded_by_heads(rng, held, axis_type):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    new = random_bits(rng, (len(UNIQUE), *DIMS), "float32")
    model.scatter(UNIQUE, new)
    x = put(lay(new, "universal"), mesh, None, "h")
    with jax.set_mesh(mesh):
        got = run(kv.scatter_blocks, pool, put(UNIQUE, mesh), x)
    assert_pool(got, pool, model)


@by_axis_type
def test_copies_within_a_pool_sharded_by_heads(rng, held, axis_type):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    model.scatter(UNIQUE, model.gather(IDS))
    with jax.set_mesh(mesh):
        got = run(kv.copy_blocks, pool, put(IDS, mesh), put(UNIQUE, mesh))
    assert_pool(got, pool, model)


@by_axis_type
def test_transfers_between_pools_sharded_by_heads(rng, held, axis_type):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    others = random_bits(rng, (7, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    source = pool_on(mesh, others, "HND")
    model.scatter(UNIQUE, PoolModel(others).gather(IDS))
    with jax.set_mesh(mesh):
        got = run(kv.transfer_blocks, source, put(IDS, mesh), pool, put(UNIQUE, mesh))
    assert_pool(got, pool, model)


@by_axis_type
@pytest.mark.parametrize("layer", [1, "traced"])
def test_append_to_a_pool_sharded_by_heads(rng, held, axis_type, layer):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    k, v = random_bits(rng, (2, len(SLOTS), NH, HD), "float32")
    model.append(1, [k, v], SLOTS)
    k, v = (put(x, mesh, None, "h") for x in (k, v))
    with jax.set_mesh(mesh):
        if layer == "traced":
            where = put(np.int32(1), mesh)
            got = run(kv.append_kv, pool, where, k, v, put(SLOTS, mesh))
        else:
            append = lambda p, k, v, s: kv.append_kv(p, 1, k, v, s)  # noqa: E731
            got = run(append, pool, k, v, put(SLOTS, mesh))
    assert_pool(got, pool, model)


@by_axis_type
def test_a_prompt_goes_in_and_a_layer_comes_out_by_heads(rng, held, axis_type):
    mesh, blocks = mesh_of(axis_type), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    k, v = random_bits(rng, (2, NL, len(SLOTS), NH, HD), "float32")
    for layer in range(NL):
        model.append(layer, [k[layer], v[layer]], SLOTS)
    k, v = (put(x, mesh, None, None, "h") for x in (k, v))
    with jax.set_mesh(mesh):
        append = lambda p, k, v, s: kv.append_kv(p, None, k, v, s)  # noqa: E731
        got = run(append, pool, k, v, put(SLOTS, mesh))
        rows = run(kv.gather_kv, got, put(np.int32(1), mesh), put(IDS, mesh))
    assert_pool(got, pool, model)
    want = model.gather(IDS)[:, 1].swapaxes(0, 1).reshape(2, -1, NH, HD)
    for x, y in zip(rows, want, strict=True):
        assert_sharded(x, mesh, None, "h")
        assert_same_bits(x, y)


def test_scan_of_appends_to_a_donated_sharded_pool(rng, held):
    mesh, blocks = mesh_of(), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    k, v = random_bits(rng, (2, len(SLOTS), NH, HD), "float32")
    for layer in range(NL):
        model.append(layer, [k, v], SLOTS)
    shardings = jax.tree.map(lambda x: x.sharding, pool)
    k, v = (put(x, mesh, None, "h") for x in (k, v))

    def fill(pool, k, v, slots):
        def body(pool, layer):
            return kv.append_kv(pool, layer, k, v, slots), None

        return jax.lax.scan(body, pool, jnp.arange(NL))[0]

    got = run(fill, pool, k, v, put(SLOTS, mesh), donate=0)
    for x, want in zip(got.arrays, jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(want, x.ndim)
    assert_same_bits(read_pool(got), model.blocks)


def test_a_head_range_of_a_sharded_pool_is_right(rng, held):
    """A range across devices may cost traffic, but never a wrong value."""
    mesh, blocks = mesh_of(), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    got = jax.jit(lambda p, i: kv.gather_blocks(p, i, heads=(1, 4)))(pool, IDS)
    want = model.gather(IDS, (1, 4))
    assert_same_bits(got, lay(want, "universal"))
    model.scatter(UNIQUE, want, (0, 3))
    got = jax.jit(lambda p, i, x: kv.scatter_blocks(p, i, x, heads=(0, 3)))(
        pool, UNIQUE, got
    )
    assert_same_bits(read_pool(got), model.blocks)


@pytest.mark.parametrize("axis", ["blocks", "layers", "tokens", "head_dim"])
def test_pools_sharded_in_other_ways_are_right(rng, axis):
    mesh, blocks = mesh_of(), random_bits(rng, (6, 2, 2, 2, 4, 6), "float32")
    position = {"blocks": 0, "layers": 1, "tokens": 3, "head_dim": 5}[axis]
    shards = [None] * 6
    shards[position] = "h"
    spec = kv.BlockSpec(2, 2, 2, 4, 6, jnp.float32)
    pool, model = kv.KVPool.wrap(put(blocks, mesh, *shards), spec), PoolModel(blocks)
    got = jax.jit(kv.gather_blocks)(pool, IDS)
    assert_same_bits(got, lay(model.gather(IDS), "universal"))
    model.scatter(UNIQUE, model.gather(IDS))
    scattered = jax.jit(kv.scatter_blocks)(pool, UNIQUE, got)
    assert_same_bits(read_pool(scattered), model.blocks)


def test_eager_calls_take_sharded_pools(rng, held):
    mesh, blocks = mesh_of(), random_bits(rng, (6, *DIMS), "float32")
    pool, model = pool_on(mesh, blocks, *held), PoolModel(blocks)
    got = kv.gather_blocks(pool, put(IDS, mesh))
    assert_sharded(got, mesh, None, "h")
    assert_same_bits(got, lay(model.gather(IDS), "universal"))
