"""Threads that share a manager: no write is lost, no block is held twice."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from racing import run_in_threads

import jax_kvblock as kv

BLOCKS = 8

pytestmark = pytest.mark.usefixtures("eager_switching")


def make_manager(num_blocks: int = BLOCKS, **changes: Any) -> kv.BlockManager:
    arguments = {"num_kv_heads": 2, "head_dim": 4, "dtype": jnp.float32, **changes}
    return kv.BlockManager(2, 4, num_blocks=num_blocks, **arguments)


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


def add_one(pool: kv.KVPool) -> kv.KVPool:
    return jax.tree.map(lambda x: x + 1, pool)


@pytest.mark.parametrize("part", ["block", "layer", "piece"])
@pytest.mark.parametrize("exported", [True, False])
def test_no_write_is_lost(part: str, exported: bool) -> None:
    # In CPU memory, where XLA copies a pool that is exported.
    manager = make_manager(num_blocks=17, device=jax.devices("cpu")[0])
    *blocks, spare = manager.allocate_blocks(17)
    parts: dict[str, Callable[[kv.Block], Any]] = {
        "block": lambda block: block,
        "layer": lambda block: block[1],
        "piece": lambda block: block[1].v,
    }
    targets = [parts[part](block) for block in blocks]
    for target in (targets[0], spare):  # compiled before the race begins
        target.copy_from(np.zeros(target.shape, np.float32))
    view = np.from_dlpack(spare) if exported else None

    def write(index: int) -> None:
        for number in (index + 1, index + 5):
            for target in targets[index::4]:
                target.copy_from(np.full(target.shape, number, np.float32))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.PoolDoubledWarning)
        run_in_threads(4, write)
    for i, target in enumerate(targets):
        assert (np.asarray(target) == i % 4 + 5).all(), f"target {i} was lost"
    assert view is None or not view.any()


@pytest.mark.parametrize("contiguous", [True, False])
def test_reads_and_exports_see_whole_pools(contiguous: bool) -> None:
    manager = make_manager(contiguous=contiguous, device=jax.devices("cpu")[0])
    blocks = manager.allocate_blocks(2)
    manager.update(add_one)
    done = threading.Event()
    reads: dict[str, Callable[[], Any]] = {
        "block": lambda: blocks[0],
        "layer": lambda: blocks[1][1],
        "export": lambda: np.from_dlpack(blocks[0][0]).copy(),
    }
    names = [*reads, "update"]

    def gather() -> None:
        with manager.lock:
            cache = kv.gather_blocks(manager.pool, blocks.ids)
        assert len(np.unique(cache)) == 1

    def work(index: int) -> None:
        if names[index] == "update":
            for _ in range(60):
                manager.update(add_one)
            done.set()
            return
        last = 1.0
        while not done.is_set():
            values = np.unique(np.asarray(reads[names[index]]()))
            assert len(values) == 1 and values[0] >= last
            last = values[0]
            assert blocks[0] and manager.pool.spec == manager.spec
            gather()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv.PoolDoubledWarning)
        run_in_threads(4, work)
    assert (np.asarray(blocks[0]) == 61).all() and manager.live_exports == []


@pytest.mark.parametrize("use", ["share", "export"])
def test_a_block_that_is_held_is_never_free(use: str, manager: kv.BlockManager) -> None:
    """One thread takes another hold of a block as a second one frees it."""
    for _ in range(150):
        block = manager.allocate_blocks(BLOCKS)[0]
        holds: list[Any] = []

        def race(index: int, block=block, holds=holds) -> None:
            if index:
                manager.free(block)
                return
            try:
                holds.append(block.share() if use == "share" else block.__dlpack__())
            except (ValueError, BufferError) as error:
                assert "freed" in str(error)

        run_in_threads(2, race)
        assert manager.num_free_blocks == BLOCKS - len(holds)
        assert block.ref_count == len(holds)
        free = manager.allocate_blocks(manager.num_free_blocks).ids
        assert (block.id in free) == (not holds)
        holds.clear()
    assert manager.num_free_blocks == BLOCKS


def test_a_block_that_is_being_written_is_given_to_nobody() -> None:
    """It is freed in the middle of `copy_from`, and somebody waits for a block."""
    manager = make_manager(num_blocks=1)
    block = manager.allocate_blocks(1)[0]
    ones = np.ones(block.shape, np.float32)
    block.copy_from(ones)
    writing, tried = threading.Event(), threading.Event()

    class Slow:
        """A source that takes its time."""

        def __dlpack__(self, **options: Any) -> Any:
            writing.set()
            assert tried.wait(10)
            return ones.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return ones.__dlpack_device__()

    def work(index: int) -> None:
        if index == 0:
            block.copy_from(Slow())
            return
        writing.wait()
        manager.free(block)
        with pytest.raises(kv.PoolExhaustedError):
            manager.allocate_blocks(1)
        tried.set()

    run_in_threads(2, work)
    assert not block and manager.num_free_blocks == 1


def test_the_manager_can_be_used_while_another_thread_compiles(
    manager: kv.BlockManager,
) -> None:
    """What only counts blocks waits for nobody; what uses the pool waits."""
    tracing, looked = threading.Event(), threading.Event()

    def slow(pool: kv.KVPool) -> kv.KVPool:
        tracing.set()
        assert looked.wait(10), "the other thread had to wait for this one"
        return add_one(pool)

    def work(index: int) -> None:
        if index == 0:
            manager.update(slow)
            return
        assert tracing.wait(10)
        blocks = manager.allocate_blocks(2)
        assert manager.num_free_blocks == BLOCKS - 2 and repr(blocks[0])
        manager.free(blocks[1])
        assert not manager.lock.acquire(blocking=False)
        looked.set()
        assert (np.asarray(blocks[0]) == 1).all(), "it waited for the update"

    run_in_threads(2, work)


def test_racing_threads_lose_no_update(manager: kv.BlockManager) -> None:
    manager.update(add_one)

    def step(pool: kv.KVPool) -> kv.KVPool:
        return add_one(pool)

    donating = jax.jit(step, donate_argnums=0)

    def work(index: int) -> None:
        for _ in range(25):
            if index % 2:
                manager.update(add_one)
            else:
                with manager.lock:
                    manager.pool = donating(manager.pool)

    run_in_threads(4, work)
    assert (np.asarray(manager.pool.data) == 101).all()


def test_closing_waits_for_an_update(manager: kv.BlockManager) -> None:
    manager.update(add_one)
    ended: list[str] = []

    def work(index: int) -> None:
        if index:
            time.sleep(0.01)
            manager.close()
            return
        with pytest.raises(RuntimeError, match="the manager is closed"):
            while True:
                manager.update(add_one)
        ended.append("closed")

    run_in_threads(2, work)
    assert ended == ["closed"]
