"""Error messages and small checks that several functions share.

Every message names the function, the argument, what was expected, what came, and the
fix, in that order.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np


def show(x: Any) -> str:
    """`bfloat16[4, 8]` for an array, the type's name for anything else."""
    if _is_array(x):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__


def _is_array(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("shape", "dtype", "ndim"))


def shown(value: Any) -> str:
    """`a traced int32[]` for what jit traces, the value itself for anything else."""
    traced = isinstance(value, jax.core.Tracer)
    return f"a traced {show(value)}" if traced else repr(value)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_array(where: str, name: str, x: Any, *, in_place: bool = False) -> Any:
    """The array: `x` itself, or what lies in a tensor of another library.

    JAX and NumPy arrays stay as they are, so that checks see what was passed; `to_jax`
    makes a JAX array of them when all is checked. Tensors come by DLPack. What these
    hold on the host is taken as NumPy's arrays are: where the default device is
    another, it goes there. in_place: it stays where it lies.
    """
    array = _array_in(where, name, x)
    if not isinstance(array, jax.Array) or array is x:
        return array
    check_held(where, name, array.dtype)
    if in_place or hasattr(x, "__jax_array__") or jax.default_backend() == "cpu":
        return array
    (device,) = array.devices()
    return jax.device_put(np.asarray(array)) if device.platform == "cpu" else array


def _array_in(where: str, name: str, x: Any) -> Any:
    """An array of JAX or NumPy as it is, a tensor's values where they lie."""
    if isinstance(x, (jax.Array, np.ndarray)):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{where}: {name} must be an array, got a ShapeDtypeStruct, which has no "
            "values; call it under jax.eval_shape or jax.jit(...).lower"
        )
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(where, name, x)
    if not _is_array(x):
        raise TypeError(
            f"{where}: {name} must be an array, got {type(x).__name__}; convert it "
            "with jnp.asarray"
        )
    return x


