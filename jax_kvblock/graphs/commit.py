"""What was described becomes a graph, or it is said what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_kvblock.graphs.description import INPUT, Node, Source
from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import (
    CapturedOperation,
    KernelOperation,
    KernelPort,
    Operation,
    Port,
)
from jax_kvblock.graphs.types import ArrayType
from jax_kvblock.graphs.wiring import (
    Draft,
    Handle,
    KernelHandle,
    Output,
    OwnPort,
    Pin,
    PortsHandle,
)


def graph_of(where: str, draft: Draft) -> Graph:
    """The graph that was described. Raises what is missing."""
    if not draft.outputs:
        raise ValueError(f"{where}: the graph has no output, so nothing would run")
    operations: list[Operation] = []
    for handle in draft.nodes:
        if isinstance(handle, KernelHandle):
            operations.append(_kernel(where, handle, draft))
        else:
            operations.append(_checked(where, handle, draft))
    inputs = tuple(_own_input(number, draft) for number in range(len(draft.inputs)))
    _check_words(where, draft, inputs, operations)
    order = draft.order()
    place = {number: i for i, number in enumerate(order)}

    def source(start: Pin | OwnPort, offset: int = 0) -> Source:
        if isinstance(start, OwnPort):
            return start.source
        number = start.handle.number
        operation, port = operations[number], start.number
        if isinstance(operation, KernelOperation):
            port = operation.place_of(port)
        return Source(place[number], port + offset)

    def node(number: int) -> Node:
        handle, operation = draft.nodes[number], operations[number]
        numbers: Sequence[int] = range(len(operation.parameters))
        if isinstance(operation, KernelOperation):
            numbers = [n for n, _ in operation.scalars]
        starts = [draft.source_of.get(Pin(handle, "scalar", n)) for n in numbers]
        return Node(
            handle.name,
            operation,
            tuple(
                source(draft.source_of[pin]) for pin in draft.pins_of(handle, "input")
            ),
            tuple(None if start is None else source(start) for start in starts),
            tuple(place[n] for n in draft.after[number]),
            tuple(draft.said_of(pin) for pin in draft.pins_of(handle, "input")),
            _said_of_outputs(handle, operation, draft),
        )

    return Graph(
        draft.name,
        inputs,
        tuple(_port(output, draft) for output in draft.outputs),
        tuple(draft.parameters),
        tuple(node(number) for number in order),
        tuple(source(output.pin, output.offset) for output in draft.outputs),
    )


def _own_input(number: int, draft: Draft) -> Port:
    """With what is known of the pins that it goes to."""
    port = draft.inputs[number]
    known = port.type
    for pin, start in draft.source_of.items():
        if isinstance(start, OwnPort) and start.source == Source(INPUT, number):
            of_pin = draft.type_of(pin)
            if known is not None and of_pin is not None:
                of_pin = known.merged(of_pin)
            known = of_pin or known
    return dataclasses.replace(port, type=known)


def _said_of_outputs(
    handle: Handle, operation: Operation, draft: Draft
) -> tuple[tuple[ArrayType, ...], ...]:
    """For each port of the operation."""
    if not isinstance(operation, KernelOperation):
        pins = [Pin(handle, "output", i) for i in range(len(operation.outputs))]
        return tuple(draft.said_of(pin) for pin in pins)
    said: list[tuple[ArrayType, ...]] = []
    for port in operation.results:
        said.append(draft.said_of(Pin(handle, "output", port.parameter)))
        said += [] if port.counter is None else [(), ()]
    return tuple(said)


def _port(output: Output, draft: Draft) -> Port:
    behind = output.offset > 0
    type_of = output.type if behind else draft.type_of(output.pin)
    return Port(output.name, type_of, output.companion_of)


def _checked(where: str, handle: Handle, draft: Draft) -> Operation:
    """A function or a graph, all of whose inputs have values."""
    assert isinstance(handle, PortsHandle)
    for number in range(len(handle.operation.inputs)):
        pin = Pin(handle, "input", number)
        if pin not in draft.source_of:
            raise ValueError(f"{where}: {pin} has no value; connect it or expose it")
    return handle.operation


def _kernel(where: str, handle: KernelHandle, draft: Draft) -> KernelOperation:
    """A kernel, each of whose parameters is something."""
    counters = draft.counters.items()
    counter_of = {d.number: c.number for d, c in counters if d.handle is handle}
    arrays = [pin.number for pin in draft.pins_of(handle, "input")]
    scalars = draft.pins_of(handle, "scalar")
    outputs = draft.outputs_of(handle) - set(counter_of.values())
    _check_every_parameter(
        where,
        handle,
        {
            "an input": set(arrays),
            "a scalar": {pin.number for pin in scalars},
            "an output": outputs - {*arrays, *counter_of},
            "what it appends to": set(counter_of),
            "a counter": set(counter_of.values()),
            "fixed by scalars=": set(handle.constants),
        },
    )
    if not outputs:
        raise ValueError(
            f"{where}: {handle.name!r} has no output, and a kernel without one is "
            "never run"
        )
    results = []
    for number in sorted(outputs):
        pin = Pin(handle, "output", number)
        type_of = draft.type_of(pin)
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
    dtypes = []
    for pin in scalars:
        type_of = draft.type_of(pin)
        assert type_of is not None
        dtypes.append((pin.number, type_of.dtype))
    return KernelOperation(
        handle.name,
        handle.kernel,
        tuple(KernelPort(n, draft.type_of(Pin(handle, "input", n))) for n in arrays),
        tuple(results),
        tuple(dtypes),
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
    draft: Draft,
    inputs: Sequence[Port],
    operations: Sequence[Operation],
) -> None:
    """Whether something tells each size that a kernel's results or numbers have."""
    at_once = _words_of(inputs)
    said = [t for pin in draft.source_of for t in draft.said_of(pin)]
    known = at_once.union(*(type_of.words for type_of in said))
    for operation in operations:
        if isinstance(operation, CapturedOperation):
            known |= _words_of((*operation.inputs, *operation.outputs))
        elif isinstance(operation, KernelOperation):
            known |= _words_of(operation.inputs)

    def check(word: str, who: str, known: set[str] = known) -> None:
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
    for parameter in draft.parameters:
        if isinstance(parameter.default, str):
            check(parameter.default, f"parameter {parameter.name!r}", at_once)


def _words_of(ports: Sequence[Port]) -> set[str]:
    return {word for port in ports if port.type for word in port.type.words}
