"""Error messages and small checks that several functions share.

Every message names the function, the argument, what was expected, what came, and the
fix, in that order.
"""

from __future__ import annotations

import operator
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


def shown(value: Any) -> str:
    """`a traced int32[]` for what jit traces, the value itself for anything else."""
    traced = isinstance(value, jax.core.Tracer)
    return f"a traced {show(value)}" if traced else repr(value)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_array(where: str, name: str, x: Any) -> None:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{where}: {name} must be an array, got a ShapeDtypeStruct, which has no "
            "values; call it under jax.eval_shape or jax.jit(...).lower"
        )
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"{where}: {name} must be an array, got {type(x).__name__}; convert it "
            "with jnp.asarray"
        )


def as_array(where: str, name: str, x: Any) -> jax.Array:
    """`jnp.asarray`, also of lists, or an error that names the argument."""
    if isinstance(x, jax.ShapeDtypeStruct):
        check_array(where, name, x)
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        array = jnp.asarray(x)
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: {name} must be an array, got {show(x)}; pass a JAX or NumPy "
            "array of numbers"
        ) from None
    return array


def known_values(x: Any) -> np.ndarray | None:
    """The values of an array that lie on this host, else None.

    What is traced has none; to wait for an accelerator's would stop a program that runs
    ahead of it.
    """
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
        return None
    if any(device.platform != "cpu" for device in x.devices()):
        return None
    return jax.device_get(x)  # explicit, so that a transfer guard lets it pass


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


_RESHAPE = {0: "pass a scalar", 1: "flatten it with .reshape(-1)"}


def check_int32(where: str, name: str, x: Any, shape: str, ndim: int) -> jax.Array:
    """An int32 array of rank `ndim`; Python ints and int64 NumPy arrays that fit
    pass.
    """
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool) and ndim == 0:
        return jnp.asarray(np.int32(np.clip(x, -1, 2**31 - 1)))
    if isinstance(x, (list, tuple)) and not any(isinstance(i, jax.Array) for i in x):
        given = x
        try:
            x = np.asarray(given) if len(given) else np.zeros(0, np.int32)
        except ValueError:
            raise ValueError(
                f"{where}: {name} must be int32{shape}, got rows that differ in "
                f"length, {given!r}; fill them up to one length"
            ) from None
        if x.dtype == object and all(as_int(i) is not None for i in x.flat):
            raise ValueError(f"{where}: {name} must fit in int32, got {x.tolist()}")
        if x.dtype == object:
            raise TypeError(
                f"{where}: {name} must be int32{shape}, got {given!r}; pass integers"
            )
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
            + _RESHAPE.get(ndim, f"reshape it to {shape}")
        )
    return jnp.asarray(x)


def check_choice(where: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(
            f"{where}: {name} must be one of {', '.join(map(repr, choices))}, "
            f"got {value!r}"
        )


def as_int(value: Any) -> int | None:
    """A Python int for what counts as one, also NumPy's and arrays without dims.

    None for anything else: floats, bools, and what is traced.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_integer(where: str, name: str, value: Any, fix: str) -> int:
    number = as_int(value)
    if number is None:
        raise TypeError(
            f"{where}: {name} must be an integer, got {shown(value)}; {fix}"
        )
    return number


def check_positive(where: str, **values: Any) -> tuple[int, ...]:
    """The values as Python ints, whose products do not wrap as NumPy's do."""
    numbers = []
    for name, value in values.items():
        number = as_int(value)
        if number is None or number < 1:
            raise ValueError(
                f"{where}: {name} must be an integer of at least 1, got {shown(value)}"
            )
        numbers.append(number)
    return tuple(numbers)


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
