"""The table of transforms × ops: every transform of JAX on every public op.

A column is an op, of columns.py. A row is a transform: a way to run a call, and what
has to come out of it by plain jnp. A missing cell is tested as the others are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import ON_GPU
from attention_model import jit as fast  # it runs once
from columns import COLUMNS, NOT_COLUMNS, Column
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from sparse_columns import ELSEWHERE, NOT_ELSEWHERE

import jax_kvblock as kv
from jax_kvblock import fp8, sparse
from jax_kvblock.attention import RESIDUAL_NAMES

EVERY = COLUMNS | ELSEWHERE

MEMBERS = 4  # of a batch; two to a device
OUTER, INNER = 2, 3


# ---- what has to come out, by plain jnp ----------------------------------------------


def weigh(y: Any) -> jax.Array:
    """A sum in which every element has a weight of its own."""
    return sum(jnp.sum(x.astype(jnp.float32) * weights(x)) for x in jax.tree.leaves(y))


def weights(x: Any) -> Any:
    """Fixed small numbers in the shape of x; sums of them with integers are exact."""
    return (jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) * 5 + 2) % 17 - 8


def cotangents_of(y: Any) -> Any:
    return jax.tree.map(lambda x: weights(x).astype(x.dtype), y)


def of_floats(f: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """`f` as a function of its float arguments alone, and these."""
    at = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def only(*floats: Any) -> Any:
        full = list(args)
        for i, x in zip(at, floats, strict=True):
            full[i] = x
        return f(*full)

    return only, [args[i] for i in at]


def value_and_slopes(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`f`'s value, and the gradients of its weighted sum to all float arguments."""
    only, floats = of_floats(f, args)

    def weighed(floats: Any) -> Any:
        y = only(*floats)
        return weigh(y), y

    (_, y), slopes = jax.value_and_grad(weighed, has_aux=True)(floats)
    return y, slopes


# Several rows want the same.
@functools.cache
def value(column: Column) -> Any:
    return fast(column.plain)(*column.draw())


@functools.cache
def value_and_gradients(column: Column) -> Any:
    return fast(lambda *args: value_and_slopes(column.plain, args))(*column.draw())


def gradients(column: Column) -> Any:
    return value_and_gradients(column)[1]


@functools.cache
def members(column: Column) -> Any:
    return fast(lambda args: jax.lax.map(lambda one: column.plain(*one), args))(
        batch(column)
    )


def batch(column: Column) -> list[Any]:
    return column.draw([(MEMBERS,)] * len(column.args))


# ---- rows: the transforms ------------------------------------------------------------

Run = Callable[[Callable[..., Any], Column], Any]
ROWS: dict[str, tuple[Run, Callable[[Column], Any]]] = {}


def row(want: Callable[[Column], Any]) -> Callable[[Run], Run]:
    """A row by the name of its function; `want` says what has to come out."""

    def register(run: Run) -> Run:
        ROWS[run.__name__.removesuffix("_")] = (run, want)
        return run

    return register


def same_of_plain(draw: Callable[[Column], Any]) -> Callable[[Any], Any]:
    """A row `(f, args)` under jit, whose truth is the same of plain jnp."""

    def register(transform: Callable[..., Any]) -> Any:
        def run(f: Callable[..., Any], column: Column) -> Any:
            return fast(functools.partial(transform, f))(draw(column))

        run.__name__ = transform.__name__
        return row(lambda column: run(column.plain, column))(run)

    return register


def everything(f: Callable[..., Any], column: Column) -> Callable[..., Any]:
    """The value, and where there are gradients these."""
    if not column.differentiable:
        return f
    return lambda *args: value_and_slopes(f, args)


def everything_wanted(column: Column) -> Any:
    return (value_and_gradients if column.differentiable else value)(column)


@row(value)
def eager(f, column):
    return f(*column.draw())


@row(value)
def jit(f, column):
    return fast(f)(*column.draw())


@row(value)
def disable_jit(f, column):
    with jax.disable_jit():
        return f(*column.draw())


@row(value)
def debug_nans(f, column):
    """What is finite comes out as ever; a NaN is JAX's error, eagerly and under jit."""
    args = column.draw()
    at, x = next((i, x) for i, x in enumerate(args) if x.dtype == jnp.float32)
    hurt = [*args[:at], jnp.full_like(x, jnp.nan), *args[at + 1 :]]
    with jax.debug_nans(True):
        for call in (f, fast(f)):
            with pytest.raises(FloatingPointError, match="nan"):
                call(*hurt)
        return f(*args)


