"""The largest size in an array, which is NaN where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Float


def largest_size(
    x: Float[jax.Array, "..."], axis: tuple[int, ...] | None = None
) -> Float[jax.Array, "..."]:
    """float32: the largest |x| along these axes; NaN where one is, 0 of nothing."""
    # By their bits: on CPUs XLA's maximum of some 40,000 floats passes over NaN (jax
    # 0.10.2). Its bits are above those of infinity.
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    largest = jnp.max(bits, axis=axis, initial=0)
    return jax.lax.bitcast_convert_type(largest, jnp.float32)
