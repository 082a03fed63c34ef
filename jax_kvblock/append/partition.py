"""How an append is cut over a mesh: by KV heads, query heads alike.

Each KV head's rows of the pool are written from its own tokens, so the factor H cuts k,
v, the pool and the scales, and q by whole groups. Where there is one KV head, query
heads are cut alone (the factor N), and every device writes the whole pool. Tokens,
slots and all else are whole on every device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.append.call import UPDATED, Append

Axes = tuple[tuple[str, ...], ...]


def _factors(call: Append) -> set[str]:
    """The axes that may be cut: H, unless it is merged behind another; or N."""
    if call.extents["H"] == 1:
        return {"N"}
    behind = any("H" in group[1:] for group in call.pool.form.array)
    return set() if behind else {"H"}


def _factor(group: tuple[str, ...], factors: set[str]) -> str | None:
    """What cuts a dimension. Query heads come in groups, one for each KV head."""
    axis = group[0]
    if axis == "N" and "N" not in factors:
        axis = "H"
    return axis if axis in factors else None


def shards_of(call: Append, operands: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes over which a factor is cut, read off the operands.

    The pool comes first, and its scales: what is updated in place stays where it is.
    """
    factors = _factors(call)
    size = {"H": call.extents["H"]}
    shards: dict[str, Any] = {}
    pairs = zip(call.operand_names, operands, strict=True)
    for name, operand in sorted(pairs, key=lambda pair: pair[0] not in UPDATED):
        spec = getattr(operand.sharding, "spec", None)
        if spec is None:
            continue
        mesh = dict(operand.sharding.mesh.shape)
        groups = call.axes(name, len(operand.shape))
        for group, dim, part in zip(groups, operand.shape, spec, strict=False):
            factor = _factor(group, factors)
            if part is None or factor is None or factor in shards:
                continue
            # A part that does not divide the factor cuts nothing.
            names = part if isinstance(part, tuple) else (part,)
            if size.get(factor, dim) % math.prod(mesh[n] for n in names) == 0:
                shards[factor] = part
    return shards


def array_spec(
    call: Append, name: str, ndim: int, shards: dict[str, Any]
) -> PartitionSpec:
    """How an operand or a result lies."""
    factors = _factors(call)
    found = (_factor(group, factors) for group in call.axes(name, ndim))
    return PartitionSpec(*(shards.get(f) if f else None for f in found))


def _partition(
    local: core.Primitive, call: Append, mesh: Any, operands: Any, results: Any
) -> Any:
    shards = shards_of(call, operands)
    shape = dict(mesh.shape)
    part = shards.get("H", ())
    count = math.prod(shape[n] for n in (part if isinstance(part, tuple) else (part,)))
    heads = call.extents["H"] // count
    here = dataclasses.replace(call, pool=call.pool.resized(H=heads))

    def run(*arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=here))

    def shardings(names: Sequence[str], arrays: Any) -> tuple[NamedSharding, ...]:
        return tuple(
            NamedSharding(mesh, array_spec(call, name, len(a.shape), shards))
            for name, a in zip(names, arrays, strict=True)
        )

    return (
        mesh,
        run,
        shardings(call.result_names, results),
        shardings(call.operand_names, operands),
    )


def _sharding_rule(call: Append, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions of operands and results are cut together."""
    factors = _factors(call)
    grouped = "q" in call.present and "H" in factors
    whole: list[str] = []  # factors that every device needs whole
    sizes: dict[str, Any] = {}

    def fresh(size: int | None = None) -> str:
        whole.append(f"x{len(whole)}")
        if size is not None:
            sizes[whole[-1]] = size
        return whole[-1]

    def mapping(name: str, array: Any) -> ArrayMapping:
        dims: list[Any] = []
        groups = call.axes(name, len(array.shape))
        for group, dim in zip(groups, array.shape, strict=True):
            factor = _factor(group, factors)
            if factor is None:
                dims.append(fresh())
                continue
            if group[0] == "N" and grouped:
                # Not one factor with H: Shardy might cut H by a part of a mesh axis,
                # which jax cannot name. `_partition` cuts H as it cuts these.
                factor = "N"
            rest = group[1:]
            if not rest:
                dims.append(factor)
                continue
            inner = dim // call.extents["H"]
            sizes[factor] = call.extents["H"]
            dims.append(CompoundFactor(factor, fresh(inner)))
        return ArrayMapping(*dims)

    operand_maps = tuple(
        mapping(n, a) for n, a in zip(call.operand_names, operands, strict=True)
    )
    result_maps = tuple(
        mapping(n, a) for n, a in zip(call.result_names, results, strict=True)
    )
    # Shardy infers the size of a factor that is somewhere a dimension of its own.
    dims = [dim for mapped in (*operand_maps, *result_maps) for dim in mapped]
    alone = {dim for dim in dims if isinstance(dim, str)}
    return SdyShardingRule(
        operand_maps,
        result_maps,
        need_replication_factors=tuple(whole),
        **{name: size for name, size in sizes.items() if name not in alone},
    )


def partitioned(local: core.Primitive) -> Any:
    """The append, each device computing its part by the primitive `local`."""

    @functools.partial(custom_partitioning, static_argnums=(0,))
    def run(call: Append, *arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call))

    run.def_partition(
        partition=functools.partial(_partition, local), sharding_rule=_sharding_rule
    )
    return run
