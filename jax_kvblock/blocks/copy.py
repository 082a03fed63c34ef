"""The block-copy primitive: what comes out, how it transforms, who computes it.

`block_copy_p` takes `[*sources, *destinations (in place), *int32 scalars]` and one
parameter, a `Copy`. Two primitives share it: the outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs, and
lowers to the FFI handler of its platform.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.blocks.implementations import CUDA_CALLS, choose
from jax_kvblock.blocks.plan import Copy, Side, cuda_leader, make_plan, plan_attributes
from jax_kvblock.blocks.reference import block_copy as reference_copy
from jax_kvblock.blocks.reference import block_copy_bits
from jax_kvblock.core import checks
from jax_kvblock.core.batching import batch_one_by_one
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, vary_alike


def block_copy(
    copy: Copy,
    sources: Sequence[jax.Array],
    destinations: Sequence[jax.Array] = (),
    scalars: Sequence[jax.Array | None] = (),
) -> list[jax.Array]:
    """Runs `copy`; `scalars` are source ids, destination ids and the two starts."""
    operands = [*sources, *destinations, *(s for s in scalars if s is not None)]
    return block_copy_p.bind(*vary_alike(operands), copy=copy)


def local_block_copy(
    copy: Copy,
    sources: Sequence[jax.Array],
    destinations: Sequence[jax.Array] = (),
    scalars: Sequence[jax.Array | None] = (),
) -> list[jax.Array]:
    """`block_copy` of one device's arrays, in the lowering of another primitive."""
    operands = [*sources, *destinations, *(s for s in scalars if s is not None)]
    return _local_copy_p.bind(*operands, copy=copy)


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(*avals: Any, copy: Copy) -> list[Any]:
    num_src, num_dst = copy.num_operands
    if copy.in_place:
        return list(avals[num_src : num_src + num_dst])
    # A fresh result is computed on the device, wherever its source lies.
    sharding = avals[0].sharding
    spec = _array_spec(copy.dst.form.array, _axis_shards(copy, avals))
    fresh = avals[0].update(
        shape=copy.dst.array_shape,
        weak_type=False,
        sharding=NamedSharding(sharding.mesh, spec),
        memory_space=jax.memory.Space.Device,
    )
    return [fresh] * copy.dst.num_arrays


block_copy_p, _local_copy_p = make_primitives("kvblock_copy", _abstract_eval)


# ---- lowering: one device ------------------------------------------------------------


def _lower_reference(ctx: Any, *operands: Any, copy: Copy) -> Any:
    reference = functools.partial(block_copy_bits, copy)
    return lower_local(ctx, reference, *operands)


def _lower_call(ctx: Any, *operands: Any, copy: Copy, platform: str | None) -> Any:
    if not math.prod(n for _, n in copy.extents):
        return _lower_reference(ctx, *operands, copy=copy)
    chosen = choose(copy.implementation, platform)
    if chosen == "xla":
        return _lower_reference(ctx, *operands, copy=copy)
    checks.check_compiled("kvblock_copy", (n for _, n in copy.extents))
    target, extra = "kvblock_copy", {}
    if chosen in CUDA_CALLS:
        target, extra = "kvblock_copy_runs", {"backend": _CALL_NUMBERS[chosen]}
    itemsize, leader = ctx.avals_in[0].dtype.itemsize, copy.dst
    if platform == "cuda":
        ends = ctx.avals_in[0], ctx.avals_out[0]
        host = [aval.memory_space == jax.memory.Space.Host for aval in ends]
        leader = cuda_leader(copy, itemsize, host)
    plan = make_plan(copy, itemsize, leader)
    num_src, num_dst = copy.num_operands
    aliases = {num_src + i: i for i in range(num_dst)}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return rule(ctx, *operands, **plan_attributes(plan, copy), **extra)


# As block_copy.h numbers them (kvblock_backend).
_CALL_NUMBERS = {"batch": np.int64(1), "async": np.int64(2)}

for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_copy_p,
        functools.partial(_lower_call, platform=_platform),
        platform=_platform,
    )


