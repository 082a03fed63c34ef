"""An order of what devices do, where no data flow says it.

XLA runs a collective beside other work where it begins it early and waits for it late.
It takes `jax.lax.optimization_barrier` away before it puts a program in order, so what
has to come later has to depend on what comes before. On an NVIDIA GPU that is a call
that does nothing: its results are its first operands, in place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.core import ffi
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local

TARGET = "kvblock_after"


def after(arrays: Any, done: Any) -> Any:
    """The same arrays, not before something is done.

    Args:
      arrays: a tree of arrays, None among them. Best are arrays that nobody else reads:
        of others, XLA makes copies.
      done: a tree of arrays.
    """
    leaves, tree = jax.tree.flatten(arrays)
    made = _after_p.bind(*leaves, *jax.tree.leaves(done), count=len(leaves))
    return jax.tree.unflatten(tree, made)


def _abstract_eval(*avals: Any, count: int) -> list[Any]:
    return list(avals[:count])


_after_p, _local_p = make_primitives(TARGET, _abstract_eval)


# ---- one device's part ---------------------------------------------------------------


def _barrier(*operands: Any, count: int) -> list[Any]:
    return list(jax.lax.optimization_barrier(operands)[:count])


def _lower_cuda(ctx: Any, *operands: Any, count: int) -> Any:
    if not ffi.BUILD["cuda"]:  # there is no handler; another order is right, too
        return lower_local(ctx, functools.partial(_barrier, count=count), *operands)
    in_place = {i: i for i in range(count)}
    call = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=in_place)
    return call(ctx, *operands)


mlir.register_lowering(_local_p, mlir.lower_fun(_barrier, multiple_results=True))
mlir.register_lowering(_local_p, _lower_cuda, platform="cuda")


# ---- over devices --------------------------------------------------------------------


@functools.partial(custom_partitioning, static_argnums=(0,))
def _over_devices(count: int, *operands: Any) -> tuple[Any, ...]:
    return tuple(_local_p.bind(*operands, count=count))


def _partition(count: int, mesh: Any, operands: Any, results: Any) -> Any:
    def local(*operands: Any) -> tuple[Any, ...]:
        return tuple(_local_p.bind(*operands, count=count))

    # What is cut nowhere may come without a spec, where some axes are manual.
    specs = (getattr(x.sharding, "spec", None) or PartitionSpec() for x in operands)
    cuts = tuple(NamedSharding(mesh, spec) for spec in specs)
    return mesh, local, cuts[:count], cuts


def _sharding_rule(count: int, mesh: Any, operands: Any, results: Any) -> Any:
    """An array stays as it is cut."""
    mappings = tuple(
        ArrayMapping(*[f"a{i}d{dim}" for dim in range(len(x.shape))])
        for i, x in enumerate(operands)
    )
    return SdyShardingRule(mappings, mappings[:count])


_over_devices.def_partition(partition=_partition, sharding_rule=_sharding_rule)


def _lower(*operands: Any, count: int) -> list[Any]:
    return list(_over_devices(count, *operands))


mlir.register_lowering(_after_p, mlir.lower_fun(_lower, multiple_results=True))


def _batch(operands: Any, dims: Any, *, count: int) -> tuple[list[Any], Any]:
    return _after_p.bind(*operands, count=count), list(dims[:count])


batching.primitive_batchers[_after_p] = _batch


def _jvp(operands: Any, tangents: Any, *, count: int) -> tuple[list[Any], list[Any]]:
    """Tangents in no order: forward mode and second derivatives are plain JAX."""
    return _after_p.bind(*operands, count=count), list(tangents[:count])


ad.primitive_jvps[_after_p] = _jvp
