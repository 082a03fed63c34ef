"""Error messages and small checks that several functions share.

Every message names the function, the argument, what was expected, what came, and the
fix, in that order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def show(x: Any) -> str:
    """`bfloat16[4, 8]` for an array, the type's name for anything else."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_array(where: str, name: str, x: Any) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"{where}: {name} must be an array, got {type(x).__name__}; convert it "
            "with jnp.asarray"
        )


def check_dtype(where: str, name: str, dtype: Any) -> np.dtype:
    """A dtype whose elements are whole bytes: 1, 2, 4, 8 or 16 of them."""
    try:
        extended = jnp.issubdtype(dtype, jax.dtypes.extended)
        dtype = dtype if extended else np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{where}: {name} must be a dtype, like jnp.bfloat16 or 'float8_e4m3fn', "
            f"got {dtype!r}"
        ) from None
    if extended:
        raise TypeError(
            f"{where}: {name} has the extended dtype {dtype}; pass its raw data, for "
            "example jax.random.key_data(x)"
        )
    if re.match(r"u?int[124]$|float[46]_", dtype.name):
        raise TypeError(
            f"{where}: {name} has elements smaller than a byte, {dtype}; pack them "
            "into uint8 first (jax.lax.bitcast_convert_type) and move the bytes"
        )
    if dtype.itemsize not in (1, 2, 4, 8, 16) or dtype.hasobject:
        raise TypeError(
            f"{where}: {name} must have elements of 1, 2, 4, 8 or 16 bytes, got {dtype}"
        )
    return dtype


def check_int32(where: str, name: str, x: Any, shape: str, ndim: int) -> jax.Array:
    """An int32 array of rank `ndim`; Python ints and int64 NumPy arrays that fit
    pass.
    """
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool) and ndim == 0:
        return jnp.asarray(np.int32(np.clip(x, -1, 2**31 - 1)))
    if isinstance(x, (list, tuple)) and not any(isinstance(i, jax.Array) for i in x):
        x = np.asarray(x) if len(x) else np.zeros(0, np.int32)
        if x.dtype == object:  # integers beyond int64
            raise ValueError(f"{where}: {name} must fit in int32, got {x.tolist()}")
    if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.signedinteger):
        if x.size and (x.max() > 2**31 - 1 or x.min() < -(2**31)):
            raise ValueError(
                f"{where}: {name} must fit in int32, got values from {x.min()} to "
                f"{x.max()}"
            )
        x = x.astype(np.int32)
    check_array(where, name, x)
    if x.dtype != jnp.int32:
        raise TypeError(
            f"{where}: {name} must be int32{shape}, got {show(x)}; cast it with "
            ".astype(jnp.int32)"
        )
    if x.ndim != ndim:
        raise ValueError(
            f"{where}: {name} must be int32{shape}, got {show(x)}; "
            + ("pass a scalar" if ndim == 0 else "flatten it with .reshape(-1)")
        )
    return jnp.asarray(x)


def check_choice(where: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(
            f"{where}: {name} must be one of {', '.join(map(repr, choices))}, "
            f"got {value!r}"
        )


def check_positive(where: str, **values: Any) -> None:
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, np.integer))
            or value < 1
        ):
            raise ValueError(
                f"{where}: {name} must be an integer of at least 1, got {value!r}"
            )


def check_heads(where: str, heads: Any, num_kv_heads: int) -> tuple[int, int]:
    """The head range as (start, stop), the whole range for None."""
    if heads is None:
        return 0, num_kv_heads
    try:
        start, stop = heads
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: heads must be a pair (start, stop), got {heads!r}"
        ) from None
    for value in (start, stop):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(
                f"{where}: heads must be a pair of Python integers, got {heads!r}; the "
                "range sets the result's shape, so it cannot be traced"
            )
    if not 0 <= start < stop <= num_kv_heads:
        raise ValueError(
            f"{where}: heads must satisfy 0 <= start < stop <= {num_kv_heads} "
            f"(num_kv_heads), got ({start}, {stop})"
        )
    return int(start), int(stop)
