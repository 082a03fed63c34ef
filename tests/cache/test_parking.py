"""Sequences that make place for others come back as they were."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tiers import SIZE, Setup

from jax_kvblock import KVPool, PoolExhaustedError
from jax_kvblock.cache import Parked, Resuming, park, resume
from jax_kvblock.cache.copy_lines import CopyError


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.tiers.close()
    made.tiers.check()


@pytest.mark.parametrize("num_written", [1, 3, 4, 13, 14])
def test_parked_and_resumed(setup: Setup, num_written: int) -> None:
    table = setup.computed(range(14))
    table.truncate(num_written)
    rest = np.full(setup.manager.spec.block_shape, 7, np.float32)
    if num_written % SIZE:  # the last block is not full
        last = num_written // SIZE
        table.writable(last * SIZE, 1)
        setup.put(int(table.ids[last]), rest)
    table.append(99)  # not written yet
    parked = park(setup.tiers, table, num_written)
    assert table.freed and parked.tokens[-1] == 99
    setup.tiers.make_room(16)  # nothing of it stays on the device
    setup.tiers.drain()
    zeros = jnp.zeros_like(setup.manager.pool.data)
    setup.manager.pool = KVPool(zeros, setup.manager.spec)
    table, written = resume(setup.tiers, parked)
    assert written == num_written and table.num_tokens == num_written + 1
    assert len(table) == -(-(num_written + 1) // SIZE)
    setup.holds(table)
    if num_written % SIZE:
        pool = np.asarray(setup.manager.pool.data)
        np.testing.assert_array_equal(pool[table.ids[num_written // SIZE]], rest)
    table.slots(num_written, 1)


def test_a_sequence_with_an_adapter_is_not_parked_as_another(setup: Setup) -> None:
    """Else it would come back with the blocks of the same tokens without it."""
    setup.computed(range(14))
    table = setup.cache.open(range(14), adapter="french", salt="a tenant")
    table.reserve(14)
    setup.write(table)
    for given in ({}, {"adapter": "french"}, {"salt": "a tenant"}):
        with pytest.raises(ValueError, match="opened with another adapter or salt"):
            park(setup.tiers, table, 14, **given)
        assert not table.freed
    parked = park(setup.tiers, table, 14, adapter="french", salt="a tenant")
    table, written = resume(setup.tiers, parked)
    assert written == 14
    setup.holds(table)


def test_tables_of_another_pool(setup: Setup) -> None:
    """Two replicas in a process have equal namespaces, and blocks of their own."""
    setup.only_below(range(14))
    other = Setup()
    table = other.computed(range(14))
    before = setup.tiers.stats()
    with pytest.raises(ValueError, match="park: the table has its blocks in another p"):
        park(setup.tiers, table, 14)
    with pytest.raises(ValueError, match="onboard: the table has its blocks in anothe"):
        setup.tiers.onboard(table)
    with pytest.raises(ValueError, match="offload: the table has its blocks in anothe"):
        setup.tiers.offload(table)
    assert not table.freed and setup.tiers.stats() == before
    parked = park(other.tiers, table, 14)
    assert resume(other.tiers, parked)[1] == 14
    other.tiers.close()


def test_what_was_opened_before_weights_changed_is_not_parked(setup: Setup) -> None:
    table, parked = setup.computed(range(14)), setup.computed(range(50, 64))
    parked = park(setup.tiers, parked, 14)
    setup.cache.set_model_name("small, tuned")
    with pytest.raises(
        ValueError, match=r"or before `set_model_name`; .* compute it ag"
    ):
        park(setup.tiers, table, 14)
    assert not table.freed
    table, written = resume(setup.tiers, parked)
    assert written == 0 and table.num_cached_tokens == 0
    setup.holds(table)


def test_what_a_tier_has_lost_is_computed_again(setup: Setup) -> None:
    table = setup.computed(range(14))
    parked = park(setup.tiers, table, 14)
    setup.tiers.drain()
    setup.cache.clear()
    setup.tiers.below.host.books.forget([setup.cache.namespace.keys(range(14))[2]])
    table, written = resume(setup.tiers, parked)
    assert written == 8 and len(table) == 4
    setup.holds(table)


def test_no_room_leaves_it_parked(setup: Setup) -> None:
    parked = park(setup.tiers, setup.computed(range(14)), 14)
    setup.tiers.drain()
    setup.cache.clear()
    kept = setup.manager.allocate_blocks(14)
    with pytest.raises(PoolExhaustedError):
        resume(setup.tiers, parked)
    assert setup.cache.stats()["held"] == 14
    del kept
    table, written = resume(setup.tiers, parked)
    assert written == 14
    setup.holds(table)


# ---- in steps that never wait ----


def parked_below(one: Setup) -> Parked:
    """Of 14 tokens, whose blocks are not on the device."""
    parked = park(one.tiers, one.computed(range(14)), 14)
    one.tiers.drain()
    one.cache.clear()
    return parked


def settle(one: Setup) -> None:
    """Waits for the jobs of the thread that copies up."""
    one.tiers.below.up.submit(lambda: None).result()


@contextlib.contextmanager
def nothing_begins(one: Setup) -> Iterator[None]:
    """The thread that copies up begins nothing meanwhile."""
    gate = threading.Event()
    one.tiers.below.up.submit(gate.wait, 30)
    try:
        yield
    finally:
        gate.set()


def test_polled(setup: Setup) -> None:
    parked = parked_below(setup)
    coming = Resuming(setup.tiers, parked)
    polls, begun = 0, time.monotonic()
    while not coming.poll():
        settle(setup)
        polls += 1
        assert time.monotonic() - begun < 60
    # For blocks that are full, and maybe for the last one; a GPU may copy for longer.
    assert polls in (1, 2) or (polls > 2 and jax.default_backend() == "gpu")
    assert coming.done and coming.num_written == 14 and len(coming.table) == 4
    setup.holds(coming.table)
    coming.cancel()  # it has ended
    assert not coming.table.freed


@pytest.mark.parametrize("polls", [0, 1])
def test_cancelled_it_stays_parked(setup: Setup, polls: int) -> None:
    parked = parked_below(setup)
    coming = Resuming(setup.tiers, parked)
    settle(setup)
    with nothing_begins(setup):
        for _ in range(polls):
            assert not coming.poll()
        coming.cancel()
    assert coming.done and coming.table.freed
    settle(setup)
    assert setup.cache.stats()["held"] == 0
    table, written = resume(setup.tiers, parked)
    assert written == 14
    setup.holds(table)


def test_blocks_for_the_end_are_kept_meanwhile(setup: Setup) -> None:
    coming = Resuming(setup.tiers, parked_below(setup))
    with pytest.raises(PoolExhaustedError):
        setup.manager.allocate_blocks(13)
    kept = setup.manager.allocate_blocks(12)
    coming.wait()
    assert coming.num_written == 14
    setup.holds(coming.table)
    del kept


def test_others_take_the_blocks_all_the_same(setup: Setup) -> None:
    """As where some of them were lost below."""
    parked = parked_below(setup)
    coming = Resuming(setup.tiers, parked)
    coming._rest.release()
    kept = setup.manager.allocate_blocks(13)
    begun = time.monotonic()
    with pytest.raises(PoolExhaustedError):
        while not coming.poll():  # a GPU may copy for longer than the thread does
            settle(setup)
            assert time.monotonic() - begun < 60
    assert coming.done and coming.table.freed
    assert setup.cache.stats()["held"] == 13
    del kept
    table, written = resume(setup.tiers, parked)
    assert written == 14
    setup.holds(table)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("at", [1, 2])  # with the blocks that are full, the last one
def test_a_transfer_that_fails_leaves_it_parked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, waits: bool, at: int
) -> None:
    parked = parked_below(setup)
    bring, calls = setup.tiers.below.bring, []

    def broken(*given: object) -> object:
        calls.append(given)
        if len(calls) == at:
            raise CopyError("no copy")
        return bring(*given)

    monkeypatch.setattr(setup.tiers.below, "bring", broken)
    coming = Resuming(setup.tiers, parked)
    with pytest.raises(CopyError, match="no copy"):
        while not coming.done:
            coming.wait() if waits else coming.poll()
    assert coming.done and coming.table.freed
    settle(setup)
    calls.clear()
    calls += [None] * at
    assert setup.cache.stats()["held"] == setup.tiers.stats()["host"]["held"] == 0
    table, written = resume(setup.tiers, parked)
    assert written == 14
    setup.holds(table)


def test_a_last_block_that_is_lost_is_computed_again(setup: Setup) -> None:
    parked = parked_below(setup)
    coming = Resuming(setup.tiers, parked)
    settle(setup)
    with nothing_begins(setup):
        assert not coming.poll()
    settle(setup)  # it is on its way up
    again = Resuming(setup.tiers, parked)
    coming.cancel()
    setup.tiers.below.host.books.forget_idle()
    again.wait()
    assert again.num_written == 12 and len(again.table) == 4
    setup.holds(again.table)
