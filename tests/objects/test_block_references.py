"""Counted references to blocks: shared, collected, exported, from many threads."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)
from racing import run_in_threads

import jax_kvblock as kv

BLOCKS = 6


def make_manager(num_blocks: int = BLOCKS) -> kv.BlockManager:
    return kv.BlockManager(
        2, 4, num_kv_heads=2, head_dim=5, dtype=jnp.float32, num_blocks=num_blocks
    )


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


def test_shared_blocks_outlive_either_handle(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(2)
    shared = blocks.share()
    third = blocks[0].share()
    np.testing.assert_array_equal(shared.ids, blocks.ids)
    assert [b.ref_count for b in blocks] == [3, 2]
    blocks.free()
    assert not blocks[0] and shared[0] and third
    assert manager.num_free_blocks == BLOCKS - 2
    shared.free()
    assert manager.num_free_blocks == BLOCKS - 1
    manager.free(third)
    assert manager.num_free_blocks == BLOCKS


def test_both_handles_can_be_freed_at_once(manager: kv.BlockManager) -> None:
    block = manager.allocate_blocks(1)[0]
    manager.free([block, block.share()])
    assert manager.num_free_blocks == BLOCKS


def test_collected_blocks_come_back(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(3)
    one, layer = blocks[0], blocks[1][0]
    del blocks
    gc.collect()
    assert manager.num_free_blocks == BLOCKS - 2, "a block and a layer hold theirs"
    assert one and layer
    cycle: list[Any] = [one]
    cycle.append(cycle)
    del one, cycle, layer
    gc.collect()
    assert manager.num_free_blocks == BLOCKS


def test_a_freed_block_is_not_freed_again_when_collected(
    manager: kv.BlockManager,
) -> None:
    block = manager.allocate_blocks(1)[0]
    manager.free(block)
    again = manager.allocate_blocks(BLOCKS)
    del block
    gc.collect()
    assert manager.num_free_blocks == 0 and len(again) == BLOCKS


def test_blocks_keep_their_manager(manager: kv.BlockManager) -> None:
    block = make_manager().allocate_blocks(1)[0]
    gc.collect()
    assert block and not np.asarray(block).any()


# ---- garbage -------------------------------------------------------------------------


def hold_in_a_cycle(manager: kv.BlockManager, count: int) -> None:
    cycle: list[Any] = [manager.allocate_blocks(count)]
    cycle.append(cycle)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_blocks_in_garbage_are_found_when_they_are_needed(
    manager: kv.BlockManager, no_collections: None
) -> None:
    for _ in range(3):
        hold_in_a_cycle(manager, BLOCKS)
        assert manager.num_free_blocks == 0
        assert len(manager.allocate_blocks(BLOCKS)) == BLOCKS


def test_running_out_again_and_again_does_not_collect_all_the_time(
    manager: kv.BlockManager, no_collections: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, collections = [0.0], []

    def collect() -> None:
        now[0] += 0.2
        collections.append(now[0])

    monkeypatch.setattr("jax_kvblock.objects.manager.gc.collect", collect)
    monkeypatch.setattr("jax_kvblock.objects.manager.time.monotonic", lambda: now[0])
    manager = make_manager()
    held = manager.allocate_blocks(BLOCKS)
    for _ in range(1000):
        now[0] += 0.1
        with pytest.raises(kv.PoolExhaustedError):
            manager.allocate_blocks(1)
    assert 5 < len(collections) < 20, "about 2 s of 100"
    before = len(collections)
    with pytest.raises(kv.PoolExhaustedError):
        manager.allocate_blocks(BLOCKS + 1)  # never fits, so nothing is looked for
    assert len(collections) == before and len(held) == BLOCKS


def test_exhaustion_names_the_exports_that_hold_freed_blocks(
    manager: kv.BlockManager,
) -> None:
    blocks = manager.allocate_blocks(BLOCKS)
    exports = [blocks[4].__dlpack__(), blocks[2][1].__dlpack__()]
    held = blocks[0].__dlpack__()  # its block is not freed, so it is not at fault
    blocks[1:].free()
    message = r"6 free.*DLPack exports keep freed blocks: block 2, layer 1; block 4\."
    with pytest.raises(kv.PoolExhaustedError, match=message):
        manager.allocate_blocks(5)
    del exports
    assert len(manager.allocate_blocks(5)) == 5 and held


# ---- threads -------------------------------------------------------------------------


def test_threads_never_hold_one_block(eager_switching: None) -> None:
    manager = make_manager(16)
    held: set[int] = set()
    lock = threading.Lock()
    allocated = [0] * 4

    def work(index: int) -> None:
        draw = random.Random(index)
        for _ in range(300):
            try:
                blocks = manager.allocate_blocks(draw.randint(0, 6))
            except kv.PoolExhaustedError:
                continue
            ids = {block.id for block in blocks}
            with lock:
                assert not ids & held, "a block was handed out twice"
                held.update(ids)
            allocated[index] += len(ids)
            extra = blocks.share() if draw.random() < 0.5 else []
            capsules = [block.__dlpack__() for block in blocks[:1]]
            if draw.random() < 0.5:
                manager.free(extra)
            with lock:
                held.difference_update(ids)
            del capsules, extra
            if draw.random() < 0.5:
                blocks.free()
            del blocks

    run_in_threads(4, work)
    gc.collect()
    assert manager.num_free_blocks == 16 and manager.live_exports == []
    assert sorted(manager.allocate_blocks(16).ids) == list(range(16))
    assert sum(allocated) > 400  # who gets how many is the scheduler's affair


def test_one_of_two_racing_frees_fails(eager_switching: None) -> None:
    manager = make_manager(400)
    for _ in range(20):
        blocks = manager.allocate_blocks(400)
        others = blocks.share()
        barrier = threading.Barrier(2)
        refusals: list[str] = []

        def free_each(_: int, blocks=blocks, start=barrier, said=refusals) -> None:
            start.wait()
            for block in blocks:
                try:
                    manager.free(block)
                except ValueError as error:
                    said.append(str(error))

        run_in_threads(2, free_each)
        assert {block.ref_count for block in others} == {1}, "a reference got lost"
        assert len(refusals) == 400, "a block was freed twice"
        others.free()


# ---- any order of events -------------------------------------------------------------


class References(RuleBasedStateMachine):
    """Handles and exports come and go; a plain count says what must be free."""

    handles: Bundle[kv.Block] = Bundle("handles")
    exports: Bundle[Any] = Bundle("exports")

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # collections when blocks run out need not look at all of JAX
        self.manager = make_manager()
        self.held: list[int] = []  # a block's id, once for each handle or export

    def teardown(self) -> None:
        gc.unfreeze()

    @rule(target=handles, count=st.integers(0, 4))
    def allocate(self, count: int) -> Any:
        free = set(range(BLOCKS)) - set(self.held)
        if count > len(free):
            with pytest.raises(kv.PoolExhaustedError, match=f"{len(free)} of {BLOCKS}"):
                self.manager.allocate_blocks(count)
            return multiple()
        blocks = self.manager.allocate_blocks(count)
        ids = [block.id for block in blocks]
        assert len(set(ids)) == count and set(ids) <= free
        self.held += ids
        return multiple(*([block] for block in blocks))

    @rule(target=handles, handle=handles)
    def share(self, handle: list[kv.Block]) -> Any:
        if not handle[0]:
            with pytest.raises(ValueError, match="freed"):
                handle[0].share()
            return multiple()
        self.held.append(handle[0].id)
        return [handle[0].share()]

    @rule(handle=handles)
    def free(self, handle: list[kv.Block]) -> None:
        if not handle[0]:
            with pytest.raises(ValueError, match="freed already"):
                self.manager.free(handle[0])
            return
        self.manager.free(handle[0])
        self.held.remove(handle[0].id)

    @rule(handle=consumes(handles))
    def drop(self, handle: list[kv.Block]) -> None:
        block = handle.pop()
        if block:
            self.held.remove(block.id)

    @rule(target=exports, handle=handles, layer=st.none() | st.integers(0, 1))
    def export(self, handle: list[kv.Block], layer: int | None) -> Any:
        view = handle[0] if layer is None else handle[0][layer]
        if not view:
            with pytest.raises(BufferError, match="freed"):
                view.__dlpack__()
            return multiple()
        self.held.append(handle[0].id)
        return [handle[0].id, view.__dlpack__()]

    @rule(export=consumes(exports))
    def drop_export(self, export: list[Any]) -> None:
        self.held.remove(export[0])
        export.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.manager.num_free_blocks == BLOCKS - len(set(self.held))

    @invariant()
    def ids_are_valid(self) -> None:
        free = self.manager.num_free_blocks
        ids = self.manager.allocate_blocks(free).ids
        assert sorted({*ids, *self.held}) == list(range(BLOCKS))
        assert not set(ids) & set(self.held)


References.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_any_order_of_events = References.TestCase
