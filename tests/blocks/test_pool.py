"""Pools of every layout and memory follow a NumPy pool, bit by bit."""

from __future__ import annotations

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from model import (
    DIMS,
    DTYPES,
    ENGINE_KINDS,
    INT32,
    KINDS,
    Kind,
    PoolModel,
    assert_pool,
    assert_same_bits,
    lay,
    layout_of,
    random_bits,
    start,
)

import jax_kvblock as kv
from jax_kvblock.blocks import pool as pool_module

TARGET_KINDS = [k for k in KINDS if k.layout in ("HND", "universal")]
BLOCK_LAYOUTS = ("NHD", "HND", "operational", "universal", "merged")
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
by_engine_kind = pytest.mark.parametrize("kind", ENGINE_KINDS, ids=str)
by_heads = pytest.mark.parametrize("heads", [None, (1, 3)], ids=str)
by_implementation = pytest.mark.parametrize("implementation", ["kernel", "xla"])


def inner_of(kind: Kind) -> str:
    return "HND" if kind.layout == "HND" else "NHD"


# ---- building ------------------------------------------------------------------------


@by_kind
def test_zeros(kind):
    spec = kv.BlockSpec(*DIMS, jnp.bfloat16, layout_of(kind.layout))
    pool = kv.KVPool.zeros(
        spec, 7, contiguous=kind.contiguous, memory_kind=kind.memory_kind
    )
    assert pool.spec == spec
    assert pool.num_blocks == 7
    assert len(pool.arrays) == (1 if kind.contiguous else spec.num_layers)
    assert pool.nbytes == sum(x.nbytes for x in pool.arrays) == 7 * spec.block_bytes
    assert_pool(pool, PoolModel(np.zeros((7, *DIMS), jnp.bfloat16)), kind)


@pytest.mark.parametrize("contiguous", [True, False])
def test_zeros_inside_a_jit(rng, contiguous):
    spec = kv.BlockSpec(*DIMS, jnp.bfloat16)
    blocks = random_bits(rng, (2, *DIMS), "bfloat16")

    @jax.jit
    def fresh(ids, x):
        pool = kv.KVPool.zeros(spec, 7, contiguous=contiguous)
        return kv.scatter_blocks(pool, ids, x, "NHD")

    model = PoolModel(np.zeros((7, *DIMS), jnp.bfloat16))
    model.scatter([6, 2], blocks)
    got = fresh(np.int32([6, 2]), jnp.asarray(blocks))
    assert_pool(got, model, Kind("NHD", contiguous, "device"))


@by_kind
def test_wrap_copies_nothing(rng, kind):
    pool, model = start(rng, kind)
    again = kv.KVPool.wrap(pool.data, pool.spec)
    assert all(a is b for a, b in zip(again.arrays, pool.arrays, strict=True))
    assert_pool(again, model, kind)


def test_a_list_of_layers_becomes_a_tuple():
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    pool = kv.KVPool.wrap([jnp.zeros((7, *spec.block_shape[1:]))] * 3, spec)
    assert isinstance(pool.data, tuple)
    assert not pool.contiguous


@by_engine_kind
def test_a_pool_is_a_pytree(rng, kind):
    pool, model = start(rng, kind)
    leaves, tree = jax.tree.flatten(pool)
    assert leaves == list(pool.arrays)
    assert_pool(jax.tree.unflatten(tree, leaves), model, kind)
    assert tree == jax.tree.structure(kv.copy_blocks(pool, [0], [1]))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_pool_answers_as_an_array_does(contiguous):
    spec = kv.BlockSpec(*DIMS, jnp.float32, "HND")
    pool = kv.KVPool.zeros(spec, 7, contiguous=contiguous)
    assert len(pool) == 7
    assert pool.shape == (7, *spec.block_shape)
    assert pool.dtype == jnp.float32
    assert pool.nbytes == sum(x.nbytes for x in pool.arrays)
    assert pool.sharding == pool.arrays[-1].sharding
    assert pool.block_until_ready() is pool
    assert jax.eval_shape(lambda p: p, pool).shape == pool.shape


