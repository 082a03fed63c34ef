"""The disk tier: blocks come back, by range too, and the least used ones go."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import disk_tiers as disks
import numpy as np
import pytest
from disk_tiers import BLOCK, key, keys
from interrupts import interrupt_everywhere

from jax_kvblock.cache.disk import DiskTier
from jax_kvblock.cache.disk.aligned import aligned_empty
from jax_kvblock.cache.disk.checksums import PAGE
from jax_kvblock.cache.disk.errors import DiskTierError


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, BLOCK, 100_001, 1 << 20])
def test_blocks_come_back(
    tmp_path: Path, block_bytes: int, direct: bool | None
) -> None:
    wanted = keys(range(5))
    blocks = disks.contents(wanted, block_bytes)
    with disks.tier(tmp_path, block_bytes=block_bytes, direct=direct) as tier:
        assert tier.put(wanted, blocks).result() == 5
        assert disks.read(tier, [4, 0, 7, 2, 2]) == [True, True, False, True, True]
        disks.check_books(tier)
    with disks.tier(tmp_path, block_bytes=block_bytes, direct=direct) as tier:
        assert disks.read(tier, range(6)) == [True] * 5 + [False]
        assert tier.stats().corrupt == 0


def test_memory_of_any_kind(tmp_path: Path) -> None:
    """Rows on pages and beside them, apart, and with gaps between."""
    wanted = keys(range(6))
    blocks = disks.contents(wanted)
    aligned = aligned_empty(6, BLOCK)
    aligned[:] = blocks
    gaps = np.zeros((6, BLOCK + 7), np.uint8)
    gaps[:, 3 : 3 + BLOCK] = blocks
    for i, given in enumerate([blocks, aligned, gaps[:, 3 : 3 + BLOCK], list(blocks)]):
        with disks.tier(tmp_path / str(i)) as tier:
            tier.put(wanted, given).result()
            apart = np.zeros_like(gaps)[:, 5 : 5 + BLOCK]
            for out in (aligned_empty(6, BLOCK), np.empty_like(blocks), apart):
                assert tier.get(wanted, out).result().all()
                np.testing.assert_array_equal(out, blocks)
            rows = [np.empty(BLOCK, np.uint8) for _ in wanted]
            assert tier.get(wanted, rows).result().all()
            np.testing.assert_array_equal(np.stack(rows), blocks)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("block_bytes", [BLOCK, 8 * 16 * PAGE, 100_001])
def test_ranges(
    tmp_path: Path, rng: np.random.Generator, block_bytes: int, direct: bool | None
) -> None:
    wanted = keys(range(3))
    blocks = disks.contents(wanted, block_bytes)
    with disks.tier(tmp_path, block_bytes=block_bytes, direct=direct) as tier:
        tier.put(wanted, blocks).result()
        part = tier._blocks._parts.size
        ranges = [(0, 1), (block_bytes - 1, 1), (0, part), (part, min(part, 1000))]
        for _ in range(20):
            start = int(rng.integers(block_bytes))
            ranges.append((start, int(rng.integers(1, block_bytes - start + 1))))
        for start, count in ranges:
            for out in (aligned_empty(3, count), np.zeros((3, count), np.uint8)):
                assert tier.get(wanted, out, start=start).result().all()
                np.testing.assert_array_equal(out, blocks[:, start : start + count])


def test_a_range_of_heads_reads_its_parts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 8 * 16 * PAGE  # eight heads, a part each
    with disks.tier(tmp_path, block_bytes=block_bytes) as tier:
        disks.put(tier, [1])
        read = []
        call = tier._slots.read

        def recorded(slot: int, start: int, into: list[np.ndarray]) -> None:
            read.append((start, sum(array.nbytes for array in into)))
            call(slot, start, into)

        monkeypatch.setattr(tier._slots, "read", recorded)
        out = aligned_empty(1, block_bytes // 4)
        assert tier.get([key(1)], out, start=block_bytes // 2).result().all()
        assert read == [(block_bytes // 2, block_bytes // 4)]


def test_what_is_there_is_not_stored_again(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        assert disks.put(tier, [1, 2, 1]) == 2
        assert disks.put(tier, [2, 3]) == 1
        stats = tier.stats()
        assert (stats.stored, stats.duplicates, stats.num_blocks) == (3, 2, 3)
        assert tier.has(keys([1, 2, 3, 4])) == [True, True, True, False]
        disks.check_books(tier)


def test_a_block_is_written_once_by_many_puts(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        wanted = keys(range(4))
        blocks = disks.contents(wanted)
        tickets = [tier.put(wanted, blocks) for _ in range(10)]
        assert sum(ticket.result() for ticket in tickets) == 4
        disks.check_books(tier)


def test_removed_blocks_are_gone(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        assert tier.remove(keys([1, 3, 9])).result() == 2
        assert disks.numbers(tier) == [2, 0]
        assert disks.put(tier, [1]) == 1
        disks.check_books(tier)
    with disks.tier(tmp_path) as tier:
        assert disks.numbers(tier) == [2, 0, 1]


def test_nothing_is_nothing(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        assert disks.put(tier, []) == 0
        assert disks.read(tier, []) == []
        assert tier.has([]) == []
        assert tier.remove([]).result() == 0


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    with disks.tier(tmp_path, 4) as tier:
        disks.put(tier, range(4))
        # Of one call, the last is used the longest ago: it needs those before it.
        assert disks.numbers(tier) == [3, 2, 1, 0]
        disks.read(tier, [3])
        disks.put(tier, [2])
        disks.put(tier, [4])
        assert disks.numbers(tier) == [0, 3, 2, 4]
        assert tier.stats().evicted == 1
    with disks.tier(tmp_path, 4) as tier:  # and remembers
        assert disks.numbers(tier) == [0, 3, 2, 4]
        disks.put(tier, [5, 6])
        assert disks.numbers(tier) == [2, 4, 6, 5]
        disks.check_books(tier)


def test_of_more_blocks_than_slots_the_first_are_stored(tmp_path: Path) -> None:
    """The others would be found only by way of these."""
    with disks.tier(tmp_path, 4) as tier:
        assert disks.put(tier, range(20, 23)) == 3
        wanted = keys(range(11))
        first = tier.put(wanted, disks.contents(wanted))
        others = keys(range(30, 32))
        second = tier.put(others, disks.contents(others))
        assert (first.result(60), second.result(60)) == (4, 2)
        stats = tier.stats()
        assert (stats.stored, stats.refused, stats.evicted) == (9, 7, 5)
        assert disks.numbers(tier) == [1, 0, 31, 30]
        assert disks.put(tier, range(11)) == 4
        disks.check_books(tier)


def test_random_operations_are_those_of_a_dict(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Reopened at random, also with more slots or fewer."""
    slots, model = 12, collections.OrderedDict[int, None]()

    def use(used: list[int]) -> None:
        for number in reversed(used):
            model.move_to_end(number)

    tier = disks.tier(tmp_path, slots)
    for _ in range(250):
        some = rng.permutation(30)[: rng.integers(1, 8)].tolist()
        match rng.integers(8):
            case 0 | 1 | 2:
                use([number for number in some if number in model])
                new = [number for number in some if number not in model]
                assert disks.put(tier, some) == len(new)
                while len(model) + len(new) > slots:
                    model.popitem(last=False)
                model.update(dict.fromkeys(new))
                use(some)
            case 3 | 4:
                assert disks.read(tier, some) == [number in model for number in some]
                use([number for number in some if number in model])
            case 5:
                gone = [model.pop(number, 0) is None for number in some]
                assert tier.remove(keys(some)).result() == sum(gone)
            case 6:
                assert tier.has(keys(some)) == [number in model for number in some]
            case 7:
                tier.close()
                slots = int(rng.integers(8, 16))
                tier = disks.tier(tmp_path, slots)
                there = disks.numbers(tier)  # some lay in slots that are no more
                assert there == [number for number in model if number in there]
                model = collections.OrderedDict.fromkeys(there)
                assert tier.stats().num_slots == slots
        assert disks.numbers(tier) == list(model)
    disks.check_books(tier)
    assert tier.stats().corrupt == 0
    tier.close()


