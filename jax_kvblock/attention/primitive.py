"""The attention primitives: what comes out, how they transform, who computes them.

Each operation (`ops.py`) is a pair of primitives. The outer one carries the
transformation rules and lowers to a partitioned call; the inner one is what each device
runs, and lowers to the FFI handler of its platform or to plain JAX in blocks. Every
rule reads the letters of the operands' axes: batching (`batching.py`) folds into B,
partitioning (`partition.py`) cuts B and the heads. How they are differentiated is in
`derivatives.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jax_kvblock.attention import (
    block_problem,
    blocked,
    cuda,
    dispatch,
    eight_bits,
    few_queries,
    joining,
)
from jax_kvblock.attention import tangent as directions
from jax_kvblock.attention.batching import batch
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    accumulator,
    result_dtype,
    sizes_of,
)
from jax_kvblock.attention.ops import (
    BACKWARD,
    BACKWARD_ADDED,
    BACKWARD_BIAS,
    BY_KERNELS,
    FORWARD,
    HESSIAN,
    JOINED,
    OUTPUT,
    SECOND_TANGENT,
    TANGENT,
    Call,
    LogSumExp,
    Op,
    letters,
)
from jax_kvblock.attention.partition import array_spec, axis_shards, partitioned
from jax_kvblock.core.checks import check_static
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, vary_alike

Along = Mapping[str, jax.Array]  # how operands move, by their names


def forward(config: AttentionConfig, x: Operands) -> tuple[jax.Array, LogSumExp]:
    """o `[B, T, N, Dv]`, lse float32 `[B, N, T]`; packed `[T, N, Dv]`, `[N, T]`."""
    call, arrays = Call.pack(config, x)
    o, *lse = bind(FORWARD, arrays, call)
    return o, LogSumExp(*lse)


def output(config: AttentionConfig, x: Operands) -> jax.Array:
    """o alone; lse takes no memory then."""
    call, arrays = Call.pack(config, x)
    return bind(OUTPUT, arrays, call)[0]


def joined(
    config: AttentionConfig, x: Operands, o: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o and lse of these keys and of others together, from o and lse of the others.

    In the shapes and dtypes of `forward`, lse as one number. Where a kernel does it,
    the results take the operands' memory. Rows that see none of these keys keep both.
    """
    call, arrays = Call.pack(config, x)
    o, lse = bind(JOINED, [*arrays, o, lse], call)
    return o, lse


