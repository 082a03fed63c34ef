"""The quantization primitive: what comes out, how it transforms, who computes it.

Two primitives share it, as everywhere here: the outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs, and
lowers to the CUDA kernels or to plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, vary_alike
from jax_kvblock.fp8 import cuda, plain
from jax_kvblock.fp8.call import Quantize, Way, shapes_of
from jax_kvblock.fp8.partition import (
    array_spec,
    partitioned,
    result_factors,
    shards_of,
)


def quantize(call: Quantize, operands: Sequence[Any]) -> list[list[Any]]:
    """The results of each array: codes, scales and, where it is centred, its mean."""
    results = quantize_p.bind(*vary_alike(operands), call=call)
    return list(call.split(results))


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(*avals: Any, call: Quantize) -> list[Any]:
    shards = shards_of(call, avals)
    every = iter(result_factors(call, avals))
    results = []
    for way, x in zip(call.ways, call.arrays(avals), strict=True):
        for i, shape in enumerate(shapes_of(way, x.shape)):
            spec = array_spec(next(every), shards)
            results.append(
                x.update(
                    shape=shape,
                    dtype=jnp.dtype(jnp.float32 if i else way.dtype),
                    weak_type=False,
                    sharding=NamedSharding(x.sharding.mesh, spec),
                )
            )
    return results


quantize_p, _local_quantize_p = make_primitives("kvblock_quantize", _abstract_eval)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, call: Quantize, platform: str | None) -> Any:
    arrays = call.arrays(ctx.avals_in)
    chosen = cuda.choose(call.implementation, call.name, arrays, platform)
    nothing = any(not x.size for x in arrays)
    run = cuda.quantize if chosen == "cuda" and not nothing else plain.quantize
    return lower_local(ctx, functools.partial(run, call), *operands)


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_quantize_p,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )

_partitioned = partitioned(_local_quantize_p)
mlir.register_lowering(
    quantize_p,
    mlir.lower_fun(
        lambda *operands, call: _partitioned(call, *operands), multiple_results=True
    ),
)


# ---- batching ------------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, call: Quantize
) -> tuple[list[Any], list[Any]]:
    """Folded into the batch. Arrays that no axis runs over are quantized once."""
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    lens, lens_dims = call.lengths(operands), call.lengths(dims)
    mapped = [
        d is not None or of_lens is not None
        for d, of_lens in zip(call.arrays(dims), lens_dims, strict=True)
    ]
    made: dict[int, list[Any]] = {}
    for folds in dict.fromkeys(mapped):
        chosen = [i for i, m in enumerate(mapped) if m == folds]
        arrays = [(operands[i], dims[i]) for i in chosen]
        lengths: list[tuple[Any, Any]] = []
        ways: list[Way] = []
        for i in chosen:
            way = call.ways[i]
            if way.lengths is not None:
                way = dataclasses.replace(way, lengths=len(lengths))
                lengths.append((lens[i], lens_dims[i]))
            ways.append(way)
        part = dataclasses.replace(call, ways=tuple(ways))
        given = [_fold(x, d, size) if folds else x for x, d in (*arrays, *lengths)]
        results = quantize_p.bind(*given, call=part)
        if folds:
            results = [x.reshape(size, -1, *x.shape[1:]) for x in results]
        made |= dict(zip(chosen, part.split(results), strict=True))
    every = [x for i in sorted(made) for x in made[i]]
    axes = [
        0 if folds else None
        for folds, way in zip(mapped, call.ways, strict=True)
        for _ in range(way.num_results)
    ]
    return every, axes


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """Members in front of the batch, and one axis of both."""
    if dim is None:
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    else:
        x = jnp.moveaxis(x, dim, 0)
    return x.reshape(-1, *x.shape[2:])


batching.primitive_batchers[quantize_p] = _batch


# ---- derivatives ---------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Quantize) -> Any:
    """Those of plain JAX, which computes all of it then."""
    count = len(call.ways)
    if all(type(t) is ad.Zero for t in tangents[:count]):
        results = quantize_p.bind(*primals, call=call)
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    if call.implementation == "cuda":
        raise NotImplementedError(
            f"{call.name}: implementation='cuda' has no derivative; 'xla' has those of "
            "its operations, and fp8_attention has gradients of its own"
        )
    return jax.jvp(
        lambda *arrays: plain.quantize(call, *arrays, *primals[count:]),
        list(primals[:count]),
        [ad.instantiate_zeros(t) for t in tangents[:count]],
    )


ad.primitive_jvps[quantize_p] = _jvp
