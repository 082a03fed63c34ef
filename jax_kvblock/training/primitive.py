"""The primitive of casts to 8 bits by the kernel: how it transforms, how it is cut.

Two primitives share it, as everywhere here: the outer one carries the transformation
rules and lowers to a partitioned call; the inner one is what each device runs.
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
from jax_kvblock.training import cast, cuda
from jax_kvblock.training.cast import Narrow
from jax_kvblock.training.config import FP8Format

ORDERS = ("codes", "transposed")


def narrow(
    x: jax.Array,
    scale: jax.Array,
    form: FP8Format,
    split: int = 1,
    orders: Sequence[str] = ORDERS,
    strict: bool = True,
) -> tuple[Narrow, jax.Array]:
    """`cast.narrow` in these orders, by the kernel.

    The first `split` axes are those of rows, the others those of columns. Where the
    kernel does not serve a device's part, that is an error if `strict`; else plain JAX
    makes it.
    """
    static = Static(form, split, tuple(orders), strict)
    *made, size = narrow_p.bind(*vary_alike([x, scale]), static=static)
    found = dict(zip(static.orders, made, strict=True))
    return Narrow(found.get("codes"), found.get("transposed"), scale), size


@dataclasses.dataclass(frozen=True)
class Static:
    """What is compiled in."""

    form: FP8Format
    split: int
    orders: tuple[str, ...]
    strict: bool

    def turned(self, order: str, axes: Sequence[Any]) -> tuple[Any, ...]:
        """What there is for each axis, as codes in this order have it."""
        if order == "codes":
            return tuple(axes)
        return (*axes[self.split :], *axes[: self.split])


# ---- evaluation ----------------------------------------------------------------------


def _abstract_eval(x: Any, scale: Any, *, static: Static) -> list[Any]:
    spec = (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]

    def like(shape: Sequence[int], dtype: Any, cut: Sequence[Any] = ()) -> Any:
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*cut))
        return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    made = [
        like(
            static.turned(order, x.shape), static.form.dtype, static.turned(order, spec)
        )
        for order in static.orders
    ]
    return [*made, like((), jnp.dtype(jnp.float32))]


narrow_p, _local_narrow_p = make_primitives("kvblock_cast", _abstract_eval)


# ---- lowering ------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, static: Static, platform: str | None) -> Any:
    x, _ = ctx.avals_in
    rows, columns = (
        math.prod(x.shape[: static.split]),
        math.prod(x.shape[static.split :]),
    )
    refusal = cuda.refusal((rows, columns), platform)
    if refusal and static.strict:
        raise ValueError(f"fp8_dot: implementation='cuda' {refusal}")

    def run(x: jax.Array, scale: jax.Array) -> list[jax.Array]:
        if refusal:
            return _plain(x, scale, static)
        matrix = x.reshape(rows, columns)
        *made, size = cuda.narrow(matrix, scale, static.form, static.orders)
        shapes = (static.turned(order, x.shape) for order in static.orders)
        return [*(a.reshape(s) for a, s in zip(made, shapes, strict=True)), size]

    return lower_local(ctx, run, *operands)


def _plain(x: jax.Array, scale: jax.Array, static: Static) -> list[jax.Array]:
    (codes, *_), size = cast.narrow(x, scale, static.form)
    assert codes is not None
    axes = range(x.ndim)
    return [*(codes.transpose(static.turned(o, axes)) for o in static.orders), size]


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local_narrow_p,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )


@functools.partial(custom_partitioning, static_argnums=(0,))
def _run(static: Static, x: Any, scale: Any) -> Any:
    return tuple(_local_narrow_p.bind(x, scale, static=static))


def _partition(static: Static, mesh: Any, operands: Any, results: Any) -> Any:
    """Each device has a part of the array; the largest of all is every device's."""
    ndim = len(operands[0].shape)
    spec = (*operands[0].sharding.spec, *[None] * ndim)[:ndim]
    axes = [
        axis
        for part in spec
        for axis in (part if isinstance(part, tuple) else (part,))
        if axis is not None
    ]

    def run(x: Any, scale: Any) -> Any:
        with (
            no_mesh()
        ):  # on an explicit one, jax 0.12 shards the maximum of two numbers
            *made, size = _local_narrow_p.bind(x, scale, static=static)
            return *made, jax.lax.pmax(size, tuple(axes)) if axes else size

    def place(cut: Sequence[Any] = ()) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*cut))

    made = (*(place(static.turned(order, spec)) for order in static.orders), place())
    return mesh, run, made, (place(spec), place())


def _sharding_rule(static: Static, mesh: Any, operands: Any, results: Any) -> Any:
    axes = [f"d{i}" for i in range(len(operands[0].shape))]
    made = (ArrayMapping(*static.turned(order, axes)) for order in static.orders)
    return SdyShardingRule(
        (ArrayMapping(*axes), ArrayMapping()), (*made, ArrayMapping())
    )


_run.def_partition(partition=_partition, sharding_rule=_sharding_rule)
mlir.register_lowering(
    narrow_p,
    mlir.lower_fun(
        lambda x, scale, static: _run(static, x, scale), multiple_results=True
    ),
)


# ---- batching ------------------------------------------------------------------------


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, static: Static) -> Any:
    bind = functools.partial(narrow_p.bind, static=static)
    return batch_one_by_one(bind, operands, dims)


batching.primitive_batchers[narrow_p] = _batch
