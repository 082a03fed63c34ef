"""New tokens land in their slots, in one layer or in all, and are read again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import (
    INT32,
    KINDS,
    assert_pool,
    assert_same_bits,
    random_bits,
    start,
)

import jax_kvblock as kv

by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
SLOTS = [27, -1, 0, 28, 13, INT32.max, INT32.min, 14, -4, 5]  # 7 blocks of 4 tokens


@pytest.mark.parametrize("num_outer", [1, 2])
@by_kind
def test_append_to_a_static_layer(rng, kind, num_outer):
    dims = (3, num_outer, 4, 5, 6)
    pool, model = start(rng, kind, dims=dims)
    for layer in (0, 2, np.int64(1)):
        pieces = list(random_bits(rng, (num_outer, len(SLOTS), 5, 6), "bfloat16"))
        model.append(int(layer), pieces, SLOTS)
        k, v = (*map(jnp.asarray, pieces), None)[:2]
        pool = kv.append_kv(pool, layer, k, v, np.int32(SLOTS))
        assert_pool(pool, model, kind)


@pytest.mark.parametrize("num_outer", [1, 2])
@by_kind
def test_append_to_a_traced_layer(rng, kind, num_outer):
    dims = (3, num_outer, 4, 5, 6)
    pool, model = start(rng, kind, dims=dims)
    append = jax.jit(kv.append_kv)
    for layer in (1, 0, 2, -1, 3, 7, INT32.max, INT32.min):
        pieces = list(random_bits(rng, (num_outer, len(SLOTS), 5, 6), "bfloat16"))
        model.append(layer, pieces, SLOTS)
        k, v = (*map(jnp.asarray, pieces), None)[:2]
        pool = append(pool, jnp.int32(layer), k, v, np.int32(SLOTS))
        assert_pool(pool, model, kind)


@by_kind
def test_append_in_a_scan_over_layers(rng, kind):
    # Integers, because XLA:CPU's own slices of a scan quiet the NaNs of bfloat16.
    pool, model = start(rng, kind, dtype="uint16")
    pieces = random_bits(rng, (3, 2, len(SLOTS), 5, 6), "uint16")
    slots = np.int32(SLOTS)

    @jax.jit
    def fill(pool, layers, kvs):
        def body(pool, step):
            layer, (k, v) = step
            return kv.append_kv(pool, layer, k, v, slots), None

        return jax.lax.scan(body, pool, (layers, kvs))[0]

    order = [2, 0, 1]
    for layer, pair in zip(order, pieces, strict=True):
        model.append(layer, list(pair), SLOTS)
    kvs = (jnp.asarray(pieces[:, 0]), jnp.asarray(pieces[:, 1]))
    assert_pool(fill(pool, np.int32(order), kvs), model, kind)


@pytest.mark.parametrize("num_outer", [1, 2])
@by_kind
def test_append_to_all_layers(rng, kind, num_outer):
    pool, model = start(rng, kind, dims=(3, num_outer, 4, 5, 6))
    pieces = random_bits(rng, (num_outer, 3, len(SLOTS), 5, 6), "bfloat16")
    for layer in range(3):
        model.append(layer, list(pieces[:, layer]), SLOTS)
    k, v = (*map(jnp.asarray, pieces), None)[:2]
    assert_pool(kv.append_kv(pool, None, k, v, np.int32(SLOTS)), model, kind)


@pytest.mark.parametrize("contiguous", [True, False])
def test_all_layers_are_one_copy_that_a_donated_pool_takes_in_place(contiguous):
    spec = kv.BlockSpec(3, 2, 4, 5, 6, jnp.float32)
    pool = kv.KVPool.zeros(spec, 7, contiguous=contiguous)
    k = jnp.ones((3, 2, 5, 6))
    append = jax.jit(lambda p: kv.append_kv(p, None, k, k, [0, 1]), donate_argnums=0)
    copies = str(jax.make_jaxpr(append)(pool)).count("kvblock_copy[")
    assert copies == 1
    places = [x.unsafe_buffer_pointer() for x in pool.arrays]
    assert [x.unsafe_buffer_pointer() for x in append(pool).arrays] == places


# ---- reading a layer -----------------------------------------------------------------

IDS = [2, -1, 0, 7, 6, 2, INT32.max, INT32.min, 5]


def rows(model, layer):
    """k and v of one layer of the model, `[outer, n · nt, nh, hd]`."""
    read = model.gather(IDS)[:, layer]
    return read.swapaxes(0, 1).reshape(read.shape[1], -1, *read.shape[3:])


@pytest.mark.parametrize("num_outer", [1, 2])
@by_kind
def test_gather_kv_of_a_static_layer(rng, kind, num_outer):
    pool, model = start(rng, kind, dims=(3, num_outer, 4, 5, 6))
    for layer in (2, np.uint8(0)):
        k, v = kv.gather_kv(pool, layer, IDS)
        want = rows(model, int(layer))
        assert k.sharding.memory_kind == "device"
        assert_same_bits(k, want[0])
        if num_outer == 1:
            assert v is None
        else:
            assert_same_bits(v, want[1])
    assert_pool(pool, model, kind)


@by_kind
def test_gather_kv_of_a_traced_layer(rng, kind):
    pool, model = start(rng, kind)
    gather = jax.jit(kv.gather_kv)
    for layer in (1, 2, 0, -1, 3, INT32.max, INT32.min):
        k, v = gather(pool, jnp.int32(layer), np.int32(IDS))
        if 0 <= layer < 3:
            want = rows(model, layer)
        else:
            want = np.zeros((2, len(IDS) * 4, 5, 6), jnp.bfloat16)
        assert_same_bits(k, want[0])
        assert_same_bits(v, want[1])


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
def test_what_was_appended_is_read_row_by_row(rng, implementation):
    """Positions of a sequence are rows, whatever the pool's layout."""
    how = {"implementation": implementation}
    pool, _ = start(rng, KINDS[1])
    ids = np.int32([5, 1, 3])
    position = np.arange(10)
    slots = ids[position // 4] * 4 + position % 4
    k, v = random_bits(rng, (2, 3, len(slots), 5, 6), "bfloat16")
    pool = kv.append_kv(pool, None, k, v, slots, **how)
    for layer in range(3):
        got = kv.gather_kv(pool, layer, ids, **how)
        for rows, given in zip(got, (k, v), strict=True):
            assert_same_bits(np.asarray(rows)[:10], given[layer])  # keeps every bit
