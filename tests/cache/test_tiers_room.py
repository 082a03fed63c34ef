"""What makes room on the device: watermarks, copies ahead, small hosts, slow stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from small_tiers import Setup, states, victims
from tier_stores import MemoryStore

from jax_kvblock import PoolExhaustedError
from jax_kvblock.cache import TieredCache, park, programs


def test_room_is_made_by_moving_down() -> None:
    one = Setup()
    for i in range(4):
        one.computed([i, *range(15)]).free()
    assert one.cache.num_free_blocks == 0
    one.tiers.make_room(6)
    assert one.cache.num_free_blocks == 6
    one.tiers.drain()
    table, ticket = one.tiers.open([0, *range(15), 9])
    ticket.wait()
    assert table.match() == 16
    one.holds(table)
    one.tiers.close()


@pytest.mark.parametrize("call", ["offload", "make_room", "maintain", "park"])
def test_who_holds_the_managers_lock_may_call_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread is about to take that lock in the same call."""
    monkeypatch.setattr("jax_kvblock.cache.tiers.LOOK_REST", 0)
    one = Setup(low=0.9, high=1.0, write_through=True)
    tables = [one.computed([i, *range(9)]) for i in range(2)]
    one.computed([2, *range(12)]).free()
    there, inside = programs.staged, threading.Event()

    def slowly(*args: Any) -> Any:
        inside.set()
        time.sleep(0.2)  # so that the other one has its lock and wants ours
        return there(*args)

    monkeypatch.setattr(programs, "staged", slowly)

    def use(number: int) -> None:
        if call == "park":
            park(one.tiers, tables[number], 10)
        else:
            given = {"offload": (tables[number],), "make_room": (16,)}
            getattr(one.tiers, call)(*given.get(call, ()))

    def use_with_lock() -> None:
        with one.manager.lock:
            first.start()
            inside.wait(0.5)
            use(1)

    first = threading.Thread(target=use, args=(0,), daemon=True)
    second = threading.Thread(target=use_with_lock, daemon=True)
    second.start()
    second.join(20)
    first.join(20)
    assert not first.is_alive() and not second.is_alive(), "each waits for the other"
    one.tiers.close()


@pytest.mark.parametrize("with_store", [False, True])
def test_memory_on_the_host_is_what_was_asked_for(with_store: bool) -> None:
    """And for what comes from a store, or goes there slowly, what is documented."""
    store = MemoryStore()
    one = Setup(num_blocks=32, host_blocks=20, store=store if with_store else None)
    staged = 4 * one.size  # as Setup has it
    more = staged if with_store else one.size
    assert one.tiers.below.host.rows.nbytes == 20 * one.size + more
    store.gate.clear()
    under_way, most, put = 0, 0, store.put

    def watched(keys: Sequence[bytes], rows: Any) -> Any:
        nonlocal under_way, most
        under_way += rows.nbytes
        most = max(most, under_way)
        future = put(keys, rows)
        future.add_done_callback(lambda _: ended(rows.nbytes))
        return future

    def ended(size: int) -> None:
        nonlocal under_way
        under_way -= size

    store.put = watched  # type: ignore[method-assign]
    for i in range(8):
        with one.computed([i, *range(15)]) as table:
            one.tiers.offload(table)
    opened = threading.Timer(0.3, store.gate.set)
    opened.start()
    one.tiers.drain()
    assert most == (4 * staged if with_store else 0)
    one.tiers.close()


def test_watermarks() -> None:
    one = Setup(low=0.25, high=0.5)
    for i in range(3):
        one.computed([i, *range(15)]).free()
    one.tiers.maintain()
    assert one.cache.num_free_blocks == 4  # a quarter: not below it
    one.computed([3, *range(3)]).free()
    one.tiers.maintain()
    assert one.cache.num_free_blocks == 8
    one.tiers.drain()
    assert one.tiers.stats()["host"]["blocks_in"] == 5
    one.tiers.close()


def test_making_room_forgets_only_what_has_moved() -> None:
    one = Setup(host_blocks=1, low=0.5, high=0.75)
    for i in range(4):
        one.computed([i, *range(12)]).free()
    assert (len(victims(one)), one.cache.num_free_blocks) == (12, 4)
    one.tiers.maintain()  # wants eight, and the host has one place
    one.tiers.drain()
    moved = one.tiers.stats()["host"]["blocks_in"]
    assert 1 <= moved <= 2 and len(victims(one)) == 12 - moved
    one.tiers.close()


def test_write_through_sends_a_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small host memory one takes the other's place; once is enough."""
    monkeypatch.setattr("jax_kvblock.cache.tiers.LOOK_REST", 0)
    store = MemoryStore()
    one = Setup(host_blocks=2, write_through=True, store=store)
    for i in range(3):
        one.computed([i, *range(12)]).free()
    idle = len(victims(one))
    for _ in range(3 * idle):
        one.tiers.maintain()
        one.tiers.drain()
    assert one.tiers.stats()["host"]["blocks_in"] == idle == len(store.blocks)
    # One that was forgotten and comes again is another one.
    one.cache.clear()
    one.tiers.maintain()
    assert not one.tiers._written
    one.tiers.close()