def test_the_constructor_takes_shapes_and_trees_take_anything():
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    shape = jax.ShapeDtypeStruct((7, *DIMS), jnp.float32)
    pool = kv.KVPool(shape, spec)
    out = jax.eval_shape(lambda p: kv.gather_blocks(p, [1, 2]), pool)
    assert out.shape == (2, 5, 3, 2, 4, 6)
    assert jax.tree.map(lambda _: None, pool).data is None
    assert jax.tree.map(lambda x: x.ndim, pool).data == 6


def test_the_constructor_takes_lists_and_numpy():
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    pool = kv.KVPool([np.zeros((7, *DIMS[1:]), np.float32)] * 3, spec)
    assert all(isinstance(x, jax.Array) for x in pool.data)
    assert jax.tree.structure(pool).num_leaves == 3


def test_the_options_of_zeros_go_by_name_alone():
    """`contiguous`, the first of them, would take any memory kind for true."""
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    with pytest.raises(TypeError, match=r"zeros\(\) takes 3 positional arguments"):
        kv.KVPool.zeros(spec, 4, "pinned_host")


def test_a_pool_lies_where_it_is_told(four_cpus):
    spec, there = kv.BlockSpec(*DIMS, jnp.float32), jax.devices("cpu")[2]
    assert kv.KVPool.zeros(spec, 7, device=there).data.devices() == {there}
    assert kv.KVPool.zeros(spec, 7, device="cpu").sharding.device_set == {
        jax.devices("cpu")[0]
    }


def test_a_transfer_guard_lets_zeros_pass():
    spec = kv.BlockSpec(*DIMS, jnp.bfloat16)
    with jax.transfer_guard("disallow"):
        for memory_kind in ("device", "pinned_host"):
            pool = kv.KVPool.zeros(spec, 7, memory_kind=memory_kind)
            assert pool.memory_kind == memory_kind
        got = kv.gather_blocks(pool, [3])
    assert not np.asarray(got).any()


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "layout", ["HND", kv.Layout("token_last", "L O H D T")], ids=["named", "custom"]
)
def test_an_exported_program_of_a_pool_is_read_back(rng, layout, contiguous):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    spec = kv.BlockSpec(*DIMS, jnp.bfloat16, layout)
    pool = kv.KVPool.zeros(spec, 7, contiguous=contiguous)
    blocks = jnp.asarray(random_bits(rng, (2, *DIMS), "bfloat16"))
    ids = jnp.int32([5, 1])
    step = jax.jit(lambda p, i, x: kv.scatter_blocks(p, i, x, "NHD"))
    allowed = jax.export.DisabledSafetyCheck.custom_call("kvblock_copy")
    exported = jax.export.export(step, disabled_checks=[allowed])(pool, ids, blocks)
    again = jax.export.deserialize(exported.serialize())
    got = again.call(pool, ids, blocks)
    assert isinstance(got, kv.KVPool)
    assert got.spec == spec
    assert_same_bits(kv.gather_blocks(got, ids, "NHD"), np.asarray(blocks))


def test_what_an_export_says_of_a_pool_is_the_same_in_every_process():
    custom = kv.Layout("token_last", "L O H D T")
    for layout, said in (
        ("HND", '"HND"'),
        (custom, '{"name": "token_last", "axes": "L O H D T"}'),
    ):
        spec = kv.BlockSpec(*DIMS, jnp.float8_e4m3fn, layout)
        data = pool_module._spec_as_bytes(spec)
        assert data.decode() == (
            '{"num_layers": 3, "num_outer": 2, "block_size": 4, "num_kv_heads": 5, '
            f'"head_dim": 6, "dtype": "float8_e4m3fn", "layout": {said}}}'
        )
        assert pool_module._spec_of_bytes(data) == spec


def test_repr_names_what_the_pool_holds():
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    assert "float32[7, 3, 2, 4, 5, 6]" in repr(kv.KVPool.zeros(spec, 7))
    assert "3 layer arrays" in repr(kv.KVPool.zeros(spec, 7, contiguous=False))


# ---- gather and scatter --------------------------------------------------------------

