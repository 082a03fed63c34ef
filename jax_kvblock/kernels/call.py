"""A call of a kernel: what is compiled in, and what its shapes make of it.

`Call` is the static parameter of the primitive. Grids, results and scalars may depend
on shapes; `Call.launch` says what they are for the shapes at hand, which are those of
one device's part, and of one member of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_int, plural
from jax_kvblock.kernels.kernel import Kernel
from jax_kvblock.kernels.ptx import Loaded
from jax_kvblock.kernels.tensor_map import TensorMap
from jax_kvblock.kernels.values import check_address, pack, type_in_memory

WHERE = "kernel_call"
AXES = "xyz"
SEQUENTIAL = "sequential"
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024


class Shape(NamedTuple):
    """Of a result."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Packed(NamedTuple):
    """A scalar, and as the kernel gets it. Bytes tell 2 from 2.0."""

    bytes: bytes
    value: Any

    @classmethod
    def of(cls, kernel: Kernel, number: int, value: Any, where: str = WHERE) -> Packed:
        """For a parameter of a kernel. Structs are their bytes, which have a hash."""
        packed = pack(where, kernel, number, value)
        return cls(packed, packed if isinstance(value, np.void) else value)


class Pointer(NamedTuple):
    """A parameter that is a buffer's address, operands and results counted through."""

    buffer: int


class Map(NamedTuple):
    """A parameter that is a tensor map of a buffer, by value."""

    buffer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    map: TensorMap


