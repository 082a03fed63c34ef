"""Checks that the layers and their benchmark share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import check_dtype, show


def check_floats(where: str, name: str, dtype: Any) -> np.dtype:
    """A dtype of floats."""
    found = check_dtype(where, name, dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"{where}: {name} must be a dtype of floats, got {found}; jnp.float32, or "
            "jnp.bfloat16"
        )
    return found


def check_of_floats(where: str, name: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where}: {name} must be floats, got {show(array)}; cast it with "
            ".astype(jnp.float32)"
        )
