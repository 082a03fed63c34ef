"""Products with weights in 8 bits, forward and backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_array, show
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.training import units
from jax_kvblock.training.config import FP8Config
from jax_kvblock.training.dot import Dot, multiply
from jax_kvblock.training.scaling import Fp8Scaling, check_scaling

if TYPE_CHECKING:
    from jaxtyping import Float

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def fp8_dot(
    x: Float[ArrayIn, "*rows K"],
    w: Float[ArrayIn, "K N"],
    scaling: Fp8Scaling | None = None,
    config: FP8Config | None = None,
    *,
    out_sharding: Any = None,
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
      out_sharding: of the result, on explicit meshes: where K is cut, for one.

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
    return _product(config, x, w, (x.ndim - 1,), (0,), scaling, x.dtype, out_sharding)


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
      out_sharding: of the result, on explicit meshes.
      scaling, config: as for `fp8_dot`.

    Raises:
      NotImplementedError: batch axes.
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
    left, right = _axes(where, "lhs", lhs, left), _axes(where, "rhs", rhs, right)
    if [lhs.shape[i] for i in left] != [rhs.shape[i] for i in right]:
        raise ValueError(
            f"{where}: contracted axes must have the same sizes, got axes {left} of "
            f"{show(lhs)} and {right} of {show(rhs)}"
        )
    config = checked_config(where, config)
    check_scaling(where, scaling, config)
    units.served_by(where)
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return _product(config, lhs, rhs, left, right, scaling, dtype, out_sharding)


def _product(
    config: FP8Config,
    x: jax.Array,
    w: jax.Array,
    left: tuple[int, ...],
    right: tuple[int, ...],
    scaling: Fp8Scaling | None,
    dtype: Any,
    sharding: Any,
) -> jax.Array:
    if config.implementation != "cuda":
        dot = Dot(config, left, right, np.dtype(dtype), sharding=sharding)
        return multiply(dot, x, w, scaling)
    # The kernel casts matrices.
    dot = Dot(config, (1,), (0,), np.dtype(dtype))
    x = jnp.moveaxis(x, left, range(x.ndim - len(left), x.ndim))
    w = jnp.moveaxis(w, right, range(len(right)))
    rows, columns = x.shape[: x.ndim - len(left)], w.shape[len(right) :]
    inner = math.prod(w.shape[: len(right)])
    x = x.reshape(math.prod(rows), inner)
    out = multiply(dot, x, w.reshape(inner, math.prod(columns)), scaling)
    return out.reshape(*rows, *columns)


def checked_config(where: str, config: Any) -> FP8Config:
    if config is None:
        return FP8Config()
    if not isinstance(config, FP8Config):
        raise TypeError(
            f"{where}: config must be an FP8Config, got {type(config).__name__}"
        )
    return config


def _axes(where: str, name: str, x: jax.Array, axes: Any) -> tuple[int, ...]:
    if any(not -x.ndim <= i < x.ndim for i in axes):
        raise ValueError(
            f"{where}: contracted axes of {name} must be from {-x.ndim} to "
            f"{x.ndim - 1}, got {tuple(axes)} of {show(x)}"
        )
    return tuple(int(i) % x.ndim for i in axes)


def _check_dtypes(where: str, **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.dtype not in _DTYPES:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{show(array)}; cast it with .astype(jnp.bfloat16)"
            )