def test_blocks_being_read_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots, two of them read slowly: new blocks push out the others alone."""
    with disks.tier(tmp_path, 4) as tier:
        disks.put(tier, range(4))
        go, call = threading.Event(), tier._slots.read

        def slow(*of: object) -> None:
            assert go.wait(60)
            call(*of)

        monkeypatch.setattr(tier._slots, "read", slow)
        wanted = keys([1, 3])
        out = np.zeros((2, BLOCK), np.uint8)
        reading = tier.get(wanted, out)
        for first in (10, 12, 14):
            assert disks.put(tier, range(first, first + 2)) == 2
        assert sorted(disks.numbers(tier)) == [1, 3, 14, 15]
        # What needs all four slots waits until the reader is done.
        new = keys(range(20, 24))
        putting = tier.put(new, disks.contents(new))
        removing = tier.remove([key(1)])
        assert removing.result() == 1
        with pytest.raises(TimeoutError):
            putting.result(0.1)
        go.set()
        assert reading.result().all()
        np.testing.assert_array_equal(out, disks.contents(wanted))
        assert putting.result() == 4
        assert sorted(disks.numbers(tier)) == [20, 21, 22, 23]
        disks.check_books(tier)


def test_a_block_is_found_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, what is there is read meanwhile."""
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
        go, call = threading.Event(), tier._slots.write

        def slow(*of: object) -> None:
            assert go.wait(60)
            call(*of)

        monkeypatch.setattr(tier._slots, "write", slow)
        putting = tier.put([key(2)], disks.contents([key(2)]))
        assert disks.read(tier, [1, 2]) == [True, False]
        assert tier.has(keys([1, 2])) == [True, False]
        assert not putting.done() and not putting.cancel()
        go.set()
        assert putting.result() == 1
        assert disks.read(tier, [1, 2]) == [True, True]


