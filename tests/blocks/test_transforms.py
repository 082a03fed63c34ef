"""Every op under jit, scan, export and vmap gives what plain jnp gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from ops import (
    BLOCKS,
    DIMS,
    HD,
    IDS,
    MAIN_OPS,
    NH,
    NL,
    NO,
    NT,
    OPS,
    POOL,
    SPEC,
    Op,
    assert_same,
    pool,
)

import jax_kvblock as kv
from jax_kvblock.blocks import copy

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
by_pool_op = pytest.mark.parametrize(
    "op",
    [op for op in MAIN_OPS if op.name.startswith(("gather", "scatter", "append"))],
    ids=lambda op: op.name,
)
by_main_op = pytest.mark.parametrize("op", MAIN_OPS, ids=lambda op: op.name)


# ---- jit and what a program looks like -----------------------------------------------


@by_op
def test_eager_and_jit(rng, op):
    args = op.draw(rng)
    want = op.plain(*args)
    assert_same(op.run(*args), want)
    assert_same(jax.jit(op.run)(*args), want)


@by_main_op
def test_without_jit(rng, op):
    args = op.draw(rng)
    with jax.disable_jit():
        assert_same(op.run(*args), op.plain(*args))


def test_without_jit_transformations_hold(rng):
    (op,) = (op for op in OPS if op.name == "gather_blocks")
    data, ids = op.draw(rng)
    with jax.disable_jit():
        both = jax.vmap(op.run, (None, 0))(data, jnp.stack([ids, ids]))
        grad = jax.grad(lambda x: op.run(x, ids).sum())(data)
    assert_same(both[1], op.plain(data, ids))
    assert_same(grad, jax.grad(lambda x: op.plain(x, ids).sum())(data))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_debug_nans_finds_a_nan_and_names_the_copy(dtype, wrap):
    # As jnp.transpose does: a NaN that is moved is a NaN that comes out.
    spec = kv.BlockSpec(*DIMS, dtype)
    data = jnp.full(POOL, jnp.nan, jnp.dtype(dtype))
    gather = wrap(lambda x: kv.gather_blocks(pool(x, spec), IDS))
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"\(nan\) encountered in kvblock_copy"),
    ):
        gather(data)


def test_debug_nans_lets_numbers_pass(rng):
    op = next(op for op in OPS if op.name == "append_kv")
    args = op.draw(rng)
    with jax.debug_nans(True):
        assert_same(jax.jit(op.run, donate_argnums=0)(*args), op.plain(*args))


@by_op
def test_eval_shape_tells_what_comes_out(rng, op):
    args = op.draw(rng)
    want = op.plain(*args)
    got = jax.eval_shape(op.run, *args)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


@by_op
def test_one_primitive(rng, op):
    jaxpr = jax.make_jaxpr(op.run)(*op.draw(rng))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    copies = [name for name in names if name.startswith("kvblock")]
    # A copy within a pool reads all before it writes any: two passes.
    assert copies == ["kvblock_copy"] * (2 if op.name == "copy_blocks" else 1)
    # What stays beside it moves no data of its own, but for the test's own stacking.
    rest = set(names) - set(copies)
    assert not rest & {"transpose", "gather", "scatter", "dynamic_slice", "copy"}


def export(op: Op, args: Sequence[Any]) -> jax.export.Exported:
    allowed = jax.export.DisabledSafetyCheck.custom_call("kvblock_copy")
    return jax.export.export(jax.jit(op.run), disabled_checks=[allowed])(*args)


@by_op
def test_export(rng, op):
    args = op.draw(rng)
    exported = export(op, args)
    assert "kvblock_copy" in exported.mlir_module()
    assert_same(jax.jit(exported.call)(*args), op.plain(*args))


@by_op
def test_export_survives_serialization(rng, op):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    args = op.draw(rng)
    again = jax.export.deserialize(export(op, args).serialize())
    assert_same(again.call(*args), op.plain(*args))


@by_op
def test_inside_a_scan(rng, op):
    args = op.draw(rng, [(3,)] * len(op.args))

    def body(calls, one):
        return calls + 1, op.run(*one)

    calls, got = jax.jit(lambda xs: jax.lax.scan(body, 0, xs))(args)
    assert calls == 3
    assert_same(got, stacked(op, args, [0] * len(args)))


@by_op
def test_inside_while_and_cond(rng, op):
    args = op.draw(rng)
    want = op.plain(*args)

    def twice(count, y):
        return jax.lax.cond(count == 0, op.run, lambda *_: y, *args)

    loop = jax.jit(lambda y: jax.lax.fori_loop(0, 2, twice, y))
    assert_same(loop(jnp.zeros_like(want)), want)


# ---- vmap ----------------------------------------------------------------------------


def each(args: Sequence[Any], axes: Sequence[int | None]) -> list[list[Any]]:
    """The arguments of every call that a vmap over `axes` stands for."""
    pairs = list(zip(args, axes, strict=True))
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    return [
        [x if axis is None else jnp.take(x, i, axis) for x, axis in pairs]
        for i in range(size)
    ]


def stacked(op: Op, args: Sequence[Any], axes: Sequence[int | None]) -> jax.Array:
    """What a vmap of the op must give, by plain jnp, one call at a time."""
    return jnp.stack([op.plain(*one) for one in each(args, axes)])


@pytest.mark.parametrize("axis", [0, 2, -1])
@by_op
def test_vmap_over_each_operand(rng, op, axis):
    for i in range(len(op.args)):
        axes = [0 if i == j else None for j in range(len(op.args))]
        args = op.draw(rng, [() if a is None else (3,) for a in axes])
        want = stacked(op, args, axes)
        ndim = args[i].ndim
        moved = list(args)
        axes[i] = axis if -ndim <= axis < ndim else 0
        moved[i] = jnp.moveaxis(args[i], 0, axes[i])
        assert_same(jax.jit(jax.vmap(op.run, tuple(axes)))(*moved), want)


@by_op
def test_vmap_over_all_operands(rng, op):
    args = op.draw(rng, [(3,)] * len(op.args))
    want = stacked(op, args, [0] * len(args))
    assert_same(jax.vmap(op.run)(*args), want)
    moved = [jnp.moveaxis(x, 0, -1) for x in args]
    assert_same(jax.jit(jax.vmap(op.run, -1))(*moved), want)


@by_main_op
def test_vmap_to_another_output_axis(rng, op):
    args = op.draw(rng, [(2,)] * len(op.args))
    want = stacked(op, args, [0] * len(args))
    for axis in (1, -1):
        got = jax.jit(jax.vmap(op.run, out_axes=axis))(*args)
        assert_same(got, jnp.moveaxis(want, 0, axis))


@by_op
def test_nested_vmap(rng, op):
    """The first operand in both axes, the others in one: the inner or the outer."""
    outer = [0 if i == 0 or i % 2 else None for i in range(len(op.args))]
    inner = [0 if i % 2 == 0 else None for i in range(len(op.args))]
    lead = [(2, 3) if i == 0 else (2,) if i % 2 else (3,) for i in range(len(op.args))]
    args = op.draw(rng, lead)
    got = jax.jit(jax.vmap(jax.vmap(op.run, tuple(inner)), tuple(outer)))(*args)
    want = jnp.stack([stacked(op, one, inner) for one in each(args, outer)])
    assert_same(got, want)


def test_vmap_over_pools_as_they_are(rng):
    """A `KVPool` of stacked pools goes in, and one comes out."""
    data = jnp.asarray(rng.integers(-8, 9, (2, *POOL)).astype(np.float32))
    ids = jnp.int32([[0, 5, -1], [3, 2, 1]])
    swapped = jax.vmap(lambda p, i: kv.copy_blocks(p, i, i[::-1]))(pool(data), ids)
    assert isinstance(swapped, kv.KVPool)
    want = np.array(data)
    want[0, 5], want[0, 0] = data[0, 5], 0
    want[1, 1], want[1, 3] = data[1, 3], data[1, 1]
    assert_same(swapped.data, want)
    got = jax.vmap(lambda p, i: kv.gather_blocks(p, i, "NHD"))(swapped, ids)
    assert_same(got[1], want[1][[3, 2, 1]])


def test_a_batch_of_pools_knows_its_sizes():
    stacked = pool(jnp.zeros((2, *POOL)))
    assert (len(stacked), stacked.shape) == (BLOCKS, (2, *POOL))
    assert stacked.nbytes == stacked.data.nbytes
    layers = kv.KVPool((jnp.zeros((2, BLOCKS, *DIMS[1:])),) * NL, SPEC)
    assert (len(layers), layers.shape) == (BLOCKS, (2, *POOL))
    assert layers.nbytes == stacked.nbytes


@by_pool_op
def test_vmap_over_more_blocks_than_ids_can_count(rng, op, monkeypatch):
    """Then the members go one by one."""
    args = op.draw(rng, [(3,)] * len(op.args))
    want = [op.plain(*(x[i] for x in args)) for i in range(3)]
    monkeypatch.setattr(copy, "_ID_LIMIT", 3 * BLOCKS)
    assert_same(jax.vmap(op.run)(*args), np.stack(want))
    assert "scan" in str(jax.make_jaxpr(jax.vmap(op.run))(*args))


def test_the_ids_of_a_batch_are_counted_exactly():
    """In 32 bits, member 1's blocks would be counted as member 0's."""
    spec = kv.BlockSpec(1, 1, 1, 1, 1, jnp.int8)
    for blocks, loops in ((2**29, False), (2**30, True)):
        pools = kv.KVPool(jax.ShapeDtypeStruct((2, blocks, *[1] * 5), jnp.int8), spec)
        ids = jax.ShapeDtypeStruct((2, 3), jnp.int32)
        jaxpr = jax.make_jaxpr(jax.vmap(kv.gather_blocks))(pools, ids)
        assert ("scan" in str(jaxpr)) == loops


def test_vmap_of_an_empty_axis():
    x = jnp.zeros((0, 3, *DIMS))
    assert jax.vmap(kv.block_to_universal)(x).shape == (0, 3, NH, NL, NO, NT, HD)
    ids = jnp.zeros((0, 4), jnp.int32)
    data = jnp.zeros(POOL)
    got = jax.vmap(lambda i: kv.gather_blocks(pool(data), i))(ids)
    assert got.shape == (0, 4, NH, NL, NO, NT, HD)


def test_vmap_keeps_ids_apart(rng):
    """An id just past one pool must not reach into the next of the batch."""
    data = jnp.asarray(rng.standard_normal((2, *POOL)).astype(np.float32))
    ids = jnp.int32([[BLOCKS, 0, -1], [1, -BLOCKS, BLOCKS + 1]])
    gather = jax.vmap(lambda d, i: kv.gather_blocks(pool(d), i, "NHD"))
    got = gather(data, ids)
    want = np.zeros_like(got)
    want[0, 1], want[1, 0] = data[0, 0], data[1, 1]
    assert_same(got, want)
    ones = jnp.ones((2, 3, *DIMS))
    scatter = jax.vmap(lambda d, i, x: kv.scatter_blocks(pool(d), i, x, "NHD").data)
    want = np.array(data)
    want[0, 0] = want[1, 1] = 1
    assert_same(scatter(data, ids, ones), want)


def test_vmap_keeps_layers_apart(rng):
    """A layer just past one pool must not reach into the next of the batch."""
    data = jnp.zeros((2, *POOL))
    k = jnp.ones((2, 1, NH, HD))
    append = jax.vmap(lambda d, n, k: kv.append_kv(pool(d), n, k, k, [0]).data)
    got = append(data, jnp.int32([NL, -1]), k)
    assert_same(got, np.zeros_like(data))
