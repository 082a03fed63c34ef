"""Blocks between a GPU and pinned host memory, on CUDA's streams, beside programs."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import BlockManager, KVPool, PrefixCache, gather_blocks
from jax_kvblock.cache import TieredCache
from jax_kvblock.cache.copies import Copies, Cut
from jax_kvblock.cache.copy_lines import CopyError
from jax_kvblock.cache.host import HostTier

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 256


@functools.partial(jax.jit, donate_argnums=0)
def decode(pool: KVPool) -> KVPool:
    """A step that takes the pool, changes every block, and lasts a while."""
    return KVPool(jnp.sin(pool.data * 1.5 + 1), pool.spec)


@jax.jit
def staged(pool: KVPool, ids: jax.Array) -> jax.Array:
    return gather_blocks(pool, ids, "universal")


@pytest.fixture
def manager(rng: np.random.Generator) -> BlockManager:
    made = BlockManager(
        8, 16, num_kv_heads=8, head_dim=128, num_blocks=NUM_BLOCKS, dtype=jnp.bfloat16
    )
    values = rng.random(made.pool.shape, np.float32)
    made.pool = KVPool.wrap(jnp.asarray(values, jnp.bfloat16), made.spec)
    return made


@pytest.fixture
def host(manager: BlockManager) -> HostTier:
    size = 64 * manager.spec.block_bytes
    return HostTier(manager.spec, size, jax.devices()[0])


def as_bytes(blocks: jax.Array) -> np.ndarray:
    whole = np.asarray(blocks)
    return whole.view(np.uint8).reshape(len(whole), -1)


def test_down_and_up_under_decode(
    manager: BlockManager, host: HostTier, rng: np.random.Generator
) -> None:
    copies = Copies(jax.devices()[0])
    whole = Cut.whole(host.spec)
    for _ in range(10):
        ids = rng.permutation(NUM_BLOCKS)[:16].astype(np.int32)
        slots = rng.permutation(host.num_slots)[:16]
        array = staged(manager.pool, ids)
        wanted = as_bytes(array)
        # The pool goes through steps while its blocks are on their way.
        down = threading.Thread(
            target=copies.down, args=(array, range(16), host.rows, slots)
        )
        down.start()
        for _ in range(20):
            manager.pool = decode(manager.pool)
        down.join()
        np.testing.assert_array_equal(host.rows[slots], wanted)
        room = copies.room((16, *host.spec.block_shape), host.spec.dtype)
        copy = copies.start_up(host.rows, slots, whole, room)
        for _ in range(20):
            manager.pool = decode(manager.pool)
        copy.wait()
        assert copy.done
        np.testing.assert_array_equal(as_bytes(room), wanted)


def test_a_layer_comes_up(host: HostTier, rng: np.random.Generator) -> None:
    host.rows[:] = rng.integers(0, 256, host.rows.shape, np.uint8)
    copies = Copies(jax.devices()[0])
    heads, layers, *rest = host.spec.block_shape
    slots = [5, 3, 4]
    wanted = host.rows[slots].reshape(3, heads, layers, -1)
    for layer in range(layers):
        room = copies.room((4, heads, *rest), host.spec.dtype)
        copies.up(host.rows, slots, Cut.layer(host.spec, layer), room)
        got = as_bytes(room)[:3].reshape(3, heads, -1)
        np.testing.assert_array_equal(got, wanted[:, :, layer])


def test_places_of_a_room_as_others_take_them(host: HostTier) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    copies, size = Copies(jax.devices()[0]), host.spec.block_bytes
    room = copies.room((4, *host.spec.block_shape), host.spec.dtype)
    for row, memory in zip([2, 0], copies.places(room, [2, 0], size), strict=True):
        cupy.asarray(memory)[:] = row + 5
    cupy.cuda.Device().synchronize()
    slots = host.rows[:4]
    slots[:] = 9
    copies.down(room, [0, 1, 2, 3], slots, [3, 2, 1, 0])
    assert [set(row.tolist()) for row in slots] == [{0}, {7}, {0}, {5}]
    copies.start_up(slots, [1, 3], Cut.whole(host.spec), room, 0, [3, 1]).wait()
    copies.down(room, range(4), slots, range(4))
    assert [int(row[0]) for row in slots] == [5, 5, 7, 7]


def test_memory_that_is_not_pinned_is_refused_by_cuda(host: HostTier) -> None:
    copies = Copies(jax.devices()[0])
    pageable = np.zeros_like(host.rows[:2])
    room = copies.room((2, *host.spec.block_shape), host.spec.dtype)
    with pytest.raises(CopyError, match="memory of the host that is not pinned"):
        copies.up(pageable, [0, 1], Cut.whole(host.spec), room)
    with pytest.raises(CopyError, match="memory of the host that is not pinned"):
        copies.down(room, [0, 1], pageable, [0, 1])
    copies.down(room, [0, 1], host.rows, [0, 1])  # and the device is as it was
    assert not host.rows[:2].any()


@pytest.mark.parametrize("by_layer", [False, True])
def test_tiers_under_decode(manager: BlockManager, by_layer: bool) -> None:
    cache = PrefixCache(manager, model="m")
    prompt = list(range(16 * 100 + 1))
    before = np.asarray(manager.pool.data).view(np.uint16)
    size = manager.spec.block_bytes
    with TieredCache(cache, host_bytes=200 * size, staging_bytes=16 * size) as tiers:
        with cache.open(prompt) as table:
            table.reserve(len(prompt))
            ids = table.ids[:100]
            table.commit(len(prompt))
            ticket = tiers.offload(table)
            for _ in range(20):
                with manager.lock:
                    manager.pool = decode(manager.pool)
            ticket.wait()
        cache.clear()
        table, up = tiers.open(prompt, by_layer=by_layer)
        up.wait()
        assert table.match() == 1600
        after = np.asarray(manager.pool.data).view(np.uint16)
        np.testing.assert_array_equal(after[table.ids], before[ids])
        tiers.check()


def test_more_pinned_memory_than_xla_gives_out(
    manager: BlockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    cache = PrefixCache(manager, model="m")
    with pytest.raises(ValueError, match="set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=4 bef"):
        TieredCache(cache, host_bytes=2 << 30)
