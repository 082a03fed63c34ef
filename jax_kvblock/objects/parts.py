"""Parts of a pool, blocks and theirs: how they lie, are named, read and written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_kvblock.blocks.layout import BlockSpec, find_layout
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import gather_blocks, scatter_blocks


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How blocks and layers lie in the pool's arrays, in elements; computed once."""

    shape: tuple[int, ...]  # of a block
    strides: tuple[int, ...]  # that of the layers is 0 when each is its own array
    block_stride: int

    @classmethod
    def of(cls, spec: BlockSpec, contiguous: bool, flat_tail: bool) -> Geometry:
        stored = "".join(axis for group in spec.block_layout.groups for axis in group)
        if not contiguous:
            stored = stored.replace("L", "")
        strides, stride = {"L": 0}, 1
        for axis in reversed(stored):
            strides[axis] = stride
            stride *= spec.sizes[axis]
        # What a user sees: HND blocks show heads before tokens, whatever the pool's
        # layout; a flat tail shows no heads.
        order = "LOHTD" if spec.inner == "HND" else "LOTHD"
        if flat_tail:
            order = order.replace("H", "")
        return cls(
            tuple(spec.sizes[axis] for axis in order),
            tuple(strides[axis] for axis in order),
            stride,
        )


def part_name(block: int, part: Sequence[int]) -> str:
    """ "block 3, layer 1, outer 0" for `(3, [1, 0])`."""
    named = zip(("layer", "outer"), part, strict=False)
    return ", ".join([f"block {block}", *(f"{axis} {i}" for axis, i in named)])


@functools.partial(jax.jit, static_argnames="flat")
def read_part(pool: KVPool, place: jax.Array, *, flat: bool) -> jax.Array:
    """A copy of a block, or a part of one; see `write_part` for `place`."""
    inner = pool.spec.inner
    (part,) = gather_blocks(pool, place[:1], inner)
    for index in place[1:]:
        part = jax.lax.dynamic_index_in_dim(part, index, 0, keepdims=False)
    return jnp.squeeze(part, -3 if inner == "HND" else -2) if flat else part


def write_part(
    pool: KVPool, place: jax.Array, part: jax.Array
) -> tuple[KVPool, jax.Array]:
    """Writes a block, or a part of one: `place` is its id, the layer, the outer.

    A part is written with its block, whose rest is read and written back. `part` may
    lack the axis of the heads.
    """
    inner, depth = pool.spec.inner, place.shape[0] - 1
    shape = find_layout("copy_from", "layout", inner, inner).shape(pool.spec)
    block = part = part.reshape(*[1] * (1 + depth), *shape[depth:])
    if depth:
        block = gather_blocks(pool, place[:1], inner)
        start = [0, *place[1:], *[0] * (len(shape) - depth)]
        block = jax.lax.dynamic_update_slice(block, part, start)
    # Not an argument as it came: JAX would hand that back before the program has run.
    done = place + 1
    return scatter_blocks(pool, place[:1], block, inner), done