# ---- lowering: partitioned over a mesh -----------------------------------------------
#
# The copy is pointwise along every axis that both sides hold whole: each device copies
# its part. Axes that are looked up (ids, starts), cut (head ranges) or merged behind
# another axis must be whole on every device.


def _shardable(copy: Copy) -> set[str]:
    axes = set()
    for axis, extent in copy.extents:
        sides = [s for s in (copy.src, copy.dst) if axis in dict(s.sizes)]
        if all(
            dict(s.sizes)[axis] == extent
            and axis != s.start
            and axis not in s.form.table
            and not any(axis in group[1:] for group in s.form.array)
            for s in sides
        ):
            axes.add(axis)
    # Each device holds the whole destination's blocks, so it needs all of the items.
    if copy.dst.index:
        axes.discard("N")
    return axes


def _operand_groups(copy: Copy) -> list[tuple[tuple[str, ...], ...]]:
    """For each operand, the axes of each of its dimensions."""
    num_src, num_dst = copy.num_operands
    ids = [(("N",),) for side in (copy.src, copy.dst) if side.index]
    starts: list[tuple] = [() for side in (copy.src, copy.dst) if side.start]
    return [
        *[copy.src.form.array] * num_src,
        *[copy.dst.form.array] * num_dst,
        *ids,
        *starts,
    ]


