"""What the primitives share where programs run on several devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kvblock.core.debug import debug_checks


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Inside shard_map, makes all arrays vary over the same mesh axes; None stays."""
    varying = [frozenset() if a is None else _varying(a) for a in arrays]
    union: frozenset[str] = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(sorted(union - v)), to="varying")
        if a is not None and union - v
        else a
        for a, v in zip(arrays, varying, strict=True)
    ]


def _varying(a: Any) -> frozenset[str]:
    return getattr(getattr(jax.typeof(a), "mat", None), "varying", frozenset())


def reshard(x: Any, spec: PartitionSpec, mesh: Any = None) -> Any:
    """On explicit axes an array is cut as `spec` says; None stays.

    Axes that are not explicit are left out of the spec: what lies along them is up to
    the compiler, or to a `jax.shard_map` around the call.

    Args:
      x: an array, traced or not, or None.
      spec: how its axes are cut.
      mesh: where; the array's own mesh unless given.
    """
    if x is None:
        return None
    mesh = jax.typeof(x).sharding.mesh if mesh is None else mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x

    def explicit(axes: Any) -> tuple[Any, ...]:
        each = axes if isinstance(axes, tuple) else (axes,)
        return tuple(axis for axis in each if kinds.get(axis) == AxisType.Explicit)

    spec = PartitionSpec(*map(explicit, spec))
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def is_partitioned(ctx: Any) -> bool:
    """Whether the compiler cuts the program that is lowered over several devices.

    On one device it does not, nor where a shard_map is over all axes of several.
    """
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return (getattr(context, "num_devices", 1) or 1) > 1
    sizes = context.mesh.shape.items()
    return math.prod(size for axis, size in sizes if axis not in manual) > 1


def lower_local(ctx: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Lowers a jax function that computes one device's part.

    The part knows no mesh, whatever mesh is set around the call: with an explicit one,
    jax.numpy would ask for shardings that nobody partitions any more.
    """
    ctx = ctx.replace(
        avals_in=[_without_mesh(a) for a in ctx.avals_in],
        avals_out=[_without_mesh(a) for a in ctx.avals_out],
    )
    with no_mesh(), debug_checks(False):  # checks have seen the call itself
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def no_mesh() -> Any:
    """A context for what one device computes."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _without_mesh(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype, memory_space=aval.memory_space)
