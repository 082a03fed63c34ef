"""The static side of a block copy: which axes lie where, and the strides that follow.

A copy runs over a box of named axes, `extents`. Each of its two sides says how the axes
lie over its arrays:

    Form.parse("| N H L O T D")     one stacked array of blocks
    Form.parse("L | B O T H D")     a pool of one array per layer
    Form.parse("N L O | T H D")     one array per block, layer and outer

Axes before the bar choose the array, axes after it are its dimensions. Items (N) are
numbered 0, 1, 2, …; on a side with `index` they are looked up instead, by an id that
addresses those axes (B for block ids; B and T jointly for token slots).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jax_kvblock.blocks.layout import parse_axes

Sizes = tuple[tuple[str, int], ...]
Dim = tuple[str, ...]  # axes that are walked as one, outermost first
MAX_RANK = 8  # KVBLOCK_MAX_RANK
CHUNK_BYTES = 4096  # of a thread block on CUDA (block_copy_cuda.cu)


@dataclasses.dataclass(frozen=True)
class Form:
    """How axes lie over arrays: `table` chooses the array, `array` are its
    dimensions.
    """

    table: tuple[str, ...]
    array: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Form:
        table, array = text.split("|")
        return cls(tuple(table.split()), parse_axes(array))

    def with_leading(self, axis: str) -> Form:
        """The same form with one more array dimension in front."""
        return Form(self.table, ((axis,), *self.array))


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a copy.

    Attributes:
      form: how its axes lie over its arrays.
      sizes: the stored extent of each of its axes.
      index: the axes that an item's id addresses, major first; () when items are stored
        one after the other.
      first: the first index along axes that the copy covers in part.
      start: the axis whose first index is an operand, or None.
    """

    form: Form
    sizes: Sizes
    index: tuple[str, ...] = ()
    first: Sizes = ()
    start: str | None = None

    @property
    def num_arrays(self) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in self.form.table)

    @property
    def array_shape(self) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(
            math.prod(sizes[axis] for axis in group) for group in self.form.array
        )

    @property
    def id_limit(self) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in self.index)

    def resized(self, **sizes: int) -> Side:
        return dataclasses.replace(self, sizes=_update(self.sizes, sizes))

    def with_leading(self, axis: str, size: int) -> Side:
        """The same side with one more dimension in front of each array."""
        form = self.form.with_leading(axis)
        return dataclasses.replace(self, form=form, sizes=((axis, size), *self.sizes))

    def strides(self) -> dict[str, int]:
        """Elements between neighbours along each axis inside an array."""
        axes = [axis for group in self.form.array for axis in group]
        return _row_major(axes, dict(self.sizes))

    def table_strides(self) -> dict[str, int]:
        """Arrays between neighbours along each axis that chooses the array."""
        return _row_major(self.form.table, dict(self.sizes))


