"""Rooms on the device: how many there are, and when they are used again."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from emulated_streams import Streams
from small_tiers import SIZE, Setup
from tier_stores import MemoryStore
from waiting import wait_until

from jax_kvblock import PoolExhaustedError
from jax_kvblock.cache import programs
from jax_kvblock.cache.copy_lines import CopyError
from jax_kvblock.cache.rooms import Rooms


class Reading:
    """An output of a program that is under way."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended, self.error = threading.Event(), error

    def block_until_ready(self) -> None:
        assert self.ended.wait(30)
        if self.error is not None:
            raise self.error


def rooms(count: int) -> Rooms:
    return Rooms(lambda: jnp.zeros(4), count)


def test_used_again() -> None:
    some = rooms(2)
    first, second = some.take(), some.take()
    assert first is not second
    some.give_back(second)
    some.give_back(first)
    assert some.take() is second and some.take() is first


def test_who_takes_more_gets_new_ones_that_are_not_kept() -> None:
    some = rooms(1)
    taken = [some.take() for _ in range(3)]
    assert len({id(room) for room in taken}) == 3
    for room in taken:
        some.give_back(room)
    assert some.take() is taken[0]
    assert all(some.take() is not room for room in taken)


def test_not_before_the_program_that_reads_has_ended() -> None:
    some, reading = rooms(1), Reading()
    room = some.take()
    some.give_back(room, reading)
    with ThreadPoolExecutor(1) as worker:
        job = worker.submit(some.take)
        with pytest.raises(TimeoutError):
            job.result(0.05)
        reading.ended.set()
        assert job.result() is room


def test_what_a_program_failed_with_is_not_used_again() -> None:
    some, reading = rooms(1), Reading(RuntimeError("it failed"))
    room = some.take()
    some.give_back(room, reading)
    reading.ended.set()
    assert some.take() is not room


def test_booked_by_so_many_at_a_time() -> None:
    some = Rooms(lambda: jnp.zeros(4), 2, spare=1)
    booked = [some.book() for _ in range(3)]
    assert booked[0] and booked[1] and booked[2] is None
    del booked[0]
    assert some.book() is not None  # dropped at once
    taken = [some.take() for _ in range(3)]
    for room in taken:
        some.give_back(room)
    assert [some.take() for _ in range(3)] == taken


def test_closed() -> None:
    some = rooms(1)
    room = some.take()
    some.close()
    some.give_back(room)
    assert some.take() is not room


# ---- of tiers ----


@pytest.fixture
def setup() -> Iterator[Setup]:
    """Two rooms of four blocks."""
    made = Setup()
    made.tiers.close()
    made = Setup(ahead_bytes=8 * made.size)
    yield made
    made.tiers.close()
    made.tiers.check()


def settle(one: Setup) -> None:
    """Waits for the jobs of the thread that copies up."""
    one.tiers.below.up.submit(lambda: None).result()


