"""The programs by which blocks leave the pool and come back into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jax_kvblock.append.append import append_kv
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import gather_blocks, scatter_blocks
from jax_kvblock.cache.below import Below, Placed
from jax_kvblock.cache.copies import Cut
from jax_kvblock.cache.tickets import Stage
from jax_kvblock.objects.manager import BlockManager


def staged(manager: BlockManager, ids: np.ndarray) -> jax.Array:
    """Blocks of the pool in an array of their own, in universal order.

    Returns:
      `[n, nh, nl, no, nt, hd]`, n the next power of two.
    """
    with manager.lock:
        return _gather(manager._memory.check_usable("offload"), padded(ids))


def stages(
    manager: BlockManager,
    below: Below,
    keys: Sequence[bytes],
    ids: np.ndarray,
    by_layer: bool,
    lost: Callable[[int], None] | None = None,
) -> list[Stage]:
    """How blocks of the tiers below come into the pool: at once, or layer by layer.

    lost: as for `Below.place`.
    """
    # One job behind the other: the next ones' blocks land where these did.
    with below.lock:
        placed = below.up.submit(below.place, keys, lost)
        return _stages(manager, below, placed, ids, by_layer)


def _stages(
    manager: BlockManager,
    below: Below,
    placed: Future[Placed],
    ids: np.ndarray,
    by_layer: bool,
) -> list[Stage]:
    spec, places = below.host.spec, padded(ids)
    heads, layers, *rest = spec.block_shape

    def arrive(cut: Cut, of_block: Sequence[int], last: bool) -> Future[jax.Array]:
        def copy() -> jax.Array:
            source, whole = placed.result(), False
            try:
                array = below.up_to(source, cut, (len(places), *of_block))
                whole = True
                return array
            finally:
                if last or not whole:
                    source.hold.release()

        return below.up.submit(copy)

    def write(array: jax.Array) -> None:
        manager.update(_scatter, places, array)

    if not by_layer:
        return [Stage(arrive(Cut.whole(spec), spec.block_shape, True), write, 0)]
    every = places[:, None] * spec.block_size + np.arange(spec.block_size)
    slots = np.where(places[:, None] < 0, -1, every).astype(np.int32).ravel()

    def of_layer(layer: int) -> Stage:
        def write(array: jax.Array) -> None:
            manager.update(_write_layer, np.int32(layer), slots, array)

        cut, last = Cut.layer(spec, layer), layer == layers - 1
        return Stage(arrive(cut, (heads, *rest), last), write, layer)

    return [of_layer(layer) for layer in range(layers)]


@jax.jit
def _gather(pool: KVPool, ids: jax.Array) -> jax.Array:
    return gather_blocks(pool, ids, "universal")


def _scatter(pool: KVPool, ids: jax.Array, blocks: jax.Array) -> KVPool:
    return scatter_blocks(pool, ids, blocks, "universal")


def _write_layer(
    pool: KVPool, layer: jax.Array, slots: jax.Array, blocks: jax.Array
) -> KVPool:
    """blocks: one layer of universal ones, `[n, nh, no, nt, hd]`."""
    heads, dim = blocks.shape[1], blocks.shape[4]
    k, v = (
        blocks[:, :, i].transpose(0, 2, 1, 3).reshape(-1, heads, dim) for i in range(2)
    )
    return append_kv(pool, layer, k, v, slots)


def padded(ids: np.ndarray) -> np.ndarray:
    """Ids with -1 behind them, up to a power of two: few shapes, few programs."""
    size = 1 << max(len(ids) - 1, 0).bit_length()
    padded = np.full(size, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