@dataclasses.dataclass(frozen=True)
class Copy:
    """A block copy, as the primitive's one static parameter.

    Attributes:
      extents: the box of axes that is copied: leading axes, items (N), the block's.
      src, dst: the two sides.
      in_place: whether the destination's arrays are operands that are updated.
      implementation: who is asked to compute it; see `implementations`.
    """

    extents: Sizes
    src: Side
    dst: Side
    in_place: bool
    implementation: str | None = None

    @property
    def num_operands(self) -> tuple[int, int]:
        """How many of the operands are source and destination arrays."""
        return self.src.num_arrays, self.dst.num_arrays if self.in_place else 0

    @property
    def scalars(self) -> int:
        """Which int32 operands follow the arrays, as the handler's bit mask."""
        present = (self.src.index, self.dst.index, self.src.start, self.dst.start)
        return sum(bool(p) << bit for bit, p in enumerate(present))

    @property
    def covers_source(self) -> bool:
        """Whether every element of the source is copied exactly once."""
        return not self.scalars and dict(self.extents) == dict(self.src.sizes) == dict(
            self.dst.sizes
        )

    def start_limit(self, side: Side) -> int:
        """The number of values that a side's start operand may take."""
        if side.start is None:
            return 0
        extent = dict(self.extents).get(side.start, 1)
        return dict(side.sizes)[side.start] - extent + 1

    def resized(self, **extents: int) -> Copy:
        return dataclasses.replace(self, extents=_update(self.extents, extents))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the handler is told: the attributes of the FFI call, in bytes."""

    dims: tuple[int, ...]
    unit: int
    src: tuple[int, ...]
    dst: tuple[int, ...]


def make_plan(copy: Copy, itemsize: int, leader: Side | None = None) -> Plan:
    """The dims of the copy in the order the kernel should walk them, and each side.

    The order is the leader's, outermost first. That is the destination unless told
    otherwise, so that neighbouring threads write neighbouring addresses. Items come
    first where an id is looked up for each.
    """
    extents = dict(copy.extents)
    indexed = bool(copy.src.index or copy.dst.index)
    order = _walk(copy, leader or copy.dst)
    axes = [axis for axis in order if extents[axis] != 1 or (indexed and axis == "N")]
    dims: list[Dim] = [(axis,) for axis in axes or order[:1]]
    if len(dims) > MAX_RANK:
        dims = _merged(copy, dims, "N" if indexed else None)
    if len(dims) > MAX_RANK:
        raise NotImplementedError(f"block copy: more than {MAX_RANK} axes: {dims}")
    return Plan(
        dims=tuple(math.prod(extents[axis] for axis in dim) for dim in dims),
        unit=itemsize,
        src=_side_numbers(copy, copy.src, dims, itemsize),
        dst=_side_numbers(copy, copy.dst, dims, itemsize),
    )


def cuda_leader(copy: Copy, itemsize: int, host: Sequence[bool]) -> Side:
    """The side that leads the walk on CUDA; `host` says which sides are in host memory.

    The destination; but the source when only that is in host memory, because the link
    is slower than the device's memory and likes sequences, and when the destination's
    walk would cut thread blocks into segments under 256 bytes and the source's keeps
    longer ones. (Runs that are no whole vectors go through tiles, in either order.)
    """
    if any(host):
        return copy.src if list(host) == [True, False] else copy.dst
    by_src, by_dst = (_segment(copy, side, itemsize) for side in (copy.src, copy.dst))
    short = by_dst < 256 and by_dst % 16 == 0
    return copy.src if short and by_src > by_dst else copy.dst


def _walk(copy: Copy, leader: Side) -> list[str]:
    """The axes as one side walks them, outermost first; looked-up items before all."""
    strides, tables = leader.strides(), leader.table_strides()
    indexed = bool(copy.src.index or copy.dst.index)

    def outermost_first(axis: str) -> tuple[bool, int, int]:
        pinned = indexed and axis == "N"
        return (not pinned, -tables.get(axis, 0), -strides.get(axis, 0))

    return sorted((axis for axis, _ in copy.extents), key=outermost_first)


def _merged(copy: Copy, dims: Sequence[Dim], alone: str | None) -> list[Dim]:
    """Neighbours that both sides walk in one stride, as leading axes, become one dim.

    The axis `alone`, whose addresses are looked up, stays for itself.
    """
    extents = dict(copy.extents)
    steps = [
        steps
        for side in (copy.src, copy.dst)
        for steps in (side.strides(), side.table_strides())
    ]

    def follow(outer: str, inner: str) -> bool:
        return all(
            step.get(outer, 0) == extents[inner] * step.get(inner, 0) for step in steps
        )

    merged: list[Dim] = []
    for dim in dims:
        together = merged and alone not in (*merged[-1], *dim)
        if together and follow(merged[-1][-1], dim[0]):
            merged[-1] = (*merged[-1], *dim)
        else:
            merged.append(dim)
    return merged


def _segment(copy: Copy, leader: Side, itemsize: int) -> int:
    """The bytes that both sides hold in a row in a thread block's part of the walk."""
    extents, left, part = dict(copy.extents), CHUNK_BYTES // itemsize, {}
    for axis in reversed(_walk(copy, leader)):
        part[axis] = max(1, min(extents[axis], left))
        left //= part[axis]
    segments = []
    for side in (copy.src, copy.dst):
        hidden = {"N", *side.index} if side.index else set()
        at = {
            stride: axis
            for axis, stride in side.strides().items()
            if part.get(axis, 1) > 1 and axis not in hidden
        }
        segment = 1
        while segment in at:
            segment *= part[at[segment]]
        segments.append(segment * itemsize)
    return min(segments)


def _side_numbers(
    copy: Copy, side: Side, dims: Sequence[Dim], itemsize: int
) -> tuple[int, ...]:
    """A side as the handler decodes it (DecodeSide in block_copy_ffi.cc)."""
    strides = {axis: n * itemsize for axis, n in side.strides().items()}
    tables = side.table_strides()
    sizes = dict(side.sizes)
    hidden = {"N", *side.index} if side.index else set()
    offset = sum(first * strides[axis] for axis, first in side.first)
    id_inner, id_strides = 1, (0, 0)
    if side.index:
        id_strides = (strides[side.index[0]], 0)
        if len(side.index) == 2:
            id_inner = sizes[side.index[1]]
            id_strides = (strides[side.index[0]], strides[side.index[1]])
    return (
        offset,
        side.id_limit if side.index else 0,
        id_inner,
        *id_strides,
        copy.start_limit(side),
        strides.get(side.start, 0) if side.start else 0,
        tables.get(side.start, 0) if side.start else 0,
        *(0 if dim[-1] in hidden else strides.get(dim[-1], 0) for dim in dims),
        *(0 if dim[-1] in hidden else tables.get(dim[-1], 0) for dim in dims),
    )


def _row_major(axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _update(sizes: Sizes, changes: Mapping[str, int]) -> Sizes:
    return tuple((axis, int(changes.get(axis, size))) for axis, size in sizes)


def plan_attributes(plan: Plan, copy: Copy) -> dict[str, object]:
    """The plan as FFI attributes. Their dtypes are settled here and nowhere else."""
    return {
        "num_src": np.int64(copy.src.num_arrays),
        "in_place": np.bool_(copy.in_place),
        "scalars": np.int64(copy.scalars),
        "unit": np.int64(plan.unit),
        "dims": np.array(plan.dims, np.int64),
        "src": np.array(plan.src, np.int64),
        "dst": np.array(plan.dst, np.int64),
    }