def counted(one: Setup, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each copy into a room."""
    copies: list[int] = []
    bring = one.tiers.below.bring

    def count(*given: object) -> object:
        copies.append(len(copies))
        return bring(*given)

    monkeypatch.setattr(one.tiers.below, "bring", count)
    return copies


@pytest.mark.parametrize("by_layer", [False, True])
def test_no_more_lies_on_the_device_than_was_asked_for(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, by_layer: bool
) -> None:
    setup.only_below(range(61))  # 15 blocks: four parts, or three layers of two
    copies = counted(setup, monkeypatch)
    table, ticket = setup.tiers.open(range(61), by_layer=by_layer)
    settle(setup)
    assert len(copies) == 2

    def polled() -> bool:
        ticket.poll()
        settle(setup)
        return ticket.done

    wait_until(polled)  # a copy on a busy GPU may take a while
    assert len(copies) == (6 if by_layer else 4)
    assert table.match() == 60
    setup.holds(table)


def test_who_is_not_polled_holds_up_nobody(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.only_below(range(29))
    setup.only_below(range(100, 129))
    one, left = setup.tiers.open(range(29))
    settle(setup)
    copies = counted(setup, monkeypatch)
    two, ticket = setup.tiers.open(range(100, 129))
    settle(setup)
    assert len(copies) == 1  # the rooms are the other's
    ticket.wait()
    assert two.match() == 28 and not left.done
    setup.holds(two)
    left.wait()
    assert one.match() == 28
    setup.holds(one)


@pytest.mark.parametrize("cancelled", [False, True])
def test_rooms_of_tickets_that_are_dropped_are_anybodys(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    setup.only_below(range(29))
    _, ticket = setup.tiers.open(range(29))
    if cancelled:
        ticket.cancel()
    del _, ticket
    settle(setup)
    copies = counted(setup, monkeypatch)
    table, ticket = setup.tiers.open(range(29))
    settle(setup)
    assert len(copies) == 2
    ticket.wait()
    assert table.match() == 28
    setup.holds(table)


def test_the_first_layer_of_all_blocks_comes_first(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.only_below(range(61))
    copies = counted(setup, monkeypatch)
    table, ticket = setup.tiers.open(range(61), by_layer=True)
    ids = None
    for layer in range(3):
        ticket.wait(layer=layer)
        settle(setup)
        assert len(copies) <= 2 * (layer + 2)  # no other layer's but the next
        pool = np.array(setup.manager.pool.data)
        if ids is None:
            ids = np.flatnonzero(pool[:, 0].any((1, 2, 3, 4)))
            assert len(ids) == 15
    assert table.match() == 60
    setup.holds(table)


@pytest.mark.parametrize("then", ["comes", "fails", "is cancelled"])
def test_a_block_is_found_as_soon_as_its_part_has_come(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whatever becomes of those behind it, which nobody finds before they are there."""
    setup.only_below(range(61))
    bring, gate, calls = setup.tiers.below.bring, threading.Event(), []

    def one_by_one(*given: object) -> object:
        calls.append(len(calls))
        assert len(calls) == 1 or gate.wait(30)
        if len(calls) > 1 and then == "fails":
            raise CopyError("no copy")
        return bring(*given)

    monkeypatch.setattr(setup.tiers.below, "bring", one_by_one)
    table, ticket = setup.tiers.open(range(61))
    begun = time.monotonic()
    while not ticket._stages[0].arrived:
        assert time.monotonic() - begun < 30
    assert not ticket.poll()
    with setup.cache.open(range(61)) as other:
        assert other.num_cached_tokens == 16  # a room holds four blocks of four
        setup.holds(other)
    if then == "is cancelled":
        ticket.cancel()
    gate.set()
    if then == "fails":
        with pytest.raises(CopyError, match="no copy"):
            ticket.wait()
    elif then == "comes":
        ticket.wait()
    assert table.match() == (60 if then == "comes" else 16)
    setup.holds(table)
    settle(setup)
    assert setup.cache.stats()["held"] == len(table)
    assert setup.tiers.stats()["host"]["held"] == 0


def test_what_is_kept_in_host_memory_is_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four parts the second one comes from the store, and is asked for alone."""
    one = Setup(store=MemoryStore())
    one.only_below(range(61))
    keys = one.cache.namespace.keys(range(61))
    one.tiers.below.host.books.forget(keys[4:8])
    place, asked = one.tiers.below.place, []

    def noted(keys: list[bytes], *given: object, **more: object) -> object:
        asked.append(keys)
        return place(keys, *given, **more)

    monkeypatch.setattr(one.tiers.below, "place", noted)
    table, ticket = one.tiers.open(range(61))
    ticket.wait()
    assert asked == [keys[4:8]] and table.match() == 60
    one.holds(table)
    stats = one.tiers.stats()
    assert (stats["host"]["blocks_out"], stats["store"]["blocks_out"]) == (11, 4)
    assert stats["host"]["held"] == 0
    one.tiers.close()


def test_what_waits_for_its_turn_keeps_its_place(setup: Setup) -> None:
    """On the host, whose slots all are taken by what goes down meanwhile."""
    setup.only_below(range(61))
    table, ticket = setup.tiers.open(range(61))
    taken = setup.tiers.below.slots(32)
    assert taken is not None and len(taken) == 32 - 15  # idle ones, too
    taken.release()
    ticket.wait()
    assert ticket.num_missing == 0 and table.match() == 60
    setup.holds(table)


def test_who_makes_room_on_the_device_takes_no_place_of_those_that_come() -> None:
    """The host is full of what is sought, and idle blocks go down for it."""
    one = Setup(num_blocks=8, host_blocks=6)
    one.only_below(range(25))
    one.computed(range(100, 132)).free()
    table, ticket = one.tiers.open(range(25))
    ticket.wait()
    assert ticket.num_missing == 0 and table.match() == 24
    one.holds(table)
    table.free()
    one.cache.clear()
    kept = one.manager.allocate_blocks(8)
    with pytest.raises(PoolExhaustedError):
        one.tiers.open(range(25))
    assert one.tiers.stats()["host"]["held"] == 0
    del kept
    one.tiers.close()


def test_landing_places_are_read_before_the_next_blocks_land(
    streams: Streams,
) -> None:
    """Copies from there are slow; the store is not."""
    store = MemoryStore()
    one = Setup(store=store, host_blocks=2)  # nearly all come from the store
    table = one.computed(range(61))
    for first in range(0, 15, 2):
        one.tiers.offload(table.keys[first : first + 2]).wait()
        one.tiers.drain()
    table.free()
    one.cache.clear()
    one.tiers.below.host.books.forget_idle()
    one.tiers.below._copies._up = streams.line()
    streams.hold()
    table, ticket = one.tiers.open(range(61))
    time.sleep(0.2)  # for the next blocks to land, if they do not wait
    streams.go_on()
    ticket.wait()
    assert table.match() == 60
    one.holds(table)
    one.tiers.close()


def test_the_next_blocks_leave_before_the_first_are_there(
    setup: Setup, streams: Streams
) -> None:
    """Or the link would have nothing to do between two of them."""
    setup.tiers.below._copies._down = streams.line()
    table = setup.computed(range(33))
    streams.hold()
    before = streams.copies
    ticket = setup.tiers.offload(table)
    setup.tiers.below.down.submit(lambda: None).result()
    assert streams.copies - before == 2 and not ticket.done
    assert setup.tiers.lookup(range(1, 5)) == {"device": 0, "host": 0, "store": 0}
    streams.go_on()
    ticket.wait()
    assert setup.tiers.stats()["host"]["blocks_in"] == 8 == 32 // SIZE


# ---- what goes wrong ----


def test_a_part_that_cannot_begin_is_not_taken_for_one_that_came(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.only_below(range(61))
    table, ticket = setup.tiers.open(range(61))
    settle(setup)

    def broken(*given: object) -> None:
        raise RuntimeError("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(setup.tiers.below.up, "submit", broken)
        wait_until(ticket.poll)
    assert str(ticket.exception) == "no thread"
    assert table.match() == 16  # what had come before
    setup.holds(table)
    table.free()
    with pytest.raises(RuntimeError, match="no thread"):
        ticket.wait()
    settle(setup)
    assert setup.cache.stats()["held"] == setup.tiers.stats()["host"]["held"] == 0
    again, ticket = setup.tiers.open(range(61))
    ticket.wait()
    assert again.match() == 60
    setup.holds(again)


class NoBook:
    """A free list in which nothing can be published."""

    def __init__(self, books: Any) -> None:
        self._books = books

    def __getattr__(self, name: str) -> Any:
        return getattr(self._books, name)

    def publish_each(self, *given: object) -> None:
        raise RuntimeError("no book")


@pytest.mark.parametrize("by_layer", [False, True])
def test_blocks_that_cannot_be_published_are_not_said_to_have_come(
    by_layer: bool, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.only_below(range(29))
    table, books = setup.cache.open(range(29)), setup.cache._free_list
    with monkeypatch.context() as patch:
        broken = property(lambda cache: NoBook(books))
        patch.setattr(type(setup.cache), "_free_list", broken)
        ticket = setup.tiers.onboard(table, by_layer=by_layer)
    with pytest.raises(RuntimeError, match="no book"):
        ticket.wait()
    assert ticket.done and str(ticket.exception) == "no book" and ticket.poll()
    assert table.match() == 0 and setup.cache.stats()["held"] == 0
    again, ticket = setup.tiers.open(range(29))
    ticket.wait()
    assert again.match() == 28
    setup.holds(again)


def test_blocks_come_though_another_s_that_were_kept_for_them_have_gone() -> None:
    """Of two who bring the same ones the first is found, as long as it is there."""
    setup = Setup(num_blocks=40, ahead_bytes=1 << 22)
    setup.tiers._chunk = 4
    setup.only_below(range(61))
    tables, tickets = zip(*(setup.tiers.open(range(61)) for _ in range(2)), strict=True)
    for ticket in tickets:
        with ticket._lock:
            ticket._await(None)
            ticket._take()  # a part of four
        assert not ticket.done
    assert tables[1].match() == 16
    tickets[0].cancel()
    tables[0].free()
    tables[1].free()
    setup.cache.clear()
    tickets[1].wait()
    assert tickets[1].num_missing == 0
    table = setup.cache.open(range(61))
    assert len(table) == 15
    setup.holds(table)
    table.free()
    setup.tiers.close()


def test_tickets_that_failed_keep_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their errors have tracebacks, and nobody collects garbage."""
    setup.only_below(range(13))

    def broken(*given: object) -> None:
        raise RuntimeError("it failed")

    monkeypatch.setattr(programs, "write_blocks", broken)
    failed = []
    gc.disable()
    try:
        for _ in range(5):
            _, ticket = setup.tiers.open(range(13))
            with pytest.raises(RuntimeError, match="it failed"):
                ticket.wait()
            failed.append(ticket)
        rooms = setup.tiers.below.rooms
        assert [rooms.book() is not None for _ in range(2)] == [True, True]
        booked = [rooms.book(spare=True) for _ in range(5)]
        assert [each is not None for each in booked] == [True] * 4 + [False]
    finally:
        gc.enable()
    assert setup.tiers.stats()["host"]["held"] == 0


def test_those_who_find_no_room_at_all_wait_for_their_turn(setup: Setup) -> None:
    sequences = [range(100 * i, 100 * i + 5) for i in range(5)]
    for each in sequences:
        setup.only_below(each)
    opened = [setup.tiers.open(each) for each in sequences]  # two rooms, two spare
    settle(setup)
    assert not opened[4][1].poll() and not opened[4][1]._stages
    opened[0][1].wait()
    wait_until(
        opened[4][1].poll
    )  # a room is free once the program that read it has ended
    for table, ticket in opened:
        ticket.wait()
        assert table.match() == 4
        setup.holds(table)


def test_a_copy_that_takes_too_long(setup: Setup, streams: Streams) -> None:
    setup.only_below(range(13))
    setup.tiers.below._copies._up = streams.line()
    streams.hold()
    table, ticket = setup.tiers.open(range(13))
    settle(setup)
    with pytest.raises(TimeoutError, match="nothing came within"):
        ticket.wait(timeout=0.05)
    assert not ticket.done
    streams.go_on()
    ticket.wait(timeout=30)
    assert table.match() == 12
    setup.holds(table)


def test_closing_waits_for_what_comes_up(setup: Setup, streams: Streams) -> None:
    setup.only_below(range(13))
    setup.tiers.below._copies._up = streams.line()
    streams.hold()
    table, ticket = setup.tiers.open(range(13))
    settle(setup)
    with ThreadPoolExecutor(1) as worker:
        job = worker.submit(setup.tiers.close)
        with pytest.raises(TimeoutError):
            job.result(0.1)
        streams.go_on()
        job.result()
    ticket.wait()
    assert table.match() == 12
    setup.holds(table)


def test_a_ticket_that_is_cancelled_keeps_no_place_on_the_host() -> None:
    store = MemoryStore()
    one = Setup(store=store)
    one.only_below(range(13))
    keys = one.cache.namespace.keys(range(13))
    one.tiers.below.host.books.forget(keys[2:])  # the others are on the host, too
    _, ticket = one.tiers.open(range(13))
    settle(one)
    ticket.cancel()
    del ticket
    settle(one)
    assert one.tiers.stats()["host"]["held"] == 0
    one.tiers.close()
