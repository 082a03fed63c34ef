"""The block copy in plain jax.numpy: its specification, and the path without a kernel.

Read the source into one logical array, one dimension an axis of the box; then write
that into the destination. Ids and starts outside the source read zeros; outside the
destination they write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_kvblock._plan import Copy, Side


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


def _window(copy: Copy, side: Side, axis: str, start: jax.Array) -> jax.Array:
    """The indices along `axis` that a start operand selects; -1 when out of range."""
    extent = dict(copy.extents).get(axis, 1)
    valid = (start >= 0) & (start < copy.start_limit(side))
    return jnp.where(valid, start + jnp.arange(extent, dtype=jnp.int32), -1)


def _indices(
    copy: Copy, side: Side, ids: jax.Array | None, start: jax.Array | None
) -> tuple[jax.Array, ...]:
    """One index array for each stored axis; they broadcast to the shape of the box."""
    sizes, extents, first = dict(side.sizes), dict(copy.extents), dict(side.first)
    box = [axis for axis, _ in copy.extents]
    inner = sizes[side.index[1]] if len(side.index) == 2 else 1
    indices = []
    for axis in _stored_axes(side):
        along = axis  # the axis of the box along which this index varies
        if axis in side.index:
            assert ids is not None
            part = ids // inner if axis == side.index[0] else ids % inner
            index = jnp.where((ids >= 0) & (ids < side.id_limit), part, -1)
            along = "N"
        elif axis == side.start:
            assert start is not None
            index = _window(copy, side, axis, start)
        else:
            extent = extents.get(axis, 1)
            index = first.get(axis, 0) + jnp.arange(extent, dtype=jnp.int32)
        # Negative indices would wrap around: send them past the end instead.
        index = jnp.where(index < 0, sizes[axis], index)
        shape = [index.size if name == along else 1 for name in box]
        indices.append(index.reshape(shape))
    return tuple(indices)


def _read(
    copy: Copy,
    side: Side,
    arrays: Sequence[jax.Array],
    ids: jax.Array | None,
    start: jax.Array | None,
) -> jax.Array:
    whole = _stack(side, arrays)
    if ids is None and start is None and not side.first:
        order = [_stored_axes(side).index(axis) for axis, _ in copy.extents]
        return whole.transpose(order)
    indices = _indices(copy, side, ids, start)
    return whole.at[indices].get(mode="fill", fill_value=0)


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
    indices = _indices(copy, side, ids, start)
    # Destinations do not repeat, by contract; saying so gives the write a transpose.
    whole = _stack(side, arrays).at[indices].set(box, mode="drop", unique_indices=True)
    return _split(side, whole)