Parameter = Pointer | Packed | Map


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the handler is told. `parameters`: of the kernel, in its order."""

    results: tuple[Shape, ...]
    grid: tuple[int, int, int]
    parameters: tuple[Parameter, ...]
    loaded: tuple[tuple[int, Loaded], ...]  # parameters whose values lie in memory


@dataclasses.dataclass(frozen=True)
class Call:
    """What is compiled in.

    Attributes:
      kernel: what runs.
      arrays: how many operands are arrays; behind them come traced scalars.
      scalars: a value for each scalar, `None` where it is traced; or a function of the
        arrays' shapes.
      out: the results; or a function of the arrays' shapes.
      append: the results that are appended to, each with a counter behind it.
      aliases: (array, result) pairs that share memory, and a parameter.
      order: the number of the parameter that each item is: arrays, results, scalars.
      grid: three sizes; or a function of the arrays' shapes.
      block, cluster, shared_memory, cooperative: of the launch.
      maps: (item, map) pairs of arrays and results that travel as tensor maps.
      batch: what a batch is: an axis of the grid, launches in a row, or an error.
      sharding: how arrays and results are cut over a mesh, or `None`.
      after: the ranks of operands behind the scalars that are only waited for.
      fallback: a function of arrays and scalars for where there is no GPU.
      debug: wait for the kernel.
      members: of a batch. batched: the operands that have an axis for it, their first.
    """

    kernel: Kernel
    arrays: int
    scalars: tuple[Packed | None, ...] | Callable[..., Any]
    out: tuple[Shape, ...] | Callable[..., Any]
    append: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]
    order: tuple[int, ...] | None
    grid: tuple[int, int, int] | Callable[..., Any]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_memory: int
    cooperative: bool
    maps: tuple[tuple[int, TensorMap], ...]
    batch: str | None
    sharding: str | None
    after: tuple[int, ...]
    fallback: Callable[..., Any] | None
    debug: bool
    members: int | None = None
    batched: tuple[bool, ...] = ()

    def member(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The operands of one member."""
        has = self.batched or (False,) * len(avals)
        return [
            jax.ShapeDtypeStruct(a.shape[1:] if b else a.shape, a.dtype)
            for a, b in zip(avals, has, strict=True)
        ]

    def launch(self, avals: Sequence[Any]) -> Launch:
        """What runs for operands of these shapes. Raises what is wrong with it."""
        operands = self.member(avals)
        arrays, hot = (
            operands[: self.arrays],
            operands[self.arrays : self.waits_from(len(avals))],
        )
        results = results_of(self.out, arrays)
        check_append(results, self.append)
        for array, result in self.aliases:
            check_alias(arrays, results, array, result)
        grid = grid_of(self.grid, arrays)
        if self.batch is not None and self.batch in AXES and self.members is not None:
            grid = self._with_members(grid)
        self._check_cluster(grid)
        items = self._items(arrays, results, hot, len(operands))
        numbers = self._numbers(len(items))
        parameters: list[Any] = [None] * len(items)
        loaded = []
        for number, (item, aval) in zip(numbers, items, strict=True):
            parameters[number] = item
            if aval is None and isinstance(item, Pointer):
                check_address(WHERE, self.kernel, number)
            elif isinstance(item, Map):
                check_address(WHERE, self.kernel, number, size=128)
            elif aval is not None:
                kind = type_in_memory(WHERE, self.kernel, number, aval.dtype)
                assert isinstance(item, Pointer)
                loaded.append((number, Loaded(kind, self._axis_of(item.buffer))))
        return Launch(results, grid, tuple(parameters), tuple(loaded))

    def waits_from(self, operands: int) -> int:
        """The number of the first operand that is only waited for."""
        return operands - len(self.after)

    def _axis_of(self, operand: int) -> str | None:
        """The axis of the grid whose blocks have a value each of a traced scalar."""
        if self.batch is None or self.batch not in AXES or not self.batched:
            return None
        return self.batch if self.batched[operand] else None

    # ---- the parts -------------------------------------------------------------------

    def _items(
        self,
        arrays: Sequence[Any],
        results: Sequence[Shape],
        hot: Sequence[Any],
        base: int,
    ) -> list[tuple[Any, Any]]:
        """(parameter, the traced scalar that it is loaded from), in order.

        base: the number of the first result's buffer.
        """
        maps = dict(self.maps)
        becomes = dict(self.aliases)

        def given(item: int, buffer: int, like: Any) -> Pointer | Map:
            if item in maps:
                return Map(buffer, tuple(like.shape), like.dtype, maps[item])
            return Pointer(buffer)

        found: list[tuple[Any, Any]] = []
        for number, a in enumerate(arrays):
            buffer = number
            if number in becomes:  # the memory that is updated
                buffer = base + self.place_of(becomes[number])
            found.append((given(number, buffer, a), None))
        for number, result in enumerate(results):
            if number in becomes.values():
                continue
            buffer = base + self.place_of(number)
            found.append((given(len(arrays) + number, buffer, result), None))
            if number in self.append:
                found.append((Pointer(buffer + 1), None))
        rest = iter(enumerate(hot, len(arrays)))
        for value in self.values(arrays):
            if value is None:
                buffer, a = next(rest)
                found.append((Pointer(buffer), a))
            else:
                found.append((value, None))
        return found

    def values(self, arrays: Sequence[Any]) -> list[Packed | None]:
        """Each scalar for arrays of these shapes, `None` where it is traced."""
        if not callable(self.scalars):
            return list(self.scalars)
        results = len(results_of(self.out, arrays))
        before = len(arrays) + results - len(self.aliases) + len(self.append)
        given = self.scalars(*arrays)
        values = list(given) if isinstance(given, (tuple, list)) else [given]
        numbers = self._numbers(before + len(values))
        return [
            Packed.of(self.kernel, numbers[before + i], value)
            for i, value in enumerate(values)
        ]

    def place_of(self, number: int) -> int:
        """Among the results and counters, as the primitive has them."""
        return number + sum(1 for n in self.append if n < number)

    def _numbers(self, items: int) -> Sequence[int]:
        return parameter_numbers(self.kernel, items, self.order)

    def _with_members(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        assert self.batch is not None and self.members is not None
        axis = AXES.index(self.batch)
        if grid[axis] != 1:
            raise ValueError(
                f"{WHERE}: batch={self.batch!r} makes members of a batch the grid's "
                f"{self.batch}, which must be 1 without one, got {grid}"
            )
        sizes = list(grid)
        sizes[axis] = self.members
        return _sizes_in_grid((sizes[0], sizes[1], sizes[2]))

    def _check_cluster(self, grid: tuple[int, int, int]) -> None:
        if self.cluster is None:
            return
        if any(g % c for g, c in zip(grid, self.cluster, strict=True)):
            raise ValueError(
                f"{WHERE}: the grid must be a multiple of the cluster in each "
                f"dimension, got grid {grid} and cluster {self.cluster}"
            )


def parameter_numbers(
    kernel: Kernel, items: int, order: Sequence[int] | None
) -> Sequence[int]:
    """The parameter that each of arrays, results and scalars is."""
    known = kernel.parameters
    if known is not None and len(known) != items:
        has = ", ".join(kernel.say(i) for i in range(len(known))) or "none"
        raise ValueError(
            f"{WHERE}: {kernel} has {plural(len(known), 'parameter')}, and {items} "
            "came: arrays, results that are not aliased (those in append with their "
            f"counters), scalars. It has {has}"
        )
    if order is None:
        return range(items)
    if sorted(order) != list(range(items)):
        raise ValueError(
            f"{WHERE}: order must name each of {plural(items, 'parameter')} of "
            f"{kernel} once, got {tuple(order)}"
        )
    return order


def integers_of(name: str, given: Any) -> tuple[int, ...]:
    """Numbers of parameters, arrays or results."""
    several = isinstance(given, (tuple, list, range))
    found = [as_int(n) for n in (given if several else [given])]
    numbers = tuple(n for n in found if n is not None)
    if len(numbers) != len(found):
        raise TypeError(
            f"{WHERE}: {name} must be integers, got {given!r}; it counts from 0"
        )
    return numbers


def results_of(out: Any, arrays: Sequence[Any]) -> tuple[Shape, ...]:
    given = out(*arrays) if callable(out) else out
    several = isinstance(given, (tuple, list)) and not isinstance(given, Shape)
    results = tuple(shape_of(g) for g in (given if several else [given]))
    if not results:
        raise ValueError(
            f"{WHERE}: out has no result, and what has none is never run; what a "
            "kernel updates is a result, too: aliases={0: 0}"
        )
    return results


def shape_of(given: Any) -> Shape:
    if not (hasattr(given, "shape") and hasattr(given, "dtype")):
        raise TypeError(
            f"{WHERE}: out must be jax.ShapeDtypeStruct's, arrays like the results, or "
            f"a function of the arrays' shapes that returns such, got {given!r}"
        )
    return Shape(tuple(int(n) for n in given.shape), jnp.dtype(given.dtype))


def grid_of(grid: Any, arrays: Sequence[Any]) -> tuple[int, int, int]:
    return _sizes_in_grid(sizes_of("grid", grid(*arrays)) if callable(grid) else grid)


def sizes_of(name: str, given: Any, where: str = WHERE) -> tuple[int, int, int]:
    """Up to three sizes; those that are left out are 1."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    found = [n for n in map(as_int, sizes) if n is not None]
    if len(found) != len(sizes) or not 1 <= len(found) <= 3:
        raise TypeError(
            f"{where}: {name} must be one to three integers, or a function of the "
            f"arrays' shapes that returns such, got {given!r}; -(-n // m) rounds up"
        )
    x, y, z = (*found, 1, 1)[:3]
    if min(x, y, z) < 1:
        raise ValueError(f"{where}: {name} must be 1 or more, got {tuple(found)}")
    return x, y, z


def _sizes_in_grid(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    if any(n > most for n, most in zip(sizes, MAX_GRID, strict=True)):
        raise ValueError(
            f"{WHERE}: grid may be up to {MAX_GRID}, got {sizes}; let a block do more"
        )
    return sizes


def check_append(results: Sequence[Shape], append: Sequence[int]) -> None:
    for number in append:
        if not 0 <= number < len(results):
            raise ValueError(
                f"{WHERE}: append names result {number}, and there are {len(results)}"
            )
        shape = results[number].shape
        if not shape or shape[0] < 1:
            raise ValueError(
                f"{WHERE}: result {number} is appended to, so its first dimension is "
                f"its capacity, 1 or more; got shape {shape}"
            )


def check_alias(
    arrays: Sequence[Any], results: Sequence[Shape], array: int, result: int
) -> None:
    if not (0 <= array < len(arrays) and 0 <= result < len(results)):
        raise ValueError(
            f"{WHERE}: aliases says that array {array} becomes result {result}; there "
            f"are {plural(len(arrays), 'array')} and {plural(len(results), 'result')}"
        )
    a, r = arrays[array], results[result]
    if a.shape != r.shape or a.dtype != r.dtype:
        raise ValueError(
            f"{WHERE}: array {array} becomes result {result}, so they are alike; got "
            f"{a.dtype}{list(a.shape)} and {r.dtype}{list(r.shape)}"
        )
