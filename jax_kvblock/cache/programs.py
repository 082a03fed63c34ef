"""The programs by which blocks leave the pool and come back into it."""

from __future__ import annotations

import math

import jax
import numpy as np

from jax_kvblock.append.append import append_kv
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import gather_blocks, scatter_blocks
from jax_kvblock.objects.manager import BlockManager


def staged(manager: BlockManager, ids: np.ndarray) -> jax.Array:
    """Blocks of the pool in an array of their own, in universal order.

    Returns:
      `[n, nh, nl, no, nt, hd]`, n the next power of two.
    """
    with manager.lock:
        return _gather(manager._memory.check_usable("offload"), padded(ids))


def write_blocks(manager: BlockManager, ids: np.ndarray, room: jax.Array) -> jax.Array:
    """Has whole blocks taken into the pool, which lie at the beginning of a room.

    Returns:
      An output of the program that reads the room.
    """
    return manager.update(_scatter, padded(ids), room)


def write_layer(
    manager: BlockManager, layer: int, ids: np.ndarray, room: jax.Array, first: int
) -> jax.Array:
    """Has one layer of blocks taken into the pool.

    Args:
      first: where they begin in the room, in elements.

    Returns:
      An output of the program that reads the room.
    """
    slots = _slots(manager.spec, padded(ids))
    return manager.update(_write_layer, np.int32(layer), slots, room, np.int32(first))


@jax.jit
def _gather(pool: KVPool, ids: jax.Array) -> jax.Array:
    return gather_blocks(pool, ids, "universal")


def _scatter(pool: KVPool, ids: jax.Array, room: jax.Array) -> tuple[KVPool, jax.Array]:
    universal = pool.spec.replace(layout="universal")
    shape = (len(ids), *universal.block_shape)
    blocks = room[: math.prod(shape)].reshape(shape)
    return scatter_blocks(pool, ids, blocks, "universal"), ids[:1] + 1


def _write_layer(
    pool: KVPool, layer: jax.Array, slots: jax.Array, room: jax.Array, first: jax.Array
) -> tuple[KVPool, jax.Array]:
    """In the room is one layer of universal blocks, `[n, nh, no, nt, hd]`."""
    heads, _, *rest = pool.spec.replace(layout="universal").block_shape
    shape = (len(slots) // pool.spec.block_size, heads, *rest)
    size = math.prod(shape)
    if size < len(room):
        room = jax.lax.dynamic_slice(room, [first], [size])
    blocks = room.reshape(shape)
    k, v = (
        blocks[:, :, i].transpose(0, 2, 1, 3).reshape(-1, heads, shape[-1])
        for i in range(2)
    )
    return append_kv(pool, layer, k, v, slots), slots[:1] + 1


def _slots(spec: BlockSpec, ids: np.ndarray) -> np.ndarray:
    """Those of all tokens of blocks; -1 for blocks that are none."""
    every = ids[:, None] * spec.block_size + np.arange(spec.block_size)
    return np.where(ids[:, None] < 0, -1, every).astype(np.int32).ravel()


def padded(ids: np.ndarray) -> np.ndarray:
    """Ids with -1 behind them, up to a power of two: few shapes, few programs."""
    size = 1 << max(len(ids) - 1, 0).bit_length()
    padded = np.full(size, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
