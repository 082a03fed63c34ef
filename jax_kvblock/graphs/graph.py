"""A graph of kernels and functions: a value that says what is computed from what.

A graph holds no arrays and runs nothing by itself. Called, it is a pure JAX function,
for `jax.jit`, `jax.vmap`, `jax.grad`. Graphs that are built alike are equal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_array, plural, show
from jax_kvblock.graphs.description import (
    INPUT,
    PARAMETER,
    Description,
    Node,
    Source,
)
from jax_kvblock.graphs.draw import dot_of, save
from jax_kvblock.graphs.operations import Parameter, Port, behind
from jax_kvblock.graphs.types import ArrayType, Sizes


@dataclasses.dataclass(frozen=True)
class Graph(Description):
    """Kernels, captured functions and other graphs, with wires between them.

    `BlockBuilder` makes one. `graph(*inputs, **parameters)` computes it: inputs in
    their order or by name, parameters by name, as numbers (compiled in) or as arrays
    without dimensions (whose values may change without a compilation). It returns a
    dict from the outputs' names to arrays; beside an output that is appended to,
    `"<name> Count"` (int32) and `"<name> Overflowed"` (bool).

    Attributes:
        name: what messages and drawings call it.
        inputs, outputs, parameters: its ports.
        nodes: in an order in which they can run.
        results: where each output comes from.

    Raises:
        TypeError, ValueError: inputs that are not what its types say; what kernels and
            functions raise, with a note of the node.
    """

    @functools.cached_property
    def _hash(self) -> int:
        values = (self.name, self.inputs, self.outputs, self.parameters, self.nodes)
        return hash((*values, self.results))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        ins = ", ".join(map(str, (*self.inputs, *self.parameters)))
        outs = ", ".join(map(str, self.outputs))
        return f"Graph {self.name!r}({ins}) -> {outs}"

    def __call__(self, /, *inputs: Any, **named: Any) -> dict[str, jax.Array]:
        given = self.inputs_by_name(*inputs, **named)
        arrays = [given.pop(port.name) for port in self.inputs]
        scalars = [given.pop(p.name, None) for p in self.parameters]
        made = self.apply(arrays, scalars, Sizes(), ())
        return dict(zip((port.name for port in self.outputs), made, strict=True))

    def inputs_by_name(self, /, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Inputs and parameters by name; raises what is missing or not known."""
        where = f"graph {self.name!r}"
        names = [port.name for port in self.inputs]
        if len(inputs) > len(names):
            raise TypeError(
                f"{where}: takes {plural(len(names), 'input')} ({', '.join(names)}), "
                f"got {len(inputs)}; parameters go by name"
            )
        given = dict(zip(names, inputs, strict=False))
        known = [*names, *(p.name for p in self.parameters)]
        for name, value in named.items():
            if name in given:
                raise TypeError(f"{where}: input {name!r} came twice")
            if name not in known:
                has = ", ".join(map(repr, known)) or "none"
                raise TypeError(
                    f"{where}: has no input or parameter {name!r}; it has {has}"
                )
            given[name] = value
        missing = [n for n in names if n not in given]
        if missing:
            raise TypeError(
                f"{where}: input {missing[0]!r} is missing; it takes {', '.join(names)}"
            )
        return given

    def apply(
        self,
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        sizes: Sizes,
        after: Sequence[Any],
    ) -> list[Any]:
        """The outputs in order. A graph in a graph has words of its own."""
        sizes = Sizes()
        inputs, scalars = behind(after, inputs, scalars)
        arrays = [
            self._input(port, x, sizes)
            for port, x in zip(self.inputs, inputs, strict=True)
        ]
        numbers = [
            self._scalar(p, x, sizes)
            for p, x in zip(self.parameters, scalars, strict=True)
        ]
        made: list[list[Any]] = []

        def value_of(source: Source) -> Any:
            if source.node == INPUT:
                return arrays[source.port]
            if source.node == PARAMETER:
                return numbers[source.port]
            return made[source.node][source.port]

        for node in self.nodes:
            operands = [value_of(source) for source in node.inputs]
            numbers_of = [None if s is None else value_of(s) for s in node.scalars]
            before = [x for number in node.after for x in made[number]]
            if not operands and not any(isinstance(x, jax.Array) for x in numbers_of):
                before += after  # nothing else holds it back
            try:
                made.append(self._run(node, operands, numbers_of, sizes, before))
            except Exception as error:
                error.add_note(f"in node {node.name!r} of graph {self.name!r}")
                raise
        results = [value_of(source) for source in self.results]
        for port, x in zip(self.outputs, results, strict=True):
            self._check(port.type, x, sizes, f"output {port.name!r}")
        return results

    def _run(
        self,
        node: Node,
        operands: Sequence[Any],
        scalars: Sequence[Any],
        sizes: Sizes,
        before: Sequence[Any],
    ) -> list[Any]:
        """The outputs of a node. What words are in another graph, that one knows."""
        operation = node.operation
        own = not isinstance(operation, Graph)

        def check(ports: Sequence[Port], said: Any, values: Any, called: str) -> None:
            for port, types, x in zip(ports, said, values, strict=True):
                where = f"{called} {port.name!r} of {node.name!r}"
                known = (port.type,) if own and port.type else ()
                for type_of in dict.fromkeys((*known, *types)):
                    self._check(type_of, x, sizes, where)

        check(operation.inputs, node.input_types, operands, "input")
        made = operation.apply(operands, scalars, sizes, before)
        check(operation.outputs, node.output_types, made, "output")
        return made

    def _input(self, port: Port, given: Any, sizes: Sizes) -> Any:
        where = f"graph {self.name!r}"
        x = jnp.asarray(check_array(where, f"input {port.name!r}", given))
        self._check(port.type, x, sizes, f"input {port.name!r}")
        return x

    def _check(
        self, wanted: ArrayType | None, x: Any, sizes: Sizes, called: str
    ) -> None:
        if wanted is None or wanted.bind(x, sizes, called):
            return
        raise (TypeError if x.dtype != wanted.dtype else ValueError)(
            f"graph {self.name!r}: {called} must be {wanted}"
            f"{sizes.says(wanted.shape or ())}, got {show(x)}"
        )

    def _scalar(self, parameter: Parameter, given: Any, sizes: Sizes) -> Any:
        """A parameter's value; `None` where only who takes it may have a default."""
        if given is None and parameter.default is None:
            return None
        return parameter.value(f"graph {self.name!r}", given, sizes)

    def draw(self, path: str | Path | None = None, *, depth: int = 1) -> str:
        """The graph as a picture, in Graphviz's language.

        Args:
            path: where to write it: `.dot` (or `.gv`) as text, `.svg`, `.png` or `.pdf`
                by Graphviz's program `dot`.
            depth: how many levels of graphs in graphs are opened.

        Returns:
            The text.

        Raises:
            RuntimeError: a picture is asked for, and `dot` is not here.
        """
        text = dot_of(self, depth)
        if path is not None:
            save(text, Path(path))
        return text
