"""The primitive of casts to 8 bits by the kernel: how it transforms, how it is cut.

Two primitives share it, as everywhere here: the outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, no_mesh, vary_alike
from jax_kvblock.training import cuda
from jax_kvblock.training.cast import Narrow
from jax_kvblock.training.config import FP8Format


def narrow(x: jax.Array, scale: jax.Array, form: FP8Format) -> tuple[Narrow, jax.Array]:
    """`cast.narrow` of a matrix by the kernel, in both orders."""
    codes, transposed, size = narrow_p.bind(*vary_alike([x, scale]), form=form)
    return Narrow(codes, transposed, scale), size


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(x: Any, scale: Any, *, form: FP8Format) -> list[Any]:
    rows, columns = x.shape
    spec = (*x.sharding.spec, None, None)[:2]

    def like(shape: Sequence[int], dtype: Any, *cut: Any) -> Any:
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*cut))
        return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    return [
        like((rows, columns), form.dtype, *spec),
        like((columns, rows), form.dtype, *reversed(spec)),
        like((), jnp.dtype(jnp.float32)),
    ]


narrow_p, _local_narrow_p = make_primitives("kvblock_cast", _abstract_eval)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, form: FP8Format, platform: str | None) -> Any:
    x, _ = ctx.avals_in
    cuda.check("fp8_dot", x, platform)
    return lower_local(ctx, functools.partial(cuda.narrow, form=form), *operands)


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_narrow_p,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )


@functools.partial(custom_partitioning, static_argnums=(0,))
def _run(form: FP8Format, x: Any, scale: Any) -> Any:
    return tuple(_local_narrow_p.bind(x, scale, form=form))


def _partition(form: FP8Format, mesh: Any, operands: Any, results: Any) -> Any:
    """Each device has a part of the matrix; the largest of all is every device's."""
    rows, columns = (*operands[0].sharding.spec, None, None)[:2]
    axes = [
        axis
        for part in (rows, columns)
        for axis in (part if isinstance(part, tuple) else (part,))
        if axis is not None
    ]

    def run(x: Any, scale: Any) -> Any:
        with (
            no_mesh()
        ):  # on an explicit one, jax 0.12 shards the maximum of two numbers
            codes, transposed, size = _local_narrow_p.bind(x, scale, form=form)
            return codes, transposed, jax.lax.pmax(size, tuple(axes)) if axes else size

    def place(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    made = place(rows, columns), place(columns, rows), place()
    return mesh, run, made, (place(rows, columns), place())


_run.def_partition(
    partition=_partition,
    sharding_rule=SdyShardingRule(
        (ArrayMapping("r", "c"), ArrayMapping()),
        (ArrayMapping("r", "c"), ArrayMapping("c", "r"), ArrayMapping()),
    ),
)
mlir.register_lowering(
    narrow_p,
    mlir.lower_fun(lambda x, scale, form: _run(form, x, scale), multiple_results=True),
)


# ---- batching ------------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, form: FP8Format
) -> tuple[list[Any], list[Any]]:
    """One member after the other."""
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    x, scale = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(operands, dims, strict=True)
    )
    results = jax.lax.map(lambda pair: narrow_p.bind(*pair, form=form), (x, scale))
    return results, [0] * 3


batching.primitive_batchers[narrow_p] = _batch
