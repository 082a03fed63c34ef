"""The product of an array with weights in 8 bits, and both products of its gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kvblock.core.largest import largest_size
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.training import primitive
from jax_kvblock.training.cast import Narrow, are_first, narrow
from jax_kvblock.training.config import FP8Config
from jax_kvblock.training.scaling import Fp8Scaling, report_of, scale_for

# cuBLASLt adds products of 8 bits in fewer bits than float32 has unless precision is
# HIGHEST. Forward that is what others train with, too; gradients add up in full.
_FORWARD = jax.lax.Precision.DEFAULT
_BACKWARD = jax.lax.Precision.HIGHEST

# Rows, columns or terms of a product, and numbers of both its operands, that are few.
_FEW, _SMALL = 64, 2**14

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dot:
    """What is compiled in.

    Attributes:
      config: formats and scaling.
      kernel: whether the kernel casts, and refuses what it does not serve ("cuda"),
        casts what it serves (None), or is left alone ("xla").
      left, right: the contracted axes of both arrays, pair by pair.
      dtype: of the result.
      types: of the arrays, for the dtypes and shardings of their gradients.
      sharding: of the result, or None.
    """

    config: FP8Config
    left: Axes
    right: Axes
    dtype: np.dtype
    types: tuple[Any, Any] = (None, None)
    sharding: Any = None
    kernel: str | None = "xla"

    @property
    def left_free(self) -> Axes:
        return tuple(i for i in range(self.types[0].ndim) if i not in self.left)

    @property
    def right_free(self) -> Axes:
        return tuple(i for i in range(self.types[1].ndim) if i not in self.right)


def multiply(
    dot: Dot, x: jax.Array, w: jax.Array, scaling: Fp8Scaling | None
) -> jax.Array:
    """The result: free axes of x, then those of w."""
    leaves, tree = jax.tree.flatten((x, w, scaling))
    # Inside shard_map a gradient varies over the axes that any operand does.
    x, w, scaling = jax.tree.unflatten(tree, vary_alike(leaves))
    dot = dataclasses.replace(dot, types=(jax.typeof(x), jax.typeof(w)))
    return _multiply(dot, x, w, scaling)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    dot: Dot, x: jax.Array, w: jax.Array, scaling: Fp8Scaling | None
) -> jax.Array:
    x8, _ = narrowed(dot, x, scaling, 0, orders=("codes",))
    return result(dot, x8, w, scaling)


def result(dot: Dot, x8: Narrow, w: jax.Array, scaling: Fp8Scaling | None) -> jax.Array:
    """The product, where there will be no gradient."""
    w8, _ = narrowed(dot, w, scaling, 1, orders=("transposed",))
    return _product(dot, x8, w8)


def _forward(
    dot: Dot, x: jax.Array, w: jax.Array, scaling: Fp8Scaling | None
) -> tuple[jax.Array, Any]:
    return forward(dot, narrowed(dot, x, scaling, 0), w, scaling)


def forward(
    dot: Dot, inputs: tuple[Narrow, jax.Array], w: jax.Array, scaling: Fp8Scaling | None
) -> tuple[jax.Array, Any]:
    """The product; what both products of its gradient need, in 8 bits.

    Inputs are there in both orders, beside their largest size.
    """
    x8, x_size = inputs
    w8, w_size = narrowed(dot, w, scaling, 1)
    out = _product(dot, x8, w8)
    # Where both orders are there, gradients need the other one of each.
    x8, w8 = _only(x8, dot.left_free), _only(w8, dot.right_free)
    return out, (x8, w8, scaling, x_size, w_size)


def backward(dot: Dot, kept: Any, d_out: jax.Array) -> Any:
    """The gradients of both arrays, and the report, of what `forward` kept."""
    x8, w8, scaling, x_size, w_size = kept
    g8, size = narrowed(dot, d_out, scaling, 2)
    of_x = tuple(range(len(dot.left_free)))
    of_w = tuple(range(len(of_x), d_out.ndim))
    # Axes of a product: those of its first operand, then those of its second.
    partner = dict(zip(dot.right, dot.left, strict=True))
    order = (*dot.left_free, *(partner[i] for i in sorted(dot.right)))
    d_x = _gradient(g8, of_w, w8, dot.right_free, order, dot.types[0])
    partner = dict(zip(dot.left, dot.right, strict=True))
    order = (*(partner[i] for i in sorted(dot.left)), *dot.right_free)
    d_w = _gradient(x8, dot.left_free, g8, of_x, order, dot.types[1])
    if scaling is None:
        return d_x, d_w, None
    report = jnp.zeros(3, jnp.float32)
    for i, number in enumerate((x_size, w_size, size)):
        ratio = report_of(number, scaling.scale[i], dot.config.formats[i].max)
        report = jnp.where(jnp.arange(3) == i, ratio, report)
    return d_x, d_w, Fp8Scaling(report, jnp.zeros_like(scaling.history))


def once(where: str, rule: Callable[..., Any], fixed: int) -> Callable[..., Any]:
    """A rule whose own derivative is an error, not that of its roundings.

    Its first arguments, `fixed` of them, are compiled in.
    """
    run = jax.custom_jvp(rule, nondiff_argnums=tuple(range(fixed)))

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{where}: second derivatives of products of 8 bits are not supported; "
            "take x @ w where a gradient is differentiated (a penalty on gradients, "
            "jax.hessian), or give jax.lax.stop_gradient of its arrays to the inner "
            "gradient where it counts as a constant"
        )

    run.defjvp(refuse)
    return run


_multiply.defvjp(once("fp8_dot", _forward, 1), once("fp8_dot", backward, 1))


def _product(dot: Dot, x8: Narrow, w8: Narrow) -> jax.Array:
    return _contract(x8, dot.left, w8, dot.right, dot.dtype, _FORWARD, dot.sharding)


def narrowed(
    dot: Dot,
    x: jax.Array,
    scaling: Fp8Scaling | None,
    role: int,
    orders: Sequence[str] = primitive.ORDERS,
) -> tuple[Narrow, jax.Array]:
    """An array in 8 bits, and the largest size in it; `orders` are the kernel's."""
    form = dot.config.formats[role]
    if scaling is None:
        size = largest_size(x)
        scale = scale_for(size, form.max, dot.config.margin)
        # Nobody reports sizes here: what is not finite, or larger than any scale
        # serves, must not become a number.
        scale = jnp.where(size * scale <= form.max, scale, jnp.nan)
    else:
        scale = scaling.scale[role]
    # Axes of rows: those of inputs and gradients that are not contracted forward, and
    # those of weights that are.
    split = len(dot.right) if role == 1 else len(dot.left_free)
    if dot.kernel == "xla" or not 0 < split < x.ndim:
        return narrow(x, scale, form)
    return primitive.narrow(x, scale, form, split, orders, dot.kernel == "cuda")


