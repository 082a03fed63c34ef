"""Steps that are given a manager's pool: jitted once, and run so that no pool is lost.

A donating call takes the old pool's memory before it hands over the new pool. Whatever
stops Python in between (Ctrl-C, another signal, an exception set by another thread)
would drop both. Three things close the gap:

- the program takes and returns plain arrays, so that no Python code of a pytree runs
  when its results are put together;
- they are stored by the same step of C that calls the program (`run`);
- signal handlers of Python wait while the pool is given away. This matters on a first
  call, when JAX itself runs Python code between the program and its return.
"""

from __future__ import annotations

# The signal module wraps enums around these functions, at twenty times their cost.
import _signal  # type: ignore[import-not-found]
import functools
import inspect
import itertools
import signal
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool

_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals()))
_ONCE = ((),)  # one call without arguments, for starmap
# Classes whose objects are no nodes of a tree; those of JAX's arrays, once seen. JAX
# does not count None as a leaf, which is of no class that is asked for.
_LEAVES = {type(None), bool, int, float, complex, np.ndarray}


class Program:
    """A step, jitted: `call(data, *args, **kwargs)` gives (new data, packed result).

    The result is packed as `{structure: leaves}`, which JAX takes apart and puts
    together without running Python code; `unpack` undoes it.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        spec: BlockSpec,
        check: Callable[[KVPool, KVPool], None],
        static_argnames: tuple[str, ...] = (),
        forget: Callable[[Any], object] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or str(getattr(step, "__name__", type(step).__name__))
        parts = self._parts = [_weak(part, forget) for part in _parts_of(step)]
        parameters = _parameters(step)
        names = list(parameters or ())
        self._static: set[str | int] = set(static_argnames)
        self._static |= {names.index(name) for name in static_argnames if name in names}

        def run(data: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            pool = KVPool(data, spec)
            new, result = _two(_joined(parts)(pool, *args, **kwargs))
            check(pool, new)
            leaves, structure = jax.tree.flatten(result)
            return new.data, {structure: leaves}

        run.__name__ = self.name  # for profiles
        if parameters is not None:  # by these jax finds out where static names stand
            signature = inspect.Signature(list(parameters.values()))
            run.__signature__ = signature  # type: ignore[attr-defined]
        self.call = jax.jit(run, donate_argnums=0, static_argnames=static_argnames)

    def runs(self, step: Callable[..., Any]) -> bool:
        """Whether this is the program of `step`, and not of one that had its place."""
        both = zip(self._parts, _parts_of(step), strict=True)
        return all(mine() is part for mine, part in both)

    def map(
        self, f: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`f` of each argument that is not static."""

        def changed(key: str | int, x: Any) -> Any:
            return x if key in self._static else f(x)

        new = tuple(changed(i, x) for i, x in enumerate(args, start=1))
        return new, {name: changed(name, x) for name, x in kwargs.items()}