@row(everything_wanted)
def x64(f, column):
    """Wide integers come in, and no float gets wider."""
    with jax.enable_x64(True):
        wide = {jnp.dtype("int32"): jnp.int64}
        args = [x.astype(wide.get(x.dtype, x.dtype)) for x in column.draw()]
        return fast(everything(f, column))(*args)


@row(everything_wanted)
def strict_promotion(f, column):
    with jax.numpy_dtype_promotion("strict"):
        return fast(everything(f, column))(*column.draw())


def zeros(column: Column) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value(column))


@row(value)
def cond(f, column):
    none = zeros(column)
    choose = fast(lambda p, *args: jax.lax.cond(p, f, lambda *_: none, *args))
    return choose(True, *column.draw())


@row(value)
def while_loop(f, column):
    def loop(none, *args):
        step = lambda state: (state[0] + 1, f(*args))  # noqa: E731
        more = lambda state: state[0] < 2  # noqa: E731
        return jax.lax.while_loop(more, step, (0, none))[1]

    return fast(loop)(zeros(column), *column.draw())


@row(members)
def scan(f, column):
    step = lambda count, args: (count + 1, f(*args))  # noqa: E731
    return fast(lambda args: jax.lax.scan(step, 0, args)[1])(batch(column))


@row(members)
def map_(f, column):
    return fast(lambda args: jax.lax.map(lambda one: f(*one), args))(batch(column))


@row(value)
def donation(f, column):
    """The first argument's memory may be taken for a result."""
    first, *rest = column.draw()
    return fast(f, donate_argnums=0)(jnp.array(first), *rest)


TARGETS = [
    "kvblock_copy",
    *(
        f"kvblock_attention_{op}"
        for op in ("forward", "backward_kv", "backward_q", "backward_bias")
    ),
    *(
        f"kvblock_{op}"
        for op in ("pool_pieces", "weigh_tiles", "keep_tiles", "list_tiles")
    ),
]


@row(value)
def export(f, column):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    args = column.draw()
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(jax.jit(f), disabled_checks=checks)(*args)
    return fast(jax.export.deserialize(exported.serialize()).call)(*args)


# ---- batches -------------------------------------------------------------------------


@row(members)
def vmap(f, column):
    return fast(jax.vmap(f))(*batch(column))


@same_of_plain(lambda column: (column.draw(), batch(column)))
def vmap_over_each_operand(f, args):
    """Each alone, the batch first or last."""
    one, many = args
    results = []
    for i, x in enumerate(many):
        axis = 0 if i % 2 else x.ndim - 1
        axes = tuple(axis if i == j else None for j in range(len(one)))
        moved = [*one[:i], jnp.moveaxis(x, 0, axis), *one[i + 1 :]]
        results.append(jax.vmap(f, axes)(*moved))
    return results


def draw_nested(column: Column) -> list[Any]:
    lead = [(OUTER, INNER), *([(OUTER,), (INNER,)] * len(column.args))]
    return column.draw(lead[: len(column.args)])


@same_of_plain(draw_nested)
def nested_vmap(f, args):
    """The first operand has both axes, the others one: the inner or the outer."""
    outer = tuple(0 if i == 0 or i % 2 else None for i in range(len(args)))
    inner = tuple(0 if i % 2 == 0 else None for i in range(len(args)))
    return jax.vmap(jax.vmap(f, inner), outer)(*args)


@row(members)
def spmd_axis_name(f, column):
    """The batch lies over a mesh axis, which constraints inside of it are told of."""
    mesh = mesh_of()
    whole, over_b = NamedSharding(mesh, P()), NamedSharding(mesh, P("b"))

    def inside(*args: Any) -> Any:
        y = f(*args)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), y)

    args = jax.device_put(batch(column), over_b)
    got = fast(jax.vmap(inside, spmd_axis_name="b"))(*args)
    assert all(
        x.sharding.is_equivalent_to(over_b, x.ndim) for x in jax.tree.leaves(got)
    )
    return got


# ---- derivatives ---------------------------------------------------------------------


@row(gradients)
def grad(f, column):
    """Outside of jit."""
    only, floats = of_floats(f, column.draw())
    return jax.grad(lambda floats: weigh(only(*floats)))(floats)


@row(value_and_gradients)
def value_and_grad(f, column):
    return fast(lambda *args: value_and_slopes(f, args))(*column.draw())


@same_of_plain(Column.draw)
def jacrev(f, args):
    """Of a few elements of the result."""
    only, floats = of_floats(f, args)

    def some(floats: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(-1)[1:14:4], only(*floats))

    return jax.jacrev(some)(floats)


