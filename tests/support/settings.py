"""Settings of jax under which everything computes the same."""

from __future__ import annotations

import jax

SETTINGS = {
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
}