def test_data_before_the_index_and_the_index_before_new_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slot: the old block's record goes, its slot is written, is on the disk,
    and the new record comes."""
    with disks.tier(tmp_path, 1) as tier:
        disks.put(tier, [1])
        flags = tier._folder.index._env.flags()
        assert flags["sync"] and flags["metasync"]
        steps = []

        def noted(owner: object, name: str) -> None:
            call = getattr(owner, name)

            def note(*of: Any) -> None:
                call(*of)
                there = tier._folder.index.find(keys([1, 2]))
                steps.append((name, [record is not None for record in there]))

            monkeypatch.setattr(owner, name, note)

        noted(tier._slots, "write")
        noted(tier._slots, "sync")
        noted(tier._folder.index, "commit")
        disks.put(tier, [2])
        assert steps == [
            ("commit", [False, False]),
            ("write", [False, False]),
            ("sync", [False, False]),
            ("commit", [False, True]),
        ]


def test_what_waits_is_published_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one transaction takes its time, the next one gathers."""
    with disks.tier(tmp_path) as tier:
        go, sizes, commit = threading.Event(), [], tier._folder.index.commit

        def slow(removed: Any, added: Any) -> None:
            assert go.wait(60)
            sizes.append(len(added))
            commit(removed, added)

        monkeypatch.setattr(tier._folder.index, "commit", slow)
        tickets = [tier.put([one], disks.contents([one])) for one in keys(range(6))]
        go.set()
        assert sum(ticket.result() for ticket in tickets) == 6
        assert sum(sizes) == 6 and len(sizes) < 6


def test_interrupts(tmp_path: Path) -> None:
    """Wherever one comes in, slots and claims are not lost, and close does not wait."""
    count = 0
    with disks.tier(tmp_path, 8) as tier:

        def work() -> None:
            nonlocal count
            count += 3
            some = keys(range(count, count + 3))
            tier.put(some, blocks[:3])
            tier.get(some, blocks[3:])
            tier.remove(some[:1])

        def check() -> None:
            tier._front.submit(int).result()
            tier._in_flight.wait()
            disks.check_books(tier)

        blocks = np.zeros((6, BLOCK), np.uint8)
        assert interrupt_everywhere(work, check) > 100