def backward(
    config: AttentionConfig,
    x: Operands,
    lse: LogSumExp,
    delta: jax.Array,
    d_o: jax.Array,
    dq: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv; `delta` is rowsum(d_o * o) - d_lse, shaped like lse.

    dq: what is added to dq, in its shape and dtype. Where a kernel does it, the result
    takes this memory.
    """
    call, arrays = Call.pack(config, x)
    operands = [*arrays, *lse.parts, delta, d_o]
    if dq is None:
        dq, dk, dv = bind(BACKWARD, operands, call)
    else:
        dq, dk, dv = bind(BACKWARD_ADDED, [*operands, dq], call)
    return dq, dk, dv


def backward_bias(
    config: AttentionConfig,
    x: Operands,
    lse: LogSumExp,
    delta: jax.Array,
    d_o: jax.Array,
) -> jax.Array:
    """The bias's gradient in its shape and dtype. Unused, it is never computed."""
    call, arrays = Call.pack(config, x)
    return bind(BACKWARD_BIAS, [*arrays, *lse.parts, delta, d_o], call)[0]


def tangent(
    config: AttentionConfig, x: Operands, o: jax.Array, lse: LogSumExp, along: Along
) -> tuple[jax.Array, jax.Array]:
    """What o and lse change by as operands move; along: q, k, v, bias, sinks."""
    call, arrays = Call.pack(config, x)
    call, moves = _with_directions(call, along, "'")
    o_moves, lse_moves = bind(TANGENT, [*arrays, *lse.parts, o, *moves], call)
    return o_moves, lse_moves


def second_tangent(
    config: AttentionConfig, x: Operands, lse: LogSumExp, first: Along, second: Along
) -> tuple[jax.Array, jax.Array]:
    """What the sums of `tangent` change by as q, k, v, bias and lse move by `second`.

    These are rowsum(p s' v + p v') and rowsum(p s'), p = exp(s - lse), s' the change of
    the scores along `first`: q, k, v, bias.
    """
    call, arrays = Call.pack(config, x)
    call, moves = _with_directions(call, first, "'")
    call, more = _with_directions(call, second, "''")
    operands = [*arrays, *lse.parts, *moves, *more]
    o_moves, lse_moves = bind(SECOND_TANGENT, operands, call)
    return o_moves, lse_moves


def hessian(
    config: AttentionConfig,
    x: Operands,
    lse: LogSumExp,
    delta: jax.Array,
    d_o: jax.Array,
    along: Along,
    wanted: Sequence[str],
) -> dict[str, jax.Array]:
    """A product with the Hessian whose gradient `backward` is (see `tangent.py`).

    along, and of it `wanted`: q, k, v, bias, lse, delta, and o for d_o.
    """
    call, arrays = Call.pack(config, x)
    call, moves = _with_directions(call, along, "'")
    call = dataclasses.replace(call, wanted=tuple(wanted))
    made = bind(HESSIAN, [*arrays, *lse.parts, delta, d_o, *moves], call)
    return dict(zip(wanted, made, strict=True))


def _with_directions(
    call: Call, along: Along, primes: str
) -> tuple[Call, list[jax.Array]]:
    names = tuple(name + primes for name in along)
    return dataclasses.replace(call, along=call.along + names), list(along.values())


# ---- evaluation ----------------------------------------------------------------------


def _result_structs(op: Op, call: Call, avals: Sequence[Any]) -> list[tuple]:
    """(shape, dtype) of the results."""
    x = call.unpack(avals[: len(call.present)])
    size = sizes_of(call.config, x)
    lse = jnp.float64 if x.q.dtype == jnp.float64 else jnp.float32
    if call.config.packed:
        lead: tuple[int, ...] = ()
    else:
        lead = (size.batch,)
    o = (*lead, size.q_len, size.num_heads, size.value_dim)
    rows = (*lead, size.num_heads, size.q_len)
    shapes: dict[str, tuple] = {
        "o": (o, result_dtype(x)),
        "lse": (rows, lse),
        "base": (rows, lse),
        "delta": (rows, lse),
        "q": (x.q.shape, x.q.dtype),
        "k": (x.k.shape, x.k.dtype),
        "v": (x.v.shape, x.v.dtype),
    }
    if x.bias is not None:
        shapes["bias"] = (x.bias.shape, x.bias.dtype)
    return [shapes[name] for name in op.result_names(call)]


def _abstract_eval(
    *avals: Any, op: Op, call: Call, sums: tuple[tuple[str, ...], ...] = ()
) -> list[Any]:
    shards = axis_shards(op, call, avals)
    mesh = avals[0].sharding.mesh
    results = []
    for name, (shape, dtype) in zip(
        op.result_names(call), _result_structs(op, call, avals), strict=True
    ):
        spec = array_spec(letters(name, call.config.packed), shape, shards)
        results.append(
            avals[0].update(
                shape=shape,
                dtype=np.dtype(dtype),
                weak_type=False,
                sharding=NamedSharding(mesh, spec),
            )
        )
    return results


_OUTER: dict[Op, core.Primitive] = {}
_LOCAL: dict[Op, core.Primitive] = {}
for _op in (*BY_KERNELS, TANGENT, SECOND_TANGENT, HESSIAN):
    _OUTER[_op], _LOCAL[_op] = make_primitives(
        f"kvblock_attention_{_op.name}", functools.partial(_abstract_eval, op=_op)
    )


def bind(op: Op, arrays: Sequence[Any], call: Call) -> list[Any]:
    return _OUTER[op].bind(*vary_alike(arrays), call=call)


def set_derivatives(
    op: Op, jvp: Callable[..., Any], transpose: Callable[..., Any]
) -> None:
    ad.primitive_jvps[_OUTER[op]] = jvp
    ad.primitive_transposes[_OUTER[op]] = transpose


# ---- lowering: one device ------------------------------------------------------------


def _blocked(op: Op, call: Call, platform: str | None, *arrays: Any) -> tuple:
    """The operation in plain JAX. A CPU has no fast 16-bit products."""
    x = call.unpack(arrays[: len(call.present)])
    out = result_dtype(x)
    if x.q_scales is not None:
        x = eight_bits.widened(x)
    narrow = x.q.dtype.itemsize == 2
    compute = jnp.float32 if platform == "cpu" and narrow else None
    if op not in BY_KERNELS:
        return directions.run(op, call, compute, platform, *arrays)
    extra = [*arrays[len(call.present) :]]
    if op.is_forward:
        if block_problem.has_few_queries(call.config, x, platform):
            o, lse = few_queries.forward(call.config, x, compute)
        else:
            o, lse = blocked.forward(call.config, x, compute, platform)
        if op is JOINED:
            before_o, before_lse = extra
            return joining.join(before_o, before_lse, o.astype(out), lse.value)
        o = o.astype(out)
        return (o, *lse.parts) if op is FORWARD else (o,)
    dq = extra.pop() if op is BACKWARD_ADDED else None
    *parts, delta, d_o = extra
    lse, with_bias = LogSumExp(*parts), op is BACKWARD_BIAS
    grads = blocked.backward(
        call.config, x, lse, delta, d_o, with_bias, compute, platform, dq
    )
    if with_bias:
        return (grads.dbias.astype(x.bias.dtype),)
    return grads.dq, grads.dk, grads.dv


def _lower(
    ctx: Any,
    *operands: Any,
    op: Op,
    call: Call,
    platform: str | None,
    sums: tuple[tuple[str, ...], ...] = (),
) -> Any:
    """`sums`: for each result, the mesh axes over which it is added up."""
    x = call.unpack(ctx.avals_in[: len(call.present)])
    choice = "xla"
    if op in BY_KERNELS:
        config, backward = call.config, not op.is_forward
        choice = dispatch.choose(
            config, x, platform, backward=backward, where=config.where
        )
    if choice != "xla":
        check_static(call.config.where, "q", x.q)
    empty = 0 in (*x.q.shape, *x.k.shape)  # nothing to launch a kernel for
    if choice != "xla" and not empty:
        local = functools.partial(cuda.run, op, call, choice)
    else:
        local = functools.partial(_blocked, op, call, platform)

    def function(*arrays: Any) -> Any:
        made = local(*arrays)
        return [
            _sum_over(a, axes)
            for a, axes in itertools.zip_longest(made, sums, fillvalue=())
        ]

    return lower_local(ctx, function, *operands)


def _sum_over(a: Any, axes: tuple[str, ...]) -> Any:
    if not axes:
        return a
    wide = a.astype(accumulator(a.dtype))
    return jax.lax.psum(wide, axes).astype(a.dtype)


for _op, _primitive in _LOCAL.items():
    for _platform in (None, "cpu", "cuda"):
        mlir.register_lowering(
            _primitive,
            functools.partial(_lower, op=_op, platform=_platform),
            platform=_platform,
        )


# ---- lowering: partitioned over a mesh -----------------------------------------------

for _op, _primitive in _OUTER.items():
    _run = partitioned(_op, _LOCAL[_op])
    mlir.register_lowering(
        _primitive,
        mlir.lower_fun(
            functools.partial(lambda run, *arrays, call: run(call, *arrays), _run),
            multiple_results=True,
        ),
    )


# ---- batching ------------------------------------------------------------------------

for _op, _primitive in _OUTER.items():
    batching.primitive_batchers[_primitive] = functools.partial(batch, _primitive, _op)
