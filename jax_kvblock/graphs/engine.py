"""`Engine`: runs graphs, and says what it compiled, changed and launched.

It is no runtime: `jax.jit` compiles and runs, and keeps what it compiled by the graph's
value. A graph that is built again alike is not compiled again.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.graphs.graph import Graph
from jax_kvblock.graphs.operations import Parameter
from jax_kvblock.kernels.functions import key_of


class State(enum.Enum):
    """Of a block: whether it runs, and what is to be known."""

    OK = "OK"
    WARNING = "Warning"
    ERROR = "Error"
    NOT_COMPILED = "NotCompiled"


@dataclasses.dataclass(frozen=True)
class DebugInfo:
    """What became of a block's last launch.

    Attributes:
        state: `WARNING` where an output that is appended to was too small.
        message: why it is not `OK`, else `None`.
        last_time, average_time: seconds of the last launch and of all, until results
            were there, transfers of operands included; `None` unless the engine is
            `timed`. A launch that compiled is not counted.
        append_counts: how many each output that is appended to has.
    """

    state: State = State.NOT_COMPILED
    message: str | None = None
    last_time: float | None = None
    average_time: float | None = None
    append_counts: dict[str, int] = dataclasses.field(default_factory=dict)


class BlockParameter:
    """A parameter of a registered graph. Its value may be set at any time.

    A new value reaches the next launch without a compilation. `value` is a number, or a
    jax array without dimensions; `None` where the graph has a default of its own.
    """

    def __init__(self, where: str, parameter: Parameter) -> None:
        self._where, self._parameter = where, parameter
        self.name, self.dtype = parameter.name, parameter.dtype
        default = None if isinstance(parameter.default, str) else parameter.default
        self._value: Any = None if default is None else default.item()
        self._number: Any = default  # as NumPy's, where it is a number
        self._array = None if default is None else jnp.asarray(default)
        self.is_dirty = False

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, given: Any) -> None:
        self._take(given, self.checked(given))

    def checked(self, given: Any) -> Any:
        """A number of the dtype, or an array; raises what does not fit."""
        return self._parameter.checked(self._where, given)

    def _take(self, given: Any, number: Any) -> None:
        if isinstance(number, jax.Array):
            self._number = None
        elif key_of(number) == key_of(self._number):
            return
        else:
            self._number = number
        self._value, self._array, self.is_dirty = given, jnp.asarray(number), True


class EngineBlock:
    """A graph that an engine runs. `Engine.register` makes one.

    `block(*inputs)` launches it and returns what the graph does, inputs by name, too.
    `block.set(Strength=9.8)` changes parameters, `block.parameters` has them by name.
    `block.dispose()` takes it from the engine.
    """

    def __init__(
        self, engine: Engine, number: int, graph: Graph, name: str, donate: set[str]
    ) -> None:
        self.id = number
        self.graph = graph
        self.name = name
        self.parameters = {
            p.name: BlockParameter(f"block {name!r}", p) for p in graph.parameters
        }
        self._engine: Engine | None = engine
        self._donate = donate
        self._state = State.NOT_COMPILED
        self._message: str | None = None
        self._time, self._timed, self._total = 0.0, 0, 0.0
        self._last: dict[str, Any] = {}  # counts and overflows of the last launch

    def set(self, **values: Any) -> None:
        """New values of parameters, by name."""
        for name in values:
            if name not in self.parameters:
                has = ", ".join(map(repr, self.parameters)) or "none"
                raise ValueError(
                    f"block {self.name!r} has no parameter {name!r}; it has {has}"
                )
        numbers = {name: self.parameters[name].checked(v) for name, v in values.items()}
        for name, value in values.items():
            self.parameters[name]._take(value, numbers[name])

    def __call__(self, /, *inputs: Any, **named: Any) -> dict[str, jax.Array]:
        if self._engine is None:
            raise RuntimeError(f"block {self.name!r} is disposed; register it again")
        for name in named:
            if name in self.parameters:
                raise TypeError(
                    f"block {self.name!r}: {name!r} is a parameter: set({name}=…), or "
                    f".parameters[{name!r}].value"
                )
        given = self.graph.inputs_by_name(*inputs, **named)
        donated = {name: given.pop(name) for name in self._donate}
        values = {
            name: p._array
            for name, p in self.parameters.items()
            if p._array is not None
        }
        dirty = [p for p in self.parameters.values() if p.is_dirty]
        try:
            outputs, seconds = self._engine._launch(
                self.graph, values, given, donated, len(dirty)
            )
        except Exception as error:
            self._state, self._message = State.ERROR, f"{type(error).__name__}: {error}"
            raise
        for p in dirty:
            p.is_dirty = False
        self._state, self._message = State.OK, None
        if seconds is not None:
            self._time, self._timed = seconds, self._timed + 1
            self._total += seconds
        kept = [p.name for p in self.graph.outputs if p.companion_of]
        self._last = {name: outputs[name] for name in kept}
        return outputs

    @property
    def debug_info(self) -> DebugInfo:
        """What became of the last launch. Waits for it where something is counted."""
        state, message, counts = self._state, self._message, {}
        full: list[str] = []
        for port in self.graph.outputs:
            if port.companion_of is None or port.name not in self._last:
                continue
            value = np.asarray(self._last[port.name])
            if value.dtype != np.bool_:
                counts[port.companion_of] = int(value)
            elif value:
                full.append(repr(port.companion_of))
        if full and state is State.OK:
            state = State.WARNING
            message = f"full, and there would have been more: {', '.join(full)}"
        timed = self._timed
        return DebugInfo(
            state,
            message,
            self._time if timed else None,
            self._total / timed if timed else None,
            counts,
        )

    def dispose(self) -> None:
        """Takes the block from its engine. Again, it does nothing."""
        if self._engine is not None:
            self._engine._remove(self)
            self._engine = None

    def __repr__(self) -> str:
        return f"EngineBlock({self.name!r}, {self._state.value})"


class Engine:
    """Runs graphs, and counts.

    Args:
        timed: waits for each launch and keeps its time in `debug_info`.
        structure_changed: called with the engine when a graph is registered or
            disposed of.

    Attributes:
        launches: how often graphs ran.
        cold_rebuilds: how often one was traced and compiled: a structure, or shapes,
            that had not been there before.
        hot_updates: new values of parameters that reached a launch without that.

    Example:
        ```python
        with Engine() as engine:
            gravity = engine.register(graph)
            for strength in np.linspace(0, 10, 100):
                gravity.set(Strength=strength)
                particles = gravity(particles)["Particles"]
        ```
    """

    def __init__(
        self,
        *,
        timed: bool = False,
        structure_changed: Callable[[Engine], None] | None = None,
    ) -> None:
        self.timed = timed
        self.launches = self.cold_rebuilds = self.hot_updates = 0
        self._structure_changed = structure_changed
        self._blocks: dict[int, EngineBlock] = {}
        self._numbers = itertools.count()
        self._compiled: Any = jax.jit(self._trace, static_argnums=0, donate_argnums=3)

    @property
    def blocks(self) -> tuple[EngineBlock, ...]:
        """Those that are registered, in order."""
        return tuple(self._blocks.values())

    def register(
        self, graph: Graph, *, name: str | None = None, donate: Iterable[str] = ()
    ) -> EngineBlock:
        """A block that runs the graph.

        Args:
            graph: what `BlockBuilder.commit` made.
            name: for messages; `None` takes the graph's.
            donate: inputs whose memory outputs may take: gone after a launch.
        """
        if not isinstance(graph, Graph):
            raise TypeError(
                f"Engine.register: takes a Graph, which BlockBuilder.commit() returns, "
                f"got {type(graph).__name__}"
            )
        wanted, inputs = set(donate), [port.name for port in graph.inputs]
        for unknown in sorted(wanted - set(inputs)):
            raise ValueError(
                f"Engine.register: donate names {unknown!r}; the inputs of graph "
                f"{graph.name!r} are {', '.join(map(repr, inputs)) or 'none'}"
            )
        block = EngineBlock(
            self, next(self._numbers), graph, name or graph.name, wanted
        )
        self._blocks[block.id] = block
        self._changed()
        return block

    def close(self) -> None:
        """Disposes of all blocks, and of what was compiled for them."""
        for block in self.blocks:
            block.dispose()
        self._compiled.clear_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _remove(self, block: EngineBlock) -> None:
        del self._blocks[block.id]
        self._changed()

    def _changed(self) -> None:
        if self._structure_changed is not None:
            self._structure_changed(self)

    def _trace(
        self, graph: Graph, values: Any, kept: Any, donated: Any
    ) -> dict[str, jax.Array]:
        outputs = graph(**kept, **donated, **values)
        self.cold_rebuilds += 1
        return outputs

    def _launch(
        self, graph: Graph, values: Any, kept: Any, donated: Any, dirty: int
    ) -> tuple[dict[str, jax.Array], float | None]:
        """The outputs, and seconds where they are asked for and nothing compiled."""
        rebuilds, start = self.cold_rebuilds, time.perf_counter()
        outputs = self._compiled(graph, values, kept, donated)
        if self.timed:
            jax.block_until_ready(outputs)
        seconds = time.perf_counter() - start if self.timed else None
        self.launches += 1
        if self.cold_rebuilds != rebuilds:
            return outputs, None
        self.hot_updates += dirty
        return outputs, seconds
