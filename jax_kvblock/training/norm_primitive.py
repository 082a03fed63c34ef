"""The primitive of norms in 8 bits by the kernel: how it transforms, how it is cut.

As in `primitive.py`. A row lies whole on every device that has it: where arrays are cut
along rows' numbers they are gathered, and on explicit meshes refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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

from jax_kvblock.core.batching import batch_one_by_one
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, no_mesh, vary_alike
from jax_kvblock.training import cuda
from jax_kvblock.training.cast import Narrow
from jax_kvblock.training.config import FP8Format
from jax_kvblock.training.primitive import ORDERS, Static

WHERE = "fp8_norm_dot"


def norm_narrow(
    x: jax.Array,
    residual: jax.Array | None,
    gamma: jax.Array,
    scale: jax.Array,
    form: FP8Format,
    eps: float,
    orders: Sequence[str] = ORDERS,
) -> tuple[tuple[Narrow, jax.Array], jax.Array, jax.Array]:
    """`norm.norm` and `cast.narrow` in these orders, by the kernel.

    All axes but the last are those of rows.

    Returns:
      The normed rows in 8 bits beside the largest size in them, what is normed, and 1 /
      rms of each row.
    """
    if gamma.dtype not in (x.dtype, jnp.float32):
        gamma = gamma.astype(jnp.float32)
    static = NormStatic(form, x.ndim - 1, tuple(orders), True, eps)
    operands = [x, gamma, scale] + [residual] * (residual is not None)
    made = norm_narrow_p.bind(*vary_alike(operands), static=static)
    found = dict(zip((*static.orders, "size", "inverse", "sum"), made, strict=False))
    narrow = Narrow(found.get("codes"), found.get("transposed"), scale)
    return (narrow, found["size"]), found.get("sum", x), found["inverse"]


@dataclasses.dataclass(frozen=True)
class NormStatic(Static):
    """What is compiled in."""

    eps: float

    def results(self, rows: Sequence[Any], last: Any, residual: bool) -> list[Any]:
        """What there is for each axis, as each of the results has it."""
        axes = (*rows, last)
        made = [self.turned(order, axes) for order in self.orders]
        return [*made, (), tuple(rows), *[axes] * residual]


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(x: Any, gamma: Any, *others: Any, static: NormStatic) -> list[Any]:
    *rows, last = (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]
    for name, cut in (("x", last), ("gamma", (*gamma.sharding.spec, None)[0])):
        if cut is not None:
            raise ValueError(
                f"{WHERE}: implementation='cuda' norms rows that lie whole on each "
                f"device, got {name} with its last axis cut over {cut!r}; use "
                "implementation='xla' or None, or jax.sharding.reshard"
            )
    residual = len(others) > 1
    shapes = static.results(x.shape[:-1], x.shape[-1], residual)
    specs = static.results(rows, None, residual)
    codes = [static.form.dtype] * len(static.orders)
    dtypes = [*codes, jnp.float32, jnp.float32, *[x.dtype] * residual]

    def like(shape: Sequence[int], dtype: Any, cut: Sequence[Any]) -> Any:
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*cut))
        dtype = jnp.dtype(dtype)
        return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    return list(map(like, shapes, dtypes, specs))


norm_narrow_p, _local_norm_narrow_p = make_primitives(
    "kvblock_norm_cast", _abstract_eval
)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, static: NormStatic, platform: str | None) -> Any:
    x = ctx.avals_in[0]
    matrix = math.prod(x.shape[:-1]), x.shape[-1]
    if refusal := cuda.norm_refusal(matrix, x.dtype, platform):
        raise ValueError(f"{WHERE}: implementation='cuda' {refusal}")

    def run(
        x: jax.Array, gamma: jax.Array, scale: jax.Array, *residual: jax.Array
    ) -> list[jax.Array]:
        made = cuda.norm_narrow(
            x.reshape(matrix), gamma, scale, *(r.reshape(matrix) for r in residual),
            form=static.form, orders=static.orders, eps=static.eps,
        )  # fmt: skip
        shapes = static.results(x.shape[:-1], x.shape[-1], bool(residual))
        return [a.reshape(shape) for a, shape in zip(made, shapes, strict=True)]

    return lower_local(ctx, run, *operands)


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_norm_narrow_p,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )


@functools.partial(custom_partitioning, static_argnums=(0,))
def _run(static: NormStatic, *operands: Any) -> Any:
    return tuple(_local_norm_narrow_p.bind(*operands, static=static))


def _partition(static: NormStatic, mesh: Any, operands: Any, results: Any) -> Any:
    """Each device has some of the rows; the largest of all is every device's."""
    ndim = len(operands[0].shape)
    rows = (*operands[0].sharding.spec, *[None] * ndim)[: ndim - 1]
    axes = tuple(
        axis
        for part in rows
        for axis in (part if isinstance(part, tuple) else (part,))
        if axis is not None
    )

    def run(*operands: Any) -> Any:
        with no_mesh():  # on an explicit one, jax 0.12 shards the maximum of numbers
            made = list(_local_norm_narrow_p.bind(*operands, static=static))
            at = len(static.orders)
            made[at] = jax.lax.pmax(made[at], axes) if axes else made[at]
            return tuple(made)

    def place(cut: Sequence[Any] = ()) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*cut))

    residual = len(operands) > 3
    made = tuple(map(place, static.results(rows, None, residual)))
    matrix = place((*rows, None))
    return mesh, run, made, (matrix, place(), place(), *[matrix] * residual)


def _sharding_rule(static: NormStatic, mesh: Any, operands: Any, results: Any) -> Any:
    rows = [f"d{i}" for i in range(len(operands[0].shape) - 1)]
    residual = len(operands) > 3
    array = ArrayMapping(*rows, "c")
    made = [ArrayMapping(*axes) for axes in static.results(rows, "c", residual)]
    return SdyShardingRule(
        (array, ArrayMapping("c"), ArrayMapping(), *[array] * residual),
        tuple(made),
        need_replication_factors=("c",),
    )


_run.def_partition(partition=_partition, sharding_rule=_sharding_rule)
mlir.register_lowering(
    norm_narrow_p,
    mlir.lower_fun(
        lambda *operands, static: _run(static, *operands), multiple_results=True
    ),
)


# ---- batching ------------------------------------------------------------------------


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, static: NormStatic) -> Any:
    bind = functools.partial(norm_narrow_p.bind, static=static)
    return batch_one_by_one(bind, operands, dims)


batching.primitive_batchers[norm_narrow_p] = _batch
