"""A model as a program of each batch size, compiled and never run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jax_kvblock.core.checks import as_int
from jax_kvblock.core.models import as_function
from jax_kvblock.hardware.usage import MemoryUsage, usage_of

# How arguments are made of a batch size; or a sample of them.
Arguments: TypeAlias = "Callable[[int], Sequence[Any]] | Sequence[Any] | Any"


@dataclasses.dataclass(frozen=True)
class Step:
    """What is compiled: a model, how its arguments are made, and where they lie."""

    where: str
    model: Any
    arguments: Arguments
    devices: tuple[jax.Device, ...]
    donate_argnums: tuple[int, ...]

    def usage(self, batch_size: int) -> MemoryUsage:
        """What the program of a batch size takes, compiled for the devices."""
        return usage_of(self.where, self.compiled(batch_size))

    def compiled(self, batch_size: int) -> Any:
        function, own = as_function(self.where, self.model)
        first = jax.tree.map(self._struct, own)
        given = first + self.made(batch_size)
        # An argument that grows with the batch is cut where it grows.
        larger = first + self.made(2 * batch_size)
        places = _places(self.where, given, larger, self.devices)
        placed = jax.tree.map(_placed, given, places)
        donated = tuple(len(first) + i for i in self.donate_argnums)
        jitted: Any = function
        if not hasattr(function, "lower"):
            jitted = jax.jit(function, donate_argnums=donated)
        elif donated:
            raise TypeError(
                f"{self.where}: donate_argnums must be left out for a function that is "
                f"jitted already, got {self.donate_argnums}; pass them to its jit"
            )
        return jitted.lower(*placed).compile()

    def made(self, batch_size: int) -> tuple[Any, ...]:
        """The arguments of a batch size, as `ShapeDtypeStruct`s."""
        if callable(self.arguments):
            given = self.arguments(batch_size)
            if not isinstance(given, (tuple, list)):
                raise TypeError(
                    f"{self.where}: arguments must give a tuple of the model's "
                    f"arguments, got {type(given).__name__}; put a comma behind one"
                )
        else:
            sample = self.arguments
            given = sample if isinstance(sample, (tuple, list)) else (sample,)
            given = jax.tree.map(lambda x: self._grown(x, batch_size), tuple(given))
        return jax.tree.map(self._struct, tuple(given))

    def _grown(self, x: Any, batch_size: int) -> jax.ShapeDtypeStruct:
        struct = self._struct(x)
        if not struct.shape:
            raise ValueError(
                f"{self.where}: arguments must be arrays whose first dim is the batch, "
                f"got {struct.dtype}[]; pass a function of the batch size in place of "
                "a sample"
            )
        shape = (batch_size, *struct.shape[1:])
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=struct.sharding)

    def _struct(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape and dtype; of what is cut over a mesh already, also how."""
        sharding = getattr(x, "sharding", None)
        kept = sharding if isinstance(sharding, NamedSharding) else None
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=kept)
        if isinstance(x, (bool, int, float, complex)):
            return jax.eval_shape(lambda number: number, x)
        raise TypeError(
            f"{self.where}: arguments must be arrays, ShapeDtypeStructs or numbers, "
            f"got {type(x).__name__}; close the step over anything else"
        )


def _placed(x: Any, place: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _places(
    where: str, given: Any, larger: Any, devices: tuple[jax.Device, ...]
) -> Any:
    """Where each argument lies: whole, or cut along the dim that the batch sizes."""
    one: Any = jax.tree.structure(given)
    other: Any = jax.tree.structure(larger)
    if one != other:
        raise ValueError(
            f"{where}: arguments must have one structure for all batch sizes, got "
            f"{one} and {other}; make the same tree of each"
        )
    dims = jax.tree.map(lambda x, y: _grows(where, x, y), given, larger)
    if all(dim < 0 for dim in jax.tree.leaves(dims)):
        raise ValueError(
            f"{where}: arguments must depend on the batch size, got the same shapes "
            "for two of them; make a dim of one of them of it"
        )
    if len(devices) == 1:
        whole = SingleDeviceSharding(devices[0])
        return jax.tree.map(lambda x: x.sharding or whole, given)
    mesh = Mesh(np.array(devices), ("batch",))

    def cut(x: Any, dim: int) -> Sharding:
        spec = PartitionSpec() if dim < 0 else PartitionSpec(*[None] * dim, "batch")
        if x.sharding is None and dim >= 0 and x.shape[dim] % len(devices):
            raise ValueError(
                f"{where}: batch_size must be a multiple of the devices that it is cut "
                f"over, {len(devices)}, got an argument {x.dtype}{list(x.shape)}"
            )
        return x.sharding or NamedSharding(mesh, spec)

    return jax.tree.map(cut, given, dims)


def _grows(where: str, x: Any, y: Any) -> int:
    """The first dim that differs, -1 if there is none."""
    if x.ndim != y.ndim:
        raise ValueError(
            f"{where}: arguments must have the same rank for all batch sizes, got "
            f"{list(x.shape)} and {list(y.shape)}"
        )
    different = [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True))
                 if a != b]  # fmt: skip
    return different[0] if different else -1


def check_donated(where: str, numbers: object) -> tuple[int, ...]:
    """donate_argnums as a tuple."""
    given = numbers if isinstance(numbers, (tuple, list)) else (numbers,)
    found = [as_int(number) for number in given]
    if any(number is None or number < 0 for number in found):
        raise ValueError(
            f"{where}: donate_argnums must be numbers of the model's arguments, from "
            f"0, got {numbers!r}"
        )
    return tuple(number for number in found if number is not None)
