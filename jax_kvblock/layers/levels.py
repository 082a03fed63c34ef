"""What `optimization_level` of a linear layer means."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LEVELS = ("precise", "balanced", "fast")


def product_dtype(dtype: jnp.dtype, level: str) -> jnp.dtype:
    """What a product of this dtype multiplies."""
    narrow = level == "fast" and dtype.itemsize > 2
    return jnp.dtype(jnp.bfloat16) if narrow else dtype


def precision_of(level: str) -> str | None:
    """What JAX is asked for; None follows `jax.default_matmul_precision`."""
    return "highest" if level == "precise" else None


def contract(dot_general: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, `[..., F]` and `[F, n]`, by a dot_general, in x's dtype."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    made: jax.Array = dot_general(x, kernel, dims, preferred_element_type=x.dtype)
    return made


def product(x: jax.Array, kernel: jax.Array, level: str) -> jax.Array:
    """`x @ kernel` in their common dtype."""
    dtype = jnp.dtype(jnp.result_type(x, kernel))
    narrow = product_dtype(dtype, level)
    a, b = x.astype(narrow), kernel.astype(narrow)
    return jnp.matmul(a, b, precision=precision_of(level)).astype(dtype)
