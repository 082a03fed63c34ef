"""The derivatives of every op are those of plain jnp, to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import (
    IDS,
    MAIN_OPS,
    NL,
    OPS,
    POOL,
    SLOTS,
    SPEC,
    TOKENS,
    Op,
    assert_same,
    plain_append,
    plain_gather,
    pool,
    to_universal,
)

import jax_kvblock as kv

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
by_main_op = pytest.mark.parametrize("op", MAIN_OPS, ids=lambda op: op.name)


def weighted(f: Callable[..., Any], *args: Any) -> Callable[..., jax.Array]:
    """A scalar of `f` in which every output element and its square count."""
    shape = jax.eval_shape(f, *args)
    weight = jnp.arange(1, shape.size + 1, dtype=jnp.float32).reshape(shape.shape) % 7

    def scalar(*args: Any) -> jax.Array:
        y = f(*args)
        return jnp.sum(weight * y * y)

    return scalar


def split(op: Op, args: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """`run` and `plain` as functions of the float arguments alone, and these."""

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def only_floats(*floats: Any) -> Any:
            full = list(args)
            for i, x in zip(op.floats, floats, strict=True):
                full[i] = x
            return f(*full)

        return only_floats

    return of(op.run), of(op.plain), [args[i] for i in op.floats]


def check(transform: Callable[..., Any], op: Op, args: Sequence[Any]) -> None:
    """`transform` of the op is that of plain jnp, as functions of the floats."""
    run, plain, floats = split(op, args)
    got = jax.jit(transform(run))(*floats)
    assert_same(got, jax.jit(transform(plain))(*floats))


def integers_like(x: Any) -> jax.Array:
    """Fixed small integers in the shape of x."""
    return (jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) * 5 + 2) % 17 - 8


@by_op
def test_jvp(rng, op):
    """Along all operands at once, and along each alone."""

    def transform(f):
        def pushed(*xs):
            tangents = tuple(map(integers_like, xs))
            alone = [
                jax.jvp(lambda x, i=i: f(*xs[:i], x, *xs[i + 1 :]), (xs[i],), (t,))[1]
                for i, t in enumerate(tangents)
            ]
            return jax.jvp(f, xs, tangents), alone

        return pushed

    check(transform, op, op.draw(rng))


@by_op
def test_vjp(rng, op):
    """Back to all operands at once, and to each alone."""

    def transform(f):
        def pulled(*xs):
            y, pull = jax.vjp(f, *xs)
            alone = [jax.grad(weighted(f, *xs), i)(*xs) for i in range(len(xs))]
            return y, pull(integers_like(y)), alone

        return pulled

    check(transform, op, op.draw(rng))


@by_main_op
def test_linear_transpose(rng, op):
    """The ops are linear in all their arrays, and say so to jax."""
    run, plain, floats = split(op, op.draw(rng))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in floats]
    cotangent = integers_like(jax.eval_shape(run, *floats))
    got = jax.jit(jax.linear_transpose(run, *shapes))(cotangent)
    assert_same(got, jax.jit(lambda ct: jax.vjp(plain, *floats)[1](ct))(cotangent))


@by_main_op
def test_checkpoint(rng, op):
    def transform(f):
        kept = jax.checkpoint(lambda *xs: f(*xs) ** 3)
        every = tuple(range(len(op.floats)))
        return jax.grad(lambda *xs: jnp.sum(kept(*xs)), every)

    check(transform, op, op.draw(rng))


@by_main_op
def test_second_derivative(rng, op):
    def transform(f):
        every = tuple(range(len(op.floats)))
        slopes = jax.grad(lambda *xs: jnp.sum(f(*xs) ** 3), every)

        def along(*xs):
            return sum(
                jnp.sum(g * integers_like(x))
                for g, x in zip(slopes(*xs), xs, strict=True)
            )

        return jax.grad(along, every)

    check(transform, op, op.draw(rng))


def check_vmap_of_grad(op: Op, rng: np.random.Generator, axes: Sequence[Any]) -> None:
    args = op.draw(rng, [() if axis is None else (3,) for axis in axes])
    one = [x if axis is None else x[0] for x, axis in zip(args, axes, strict=True)]
    every = tuple(op.floats)

    def of(f):
        return jax.jit(jax.vmap(jax.grad(weighted(f, *one), every), tuple(axes)))(*args)

    assert_same(of(op.run), of(op.plain))


@by_op
def test_vmap_of_grad(rng, op):
    check_vmap_of_grad(op, rng, [0] * len(op.args))


@by_main_op
def test_vmap_of_grad_over_the_last_operand(rng, op):
    """For the pools these are ids or slots: one pool, many gradients."""
    check_vmap_of_grad(op, rng, [*[None] * (len(op.args) - 1), 0])


@by_op
def test_grad_of_vmap(rng, op):
    """Operands but the first are shared, so their gradients add over the batch."""
    axes = tuple(0 if i == 0 else None for i in range(len(op.args)))
    args = op.draw(rng, [() if axis is None else (3,) for axis in axes])

    def of(f):
        batched = jax.vmap(f, axes)
        return jax.jit(jax.grad(weighted(batched, *args), tuple(op.floats)))(*args)

    assert_same(of(op.run), of(op.plain))


def test_grad_through_a_scan_of_appends(rng):
    data = jnp.asarray(rng.integers(-8, 9, POOL).astype(np.float32))
    ks = jnp.asarray(rng.integers(-8, 9, (NL, *TOKENS)).astype(np.float32))

    def fill(append, data, ks):
        def body(data, step):
            layer, k = step
            return append(data, layer, k, 2 * k, jnp.asarray(SLOTS)), jnp.sum(data)

        data, sums = jax.lax.scan(body, data, (jnp.arange(NL), ks))
        return jnp.sum(data**2) + jnp.sum(sums)

    def append(data, layer, k, v, slots):
        return kv.append_kv(pool(data), layer, k, v, slots).data

    got, want = (
        jax.jit(jax.grad(functools.partial(fill, f), (0, 1)))(data, ks)
        for f in (append, plain_append)
    )
    assert_same(got, want)


def test_gradients_of_repeated_ids_add(rng):
    data = jnp.asarray(rng.integers(-8, 9, POOL).astype(np.float32))
    ids = jnp.int32([3, 3, -1, 0, 3, 7])
    weight = jnp.arange(1.0, 7)

    def total(data):
        blocks = kv.gather_blocks(pool(data), ids)
        return jnp.sum(blocks * weight[:, None, None, None, None, None])

    want = np.zeros(POOL, np.float32)
    want[3], want[0] = 1 + 2 + 5, 4
    assert_same(jax.grad(total)(data), want)
    batched = jax.jit(jax.vmap(jax.grad(total)))(jnp.stack([data, data + 1]))
    assert_same(batched, np.stack([want, want]))


def test_jacobians(rng):
    spec = kv.BlockSpec(1, 2, 2, 2, 1, jnp.float32)
    data = jnp.asarray(rng.standard_normal((3, 1, 2, 2, 2, 1)).astype(np.float32))

    def gather(data):
        return kv.gather_blocks(kv.KVPool(data, spec), [2, -1, 2], "NHD")

    def plain(data):
        return data.at[jnp.int32([2, 3, 2])].get(mode="fill", fill_value=0)

    for jacobian in (jax.jacrev, jax.jacfwd):
        for f, truth in ((gather, plain), (kv.block_to_universal, to_universal)):
            got, want = (jax.jit(jacobian(g))(data) for g in (f, truth))
            assert_same(got, want)


def test_integer_pools_have_no_gradient_but_pass_through(rng):
    data = jnp.asarray(rng.integers(-8, 9, POOL).astype(np.int8))
    spec = SPEC.replace(dtype=jnp.int8)

    def dequantized(scale, data):
        blocks = kv.gather_blocks(kv.KVPool(data, spec), IDS)
        return jnp.sum(scale * blocks.astype(jnp.float32))

    want = jnp.sum(plain_gather(data, IDS).astype(jnp.float32))
    assert_same(jax.grad(dequantized)(2.0, data), want)
    scale, pulled = jax.vjp(dequantized, 2.0, data)[1](1.0)
    assert_same(scale, want)
    assert pulled.dtype == jax.dtypes.float0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_keep_the_dtype(rng, dtype):
    data = jnp.asarray(rng.integers(-8, 9, POOL)).astype(dtype)
    spec = SPEC.replace(dtype=jnp.dtype(dtype))

    def total(data):
        return jnp.sum(kv.gather_blocks(kv.KVPool(data, spec), [1, 1, -1]) * 2)

    got = jax.jit(jax.grad(total))(data)
    assert got.dtype == data.dtype
    want = np.zeros(POOL, np.float32)
    want[1] = 4
    assert_same(got.astype(jnp.float32), want)
