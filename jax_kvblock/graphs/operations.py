"""What a node of a graph does: a kernel, a captured function; and the ports of either.

An operation takes its inputs and its scalars, in the order of its ports, and returns
its outputs, also in order. A graph is one, too (`graph.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import plural, show
from jax_kvblock.graphs.types import ArrayType, Sizes, array_type, scalar_type
from jax_kvblock.kernels.call import Packed
from jax_kvblock.kernels.functions import Function, key_of
from jax_kvblock.kernels.kernel import Kernel
from jax_kvblock.kernels.kernel_call import kernel_call


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output: a name and a type.

    type: `None` where any array will do. companion_of: the output that this one counts,
    for what is appended to.
    """

    name: str
    type: ArrayType | None = None
    companion_of: str | None = None

    def __str__(self) -> str:
        return self.name if self.type is None else f"{self.name}: {self.type}"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A scalar that may change from call to call without a compilation.

    default: a number of the dtype; a word of the graph's types, which is that size;
    `None`: none.
    """

    name: str
    dtype: np.dtype[Any]
    default: Any = dataclasses.field(default=None, compare=False)
    key: Any = dataclasses.field(init=False, repr=False)  # 0.0 is not -0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.default))

    def __str__(self) -> str:
        shown = "" if self.default is None else f" = {self.default}"
        return f"{self.name}: {self.dtype}{shown}"

    def value(self, where: str, given: Any, sizes: Sizes) -> Any:
        """What a call has for it: what is given, or the default."""
        given = self.default if given is None else given
        if given is None:
            raise TypeError(
                f"{where}: parameter {self.name!r} has no default, so it needs a value"
            )
        return self.checked(where, sizes[given] if isinstance(given, str) else given)

    def checked(self, where: str, given: Any) -> Any:
        """A number as NumPy's of the dtype; an array without dimensions, of it, too."""
        where = f"{where}: parameter {self.name!r}"
        if isinstance(given, jax.Array):
            exact = scalar_type(self.dtype).loads(array_type(where, given))
            weak = given.weak_type and given.ndim == 0 and self._holds(given.dtype)
            if not (exact or weak):
                raise TypeError(
                    f"{where} must be a number or {self.dtype}[], got {show(given)}"
                )
            return given.astype(self.dtype)
        number = np.asarray(given)
        floats = jnp.issubdtype(number.dtype, jnp.floating)
        if number.ndim or not (floats or number.dtype.kind in "biu"):
            raise TypeError(
                f"{where} must be a number or {self.dtype}[], got {given!r}"
            )
        if not self._holds(number.dtype):
            raise TypeError(f"{where} must be an integer, got {given!r}")
        if jnp.issubdtype(self.dtype, jnp.integer):
            info = jnp.iinfo(self.dtype)
            if not info.min <= int(number) <= info.max:
                raise ValueError(f"{where}: {given} does not fit {self.dtype}")
        return number.astype(self.dtype)[()]

    def _holds(self, dtype: Any) -> bool:
        """Whether numbers of this kind are numbers of the parameter's."""
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.issubdtype(self.dtype, jnp.floating)
        return self.dtype.kind != "b" or dtype == np.bool_


