"""New tokens land in their slots, in a static or a traced layer, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import (
    INT32,
    KINDS,
    assert_pool,
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