def _axis_shards(copy: Copy, operands: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes over which each shardable axis is cut, read off the operands.

    Destinations come first: what is updated in place stays where it is.
    """
    shardable = _shardable(copy)
    shards: dict[str, Any] = {}
    num_src, _ = copy.num_operands
    pairs = list(zip(_operand_groups(copy), operands, strict=True))
    for groups, operand in (*pairs[num_src:], *pairs[:num_src]):
        spec = getattr(operand.sharding, "spec", None)
        if spec is None:
            continue
        for group, part in zip(groups, spec, strict=False):
            if part is not None and group[0] in shardable:
                shards.setdefault(group[0], part)
    return shards


def _array_spec(
    groups: tuple[tuple[str, ...], ...], shards: dict[str, Any]
) -> PartitionSpec:
    return PartitionSpec(*(shards.get(group[0]) for group in groups))


def _local_side(
    side: Side, parts: dict[str, int], shardable: set[str], items: int
) -> Side:
    sizes = {
        axis: size // parts.get(axis, 1) if axis in shardable else size
        for axis, size in side.sizes
    }
    if "N" in sizes:
        sizes["N"] = items
    return side.resized(**sizes)


def _partition(copy: Copy, mesh: Any, operands: Any, results: Any) -> Any:
    shards = _axis_shards(copy, operands)
    shape = dict(mesh.shape)

    def count(part: Any) -> int:
        names = part if isinstance(part, tuple) else (part,)
        return math.prod(shape[name] for name in names)

    parts = {axis: count(part) for axis, part in shards.items()}
    extents = {axis: n // parts.get(axis, 1) for axis, n in copy.extents}
    shardable = _shardable(copy)
    items = extents.get("N", 1)
    local = dataclasses.replace(
        copy.resized(**extents),
        src=_local_side(copy.src, parts, shardable, items),
        dst=_local_side(copy.dst, parts, shardable, items),
    )

    def sharding(groups: tuple[tuple[str, ...], ...]) -> NamedSharding:
        return NamedSharding(mesh, _array_spec(groups, shards))

    def run(*arrays: Any) -> Any:
        return tuple(_local_copy_p.bind(*arrays, copy=local))

    return (
        mesh,
        run,
        tuple(sharding(copy.dst.form.array) for _ in results),
        tuple(sharding(groups) for groups in _operand_groups(copy)),
    )


def _sharding_rule(copy: Copy, mesh: Any, operands: Any, results: Any) -> Any:
    """Says to Shardy which dimensions of operands and results are cut together."""
    shardable, replicated, sizes = _shardable(copy), set(), {}

    def factor(side: str, axis: str, size: int) -> str:
        # An axis that is not shared whole is a factor of its side alone.
        name = axis if axis in shardable else f"{side}{axis}"
        sizes[name] = size
        if axis not in shardable:
            replicated.add(name)
        return name

    def mapping(label: str, side: Side) -> ArrayMapping:
        stored = dict(side.sizes)
        dims = []
        for group in side.form.array:
            names = [factor(label, axis, stored[axis]) for axis in group]
            dims.append(names[0] if len(names) == 1 else CompoundFactor(*names))
        return ArrayMapping(*dims)

    num_src, num_dst = copy.num_operands
    items = dict(copy.extents).get("N", 1)
    operand_mappings = [
        *[mapping("src", copy.src)] * num_src,
        *[mapping("dst", copy.dst)] * num_dst,
        *[
            ArrayMapping(factor("ids", "N", items))
            for side in (copy.src, copy.dst)
            if side.index
        ],
        *[ArrayMapping() for side in (copy.src, copy.dst) if side.start],
    ]
    result_mappings = [mapping("dst", copy.dst)] * copy.dst.num_arrays
    # Shardy infers the size of a factor that is somewhere a dimension of its own.
    dims = [dim for mapped in (*operand_mappings, *result_mappings) for dim in mapped]
    whole = {dim for dim in dims if isinstance(dim, str)}
    # Shardy numbers factors as they appear, and wants special ones in that order.
    order = dict.fromkeys(
        name for dim in dims for name in ((dim,) if isinstance(dim, str) else dim)
    )
    factor_sizes: dict[str, Any] = {
        name: sizes[name] for name in order if name not in whole
    }
    return SdyShardingRule(
        tuple(operand_mappings),
        tuple(result_mappings),
        need_replication_factors=tuple(f for f in order if f in replicated),
        **factor_sizes,
    )


@functools.partial(custom_partitioning, static_argnums=(0,))
def _partitioned(copy: Copy, *operands: Any) -> Any:
    return tuple(_local_copy_p.bind(*operands, copy=copy))


_partitioned.def_partition(partition=_partition, sharding_rule=_sharding_rule)

mlir.register_lowering(
    block_copy_p,
    mlir.lower_fun(
        lambda *operands, copy: _partitioned(copy, *operands), multiple_results=True
    ),
)


# ---- batching ------------------------------------------------------------------------
#
# A batch is one more axis of both sides. Where ids are looked up it is more items
# instead: each member gets its own range of ids in a pool that holds the members one
# after the other.

_ID_LIMIT = 2**31  # ids are int32


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, copy: Copy
) -> tuple[list[Any], list[int]]:
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    if not copy.scalars:
        return _batch_axis(operands, dims, copy, size)
    starts = [s for s in (copy.src, copy.dst) if s.start]
    if starts and any(d is not None for d in dims[len(dims) - len(starts) :]):
        # A start that differs from member to member.
        return _batch_one_by_one(operands, dims, copy)

    num_src, num_dst = copy.num_operands
    # An unbatched pool that is only read can serve every member as it is.
    shared = bool(copy.src.index) and all(d is None for d in dims[:num_src])
    src = copy.src if shared else _batch_side(copy.src, size)
    dst = _batch_side(copy.dst, size)
    if max(src.id_limit, dst.id_limit) >= _ID_LIMIT:
        return _batch_one_by_one(operands, dims, copy)
    sides = [src] * num_src + [dst] * num_dst
    arrays = [
        x
        if shared and i < num_src
        else _batch_at(x, d, size, _grown_dim(side)).reshape(side.array_shape)
        for i, (x, d, side) in enumerate(zip(operands, dims, sides, strict=False))
    ]
    rest = list(zip(operands, dims, strict=True))[len(sides) :]
    scalars = []
    for side, whole in ((copy.src, shared), (copy.dst, False)):
        if side.index:
            ids = _batch_at(*rest.pop(0), size, 0)
            scalars.append(_batch_ids(ids, 0 if whole else side.id_limit))
    scalars += [start for start, _ in rest]
    items = dict(copy.extents)["N"] * size
    batched = dataclasses.replace(copy.resized(N=items), src=src, dst=dst)
    results = block_copy_p.bind(*arrays, *scalars, copy=batched)
    dim, shape = _grown_dim(dst), copy.dst.array_shape
    split = [r.reshape(*shape[:dim], size, *shape[dim:]) for r in results]
    return split, [dim] * len(results)


def _batch_axis(
    operands: Sequence[Any], dims: Sequence[Any], copy: Copy, size: int
) -> tuple[list[Any], list[int]]:
    """A batch of a copy without ids, along an axis of its own."""
    axis = f"V{len(copy.extents)}"
    batched = dataclasses.replace(
        copy,
        extents=((axis, size), *copy.extents),
        src=copy.src.with_leading(axis, size),
        dst=copy.dst.with_leading(axis, size),
    )
    front = [_batch_at(x, d, size, 0) for x, d in zip(operands, dims, strict=True)]
    results = block_copy_p.bind(*front, copy=batched)
    return results, [0] * len(results)


def _batch_one_by_one(
    operands: Sequence[Any], dims: Sequence[Any], copy: Copy
) -> tuple[list[Any], list[int]]:
    bind = functools.partial(block_copy_p.bind, copy=copy)
    return batch_one_by_one(bind, operands, dims)


def _batch_at(x: Any, dim: int | None, size: int, to: int) -> Any:
    """The operand with the batch at dimension `to`; one that has none, repeated."""
    if dim is None:
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    return jnp.moveaxis(x, dim, to)


def _grown_axis(side: Side) -> str:
    """The axis that a batch makes longer."""
    return side.index[0] if side.index else "N"


def _grown_dim(side: Side) -> int:
    firsts = [group[0] for group in side.form.array]
    return firsts.index(_grown_axis(side))


def _batch_side(side: Side, size: int) -> Side:
    axis = _grown_axis(side)
    return side.resized(**{axis: dict(side.sizes)[axis] * size})


@functools.partial(jax.jit, static_argnums=1)  # no constants for a transfer guard
def _batch_ids(ids: Any, limit: int) -> Any:
    """Moves member i's ids into its range of the grown pool; bad ids stay bad."""
    if not limit:
        return ids.reshape(-1)
    member = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    inside = (ids >= 0) & (ids < limit)
    return jnp.where(inside, ids + member * limit, -1).reshape(-1)


batching.primitive_batchers[block_copy_p] = _batch


# ---- differentiation -----------------------------------------------------------------
#
# The copy is linear in its sources and destinations together.


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, copy: Copy
) -> tuple[Any, Any]:
    results = block_copy_p.bind(*primals, copy=copy)
    arrays = sum(copy.num_operands)
    if all(type(t) is ad.Zero for t in tangents[:arrays]):
        return results, [_zero_tangent(r) for r in results]
    dense = [ad.instantiate_zeros(t) for t in tangents[:arrays]]
    return results, block_copy_p.bind(*dense, *primals[arrays:], copy=copy)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, manual_axis_type=aval.mat
    )


