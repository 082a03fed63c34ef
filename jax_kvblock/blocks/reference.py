"""The block copy in plain jax.numpy: its specification, and the path without a kernel.

Read the source into one logical array, one dimension an axis of the box; then write
that into the destination. Ids and starts outside the source read zeros; outside the
destination they write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_kvblock.blocks.plan import Copy, Side


def block_copy(copy: Copy, *operands: jax.Array) -> list[jax.Array]:
    """The destination's arrays after `copy`; operands as the primitive takes them."""
    num_src, num_dst = copy.num_operands
    src, dst = operands[:num_src], operands[num_src : num_src + num_dst]
    scalars = iter(operands[num_src + num_dst :])
    src_ids = next(scalars) if copy.src.index else None
    dst_ids = next(scalars) if copy.dst.index else None
    src_start = next(scalars) if copy.src.start else None
    dst_start = next(scalars) if copy.dst.start else None

    box = _read(copy, copy.src, src, src_ids, src_start)
    if not copy.in_place:
        return _split(copy.dst, _to_stored_order(copy, copy.dst, box))
    return _write(copy, copy.dst, dst, box, dst_ids, dst_start)


def block_copy_bits(copy: Copy, *operands: jax.Array) -> list[jax.Array]:
    """`block_copy` that keeps every bit: XLA:CPU may quiet NaNs of small floats."""
    arrays = sum(copy.num_operands)
    dtype = operands[0].dtype
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 8:
        return block_copy(copy, *operands)
    raw = [
        jax.lax.bitcast_convert_type(x, bits[dtype.itemsize]) for x in operands[:arrays]
    ]
    results = block_copy(copy, *raw, *operands[arrays:])
    return [jax.lax.bitcast_convert_type(r, dtype) for r in results]


def _stored_axes(side: Side) -> tuple[str, ...]:
    return (*side.form.table, *(axis for group in side.form.array for axis in group))


def _stack(side: Side, arrays: Sequence[jax.Array]) -> jax.Array:
    """A side's arrays as one, with one dimension for each axis."""
    whole = jnp.stack(arrays) if side.form.table else arrays[0]
    sizes = dict(side.sizes)
    return whole.reshape([sizes[axis] for axis in _stored_axes(side)])


def _split(side: Side, whole: jax.Array) -> list[jax.Array]:
    whole = whole.reshape(side.num_arrays, *side.array_shape)
    return [whole[i] for i in range(side.num_arrays)]


def _looked_up(
    copy: Copy, side: Side, ids: jax.Array | None, start: jax.Array | None
) -> tuple[list[str], list[jax.Array], list[str]]:
    """The axes that are indexed by operands, an index for each, and the axes of the
    box that these indices make together.
    """
    sizes, extents = dict(side.sizes), dict(copy.extents)
    axes: list[str] = []
    indices: list[jax.Array] = []
    made = ["N"] if ids is not None else []
    if start is not None:
        assert side.start is not None
        # Negative indices would wrap around: what is out of range goes past the end.
        inside = (start >= 0) & (start < copy.start_limit(side))
        window = start + jnp.arange(extents.get(side.start, 1), dtype=jnp.int32)
        window = jnp.where(inside, window, sizes[side.start])
        if side.start in extents:
            made = [side.start, *made]
            window = window.reshape(-1, *[1] * (len(made) - 1))
        axes.append(side.start)
        indices.append(window if side.start in extents else window[0])
    if ids is not None:
        inner = sizes[side.index[1]] if len(side.index) == 2 else 1
        inside = (ids >= 0) & (ids < side.id_limit)
        for axis in side.index:
            part = ids // inner if axis == side.index[0] else ids % inner
            axes.append(axis)
            indices.append(jnp.where(inside, part, sizes[axis]))
    return axes, indices, made


def _slices(copy: Copy, side: Side, axes: Sequence[str]) -> list[slice]:
    """The part of each axis that the box covers."""
    extents, first = dict(copy.extents), dict(side.first)
    begin = [first.get(axis, 0) for axis in axes]
    return [
        slice(b, b + extents.get(axis, 1)) for b, axis in zip(begin, axes, strict=True)
    ]


def _read(
    copy: Copy,
    side: Side,
    arrays: Sequence[jax.Array],
    ids: jax.Array | None,
    start: jax.Array | None,
) -> jax.Array:
    stored, box = _stored_axes(side), [axis for axis, _ in copy.extents]
    looked, indices, made = _looked_up(copy, side, ids, start)
    rest = [axis for axis in stored if axis not in looked]
    whole = _stack(side, arrays)
    whole = whole.transpose([stored.index(axis) for axis in (*looked, *rest)])
    whole = whole[(..., *_slices(copy, side, rest))]
    if looked:
        whole = whole.at[tuple(indices)].get(mode="fill", fill_value=0)
    axes = [*made, *rest]
    missing = [axis for axis in rest if axis not in box]  # of extent 1: a static layer
    whole = whole.squeeze(tuple(axes.index(axis) for axis in missing))
    axes = [axis for axis in axes if axis not in missing]
    return whole.transpose([axes.index(axis) for axis in box])


def _to_stored_order(copy: Copy, side: Side, box: jax.Array) -> jax.Array:
    axes = [axis for axis, _ in copy.extents]
    return box.transpose([axes.index(axis) for axis in _stored_axes(side)])


def _write(
    copy: Copy,
    side: Side,
    arrays: Sequence[jax.Array],
    box: jax.Array,
    ids: jax.Array | None,
    start: jax.Array | None,
) -> list[jax.Array]:
    stored, axes = _stored_axes(side), [axis for axis, _ in copy.extents]
    looked, indices, made = _looked_up(copy, side, ids, start)
    rest = [axis for axis in stored if axis not in looked]
    missing = [axis for axis in rest if axis not in axes]  # of extent 1: a static layer
    box = box.transpose([axes.index(x) for x in (*made, *rest) if x in axes])
    box = jnp.expand_dims(box, tuple(len(made) + rest.index(axis) for axis in missing))
    order = [stored.index(axis) for axis in (*looked, *rest)]
    whole = _stack(side, arrays).transpose(order)
    # Destinations do not repeat, by contract; saying so gives the write a transpose.
    whole = whole.at[(*indices, *_slices(copy, side, rest))].set(
        box, mode="drop", unique_indices=True
    )
    back = [order.index(k) for k in range(len(order))]
    return _split(side, whole.transpose(back))
