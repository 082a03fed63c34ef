"""`jax.nn.gelu` that keeps its input alone for the way back.

Where nothing is differentiated it is the same program, so that XLA finds GELU behind a
product and a bias, and gives all three to cuBLASLt. (`layers.FusedGELU` computes values
of 16 bits in float32, which hides them from it.)
"""

from __future__ import annotations

import functools

import jax


@functools.partial(jax.checkpoint, static_argnums=1)
def _kept(x: jax.Array, approximate: bool) -> jax.Array:
    return jax.nn.gelu(x, approximate=approximate)


def kept_gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """`jax.nn.gelu`, by its name and arguments."""
    return _kept(x, approximate)
