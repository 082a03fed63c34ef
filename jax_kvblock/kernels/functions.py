"""Functions as values: equal where they do the same, however often they are defined.

A grid or a fallback is often a lambda, made anew whenever the code around it runs.
Compared as Python does, it would be another one each time, and its call compiled again.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np

SMALL = 4096  # bytes of an array up to which it is compared by what it holds


class Function:
    """A function that equals those of the same code, defaults and captured values.

    So do the functions of its own module that it calls, and the values that it finds
    there. Containers and small NumPy arrays count by what they hold, other objects
    without a value of their own by which object it is. A variable that the function
    itself assigns does not count.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.key = key_of(function)
        given = _Keys(contents=False)
        self._given = given.of(function)
        self._unknown = given.absent  # what is defined later

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = _Keys(contents=False, skip=self._unknown).of(self.function)
        if now != self._given:
            raise ValueError(
                f"{self.name} uses a variable that has another value now than when it "
                "was given; keep each value by a default, lambda x, n=n: …"
            )
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        return self.name


def by_code(value: Any) -> Any:
    """A `Function` of what can be called, anything else as it is."""
    if isinstance(value, Function):
        return value
    return Function(value) if callable(value) else value


def key_of(value: Any) -> Any:
    """What a value is compared by; its type counts: 2 is not 2.0, 0.0 not -0.0."""
    return _Keys(contents=True).of(value)


class _Object:
    """An object that equals itself alone, and lives as long as who compares with it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Keys:
    """Looks at each function and container once, also where they go in circles.

    contents: of what may change in place; else which object it is. skip: names of
    variables. absent: those that had no value yet.
    """

    def __init__(self, contents: bool, skip: Collection[str] = ()) -> None:
        self.contents, self.skip = contents, skip
        self.absent: set[str] = set()
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Function):
            return self.of(value.function)
        if isinstance(value, (float, complex)):
            return (type(value), repr(value))
        if isinstance(value, np.generic):
            return (type(value), value.tobytes())
        parts = self._parts_of(value)
        if parts is not None:
            if id(value) in self.seen:
                return ("seen", self.seen[id(value)])
            self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            return (type(value), *(self.of(part) for part in parts))
        if isinstance(value, np.ndarray) and self._is_small(value):
            return (type(value), value.dtype, value.shape, value.tobytes())
        try:
            hash(value)
        except TypeError:
            return _Object(value)
        return (type(value), value)

    def _is_small(self, value: Any) -> bool:
        plain = self.contents and not value.dtype.hasobject
        return plain and value.nbytes <= SMALL

    def _parts_of(self, value: Any) -> Iterable[Any] | None:
        """The parts that a value is compared by, if it has such."""
        if inspect.isfunction(value):
            return self._function(value)
        if isinstance(value, functools.partial):
            return (value.func, value.args, tuple(value.keywords.items()))
        if inspect.ismethod(value):
            return (value.__func__, _Object(value.__self__))
        named = isinstance(value, tuple) and hasattr(type(value), "_fields")
        if type(value) is tuple or named:
            return tuple(value)
        if type(value) is frozenset or (self.contents and type(value) is set):
            return sorted(value, key=repr)
        if self.contents and type(value) in (list, dict):
            return tuple(value.items()) if type(value) is dict else value
        kind = getattr(type(value), "__dataclass_params__", None)
        if kind is not None and kind.frozen and kind.eq:
            return [getattr(value, f.name) for f in dataclasses.fields(value)]
        return None

    def _function(self, function: Any) -> Iterator[Any]:
        code, known = function.__code__, function.__globals__
        loads, stores = _variables(code)
        yield code
        yield function.__defaults__ or ()
        yield tuple(sorted((function.__kwdefaults__ or {}).items()))
        yield tuple(sorted(function.__dict__.items()))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        values = {name: _contents(cell) for name, cell in cells}
        values |= {name: known[name] for name in loads if name in known}
        builtin = vars(builtins)
        self.absent |= {n for n in loads if n not in known and n not in builtin}
        self.absent |= {name for name, value in values.items() if value is _NOTHING}
        for name in sorted(values.keys() - stores):
            if name in self.skip or values[name] is _NOTHING:
                continue
            value = values[name]
            other = inspect.isfunction(value) and value.__globals__ is not known
            yield name
            # Another module's function is which it is.
            yield _Object(value) if other and name in loads else value


_NOTHING = object()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _NOTHING


@functools.lru_cache(1024)
def _variables(code: CodeType) -> tuple[set[str], set[str]]:
    """The globals that code loads; the variables beyond its own that it assigns."""
    loads, stores = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loads.add(step.argval)
        assigns = step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        if assigns or (
            step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        ):
            stores.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_loads, inner_stores = _variables(constant)
            loads |= inner_loads
            stores |= inner_stores
    return loads, stores
