"""How `paged_attention` is cut over a mesh: by key heads, with the query heads of each.

Everything else is whole on every device: tables name blocks of the whole cache. A
latent cache, whose one key head all query heads share, is whole, too; query heads are
cut.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.paged.call import Paged, page_shapes


def shares_keys(x: Paged) -> bool:
    """Whether the cache is latent: it goes whole to every device."""
    return isinstance(x.pages, KVPool) and x.pages.spec.num_outer == 1


def head_axes(x: Paged) -> list[int | None]:
    """For each operand, in order, its axis of heads; None without one of its own."""

    def same(a: Any, axis: int | None) -> Any:
        return jax.tree.map(lambda _: -1 if axis is None else axis, a)

    if isinstance(x.pages, KVPool):
        groups = x.pages.spec.block_layout.groups
        groups = (("B",), *(groups if x.pages.contiguous else groups[1:]))
    else:
        groups = x.pages.layout.groups
    own = next((i for i, group in enumerate(groups) if group[0] == "H"), None)
    kv_heads = page_shapes(x.pages)[0][2]
    arrays = jax.tree.leaves(x.pages)
    if shares_keys(x):
        own = None
    elif own is not None and any(a.shape[own] % kv_heads for a in arrays):
        own = None  # padded
    axes: Any = Paged(*(same(a, None) for a in x))  # axes in the place of arrays
    axes = axes._replace(q=2, pages=same(x.pages, own))
    if x.sinks is not None:
        axes = axes._replace(sinks=1)
    for name in ("k_scale", "v_scale"):
        scale = getattr(x, name)
        if scale is not None and scale.shape[-1] == kv_heads and own is not None:
            axes = axes._replace(**{name: len(scale.shape) - 1})
    return [None if axis < 0 else axis for axis in jax.tree.leaves(axes)]


def _shards(x: Paged) -> Any:
    """The mesh axes over which heads are cut, read off the operands."""
    heads = x.q.shape[2] if shares_keys(x) else page_shapes(x.pages)[0][2]
    axes = head_axes(x)
    if _uncut(x):
        return None
    for a, axis in zip(jax.tree.leaves(x), axes, strict=True):
        spec = getattr(a.sharding, "spec", None)
        if axis is None or spec is None or axis >= len(spec) or spec[axis] is None:
            continue
        names = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
        sizes = dict(a.sharding.mesh.shape)
        if heads % math.prod(sizes[name] for name in names) == 0:
            return spec[axis]
    return None


def _uncut(x: Paged) -> bool:
    """Whether the cache has no axis of heads that could be cut, but should have one."""
    if shares_keys(x):
        return False
    count = len(jax.tree.leaves(x.pages))
    return None in head_axes(x)[1 : 1 + count]


def _spec(rank: int, axis: int | None, shards: Any) -> PartitionSpec:
    return PartitionSpec(*(shards if i == axis else None for i in range(rank)))


def result_specs(x: Paged) -> tuple[PartitionSpec, PartitionSpec]:
    """Of out and lse."""
    shards = _shards(x)
    return _spec(4, 2, shards), _spec(3, 2, shards)


def _partition(
    local: core.Primitive, call: Any, mesh: Any, operands: Any, results: Any
) -> Any:
    x = call.unpack(operands)
    shards = _shards(x)

    def sharding(rank: int, axis: int | None) -> NamedSharding:
        return NamedSharding(mesh, _spec(rank, axis, shards))

    def run(*arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=part))

    part = call.cut(math.prod(mesh.shape[n] for n in _names(shards)))
    return (
        mesh,
        run,
        tuple(sharding(r.ndim, 2) for r in results),
        tuple(
            sharding(a.ndim, axis)
            for a, axis in zip(operands, head_axes(x), strict=True)
        ),
    )


def _names(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _sharding_rule(call: Any, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions are cut together. Operands are types of MLIR."""
    x = call.unpack(operands)
    uncut = _uncut(x)
    heads, kv_heads = x.q.shape[2], page_shapes(x.pages)[0][2]
    whole: dict[str, None] = {}  # factors that every device needs whole, in order

    def mapping(rank: int, axis: int | None, factor: str) -> ArrayMapping:
        parts = []
        for i in range(rank):
            if i == axis and not uncut:
                parts.append(factor)
                continue
            parts.append(f"x{len(whole)}")
            whole[parts[-1]] = None
        return ArrayMapping(*parts)

    # Query heads are a factor of their own, as those of attention are: where more
    # devices share them than there are key heads, Shardy would cut K by a part of a
    # mesh axis, which jax cannot name.
    of_query = "N" if heads > kv_heads else "K"
    count = len(jax.tree.leaves(x.pages))
    scales = len(jax.tree.leaves((x.k_scale, x.v_scale)))  # the last ones
    of_keys = {*range(1, 1 + count), *range(len(operands) - scales, len(operands))}
    operand_maps = tuple(
        mapping(len(a.shape), axis, "K" if i in of_keys else of_query)
        for i, (a, axis) in enumerate(zip(operands, head_axes(x), strict=True))
    )
    result_maps = tuple(mapping(len(r.shape), 2, of_query) for r in results)
    return SdyShardingRule(
        operand_maps, result_maps, need_replication_factors=tuple(whole)
    )


def partitioned(local: core.Primitive) -> Any:
    """The call, each device computing its heads by the primitive `local`."""

    @functools.partial(custom_partitioning, static_argnums=(0,))
    def run(call: Any, *arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call))

    run.def_partition(
        partition=functools.partial(_partition, local),
        sharding_rule=_sharding_rule,
    )
    return run
