"""A pool as what each device has of it, and what a device does with its blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jax_kvblock.blocks.copy import block_copy
from jax_kvblock.blocks.layout import UNIVERSAL, BlockSpec
from jax_kvblock.blocks.plan import Copy, Form, Side
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import layer_part
from jax_kvblock.parallel.reshard_routes import Cut

Devices = tuple[jax.Device, ...]
Ids: TypeAlias = "jax.Array | np.ndarray"  # on a device, or still on the host
ByDevice = Mapping[jax.Device, jax.Array]
Heads: TypeAlias = "int | jax.Array"  # a device's first head of those that are meant


AXIS = "devices"


@functools.lru_cache(maxsize=256)
def flat_mesh(devices: Devices) -> Mesh:
    """These devices along one axis, AXIS."""
    return Mesh(np.array(devices), (AXIS,))


class Part(NamedTuple):
    """A pool, and which heads its devices have."""

    pool: KVPool
    cut: Cut

    @property
    def spec(self) -> BlockSpec:
        """What a block is on one device."""
        return _with_heads(self.pool.spec, self.cut.width)

    @property
    def head_bytes(self) -> int:
        """Of a block's head, over all layers."""
        spec = self.pool.spec
        return spec.block_bytes // max(spec.num_kv_heads, 1)

    def on_each(self) -> dict[jax.Device, tuple[jax.Array, ...]]:
        """The arrays that each device of this process has."""
        devices = here(self.cut.devices)
        own = zip(*(own_parts(x) for x in self.pool.arrays), strict=True)
        return dict(zip(devices, own, strict=True))

    def of_each(self, arrays_of: Mapping[jax.Device, Sequence[jax.Array]]) -> KVPool:
        """The pool of the arrays that this process's devices have, cut as it was."""
        devices = here(self.cut.devices)
        arrays = [
            jax.make_array_from_single_device_arrays(
                old.shape, old.sharding, [arrays_of[d][i] for d in devices]
            )
            for i, old in enumerate(self.pool.arrays)
        ]
        return KVPool._holding(self.joined(arrays), self.pool.spec)

    def joined(self, arrays: Sequence[jax.Array]) -> jax.Array | tuple[jax.Array, ...]:
        """Arrays as a pool like this one holds them."""
        return arrays[0] if self.pool.contiguous else tuple(arrays)


@functools.lru_cache(maxsize=256)
def _with_heads(spec: BlockSpec, heads: int) -> BlockSpec:
    return spec.replace(num_kv_heads=heads)


def here(devices: Iterable[jax.Device]) -> Devices:
    """Those of this process."""
    process = jax.process_index()
    return tuple(d for d in devices if d.process_index == process)


def shards(x: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}


def own_parts(x: jax.Array) -> list[jax.Array]:
    """What each device of this process has, in the order of the array's sharding."""
    count = len(x.sharding.addressable_devices)
    if count > 1 and x.is_fully_replicated:  # of this, JAX gives the first for all
        return [shard.data for shard in x.addressable_shards]
    return [x.addressable_data(i) for i in range(count)]


def brought(x: Ids, to: Sharding) -> jax.Array:
    """One array, whole on each of these devices.

    `jax.device_put` ends in the same transfers, but looks at trees, sources and many
    cases first: some 10 us more for a piece, 40 for ids on four devices (on a CPU).
    Unlike it, this is not explicit for a transfer guard.
    """
    return jax.make_array_from_callback(x.shape, to, lambda _: x)


# ---- what a device does --------------------------------------------------------------


def read(pool: KVPool, ids: jax.Array, first: Heads, width: int) -> jax.Array:
    """Universal blocks `[n, width, nl, no, nt, hd]` of the heads from this one."""
    part = layer_part("reshard_blocks", pool, None, ("B",))
    extents = _extents(pool.spec, len(ids), width)
    copy = Copy(extents, _from_a_head(part.side), _blocks(extents), in_place=False)
    (blocks,) = block_copy(copy, part.arrays, (), (ids, None, jnp.int32(first)))
    return blocks


def write(pool: KVPool, ids: jax.Array, blocks: jax.Array, first: Heads) -> KVPool:
    """The pool with such blocks as its heads from this one."""
    part = layer_part("reshard_blocks", pool, None, ("B",))
    extents = _extents(pool.spec, *blocks.shape[:2])
    copy = Copy(extents, _blocks(extents), _from_a_head(part.side), in_place=True)
    scalars = (None, ids, None, jnp.int32(first))
    return part.updated(pool, block_copy(copy, [blocks], part.arrays, scalars))


def copy(
    src: KVPool,
    src_ids: jax.Array,
    take: Heads,
    dst: KVPool,
    dst_ids: jax.Array,
    put: Heads,
    width: int,
) -> KVPool:
    """Both in one, from pool to pool."""
    source = layer_part("reshard_blocks", src, None, ("B",))
    part = layer_part("reshard_blocks", dst, None, ("B",))
    sides = _from_a_head(source.side), _from_a_head(part.side)
    both = Copy(_extents(dst.spec, len(dst_ids), width), *sides, in_place=True)
    scalars = src_ids, dst_ids, jnp.int32(take), jnp.int32(put)
    return part.updated(dst, block_copy(both, source.arrays, part.arrays, scalars))


def _from_a_head(side: Side) -> Side:
    return dataclasses.replace(side, start="H")


def _blocks(extents: tuple[tuple[str, int], ...]) -> Side:
    return Side(Form((), (("N",), *UNIVERSAL.groups)), extents)


def _extents(spec: BlockSpec, n: int, width: int) -> tuple[tuple[str, int], ...]:
    return (("N", n), *spec.replace(num_kv_heads=width).sizes.items())
