"""Graphs of kernels and JAX functions, as values."""

from jax_kvblock.graphs.builder import BlockBuilder
from jax_kvblock.graphs.engine import (
    BlockParameter,
    DebugInfo,
    Engine,
    EngineBlock,
    State,
)
from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import Parameter, Port
from jax_kvblock.graphs.types import ArrayType

__all__ = [
    "ArrayType",
    "BlockBuilder",
    "BlockParameter",
    "DebugInfo",
    "Engine",
    "EngineBlock",
    "Graph",
    "Parameter",
    "Port",
    "State",
]
