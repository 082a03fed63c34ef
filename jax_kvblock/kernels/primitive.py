"""The primitive of kernel calls: what comes out, how it transforms, who computes it.

Two primitives share it, as everywhere here: the outer one carries the transformation
rules and lowers to a partitioned call where there is a sharding rule; the inner one is
what each device runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, vary_alike
from jax_kvblock.kernels import cuda
from jax_kvblock.kernels.call import SEQUENTIAL, WHERE, Call, Shape

COUNT = Shape((), np.dtype(np.uint32))


def bind(call: Call, *operands: Any) -> list[Any]:
    """The results of a call, each that is appended to with its counter behind it."""
    return list(kernel_call_p.bind(*vary_alike(operands), call=call))


def _shapes(call: Call, avals: Sequence[Any]) -> list[Shape]:
    launch = call.launch(avals)
    shapes = []
    for number, shape in enumerate(launch.results):
        shapes.append(shape)
        if number in call.append:
            shapes.append(COUNT)
    if call.members is None:
        return shapes
    return [Shape((call.members, *s.shape), s.dtype) for s in shapes]


def _abstract_eval(*avals: Any, call: Call) -> list[Any]:
    shapes = _shapes(call, avals)
    if not avals:
        return [jax.core.ShapedArray(s.shape, s.dtype) for s in shapes]
    like = avals[0]  # inside shard_map it varies as all do
    specs = _result_specs(call, avals, shapes)
    return [
        like.update(
            shape=s.shape,
            dtype=s.dtype,
            weak_type=False,
            sharding=spec and NamedSharding(like.sharding.mesh, spec),
        )
        for s, spec in zip(shapes, specs, strict=True)
    ]


def _result_specs(
    call: Call, avals: Sequence[Any], shapes: Sequence[Shape]
) -> list[PartitionSpec | None]:
    """How results lie on a mesh whose types say so; `None` where that comes later.

    As the rule has it, a word being cut as the first operand that has it is.
    """
    mesh = avals[0].sharding.mesh
    if all(axis == AxisType.Auto for axis in mesh.axis_types):
        return [None] * len(shapes)
    if call.sharding is None:
        return [PartitionSpec(*[None] * len(s.shape)) for s in shapes]
    left, right = sharding_rule(call).split("->")
    cut: dict[str, Any] = {}
    for words, aval in zip(left.split(","), avals, strict=True):
        for word, part in zip(words.split(), aval.sharding.spec, strict=False):
            if part is not None:
                cut.setdefault(word, part)
    return [
        PartitionSpec(*(cut.get(word) for word in words.split()))
        for words in right.split(",")
    ]


kernel_call_p, _local_p = make_primitives("kvblock_kernel_call", _abstract_eval)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, call: Call, platform: str | None) -> Any:
    if cuda.runs_on(platform):
        return cuda.lower(ctx, call, *operands)
    if call.fallback is not None:
        return lower_local(ctx, functools.partial(_fall_back, call), *operands)
    raise NotImplementedError(
        f"{WHERE}: {call.kernel} needs an NVIDIA GPU, and this is lowered for "
        f"{platform or 'another platform'}; pass fallback=, a function of the same "
        "arrays and scalars, for it"
    )


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_p, functools.partial(_lower, platform=_platform), platform=_platform
    )


def _fall_back(call: Call, *operands: Any) -> list[Any]:
    def member(*given: Any) -> list[Any]:
        return _fall_back_of_one(call, *given)

    if call.members is None:
        return member(*operands)
    axes = tuple(0 if b else None for b in call.batched)
    return list(jax.vmap(member, in_axes=axes)(*operands))


def _fall_back_of_one(call: Call, *operands: Any) -> list[Any]:
    assert call.fallback is not None
    if call.after:  # XLA keeps what comes out of a barrier behind what goes in
        operands = jax.lax.optimization_barrier(operands)
    arrays, hot = operands[: call.arrays], iter(operands[call.arrays :])
    one = dataclasses.replace(call, members=None, batched=())
    launch = one.launch([jax.typeof(x) for x in operands])
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    scalars = [next(hot) if x is None else x.value for x in call.values(structs)]
    given = call.fallback(*arrays, *scalars)
    several = isinstance(given, (tuple, list)) and not hasattr(given, "_fields")
    if len(launch.results) == 1 and (call.append or not several):
        made = [given]
    else:
        made = list(given)
    if len(made) != len(launch.results):
        raise ValueError(
            f"{WHERE}: the fallback of {call.kernel} must return "
            f"{len(launch.results)} results, as out has, got {len(made)}"
        )
    flat: list[Any] = []
    for number, (x, shape) in enumerate(zip(made, launch.results, strict=True)):
        count = None
        if number in call.append:
            if not isinstance(x, tuple) or len(x) < 2:
                raise ValueError(
                    f"{WHERE}: the fallback of {call.kernel} must return (data, count) "
                    f"for result {number}, which is appended to"
                )
            x, count = x[0], x[1]
        x = jnp.asarray(x)
        if x.shape != shape.shape or x.dtype != shape.dtype:
            raise ValueError(
                f"{WHERE}: result {number} of the fallback of {call.kernel} must be "
                f"{shape.dtype}{list(shape.shape)}, got {x.dtype}{list(x.shape)}"
            )
        if count is None:
            flat.append(x)
        else:
            count = jnp.asarray(count).astype(COUNT.dtype).reshape(())
            flat += [_zeros_from(count, x), count]
    return flat


def _zeros_from(count: Any, data: Any) -> Any:
    """Memory that a kernel appends to is zeros before, so it is behind the last."""
    row = jax.lax.broadcasted_iota(COUNT.dtype, data.shape, 0)
    return jnp.where(row < count, data, jnp.zeros_like(data))


def _run(*operands: Any, call: Call) -> Any:
    if call.sharding is None:
        return tuple(_local_p.bind(*operands, call=call))
    return _partitioned(call)(*operands)


mlir.register_lowering(kernel_call_p, mlir.lower_fun(_run, multiple_results=True))


# ---- several devices -----------------------------------------------------------------


def _partitioned(call: Call) -> Any:
    """The call, each device computing its part."""

    @custom_partitioning
    def run(*operands: Any) -> Any:
        return tuple(_local_p.bind(*operands, call=call))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        def part(*parts: Any) -> Any:
            here = _part_of(call, results)
            return tuple(_local_p.bind(*parts, call=here))

        shardings = tuple(r.sharding for r in results)
        return mesh, part, shardings, tuple(o.sharding for o in operands)

    run.def_partition(partition=partition, sharding_rule=sharding_rule(call))
    return run


def _part_of(call: Call, results: Sequence[Any]) -> Call:
    """The call with the results that one device has, unless a function says them."""
    if callable(call.out):
        return call
    shapes, at = [], 0
    for number, shape in enumerate(call.out):
        local = results[at].sharding.shard_shape(results[at].shape)
        at += 2 if number in call.append else 1
        if call.members is not None:
            local = local[1:]
        shapes.append(Shape(tuple(local), shape.dtype))
    return dataclasses.replace(call, out=tuple(shapes))


def sharding_rule(call: Call) -> str:
    """The user's rule, with scalars, counters and the batch, which it leaves out."""
    assert call.sharding is not None
    left, right = (side.split(",") for side in call.sharding.split("->"))
    hot = 0 if callable(call.scalars) else sum(v is None for v in call.scalars)
    operands = [s.strip() for s in left] + [""] * hot
    operands += [
        " ".join(f"kvblock_after_{i}_{n}" for n in range(rank))
        for i, rank in enumerate(call.after)
    ]
    results: list[str] = []
    for number, s in enumerate(right):
        results.append(s.strip())
        if number in call.append:
            results.append("")
    if call.members is not None:
        has = call.batched or (False,) * len(operands)
        operands = [
            f"kvblock_member {s}".strip() if b else s
            for s, b in zip(operands, has, strict=True)
        ]
        results = [f"kvblock_member {s}".strip() for s in results]
    return f"{', '.join(operands)} -> {', '.join(results)}"


