"""Any sequence of operations leaves a pool as it leaves the NumPy model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from model import (
    INT32,
    KINDS,
    assert_pool,
    assert_same_bits,
    lay,
    random_bits,
    start,
)

import jax_kvblock as kv

BLOCK_COUNT = 4
ids_strategy = st.integers(-2, BLOCK_COUNT + 1) | st.sampled_from(
    [INT32.min, INT32.max]
)
slot_strategy = st.integers(-2, BLOCK_COUNT * 3 + 1) | st.sampled_from(
    [INT32.min, INT32.max]
)
OPERATIONS = ("gather", "scatter", "copy", "transfer", "append", "append traced")


def drawn_ids(data, strategy, count, unique):
    inside = (lambda i: i if 0 <= i < BLOCK_COUNT * 3 else object()) if unique else None
    lists = st.lists(strategy, min_size=count, max_size=count, unique_by=inside)
    return data.draw(lists, label="ids")


def run_operation(data, name, pools, models, rng):
    """One operation on both; `pools` and `models` are [this, other]."""
    (pool, other), (model, other_model) = pools, models
    nl, _, _, nh, hd = model.blocks.shape[1:]
    count = data.draw(st.sampled_from([1, 3]), label="count")
    heads = data.draw(st.sampled_from([None, (1, 3)]), label="heads")
    layout = data.draw(st.sampled_from(["NHD", "universal"]), label="layout")
    if name.startswith("append"):
        slots = drawn_ids(data, slot_strategy, count, unique=True)
        layer = data.draw(st.integers(0, nl - 1), label="layer")
        k, v = random_bits(rng, (2, count, nh, hd), model.blocks.dtype)
        model.append(layer, [k, v], slots)
        traced = name.endswith("traced")
        where = jnp.int32(layer) if traced else layer
        pools[0] = kv.append_kv(pool, where, k, v, slots)
        return
    src_ids = drawn_ids(data, ids_strategy, count, unique=False)
    dst_ids = drawn_ids(data, ids_strategy, count, unique=True)
    source = other_model if name == "transfer" else model
    moved = source.gather(src_ids, None if name == "copy" else heads)
    match name:
        case "gather":
            got = kv.gather_blocks(pool, src_ids, layout, heads)
            assert_same_bits(got, lay(moved, layout))
        case "scatter":
            fresh = random_bits(rng, moved.shape, moved.dtype)
            model.scatter(dst_ids, fresh, heads)
            laid = jnp.asarray(lay(fresh, layout))
            pools[0] = kv.scatter_blocks(pool, dst_ids, laid, layout, heads)
        case "copy":
            model.scatter(dst_ids, moved)
            pools[0] = kv.copy_blocks(pool, src_ids, dst_ids)
        case "transfer":
            model.scatter(dst_ids, moved, heads)
            pools[0] = kv.transfer_blocks(other, src_ids, pool, dst_ids, heads)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    data=st.data(),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    names=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sequence_of_operations(data, kinds, names, seed):
    rng = np.random.default_rng(seed)
    dims = (2, 2, 3, 3, 2)
    started = [start(rng, kind, BLOCK_COUNT, dims, "float16") for kind in kinds]
    pools, models = ([pair[i] for pair in started] for i in range(2))
    for name in names:
        run_operation(data, name, pools, models, rng)
        for pool, model, kind in zip(pools, models, kinds, strict=True):
            assert_pool(pool, model, kind)