def _from_dlpack(where: str, name: str, x: Any) -> jax.Array:
    """A tensor's values where they lie, or copied once if its strides have gaps."""
    given = [x]
    if hasattr(x, "is_contiguous") and not x.is_contiguous():  # as torch calls it
        given.append(x.contiguous())
    for tensor in given:
        try:
            # Without x64, JAX would cut elements of 8 bytes in half.
            with jax.enable_x64(True):
                return jax.dlpack.from_dlpack(tensor)
        except (BufferError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
    raise BufferError(
        f"{where}: {name} must be an array that DLPack can share, got {show(x)} "
        f"({type(x).__module__}.{type(x).__name__}); {reason}"
    )


def check_static(where: str, name: str, x: Any, first: int = 0) -> None:
    """That dims from `first` on are numbers, not the symbols of `jax.export`."""
    if any(map(jax.export.is_symbolic_dim, x.shape[first:])):
        but = " but for its first dim" if first else ""
        raise NotImplementedError(
            f"{where}: {name} must have a shape of numbers{but}, got {show(x)}; shapes "
            "are compiled in: export a program for each size, or pad to one"
        )


def check_compiled(where: str, sizes: Iterable[Any]) -> None:
    """That sizes are numbers, where plain JAX would serve symbols of `jax.export`."""
    symbols = [str(n) for n in sizes if jax.export.is_symbolic_dim(n)]
    if symbols:
        raise NotImplementedError(
            f"{where}: sizes are compiled in, got the symbolic {symbols[0]!r}; "
            'pass implementation="xla", or export a program for each size'
        )


def to_jax(x: Any) -> jax.Array:
    """The JAX array of what `check_array` returned, and of lists of numbers or arrays.

    What is on the host goes to the device by `device_put`, which is explicit: a
    transfer guard lets it pass.
    """
    if isinstance(x, jax.Array):
        return x
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return jnp.asarray(x)
    return jax.device_put(np.asarray(x))


def as_array(where: str, name: str, x: Any) -> jax.Array:
    """`check_array` and `to_jax` in one, also of lists."""
    if isinstance(x, jax.ShapeDtypeStruct) or hasattr(x, "__dlpack__"):
        x = check_array(where, name, x)
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        array = to_jax(x)
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


def known_integers(where: str, name: str, x: Any) -> np.ndarray | None:
    """`known_values` of what `check_int32` takes as an array, of integers of any width.

    A tensor of another library is looked at where it lies: on the host its values are
    known wherever programs run.
    """
    return known_values(_array_in(where, name, x))


def check_dtype(where: str, name: str, dtype: Any) -> np.dtype:
    """A dtype whose elements are whole bytes: 1, 2, 4, 8 or 16 of them."""
    try:
        if dtype is None:  # NumPy would take it for float64
            raise TypeError
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


def check_held(where: str, name: str, dtype: np.dtype) -> None:
    """Whether arrays of this dtype exist; without x64, JAX makes float32 of float64."""
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise TypeError(
            f"{where}: {name} must be a dtype that JAX can hold, got {dtype}, of which "
            f"it makes {held}; jax.config.update('jax_enable_x64', True) holds it"
        )


_RESHAPE = {0: "pass a scalar", 1: "flatten it with .reshape(-1)"}


def check_int32(where: str, name: str, x: Any, shape: str, ndim: int) -> jax.Array:
    """An int32 array of rank `ndim`, of integers of any width and kind.

    They may come as an array, a tensor of another library, a list or range of integers,
    an object whose `ids` are any of these, or a Python int where `ndim` is 0. What does
    not fit in int32 is an error where it is known on the host, and else becomes −1.
    """
    return to_jax(check_int32_in_place(where, name, x, shape, ndim))


def check_int32_in_place(
    where: str, name: str, x: Any, shape: str, ndim: int
) -> jax.Array | np.ndarray:
    """`check_int32` of what stays where it is: what is on the host comes as a copy."""
    x = getattr(x, "ids", x)
    if isinstance(x, range):
        x = list(x)
    if isinstance(x, (list, tuple)):
        x = _of_list(where, name, x, shape)
    elif ndim == 0 and isinstance(x, int) and not isinstance(x, bool):
        x = np.asarray(x)
    if not isinstance(x, jax.Array):
        x = _on_host(_array_in(where, name, x))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{where}: {name} must be int32{shape}, got {show(x)}; cast it with "
            ".astype(jnp.int32)"
        )
    if isinstance(x, np.ndarray):
        if (
            x.dtype != np.int32
            and x.size
            and (x.max() > _INT32.max or x.min() < _INT32.min)
        ):
            raise ValueError(
                f"{where}: {name} must fit in int32, got values from {x.min()} to "
                f"{x.max()}"
            )
        x = x.astype(np.int32)
    if x.ndim != ndim:
        raise ValueError(
            f"{where}: {name} must be int32{shape}, got {show(x)}; "
            + _RESHAPE.get(ndim, f"reshape it to {shape}")
        )
    return _narrowed(x) if isinstance(x, jax.Array) else x


_INT32 = np.iinfo(np.int32)


def _on_host(x: Any) -> Any:
    """What a tensor of another library holds, as a NumPy array where that can be."""
    values = known_values(x)
    return x if values is None else values