READ_IDS = [2, -1, 0, 7, 6, 2, INT32.max, INT32.min, 5, -7, 1 << 29]
WRITE_IDS = [2, -1, 0, 7, 6, INT32.max, INT32.min, -7, 1 << 29, -INT32.max]


@by_heads
@by_kind
def test_gather(rng, kind, heads):
    pool, model = start(rng, kind)
    want = model.gather(READ_IDS, heads)
    for layout in BLOCK_LAYOUTS:
        got = kv.gather_blocks(pool, np.int32(READ_IDS), layout_of(layout), heads)
        assert got.sharding.memory_kind == "device"
        assert_same_bits(got, lay(want, layout, inner_of(kind)))
    assert_pool(pool, model, kind)


@by_heads
@by_kind
def test_scatter(rng, kind, heads):
    pool, model = start(rng, kind)
    width = DIMS[3] if heads is None else heads[1] - heads[0]
    dims = (*DIMS[:3], width, DIMS[4])
    for layout in BLOCK_LAYOUTS:
        blocks = random_bits(rng, (len(WRITE_IDS), *dims), "bfloat16")
        model.scatter(WRITE_IDS, blocks, heads)
        laid = jnp.asarray(lay(blocks, layout, inner_of(kind)))
        ids = np.int32(WRITE_IDS)
        pool = kv.scatter_blocks(pool, ids, laid, layout_of(layout), heads)
        assert_pool(pool, model, kind)


def test_universal_is_the_layout_by_default(rng):
    pool, model = start(rng, KINDS[0])
    blocks = kv.gather_blocks(pool, [3, 1])
    assert_same_bits(blocks, lay(model.gather([3, 1]), "universal"))
    model.scatter([0, 5], model.gather([3, 1]))
    assert_pool(kv.scatter_blocks(pool, [0, 5], blocks), model, KINDS[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(rng, dtype):
    with jax.enable_x64(True):
        kind = Kind("HND", True, "device")
        pool, model = start(rng, kind, dtype=dtype, dims=(2, 2, 3, 3, 5))
        got = kv.gather_blocks(pool, [6, -1, 0], heads=(1, 3))
        want = model.gather([6, -1, 0], (1, 3))
        assert_same_bits(got, lay(want, "universal"))
        model.scatter([1, 9, 3], want, (0, 2))
        pool = kv.scatter_blocks(pool, [1, 9, 3], got, heads=(0, 2))
        assert_pool(pool, model, kind)


@by_implementation
@by_engine_kind
def test_empty_batches_do_nothing(rng, kind, implementation):
    pool, model = start(rng, kind)
    how = {"implementation": implementation}
    none = np.zeros(0, np.int32)
    if implementation == "xla" and kind.memory_kind == "pinned_host":
        with pytest.raises(ValueError, match="does not read or write pinned_host"):
            kv.gather_blocks(pool, none, **how)
        return
    blocks = kv.gather_blocks(pool, none, **how)
    assert blocks.shape == (0, 5, 3, 2, 4, 6)
    pool = kv.scatter_blocks(pool, none, blocks, **how)
    pool = kv.copy_blocks(pool, none, none, **how)
    pool = kv.transfer_blocks(pool, none, start(rng, kind)[0], none, **how)
    nothing = jnp.zeros((0, 5, 6), jnp.bfloat16)
    pool = kv.append_kv(pool, 1, nothing, nothing, none, **how)
    assert pool.contiguous == kind.contiguous
    pool, model = start(rng, kind)
    pool = kv.scatter_blocks(pool, none, blocks, **how)
    pool = kv.append_kv(pool, 1, nothing, nothing, none, **how)
    assert_pool(pool, model, kind)


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k.memory_kind == "device"], ids=str
)
def test_xla_gives_the_same_bits(rng, kind):
    pool, model = start(rng, kind)
    how = {"implementation": "xla"}
    got = kv.gather_blocks(pool, np.int32(READ_IDS), "HND", (1, 4), **how)
    assert_same_bits(got, lay(model.gather(READ_IDS, (1, 4)), "HND"))
    blocks = random_bits(rng, (len(WRITE_IDS), *DIMS[:3], 2, 6), "bfloat16")
    laid = jnp.asarray(lay(blocks, "universal"))
    model.scatter(WRITE_IDS, blocks, (2, 4))
    ids = np.int32(WRITE_IDS)
    pool = kv.scatter_blocks(pool, ids, laid, heads=(2, 4), **how)
    model.scatter([5, 0], model.gather([0, 5]))
    pool = kv.copy_blocks(pool, [0, 5], [5, 0], **how)
    k, v = random_bits(rng, (2, 3, 5, 6), "bfloat16")
    model.append(1, [k, v], [27, -1, 2])
    pool = kv.append_kv(pool, jnp.int32(1), k, v, [27, -1, 2], **how)
    assert_pool(pool, model, kind)


