"""Numbers rounded to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.training.config import FP8Format

if TYPE_CHECKING:
    from jaxtyping import Float


class Narrow(NamedTuple):
    """An array in 8 bits, in the order that it has; a matrix also in the other order.

    Tensor cores of 8 bits (cuBLASLt on Hopper) want both operands with the contracted
    axis innermost, and an array that takes part in two products is contracted along
    another axis in each. XLA transposes where it has to; the kernel casts into both.
    """

    codes: Float[jax.Array, "..."] | None
    transposed: Float[jax.Array, "N M"] | None
    scale: Float[jax.Array, ""]  # float32: what numbers were multiplied by

    def contracted(self, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
        """The codes to contract along these axes, and which of theirs those are."""
        if axes == (0,) and self.transposed is not None:
            return self.transposed, (1,)
        assert self.codes is not None
        return self.codes, axes


def largest_size(x: jax.Array) -> jax.Array:
    """float32: the largest |x|; NaN where one is, 0 of nothing."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def narrow(x: jax.Array, scale: jax.Array, form: FP8Format) -> tuple[Narrow, jax.Array]:
    """`x` in 8 bits, and the largest size in it: the specification.

    `x * scale` in float32 is held to the format's largest number and rounded to even.
    NaN stays NaN. Infinities become the largest number: their size tells of them.
    """
    scaled = x.astype(jnp.float32) * scale
    codes = jnp.clip(scaled, -form.max, form.max).astype(form.dtype)
    return Narrow(codes, None, scale), largest_size(x)
