"""How the primitives of attention are cut over a mesh.

Batch members and heads are independent. Query heads come in groups, one for each key
head: where there are several key heads, whole groups are cut (the factor K); where
there is one, its group is (the factor G), and the key head's gradients are summed.
Results that are shared by what is cut (dbias, or dk and dv of one head) are summed
over the devices.
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

from jax_kvblock.attention.config import sizes_of
from jax_kvblock.attention.ops import Call, Op, letters


def _factors(call: Call, op: Op, arrays: Sequence[Any]) -> dict[str, int]:
    """The sizes of the factors that may be cut: B, and K or G."""
    config = call.config
    size = sizes_of(config, call.unpack(arrays[: len(call.present)]))
    factors = {}
    shared = {
        a.shape[0]
        for name, a in zip(op.operand_names(call), arrays, strict=True)
        if letters(name, config.packed)[0] == "b"
    }
    if not config.packed and shared <= {1, size.batch}:
        factors["B"] = size.batch
    if size.num_kv_heads > 1:
        factors["K"] = size.num_kv_heads
    else:
        factors["G"] = size.num_heads
    return factors


def _dim_factor(letter: str, dim: int, factors: dict[str, int]) -> str | None:
    """The factor that cuts a dimension, None where nothing does."""
    if letter in "Bb":
        # A shared bias has 1 here.
        return "B" if factors.get("B") == dim else None
    if letter == "K":
        return "K" if "K" in factors else None
    if letter in "Nn":
        if letter == "n" and dim == 1:
            return None
        return "K" if "K" in factors else "G"
    return None


def axis_shards(op: Op, call: Call, operands: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes over which B and the heads are cut, read off the operands."""
    packed = call.config.packed
    factors = _factors(call, op, operands)
    shards: dict[str, Any] = {"factors": factors}
    used: set[str] = set()  # a mesh axis cuts one factor; the first operand wins
    for name, operand in zip(op.operand_names(call), operands, strict=True):
        spec = getattr(operand.sharding, "spec", None)
        if spec is None:
            continue
        sizes = dict(operand.sharding.mesh.shape)
        for letter, dim, part in zip(
            letters(name, packed), operand.shape, spec, strict=False
        ):
            factor = _dim_factor(letter, dim, factors)
            if part is None or factor is None or dim == 1 or factor in shards:
                continue
            names = set(_names(part))
            # A part that does not divide the factor cuts nothing.
            fits = factors[factor] % math.prod(sizes[n] for n in names) == 0
            if fits and not used & names:
                shards[factor] = part
                used |= names
    return shards


def array_spec(
    axes: str, shape: Sequence[int], shards: dict[str, Any]
) -> PartitionSpec:
    factors = shards["factors"]
    found = [
        _dim_factor(axis, dim, factors) for axis, dim in zip(axes, shape, strict=True)
    ]
    return PartitionSpec(*(shards.get(f) if f else None for f in found))


def _names(part: Any) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,)


def _partition(
    op: Op, local: core.Primitive, call: Call, mesh: Any, operands: Any, results: Any
) -> Any:
    packed = call.config.packed
    names = op.result_names(call)
    shards = axis_shards(op, call, operands)

    def sharding(name: str, dims: Sequence[int]) -> NamedSharding:
        return NamedSharding(mesh, array_spec(letters(name, packed), dims, shards))

    cut: dict[str, tuple[str, ...]] = {
        f: _names(shards[f]) for f in ("B", "K", "G") if f in shards
    }

    sums = tuple(
        _shared_axes(op, name, full.shape, cut, shards["factors"], packed)
        for name, full in zip(names, results, strict=True)
    )

    def run(*arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call, sums=sums))

    return (
        mesh,
        run,
        tuple(sharding(n, r.shape) for n, r in zip(names, results, strict=True)),
        tuple(
            sharding(n, a.shape)
            for n, a in zip(op.operand_names(call), operands, strict=True)
        ),
    )


def _shared_axes(
    op: Op,
    name: str,
    shape: Sequence[int],
    cut: dict[str, tuple[str, ...]],
    factors: dict[str, int],
    packed: bool,
) -> tuple[str, ...]:
    """The mesh axes whose devices share a gradient's array and each hold a part."""
    if op.is_forward:
        return ()
    own = {
        _dim_factor(letter, dim, factors)
        for letter, dim in zip(letters(name, packed), shape, strict=True)
    }
    return tuple(n for factor, names in cut.items() if factor not in own for n in names)


def _sharding_rule(op: Op, call: Call, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions of operands and results are cut together."""
    packed = call.config.packed
    factors = _factors(call, op, operands)
    grouped = (
        sizes_of(call.config, call.unpack(operands[: len(call.present)])).group > 1
    )
    whole: dict[str, None] = {}  # factors that every device needs whole, in order

    def mapping(name: str, dims: Sequence[int]) -> ArrayMapping:
        parts: list[str] = []
        for letter, dim in zip(letters(name, packed), dims, strict=True):
            factor = _dim_factor(letter, dim, factors)
            if factor is None:
                factor = f"x{len(whole)}"
                whole[factor] = None
            elif letter in "Nn" and grouped:
                # Not one factor with K: where more devices share the query heads than
                # there are key heads, Shardy would cut K by a part of a mesh axis,
                # which jax cannot name. `_partition` cuts K as it cuts these.
                factor = "N"
            parts.append(factor)
        return ArrayMapping(*parts)

    operand_maps = tuple(
        mapping(n, a.shape)
        for n, a in zip(op.operand_names(call), operands, strict=True)
    )
    result_maps = tuple(
        mapping(n, a.shape) for n, a in zip(op.result_names(call), results, strict=True)
    )
    return SdyShardingRule(
        operand_maps, result_maps, need_replication_factors=tuple(whole)
    )


def partitioned(op: Op, local: core.Primitive) -> Any:
    """The operation, each device computing its part by the primitive `local`."""

    @functools.partial(custom_partitioning, static_argnums=(0,))
    def run(call: Call, *arrays: Any) -> Any:
        return tuple(local.bind(*arrays, call=call))

    run.def_partition(
        partition=functools.partial(_partition, op, local),
        sharding_rule=functools.partial(_sharding_rule, op),
    )
    return run
