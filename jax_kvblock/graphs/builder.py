"""`BlockBuilder`: describes a graph step by step, and checks each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kvblock.graphs.commit import graph_of
from jax_kvblock.graphs.description import INPUT, PARAMETER, Source
from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import (
    CapturedOperation,
    Operation,
    Parameter,
    Port,
    companions,
)
from jax_kvblock.graphs.types import ArrayType, TypeLike, array_type
from jax_kvblock.graphs.wiring import (
    Handle,
    KernelHandle,
    Kind,
    OwnPort,
    Pin,
    PortsHandle,
    Wiring,
)
from jax_kvblock.kernels.functions import Function, by_code
from jax_kvblock.kernels.kernel import Kernel, from_ptx

Ports = Sequence[str] | Mapping[str, TypeLike]
After = Handle | Iterable[Handle]
# Of `kernel_call`; the others follow from the wires.
OPTIONS = {
    *("block", "cluster", "shared_memory", "cooperative"),
    *("vjp", "sharding", "batch", "fallback", "debug"),
}


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
        self._wiring = Wiring()
        self._inputs: list[Port] = []
        self._parameters: list[Parameter] = []
        self._outputs: list[tuple[Port, Pin, int]] = []  # so many behind the pin's own
        self._said: set[str] = set()  # parameters whose default was said
        self._types: dict[Pin, ArrayType] = {}
        self._counters: dict[Pin, Pin] = {}  # of what is appended to
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
                `cooperative`, `vjp`, `sharding`, `batch`, `fallback`, `debug`.
                `fallback` gets the inputs and then the scalars, each in the order of
                the parameters.
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
            return {kernel.number_of(where, k): v for k, v in (given or {}).items()}

        made = KernelHandle(
            *self._new(where, name or kernel.shown or kernel.name, after),
            kernel,
            by_number(scalars),
            by_number(tensor_maps),
            by_code(grid),
            {key: _hashable(value) for key, value in options.items()},
        )
        self._wiring.nodes.append(made)
        return made

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
        new = self._new(where, name or code.name, after)
        ins, outs = _ports(where, inputs), _ports(where, outputs)
        numbers = tuple(
            Parameter(key, jnp.result_type(value), value)
            for key, value in (scalars or {}).items()
        )
        _check_once(where, [*(p.name for p in ins), *(p.name for p in numbers)])
        _check_once(where, [p.name for p in outs])
        if self._wiring.after[-1] and not ins:
            raise ValueError(
                f"{where}: {new[0]!r} has no input, so nothing keeps it behind another"
            )
        return self._ported(new, CapturedOperation(new[0], code, ins, outs, numbers))

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
        return self._ported(self._new(where, name or graph.name, after), graph)

    # ---- the graph's own ports -------------------------------------------------------

    def input(self, name: str, pin: Pin, type: TypeLike | None = None) -> Port:
        """Makes a pin an input of the graph. By the same name it goes to several.

        type: may be left out where the pin has one, or any array will do.
        """
        where = self._where("input", name)
        self._check_pin(where, pin, "input")
        given = self._type_of(where, pin, type)
        known = [port.name for port in self._inputs]
        if name not in known:
            self._check_new(where, name)
            self._inputs.append(Port(name, given))
            known.append(name)
        number = known.index(name)
        port = self._inputs[number]
        if port.type and given and port.type.differs(given):
            raise ValueError(f"{where}: it is {port.type}, and {pin} takes {given}")
        own = OwnPort(Source(INPUT, number), f"input {name!r}")
        self._wiring.add(where, own, pin)
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
        if isinstance(pin, Pin) and isinstance(pin.handle, KernelHandle):
            pin = dataclasses.replace(pin, kind="scalar")
        self._check_pin(where, pin, "scalar")
        found = dataclasses.replace(self._scalar(where, pin, default, dtype), name=name)
        known = [p.name for p in self._parameters]
        if name not in known:
            self._check_new(where, name)
            self._parameters.append(found)
            known.append(name)
        number = known.index(name)
        parameter = self._parameters[number]
        if parameter.dtype != found.dtype:
            raise ValueError(
                f"{where}: it is {parameter.dtype}, and {pin} takes {found.dtype}"
            )
        parameter = self._parameters[number] = self._with_default(
            where, parameter, found, said=default is not None
        )
        own = OwnPort(Source(PARAMETER, number), f"parameter {name!r}")
        self._wiring.add(where, own, pin)
        return parameter

    def output(self, name: str, pin: Pin, type: TypeLike | None = None) -> Port:
        """Makes a pin an output of the graph.

        type: a kernel's result has to have one, with a shape: here or in `connect`.
            What is updated in place is as its input.
        """
        where = self._where("output", name)
        self._check_pin(where, pin, "output")
        port = Port(name, self._type_of(where, pin, type), _counted(name, pin))
        return self._output(where, port, pin)

    def append_output(
        self,
        name: str,
        data: Pin,
        counter: Pin,
        max_capacity: int | str,
        type: TypeLike,
    ) -> tuple[Port, Port, Port]:
        """Makes two parameters of a kernel an output that the kernel appends to.

        Args:
            name: of the data. Beside it come `"<name> Count"`, int32, how many there
                are, and `"<name> Overflowed"`, whether there would have been more.
            data, counter: parameters of the kernel. The counter is 0 before a launch.
            max_capacity: how many there may be, a number or a word of the graph's
                types; `kvblock::append` writes no more.
            type: of one: `"float32[]"` of numbers, `"float32[8]"` of rows of 8.
        """
        where = self._where("append_output", name)
        self._check_pin(where, data, "output")
        self._check_pin(where, counter, "output")
        of_one_kernel = isinstance(data.handle, KernelHandle)
        if data.handle is not counter.handle or not of_one_kernel or data == counter:
            raise ValueError(
                f"{where}: data and counter are two parameters of one kernel, got "
                f"{data} and {counter}"
            )
        if not (isinstance(max_capacity, str) or max_capacity >= 1):
            raise ValueError(
                f"{where}: max_capacity must be 1 or more, got {max_capacity}"
            )
        one = array_type(where, type)
        if one.shape is None:
            raise ValueError(f"{where}: type must have a shape, got {one}")
        many = ArrayType(one.dtype, (max_capacity, *one.shape))
        self._type_of(where, data, many)
        self._type_of(where, counter, companions(name)[0].type)
        self._counters[data] = counter
        ports = (Port(name, many), *companions(name))
        for more, port in enumerate(ports):
            self._output(where, port, data, more)
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
        given = self._type_of(where, source, type)
        if scalar:
            found = self._scalar(where, target, None, None)
            wanted: ArrayType | None = ArrayType(found.dtype, ())
        else:
            wanted = self._type_of(where, target, type)
        wrong = given and wanted and given.differs(wanted)
        if scalar and given and wanted:
            wrong = not wanted.loads(given)
        if wrong:
            raise ValueError(
                f"{where}: {source} is {given}, and {target} takes {wanted}"
            )
        self._wiring.add(where, source, target)

    def connect_children(
        self, source: PortsHandle, source_port: str, target: PortsHandle, port: str
    ) -> None:
        """Takes an output of a child to an input or a parameter of another."""
        by_value = port in [p.name for p in target.operation.parameters]
        pin = target.scalar(port) if by_value else target.in_(port)
        self.connect(source.out(source_port), pin)

    def expose_input(self, name: str, child: PortsHandle, port: str) -> Port:
        """Makes an input of a child one of the graph."""
        return self.input(name, child.in_(port))

    def expose_output(self, name: str, child: PortsHandle, port: str) -> Port:
        """Makes an output of a child one of the graph, with its count beside it."""
        made = self.output(name, child.out(port))
        for beside in child.operation.outputs:
            if beside.companion_of == port:
                own = name + beside.name.removeprefix(port)
                where = self._where("expose_output", own)
                pin = child.out(beside.name)
                self._output(where, Port(own, beside.type, name), pin)
        return made

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
        made = graph_of(
            where,
            self.name,
            self._wiring,
            self._inputs,
            self._parameters,
            self._outputs,
            self._types,
            self._counters,
        )
        self._committed = True
        return made

    # ---- the parts -------------------------------------------------------------------

    def _where(self, method: str, port: str | None = None) -> str:
        about = "" if port is None else f" {port!r}"
        return f"BlockBuilder {self.name!r}: {method}{about}"

    def _new(
        self, where: str, name: str, after: After
    ) -> tuple[str, int, BlockBuilder]:
        """The name, number and builder of a new node."""
        self._check_open(where)
        before = (after,) if isinstance(after, Handle) else tuple(after)
        for handle in before:
            self._check_own(where, handle)
        taken = {node.name for node in self._wiring.nodes}
        free, n = name, 1
        while free in taken:
            n += 1
            free = f"{name} {n}"
        self._wiring.after.append(tuple(handle.number for handle in before))
        return free, len(self._wiring.nodes), self

    def _ported(
        self, new: tuple[str, int, BlockBuilder], operation: Operation
    ) -> PortsHandle:
        made = PortsHandle(*new, operation)
        self._wiring.nodes.append(made)
        return made

    def _output(self, where: str, port: Port, pin: Pin, more: int = 0) -> Port:
        if port.name in (known.name for known, _, _ in self._outputs):
            raise ValueError(f"{where}: there is an output {port.name!r} already")
        self._outputs.append((port, pin, more))
        return port

    def _type_of(
        self, where: str, pin: Pin, given: TypeLike | None
    ) -> ArrayType | None:
        """The type of a pin: what is known of it, and what is said now."""
        known = self._types.get(pin)
        if known is None and isinstance(pin.handle, PortsHandle):
            known = pin.handle.type_of(pin)
        elif known is None and pin.kind == "output":  # updated in place, perhaps
            known = self._types.get(dataclasses.replace(pin, kind="input"))
        if given is None:
            return known
        said = array_type(where, given)
        if known is not None and known.differs(said):
            raise ValueError(f"{where}: {pin} is {known}, and {said} is asked for")
        self._types[pin] = said
        return said

    def _scalar(self, where: str, pin: Pin, default: Any, dtype: Any) -> Parameter:
        """What a scalar pin is as a parameter, which has the pin's name."""
        handle = pin.handle
        if isinstance(handle, PortsHandle):
            inner: Parameter = handle.ports("scalar")[pin.number]
            word = isinstance(inner.default, str)  # one of the child's own types
            kept = None if word else inner.default
            return Parameter(
                str(pin), inner.dtype, kept if default is None else default
            )
        assert isinstance(handle, KernelHandle)
        if pin.number in handle.constants:
            raise ValueError(f"{where}: {pin} is fixed by scalars= already")
        if dtype is None:
            dtype = handle.dtype_of(pin.number, default)
        self._types[pin] = ArrayType(np.dtype(dtype), ())
        return Parameter(str(pin), np.dtype(dtype), default)

    def _with_default(
        self, where: str, parameter: Parameter, found: Parameter, said: bool
    ) -> Parameter:
        """The parameter with the default that its pins agree on, or that is said."""
        known = parameter.default
        if said:
            self._said.add(parameter.name)
        elif parameter.name in self._said or found.default is None:
            return parameter
        if known is not None and known != found.default:
            raise ValueError(
                f"{where}: it is {known} by default, and {found.default} came; say one "
                "of them where it is first named"
            )
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
        inputs, parameters = self._inputs, self._parameters
        if name in [p.name for p in inputs] + [p.name for p in parameters]:
            raise ValueError(
                f"{where}: there is an input or a parameter {name!r} already"
            )

    def _check_pin(self, where: str, pin: Any, kind: Kind) -> None:
        self._check_open(where)
        if not isinstance(pin, Pin):
            raise TypeError(
                f"{where}: takes a pin of a node, such as node.in_(0), got {pin!r}"
            )
        self._check_own(where, pin.handle)
        if pin.kind != kind:
            raise ValueError(
                f"{where}: {pin} was taken as an {pin.kind}, and this takes an {kind}"
            )


def _counted(name: str, pin: Pin) -> str | None:
    """What a child's count is beside when it is an output by this name."""
    if not isinstance(pin.handle, PortsHandle):
        return None
    inner: Port = pin.handle.ports("output")[pin.number]
    if inner.companion_of is None:
        return None
    return name.removesuffix(inner.name.removeprefix(inner.companion_of))


def _ports(where: str, given: Ports) -> tuple[Port, ...]:
    if isinstance(given, Mapping):
        return tuple(Port(name, array_type(where, t)) for name, t in given.items())
    if isinstance(given, str):
        raise TypeError(f"{where}: names come as a sequence, got {given!r}")
    return tuple(Port(name) for name in given)


def _check_once(where: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: {name!r} is the name of two")


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else by_code(value)