class Operation(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[Port, ...]: ...
    @property
    def outputs(self) -> tuple[Port, ...]: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    def apply(
        self,
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        sizes: Sizes,
        after: Sequence[Any],
    ) -> list[Any]:
        """The outputs.

        scalars: one for each parameter, `None` for its default. sizes: what words of
        the graph around it are. after: what has to be there before it runs.
        """
        ...


def companions(name: str) -> tuple[Port, Port]:
    """The ports beside an output that is appended to: its count, and whether it fit."""
    return (
        Port(f"{name} Count", scalar_type(jnp.int32), name),
        Port(f"{name} Overflowed", scalar_type(jnp.bool_), name),
    )


def behind(
    after: Sequence[Any], inputs: Sequence[Any], scalars: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Inputs and scalars that are not there before `after` is."""
    if not after:
        return list(inputs), list(scalars)
    hot = [x for x in scalars if isinstance(x, jax.Array)]
    inputs, hot, _ = jax.lax.optimization_barrier((list(inputs), hot, list(after)))
    rest = iter(hot)
    tied = [next(rest) if isinstance(x, jax.Array) else x for x in scalars]
    return list(inputs), tied


# ---- kernels -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelPort:
    """An array of a kernel: the parameter that it is, and that of its counter.

    type: of an output that is an input, too, `None`.
    """

    parameter: int
    type: ArrayType | None
    counter: int | None = None


@dataclasses.dataclass(frozen=True)
class KernelOperation:
    """A kernel whose parameters are inputs, outputs, scalars and constants.

    A parameter that is an input and an output is updated in place. `constants` are
    numbers as the kernel takes them, or words; `tensor_maps` are of parameters. All are
    in the parameters' order.
    """

    name: str
    kernel: Kernel
    arrays: tuple[KernelPort, ...]
    results: tuple[KernelPort, ...]
    scalars: tuple[tuple[int, np.dtype[Any]], ...]
    constants: tuple[tuple[int, Packed | str], ...]
    grid: Any
    tensor_maps: tuple[tuple[int, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def _name_of(self, number: int) -> str:
        known = self.kernel.parameters
        return (known and known[number].name) or str(number)

    @property
    def inputs(self) -> tuple[Port, ...]:
        return tuple(Port(self._name_of(p.parameter), p.type) for p in self.arrays)

    @property
    def outputs(self) -> tuple[Port, ...]:
        ports: list[Port] = []
        for port in self.results:
            name = self._name_of(port.parameter)
            ports.append(Port(name, port.type))
            if port.counter is not None:
                ports += companions(name)
        return tuple(ports)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(Parameter(self._name_of(n), dtype) for n, dtype in self.scalars)

    def place_of(self, parameter: int) -> int:
        """The number of an output among all, by the parameter that it is."""
        place = 0
        for port in self.results:
            if port.parameter == parameter:
                return place
            place += 1 if port.counter is None else 3
            if port.counter == parameter:
                return place - 2
        raise KeyError(parameter)

    def apply(
        self,
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        sizes: Sizes,
        after: Sequence[Any],
    ) -> list[Any]:
        array_of = {port.parameter: i for i, port in enumerate(self.arrays)}
        order, aliases, structs = list(array_of), {}, []
        for i, port in enumerate(self.results):
            if port.parameter in array_of:
                like = array_of[port.parameter]
                aliases[like] = i
                structs.append(jax.typeof(inputs[like]))
                continue
            assert port.type is not None
            structs.append(port.type.with_sizes(sizes))
            order.append(port.parameter)
            order += [] if port.counter is None else [port.counter]
        values = {
            number: self._number(number, parameter.value(repr(self.name), given, sizes))
            for (number, _), parameter, given in zip(
                self.scalars, self.parameters, scalars, strict=True
            )
        }
        for number, value in self.constants:
            values[number] = sizes[value] if isinstance(value, str) else value.value
        numbers = sorted(values)
        made = kernel_call(
            self.kernel,
            *inputs,
            out=tuple(structs),
            scalars=[values[n] for n in numbers],
            grid=self._blocks(structs) if self.grid is None else self.grid,
            order=order + numbers,
            aliases=aliases,
            append=[i for i, p in enumerate(self.results) if p.counter is not None],
            tensor_maps={order.index(n): m for n, m in self.tensor_maps},
            after=after,
            **dict(self.options),
        )
        flat: list[Any] = []
        for port, x in zip(self.results, made, strict=True):
            flat += [x] if port.counter is None else list(x)
        return flat

    def _number(self, number: int, value: Any) -> Any:
        """As `kernel_call` takes it: a double comes from a float32, traced or not."""
        known = self.kernel.parameters
        typed = known is None or known[number].is_bytes
        return value if typed or isinstance(value, jax.Array) else value.item()

    def _blocks(self, structs: Sequence[Any]) -> int:
        """A thread for each element of the first result that is not appended to."""
        elements = next(
            math.prod(x.shape)
            for x, port in zip(structs, self.results, strict=True)
            if port.counter is None
        )
        block = dict(self.options).get("block") or self.kernel.block or 1
        threads = math.prod(block if isinstance(block, tuple) else (block,))
        return max(1, -(-elements // threads))


# ---- captured functions --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CapturedOperation:
    """A JAX function of inputs and scalars, in this order, that returns the outputs."""

    name: str
    function: Function
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: tuple[Parameter, ...]

    def apply(
        self,
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        sizes: Sizes,
        after: Sequence[Any],
    ) -> list[Any]:
        inputs, scalars = behind(after, inputs, scalars)
        numbers = [
            parameter.value(repr(self.name), given, sizes)
            for parameter, given in zip(self.parameters, scalars, strict=True)
        ]
        made = self.function(*inputs, *numbers)
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        if len(outputs) != len(self.outputs):
            names = ", ".join(repr(p.name) for p in self.outputs)
            raise ValueError(
                f"{self.name!r}: the captured function must return {names}, got "
                f"{plural(len(outputs), 'value')}"
            )
        return [jnp.asarray(x) for x in outputs]