def test_real_sizes(rng):
    """Blocks of 1 MiB, so that threads and wide loads take part."""
    dims = (8, 2, 16, 8, 256)
    pool, model = start(rng, Kind("NHD", True, "device"), num_blocks=6, dims=dims)
    got = kv.gather_blocks(pool, [5, 2, -1], "universal", (1, 8))
    want = model.gather([5, 2, -1], (1, 8))
    assert_same_bits(got, lay(want, "universal"))
    model.scatter([0, 3, 4], want, (0, 7))
    pool = kv.scatter_blocks(pool, [0, 3, 4], got, heads=(0, 7))
    assert_pool(pool, model, Kind("NHD", True, "device"))


@by_engine_kind
def test_inside_scan_and_vmap(rng, kind):
    """The pool stays in its memory as a carry, and as what a batch of ids shares."""
    pool, model = start(rng, kind, dtype="uint16")  # see the scan over layers
    ids = np.int32([[4, -1, 0], [1, 9, 2]])
    want = np.stack([lay(model.gather(row), "HND") for row in ids])

    @jax.jit
    def scan(pool):
        def body(pool, row):
            blocks = kv.gather_blocks(pool, row, "HND")
            return kv.scatter_blocks(pool, row[::-1], blocks, "HND"), blocks

        return jax.lax.scan(body, pool, ids)

    batched = jax.vmap(lambda p, row: kv.gather_blocks(p, row, "HND"), (None, 0))
    assert_same_bits(jax.jit(batched)(pool, ids), want)
    after, got = scan(pool)
    for row, blocks in zip(ids, got, strict=True):
        moved = model.gather(row)
        assert_same_bits(blocks, lay(moved, "HND"))
        model.scatter(row[::-1], moved)
    assert_pool(after, model, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "universal"])
def test_pools_beyond_4_gib(rng, layout):
    """Offsets past 32 bits, in elements and in bytes."""
    dims = (4, 2, 16, 8, 128)  # 128 KiB
    spec = kv.BlockSpec(*dims, jnp.uint8, layout)
    count = 40_000  # 4.9 GiB
    ids = np.int32([count - 1, 0, 32_767, 32_768, 16_384, count])
    blocks = random_bits(rng, (len(ids), *dims), "uint8")
    k, v = random_bits(rng, (2, 2, 8, 128), "uint8")
    append = jax.jit(kv.append_kv, donate_argnums=0)
    pool = kv.KVPool.zeros(spec, count)
    scatter = jax.jit(kv.scatter_blocks, static_argnums=3, donate_argnums=0)
    pool = scatter(pool, ids, jnp.asarray(lay(blocks, "HND")), "HND")
    pool = append(pool, np.int32(3), k, v, np.int32([(count - 2) * 16 + 15, -1]))
    want = blocks.copy()
    want[-1] = 0
    assert_same_bits(kv.gather_blocks(pool, ids, "NHD"), want)
    near = np.zeros((2, *dims), np.uint8)
    near[0, 3, 0, 15], near[0, 3, 1, 15] = k[0], v[0]
    assert_same_bits(kv.gather_blocks(pool, [count - 2, 1], "NHD"), near)


# ---- copies within a pool ------------------------------------------------------------