def _only(x: Narrow, axes: Axes) -> Narrow:
    """Of an array in both orders, the one to contract along these axes."""
    if x.transposed is None:
        return x
    return x._replace(codes=None) if are_first(axes) else x._replace(transposed=None)


def _gradient(
    a: Narrow, left: Axes, b: Narrow, right: Axes, order: Axes, like: Any
) -> jax.Array:
    """A product whose axes are those of `like` in this order, brought into its own."""
    # What was made before there was a mesh has none: it is whole on that of the others.
    types = (like, *map(jax.typeof, jax.tree.leaves((a, b))))
    meshes = [t.sharding.mesh for t in types]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    sharding: Any
    if AxisType.Explicit in mesh.axis_types:
        own = (*like.sharding.spec, *[None] * like.ndim)
        turned = PartitionSpec(*(own[i] for i in order))
        sharding = NamedSharding(mesh, turned)
    else:
        sharding = None
    made = _contract(a, left, b, right, like.dtype, _BACKWARD, sharding)
    back = tuple(order.index(i) for i in range(like.ndim))
    return jnp.transpose(made, back)


def _is_small(x: jax.Array, left: Axes, y: jax.Array, right: Axes) -> bool:
    """Whether XLA may multiply number by number, as it does for a single row.

    It would do that in float16, which does not hold 448 * 448. What it hands to tensor
    cores has no such bound. A device of a mesh may have a part of what is seen here.
    """
    inner = math.prod(x.shape[i] for i in left)
    rows, columns = x.size // max(1, inner), y.size // max(1, inner)
    return min(rows, columns, inner) <= _FEW or (rows + columns) * inner <= _SMALL


def _contract(
    a: Narrow,
    left: Axes,
    b: Narrow,
    right: Axes,
    dtype: Any,
    precision: jax.lax.Precision,
    sharding: Any,
) -> jax.Array:
    """The product in this dtype, the scales taken out.

    It is added up in float32 and rounded once. Scales are powers of two, so that taking
    them out of what is bfloat16 already rounds nothing more; float16 does not hold what
    is still scaled.
    """
    (x, left), (y, right) = a.contracted(left), b.contracted(right)
    made: Any = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    if _is_small(x, left, y, right):
        # Really rounded: where one row is multiplied number by number, XLA leaves out
        # conversions there and back, if it is let.
        x, y = jax.lax.optimization_barrier((x, y))
        x, y, made = x.astype(jnp.float32), y.astype(jnp.float32), jnp.float32
    out = jax.lax.dot_general(
        x,
        y,
        ((left, right), ((), ())),
        precision=precision,
        preferred_element_type=made,
        out_sharding=sharding,
    )
    return (out * (1 / (a.scale * b.scale)).astype(made)).astype(dtype)
