"""`Copies`: contents after they went down and up, and what they wait for.

On the CPU's memcpy, and on streams of the emulator, which copy later than they are
asked to.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_streams import Streams

from jax_kvblock import BlockManager, BlockSpec, gather_blocks, scatter_blocks
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.cache.copies import Copies, Cut
from jax_kvblock.cache.copy_lines import Copy, CopyError

SPEC = BlockSpec(3, 2, 4, 2, 8, jnp.float32, "NHD")
UNIVERSAL = SPEC.replace(layout="universal")
NUM_BLOCKS, NUM_SLOTS = 8, 6


def on_streams(streams: Streams) -> Copies:
    made = Copies(jax.devices("cpu")[0])
    made._down, made._up = streams.line(), streams.line()
    return made


@pytest.fixture(params=["memcpy", "streams"])
def copies(request: pytest.FixtureRequest) -> Copies:
    if request.param == "streams":
        return on_streams(request.getfixturevalue("streams"))
    return Copies(jax.devices("cpu")[0])


@pytest.fixture
def manager(rng: np.random.Generator, four_cpus: None) -> BlockManager:
    data = rng.random((NUM_BLOCKS, *SPEC.block_shape), np.float32)
    # Put there for good: what is JAX's default device differs from thread to thread.
    data = jax.device_put(data, jax.devices("cpu")[0])
    return BlockManager.from_pool(KVPool.wrap(data, SPEC))


@pytest.fixture
def host(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (NUM_SLOTS, SPEC.block_bytes), np.uint8)


@jax.jit
def staged(pool: KVPool, ids: jax.Array) -> jax.Array:
    return gather_blocks(pool, ids, "universal")


def universal(blocks: np.ndarray) -> np.ndarray:
    """NHD blocks [n, nl, no, nt, nh, hd] as universal ones."""
    return np.ascontiguousarray(blocks.transpose(0, 4, 1, 2, 3, 5))


def as_bytes(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(blocks), -1)


def decode(pool: KVPool) -> KVPool:
    """A step that changes every block, and takes a while."""
    return KVPool(pool.data * 1.5 + 1, pool.spec)


def test_up_into_some_places_and_down_from_a_room(
    copies: Copies, host: np.ndarray
) -> None:
    size, before = SPEC.block_bytes, host.copy()
    room = copies.room((4 * size // 4,), np.float32)  # flat, as `Rooms` makes them
    whole = Cut.whole(UNIVERSAL)
    copies.start_up(host, [5, 2], whole, room, 0, [3, 1]).wait()
    got = np.asarray(room).view(np.uint8).reshape(4, size)
    np.testing.assert_array_equal(got[[3, 1]], before[[5, 2]])
    assert not got[[0, 2]].any()
    copies.down(room, [1, 0, 3], host, [0, 1, 4])
    np.testing.assert_array_equal(host[[0, 4]], before[[2, 5]])
    assert not host[1].any()
    for at in ([4, 1], [-1, 1]):
        words = f"places must be from 0 to 3, got {min(at)} to {max(at)}"
        with pytest.raises(IndexError, match=words):
            copies.start_up(host, [0, 1], whole, room, 0, at)
    with pytest.raises(IndexError, match="places must be from 0 to 3, got 4 to 4"):
        copies.down(room, [4], host, [0])


def test_down_and_up(copies: Copies, manager: BlockManager, host: np.ndarray) -> None:
    before, slots = np.array(manager.pool.data), np.array([5, 0, 1, 3])
    kept = host.copy()
    ids = np.array([1, 6, 7, 2, 4], np.int32)
    rows = [0, 2, 3, 4]  # and not block 6
    copies.down(staged(manager.pool, ids), rows, host, slots)
    np.testing.assert_array_equal(host[slots], as_bytes(universal(before[ids[rows]])))
    np.testing.assert_array_equal(host[[2, 4]], kept[[2, 4]])

    room = copies.room((8, *UNIVERSAL.block_shape), SPEC.dtype)
    arrived = copies.up(host, slots[::-1], Cut.whole(UNIVERSAL), room)
    assert arrived is room
    to = np.array([0, 1, 2, 3, -1, -1, -1, -1], np.int32)
    manager.update(lambda pool, x: scatter_blocks(pool, to, x, "universal"), arrived)
    after = np.array(manager.pool.data)
    np.testing.assert_array_equal(after[:4], before[ids[rows]][::-1])
    np.testing.assert_array_equal(after[4:], before[4:])


def test_one_layer_comes_up(copies: Copies, host: np.ndarray, four_cpus: None) -> None:
    blocks = host.view(np.float32).reshape(NUM_SLOTS, *UNIVERSAL.block_shape)
    heads, _, *rest = UNIVERSAL.block_shape
    slots = [4, 5, 0]
    for layer in range(SPEC.num_layers):
        room = copies.room((4, heads, *rest), SPEC.dtype)
        cut = Cut.layer(UNIVERSAL, layer)
        assert cut.nbytes * SPEC.num_layers == SPEC.block_bytes
        arrived = np.asarray(copies.up(host, slots, cut, room))
        # By bits: random bytes are NaN, too.
        np.testing.assert_array_equal(
            as_bytes(arrived[:3]), as_bytes(blocks[slots][:, :, layer])
        )
        assert not arrived[3].any()


def test_under_decode_that_donates_the_pool(
    streams: Streams, manager: BlockManager, host: np.ndarray
) -> None:
    """What was staged is what arrives, whatever has become of the pool meanwhile."""
    copies = on_streams(streams)
    ids = np.array([3, 1], np.int32)
    manager.update(decode)
    before = np.array(manager.pool.data)
    streams.hold()
    with ThreadPoolExecutor(1) as worker:
        array = staged(manager.pool, ids)
        job = worker.submit(copies.down, array, [0, 1], host, [2, 5])
        del array
        for _ in range(5):
            manager.update(decode)
        manager.pool = KVPool.zeros(SPEC, NUM_BLOCKS)  # the old one is gone
        gc.collect()
        time.sleep(0.02)
        assert not job.done()
        streams.go_on()
        job.result()
    np.testing.assert_array_equal(host[[2, 5]], as_bytes(universal(before[ids])))


def test_both_ways_in_many_threads(
    copies: Copies, manager: BlockManager, rng: np.random.Generator
) -> None:
    before = as_bytes(universal(np.array(manager.pool.data)))
    host = np.zeros((16, SPEC.block_bytes), np.uint8)
    cut, shape = Cut.whole(UNIVERSAL), (2, *UNIVERSAL.block_shape)

    def there_and_back(pair: int) -> None:
        slots, ids = [2 * pair, 2 * pair + 1], np.array([pair, 7 - pair], np.int32)
        for _ in range(10):
            host[slots] = 0
            copies.down(staged(manager.pool, ids), [0, 1], host, slots)
            arrived = copies.up(host, slots, cut, copies.room(shape, SPEC.dtype))
            np.testing.assert_array_equal(as_bytes(np.asarray(arrived)), before[ids])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(there_and_back, range(8)))


def test_rooms_share_no_memory(copies: Copies) -> None:
    rooms = [copies.room((2, 8), np.uint8) for _ in range(5)]
    for room in rooms:
        room.block_until_ready()
    assert len({room.unsafe_buffer_pointer() for room in rooms}) == 5


def test_a_copy_keeps_what_it_writes(streams: Streams, host: np.ndarray) -> None:
    copies = on_streams(streams)
    room = copies.room((1, SPEC.block_bytes), np.uint8)
    streams.hold()
    copy = copies.start_up(host, [3], Cut.whole(UNIVERSAL), room)
    seen = weakref.ref(room)
    del room
    gc.collect()
    assert seen() is not None and not copy.done
    streams.go_on()
    copy.wait()
    gc.collect()
    assert seen() is None


def waited_for(streams: Streams, host: np.ndarray) -> tuple[Copy, threading.Thread]:
    """A copy that is held back, and a thread that waits for it."""
    copies = on_streams(streams)
    room = copies.room((1, SPEC.block_bytes), np.uint8)
    streams.hold()
    copy = copies.start_up(host, [3], Cut.whole(UNIVERSAL), room)
    waiter = threading.Thread(target=copy.wait)
    waiter.start()
    return copy, waiter


def test_asking_does_not_wait(streams: Streams, host: np.ndarray) -> None:
    """Also while another thread does."""
    copy, waiter = waited_for(streams, host)
    time.sleep(0.02)
    assert waiter.is_alive()
    asking = threading.Thread(target=lambda: answers.append(copy.done))
    answers: list[bool] = []
    asking.start()
    asking.join(5)
    streams.go_on()
    waiter.join()
    assert answers == [False] and copy.done


def test_waits_leave_the_gil_alone(streams: Streams, host: np.ndarray) -> None:
    _, waiter = waited_for(streams, host)
    ticks = 0
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        ticks += 1
    assert ticks > 100 and waiter.is_alive()
    streams.go_on()
    waiter.join()


def test_a_program_that_fails(
    copies: Copies, host: np.ndarray, four_cpus: None
) -> None:
    def fails(x: np.ndarray) -> np.ndarray:
        raise ValueError("this program fails")

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    kept = host.copy()
    with pytest.raises(jax.errors.JaxRuntimeError, match="this program fails"):
        array = program(jnp.zeros((1, SPEC.block_bytes), jnp.uint8))
        copies.down(array, [0], host, [0])
    np.testing.assert_array_equal(host, kept)


def test_a_copy_that_fails(streams: Streams, host: np.ndarray) -> None:
    copies = on_streams(streams)
    room = copies.room((2, SPEC.block_bytes), np.uint8)
    streams.fail_at(1)
    with pytest.raises(CopyError, match="Copies: copy_stream: a copy: invalid arg"):
        copies.up(host, [0, 2], Cut.whole(UNIVERSAL), room)
    streams.fail_at(0)
    copies.up(host, [0, 2], Cut.whole(UNIVERSAL), room)
    np.testing.assert_array_equal(np.asarray(room), host[[0, 2]])


def test_places_outside(copies: Copies, host: np.ndarray, four_cpus: None) -> None:
    size = SPEC.block_bytes
    array = jnp.zeros((2, size), jnp.uint8)
    cut = Cut.whole(UNIVERSAL)
    with pytest.raises(IndexError, match=r"Copies.down: places .* 0 to 1, got 0 to 2"):
        copies.down(array, [0, 2], host, [0, 1])
    with pytest.raises(IndexError, match=r"Copies.down: .* 0 to 5, got -1 to 0"):
        copies.down(array, [0, 1], host, [0, -1])
    with pytest.raises(IndexError, match=r"Copies.up: .* 0 to 5, got 6 to 6"):
        copies.up(host, [6], cut, array)
    with pytest.raises(ValueError, match=r"rows of staged and host .* got 8 and 1536"):
        copies.down(jnp.zeros((2, 8), jnp.uint8), [0], host, [0])
    with pytest.raises(ValueError, match=r"hold 3 rows of 1536 .* got uint8\[2, 1536"):
        copies.up(host, [0, 1, 2], cut, array)
    with pytest.raises(ValueError, match=r"1 rows of 1536 .* got uint8\[2, 8\]"):
        copies.up(host, [0], cut, jnp.zeros((2, 8), jnp.uint8))
    with pytest.raises(
        ValueError, match=r"host must be dense uint8 .* got uint8\[6, 7"
    ):
        copies.up(host[:, ::2], [0], cut, array)
    with pytest.raises(ValueError, match="leaves a slot of 1000 bytes"):
        copies.up(host[:, :1000].copy(), [0], cut, array)