# ---- batching ------------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[int]]:
    if call.batch is None:
        raise NotImplementedError(
            f"{WHERE}: {call.kernel} has no rule for jax.vmap. Pass batch='sequential' "
            "for a launch for each member, or batch='z' (or 'x', 'y') if the kernel "
            "computes member blockIdx.z of arrays that lie one after the other"
        )
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    was = call.batched or (False,) * len(operands)
    inner = call.members
    everywhere = call.batch != SEQUENTIAL
    moved, batched = [], []
    for number, (x, d, b) in enumerate(zip(operands, dims, was, strict=True)):
        has = d is not None
        x = jnp.moveaxis(x, d, 0) if has else x
        # An axis of the grid knows no operand that members share.
        joined = everywhere and number < call.arrays
        if inner is not None and (has or b or joined):
            if not b:
                x = jnp.expand_dims(x, 1 if has else 0)
            if not has:
                x = x[None]
            x = jnp.broadcast_to(x, (size, inner, *x.shape[2:]))
            x = x.reshape(size * inner, *x.shape[2:])
        elif joined and not has:
            x = jnp.broadcast_to(x, (size, *x.shape))
        moved.append(x)
        batched.append(has or b or joined)
    members = size * (inner or 1)
    here = dataclasses.replace(call, members=members, batched=tuple(batched))
    results = kernel_call_p.bind(*moved, call=here)
    if inner is not None:
        results = [r.reshape(size, inner, *r.shape[1:]) for r in results]
    return list(results), [0] * len(results)


batching.primitive_batchers[kernel_call_p] = _batch


# ---- derivatives ---------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    if any(type(t) is not ad.Zero for t in tangents):
        raise NotImplementedError(
            f"{WHERE}: {call.kernel} has no derivative; pass vjp=, a function of "
            "(arrays, results, cotangents), or keep others from asking with "
            "jax.lax.stop_gradient on its arguments"
        )
    results = kernel_call_p.bind(*primals, call=call)
    return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]


ad.primitive_jvps[kernel_call_p] = _jvp
