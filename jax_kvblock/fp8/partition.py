"""How a quantization is cut over a mesh: by batch members and heads.

Each head of a batch member is on its own, unless all of them share a scale. So the
factor B cuts every array, and a factor for each number of heads those that have so
many. Rows and dims are whole on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.fp8.call import Quantize, Way

Factors = tuple[str | None, ...]  # what cuts each dimension


def _heads(way: Way, heads: int) -> str | None:
    return None if way.shared == "tensor" else f"H{heads}"


def operand_factors(call: Quantize, operands: Sequence[Any]) -> list[Factors]:
    """What may cut the dimensions of each operand."""
    found: list[Factors] = []
    for way, x in zip(call.ways, call.arrays(operands), strict=True):
        found.append(("B", None, _heads(way, x.shape[2]), None))
    return found + [("B",)] * (len(operands) - len(found))


def result_factors(call: Quantize, operands: Sequence[Any]) -> list[Factors]:
    """What may cut the dimensions of each result."""
    found: list[Factors] = []
    for way, x in zip(call.ways, call.arrays(operands), strict=True):
        heads = _heads(way, x.shape[2])
        of: list[Factors] = [("B", None, heads, None)]
        of += [("B", heads, None)] * (way.num_results - 1)
        found += of
    return found


def shards_of(call: Quantize, operands: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes over which a factor is cut, read off the operands."""
    shards: dict[str, Any] = {}
    cuts: dict[str, set[str]] = {}
    for factors, x in zip(operand_factors(call, operands), operands, strict=True):
        spec = getattr(x.sharding, "spec", None)
        if spec is None:
            continue
        mesh = dict(x.sharding.mesh.shape)
        for factor, dim, part in zip(factors, x.shape, spec, strict=False):
            if part is None or factor is None or factor in shards:
                continue
            names = set(part if isinstance(part, tuple) else (part,))
            # An array's batch and heads are cut by different axes, and evenly.
            taken = set().union(
                *(n for f, n in cuts.items() if "B" in (f, factor) and f != factor)
            )
            if not names & taken and dim % math.prod(mesh[n] for n in names) == 0:
                shards[factor], cuts[factor] = part, names
    return shards


def array_spec(factors: Factors, shards: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(shards.get(f) if f else None for f in factors))


def _partition(
    local: core.Primitive, call: Quantize, mesh: Any, operands: Any, results: Any
) -> Any:
    shards = shards_of(call, operands)

    def run(*arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call))

    def shardings(every: Sequence[Factors]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, array_spec(f, shards)) for f in every)

    return (
        mesh,
        run,
        shardings(result_factors(call, operands)),
        shardings(operand_factors(call, operands)),
    )


def _sharding_rule(call: Quantize, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions of operands and results are cut together."""
    whole: list[str] = []  # factors that every device needs whole

    def mapping(factors: Factors) -> ArrayMapping:
        dims = []
        for factor in factors:
            if factor is None:
                factor = f"x{len(whole)}"
                whole.append(factor)
            dims.append(factor)
        return ArrayMapping(*dims)

    return SdyShardingRule(
        tuple(mapping(f) for f in operand_factors(call, operands)),
        tuple(mapping(f) for f in result_factors(call, operands)),
        need_replication_factors=tuple(whole),
    )


def partitioned(local: core.Primitive) -> Any:
    """The quantization, each device computing its part by the primitive `local`."""

    @functools.partial(custom_partitioning, static_argnums=(0,))
    def run(call: Quantize, *arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call))

    run.def_partition(
        partition=functools.partial(_partition, local), sharding_rule=_sharding_rule
    )
    return run
