"""Functions as values: equal where they do the same, however often they are defined.

A grid or a fallback is often a lambda, made anew whenever the code around it runs.
Compared as Python does, it would be another one each time, and its call compiled again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np

SMALL = 4096  # bytes of an array up to which it is compared by what it holds


class Function:
    """A function that equals those of the same code, defaults and captured values.

    So do the functions of its own module that it calls, and the values that it finds
    there. Containers and small NumPy arrays count by what they hold, other objects
    without a value of their own by which object it is.
    """

    def __init__(self, function: Any) -> None:
        self.function = function.function if is_function(function) else function
        self.key = key_of(self.function)
        self._given: Any = key_of(self.function, contents=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Once: what the function itself changes, a counter for example, is its matter.
        if self._given is not None:
            if key_of(self.function, contents=False) != self._given:
                raise ValueError(
                    f"{self.name} uses a variable that has another value now than when "
                    "it was given; keep each value by a default, lambda x, n=n: …"
                )
            self._given = None
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


def is_function(value: Any) -> bool:
    return isinstance(value, Function)


def by_code(value: Any) -> Any:
    """A `Function` of what can be called, anything else as it is."""
    return Function(value) if callable(value) else value


def key_of(value: Any, *, contents: bool = True) -> Any:
    """What a value is compared by; its types count: 2 is not 2.0, 0.0 not -0.0.

    contents: of what may change in place; else which object it is.
    """
    return _Keys(contents).of(value)


class _Object:
    """An object that equals itself alone, and lives as long as who compares with it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Keys:
    """Looks at each function and container once, also where they go in circles."""

    def __init__(self, contents: bool) -> None:
        self.contents = contents
        self.seen: list[Any] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Function):
            return self.of(value.function)
        if isinstance(value, (float, complex)):
            return (type(value), repr(value))
        if isinstance(value, np.generic):
            return (type(value), value.tobytes())
        inside = self._inside(value)
        if inside is not None:
            for number, other in enumerate(self.seen):
                if value is other:
                    return ("seen", number)
            self.seen.append(value)
            return (type(value), *(self.of(part) for part in inside()))
        if isinstance(value, np.ndarray) and self.contents and value.nbytes <= SMALL:
            return (value.dtype, value.shape, value.tobytes())
        try:
            hash(value)
        except TypeError:
            return _Object(value)
        return (type(value), value)

    def _inside(self, value: Any) -> Any:
        """A function that returns the parts which a value is compared by, if it has."""
        if inspect.isfunction(value):
            return functools.partial(_parts, value)
        if isinstance(value, functools.partial):
            return lambda: (value.func, value.args, tuple(value.keywords.items()))
        if inspect.ismethod(value):
            return lambda: (value.__func__, _Object(value.__self__))
        if isinstance(value, tuple):
            return lambda: value
        if isinstance(value, frozenset) or (self.contents and isinstance(value, set)):
            return lambda: sorted(value, key=repr)
        if self.contents and isinstance(value, list):
            return lambda: value
        if self.contents and isinstance(value, dict):
            return lambda: tuple(value.items())
        return None


def _parts(function: Any) -> Iterator[Any]:
    yield function.__code__
    yield function.__defaults__ or ()
    yield tuple(sorted((function.__kwdefaults__ or {}).items()))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield _Object(cell)
    known = function.__globals__
    for name in sorted(set(_names(function.__code__))):
        if name in known:
            value = known[name]
            other = inspect.isfunction(value) and value.__globals__ is not known
            yield name
            yield _Object(value) if other else value  # another module's, which it is


def _names(code: CodeType) -> Iterator[str]:
    """Of globals, and of attributes, which do no harm."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
