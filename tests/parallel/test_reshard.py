"""`reshard_blocks`: every bit beside NumPy, what travels, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reshard_processes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of, put
from messages import check
from model import assert_same_bits, random_bits, read_pool
from processes import hold_processes
from reshard_processes import (
    DIMS,
    DST_IDS,
    SRC_IDS,
    Place,
    hold,
    make_pool,
    on,
)

import jax_kvblock as kv
from jax_kvblock.parallel import reshard_blocks, reshard_copies, reshard_moves

pytestmark = pytest.mark.usefixtures("four_cpus")

SCRIPT = Path(reshard_processes.__file__)
FOUR = range(4)
SPEC = kv.BlockSpec(*DIMS, jnp.float32)
KINDS = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\("


# ---- bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("where", ["first", "last"])
def test_every_number_of_devices(rng, p, d, where):
    """On the same devices, on others, and on some of the same."""
    first = 0 if where == "first" else 4 - d
    hold(on(range(p)), on(range(first, first + d), "HND"), rng)


CUTS = [None, "a", "b", ("a", "b"), ("b", "a")]


@pytest.mark.parametrize("dst", CUTS)
@pytest.mark.parametrize("src", CUTS)
def test_every_cut_of_a_mesh(rng, src, dst):
    hold(on(FOUR, mesh=(2, 2), cut=src), on(FOUR, mesh=(2, 2), cut=dst), rng)


FORMS = {
    "NHD to universal": (on([0, 1]), on([2, 3], "universal")),
    "universal to HND": (on(FOUR, "universal"), on([1, 0], "HND")),
    "NHD on both": (on([0, 1]), on(FOUR)),
    "layers to layers": (
        on([0, 1], contiguous=False),
        on([2, 3], "HND", contiguous=False),
    ),
    "one array to layers": (on(FOUR, mesh=(2, 2)), on(FOUR, contiguous=False)),
    "layers to one array": (on([3], contiguous=False), on(FOUR, "universal")),
    "operational on one device": (on([0], "operational"), on([2, 3])),
    "operational, whole on each": (on([2, 3]), on([0, 1], "operational")),
    "operational to itself": (on([1], "operational"), on([2], "operational")),
    "heads merged with layers": (on([0, 1], "merged"), on(FOUR, "HND")),
    "to heads merged with layers": (on(FOUR), on([2, 1], "merged")),
    "the same devices in another order": (on(FOUR), on([2, 0, 3, 1], "HND")),
    "another mesh of the same devices": (
        on(FOUR, mesh=(2, 2), cut=("b", "a")),
        on([3, 2, 1, 0], "universal"),
    ),
    "whole on two devices": (on([0, 1], cut=None), on([2, 3], cut=None)),
}


@pytest.mark.parametrize("name", FORMS)
def test_layouts_and_arrays(rng, name):
    hold(*FORMS[name], rng)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ahead", [2, 4])
def test_in_as_many_chunks_as_blocks(rng, monkeypatch, name, ahead):
    monkeypatch.setattr(reshard_copies, "CHUNK_BYTES", 1)
    monkeypatch.setattr(reshard_copies, "AHEAD", ahead)
    hold(*FORMS[name], rng)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", [None, "STEP_BYTES", "CHUNK_BYTES"])
def test_by_collectives(rng, monkeypatch, name, how):
    """What several processes do, also where all devices are of one.

    All at once, in as many steps as there are blocks, and in several chunks of a step.
    """
    monkeypatch.setattr(reshard_moves, "_of_one_process", lambda devices: False)
    if how is not None:
        monkeypatch.setattr(reshard_moves, how, 1)
    hold(*FORMS[name], rng)


@pytest.mark.parametrize("dst", [on([0]), on([2, 0]), on([3, 1], "HND")], ids=str)
def test_what_is_read_where_it_is_sent(rng, monkeypatch, dst):
    """Fewer devices, all of which have blocks to send: there is no gather before."""
    monkeypatch.setattr(reshard_moves, "_of_one_process", lambda devices: False)
    monkeypatch.setattr(reshard_moves, "CHUNK_BYTES", 1)
    monkeypatch.setattr(reshard_moves, "_gather", None)
    hold(on(FOUR), dst, rng)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "float32"])
@pytest.mark.parametrize("dst", [on(FOUR), on([2, 3], "HND")], ids=["same", "others"])
def test_dtypes(rng, dtype, dst):
    """Any bits, also those of NaNs that a CPU would quiet."""
    hold(on(FOUR, mesh=(2, 2), cut="b"), dst, rng, dtype)


FEW = {  # KV heads that do not go around
    "two heads on four": (2, on([0, 1]), on(FOUR, mesh=(2, 2), cut="b")),
    "two heads from four": (2, on(FOUR, mesh=(2, 2)), on([3, 1])),
    "one head on all": (1, on([0]), on(FOUR, cut=None)),
    "six heads, three and two": (6, on([0, 1, 2]), on([3, 2])),
    "six heads, two and three": (6, on([0, 1]), on([1, 2, 3])),
}


@pytest.mark.parametrize("name", FEW)
def test_other_numbers_of_heads(rng, name):
    heads, src, dst = FEW[name]
    hold(src, dst, rng, dims=(2, 2, 3, heads, 5))


def test_pools_of_one_device_without_a_mesh(rng):
    """As `KVPool.zeros` makes them."""
    devices = jax.devices("cpu")
    blocks = random_bits(rng, (3, *DIMS), "float32")
    src = make_pool(blocks, on([1, 0]))
    dst = kv.KVPool.zeros(SPEC, 4, device=devices[2])
    got = reshard_blocks(src, [2, 0], dst, [0, 3])
    assert got.sharding == dst.sharding
    want = np.zeros((4, *DIMS), np.float32)
    want[[0, 3]] = blocks[[2, 0]]
    assert_same_bits(read_pool(got), want)
    back = reshard_blocks(got, range(3), src, range(3))
    assert_same_bits(read_pool(back), want[:3])


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray])
def test_all_heads_stay_on_one_of_several_devices(rng, form):
    """Its pool lies on a mesh of its own, and nothing travels."""
    device = jax.devices("cpu")[:1]
    blocks = random_bits(rng, (3, *DIMS), "float32")
    src = make_pool(blocks, on([0, 1], cut=None))
    mesh = jax.sharding.Mesh(np.array(device), ("tp",))
    alone = NamedSharding(mesh, P(None, None, None, None, "tp"))
    dst = kv.KVPool(jax.device_put(jnp.zeros((4, *DIMS)), alone), SPEC)
    got = reshard_blocks(src, form([2, 0]), dst, form([0, 3]))
    assert got.sharding == alone
    want = np.zeros((4, *DIMS), np.float32)
    want[[0, 3]] = blocks[[2, 0]]
    assert_same_bits(read_pool(got), want)


IDS = {
    "lists": lambda ids: ids.tolist(),
    "int64": lambda ids: ids.astype(np.int64),
    "arrays of JAX": jnp.asarray,
    "spread": lambda ids: put(np.append(ids, ids[-1:]), mesh_of(), "b")[:-1],
    "on a mesh": lambda ids: put(ids, mesh_of()),
}


@pytest.mark.parametrize("form", IDS)
@pytest.mark.parametrize("dst", [on(FOUR, mesh=(2, 2)), on([2, 3])], ids=str)
def test_ids_come_in_any_form(rng, form, dst):
    def run(src: Any, src_ids: Any, dst: Any, dst_ids: Any) -> Any:
        return reshard_blocks(src, IDS[form](src_ids), dst, IDS[form](dst_ids))

    hold(on(FOUR), dst, rng, run=run)


def test_no_ids_do_nothing(rng):
    src = make_pool(random_bits(rng, (3, *DIMS), "float32"), on([0, 1]))
    dst = make_pool(random_bits(rng, (3, *DIMS), "float32"), on([2, 3]))
    assert reshard_blocks(src, [], dst, []) is dst
    assert not dst.data.is_deleted()
    same = jax.jit(lambda p, q: reshard_blocks(p, [], q, []))
    assert "kvblock" not in str(same.trace(src, src).jaxpr)


@by_axis_type
def test_a_mesh_around_the_call_and_a_transfer_guard_change_nothing(rng, axis_type):
    def run(*args: Any) -> Any:
        with jax.set_mesh(mesh_of(axis_type)), jax.transfer_guard("disallow"):
            return reshard_blocks(*args)

    hold(on(FOUR, mesh=(2, 2)), on([3, 2, 1, 0]), rng, run=run)
    hold(on([0, 1]), on([2, 3]), rng, run=run)


# ---- memory, programs ----------------------------------------------------------------


@pytest.mark.parametrize("dst", [on(FOUR, "HND"), on([2, 3])], ids=["same", "others"])
def test_the_destination_keeps_its_memory(rng, dst):
    """Each device's part is where it was."""
    src = make_pool(random_bits(rng, (6, *DIMS), "float32"), on(FOUR, mesh=(2, 2)))
    pool = make_pool(random_bits(rng, (8, *DIMS), "float32"), dst)
    at = [s.data.unsafe_buffer_pointer() for s in pool.data.addressable_shards]
    got = reshard_blocks(src, SRC_IDS, pool, DST_IDS)
    assert at == [s.data.unsafe_buffer_pointer() for s in got.data.addressable_shards]
    assert pool.data.is_deleted()
    assert not src.data.is_deleted()


