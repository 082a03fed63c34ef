"""Products with weights in 8 bits, forward and backward."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_kvblock.core.checks import as_array, show
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.training import primitive, units
from jax_kvblock.training.cast import Narrow, largest_size, narrow
from jax_kvblock.training.config import FP8Config, FP8Format
from jax_kvblock.training.scaling import (
    Fp8Scaling,
    check_scaling,
    report_of,
    scale_for,
)

if TYPE_CHECKING:
    from jaxtyping import Float

# cuBLASLt adds products of 8 bits in fewer bits than float32 has unless precision is
# HIGHEST. Forward that is what others train with, too; gradients add up in full.
_FORWARD = jax.lax.Precision.DEFAULT
_BACKWARD = jax.lax.Precision.HIGHEST
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def fp8_dot(
    x: Float[ArrayIn, "*rows K"],
    w: Float[ArrayIn, "K N"],
    scaling: Fp8Scaling | None = None,
    config: FP8Config | None = None,
) -> Float[jax.Array, "*rows N"]:
    """`x @ w` by tensor cores of 8 bits, and so are both products of its gradient.

    x, w and the gradient of the result are multiplied by their scales, rounded to 8
    bits, multiplied, added in float32 and divided by the scales. Works under jit, vmap,
    scan, remat and sharding.

    Args:
      x: `[..., K]`, bfloat16, float16 or float32.
      w: `[K, N]`, of any of these.
      scaling: the scales, with delayed scaling. Their cotangent is no derivative: it
        reports sizes, and `scaling.update` takes it.
      config: `FP8Config()` unless given.

    Returns:
      `[..., N]` in x's dtype.

    Raises:
      TypeError, ValueError: a shape, a dtype or the scaling does not fit.
      RuntimeError: the default device has no units of 8 bits, and is no CPU, which
        rounds to the same numbers and adds in float32.

    Example:
      >>> scaling = Fp8Scaling.create()
      >>> d_w, report = jax.grad(loss_of_dot, argnums=(1, 2))(x, w, scaling)
      >>> scaling = scaling.update(report)
    """
    where = "fp8_dot"
    x, w = as_array(where, "x", x), as_array(where, "w", w)
    _check_dtypes(where, x=x, w=w)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{where}: x and w must be [..., K] and [K, N], got {show(x)} and "
            f"{show(w)}; fp8_dot_general takes other orders of axes"
        )
    config = checked_config(where, config)
    check_scaling(where, scaling, config)
    units.served_by(where)
    rows = math.prod(x.shape[:-1])
    out = _multiply(config, x.reshape(rows, x.shape[-1]), w, scaling)
    return out.reshape(*x.shape[:-1], w.shape[1])


def fp8_dot_general(
    lhs: Float[ArrayIn, "..."],
    rhs: Float[ArrayIn, "..."],
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    scaling: Fp8Scaling | None = None,
    config: FP8Config | None = None,
) -> Float[jax.Array, "..."]:
    """`jax.lax.dot_general` with weights as `rhs`, by `fp8_dot`.

    What flax's layers take as `dot_general`, with `functools.partial`.

    Args:
      lhs, rhs: as for `jax.lax.dot_general`, without batch axes.
      dimension_numbers: `((lhs_contracting, rhs_contracting), ((), ()))`.
      precision: there is none to choose, and flax passes its own: not looked at.
      preferred_element_type: of the result; lhs's dtype unless given.
      out_sharding: must be None.
      scaling, config: as for `fp8_dot`.

    Raises:
      NotImplementedError: batch axes, or an out_sharding.
      TypeError, ValueError, RuntimeError: see `fp8_dot`.
    """
    where = "fp8_dot_general"
    lhs, rhs = as_array(where, "lhs", lhs), as_array(where, "rhs", rhs)
    _check_dtypes(where, lhs=lhs, rhs=rhs)
    (left, right), batch = dimension_numbers
    if any(len(axes) for axes in batch):
        raise NotImplementedError(
            f"{where}: batch axes are not supported, got dimension_numbers "
            f"{dimension_numbers}; use jax.vmap, or jax.lax.dot_general for products "
            "that are not with weights"
        )
    if out_sharding is not None:
        raise NotImplementedError(
            f"{where}: out_sharding is not supported, got {out_sharding}; use "
            "jax.lax.with_sharding_constraint on the result"
        )
    sizes = [lhs.shape[i] for i in left]
    if sizes != [rhs.shape[i] for i in right]:
        raise ValueError(
            f"{where}: contracted axes must have the same sizes, got axes {left} of "
            f"{show(lhs)} and {right} of {show(rhs)}"
        )
    config = checked_config(where, config)
    check_scaling(where, scaling, config)
    units.served_by(where)
    x = jnp.moveaxis(lhs, left, range(lhs.ndim - len(left), lhs.ndim))
    w = jnp.moveaxis(rhs, right, range(len(right)))
    rows, columns = x.shape[: lhs.ndim - len(left)], w.shape[len(right) :]
    inner = math.prod(sizes)
    out = _multiply(
        config,
        x.reshape(math.prod(rows), inner),
        w.reshape(inner, math.prod(columns)),
        scaling,
    )
    out = out.reshape(*rows, *columns)
    return out if preferred_element_type is None else out.astype(preferred_element_type)


def checked_config(where: str, config: Any) -> FP8Config:
    if config is None:
        return FP8Config()
    if not isinstance(config, FP8Config):
        raise TypeError(
            f"{where}: config must be an FP8Config, got {type(config).__name__}"
        )
    return config


def _check_dtypes(where: str, **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.dtype not in _DTYPES:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{show(array)}; cast it with .astype(jnp.bfloat16)"
            )


def _multiply(
    config: FP8Config, x: jax.Array, w: jax.Array, scaling: Fp8Scaling | None
) -> jax.Array:
    leaves, tree = jax.tree.flatten((x, w, scaling))
    # Inside shard_map a gradient varies over the axes that any operand does.
    x, w, scaling = jax.tree.unflatten(tree, vary_alike(leaves))
    return _product(config, (jax.typeof(x), jax.typeof(w)), x, w, scaling)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    config: FP8Config,
    types: Any,
    x: jax.Array,
    w: jax.Array,
    scaling: Fp8Scaling | None,
) -> jax.Array:
    return _forward(config, types, x, w, scaling)[0]


def _forward(
    config: FP8Config,
    types: Any,
    x: jax.Array,
    w: jax.Array,
    scaling: Fp8Scaling | None,
) -> tuple[jax.Array, Any]:
    """The product; what both products of its gradient need, in 8 bits."""
    x_rows, x_columns, x_size = _narrowed(config, x, scaling, 0)
    w_rows, w_columns, w_size = _narrowed(config, w, scaling, 1)
    out = _dot(x_rows, w_columns, _FORWARD).astype(x.dtype)
    return out, (x_columns, w_rows, scaling, x_size, w_size)


def _backward(config: FP8Config, types: Any, kept: Any, d_out: jax.Array) -> Any:
    x_columns, w_rows, scaling, x_size, w_size = kept
    rows, columns, size = _narrowed(config, d_out, scaling, 2)
    x, w = types
    d_x = _dot(rows, w_rows, _BACKWARD, x).astype(x.dtype)
    d_w = _dot(x_columns, columns, _BACKWARD, w).astype(w.dtype)
    if scaling is None:
        return d_x, d_w, None
    sizes = (x_size, w_size, size)
    reports = [
        report_of(size, scaling.scale[i], form.max)
        for i, (size, form) in enumerate(zip(sizes, config.formats, strict=True))
    ]
    return d_x, d_w, Fp8Scaling(jnp.stack(reports), jnp.zeros_like(scaling.history))


_product.defvjp(_forward, _backward)


def _narrowed(
    config: FP8Config, x: jax.Array, scaling: Fp8Scaling | None, role: int
) -> tuple[Narrow, Narrow, jax.Array]:
    """A matrix in 8 bits, its transpose, and the largest size in it."""
    form: FP8Format = config.formats[role]
    if scaling is None:
        scale = scale_for(largest_size(x), form.max, config.margin)
    else:
        scale = scaling.scale[role]
    run = primitive.narrow if config.implementation == "cuda" else narrow
    return run(x, scale, form)


def _dot(
    a: Narrow, b: Narrow, precision: jax.lax.Precision, like: Any = None
) -> jax.Array:
    """`a` [M, K] by `b` [N, K], their scales taken out: float32 [M, N].

    like: the type whose sharding the result has, on an explicit mesh.
    """
    sharding = None if like is None else like.sharding
    if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None
    out = jax.lax.dot_general(
        a.codes,
        b.codes,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=sharding,
    )
    return out * (1 / (a.scale * b.scale))
