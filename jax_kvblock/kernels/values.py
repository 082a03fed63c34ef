"""Scalars as a kernel's parameters: their bytes, and their types in memory."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kvblock.kernels.kernel import Kernel

_FLOATS = {2: np.float16, 4: np.float32, 8: np.float64}


def pack(where: str, kernel: Kernel, number: int, value: Any) -> bytes:
    """A value, fixed when the program is compiled, as a parameter has it.

    Python's numbers become what the parameter is; NumPy's have to be that already, but
    for integers, which may be narrower or wider as long as the value fits.
    """
    if isinstance(value, bytes):
        return _struct(where, kernel, number, value)
    if kernel.parameters is None or kernel.parameters[number].is_bytes:
        return _typed(where, kernel, number, value)
    parameter = kernel.parameters[number]
    shown = f"{where}: {kernel.say(number)} of {kernel}"
    if parameter.pointer and not (type(value) is int and value == 0):
        raise TypeError(
            f"{shown} is a pointer, got {value!r}; pass an array, or 0 for none"
        )
    array = np.asarray(value)
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim or not (floats or array.dtype.kind in "biu"):
        raise TypeError(f"{shown} must be a number, got {value!r}")
    if parameter.type[0] == "f":
        wanted = _FLOATS[parameter.size]
        if type(value) not in (bool, int, float) and array.dtype != wanted:
            raise TypeError(f"{shown} must be {np.dtype(wanted)}, got {array.dtype}")
        return np.asarray(value, wanted).tobytes()
    if floats:
        # Bits of any kind, .b32, are floats, too.
        same = parameter.type[0] == "b" and array.dtype.itemsize == parameter.size
        if same and type(value) is not float:
            return array.tobytes()
        raise TypeError(f"{shown} must be an integer, got {value!r}")
    whole = operator.index(array.item())
    bits = 8 * parameter.size
    if not -(2 ** (bits - 1)) <= whole < 2**bits:
        raise ValueError(f"{shown} has {bits} bits, and {whole} does not fit")
    return (whole % 2**bits).to_bytes(parameter.size, "little")


def type_in_memory(where: str, kernel: Kernel, number: int, dtype: Any) -> str:
    """The PTX type of a traced scalar that a parameter is loaded from."""
    shown = f"{where}: {kernel.say(number)} of {kernel}"
    pass_pointer = "pass it as an array, which the kernel reads by a pointer (const T*)"
    if kernel.parameters is None or not kernel.is_ptx:
        raise ValueError(
            f"{shown} is traced, and machine code cannot be changed to load it: "
            f"{pass_pointer}, or bring the kernel as CUDA C++ or PTX"
        )
    parameter, dtype = kernel.parameters[number], np.dtype(dtype)
    if parameter.is_bytes:
        if parameter.size == 2 and dtype in (np.float16, jnp.bfloat16):
            return "b16"
        raise ValueError(
            f"{shown} is a struct or an array, so it cannot be traced: {pass_pointer}"
        )
    floats, bits = jnp.issubdtype(dtype, jnp.floating), dtype.itemsize * 8
    fits = {"f": floats, "s": not floats, "u": not floats, "b": True}
    wider = parameter.size == 8 and bits == 32  # jax has no 64 bits by default
    if not fits[parameter.type[0]] or not (dtype.itemsize == parameter.size or wider):
        raise TypeError(
            f"{shown} is traced as {dtype}, which it is not loaded from; cast it, for "
            f"example with .astype({_wanted(parameter)})"
        )
    if bits == 16:
        return "b16"
    kind = "f" if floats else "s" if dtype.kind == "i" else "u"
    return f"{kind}{bits}"


def _wanted(parameter: Any) -> str:
    if parameter.type[0] == "f":
        return f"jnp.float{min(parameter.size * 8, 32)}"
    return f"jnp.int{min(parameter.size * 8, 32)}"


def check_address(where: str, kernel: Kernel, number: int, size: int = 8) -> None:
    """Whether a parameter takes an array: its address, or a tensor map of it."""
    if kernel.parameters is None:
        return
    parameter = kernel.parameters[number]
    fits = parameter.takes_pointer() if size == 8 else parameter.size == size
    if not fits:
        what = "a pointer" if size == 8 else f"a tensor map, {size} bytes"
        raise TypeError(
            f"{where}: {kernel.say(number)} of {kernel} is not {what}; arrays and "
            "results take the first parameters, unless order= or names of scalars say "
            "otherwise"
        )


def _typed(where: str, kernel: Kernel, number: int, value: Any) -> bytes:
    """The bytes of a value whose type the kernel does not tell."""
    shown = f"{where}: {kernel.say(number)} of {kernel}"
    if type(value) in (bool, int, float):
        raise TypeError(
            f"{shown}: nothing tells its type; pass one of NumPy's, for example "
            f"np.{'float32' if isinstance(value, float) else 'int32'}({value!r})"
        )
    return _struct(where, kernel, number, np.asarray(value).tobytes())


def _struct(where: str, kernel: Kernel, number: int, value: bytes) -> bytes:
    if kernel.parameters is not None and len(value) != kernel.parameters[number].size:
        raise ValueError(
            f"{where}: {kernel.say(number)} of {kernel} has "
            f"{kernel.parameters[number].size} bytes, got {len(value)}"
        )
    return value
