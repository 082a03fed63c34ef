"""The append primitive: what comes out, how it transforms, who computes it.

Two primitives share it, as everywhere here: the outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs, and
lowers to the CUDA kernel or to plain JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jax_kvblock.append import cuda, plain
from jax_kvblock.append.call import Append
from jax_kvblock.append.partition import array_spec, partitioned, shards_of
from jax_kvblock.core.batching import batch_one_by_one
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import is_partitioned, lower_local, vary_alike


def append(arrays: Mapping[str, Any], **static: Any) -> dict[str, Any]:
    """Runs a call of these operands; its results by name, the pool's as a list."""
    call, flat = Append.pack(arrays, **static)
    results = append_p.bind(*vary_alike(flat), call=call)
    made: dict[str, Any] = {"pool": []}
    for name, x in zip(call.result_names, results, strict=True):
        if name == "pool":
            made["pool"].append(x)
        else:
            made[name] = x
    return made


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(*avals: Any, call: Append) -> list[Any]:
    shards = shards_of(call, avals)
    results = []
    for name, i in call.results:
        shape = call.queries(avals[i].shape) if name == "q" else avals[i].shape
        spec = array_spec(call, name, len(shape), shards)
        sharding = NamedSharding(avals[i].sharding.mesh, spec)
        made = avals[i].update(shape=shape, weak_type=False, sharding=sharding)
        results.append(made)
    return results


append_p, _local_append_p = make_primitives("kvblock_append", _abstract_eval)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, call: Append, platform: str | None) -> Any:
    x = call.unpack(ctx.avals_in)
    chosen = cuda.choose(call.implementation, call.name, x, platform)
    nothing = not x["slots"].size and not ("q" in x and x["q"].size)
    run = cuda.append if chosen == "cuda" and not nothing else plain.append
    return lower_local(ctx, functools.partial(run, call), *operands)


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_append_p,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )

_partitioned = partitioned(_local_append_p)


def _lower_outer(ctx: Any, *operands: Any, call: Append) -> Any:
    def run(*operands: Any) -> Any:
        here, arrays = call, operands
        if call.joined and is_partitioned(ctx):
            # A device's heads of q, of k and of v do not lie side by side.
            here, arrays = call.apart(operands)
        return _partitioned(here, *arrays)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(append_p, _lower_outer)


# ---- batching ------------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, call: Append
) -> tuple[list[Any], list[int]]:
    """Members differ in what they write, so each has its own pool, one by one."""
    return batch_one_by_one(functools.partial(append_p.bind, call=call), operands, dims)


batching.primitive_batchers[append_p] = _batch


# ---- no derivative -------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Append) -> Any:
    if any(type(t) is not ad.Zero for t in tangents):
        raise NotImplementedError(
            f"{call.name} has no derivative where it rotates, quantizes or clears; "
            "jax.lax.stop_gradient on its arguments keeps others from asking for it"
        )
    results = append_p.bind(*primals, call=call)
    zeros = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    return results, zeros


ad.primitive_jvps[append_p] = _jvp
