"""Models as functions: what is compiled, and the arrays that come before its arguments.

Nothing of flax is imported: who has an nnx module has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


_MULTIPLIED: dict[type, tuple[str, ...]] = {}


def multiplies_by(*names: str) -> Callable[[type[T]], type[T]]:
    """Says of a class of layers by which of its weights it multiplies.

    These are `[inputs, outputs]`. Its `dot_general` is None, or a mapping that has a
    dot_general for each of the names, which multiplies in place of the layer's own.
    """

    def note(kind: type[T]) -> type[T]:
        _MULTIPLIED[kind] = names
        return kind

    return note


def multiplied(kind: type) -> tuple[str, ...]:
    """The weights that `multiplies_by` has said of this very class; none of others."""
    return _MULTIPLIED.get(kind, ())


def is_nnx_module(model: object) -> bool:
    """Whether it is a `flax.nnx.Module`."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def as_function(where: str, model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its first arguments: `model(*x)` is `function(*first, *x)`.

    Args:
      where: the function that was called.
      model: a function, jitted or not, which has no first arguments; an nnx module,
        whose first argument is its state; any other callable pytree, like the layers of
        `jax_kvblock.parallel`, which is its own first argument. What a call of a module
        changes in it (counts of keys, statistics) is left out of what comes back.

    Raises:
      TypeError: it cannot be called.
    """
    if not callable(model):
        raise TypeError(
            f"{where}: model must be a function, an nnx module or a pytree that can be "
            f"called, got {type(model).__name__}; pass a function step(*arguments)"
        )
    if is_nnx_module(model):
        nnx: Any = sys.modules["flax.nnx"]
        definition, state = nnx.split(model)

        def call(state: Any, *arguments: Any) -> Any:
            return nnx.merge(definition, state)(*arguments)

        return call, (state,)
    if not jax.tree_util.all_leaves([model]):  # it has leaves of its own
        return lambda model, *arguments: model(*arguments), (model,)
    return model, ()