def has_leaf(tree: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a leaf is of one of these classes.

    The weights of a model are hundreds of leaves of one class, which is asked once. JAX
    is asked for leaves where there may be nodes other than dicts, lists and tuples.
    """
    found = _native.kinds_in(tree)
    if not found <= _LEAVES:
        found = set(map(type, jax.tree.leaves(tree)))
        _LEAVES.update(kind for kind in found if issubclass(kind, jax.Array))
    return any(issubclass(kind, kinds) for kind in found)


def put(tree: Any, device: jax.Device) -> Any:
    """An argument, with its NumPy arrays and Python numbers put on the device.

    The jit would put them there, too, but not as a transfer guard wants to see it.
    """
    on_host = (np.ndarray, np.generic, int, float, complex)
    if not has_leaf(tree, on_host):
        return tree
    return jax.tree.map(
        lambda x: jax.device_put(x, device) if isinstance(x, on_host) else x, tree
    )


def unpack(packed: Any) -> Any:
    """The result that a program packed."""
    ((structure, leaves),) = packed.items()
    return jax.tree.unflatten(structure, leaves)


class Programs:
    """The programs of a manager's steps, each as long as its step lives.

    They are found by identity, and of a bound method by the function and its owner,
    since every access makes a new method object. What is cached refers to the step
    weakly: neither a lambda nor the owner of a method is kept alive.
    """

    def __init__(
        self, spec: BlockSpec, check: Callable[[KVPool, KVPool], None]
    ) -> None:
        self._spec, self._check = spec, check
        self._programs: dict[Any, Program] = {}

    def find(
        self,
        step: Callable[..., Any],
        static_argnames: Any = (),
        name: str | None = None,
    ) -> Program:
        """The step's program; errors know it by `name`, its own when None."""
        names = _names(static_argnames)
        key = (*(id(part) for part in _parts_of(step)), names)
        program = self._programs.get(key)
        if program is None or not program.runs(step):
            # In C, since it may be called anywhere: the weak reference is its default.
            forget = functools.partial(self._programs.pop, key)
            program = Program(step, self._spec, self._check, names, forget, name)
            self._programs[key] = program
        return program

    def clear(self) -> None:
        self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


def run(call: Callable[[], Any], made: list[Any], pool: KVPool) -> None:
    """Appends `call()`, which donates `pool`, to `made`.

    A signal handler of Python runs at once until the pool is given away, so that a step
    can be interrupted as it compiles, and from then on only at the end.
    """
    waiting = _Waiting(lambda: bool(made) or any(x.is_deleted() for x in pool.arrays))
    try:
        waiting.begin()
        made.extend(itertools.starmap(call, _ONCE))  # one step of C: call and store
    finally:
        try:
            waiting.end()
        finally:  # an exception set by another thread may stop the first, too
            waiting.end()


class _Waiting:
    """Stands for the signal handlers of Python, which wait while a pool is given away.

    One that is left in place, as when exceptions of other threads stop `end` again and
    again, hands on to the handler it stands for, and the next update removes it.
    """

    def __init__(self, given_away: Callable[[], bool]) -> None:
        self._given_away = given_away
        self._handlers = _python_handlers()
        self._noted: dict[int, Any] = {}
        self._over = False

    def __call__(self, number: int, frame: Any) -> None:
        if self._over or not self._given_away():
            self._handlers[number](number, frame)
        else:
            self._noted[number] = frame

    def begin(self) -> None:
        try:
            for number in self._handlers:
                _signal.signal(number, self)
        except ValueError as error:  # raised before anything is set
            # The signal module's main thread, the only one where handlers run, need not
            # be that of `threading` where Python is embedded: it alone can tell.
            if "only works in main thread" not in str(error):
                raise

    def end(self) -> None:
        """Puts all handlers back and runs those that have waited, whatever raises.

        A handler that is back may run, and raise, before the next one is.
        """
        self._over = True
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) is self:  # else the step has set its own
                    _signal.signal(number, handler)
            for number, frame in list(self._noted.items()):
                try:
                    self._handlers[number](number, frame)
                finally:
                    del self._noted[number]
        except BaseException:
            self.end()  # goes on where it was stopped
            raise

    def behind(self, number: int) -> Any:
        """The handler to keep: its own, once it is over."""
        return self._handlers[number] if self._over else self


def _python_handlers() -> dict[int, Callable[[int, Any], Any]]:
    """The handlers that may raise."""
    found = zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True)
    return {
        number: handler.behind(number) if isinstance(handler, _Waiting) else handler
        for number, handler in found
        if callable(handler)
    }


# ---- what a step is ------------------------------------------------------------------


def _parts_of(step: Callable[..., Any]) -> tuple[Any, ...]:
    """The owner and the function of a bound method; anything else is one part."""
    if isinstance(step, types.MethodType):
        return step.__self__, step.__func__
    return (step,)


def _joined(parts: Sequence[Callable[[], Any]]) -> Callable[..., Any]:
    """The step again: its caller holds it while it is traced."""
    owner, *function = [part() for part in parts]
    return types.MethodType(function[0], owner) if function else owner


def _weak(part: Any, forget: Callable[[Any], object] | None) -> Callable[[], Any]:
    try:
        return weakref.ref(part, forget)
    except TypeError:  # a builtin, or a class with slots
        return lambda: part


def _parameters(step: Callable[..., Any]) -> Any:
    """The step's parameters by name; None where Python does not know them."""
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return None
    if "static_argnames" in parameters:
        raise TypeError(
            "update: step must not have a parameter static_argnames, which is update's "
            "own; rename it"
        )
    return parameters


def _names(static_argnames: Any) -> tuple[str, ...]:
    if isinstance(static_argnames, str):
        return (static_argnames,)
    if isinstance(static_argnames, Iterable):
        names = tuple(static_argnames)
        if all(isinstance(name, str) for name in names):
            return names
    raise TypeError(
        "update: static_argnames must be a name or several names of the step's "
        f"parameters, got {static_argnames!r}"
    )


def _two(out: Any) -> tuple[Any, Any]:
    """(new pool, result) of what a step returned."""
    new, result = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if not isinstance(new, KVPool):
        raise TypeError(
            "update: step must return the new KVPool, or (new KVPool, result), got "
            f"{type(out).__name__}"
        )
    return new, result