def test_many_threads(tmp_path: Path) -> None:
    errors = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                some = rng.permutation(40)[: rng.integers(1, 9)].tolist()
                match rng.integers(5):
                    case 0 | 1:
                        disks.put(tier, some)
                    case 2 | 3:
                        disks.read(tier, some)
                    case 4:
                        tier.remove(keys(some)).result()
        except BaseException as error:
            errors.append(error)

    with disks.tier(tmp_path, 20, num_threads=3) as tier:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        stats = tier.stats()
        assert stats.hits and stats.misses and stats.evicted and stats.removed
        gone = stats.evicted + stats.removed
        assert stats.stored - gone == stats.num_blocks and not stats.corrupt
        disks.check_books(tier)


def test_close_waits_for_tickets(tmp_path: Path) -> None:
    tier = disks.tier(tmp_path)
    wanted = keys(range(6))
    tickets = [tier.put([one], disks.contents([one])) for one in wanted]
    tier.close()
    assert all(ticket.done() and ticket.result() == 1 for ticket in tickets)
    tier.close()
    assert repr(tier).endswith("closed)")
    with pytest.raises(ValueError, match=r"DiskTier.has: the tier of .* is closed"):
        tier.has(wanted)
    with disks.tier(tmp_path) as again:
        assert all(disks.read(again, range(6)))


ENDS = """
import atexit
import sys
import numpy as np
from jax_kvblock.cache.disk import DiskTier
space = {"namespace": bytes(32), "block_bytes": 1 << 16, "max_bytes": 8 << 20}
tier = DiskTier(sys.argv[1], **space)
atexit.register(tier.close)
for first in range(0, 100, 10):
    keys = [bytes([i]) * 32 for i in range(first, first + 10)]
    tier.put(keys, np.zeros((10, 1 << 16), np.uint8))
"""


def test_what_is_in_flight_is_done_when_the_interpreter_ends(tmp_path: Path) -> None:
    """And `close` ends, where it is called by `atexit`: executors are gone by then."""
    command = [sys.executable, "-P", "-c", ENDS, str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    space = {"namespace": bytes(32), "block_bytes": 1 << 16, "max_bytes": 8 << 20}
    with DiskTier(tmp_path, **space) as tier:
        assert tier.stats().num_blocks == 100


def test_what_it_says(tmp_path: Path) -> None:
    with disks.tier(tmp_path, 8, direct=False) as tier:
        disks.put(tier, range(3))
        disks.read(tier, [0, 1, 5])
        name = str(tmp_path / disks.NAMESPACE.hex())
        assert repr(tier) == (
            f"DiskTier({name!r}, 3 of 8 blocks of {BLOCK} bytes, buffered: asked for)"
        )
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.num_slots) == (2, 1, 8)


def test_namespaces_are_apart(tmp_path: Path) -> None:
    with (
        disks.tier(tmp_path) as one,
        disks.tier(tmp_path, namespace=bytes(32)) as other,
    ):
        disks.put(one, [1])
        assert disks.read(other, [1]) == [False]


def test_held_blocks_can_be_read_by_others(tmp_path: Path) -> None:
    with disks.tier(tmp_path, 4) as tier:
        disks.put(tier, range(4))
        with tier.held(keys([1, 9])) as (place, none):
            assert none is None and place is not None
            disks.put(tier, range(10, 13))
            data = place.path.read_bytes()[place.offset :][: place.num_bytes]
            np.testing.assert_array_equal(
                np.frombuffer(data, np.uint8), disks.content(key(1))
            )
            assert place.matches(np.frombuffer(data, np.uint8))
        disks.put(tier, range(20, 24))
        assert 1 not in disks.numbers(tier)
        disks.check_books(tier)


def test_a_tier_is_collected(tmp_path: Path) -> None:
    """Without close, its lock goes with it."""
    tier: DiskTier | None = disks.tier(tmp_path)
    disks.put(tier, [1])
    del tier
    for _ in range(100):  # its threads end when they notice
        try:
            with disks.tier(tmp_path) as again:
                assert disks.read(again, [1]) == [True]
            return
        except DiskTierError:
            time.sleep(0.05)
    pytest.fail("the folder is still locked")
