"""RMSNorm of an array, or of a sum, and the product of it with weights in 8 bits.

`norm` is the specification of the kernel: it ends in `cast.narrow`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.training import norm_primitive
from jax_kvblock.training.cast import Narrow
from jax_kvblock.training.dot import Dot, backward, forward, narrowed, once, result
from jax_kvblock.training.primitive import ORDERS
from jax_kvblock.training.scaling import Fp8Scaling


def norm(
    x: jax.Array, residual: jax.Array | None, gamma: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is normed, 1 / rms of each row, and the normed rows, these in float32.

    With a residual it is the sum that is normed, rounded to x's dtype as everyone sees
    it.
    """
    if residual is not None:
        wide = x.astype(jnp.float32) + residual.astype(jnp.float32)
        x = _rounded(wide, x.dtype)
    wide = x.astype(jnp.float32)
    inverse = 1 / jnp.sqrt(jnp.mean(wide * wide, -1) + eps)
    return x, inverse, wide * inverse[..., None] * gamma.astype(jnp.float32)


def _rounded(wide: jax.Array, dtype: np.dtype) -> jax.Array:
    """Really rounded: XLA leaves out conversions there and back, if it is let."""
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(wide, 8, 7).astype(dtype)
    made = wide.astype(dtype)
    # reduce_precision would take float16's smallest numbers to 0.
    return jax.lax.optimization_barrier(made) if dtype == jnp.float16 else made


def norm_gradient(
    x: jax.Array, inverse: jax.Array, gamma: jax.Array, d_normed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of what is normed, in float32, and of gamma, in its dtype."""
    unit = x.astype(jnp.float32) * inverse[..., None]
    d_wide = d_normed.astype(jnp.float32)
    d_gamma = jnp.sum(d_wide * unit, tuple(range(x.ndim - 1)))
    d_unit = d_wide * gamma.astype(jnp.float32)
    along = jnp.mean(d_unit * unit, -1, keepdims=True)
    return (d_unit - unit * along) * inverse[..., None], d_gamma.astype(gamma.dtype)


def norm_multiply(
    dot: Dot,
    eps: float,
    x: jax.Array,
    residual: jax.Array | None,
    gamma: jax.Array,
    w: jax.Array,
    scaling: Fp8Scaling | None,
) -> Any:
    """`dot.multiply` of normed x, whose last axis is contracted; with a residual
    also what was normed."""
    leaves, tree = jax.tree.flatten((x, residual, gamma, w, scaling))
    # Inside shard_map a gradient varies over the axes that any operand does.
    x, residual, gamma, w, scaling = jax.tree.unflatten(tree, vary_alike(leaves))
    # The gradient of what is normed is rounded as that of x is.
    dot = dataclasses.replace(dot, types=(jax.typeof(x), jax.typeof(w)))
    return _multiply(dot, eps, x, residual, gamma, w, scaling)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    dot: Dot, eps: float, x: Any, residual: Any, gamma: Any, w: Any, scaling: Any
) -> Any:
    (x8, _), x, _ = _normed(dot, eps, x, residual, gamma, scaling, orders=("codes",))
    out = result(dot, x8, w, scaling)
    return out if residual is None else (out, x)


def _forward(
    dot: Dot, eps: float, x: Any, residual: Any, gamma: Any, w: Any, scaling: Any
) -> tuple[Any, Any]:
    inputs, x, inverse = _normed(dot, eps, x, residual, gamma, scaling)
    out, kept = forward(dot, inputs, w, scaling)
    return out if residual is None else (out, x), (kept, x, inverse, gamma)


def _normed(
    dot: Dot,
    eps: float,
    x: jax.Array,
    residual: jax.Array | None,
    gamma: jax.Array,
    scaling: Fp8Scaling | None,
    orders: Sequence[str] = ORDERS,
) -> tuple[tuple[Narrow, jax.Array], jax.Array, jax.Array]:
    """Inputs in 8 bits, what is normed, and 1 / rms; `orders` are the kernels'."""
    # Current scales are those of what is normed, which has to be there first.
    if dot.kernel == "cuda" and scaling is not None and x.ndim > 1:
        form = dot.config.formats[0]
        return norm_primitive.norm_narrow(
            x, residual, gamma, scaling.scale[0], form, eps, orders
        )
    x, inverse, normed = norm(x, residual, gamma, eps)
    return narrowed(dot, normed, scaling, 0, orders), x, inverse


def _backward(dot: Dot, eps: float, kept: Any, cotangents: Any) -> Any:
    of_product, x, inverse, gamma = kept
    with_residual = isinstance(cotangents, (tuple, list))
    d_out, *d_sum = cotangents if with_residual else (cotangents,)
    d_normed, d_w, report = backward(dot, of_product, d_out)
    d_x, d_gamma = norm_gradient(x, inverse, gamma, d_normed)
    for other in d_sum:
        d_x += other.astype(jnp.float32)
    d_x = d_x.astype(x.dtype)
    return d_x, d_x if with_residual else None, d_gamma, d_w, report


_multiply.defvjp(once("fp8_norm_dot", _forward, 2), once("fp8_norm_dot", _backward, 2))
