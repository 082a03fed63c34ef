"""Which arrays of a pytree are weights, and the parts of them that have a format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import as_int, show
from jax_kvblock.precision.formats import PrecisionFormat
from jax_kvblock.precision.packed import FLOATS, SHARE, check_axis, check_groups

IsWeight = Callable[[str, Any], bool]


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array that a plan has formats for.

    Attributes:
      name: its path in the pytree, like "layers.gate".
      shape: whole.
      parts: equal pieces along the first axis, each with a format of its own.
      axis: along which groups lie, negative.
    """

    name: str
    shape: tuple[int, ...]
    parts: int
    axis: int

    @property
    def size(self) -> int:
        """Numbers of one part."""
        return math.prod(self.shape) // self.parts

    def nbytes(self, format: PrecisionFormat, group_size: int) -> int:
        """What one part takes in a format, its scales and offsets included."""
        stored = self.size * format.bits // 8
        if format.is_plain:
            return stored
        shared = (1 + format.is_packed) * jnp.dtype(SHARE).itemsize
        return stored + self.size // group_size * shared

    def split(self, array: jax.Array) -> jax.Array:
        """`[parts, shape[0] / parts, ...]`."""
        return array.reshape(self.parts, -1, *self.shape[1:])


def leaves_by_name(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in its order."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {name_of(path): leaf for path, leaf in found}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_matrix(name: str, array: Any) -> bool:
    """Floats of two axes or more, none of them empty."""
    return array.ndim >= 2 and array.size > 0 and array.dtype in FLOATS


def find_weights(
    params: Any,
    *,
    group_size: int = 64,
    is_weight: IsWeight | None = None,
    parts: Mapping[str, int] | None = None,
    axis: int | Callable[[str, Any], int] = -1,
    where: str = "find_weights",
) -> tuple[Weight, ...]:
    """The arrays of a pytree that are to be quantized.

    Args:
      params: a pytree of arrays.
      group_size: which must divide each of them along its axis.
      is_weight: `(name, array) -> bool`; floats of two axes or more unless given.
      parts: by name, into how many equal pieces along its first axis an array is cut.
        Others of three axes or more are cut into all their entries, so that layers
        which are stacked have a format each, and those of two are one piece.
      axis: along which groups lie, the one that products sum over; an integer, or
        `(name, array) -> int`. -1 is that of weights `[outputs, inputs]`, -2 that of
        flax's kernels `[inputs, outputs]`.

    Raises:
      TypeError, ValueError: no weights, names that there are not, parts or groups that
        do not divide.
    """
    chosen = is_matrix if is_weight is None else is_weight
    given = dict(parts or {})
    found = []
    leaves = leaves_by_name(params)
    if len(leaves) < len(jax.tree.leaves(params)):
        raise ValueError(
            f"{where}: params must have arrays of different names, got two of one name "
            f"among {', '.join(list(leaves)[:5])}; keys must not hold dots"
        )
    for name, array in leaves.items():
        if not hasattr(array, "ndim") or not chosen(name, array):
            continue
        if array.dtype not in FLOATS:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{show(array)}; leave it out by is_weight"
            )
        at = axis(name, array) if callable(axis) else axis
        at = check_axis(where, name, array.shape, at)
        count = given.pop(name, array.shape[0] if array.ndim > 2 else 1)
        weight = Weight(name, tuple(array.shape), _parts(where, name, array, count), at)
        piece = (weight.shape[0] // weight.parts, *weight.shape[1:])
        what = name if weight.parts == 1 else f"a part of {name} (of {weight.parts})"
        fix = f"leave it out by is_weight=lambda name, array: name != {name!r}"
        check_groups(where, what, piece, at, group_size, fix)
        found.append(weight)
    if given:
        raise ValueError(
            f"{where}: parts must name weights, {_names(found)}, got {', '.join(given)}"
        )
    if not found:
        few = list(leaves.items())[:5]
        shown = ", ".join(f"{name} {show(array)}" for name, array in few)
        raise ValueError(
            f"{where}: params must have weights, arrays of floats with two axes or "
            f"more (or those that is_weight says), got {shown or 'no arrays'}"
        )
    return tuple(found)


def check_finite(where: str, params: Any, weights: Sequence[Weight]) -> None:
    """Weights with values, none of them inf or nan."""
    leaves = leaves_by_name(params)
    for weight in weights:
        if not bool(jnp.isfinite(leaves[weight.name]).all()):
            raise ValueError(
                f"{where}: params must be finite, got inf or nan in {weight.name}; no "
                "scale holds them"
            )


def _parts(where: str, name: str, array: Any, count: Any) -> int:
    number = as_int(count)
    if number is None or number < 1 or array.shape[0] % number:
        raise ValueError(
            f"{where}: parts of {name} must divide its first axis, {array.shape[0]}, "
            f"got {count!r}"
        )
    return number


def _names(weights: Any) -> str:
    return ", ".join(weight.name for weight in weights) or "of which there are none"


def other_leaves(params: Any, weights: Sequence[Weight]) -> Iterator[Any]:
    """What is stored beside the weights."""
    named = {weight.name for weight in weights}
    for name, leaf in leaves_by_name(params).items():
        if name not in named:
            yield leaf


def bytes_of(leaf: Any) -> int:
    """What an array takes, or would take where it has a shape alone."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
