"""Products with weights in 8 bits, forward and backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi
from jax_kvblock.core.checks import as_array, as_int, check_dtype, show, shown
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.training import units
from jax_kvblock.training.config import FP8Config, checked_config
from jax_kvblock.training.dot import Dot, multiply
from jax_kvblock.training.norm import norm_multiply
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


def fp8_norm_dot(
    x: Float[ArrayIn, "*rows K"],
    gamma: Float[ArrayIn, " K"],
    w: Float[ArrayIn, "K N"],
    scaling: Fp8Scaling | None = None,
    config: FP8Config | None = None,
    *,
    residual: Float[ArrayIn, "*rows K"] | None = None,
    eps: float = 1e-6,
    out_sharding: Any = None,
) -> Float[jax.Array, "*rows N"] | tuple[jax.Array, jax.Array]:
    """RMSNorm of x, or of `x + residual`, and `fp8_dot` of it: a block's first product.

    Rows are divided by the root of their mean square, multiplied by gamma and rounded
    to 8 bits, all in float32: what is normed is never rounded to x's dtype, and never
    stored. With `FP8Config(implementation="cuda")` and delayed scaling one kernel does
    it, sum included, and reads x once. Several products of one normed array take their
    weights in one: `jnp.concatenate([w_q, w_k, w_v], 1)`.

    Args:
      x: `[..., K]`, bfloat16, float16 or float32.
      gamma: `[K]`, of any of these.
      w: `[K, N]`, of any of these.
      scaling, config, out_sharding: as for `fp8_dot`; the scale of inputs is that of
        what is normed.
      residual: what is added to x first, in x's shape and dtype. The sum is rounded to
        that dtype, and it is the rounded one that is normed, forward and backward.
      eps: what is added to mean squares.

    Returns:
      `[..., N]` in x's dtype; with a residual `(that, x + residual)`.

    Raises:
      TypeError, ValueError: a shape, a dtype, eps or the scaling does not fit.
      RuntimeError: as for `fp8_dot`.

    Example:
      >>> h, x = fp8_norm_dot(attended, gamma, w_up, scaling, residual=x)
    """
    where = "fp8_norm_dot"
    given = {"x": x, "gamma": gamma, "w": w}
    given |= {} if residual is None else {"residual": residual}
    arrays = {name: as_array(where, name, a) for name, a in given.items()}
    _check_dtypes(where, **arrays)
    x, gamma, w = (arrays[name] for name in ("x", "gamma", "w"))
    inner = x.shape[-1:]
    if x.ndim < 1 or w.ndim != 2 or not inner == gamma.shape == w.shape[:1]:
        raise ValueError(
            f"{where}: x, gamma and w must be [..., K], [K] and [K, N], got {show(x)}, "
            f"{show(gamma)} and {show(w)}"
        )
    other = arrays.get("residual")
    if other is not None and (other.shape, other.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{where}: residual must be of x's shape and dtype, got {show(other)} for "
            f"{show(x)}"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float, np.number)):
        raise TypeError(f"{where}: eps must be a number, got {shown(eps)}")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"{where}: eps must be finite and at least 0, got {eps!r}")
    config = checked_config(where, config)
    check_scaling(where, scaling, config)
    units.served_by(where)
    dot = Dot(
        config, (x.ndim - 1,), (0,), np.dtype(x.dtype),
        sharding=out_sharding, kernel=_kernel(config),
    )  # fmt: skip
    return norm_multiply(dot, float(eps), x, other, gamma, w, scaling)


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
    try:
        (left, right), batch = dimension_numbers
        left, right, *batch = map(tuple, (left, right, *batch))
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: dimension_numbers must be ((lhs_contracting, rhs_contracting), "
            f"((), ())), got {dimension_numbers!r}; (((1,), (0,)), ((), ())), say"
        ) from None
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
    dtype = _preferred(where, lhs.dtype, preferred_element_type)
    return _product(config, lhs, rhs, left, right, scaling, dtype, out_sharding)


def _product(
    config: FP8Config,
    x: jax.Array,
    w: jax.Array,
    left: tuple[int, ...],
    right: tuple[int, ...],
    scaling: Fp8Scaling | None,
    dtype: np.dtype,
    sharding: Any,
) -> jax.Array:
    kernel = _kernel(config)
    inner = tuple(range(x.ndim - len(left), x.ndim)), tuple(range(len(right)))
    if kernel == "cuda" and (left, right) != inner:
        # It casts into two orders of an array, and these are to be those of products.
        x = jnp.moveaxis(x, left, inner[0])
        w = jnp.moveaxis(w, right, inner[1])
        left, right = inner
    if kernel is None and (left, right) != inner:
        kernel = "xla"
    dot = Dot(config, left, right, dtype, sharding=sharding, kernel=kernel)
    return multiply(dot, x, w, scaling)


def _kernel(config: FP8Config) -> str | None:
    """`Dot.kernel`, where all axes lie as the kernel wants them."""
    if config.implementation is not None:
        return config.implementation
    on_cuda = ffi.platform_of(ffi.default_device()) == "cuda"
    return None if on_cuda and ffi.BUILD["cuda"] else "xla"


def _axes(where: str, name: str, x: jax.Array, axes: Any) -> tuple[int, ...]:
    found = [as_int(i) for i in axes]
    known = tuple(i % x.ndim for i in found if i is not None and -x.ndim <= i < x.ndim)
    if len(known) != len(found) or len({*known}) != len(known):
        raise ValueError(
            f"{where}: contracted axes of {name} must be from {-x.ndim} to "
            f"{x.ndim - 1}, each once, got {tuple(axes)} of {show(x)}"
        )
    return known


def _preferred(where: str, own: Any, given: Any) -> np.dtype:
    if given is None:
        return np.dtype(own)
    dtype = check_dtype(where, "preferred_element_type", given)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{where}: preferred_element_type must be a dtype of floats, got {dtype}; "
            "leave it out for that of lhs"
        )
    return dtype


def _check_dtypes(where: str, **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.dtype not in _DTYPES:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{show(array)}; cast it with .astype(jnp.bfloat16)"
            )
