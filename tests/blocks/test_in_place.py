"""A donated pool is updated where it lies: no copy, no temporary, no recompile."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SOURCE_TEST
from model import (
    PoolModel,
    assert_same_bits,
    lay,
    layout_of,
    make_pool,
    random_bits,
    read_pool,
)

import jax_kvblock as kv

MIB = 1 << 20
DIMS = (4, 2, 4, 3, 8)
IDS = np.int32([5, -1, 0, 3])
OTHER_IDS = np.int32([1, 2, 9, 4])
SLOTS = np.int32([23, -1, 0, 9])

# XLA:CPU does not honour the donation of host memory: it copies such a pool instead.
ON_GPU = jax.default_backend() == "gpu"
MEMORIES = ("device", "pinned_host") if ON_GPU else ("device",)
by_memory = pytest.mark.parametrize("memory_kind", MEMORIES)
by_contiguous = pytest.mark.parametrize(
    "contiguous", [True, False], ids=["contiguous", "layered"]
)


def start(rng, contiguous=True, memory_kind="device", layout="NHD"):
    blocks = random_bits(rng, (6, *DIMS), "float32")
    return make_pool(blocks, layout, contiguous, memory_kind), PoolModel(blocks)


def pointers(pool: kv.KVPool) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in pool.arrays]


def tokens(rng):
    return random_bits(rng, (2, len(SLOTS), *DIMS[3:]), "float32")


# ---- where the pool lies -------------------------------------------------------------


def scatter(pool, model, rng):
    blocks = random_bits(rng, (len(IDS), *DIMS), "float32")
    model.scatter(IDS, blocks)
    step = jax.jit(kv.scatter_blocks, donate_argnums=0)
    return step(pool, IDS, jnp.asarray(lay(blocks, "universal")))


def scatter_heads(pool, model, rng):
    blocks = random_bits(rng, (len(IDS), *DIMS[:3], 2, DIMS[4]), "float32")
    model.scatter(IDS, blocks, (1, 3))
    scatter = functools.partial(kv.scatter_blocks, layout="HND", heads=(1, 3))
    step = jax.jit(scatter, donate_argnums=0)
    return step(pool, IDS, jnp.asarray(lay(blocks, "HND")))


def copy(pool, model, rng):
    model.scatter(IDS, model.gather(OTHER_IDS))
    return jax.jit(kv.copy_blocks, donate_argnums=0)(pool, OTHER_IDS, IDS)


def transfer(pool, model, rng):
    source, source_model = start(rng, layout="HND")
    model.scatter(IDS, source_model.gather(OTHER_IDS))
    step = jax.jit(kv.transfer_blocks, donate_argnums=2)
    return step(source, OTHER_IDS, pool, IDS)


def append_static(pool, model, rng):
    k, v = tokens(rng)
    model.append(2, [k, v], SLOTS)
    step = jax.jit(kv.append_kv, static_argnums=1, donate_argnums=0)
    return step(pool, 2, k, v, SLOTS)


def append_traced(pool, model, rng):
    k, v = tokens(rng)
    model.append(3, [k, v], SLOTS)
    return jax.jit(kv.append_kv, donate_argnums=0)(pool, jnp.int32(3), k, v, SLOTS)


def append_in_scan(pool, model, rng):
    k, v = tokens(rng)
    for layer in range(DIMS[0]):
        model.append(layer, [k, v], SLOTS)

    def body(pool, layer):
        return kv.append_kv(pool, layer, k, v, SLOTS), None

    layers = jnp.arange(DIMS[0])
    step = jax.jit(lambda p: jax.lax.scan(body, p, layers)[0], donate_argnums=0)
    return step(pool)


def everything_in_scan(pool, model, rng):
    k, v = tokens(rng)
    for layer in range(DIMS[0]):
        model.append(layer, [k, v], SLOTS)
        model.scatter(IDS, model.gather(OTHER_IDS))
        model.scatter(IDS[::-1], model.gather(OTHER_IDS, (0, 2)), (0, 2))

    def body(pool, layer):
        pool = kv.append_kv(pool, layer, k, v, SLOTS)
        pool = kv.copy_blocks(pool, OTHER_IDS, IDS)
        part = kv.gather_blocks(pool, OTHER_IDS, heads=(0, 2))
        return kv.scatter_blocks(pool, IDS[::-1], part, heads=(0, 2)), None

    layers = jnp.arange(DIMS[0])
    step = jax.jit(lambda p: jax.lax.scan(body, p, layers)[0], donate_argnums=0)
    return step(pool)


UPDATES = (
    scatter,
    scatter_heads,
    copy,
    transfer,
    append_static,
    append_traced,
    append_in_scan,
    everything_in_scan,
)


@by_memory
@by_contiguous
@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
def test_a_donated_pool_stays_where_it_is(rng, update, contiguous, memory_kind):
    pool, model = start(rng, contiguous, memory_kind)
    before = pointers(pool)
    after = update(pool, model, rng)
    assert pointers(after) == before
    assert all(x.is_deleted() for x in pool.arrays)
    assert_same_bits(read_pool(after), model.blocks)


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
@by_contiguous
def test_a_pool_that_is_kept_is_not_changed(rng, contiguous, memory_kind):
    pool, model = start(rng, contiguous, memory_kind)
    kept = model.blocks.copy()
    k, v = tokens(rng)
    after = kv.append_kv(pool, 1, k, v, SLOTS)
    after = kv.copy_blocks(after, OTHER_IDS, IDS)
    model.append(1, [k, v], SLOTS)
    model.scatter(IDS, model.gather(OTHER_IDS))
    assert_same_bits(read_pool(after), model.blocks)
    assert_same_bits(read_pool(pool), kept)


# ---- what the compiled programs need -------------------------------------------------

BIG = kv.BlockSpec(8, 2, 16, 4, 64, jnp.bfloat16)  # blocks of 128 KiB
BIG_BLOCKS = 256  # pools and stacks of 32 MiB
BIG_IDS = jax.ShapeDtypeStruct((64,), jnp.int32)  # 8 MiB of blocks
TOKENS = jax.ShapeDtypeStruct((128, 4, 64), jnp.bfloat16)
BIG_SLOTS = jax.ShapeDtypeStruct((128,), jnp.int32)


def big_pool(layout="NHD", contiguous=True, memory_kind="device"):
    """The shapes of a pool; compiling needs no more, but for a pool in host memory."""
    spec = BIG.replace(layout=layout)
    if memory_kind == "pinned_host":
        return kv.KVPool.zeros(
            spec, BIG_BLOCKS, contiguous=contiguous, memory_kind=memory_kind
        )
    place = jax.sharding.SingleDeviceSharding(
        jnp.zeros(()).devices().pop(), memory_kind=memory_kind
    )
    shape = (BIG_BLOCKS, *spec.block_shape)
    if contiguous:
        x = jax.ShapeDtypeStruct(shape, BIG.dtype, sharding=place)
        return kv.KVPool(x, spec)
    x = jax.ShapeDtypeStruct((shape[0], *shape[2:]), BIG.dtype, sharding=place)
    return kv.KVPool((x,) * BIG.num_layers, spec)


def stacked(layout):
    layout = kv.BlockSpec(*SOURCE_TEST.dims, jnp.float32, layout).block_layout
    return jax.ShapeDtypeStruct((BIG_BLOCKS, *layout.shape(BIG)), BIG.dtype)


def memory_of(function, *shapes, donate=()):
    compiled = jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
    return compiled.memory_analysis()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("NHD", "universal"),
        ("universal", "NHD"),
        ("HND", "universal"),
        ("universal", "HND"),
        ("NHD", "HND"),
        ("operational", "universal"),
        ("NHD", "merged"),
        ("merged", "layer_first"),
    ],
)
def test_conversions_need_no_temporary(src, dst):
    src, dst = layout_of(src), layout_of(dst)
    memory = memory_of(lambda x: kv.convert_blocks(x, src, dst, BIG), stacked(src))
    assert memory.output_size_in_bytes >= 32 * MIB
    assert memory.temp_size_in_bytes < MIB


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_operational_pair_needs_no_temporary(layout):
    x = stacked(layout)
    assert memory_of(kv.block_to_operational, x).temp_size_in_bytes < MIB
    back = functools.partial(kv.operational_to_block, spec=BIG)
    assert memory_of(back, stacked("operational")).temp_size_in_bytes < MIB


def test_a_batched_conversion_needs_no_temporary():
    x = jax.ShapeDtypeStruct((8, 32, *BIG.block_shape), BIG.dtype)
    for batched in (kv.block_to_universal, jax.vmap(kv.block_to_universal)):
        assert memory_of(batched, x).temp_size_in_bytes < MIB


def test_lists_need_no_temporary():
    piece = jax.ShapeDtypeStruct(BIG.block_shape[2:], BIG.dtype)
    pieces = [[piece] * 16 for _ in range(16)]  # 2 MiB
    memory = memory_of(kv.block_to_universal, pieces)
    assert memory.output_size_in_bytes >= 2 * MIB
    assert memory.temp_size_in_bytes < MIB
    block = jax.ShapeDtypeStruct((4, 8, 2, 16, 64), BIG.dtype)
    assert memory_of(kv.universal_to_block, [block] * 16).temp_size_in_bytes < MIB


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
@by_contiguous
@pytest.mark.parametrize("heads", [None, (1, 3)], ids=str)
def test_gather_needs_no_temporary(heads, contiguous, memory_kind):
    pool = big_pool("NHD", contiguous, memory_kind)
    gather = functools.partial(kv.gather_blocks, heads=heads)
    memory = memory_of(gather, pool, BIG_IDS)
    assert memory.output_size_in_bytes >= 4 * MIB
    assert memory.temp_size_in_bytes < MIB


def scatter_big(pool, ids, blocks, k, v, slots):
    return kv.scatter_blocks(pool, ids, blocks)


def scatter_big_in_scan(pool, ids, blocks, k, v, slots):
    def body(pool, _):
        return kv.scatter_blocks(pool, ids, blocks), None

    return jax.lax.scan(body, pool, None, length=8)[0]


def append_big_static(pool, ids, blocks, k, v, slots):
    return kv.append_kv(pool, 5, k, v, slots)


def append_big_in_scan(pool, ids, blocks, k, v, slots):
    def body(pool, layer):
        return kv.append_kv(pool, layer, k, v, slots), None

    return jax.lax.scan(body, pool, jnp.arange(8))[0]


def append_big_many_scans(pool, ids, blocks, k, v, slots):
    """Steps of a decode loop, layers inside."""

    def step(pool, _):
        return append_big_in_scan(pool, ids, blocks, k, v, slots), None

    return jax.lax.scan(step, pool, None, length=3)[0]


@by_memory
@by_contiguous
@pytest.mark.parametrize(
    "update",
    [
        scatter_big,
        scatter_big_in_scan,
        append_big_static,
        append_big_in_scan,
        append_big_many_scans,
    ],
    ids=lambda f: f.__name__,
)
def test_updates_of_a_donated_pool_need_no_temporary(update, contiguous, memory_kind):
    pool = big_pool("HND", contiguous, memory_kind)
    blocks = jax.ShapeDtypeStruct((64, 4, 8, 2, 16, 64), BIG.dtype)
    args = (pool, BIG_IDS, blocks, TOKENS, TOKENS, BIG_SLOTS)
    memory = memory_of(update, *args, donate=0)
    assert memory.temp_size_in_bytes < MIB
    assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes >= 32 * MIB


@pytest.mark.parametrize("src_memory", ["device", "pinned_host"])
@by_memory
@by_contiguous
def test_transfers_need_no_temporary(contiguous, memory_kind, src_memory):
    src = big_pool("universal", True, src_memory)
    dst = big_pool("NHD", contiguous, memory_kind)
    memory = memory_of(kv.transfer_blocks, src, BIG_IDS, dst, BIG_IDS, donate=2)
    assert memory.temp_size_in_bytes < MIB
    assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes >= 32 * MIB


def test_copies_within_a_pool_hold_only_the_blocks_that_move():
    args = big_pool(), BIG_IDS, BIG_IDS
    memory = memory_of(kv.copy_blocks, *args, donate=0)
    assert memory.temp_size_in_bytes < 64 * BIG.block_bytes + MIB
    assert memory.alias_size_in_bytes >= 32 * MIB


# ---- what does not recompile ---------------------------------------------------------


def test_the_counter_counts(compiles):
    jax.jit(lambda x: x * 3 + 1)(np.float32(1))
    assert len(compiles) >= 1


CALLS = {
    "gather": lambda pool, k, ids, n: kv.gather_blocks(pool, ids),
    "scatter": lambda pool, k, ids, n: kv.scatter_blocks(
        pool, ids, jnp.zeros((4, *DIMS), k.dtype), "NHD"
    ),
    "copy": lambda pool, k, ids, n: kv.copy_blocks(pool, ids, ids[::-1]),
    "transfer": lambda pool, k, ids, n: kv.transfer_blocks(pool, ids, pool, ids),
    "append": lambda pool, k, ids, n: kv.append_kv(pool, n, k, k, ids),
}


@by_contiguous
@pytest.mark.parametrize("name", CALLS)
def test_new_ids_and_layers_do_not_recompile(rng, compiles, name, contiguous):
    pool, _ = start(rng, contiguous)
    k = jnp.zeros((4, *DIMS[3:]), jnp.float32)
    traces = []

    @jax.jit
    def call(pool, k, ids, layer):
        traces.append(name)
        return CALLS[name](pool, k, ids, layer)

    calls = [(np.int32([i, -1, 5 - i, i + 6]), np.int32(i - 1)) for i in range(6)]
    jax.block_until_ready(call(pool, k, *calls[0]))
    assert len(traces) == 1
    del compiles[:]
    for ids, layer in calls:
        jax.block_until_ready(call(pool, k, ids, layer))
    assert len(traces) == 1
    assert call._cache_size() == 1
    assert compiles == []


@by_contiguous
@pytest.mark.parametrize("name", CALLS)
def test_eager_calls_do_not_recompile_either(rng, compiles, name, contiguous):
    pool, _ = start(rng, contiguous)
    k = jnp.zeros((4, *DIMS[3:]), jnp.float32)
    call, layers = CALLS[name], jnp.arange(3)
    calls = [(jnp.int32([i, -1, 5 - i, i + 6]), layers[i]) for i in range(3)]
    jax.block_until_ready(call(pool, k, *calls[0]))
    del compiles[:]
    for ids, layer in calls:
        jax.block_until_ready(call(pool, k, ids, layer))
    assert compiles == []


# ---- where a loop stacks results ----------------------------------------------------


@pytest.mark.parametrize("loop", ["scan", "map"])
def test_pools_of_layers_that_go_through_a_loop(loop, rng):
    """Sliced from one array and stacked in another: XLA may give neither to the other.

    What is not written must be there all the same.
    """
    spec = kv.BlockSpec(1, 2, 4, 3, 8, "float32")
    before = rng.standard_normal((5, 6, *spec.block_shape)).astype(np.float32)
    k, v = (rng.standard_normal((5, 4, 3, 8)).astype(np.float32) for _ in range(2))

    def step(data, k, v):
        pool = kv.append_kv(kv.KVPool(data, spec), 0, k, v, SLOTS)
        return pool.data

    @jax.jit
    def run(data, k, v):
        if loop == "map":
            return jax.lax.map(lambda x: step(*x), (data, k, v))
        return jax.lax.scan(lambda c, x: (c, step(*x)), None, (data, k, v))[1]

    want = before.copy()
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            block, offset = divmod(int(slot), 4)
            want[:, block, 0, 0, offset] = k[:, token]
            want[:, block, 0, 1, offset] = v[:, token]
    np.testing.assert_array_equal(run(jnp.asarray(before), k, v), want)
