"""What a graph is made of: ports, nodes, and where each value comes from."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_kvblock.graphs.operations import Operation, Parameter, Port
from jax_kvblock.graphs.types import ArrayType

INPUT, PARAMETER = -1, -2  # in place of a node's number


class Source(NamedTuple):
    """Where a value comes from: an output of a node, or a port of the graph's own."""

    node: int
    port: int


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation, and where its operands come from.

    scalars: `None` where the operation's own default is meant. after: nodes that run
    before it, although it takes nothing from them. input_types, output_types: what was
    said of each port in the words of the graph around it.
    """

    name: str
    operation: Operation
    inputs: tuple[Source, ...]
    scalars: tuple[Source | None, ...]
    after: tuple[int, ...]
    input_types: tuple[tuple[ArrayType, ...], ...]
    output_types: tuple[tuple[ArrayType, ...], ...]


@dataclasses.dataclass(frozen=True)
class Description:
    """Attributes as those of `Graph`."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    results: tuple[Source, ...]
