"""Nodes of a graph that is being built, their pins, and the wires between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_kvblock.graphs.description import Source
from jax_kvblock.graphs.operations import CapturedOperation, Operation, Port
from jax_kvblock.graphs.types import ArrayType
from jax_kvblock.kernels.kernel import Kernel

Kind = Literal["input", "output", "scalar"]


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """A node of a graph that is being built. `number`: among the nodes.

    `in_`, `out` and `scalar` are its pins, by number or by name.
    """

    name: str
    number: int
    builder: object

    def in_(self, which: int | str) -> Pin:
        return Pin(self, "input", self.find("input", which))

    def out(self, which: int | str) -> Pin:
        return Pin(self, "output", self.find("output", which))

    def scalar(self, which: int | str) -> Pin:
        return Pin(self, "scalar", self.find("scalar", which))

    def find(self, kind: Kind, which: int | str) -> int:
        """The number of a pin; raises where there is none."""
        raise NotImplementedError(kind)

    def say(self, kind: Kind, number: int) -> str:
        """What messages call a pin."""
        raise NotImplementedError(kind)


@dataclasses.dataclass(frozen=True)
class Pin:
    """An end of a wire: an input, output or scalar of a node."""

    handle: Handle
    kind: Kind
    number: int

    def __str__(self) -> str:
        return self.handle.say(self.kind, self.number)


@dataclasses.dataclass(frozen=True, eq=False)
class PortsHandle(Handle):
    """Of a node whose ports have names: a captured function, or a graph."""

    operation: Operation

    def ports(self, kind: Kind) -> Sequence[Any]:
        made = self.operation
        return {
            "input": made.inputs,
            "output": made.outputs,
            "scalar": made.parameters,
        }[kind]

    def find(self, kind: Kind, which: int | str) -> int:
        names = [port.name for port in self.ports(kind)]
        if which in names:
            return names.index(str(which))
        if isinstance(which, int) and 0 <= which < len(names):
            return which
        has = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"{self.name!r} has no {kind} {which!r}; it has {has}")

    def say(self, kind: Kind, number: int) -> str:
        return f"{kind} {self.ports(kind)[number].name!r} of {self.name!r}"

    def type_of(self, pin: Pin) -> ArrayType | None:
        """As this graph sees it: another graph's words are its own."""
        port: Port = self.ports(pin.kind)[pin.number]
        own = isinstance(self.operation, CapturedOperation)
        return port.type if own or port.type is None else port.type.without_words()


@dataclasses.dataclass(frozen=True, eq=False)
class KernelHandle(Handle):
    """Of a kernel. Its pins are its parameters, by number or by name.

    The same parameter may be an input and an output: it is updated in place.
    """

    kernel: Kernel
    constants: dict[int, Any]
    tensor_maps: dict[int, Any]
    grid: Any
    options: dict[str, Any]

    def in_(self, which: int | str) -> Pin:
        """A parameter that the kernel reads; by value, if it is no pointer."""
        number = self._number(which)
        return Pin(self, "input" if self._takes_array(number) else "scalar", number)

    def find(self, kind: Kind, which: int | str) -> int:
        number = self._number(which)
        if kind == "output" and not self._takes_array(number):
            raise ValueError(f"{self.say(kind, number)} is no pointer, so no output")
        return number

    def say(self, kind: Kind, number: int) -> str:
        return f"{self.kernel.say(number)} of {self.name!r}"

    def _number(self, which: int | str) -> int:
        return self.kernel.number_of(f"node {self.name!r}", which)

    def _takes_array(self, number: int) -> bool:
        known = self.kernel.parameters
        if known is None or number in self.tensor_maps:
            return True
        return known[number].takes_pointer()

    def dtype_of(self, number: int, default: Any) -> np.dtype[Any]:
        """The dtype of the arrays that a by-value parameter is loaded from."""
        if hasattr(default, "dtype"):
            return np.dtype(default.dtype)
        known = self.kernel.parameters
        if known is None or known[number].is_bytes:
            raise TypeError(
                f"nothing tells the type of {self.say('scalar', number)}; give a "
                "default of NumPy's, for example np.float32(2), or dtype="
            )
        kind, bits = known[number].type[0], 8 * min(known[number].size, 4)
        if kind == "f" or (kind == "b" and type(default) is float):
            return jnp.dtype(f"float{bits}")
        return jnp.dtype(f"uint{bits}" if kind == "u" else f"int{bits}")


@dataclasses.dataclass(frozen=True)
class OwnPort:
    """An input or a parameter of the graph, as the beginning of a wire."""

    source: Source
    said: str

    def __str__(self) -> str:
        return self.said


class Wiring:
    """Wires so far, from where each pin has its value, and the order that they ask."""

    def __init__(self) -> None:
        self.nodes: list[Handle] = []
        self.after: list[tuple[int, ...]] = []
        self.source_of: dict[Pin, Pin | OwnPort] = {}

    def add(self, where: str, source: Pin | OwnPort, target: Pin) -> None:
        """Raises where the target has a value already, and where a cycle would be."""
        known = self.source_of.get(target)
        if known is not None:
            raise ValueError(
                f"{where}: {target} has its value from {known} already, and {source} "
                "came"
            )
        if isinstance(source, Pin):
            self._check_cycle(where, source, target)
        self.source_of[target] = source

    def pins_of(self, handle: Handle, kind: Kind) -> list[Pin]:
        """Those that have a value, in order."""
        mine = [p for p in self.source_of if p.handle is handle and p.kind == kind]
        return sorted(mine, key=lambda pin: pin.number)

    def outputs_of(self, handle: Handle) -> set[int]:
        """Those that are taken somewhere."""
        return {
            source.number
            for source in self.source_of.values()
            if isinstance(source, Pin) and source.handle is handle
        }

    def needs(self) -> list[set[int]]:
        """For each node, those that run before it."""
        needs = [set(before) for before in self.after]
        for target, source in self.source_of.items():
            if isinstance(source, Pin):
                needs[target.handle.number].add(source.handle.number)
        return needs

    def order(self) -> list[int]:
        """Each node behind those that it needs, else as they were added."""
        needs, order = self.needs(), list[int]()
        while len(order) < len(needs):
            left = (n for n in range(len(needs)) if n not in order)
            order.append(next(n for n in left if needs[n] <= {*order}))
        return order

    def _check_cycle(self, where: str, source: Pin, target: Pin) -> None:
        """Whether the source's node needs the target's already."""
        needs, start, end = self.needs(), source.handle.number, target.handle.number
        came_from = {start: start}
        queue = [start]
        for here in queue:
            new = sorted(needs[here] - {*came_from})
            came_from |= dict.fromkeys(new, here)
            queue += new
        if end not in came_from:
            return
        path = [end]
        while path[-1] != start:
            path.append(came_from[path[-1]])
        names = [repr(self.nodes[n].name) for n in (*path, end)]
        raise ValueError(
            f"{where}: {source} to {target} would close a cycle: {' → '.join(names)}"
        )
