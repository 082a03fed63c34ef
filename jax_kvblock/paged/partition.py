"""How `paged_attention` is cut over a mesh: by query heads, and by key heads as far as
the cache is.

Everything else is whole on every device: tables name blocks of the whole cache. A
latent cache, whose one key head all query heads share, is whole, too; query heads are
cut.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.spmd import no_mesh
from jax_kvblock.paged.call import Paged, page_shapes
from jax_kvblock.paged.pages import Pages


@dataclasses.dataclass(frozen=True)
class _Dim:
    """Where an operand has heads: its axis, or None; query heads, or key heads."""

    axis: int | None = None
    of_keys: bool = False


class Cut(NamedTuple):
    """The mesh axes over which heads are cut.

    The key heads are cut over the first of those that cut the query heads, as far as
    the cache is: its owner says how it lies, and it stays there. Devices that share a
    part of it have different query heads.
    """

    heads: tuple[str, ...]
    kv_heads: tuple[str, ...]

    def of(self, dim: _Dim) -> Any:
        """What cuts a dimension, as a `PartitionSpec` has it."""
        names = self.kv_heads if dim.of_keys else self.heads
        return names if len(names) > 1 else names[0] if names else None


def _dims(x: Paged) -> list[_Dim]:
    """Of each operand, in order."""

    def same(a: Any, axis: int | None) -> Any:
        return jax.tree.map(lambda _: _Dim(axis, of_keys=True), a)

    kv_heads = page_shapes(x.pages)[0][2]
    axis = _axis_of_heads(x.pages, kv_heads)
    of_scales = None if x.scales is None else _axis_of_heads(x.scales, kv_heads)
    if x.scales is not None and of_scales is None:
        axis = None
    dims: Any = Paged(*(jax.tree.map(lambda _: _Dim(), a) for a in x))
    dims = dims._replace(q=_Dim(2), pages=same(x.pages, axis))
    if x.scales is not None and axis is not None:
        dims = dims._replace(scales=same(x.scales, of_scales))
    if x.sinks is not None:
        dims = dims._replace(sinks=_Dim(1))
    for name in ("k_scale", "v_scale"):
        scale = getattr(x, name)
        if scale is not None and scale.shape[-1] == kv_heads and axis is not None:
            dims = dims._replace(**{name: _Dim(scale.ndim - 1, of_keys=True)})
    return jax.tree.leaves(dims)


def _axis_of_heads(pages: KVPool | Pages, kv_heads: int) -> int | None:
    """The axis of arrays along which they can be cut by heads, None without one."""
    if isinstance(pages, KVPool):
        groups = pages.spec.block_layout.groups
        groups = (("B",), *(groups if pages.contiguous else groups[1:]))
    else:
        groups = pages.layout.groups
    axis = next((i for i, group in enumerate(groups) if group[0] == "H"), None)
    if axis is not None and any(
        a.shape[axis] % kv_heads for a in jax.tree.leaves(pages)
    ):
        return None  # padded
    return axis


def _cut(x: Paged) -> Cut:
    """How the operands lie: what cuts the cache, and q."""
    if x.q_first is not None:  # the caller has cut them
        return Cut((), ())
    heads, kv_heads = x.q.shape[2], page_shapes(x.pages)[0][2]
    of_query: tuple[str, ...] = ()
    of_keys: tuple[str, ...] = ()
    mesh: dict[str, int] = {}
    for a, dim in zip(jax.tree.leaves(x), _dims(x), strict=True):
        spec = getattr(a.sharding, "spec", None)
        if dim.axis is None or spec is None or dim.axis >= len(spec):
            continue
        names = _names(spec[dim.axis])
        mesh |= a.sharding.mesh.shape  # what is cut nowhere may know no mesh
        parts = math.prod(mesh[name] for name in names)
        # A part that does not divide the heads cuts nothing.
        if dim.of_keys and not of_keys and kv_heads % parts == 0:
            of_keys = names
        elif not dim.of_keys and not of_query and heads % parts == 0:
            of_query = names
    more = tuple(name for name in of_query if name not in of_keys)
    both = (*of_keys, *more)
    if more and heads % math.prod(mesh[name] for name in both):
        both = of_keys
    return Cut(both, of_keys)


def _spec(rank: int, dim: _Dim, cut: Cut) -> PartitionSpec:
    return PartitionSpec(*(cut.of(dim) if i == dim.axis else None for i in range(rank)))


def result_specs(x: Paged) -> tuple[PartitionSpec, PartitionSpec]:
    """Of out and lse."""
    cut = _cut(x)
    return _spec(4, _Dim(2), cut), _spec(3, _Dim(2), cut)


def _partition(
    local: core.Primitive, call: Any, mesh: Any, operands: Any, results: Any
) -> Any:
    x = call.unpack(operands)
    cut = _cut(x)
    heads, kv_heads = x.q.shape[2], page_shapes(x.pages)[0][2]
    parts = math.prod(mesh.shape[name] for name in cut.kv_heads)
    among = cut.heads[len(cut.kv_heads) :]  # they share a part of the cache
    some = kv_heads // parts > 1 and math.prod(mesh.shape[name] for name in among) > 1
    here = call.cut(parts, heads // parts if some else None)

    def run(*arrays: Any) -> Any:
        if some:
            with no_mesh():
                first = jax.lax.axis_index(among) * arrays[0].shape[2]
                arrays = (*arrays, first.astype(jnp.int32)[None])
        return tuple(local.bind(*arrays, call=here))

    def sharding(rank: int, dim: _Dim) -> NamedSharding:
        return NamedSharding(mesh, _spec(rank, dim, cut))

    return (
        mesh,
        run,
        tuple(sharding(r.ndim, _Dim(2)) for r in results),
        tuple(sharding(a.ndim, dim) for a, dim in zip(operands, _dims(x), strict=True)),
    )


def _names(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _sharding_rule(call: Any, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions are cut together.

    Key heads are a factor of their own: the cache does not follow q.
    """
    # They come as types of MLIR, which a pool does not know.
    x = call.unpack([jax.ShapeDtypeStruct(a.shape, jnp.int8) for a in operands])
    whole: dict[str, None] = {}  # factors that every device needs whole, in order

    def mapping(rank: int, dim: _Dim) -> ArrayMapping:
        parts = []
        for i in range(rank):
            if i == dim.axis:
                parts.append("K" if dim.of_keys else "N")
                continue
            parts.append(f"x{len(whole)}")
            whole[parts[-1]] = None
        return ArrayMapping(*parts)

    return SdyShardingRule(
        tuple(mapping(a.rank, d) for a, d in zip(operands, _dims(x), strict=True)),
        tuple(mapping(r.rank, _Dim(2)) for r in results),
        need_replication_factors=tuple(whole),
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