@same_of_plain(Column.draw)
def jvp(f, args):
    only, floats = of_floats(f, args)
    return jax.jvp(only, floats, [weights(x) for x in floats])


@same_of_plain(Column.draw)
def linearize(f, args):
    only, floats = of_floats(f, args)
    y, push = jax.linearize(only, *floats)
    return y, push(*map(weights, floats))


@same_of_plain(Column.draw)
def hvp(f, args):
    """Hessian-vector products: forward mode of the gradient."""
    only, floats = of_floats(f, args)
    slopes = jax.grad(lambda floats: weigh(only(*floats)))
    return jax.jvp(slopes, (floats,), ([weights(x) for x in floats],))


@row(gradients)
def linear_transpose(f, column):
    """Copies are linear in all their arrays."""
    only, floats = of_floats(f, column.draw())
    return list(jax.linear_transpose(only, *floats)(cotangents_of(value(column))))


POLICIES = [
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
]


@row(lambda column: [gradients(column)] * len(POLICIES))
def remat(f, column):
    """Everything computed again, and nothing but what is named."""

    def slopes(*args: Any) -> Any:
        only, floats = of_floats(f, args)
        kept = [
            jax.checkpoint(lambda *xs: weigh(only(*xs)), policy=p) for p in POLICIES
        ]
        return [jax.grad(lambda xs, g=g: g(*xs))(floats) for g in kept]

    return fast(slopes)(*column.draw())


# ---- meshes --------------------------------------------------------------------------


def cut(axis: int | None, x: Any) -> P:
    """Heads over "h"."""
    return P(*(("h" if i == axis else None) for i in range(x.ndim)))


def on_a_mesh(column: Column, axis_type: AxisType) -> tuple[Any, list[Any], Any, Any]:
    """A mesh, the arguments with their heads cut, and both sides' specs."""
    mesh = mesh_of(axis_type)
    args = column.draw()
    specs = [cut(axis, x) for axis, x in zip(column.heads, args, strict=True)]
    out_specs = jax.tree.map(cut, column.out_heads, value(column))
    put = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    return mesh, put, tuple(specs), out_specs


def assert_cut(got: Any, mesh: Any, specs: Any) -> None:
    def one(x: Any, spec: P) -> None:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)

    jax.tree.map(one, got, specs)


@row(value)
def automatic_mesh(f, column):
    mesh, args, _, out_specs = on_a_mesh(column, AxisType.Auto)
    with jax.set_mesh(mesh):
        got = fast(f)(*args)
    assert_cut(got, mesh, out_specs)
    return got


@row(value)
def explicit_mesh(f, column):
    mesh, args, _, out_specs = on_a_mesh(column, AxisType.Explicit)
    with jax.set_mesh(mesh):
        got = fast(f)(*args)
    assert_cut(got, mesh, out_specs)
    return got


@row(value)
def shard_map(f, column):
    mesh, args, specs, out_specs = on_a_mesh(column, AxisType.Auto)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs)
    return fast(mapped)(*args)


# ---- the table -----------------------------------------------------------------------


def assert_right(got: Any, want: Any, exact: bool) -> None:
    """The same bits; attention is as near as its dtype lets it."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            bar = 3e-2 if ON_GPU else 1e-5
            np.testing.assert_allclose(x, y, rtol=bar, atol=bar * np.abs(y).max())


ON_CPUS = {"spmd_axis_name", "automatic_mesh", "explicit_mesh", "shard_map"}


@pytest.mark.cases(24)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "transform",
    [pytest.param(t, marks=[pytest.mark.host] * (t in ON_CPUS)) for t in ROWS],
)
def test_every_cell(transform, name, request):
    if transform in ON_CPUS:
        request.getfixturevalue("four_cpus")
    column, (run, want) = EVERY[name], ROWS[transform]
    if transform in column.missing:
        error, message = column.missing[transform]
        with pytest.raises(error, match=message):
            run(column.run, column)
    else:
        assert_right(run(column.run, column), want(column), column.exact)


def test_every_op_is_a_column():
    functions = {n for n in kv.__all__ if n[0].islower()}
    columns = {name.split()[0] for name in COLUMNS}
    assert functions == columns | set(NOT_COLUMNS)
    others = {n for n in (*sparse.__all__, *fp8.__all__) if n[0].islower()}
    assert others == set(ELSEWHERE) | set(NOT_ELSEWHERE)


def test_missing_cells_are_rows():
    assert all(set(column.missing) <= set(ROWS) for column in EVERY.values())
