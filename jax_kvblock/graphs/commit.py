"""What was described becomes a graph, or it is said what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_kvblock.graphs.description import Node, Source
from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import (
    CapturedOperation,
    KernelOperation,
    KernelPort,
    Operation,
    Parameter,
    Port,
)
from jax_kvblock.graphs.types import ArrayType
from jax_kvblock.graphs.wiring import (
    Handle,
    KernelHandle,
    OwnPort,
    Pin,
    PortsHandle,
    Wiring,
)


def graph_of(
    where: str,
    name: str,
    wiring: Wiring,
    inputs: Sequence[Port],
    parameters: Sequence[Parameter],
    outputs: Sequence[tuple[Port, Pin, int]],
    types: Mapping[Pin, ArrayType],
    counters: Mapping[Pin, Pin],
) -> Graph:
    """The graph of these nodes, wires and ports; outputs as `BlockBuilder` has them."""
    if not outputs:
        raise ValueError(f"{where}: the graph has no output, so nothing would run")
    exposed = {pin for _, pin, _ in outputs}
    operations: list[Operation] = []
    for handle in wiring.nodes:
        if isinstance(handle, KernelHandle):
            made = _kernel(where, handle, wiring, exposed, types, counters)
            operations.append(made)
        else:
            operations.append(_checked(where, handle, wiring))
    _check_words(where, inputs, parameters, operations)
    order = wiring.order()
    place = {number: i for i, number in enumerate(order)}

    def source(start: Pin | OwnPort, more: int = 0) -> Source:
        if isinstance(start, OwnPort):
            return start.source
        number = start.handle.number
        operation, port = operations[number], start.number
        if isinstance(operation, KernelOperation):
            port = operation.place_of(port)
        return Source(place[number], port + more)

    def node(number: int) -> Node:
        handle, operation = wiring.nodes[number], operations[number]
        ins = wiring.pins_of(handle, "input")
        numbers = [
            Pin(handle, "scalar", i)
            for i in (
                [n for n, _ in operation.scalars]
                if isinstance(operation, KernelOperation)
                else range(len(operation.parameters))
            )
        ]
        starts = [wiring.source_of.get(pin) for pin in numbers]
        return Node(
            handle.name,
            operation,
            tuple(source(wiring.source_of[pin]) for pin in ins),
            tuple(None if start is None else source(start) for start in starts),
            tuple(place[n] for n in wiring.after[number]),
        )

    return Graph(
        name,
        tuple(inputs),
        tuple(port for port, _, _ in outputs),
        tuple(parameters),
        tuple(node(number) for number in order),
        tuple(source(pin, more) for _, pin, more in outputs),
    )


def _checked(where: str, handle: Handle, wiring: Wiring) -> Operation:
    """A function or a graph, all of whose inputs have values."""
    assert isinstance(handle, PortsHandle)
    for number in range(len(handle.operation.inputs)):
        pin = Pin(handle, "input", number)
        if pin not in wiring.source_of:
            raise ValueError(f"{where}: {pin} has no value; connect it or expose it")
    return handle.operation


def _kernel(
    where: str,
    handle: KernelHandle,
    wiring: Wiring,
    exposed: set[Pin],
    types: Mapping[Pin, ArrayType],
    counters: Mapping[Pin, Pin],
) -> KernelOperation:
    """A kernel, each of whose parameters is something."""
    counter_of = {d.number: c.number for d, c in counters.items() if d.handle is handle}
    arrays = [pin.number for pin in wiring.pins_of(handle, "input")]
    scalars = wiring.pins_of(handle, "scalar")
    outputs = wiring.outputs_of(handle)
    outputs |= {pin.number for pin in exposed if pin.handle is handle}
    outputs -= set(counter_of.values())
    _check_every_parameter(
        where,
        handle,
        {
            "an input": set(arrays),
            "a scalar": {pin.number for pin in scalars},
            "an output": outputs - set(arrays),
            "a counter": set(counter_of.values()),
            "fixed by scalars=": set(handle.constants),
        },
    )
    if not outputs:
        raise ValueError(
            f"{where}: {handle.name!r} has no output, and what has none is never run"
        )
    results = []
    for number in sorted(outputs):
        pin = Pin(handle, "output", number)
        type_of = types.get(pin)
        in_place = number in arrays
        if not in_place and (type_of is None or not type_of.is_known):
            raise ValueError(
                f"{where}: {pin} has no shape; say it where it is connected or made an "
                "output: 'float32[n, 3]'"
            )
        known = None if in_place else type_of
        results.append(KernelPort(number, known, counter_of.get(number)))
    if handle.grid is None and all(port.counter is not None for port in results):
        raise ValueError(
            f"{where}: {handle.name!r} appends to all its outputs, so nothing says how "
            "many threads it takes; pass grid= to add_kernel"
        )
    return KernelOperation(
        handle.name,
        handle.kernel,
        tuple(KernelPort(n, types.get(Pin(handle, "input", n))) for n in arrays),
        tuple(results),
        tuple((pin.number, types[pin].dtype) for pin in scalars),
        tuple(sorted(handle.constants.items())),
        handle.grid,
        tuple(sorted(handle.tensor_maps.items())),
        tuple(sorted(handle.options.items())),
    )


def _check_every_parameter(
    where: str, handle: KernelHandle, roles: Mapping[str, set[int]]
) -> None:
    known = handle.kernel.parameters
    count = len(known or set().union(*roles.values()))
    for number in range(count):
        has = [role for role, numbers in roles.items() if number in numbers]
        shown = handle.say("input", number)
        if not has:
            raise ValueError(
                f"{where}: {shown} has no value: make it an input, an output or a "
                "scalar, connect it, or fix it with scalars="
            )
        if len(has) > 1:
            raise ValueError(f"{where}: {shown} is {' and '.join(has)}")


def _check_words(
    where: str,
    inputs: Sequence[Port],
    parameters: Sequence[Parameter],
    operations: Sequence[Operation],
) -> None:
    """Whether something tells each size that a kernel's results or numbers have."""
    known = _words_of(inputs)
    for operation in operations:
        if isinstance(operation, CapturedOperation):
            known |= _words_of((*operation.inputs, *operation.outputs))
        elif isinstance(operation, KernelOperation):
            known |= _words_of(operation.inputs)

    def check(word: str, who: str) -> None:
        if word not in known:
            has = ", ".join(map(repr, sorted(known))) or "none"
            raise ValueError(
                f"{where}: {who} has the size {word!r}, which no input tells; known "
                f"are {has}"
            )

    for operation in operations:
        if not isinstance(operation, KernelOperation):
            continue
        for port in operation.outputs:
            for word in sorted(_words_of([port])):
                check(word, f"{port.name!r} of {operation.name!r}")
        for number, value in operation.constants:
            if isinstance(value, str):
                check(value, f"scalar {number} of {operation.name!r}")
    for parameter in parameters:
        if isinstance(parameter.default, str):
            check(parameter.default, f"parameter {parameter.name!r}")


def _words_of(ports: Sequence[Port]) -> set[str]:
    return {word for port in ports if port.type for word in port.type.words}