def _of_list(where: str, name: str, given: Sequence[Any], shape: str) -> Any:
    """An array of a list of integers, or of arrays and integers."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given)):
        return jnp.asarray(given)
    try:
        x = np.asarray(given) if len(given) else np.zeros(0, np.int32)
    except ValueError:
        raise ValueError(
            f"{where}: {name} must be int32{shape}, got rows that differ in "
            f"length, {given!r}; fill them up to one length"
        ) from None
    if x.dtype.kind not in "fO":
        return x
    # NumPy has no integers for these; if they are some, they are too wide or a mixture.
    elements = np.asarray(given, object).ravel()
    numbers = [i for i in map(as_int, elements) if i is not None]
    if len(numbers) < len(elements):
        if x.dtype != object:
            return x
        raise TypeError(
            f"{where}: {name} must be int32{shape}, got {given!r}; pass integers"
        )
    if any(not _INT32.min <= number <= _INT32.max for number in numbers):
        raise ValueError(f"{where}: {name} must fit in int32, got {given!r}")
    return np.array(numbers, np.int32).reshape(x.shape)


def _narrowed(x: jax.Array) -> jax.Array:
    """int32 of any integers; −1 for those that do not fit."""
    if x.dtype == jnp.int32:
        return x
    if x.dtype.itemsize < 8:
        return _narrow(x)
    with jax.enable_x64(True):  # a tensor of another library may be wider than JAX's
        return _narrow(x)


@jax.jit  # one program: a transfer guard would stop the constants of single steps
def _narrow(x: jax.Array) -> jax.Array:
    given = jnp.iinfo(x.dtype)
    low, high = max(given.min, _INT32.min), min(given.max, _INT32.max)
    return jnp.where((x >= low) & (x <= high), x.astype(jnp.int32), -1)


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


def check_count(where: str, name: str, value: Any) -> int:
    """An integer of at least 0, of 64 bits."""
    if type(value) is int and 0 <= value < 2**63:  # the common case, at every step
        return value
    number = check_integer(where, name, value, "pass an int")
    if number < 0:
        raise ValueError(f"{where}: {name} must be at least 0, got {number}")
    if number >= 2**63:
        raise ValueError(f"{where}: {name} must be below 2^63, got {number}")
    return int(number)


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


# How jax.random takes raw keys of so many words. Which of them it is makes no
# difference: their words count.
_KINDS_OF_KEY = {(2,): "threefry2x32", (4,): "rbg"}


def check_random_key(where: str, name: str, key: Any, fix: str) -> jax.Array:
    """One key of jax.random, typed."""
    must = f"{where}: {name} must be a key of jax.random, got"
    # By its class: nnx.Rngs has attributes of any name.
    if not (isinstance(key, jax.Array) or hasattr(type(key), "dtype")):
        raise TypeError(f"{must} {type(key).__name__}; {fix}")
    array = check_array(where, name, key)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and array.ndim == 0:
        typed: jax.Array = array
        return typed
    if array.dtype != jnp.uint32 or array.shape not in _KINDS_OF_KEY:
        raise TypeError(f"{must} {show(array)}; {fix}")
    return jax.random.wrap_key_data(to_jax(array), impl=_KINDS_OF_KEY[array.shape])


def check_heads(where: str, heads: Any, num_kv_heads: int) -> tuple[int, int]:
    """The head range as (start, stop), the whole range for None."""
    if heads is None:
        return 0, num_kv_heads
    if isinstance(heads, (range, slice)):
        if heads.step not in (None, 1):
            raise ValueError(
                f"{where}: heads must lie side by side, with a step of 1, got {heads!r}"
            )
        heads = _ends(heads, num_kv_heads)
    try:
        start, stop = heads
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: heads must be a pair (start, stop), a range or a slice, got "
            f"{shown(heads)}"
        ) from None
    first, last = (
        None if isinstance(end, jax.Array) else as_int(end) for end in (start, stop)
    )
    if first is None or last is None:
        raise TypeError(
            f"{where}: heads must be a pair of Python integers, got {shown(heads)}; "
            "the range sets the result's shape, so it cannot be traced"
        )
    if not 0 <= first < last <= num_kv_heads:
        raise ValueError(
            f"{where}: heads must satisfy 0 <= start < stop <= {num_kv_heads} "
            f"(num_kv_heads), got ({first}, {last})"
        )
    return first, last


def _ends(heads: range | slice, num_kv_heads: int) -> tuple[Any, Any]:
    """The ends of a range; those of a slice may be left out or count from the end."""
    if isinstance(heads, range):
        return heads.start, heads.stop
    start = 0 if heads.start is None else heads.start
    stop = num_kv_heads if heads.stop is None else heads.stop
    start, stop = (
        end + num_kv_heads if (as_int(end) or 0) < 0 else end for end in (start, stop)
    )
    return start, stop
