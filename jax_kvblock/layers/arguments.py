"""Checks that the layers and their benchmark share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import check_dtype


def check_floats(where: str, name: str, dtype: Any) -> np.dtype:
    """A dtype of floats."""
    found = check_dtype(where, name, dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"{where}: {name} must be a dtype of floats, got {found}; jnp.float32, or "
            "jnp.bfloat16"
        )
    return found