COPIES = {
    "swap": ([0, 1], [1, 0]),
    "rotate": ([0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]),
    "fan out": ([3, 3, 3], [0, 1, 3]),
    "to itself": ([2], [2]),
    "zeros in, drops out": ([-1, 7, 4, 2], [0, 1, -1, 7]),
    "extremes": ([INT32.min, INT32.max, 1, 2], [3, 4, INT32.max, INT32.min]),
}


@pytest.mark.parametrize("name", COPIES)
@by_kind
def test_copy(rng, kind, name):
    pool, model = start(rng, kind)
    src_ids, dst_ids = COPIES[name]
    model.scatter(dst_ids, model.gather(src_ids))
    pool = kv.copy_blocks(pool, np.int32(src_ids), np.int32(dst_ids))
    assert_pool(pool, model, kind)


# ---- transfers between pools ---------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst"),
    list(itertools.product(KINDS, TARGET_KINDS)),
    ids=str,
)
def test_transfer(rng, src, dst):
    source, source_model = start(rng, src, num_blocks=5)
    target, model = start(rng, dst, num_blocks=8)
    src_ids = np.int32([4, -1, 0, 5, 2, 1, INT32.max])
    dst_ids = np.int32([7, 1, 3, 0, 8, -1, 2])
    model.scatter(dst_ids, source_model.gather(src_ids))
    target = kv.transfer_blocks(source, src_ids, target, dst_ids)
    assert_pool(target, model, dst)
    assert_pool(source, source_model, src)


HEAD_MOVES = {  # source heads, destination heads, range in the larger
    "cut": (5, 2, (2, 4)),
    "place": (2, 5, (3, 5)),
    "same slice of both": (5, 5, (1, 4)),
    "all": (5, 5, (0, 5)),
    "single head": (1, 5, (4, 5)),
}


@pytest.mark.parametrize("move", HEAD_MOVES)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Kind("NHD", True, "device"), Kind("HND", True, "pinned_host")),
        (Kind("HND", False, "pinned_host"), Kind("NHD", True, "device")),
        (Kind("universal", True, "device"), Kind("NHD", False, "device")),
        (Kind("operational", False, "device"), Kind("universal", True, "pinned_host")),
        (Kind("merged", True, "pinned_host"), Kind("layer_first", False, "device")),
    ],
    ids=str,
)
def test_transfer_of_a_head_range(rng, src, dst, move):
    src_heads, dst_heads, heads = HEAD_MOVES[move]
    full = max(src_heads, dst_heads)
    source, source_model = start(rng, src, 5, (*DIMS[:3], src_heads, 6))
    target, model = start(rng, dst, 6, (*DIMS[:3], dst_heads, 6))
    src_ids, dst_ids = np.int32([3, -1, 0, 5]), np.int32([5, 0, -1, 2])
    moved = source_model.gather(src_ids, heads if src_heads == full else None)
    model.scatter(dst_ids, moved, heads if dst_heads == full else None)
    target = kv.transfer_blocks(source, src_ids, target, dst_ids, heads)
    assert_pool(target, model, dst)


@by_engine_kind
def test_transfer_within_one_pool_reads_before_it_writes(rng, kind):
    pool, model = start(rng, kind)
    model.scatter([1, 0, 6], model.gather([0, 1, 2]))
    assert_pool(kv.transfer_blocks(pool, [0, 1, 2], pool, [1, 0, 6]), model, kind)


@by_engine_kind
def test_transfer_of_heads_within_one_pool_leaves_the_others(rng, kind):
    pool, model = start(rng, kind)
    model.scatter([1, 0], model.gather([0, 1], (1, 3)), (1, 3))
    assert_pool(kv.transfer_blocks(pool, [0, 1], pool, [1, 0], (1, 3)), model, kind)


@by_engine_kind
def test_transfer_within_one_pool_under_jit(rng, kind):
    pool, model = start(rng, kind)
    model.scatter([1, 0, 6], model.gather([0, 1, 2]))
    move = jax.jit(lambda pool, src, dst: kv.transfer_blocks(pool, src, pool, dst))
    got = move(pool, np.int32([0, 1, 2]), np.int32([1, 0, 6]))
    assert_pool(got, model, kind)
