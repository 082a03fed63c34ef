"""Numbers rounded to 8 bits, in both orders of a matrix.

Tensor cores of 8 bits (cuBLASLt on Hopper) want both operands with the contracted axis
innermost. A tensor that takes part in two products of a layer is contracted along
another axis in each, so it is wanted in both orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.training.config import FP8Format

if TYPE_CHECKING:
    from jaxtyping import Float


class Narrow(NamedTuple):
    """A matrix in 8 bits."""

    codes: Float[jax.Array, "M N"]
    scale: Float[jax.Array, ""]  # float32: what numbers were multiplied by


def largest_size(x: jax.Array) -> jax.Array:
    """float32: the largest |x|; NaN where one is, 0 of nothing."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def narrow(
    x: jax.Array, scale: jax.Array, form: FP8Format
) -> tuple[Narrow, Narrow, jax.Array]:
    """`x` in 8 bits, its transpose, and the largest size in it: the specification.

    `x * scale` in float32 is held to the format's largest number and rounded to even.
    NaN stays NaN. Infinities become the largest number: their size tells of them.
    """
    scaled = x.astype(jnp.float32) * scale
    codes = jnp.clip(scaled, -form.max, form.max).astype(form.dtype)
    return Narrow(codes, scale), Narrow(codes.T, scale), largest_size(x)
