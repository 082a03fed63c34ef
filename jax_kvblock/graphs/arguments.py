"""What `BlockBuilder` is given, checked, as a graph keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.graphs.operations import Parameter, Port
from jax_kvblock.graphs.types import ArrayType, TypeLike, array_type, is_word
from jax_kvblock.graphs.wiring import Pin, PortsHandle
from jax_kvblock.kernels.call import Packed, sizes_of
from jax_kvblock.kernels.functions import by_code
from jax_kvblock.kernels.kernel import Kernel

Ports = Sequence[str] | Mapping[str, TypeLike]


def counted_by(name: str, pin: Pin) -> str | None:
    """What a child's count is beside when it is an output by this name."""
    if not isinstance(pin.handle, PortsHandle):
        return None
    inner: Port = pin.handle.ports("output")[pin.number]
    if inner.companion_of is None:
        return None
    return name.removesuffix(inner.name.removeprefix(inner.companion_of))


def ports_of(where: str, given: Ports) -> tuple[Port, ...]:
    if isinstance(given, Mapping):
        return tuple(Port(n, said_type(where, t)) for n, t in given.items())
    if isinstance(given, str):
        raise TypeError(f"{where}: names come as a sequence, got {given!r}")
    return tuple(Port(name) for name in given)


def said_type(where: str, type: TypeLike | None) -> ArrayType | None:
    return None if type is None else array_type(where, type)


def parameter_of(where: str, name: str, default: Any, dtype: Any = None) -> Parameter:
    """A parameter whose default is checked. Without a dtype, that of the default."""
    if dtype is None:
        if default is None or isinstance(default, str):
            raise TypeError(
                f"{where}: scalar {name!r} has a number as its default, got {default!r}"
            )
        dtype = jnp.result_type(default)
    bare = Parameter(name, np.dtype(dtype))
    if isinstance(default, str) and not is_word(default):
        raise ValueError(f"{where}: {default!r} is no number and no word")
    if default is None or isinstance(default, str):
        return dataclasses.replace(bare, default=default)
    if isinstance(default, jax.Array):
        default = np.asarray(default)
    return dataclasses.replace(bare, default=bare.checked(where, default))


def inherited_default(pin: Pin, said: Any, default: Any) -> Any:
    """What a parameter's default is taken from, so that two can be compared."""
    if said is None and isinstance(pin.handle, PortsHandle):
        inner = pin.handle.ports("scalar")[pin.number].default
        if isinstance(inner, str):
            return f"{inner!r} of {pin.handle.name!r}"
    return default.item() if isinstance(default, np.generic) else default


def packed_number(where: str, kernel: Kernel, number: int, value: Any) -> Packed:
    if isinstance(value, jax.Array):
        value = np.asarray(value)[()]
    known = kernel.parameters
    if (
        type(value) in (bool, int)
        and known is not None
        and known[number].type[0] == "f"
    ):
        value = float(value)  # as a fallback gets it
    return Packed.of(kernel, number, value, where)


def check_once(where: str, what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: two {what} are named {name!r}")


def hashable(where: str, name: str, value: Any) -> Any:
    """An option of `kernel_call` that can be compared; sizes are checked."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    sizes = name in ("grid", "block", "cluster")
    if sizes and value is not None and not callable(value):
        return sizes_of(name, value, where)
    return by_code(value)
