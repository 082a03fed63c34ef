"""A graph that is being built: its nodes, their pins, the wires between them."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_kvblock.graphs.description import Source
from jax_kvblock.graphs.operations import (
    CapturedOperation,
    Operation,
    Parameter,
    Port,
)
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

    def dtype_of(self, where: str, number: int, default: Any) -> np.dtype[Any]:
        """The dtype of the arrays that a by-value parameter is loaded from."""
        known = self.kernel.parameters
        if known is None or known[number].is_bytes:
            if hasattr(default, "dtype"):
                return np.dtype(default.dtype)
            raise TypeError(
                f"{where}: nothing tells the type of {self.say('scalar', number)}; "
                "input_scalar takes a default of NumPy's, such as np.float32(2), or "
                "dtype="
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


class Output(NamedTuple):
    """An output of the graph. offset: how many ports behind that of the pin."""

    name: str
    pin: Pin
    offset: int = 0
    type: ArrayType | None = None  # of a port behind
    companion_of: str | None = None


class Draft:
    """What was said of a graph so far: its nodes, wires, types and ports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Handle] = []
        self.after: list[tuple[int, ...]] = []
        self.inputs: list[Port] = []
        self.parameters: list[Parameter] = []
        self.outputs: list[Output] = []
        self.counters: dict[Pin, Pin] = {}  # of what is appended to
        self.source_of: dict[Pin, Pin | OwnPort] = {}
        self._types: dict[Pin, ArrayType] = {}
        self._said: dict[Pin, list[ArrayType]] = {}

    # ---- types -----------------------------------------------------------------------

    def type_of(self, pin: Pin) -> ArrayType | None:
        known = self._types.get(_place(pin))
        if isinstance(pin.handle, PortsHandle) and pin.kind != "scalar":
            own = pin.handle.type_of(pin)
            if known is None or own is None:
                return known or own
            return own.merged(known)
        return known

    def merged(self, where: str, pin: Pin, said: ArrayType | None) -> ArrayType | None:
        """The type of a pin, when this is said of it, too."""
        known = self.type_of(pin)
        if known is None or said is None:
            return known or said
        both = known.merged(said)
        if both is None:
            raise ValueError(f"{where}: {pin} is {known}, and {said} is asked for")
        return both

    def set_type(
        self, pin: Pin, type: ArrayType | None, said: ArrayType | None = None
    ) -> None:
        """type: what is known of the pin by now. said: a part of it, in its words."""
        if type is not None:
            self._types[_place(pin)] = type
        if said is not None:
            self._said.setdefault(_place(pin), []).append(said)

    def said_of(self, pin: Pin) -> tuple[ArrayType, ...]:
        """All that was said of a pin; a call is held to each of it."""
        return tuple(dict.fromkeys(self._said.get(_place(pin), [])))

    # ---- wires -----------------------------------------------------------------------

    def check_free(self, where: str, source: Pin | OwnPort, target: Pin) -> None:
        """Raises where the target has a value already, and where a cycle would be."""
        known = self.source_of.get(target)
        if known is not None:
            raise ValueError(
                f"{where}: {target} has its value from {known} already, so {source} "
                "cannot give it one"
            )
        if isinstance(source, Pin):
            self._check_cycle(where, source, target)

    def pins_of(self, handle: Handle, kind: Kind) -> list[Pin]:
        """Those that have a value, in order."""
        mine = [p for p in self.source_of if p.handle is handle and p.kind == kind]
        return sorted(mine, key=lambda pin: pin.number)

    def outputs_of(self, handle: Handle) -> set[int]:
        """Those that are taken somewhere."""
        taken = [s for s in self.source_of.values() if isinstance(s, Pin)]
        taken += [output.pin for output in self.outputs]
        return {pin.number for pin in taken if pin.handle is handle}

    def needs(self) -> list[set[int]]:
        """For each node, those that run before it."""
        needs = [set(before) for before in self.after]
        for target, source in self.source_of.items():
            if isinstance(source, Pin):
                needs[target.handle.number].add(source.handle.number)
        return needs

    def order(self) -> list[int]:
        """Each node behind those that it needs, else as they were added."""
        waits = [len(before) for before in self.needs()]
        followers: list[list[int]] = [[] for _ in self.nodes]
        for number, before in enumerate(self.needs()):
            for other in before:
                followers[other].append(number)
        ready = [number for number, count in enumerate(waits) if count == 0]
        order = []
        while ready:
            order.append(heapq.heappop(ready))
            for later in followers[order[-1]]:
                waits[later] -= 1
                if waits[later] == 0:
                    heapq.heappush(ready, later)
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


def _place(pin: Pin) -> Pin:
    """A kernel's parameter has one type, as an input and as an output."""
    by_kernel = isinstance(pin.handle, KernelHandle) and pin.kind == "output"
    return dataclasses.replace(pin, kind="input") if by_kernel else pin