def test_maintain_tells_whether_there_may_be_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax_kvblock.cache.tiers.LOOK_REST", 0)
    one = Setup(write_through=True)
    one.computed(range(12)).free()
    with monkeypatch.context() as full:
        full.setattr(one.tiers.below, "slots", lambda count: None)
        assert not one.tiers.maintain()  # who waits would wait for ever
    looks = 0
    while one.tiers.maintain():
        one.tiers.drain()
        looks += 1
    assert looks >= 1 and one.tiers.stats()["host"]["blocks_in"] == 3
    one.tiers.write_through = False
    one.computed(range(100, 112)).free()
    assert not one.tiers.maintain()
    one.tiers.close()


def test_write_through_looks_a_part_of_the_time_alone() -> None:
    one = Setup(write_through=True)
    one.computed(range(12)).free()
    one.tiers.maintain()
    one.tiers.drain()
    one.tiers._next_look = time.monotonic() + 60
    one.computed(range(100, 112)).free()
    one.tiers.maintain()
    one.tiers.drain()
    assert one.tiers.stats()["host"]["blocks_in"] == 3
    one.tiers._next_look = 0.0
    one.tiers.maintain()
    one.tiers.drain()
    assert one.tiers.stats()["host"]["blocks_in"] == 6
    one.tiers.close()


def test_a_flush_has_all_idle_blocks_in_the_store() -> None:
    store = MemoryStore()
    one = Setup(host_blocks=3, store=store)
    keys = []
    for i in range(3):
        table = one.computed([i, *range(15)])
        keys += table.keys
        table.free()
    one.tiers.flush()
    assert all(store.has(keys)) and len(keys) == 12
    assert all(one.cache._free_list.find(key) is not None for key in keys)
    written = one.tiers.stats()["host"]["blocks_in"]
    one.tiers.flush()
    assert one.tiers.stats()["host"]["blocks_in"] == written
    one.tiers.close()


def test_a_slow_store_loses_nothing_of_the_host() -> None:
    """Slots wait until what is in them was handed to the store."""
    store = MemoryStore()
    store.gate.clear()
    one = Setup(num_blocks=64, host_blocks=4, store=store)
    keys, skipped = [], 0
    for i in range(10):
        with one.computed([i, *range(8)]) as table:
            ticket = one.tiers.offload(table)
            keys += ticket.keys
            skipped += ticket.num_skipped
        time.sleep(0.01)
    store.gate.set()
    one.tiers.drain()
    assert skipped and len(keys) + skipped == 20
    assert all(store.has(keys))
    one.tiers.close()


def test_a_store_that_cannot_tell_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    one = Setup(store=store)

    def fails(keys: Sequence[bytes]) -> list[bool]:
        raise OSError("stale file handle")

    monkeypatch.setattr(store, "has", fails)
    table, ticket = one.tiers.open(range(17))
    ticket.wait()
    assert len(table) == 0 and ticket.num_missing == 0
    assert one.tiers.lookup(range(17)) == {"device": 0, "host": 0, "store": 0}
    assert one.tiers.stats()["store"]["failed"] == 8
    assert str(one.tiers.store_error) == "stale file handle"
    one.tiers.close()


def test_what_is_no_key() -> None:
    one = Setup()
    for wrong in ("abc", [b"abc"], [3]):
        with pytest.raises(TypeError, match="pass a table, or keys of 32 bytes"):
            one.tiers.offload(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache must be a PrefixCache"):
        TieredCache(one.manager, host_bytes=1 << 20)  # type: ignore[arg-type]
    one.tiers.close()


def test_write_through_leaves_blocks_and_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax_kvblock.cache.tiers.LOOK_REST", 0)
    one = Setup(write_through=True)
    for i in range(2):
        one.computed([i, *range(15)]).free()
    order = [key for _, key in victims(one)]
    for _ in range(4):
        one.tiers.maintain()
        one.tiers.drain()
    assert states(one) == (8, 8) and [key for _, key in victims(one)] == order
    one.tiers.maintain()
    one.tiers.make_room(16)
    assert one.tiers.stats()["host"]["blocks_in"] == 8
    table, ticket = one.tiers.open([1, *range(15), 9])
    ticket.wait()
    assert table.match() == 16
    one.holds(table)
    one.tiers.close()


def test_a_full_host_skips_and_says_so() -> None:
    one = Setup(host_blocks=2)
    table = one.computed(range(16))
    ticket = one.tiers.offload(table)
    assert len(ticket.keys) == 2 and ticket.num_skipped == 2
    ticket.wait()
    held = one.tiers.below.slots(2)
    ticket = one.tiers.offload(one.computed(range(100, 108)))
    assert ticket.num_skipped == 2 and ticket.keys == () and ticket.done
    assert one.tiers.stats()["host"]["skipped"] == 4
    assert held is not None
    held.release()
    one.tiers.close()


def test_blocks_that_come_up_need_room() -> None:
    one = Setup(num_blocks=4)
    one.only_below(range(13))
    kept = one.manager.allocate_blocks(2)
    with pytest.raises(PoolExhaustedError, match="3 blocks to come, 2 of 4 free"):
        one.tiers.open(range(13))
    del kept
    one.tiers.check()
    one.tiers.close()
