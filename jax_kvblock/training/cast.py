"""Numbers rounded to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.core.largest import largest_size
from jax_kvblock.training.config import FP8Format

if TYPE_CHECKING:
    from jaxtyping import Float


class Narrow(NamedTuple):
    """An array in 8 bits, in the order that it has, in the other one, or in both.

    Its axes are of two groups, those of rows and those of columns: a matrix has one of
    each. Tensor cores of 8 bits (cuBLASLt on Hopper) want both operands with the
    contracted axes innermost, and an array that takes part in two products is
    contracted along another group in each. XLA transposes where it has to; the kernel
    casts into both orders.
    """

    codes: Float[jax.Array, "*rows *columns"] | None
    transposed: Float[jax.Array, "*columns *rows"] | None
    scale: Float[jax.Array, ""]  # float32: what numbers were multiplied by

    def contracted(self, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
        """The codes to contract along these axes, and which of theirs those are."""
        if self.transposed is not None and are_first(axes):
            ndim = self.transposed.ndim
            return self.transposed, tuple(range(ndim - len(axes), ndim))
        assert self.codes is not None
        return self.codes, axes


def are_first(axes: tuple[int, ...]) -> bool:
    """Whether these are an array's first axes, in order."""
    return axes == tuple(range(len(axes)))


def narrow(x: jax.Array, scale: jax.Array, form: FP8Format) -> tuple[Narrow, jax.Array]:
    """`x` in 8 bits, and the largest size in it: the specification.

    `x * scale` in float32 is held to the format's largest number and rounded to even.
    NaN stays NaN. Infinities become the largest number: their size tells of them.
    """
    scaled = x.astype(jnp.float32) * scale
    codes = jnp.clip(scaled, -form.max, form.max).astype(form.dtype)
    return Narrow(codes, None, scale), largest_size(x)
