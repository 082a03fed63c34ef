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


class Function:
    """A function that equals those of the same code, defaults and captured values.

    So do the functions of its own module that it calls. Anything in it that has no hash
    counts by which object it is.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.key = _key(function, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
    return Function(value) if callable(value) else value


class _Object:
    """An object that equals itself alone, and lives as long as who compares with it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _key(value: Any, inside: tuple[Any, ...]) -> Any:
    """What a value is compared by. `inside`: the functions that are being looked at."""
    if isinstance(value, Function):
        return value.key
    if isinstance(value, functools.partial):
        named = tuple(sorted((k, _key(v, inside)) for k, v in value.keywords.items()))
        given = tuple(_key(v, inside) for v in value.args)
        return ("partial", _key(value.func, inside), given, named)
    if inspect.ismethod(value):
        return ("method", _key(value.__func__, inside), _key(value.__self__, inside))
    if inspect.isfunction(value):
        if any(value is other for other in inside):
            return ("recursion", [value is other for other in inside].index(True))
        inside = (*inside, value)
        return (
            value.__code__,
            tuple(_key(v, inside) for v in value.__defaults__ or ()),
            tuple(
                (name, _key(v, inside))
                for name, v in sorted((value.__kwdefaults__ or {}).items())
            ),
            tuple(_cell(c, inside) for c in value.__closure__ or ()),
            _Object(value.__globals__),
            tuple(_globals(value, inside)),
        )
    try:
        hash(value)
    except TypeError:
        return _Object(value)
    return (type(value), value)  # 2 is not 2.0


def _cell(cell: Any, inside: tuple[Any, ...]) -> Any:
    try:
        return _key(cell.cell_contents, inside)
    except ValueError:  # not assigned yet
        return _Object(cell)


def _globals(function: Any, inside: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What a function finds by name in its module.

    Functions of other modules, and modules, are which they are.
    """
    known = function.__globals__
    for name in sorted(set(_names(function.__code__))):
        if name not in known:
            continue
        value = known[name]
        elsewhere = inspect.isfunction(value) and value.__globals__ is not known
        apart = elsewhere or inspect.ismodule(value)
        yield name, _Object(value) if apart else _key(value, inside)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
