"""`BlockBuilder`: describes a graph step by step, and checks each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_kvblock.graphs.arguments import (
    Ports,
    check_once,
    counted_by,
    hashable,
    inherited_default,
    packed_number,
    parameter_of,
    ports_of,
    said_type,
)
from jax_kvblock.graphs.commit import graph_of
from jax_kvblock.graphs.description import INPUT, PARAMETER, Source
from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import (
    CapturedOperation,
    Parameter,
    Port,
    companions,
)
from jax_kvblock.graphs.types import (
    ArrayType,
    TypeLike,
    array_type,
    is_word,
    scalar_type,
)
from jax_kvblock.graphs.wiring import (
    Draft,
    Handle,
    KernelHandle,
    Kind,
    Output,
    OwnPort,
    Pin,
    PortsHandle,
)
from jax_kvblock.kernels.functions import Function, key_of
from jax_kvblock.kernels.kernel import Kernel, from_ptx

After = Handle | Iterable[Handle]
# Of `kernel_call`; the others follow from the wires. Over a mesh, a graph runs inside
# of `jax.shard_map`, where the words are sizes of one device's part.
OPTIONS = {
    *("block", "cluster", "shared_memory", "cooperative"),
    *("vjp", "batch", "fallback", "debug"),
}
AnyHandle = TypeVar("AnyHandle", KernelHandle, PortsHandle)
KINDS = {"input": "an input", "output": "an output", "scalar": "a scalar"}


class BlockBuilder:
    """Builds a graph out of kernels, JAX functions and other graphs.

    Every method checks what it is told and raises what does not fit, with the names of
    both ends; `commit` returns the graph, a value.

    Types are text: `"float32[n, 3]"`, where a word is the same size everywhere in the
    graph.

    Args:
        name: of the graph, for messages and drawings.

    Example:
        ```python
        # (const float* a, const float* b, float* c, unsigned n)
        builder = BlockBuilder("VectorAdd")
        add = builder.add_kernel(kernels.from_cuda(source, "vector_add"), block=256)
        builder.input("A", add.in_("a"), "float32[n]")
        builder.input("B", add.in_("b"), "float32[n]")
        builder.output("C", add.out("c"), "float32[n]")
        builder.input_scalar("N", add.in_("n"), "n")
        vector_add = builder.commit()
        c = vector_add(a, b)["C"]
        ```
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._draft = Draft(name)
        # Of each parameter: whether its default was said, and what it was taken from.
        self._defaults: dict[str, tuple[bool, Any]] = {}
        self._committed = False

    # ---- nodes -----------------------------------------------------------------------

    def add_kernel(
        self,
        kernel: Kernel | str | Path,
        *,
        name: str | None = None,
        grid: Any = None,
        scalars: Mapping[int | str, Any] | None = None,
        tensor_maps: Mapping[int | str, Any] | None = None,
        after: After = (),
        **options: Any,
    ) -> KernelHandle:
        """Adds a kernel. Each of its parameters becomes an input, output or scalar.

        Args:
            kernel: a `Kernel`, or the path of PTX with a sidecar beside it.
            name: of the node; `None` takes the kernel's.
            grid: blocks in x, y, z, or a function of the inputs' shapes; `None`: enough
                for a thread to each element of the first output that is not appended
                to.
            scalars: parameters that never change, by number or name: numbers, or words
                of the graph's types, which are these sizes.
            tensor_maps: parameters that are tensor maps, by number or name.
            after: nodes that run before it, although it takes nothing from them.
            **options: of `kernel_call`: `block`, `cluster`, `shared_memory`,
                `cooperative`, `vjp`, `batch`, `fallback`, `debug`. `fallback` gets the
                inputs and then the scalars, each in the order of the parameters.
        """
        where = self._where("add_kernel")
        if not isinstance(kernel, Kernel):
            kernel = from_ptx(Path(kernel))
        for option in options:
            if option not in OPTIONS:
                raise TypeError(
                    f"{where}: {option!r} is none of {', '.join(sorted(OPTIONS))}"
                )

        def by_number(given: Mapping[int | str, Any] | None) -> dict[int, Any]:
            assert isinstance(kernel, Kernel)
            found: dict[int, Any] = {}
            for key, value in (given or {}).items():
                number = kernel.number_of(where, key)
                if number in found:
                    raise ValueError(f"{where}: {kernel.say(number)} came twice")
                found[number] = value
            return found

        fixed = by_number(scalars)
        for number, value in fixed.items():
            if isinstance(value, str) and not is_word(value):
                raise ValueError(f"{where}: {value!r} is no number and no word")
            if not isinstance(value, str):
                fixed[number] = packed_number(where, kernel, number, value)
        before = self._before(where, after)
        made = KernelHandle(
            *self._new(where, name, kernel.shown or kernel.name),
            kernel,
            fixed,
            by_number(tensor_maps),
            hashable(where, "grid", grid),
            {key: hashable(where, key, value) for key, value in options.items()},
        )
        return self._added(made, before)

    def add_captured(
        self,
        function: Callable[..., Any],
        *,
        inputs: Ports,
        outputs: Ports,
        scalars: Mapping[str, Any] | None = None,
        name: str | None = None,
        after: After = (),
    ) -> PortsHandle:
        """Adds a JAX function: of a library, of XLA's FFI, or of your own.

        Args:
            function: of the inputs, then the scalars; it returns the outputs, one or a
                sequence. Functions of the same code are the same.
            inputs, outputs: names, or a mapping from names to types.
            scalars: names and defaults, numbers.
            name: of the node; `None` takes the function's.
            after: nodes that run before it; it has to have an input then.
        """
        where = self._where("add_captured")
        if not callable(function):
            raise TypeError(f"{where}: {function!r} cannot be called")
        code = Function(function)
        before = self._before(where, after)
        new = self._new(where, name, code.name)
        ins, outs = ports_of(where, inputs), ports_of(where, outputs)
        numbers = tuple(parameter_of(where, *of) for of in (scalars or {}).items())
        names = [p.name for p in ins] + [p.name for p in numbers]
        check_once(where, "inputs or scalars", names)
        check_once(where, "outputs", [p.name for p in outs])
        made = CapturedOperation(new[0], code, ins, outs, numbers)
        return self._added(PortsHandle(*new, made), before)

    def add_child(
        self, graph: Graph, *, name: str | None = None, after: After = ()
    ) -> PortsHandle:
        """Adds a graph as a node. Parameters not exposed have their defaults."""
        where = self._where("add_child")
        if not isinstance(graph, Graph):
            raise TypeError(
                f"{where}: a child is a Graph, which commit() returns, got "
                f"{type(graph).__name__}"
            )
        before = self._before(where, after)
        made = PortsHandle(*self._new(where, name, graph.name), graph)
        return self._added(made, before)

    # ---- the graph's own ports -------------------------------------------------------

    def input(self, name: str, pin: Pin, type: TypeLike | None = None) -> Port:
        """Makes a pin an input of the graph. By the same name it goes to several.

        type: may be left out where the pin has one, or any array will do.
        """
        where = self._where("input", name)
        self._check_pin(where, pin, "input")
        draft, said = self._draft, said_type(where, type)
        names = [port.name for port in draft.inputs]
        if name not in names:
            self._check_new(where, name)
            draft.inputs.append(Port(name))
        number = names.index(name) if name in names else len(names)
        own = OwnPort(Source(INPUT, number), f"input {name!r}")
        known = draft.inputs[number].type
        try:
            draft.check_free(where, own, pin)
            both = given = draft.merged(where, pin, said)
            if known is not None and given is not None:
                both = known.merged(given)
                if both is None:
                    raise ValueError(f"{where}: it is {known}, and {pin} takes {given}")
        except Exception:
            del draft.inputs[len(names) :]
            raise
        port = draft.inputs[number] = Port(name, both or known)
        draft.set_type(pin, both or known, said)
        draft.source_of[pin] = own
        return port

    def input_scalar(
        self, name: str, pin: Pin, default: Any = None, *, dtype: Any = None
    ) -> Parameter:
        """Makes a by-value pin a parameter, which may change from call to call.

        Args:
            name: of the parameter. By the same name it goes to several pins.
            pin: of a kernel's parameter, also by `in_`; or a scalar of another node.
            default: a number, or a word of the graph's types: that size. `None`: none,
                or that of the child whose pin it is.
            dtype: of arrays that come for it; `None` takes the kernel's parameter, or
                the default's.
        """
        where = self._where("input_scalar", name)
        of_kernel = isinstance(pin, Pin) and isinstance(pin.handle, KernelHandle)
        if of_kernel and pin.kind == "input":
            pin = dataclasses.replace(pin, kind="scalar")
        self._check_pin(where, pin, "scalar")
        draft = self._draft
        names = [p.name for p in draft.parameters]
        number = names.index(name) if name in names else len(names)
        own = OwnPort(Source(PARAMETER, number), f"parameter {name!r}")
        draft.check_free(where, own, pin)
        found = dataclasses.replace(self._scalar(where, pin, default, dtype), name=name)
        taken = (default is not None, inherited_default(pin, default, found.default))
        if name not in names:
            self._check_new(where, name)
            draft.parameters.append(found)
            self._defaults[name] = taken
        parameter = draft.parameters[number]
        if parameter.dtype != found.dtype:
            raise ValueError(
                f"{where}: it is {parameter.dtype}, and {pin} takes {found.dtype}"
            )
        parameter = draft.parameters[number] = self._with_default(
            where, parameter, found, taken
        )
        draft.set_type(pin, scalar_type(found.dtype))
        draft.source_of[pin] = own
        return parameter

    def output(self, name: str, pin: Pin, type: TypeLike | None = None) -> Port:
        """Makes a pin an output of the graph.

        type: a kernel's result has to have one, with a shape: here or in `connect`.
            What is updated in place is as its input.
        """
        where = self._where("output", name)
        self._check_pin(where, pin, "output")
        said = said_type(where, type)
        merged = self._draft.merged(where, pin, said)
        port = self._output(
            where, Output(name, pin, companion_of=counted_by(name, pin))
        )
        self._draft.set_type(pin, merged, said)
        return dataclasses.replace(port, type=merged)

    def append_output(
        self,
        name: str,
        data: Pin,
        counter: Pin,
        max_capacity: int | str,
        type: TypeLike,
        *,
        capacity: Pin | None = None,
    ) -> tuple[Port, Port, Port]:
        """Makes two parameters of a kernel an output that the kernel appends to.

        Args:
            name: of the data. Beside it come `"<name> Count"`, int32, how many there
                are, and `"<name> Overflowed"`, whether there would have been more.
            data, counter: parameters of the kernel. The counter is 0 before a launch.
            max_capacity: how many there may be, a number or a word of the graph's
                types; `kvblock::append` writes no more.
            type: of one: `"float32[]"` of numbers, `"float32[8]"` of rows of 8.
            capacity: a scalar of the kernel that gets max_capacity.
        """
        where = self._where("append_output", name)
        self._check_pin(where, data, "output")
        self._check_pin(where, counter, "output")
        of_one_kernel = isinstance(data.handle, KernelHandle)
        taken = {*self._draft.counters, *self._draft.counters.values()}
        for pin in {data, counter} & taken:
            raise ValueError(f"{where}: {pin} is of another output already")
        if data.handle is not counter.handle or not of_one_kernel or data == counter:
            raise ValueError(
                f"{where}: data and counter are two parameters of one kernel, got "
                f"{data} and {counter}"
            )
        whole = isinstance(max_capacity, (int, np.integer)) and max_capacity >= 1
        if not (whole or is_word(max_capacity)):
            raise ValueError(
                f"{where}: max_capacity must be 1 or more, or a word, got "
                f"{max_capacity!r}"
            )
        size = max_capacity if isinstance(max_capacity, str) else int(max_capacity)
        one = array_type(where, type)
        if one.shape is None:
            raise ValueError(f"{where}: type must have a shape, got {one}")
        many = self._draft.merged(where, data, ArrayType(one.dtype, (size, *one.shape)))
        ports = (Port(name, many), *companions(name))
        outputs = [
            Output(port.name, data, offset, port.type, port.companion_of)
            for offset, port in enumerate(ports)
        ]
        for output in outputs:
            self._check_output(where, output.name)
        if capacity is not None:
            self._fix(where, data.handle, capacity, size)
        self._draft.set_type(data, many)
        self._draft.counters[data] = counter
        self._draft.outputs += outputs
        return ports

    # ---- wires -----------------------------------------------------------------------

    def connect(self, source: Pin, target: Pin, type: TypeLike | None = None) -> None:
        """Takes what one node computes to another. A source may have many targets.

        type: of both, where nothing else says it.
        """
        where = self._where("connect")
        self._check_pin(where, source, "output")
        scalar = isinstance(target, Pin) and target.kind == "scalar"
        self._check_pin(where, target, "scalar" if scalar else "input")
        if source.handle is target.handle:
            raise ValueError(
                f"{where}: {source} to {target} would close a cycle; what a kernel "
                "updates in place is an input and an output by one pin"
            )
        draft, said = self._draft, said_type(where, type)
        draft.check_free(where, source, target)
        given = draft.merged(where, source, said)
        if scalar:
            by_value = scalar_type(self._scalar(where, target, None, None).dtype)
            wanted: ArrayType | None = by_value
            fits = given is None or by_value.loads(given)
        else:
            merged = draft.merged(where, target, said)
            both = given.merged(merged) if given and merged else given or merged
            fits, wanted = both is not None or not (given or merged), merged
        if not fits:
            raise ValueError(
                f"{where}: {source} is {given}, and {target} takes {wanted}"
            )
        if scalar:
            draft.set_type(target, wanted)
        else:
            draft.set_type(target, both, said)
            draft.set_type(source, both, said)
        draft.source_of[target] = source

    def connect_children(
        self, source: PortsHandle, source_port: str, target: PortsHandle, port: str
    ) -> None:
        """Takes an output of a child to an input or a parameter of another."""
        where = self._where("connect_children")
        for child in (source, target):
            if not isinstance(child, PortsHandle):
                raise TypeError(
                    f"{where}: takes children and captured functions; connect() takes "
                    f"pins of kernels, got {getattr(child, 'name', child)!r}"
                )
        by_value = port in [p.name for p in target.operation.parameters]
        pin = target.scalar(port) if by_value else target.in_(port)
        self.connect(source.out(source_port), pin)

    def expose_input(self, name: str, child: PortsHandle, port: str) -> Port:
        """Makes an input of a child one of the graph."""
        return self.input(name, child.in_(port))

    def expose_output(self, name: str, child: PortsHandle, port: str) -> Port:
        """Makes an output of a child one of the graph, with its count beside it."""
        where = self._where("expose_output", name)
        if not isinstance(child, PortsHandle):
            raise TypeError(f"{where}: takes a child; output() takes a kernel's pin")
        beside = [p for p in child.operation.outputs if p.companion_of == port]
        pins = {name: child.out(port)} | {
            name + p.name.removeprefix(port): child.out(p.name) for p in beside
        }
        for own in pins:
            self._check_output(where, own)
        made = [self.output(own, pin) for own, pin in pins.items()]
        return made[0]

    def expose_parameter(
        self, name: str, child: PortsHandle, parameter: str, default: Any = None
    ) -> Parameter:
        """Makes a parameter of a child one of the graph; `None`: its default."""
        return self.input_scalar(name, child.scalar(parameter), default)

    # ---- the graph -------------------------------------------------------------------

    def commit(self) -> Graph:
        """The graph. Nothing can be added any more.

        Raises:
            ValueError: a pin has no value, a kernel's output no shape, a word no size,
                or nothing comes out.
        """
        where = self._where("commit")
        self._check_open(where)
        made = graph_of(where, self._draft)
        self._committed = True
        return made

    # ---- the parts -------------------------------------------------------------------

    def _where(self, method: str, port: str | None = None) -> str:
        about = "" if port is None else f" {port!r}"
        return f"BlockBuilder {self.name!r}: {method}{about}"

    def _new(
        self, where: str, name: str | None, usual: str
    ) -> tuple[str, int, BlockBuilder]:
        """The name, number and builder of a new node."""
        self._check_open(where)
        taken = {node.name for node in self._draft.nodes}
        if name is not None and name in taken:
            raise ValueError(f"{where}: there is a node {name!r} already")
        free, n = name or usual, 1
        while free in taken:
            n += 1
            free = f"{usual} {n}"
        return free, len(self._draft.nodes), self

    def _before(self, where: str, after: After) -> tuple[int, ...]:
        before = (after,) if isinstance(after, (Handle, str)) else tuple(after)
        for handle in before:
            self._check_own(where, handle)
        return tuple(handle.number for handle in before if isinstance(handle, Handle))

    def _added(self, handle: AnyHandle, before: tuple[int, ...]) -> AnyHandle:
        waits = isinstance(handle, KernelHandle) or handle.operation.inputs
        if before and not waits:
            raise ValueError(
                f"{self._where('after')}: {handle.name!r} has no input, so nothing "
                "keeps it behind another"
            )
        self._draft.nodes.append(handle)
        self._draft.after.append(before)
        return handle

    def _output(self, where: str, output: Output) -> Port:
        self._check_output(where, output.name)
        self._draft.outputs.append(output)
        return Port(output.name, output.type, output.companion_of)

    def _fix(self, where: str, handle: Handle, pin: Pin, value: Any) -> None:
        """Gives a scalar of a kernel a value that never changes."""
        self._check_pin(where, pin, "scalar")
        if pin.handle is not handle or not isinstance(handle, KernelHandle):
            raise ValueError(f"{where}: {pin} is no scalar of {handle.name!r}")
        self._scalar(where, pin, None, None)
        if pin in self._draft.source_of:
            raise ValueError(f"{where}: {pin} has a value already")
        if not isinstance(value, str):
            value = packed_number(where, handle.kernel, pin.number, value)
        handle.constants[pin.number] = value

    def _scalar(self, where: str, pin: Pin, default: Any, dtype: Any) -> Parameter:
        """What a scalar pin is as a parameter, which has the pin's name."""
        handle = pin.handle
        if isinstance(handle, PortsHandle):
            inner: Parameter = handle.ports("scalar")[pin.number]
            # A child's word is one of its own types, and stays its default.
            own = None if isinstance(inner.default, str) else inner.default
            return parameter_of(
                where, str(pin), own if default is None else default, inner.dtype
            )
        assert isinstance(handle, KernelHandle)
        if pin.number in handle.constants:
            raise ValueError(f"{where}: {pin} is fixed by scalars= already")
        known = handle.kernel.parameters
        if known is not None and known[pin.number].pointer:
            raise ValueError(f"{where}: {pin} is a pointer, so no scalar")
        if dtype is None:
            dtype = handle.dtype_of(where, pin.number, default)
        return parameter_of(where, str(pin), default, dtype)

    def _with_default(
        self, where: str, parameter: Parameter, found: Parameter, taken: Any
    ) -> Parameter:
        """The parameter with the default that its pins agree on, or that was said."""
        known = self._defaults[parameter.name]
        alike = key_of(taken[1]) == key_of(known[1])
        if taken[1] is None or alike or (known[0] and not taken[0]):
            return parameter
        if known[1] is not None:
            raise ValueError(
                f"{where}: it is {known[1]} by default, and {taken[1]} came; say one "
                "of them where it is first named"
            )
        self._defaults[parameter.name] = taken
        return dataclasses.replace(parameter, default=found.default)

    # ---- checks ----------------------------------------------------------------------

    def _check_open(self, where: str) -> None:
        if self._committed:
            raise ValueError(
                f"{where}: the graph is committed; another BlockBuilder makes another"
            )

    def _check_own(self, where: str, handle: Any) -> None:
        if not isinstance(handle, Handle) or handle.builder is not self:
            shown = repr(handle.name) if isinstance(handle, Handle) else repr(handle)
            raise ValueError(f"{where}: {shown} is no node of this graph")

    def _check_new(self, where: str, name: str) -> None:
        draft = self._draft
        if name in [p.name for p in draft.inputs] + [p.name for p in draft.parameters]:
            raise ValueError(
                f"{where}: there is an input or a parameter {name!r} already"
            )

    def _check_output(self, where: str, name: str) -> None:
        if name in [output.name for output in self._draft.outputs]:
            raise ValueError(f"{where}: there is an output {name!r} already")

    def _check_pin(self, where: str, pin: Any, kind: Kind) -> None:
        self._check_open(where)
        if not isinstance(pin, Pin):
            raise TypeError(
                f"{where}: takes a pin of a node, such as node.in_(0), got {pin!r}"
            )
        self._check_own(where, pin.handle)
        if pin.kind != kind:
            raise ValueError(
                f"{where}: {pin} was taken as {KINDS[pin.kind]}, and this takes "
                f"{KINDS[kind]}"
            )
