"""An array whose pieces along the first axis are in different formats."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import as_int
from jax_kvblock.precision.formats import PrecisionFormat
from jax_kvblock.precision.packed import PackedArray, quantize
from jax_kvblock.precision.weights import Weight

Stored = Any  # a PackedArray, a MixedArray, or an array of a plain format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedArray:
    """Runs along the first axis, each in one format. A pytree.

    Formats differ in shape, so that a program with layers in it which are so kept has a
    loop in Python: `stored[i]` is layer i as a `PackedArray`. A scan takes
    `dequantize()`, which is the whole array.
    """

    runs: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len_of(run) for run in self.runs), *self.runs[0].shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return sum(run.size for run in self.runs)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.concatenate([dequantize(run, dtype) for run in self.runs])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Stored:
        """The entry at a Python integer, in the format that its run has."""
        place = as_int(index)
        if place is None or not -len(self) <= place < len(self):
            raise IndexError(
                f"MixedArray: index must be an integer from {-len(self)} to "
                f"{len(self) - 1}, got {index!r}; what is traced takes dequantize()"
            )
        place %= len(self)
        for run in self.runs:
            if place < len_of(run):
                return run[place]
            place -= len_of(run)
        raise AssertionError("a place within the runs")


def len_of(run: Stored) -> int:
    return int(run.shape[0])


def is_stored(x: Any) -> bool:
    """Whether it is a leaf of what a plan gives: packed, mixed, or an array."""
    return isinstance(x, (PackedArray, MixedArray))


def dequantize(tree: Any, dtype: Any = jnp.float32) -> Any:
    """A pytree with arrays in place of what is packed; others stay as they are."""

    def plain(leaf: Any) -> Any:
        return leaf.dequantize(dtype) if is_stored(leaf) else leaf

    return jax.tree.map(plain, tree, is_leaf=is_stored)


def store(
    array: jax.Array,
    weight: Weight,
    formats: Sequence[PrecisionFormat],
    group_size: int,
) -> Stored:
    """The weight with a format for each of its parts."""
    if len(set(formats)) == 1:
        return _stored(array, weight, formats[0], group_size)
    # Part by part, and not run by run: so outside of jit there is one program for each
    # format, whatever the plan.
    pieces = weight.split(array)
    stored = [
        _stored(pieces[part], weight, format, group_size)
        for part, format in enumerate(formats)
    ]
    runs = [
        _joined([stored[part] for part in run])
        for _, run in itertools.groupby(range(weight.parts), formats.__getitem__)
    ]
    return MixedArray(tuple(runs))


def _joined(parts: list[Stored]) -> Stored:
    """Neighbours of one format along the first axis, groups' own axis or not."""
    if len(parts) == 1:
        return parts[0]
    first, along = parts[0], 0
    if isinstance(first, PackedArray) and first.axis == -first.ndim:
        along = -1  # where the groups' axis lies in what is stored
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, along), *parts)


def _stored(
    array: jax.Array, weight: Weight, format: PrecisionFormat, group_size: int
) -> Stored:
    if format.is_plain:
        return array.astype(format.dtype)
    return quantize(array, format, group_size=group_size, axis=weight.axis)