@pytest.mark.parametrize("places", [([0], [0]), ([0], [1])], ids=["same", "others"])
def test_memory_that_others_hold_is_not_written(rng, places):
    """NumPy's that JAX took as it is, and an export by DLPack."""
    src = make_pool(random_bits(rng, (6, *DIMS), "float32"), on(places[0]))
    raw = np.zeros(8 * int(np.prod(DIMS)) + 16, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    mine = raw[skip : skip + 8 * int(np.prod(DIMS))].reshape(8, *DIMS)
    device = jax.devices("cpu")[places[1][0]]
    array = jax.device_put(mine, device)
    assert array.unsafe_buffer_pointer() == mine.ctypes.data
    got = reshard_blocks(src, SRC_IDS, kv.KVPool.wrap(array, SPEC), DST_IDS)
    assert not mine.view(np.uint8).any()
    assert np.asarray(got.data).view(np.uint8).any()

    pool = kv.KVPool.zeros(SPEC, 8, device=device)
    export = np.from_dlpack(pool.data)
    reshard_blocks(src, SRC_IDS, pool, DST_IDS).block_until_ready()
    assert not export.view(np.uint8).any()


@pytest.mark.parametrize("dst", [on(FOUR, "HND"), on([2, 3])], ids=["same", "others"])
def test_new_ids_and_new_pools_of_the_same_kind_compile_nothing(rng, dst, compiles):
    hold(on(FOUR, mesh=(2, 2)), dst, np.random.default_rng(0))
    compiles.clear()
    hold(on(FOUR, mesh=(2, 2)), dst, np.random.default_rng(1))
    assert compiles == []
    hold(on(FOUR, mesh=(2, 2)), dst, rng, dims=(2, 2, 3, 4, 5))
    assert compiles  # the listener hears


# ---- what is refused -----------------------------------------------------------------


def pool_at(place: Place, dtype: Any = "float32", dims: Any = DIMS) -> kv.KVPool:
    return make_pool(np.zeros((3, *dims), dtype), place)


def pool_cut(layout: str, *entries: Any, dims: Any = DIMS) -> kv.KVPool:
    """A pool of a mesh of four devices, cut as these entries say."""
    spec = kv.BlockSpec(*dims, jnp.float32, layout)
    sharding = NamedSharding(mesh_of(), P(*entries))
    return kv.KVPool.zeros(spec, 4, device=sharding)


def in_host_memory() -> kv.KVPool:
    return kv.KVPool.zeros(SPEC, 3, memory_kind="pinned_host")


def donated() -> kv.KVPool:
    pool = pool_at(on([0]))
    pool.data.delete()
    return pool


def layers_cut_in_two_ways() -> kv.KVPool:
    mesh = mesh_of()
    shape = (3, *SPEC.block_shape[1:])
    cuts = (), (None, None, None, "h")
    layers = [put(np.zeros(shape, np.float32), mesh, *cut) for cut in cuts]
    return kv.KVPool.wrap(layers, SPEC)


def same_memory(src: Place, *entries: Any) -> tuple[Any, ...]:
    """A call with two pools whose arrays are two, of one memory on some device."""
    pool = pool_at(src)
    again = jax.device_put(pool.data, NamedSharding(mesh_of(), P(*entries)))
    assert again is not pool.data
    return pool, [0], kv.KVPool.wrap(again, pool.spec), [1]


def same_memory_of_the_second_device() -> tuple[Any, ...]:
    """A pool that is whole on two devices, and one of what the second has of it."""
    pool = pool_at(on([0, 1], cut=None))
    second = pool.data.addressable_shards[1].data
    return pool, [0], kv.KVPool.wrap(second, pool.spec), [1]


WIDER = (2, 2, 3, 8, 6)

REFUSED = {
    "no pool": (TypeError, "src_pool|KVPool, got ndarray|KVPool.wrap",
        lambda: (np.zeros(3), [0], pool_at(on([0])), [0])),
    "another dtype": (ValueError, "agree in dtype|src_pool has int8|float32|spec",
        lambda: (pool_at(on([0]), "int8"), [0], pool_at(on([1])), [0])),
    "other heads": (ValueError, "agree in num_kv_heads|has 8|has 4",
        lambda: (pool_at(on([0])), [0], pool_at(on([1]), dims=(2, 2, 3, 4, 5)), [0])),
    "another head dim": (ValueError, "agree in head_dim|has 5|has 6",
        lambda: (pool_at(on([0])), [0], pool_at(on([1]), dims=WIDER), [0])),
    "lengths": (ValueError, "src_ids and dst_ids|one length|got 2 and 1|-1",
        lambda: (pool_at(on([0])), [0, 1], pool_at(on([1])), [0])),
    "floats": (TypeError, "src_ids must be int32[n]|float32|.astype(jnp.int32)",
        lambda: (pool_at(on([0])), np.zeros(1, "f"), pool_at(on([1])), [0])),
    "rank": (ValueError, "dst_ids must be int32[n]|int32[1, 1]|reshape",
        lambda: (pool_at(on([0])), [0], pool_at(on([1])), np.zeros((1, 1), int))),
    "blocks cut": (ValueError, "src_pool|whole heads|blocks|(dim 0 of|in 2|device_put",
        lambda: (pool_cut("NHD", "b"), [0], pool_at(on([1])), [0])),
    "layers cut": (ValueError, "dst_pool|whole heads|layers|(dim 1 of|in 2|device_put",
        lambda: (pool_at(on([1])), [0], pool_cut("NHD", None, "h"), [0])),
    "head dim cut": (ValueError, "dst_pool|head_dim|(dim 5 of|cut its heads instead",
        lambda: (pool_at(on([1]), dims=WIDER), [0],
                 pool_cut("NHD", *[None] * 5, "h", dims=WIDER), [0])),
    "operational cut": (ValueError, "src_pool|tokens and heads and head_dim|NHD",
        lambda: (pool_cut("operational", None, None, None, "b"), [0],
                 pool_at(on([1])), [0])),
    "layers cut in two ways": (ValueError, "src_pool|layers cut alike|layer 1",
        lambda: (layers_cut_in_two_ways(), [0], pool_at(on([1])), [0])),
    "host memory": (ValueError, "src_pool|pinned_host|transfer_blocks",
        lambda: (in_host_memory(), [0], pool_at(on([1])), [0])),
    "to host memory": (ValueError, "dst_pool|pinned_host|transfer_blocks",
        lambda: (pool_at(on([1])), [0], in_host_memory(), [0])),
    "one pool": (ValueError, "two pools, got one|copy_blocks",
        lambda: (lambda p: (p, [0], p, [1]))(pool_at(on([0, 1])))),
    "one memory": (ValueError, "must not share memory|KVPool.zeros|jnp.copy",
        lambda: same_memory(on(FOUR), *[None] * 4, ("b", "h"))),
    "one memory on one device": (ValueError, "must not share memory|jnp.copy",
        lambda: same_memory(on([0]))),
    "one memory on the second device": (ValueError, "must not share memory|jnp.copy",
        same_memory_of_the_second_device),
    "donated": (RuntimeError, "dst_pool was donated",
        lambda: (pool_at(on([1])), [0], donated(), [0])),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    error, words, args = REFUSED[name]
    given = args()
    check("reshard_blocks", error, words, lambda: reshard_blocks(*given))


def test_what_is_refused_inside_of_jit():
    explicit = jax.sharding.AxisType.Explicit
    mesh = mesh_of(explicit)
    data = put(np.zeros((4, *DIMS), np.float32), mesh, "b")
    cut = kv.KVPool.wrap(data, SPEC)
    whole = kv.KVPool.wrap(put(data, mesh), SPEC)
    with jax.set_mesh(mesh):
        words = "src_pool|whole heads|blocks|device_put"
        call = jax.jit(lambda p, q: reshard_blocks(p, [0], q, [0]))
        check("reshard_blocks", ValueError, words, lambda: call(cut, whole))

    pools = pool_cut("NHD"), pool_cut("NHD")
    ids = jnp.int32([0])
    words = "arguments of the function|got arrays from outside"
    call = jax.jit(lambda: reshard_blocks(pools[0], ids, pools[1], ids))
    check("reshard_blocks", ValueError, words, call)

    def inside(src: Any, dst: Any) -> Any:
        return reshard_blocks(src, [0], dst, [0])

    mapped = jax.shard_map(
        inside, mesh=mesh_of(), in_specs=(P("b"), P("b")), out_specs=P("b")
    )
    pools = pool_cut("NHD", "b"), pool_cut("NHD", "b")
    words = "inside of jax.shard_map|transfer_blocks"
    check("reshard_blocks", ValueError, words, lambda: jax.jit(mapped)(*pools))


def test_pools_on_two_meshes_are_refused_inside_of_jit():
    pools = []
    for axis, first in (("a", 0), ("b", 2)):
        devices = jax.devices("cpu")[first : first + 2]
        kinds = (jax.sharding.AxisType.Explicit,)
        mesh = jax.make_mesh((2,), (axis,), kinds, devices=devices)
        whole = NamedSharding(mesh, P())
        pools.append(kv.KVPool.zeros(SPEC, 4, device=whole))
    words = "pools that jit traces must lie on one mesh|src_pool on|'a': 2|dst_pool on"
    words += "|'b': 2|call it outside of jit"
    call = jax.jit(lambda src, dst: reshard_blocks(src, [0], dst, [1]))
    check("reshard_blocks", ValueError, words, lambda: call(*pools))


def test_debug_checks_look_at_ids():
    src, dst = pool_at(on([0, 1])), pool_at(on([2, 3]))
    with kv.debug_checks():
        words = "src_ids[1] is 3|the pool's blocks are 0 to 2"
        call = lambda: reshard_blocks(src, [0, 3], dst, [0, 1])  # noqa: E731
        check("reshard_blocks", IndexError, words, call)
        words = "dst_ids[0] and dst_ids[1] are both 1"
        call = lambda: reshard_blocks(src, [0, 2], dst, [1, 1])  # noqa: E731
        check("reshard_blocks", ValueError, words, call)
        reshard_blocks(src, [0, -1], dst, [1, -1])


# ---- more devices, more processes ----------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_eight_devices_of_so_many_processes(count):
    hold_processes(SCRIPT, count, r"\d+")