def _zero_tangent(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _transpose(cts: Sequence[Any], *operands: Any, copy: Copy) -> list[Any]:
    num_src, num_dst = copy.num_operands
    arrays = num_src + num_dst
    scalars = operands[arrays:]
    none = [None] * len(scalars)
    if all(type(ct) is ad.Zero for ct in cts):
        return [
            ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands
        ]
    cts = [ad.instantiate_zeros(ct) for ct in cts]
    if copy.covers_source and not copy.in_place:
        back = Copy(copy.extents, copy.dst, copy.src, False, copy.implementation)
        return [*block_copy_p.bind(*cts, copy=back), *none]
    # Gathers may read a block twice, so their transpose adds: the reference knows how.
    inputs = [
        _struct(x.aval if ad.is_undefined_primal(x) else jax.typeof(x))
        for x in operands[:arrays]
    ]

    def linear(*parts: Any) -> list[Any]:
        return reference_copy(copy, *parts, *scalars)

    wanted = jax.linear_transpose(linear, *inputs)(list(cts))
    return [
        ct if ad.is_undefined_primal(x) else None
        for ct, x in zip(wanted, operands[:arrays], strict=True)
    ] + none


ad.primitive_jvps[block_copy_p] = _jvp
ad.primitive_transposes[block_copy_p] = _transpose
