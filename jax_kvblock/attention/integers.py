"""Integers as callers have them: read where they are known, brought to int32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import known_integers


def known_on_host(where: str, name: str, x: Any) -> np.ndarray | None:
    """The values of integers in any form, where they lie on the host; else None."""
    if not isinstance(x, (list, tuple, range)):
        return known_integers(where, name, x)
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return None
    return np.asarray(x)


def saturated(x: Any) -> Any:
    """Integers of a JAX array that int32 does not hold, as its nearest end."""
    return _clipped(x) if _may_be_wider(x) else x


def wrapped(x: Any) -> Any:
    """Integers of a JAX array modulo 2**32: uint32 ids that differ stay different."""
    return x.astype(jnp.int32) if _may_be_wider(x) else x


def _may_be_wider(x: Any) -> bool:
    wide = (jnp.uint32, jnp.int64, jnp.uint64)
    return isinstance(x, jax.Array) and x.dtype in wide


@functools.partial(jax.jit, inline=True)
def _clipped(x: jax.Array) -> jax.Array:
    ends, given = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    low, high = max(ends.min, given.min), min(ends.max, given.max)
    return jnp.clip(x, low, high).astype(jnp.int32)
