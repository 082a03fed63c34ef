"""Inside `shard_map` every device works on its own heads, with no ceremony."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model import PoolModel, assert_same_bits, lay, make_pool, random_bits, read_pool

import jax_kvblock as kv

NL, NO, NT, NH, HD = DIMS = (2, 2, 3, 4, 5)
SPEC = kv.BlockSpec(*DIMS, jnp.float32)
LOCAL = SPEC.replace(num_kv_heads=2)  # what a device holds: heads over "h", of size 2
IDS = np.int32([4, -1, 0, 5, 9, 2])
UNIQUE = np.int32([5, -1, 1, 8, 3, 0])
SLOTS = np.int32([17, -1, 3, 40])
HEADS = P(None, None, None, None, "h")  # of an NHD pool


@pytest.fixture(autouse=True)
def mesh():
    """Several devices are the point here, so these tests run on CPUs everywhere."""
    devices = jax.devices("cpu")
    with jax.default_device(devices[0]):
        yield jax.make_mesh((2, 2), ("b", "h"), devices=devices[:4])


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def mapped(mesh, in_specs, out_specs):
    """A decorator: shard_map with its default checks, under jit."""

    def wrap(f):
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        )

    return wrap


def local(data):
    return kv.KVPool(data, LOCAL)


# ---- conversions ---------------------------------------------------------------------


def test_conversions(rng, mesh):
    blocks = random_bits(rng, (4, *DIMS), "float32")
    nhd, universal = P("b", None, None, None, "h"), P("b", "h")

    @mapped(mesh, nhd, (universal, nhd, P("b", None, None, "h")))
    def convert(x):
        universal = kv.block_to_universal(x)
        back = kv.universal_to_block(universal)
        return universal, back, kv.block_to_operational(x)

    got, back, packed = convert(put(blocks, mesh, nhd))
    assert_same_bits(got, lay(blocks, "universal"))
    assert_same_bits(back, blocks)
    halves = [lay(blocks[..., i : i + 2, :], "operational") for i in (0, 2)]
    assert_same_bits(packed, np.concatenate(halves, axis=-1))


def test_lists_with_pieces_that_vary_differently(rng, mesh):
    """A replicated piece beside a sharded one, in one list."""
    blocks = random_bits(rng, (1, *DIMS[:3], 2, HD), "float32")
    pieces = list(blocks.reshape(-1, NT, 2, HD))
    last = np.concatenate([pieces[-1], pieces[0]], axis=1)

    @mapped(mesh, (P(), P(None, "h")), P("h"))
    def convert(shared, varying):
        (got,) = kv.block_to_universal([[*shared, varying]])
        return got

    got = convert(jnp.asarray(np.stack(pieces[:-1])), put(last, mesh, P(None, "h")))
    first = lay(blocks, "universal")[0]
    second = first.copy()
    second[:, -1, -1] = last[:, 2:].transpose(1, 0, 2)
    assert_same_bits(got, np.concatenate([first, second]))


# ---- pools ---------------------------------------------------------------------------


def test_gather_with_replicated_ids(rng, mesh):
    blocks = random_bits(rng, (6, *DIMS), "float32")

    @mapped(mesh, (HEADS, P()), P(None, "h"))
    def gather(data, ids):
        return kv.gather_blocks(local(data), ids)

    got = gather(put(blocks, mesh, HEADS), IDS)
    assert_same_bits(got, lay(PoolModel(blocks).gather(IDS), "universal"))


def test_gather_with_ids_of_each_device(rng, mesh):
    """Ids over "b", heads over "h"; and a pool that is the same everywhere."""
    blocks = random_bits(rng, (6, *DIMS), "float32")
    want = lay(PoolModel(blocks).gather(IDS), "universal")

    @mapped(mesh, (HEADS, P("b")), P("b", "h"))
    def gather(data, ids):
        return kv.gather_blocks(local(data), ids)

    assert_same_bits(gather(put(blocks, mesh, HEADS), put(IDS, mesh, P("b"))), want)

    @mapped(mesh, (P(), P("b")), P("b"))
    def gather_whole(data, ids):
        return kv.gather_blocks(kv.KVPool(data, SPEC), ids)

    assert_same_bits(gather_whole(blocks, put(IDS, mesh, P("b"))), want)


def test_ids_known_while_tracing(rng, mesh):
    blocks = random_bits(rng, (6, *DIMS), "float32")

    @mapped(mesh, HEADS, P(None, "h"))
    def gather(data):
        return kv.gather_blocks(local(data), [4, -1, 1])

    want = lay(PoolModel(blocks).gather([4, -1, 1]), "universal")
    assert_same_bits(gather(put(blocks, mesh, HEADS)), want)


def test_scatter_and_copy(rng, mesh):
    blocks = random_bits(rng, (6, *DIMS), "float32")
    model, new = PoolModel(blocks), random_bits(rng, (len(UNIQUE), *DIMS), "float32")
    model.scatter(UNIQUE, new)
    model.scatter([1, 0], model.gather([0, 1]))

    @mapped(mesh, (HEADS, P(), P(None, "h")), HEADS)
    def update(data, ids, x):
        pool = kv.scatter_blocks(local(data), ids, x)
        return kv.copy_blocks(pool, [0, 1], [1, 0]).data

    x = put(lay(new, "universal"), mesh, P(None, "h"))
    assert_same_bits(update(put(blocks, mesh, HEADS), UNIQUE, x), model.blocks)


def test_a_pool_that_is_alike_everywhere_may_take_blocks_that_vary(rng, mesh):
    """Then the new pool varies as its blocks do."""
    blocks = random_bits(rng, (6, *DIMS[:3], 2, HD), "float32")
    new = random_bits(rng, (len(UNIQUE), *DIMS), "float32")
    halves = [PoolModel(blocks), PoolModel(blocks)]
    for i, half in enumerate(halves):
        half.scatter(UNIQUE, new[:, :, :, :, 2 * i : 2 * i + 2])

    @mapped(mesh, (P(), P(), P(None, "h")), HEADS)
    def update(data, ids, x):
        return kv.scatter_blocks(local(data), ids, x).data

    got = update(blocks, UNIQUE, put(lay(new, "universal"), mesh, P(None, "h")))
    want = np.concatenate([half.blocks for half in halves], axis=4)
    assert_same_bits(got, want)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "layered"])
def test_transfer(rng, mesh, contiguous):
    mine, theirs = random_bits(rng, (2, 6, *DIMS), "float32")
    model = PoolModel(mine)
    model.scatter(UNIQUE, PoolModel(theirs).gather(IDS))
    heads = HEADS if contiguous else P(None, None, None, "h")
    data = mine if contiguous else tuple(mine.swapaxes(0, 1))

    @mapped(mesh, (P(None, "h"), heads, P()), heads)
    def transfer(src, dst, ids):
        source = kv.KVPool(src, LOCAL.replace(layout="universal"))
        return kv.transfer_blocks(source, ids[0], local(dst), ids[1]).data

    src = put(lay(theirs, "universal"), mesh, P(None, "h"))
    got = transfer(src, put(data, mesh, heads), np.stack([IDS, UNIQUE]))
    if not contiguous:
        got = np.stack(got, axis=1)
    assert_same_bits(got, model.blocks)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "layered"])
def test_scan_of_appends(rng, mesh, contiguous):
    blocks = random_bits(rng, (6, *DIMS), "float32")
    k, v = random_bits(rng, (2, len(SLOTS), NH, HD), "float32")
    model = PoolModel(blocks)
    for layer in range(NL):
        model.append(layer, [k, v], SLOTS)
    heads = HEADS if contiguous else P(None, None, None, "h")
    data = blocks if contiguous else tuple(blocks.swapaxes(0, 1))

    @mapped(mesh, (heads, P(None, "h"), P(None, "h"), P()), heads)
    def fill(data, k, v, slots):
        def body(pool, layer):
            return kv.append_kv(pool, layer, k, v, slots), None

        return jax.lax.scan(body, local(data), jnp.arange(NL))[0].data

    k, v = (put(x, mesh, P(None, "h")) for x in (k, v))
    got = fill(put(data, mesh, heads), k, v, SLOTS)
    if not contiguous:
        got = np.stack(got, axis=1)
    assert_same_bits(got, model.blocks)


def test_each_device_appends_to_its_own_layer(rng, mesh):
    """A layer that varies: rank i fills layer i of its heads."""
    blocks = random_bits(rng, (6, *DIMS), "float32")
    k, v = random_bits(rng, (2, len(SLOTS), NH, HD), "float32")
    halves = [PoolModel(blocks[:, :, :, :, i : i + 2]) for i in (0, 2)]
    for i, half in enumerate(halves):
        half.append(i, [x[:, 2 * i : 2 * i + 2] for x in (k, v)], SLOTS)

    @mapped(mesh, (HEADS, P(None, "h"), P(None, "h"), P()), HEADS)
    def append(data, k, v, slots):
        return kv.append_kv(local(data), jax.lax.axis_index("h"), k, v, slots).data

    k, v = (put(x, mesh, P(None, "h")) for x in (k, v))
    got = append(put(blocks, mesh, HEADS), k, v, SLOTS)
    assert_same_bits(got, np.concatenate([half.blocks for half in halves], axis=4))


# ---- transformations -----------------------------------------------------------------


def test_vmap_inside(rng, mesh):
    blocks = random_bits(rng, (3, 6, *DIMS), "float32")
    ids = np.int32([IDS, IDS[::-1], UNIQUE])
    heads = P(None, *HEADS)

    @mapped(mesh, (heads, P()), P(None, None, "h"))
    def gather(data, ids):
        return jax.vmap(lambda d, i: kv.gather_blocks(local(d), i))(data, ids)

    got = gather(put(blocks, mesh, heads), ids)
    for x, one, row in zip(got, blocks, ids, strict=True):
        assert_same_bits(x, lay(PoolModel(one).gather(row), "universal"))


def test_grad_of_a_conversion(rng, mesh):
    blocks = rng.integers(-8, 9, (4, *DIMS)).astype(np.float32)
    nhd = P("b", None, None, None, "h")

    def energy(x):
        return jnp.sum(kv.block_to_universal(x) ** 2)

    inside = mapped(mesh, nhd, nhd)(jax.grad(energy))
    np.testing.assert_array_equal(inside(put(blocks, mesh, nhd)), 2 * blocks)


def test_grad_of_a_gather_inside_and_through(rng, mesh):
    blocks = rng.integers(-8, 9, (6, *DIMS)).astype(np.float32)
    ids = np.int32([4, 4, -1, 0])
    want = np.zeros_like(blocks)
    want[4], want[0] = 4 * blocks[4], 2 * blocks[0]

    def energy(data, ids):
        return jnp.sum(kv.gather_blocks(local(data), ids) ** 2)

    data = put(blocks, mesh, HEADS)
    inside = mapped(mesh, (HEADS, P()), HEADS)(jax.grad(energy))
    np.testing.assert_array_equal(inside(data, ids), want)

    @mapped(mesh, (HEADS, P()), P())
    def total(data, ids):
        return jax.lax.psum(energy(data, ids), "h")

    with jax.set_mesh(mesh):
        through = jax.jit(jax.grad(total))(data, ids)
    np.testing.assert_array_equal(through, want)


# ---- a change of tensor-parallel size ------------------------------------------------


def test_two_ranks_become_four_and_two_again(rng):
    """Head ranges cut each rank's blocks for the ranks of the other size."""
    devices, ids = jax.devices("cpu")[:4], np.int32([0, 1, 2, 3])
    whole = random_bits(rng, (4, *DIMS), "float32")

    def rank_pool(device, heads, layout):
        with jax.default_device(device):
            spec = SPEC.replace(num_kv_heads=heads, layout=layout)
            return kv.KVPool.zeros(spec, 4, device=device)

    def half(rank):
        with jax.default_device(devices[rank]):
            return make_pool(whole[:, :, :, :, 2 * rank : 2 * rank + 2], "NHD")

    pairs = [half(0), half(1)]
    quarters = []
    for rank, device in enumerate(devices):
        part = (rank % 2, rank % 2 + 1)
        slice_ = kv.gather_blocks(pairs[rank // 2], ids, "universal", heads=part)
        arrived = jax.device_put(slice_, device)
        quarters.append(kv.scatter_blocks(rank_pool(device, 1, "HND"), ids, arrived))
    for rank, pool in enumerate(quarters):
        assert pool.data.devices() == {devices[rank]}
        assert_same_bits(read_pool(pool), whole[:, :, :, :, rank : rank + 1])

    for rank, device in enumerate(devices[:2]):
        merged = rank_pool(device, 2, "NHD")
        for head in range(2):
            quarter = jax.device_put(quarters[2 * rank + head], device)
            merged = kv.transfer_blocks(
                quarter, ids, merged, ids, heads=(head, head + 1)
            )
        assert_same_bits(read_pool(merged), read_pool(pairs[rank]))


def test_universal_blocks_reshard_by_their_first_axis(rng, mesh):
    """The same change as one reshard: universal blocks are cut along dimension 0."""
    blocks = random_bits(rng, (4, *DIMS), "float32")
    two = put(blocks, mesh, HEADS)
    four = NamedSharding(mesh, P(None, ("h", "b")))
    got = jax.jit(kv.block_to_universal, out_shardings=four)(two)
    assert got.sharding.is_equivalent_to(four, got.ndim)
    for shard in got.addressable_shards:
        assert shard.data.shape[1] == 1
    assert_same_bits(got, lay(blocks, "universal"))
