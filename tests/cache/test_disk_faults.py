"""Reads, writes and transactions that fail: tickets say so; nothing is published."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import disk_tiers as disks
import lmdb
import numpy as np
import pytest
from disk_tiers import BLOCK, key, keys

from jax_kvblock.cache.disk import DiskTier, index, reader, slot_file
from jax_kvblock.cache.disk.aligned import aligned_empty
from jax_kvblock.cache.disk.errors import DiskTierError


class Fault:
    """In the place of a function: fails while `number` is an error's."""

    def __init__(self, call: Any, number: int | None = None) -> None:
        self.call, self.number, self.skip = call, number, 0

    def __call__(self, *of: Any) -> Any:
        if self.number and not self.skip:
            raise OSError(self.number, os.strerror(self.number))
        self.skip = max(0, self.skip - 1)
        return self.call(*of)


def failing_put(tier: DiskTier, numbers: range) -> DiskTierError:
    wanted = keys(numbers)
    ticket = tier.put(wanted, disks.contents(wanted))
    with pytest.raises(DiskTierError) as caught:
        ticket.result(60)
    return caught.value


@pytest.mark.parametrize("late", [0, 2])
def test_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    fault = Fault(slot_file.write_all)
    monkeypatch.setattr(slot_file, "write_all", fault)
    with disks.tier(tmp_path, 4) as tier:
        disks.put(tier, range(4))
        fault.number, fault.skip = errno.ENOSPC, late
        error = failing_put(tier, range(10, 14))
        assert error.errno == errno.ENOSPC
        assert f"could not write {tier._slots.path}: No space left" in str(error)
        assert "free space on its filesystem, or lower max_bytes" in str(error)
        fault.number = None
        assert not any(tier.has(keys(range(10, 14))))
        assert tier.stats().failed == 4
        assert disks.put(tier, range(10, 14)) == 4  # the slots are there again
        disks.check_books(tier)
    with disks.tier(tmp_path, 4) as tier:
        assert disks.read(tier, range(10, 14)) == [True] * 4


def test_a_put_that_waits_fails_with_its_first_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(slot_file.write_all)
    monkeypatch.setattr(slot_file, "write_all", fault)
    with disks.tier(tmp_path, 4) as tier:
        fault.number = errno.EIO
        error = failing_put(tier, range(20))
        assert "its device fails: look at the system's log" in str(error)
        fault.number = None
        assert tier.stats().failed == 20
        assert disks.put(tier, range(20)) == 4
        disks.check_books(tier)


def test_a_sync_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
        fault = Fault(os.fdatasync, errno.EIO)
        monkeypatch.setattr(os, "fdatasync", fault)
        assert "could not sync" in str(failing_put(tier, range(2, 4)))
        fault.number = None
        assert disks.read(tier, range(4)) == [False, True, False, False]
        assert disks.put(tier, range(4)) == 3
        disks.check_books(tier)


def test_a_transaction_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would have been evicted stays; what was removed is so with the next one."""
    with disks.tier(tmp_path, 4) as tier:
        disks.put(tier, range(4))
        index, commit = tier._folder.index, tier._folder.index.commit

        def fails(removed: Any, added: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(index, "_pack", None)
                patch.setattr(index, "_env", Broken())
                commit(removed, added)

        class Broken:
            def begin(self, write: bool) -> None:
                raise lmdb.DiskError("mdb_txn_begin", errno.EIO)

        index.commit = fails  # type: ignore[method-assign]
        removing = tier.remove([key(0)])
        error = removing.exception(60)
        assert isinstance(error, DiskTierError)
        assert re.search(
            f"could not write {index.path}: .*remove the folder", str(error)
        )
        assert disks.read(tier, range(4)) == [False, True, True, True]
        failing_put(tier, range(10, 13))
        assert disks.read(tier, range(1, 4)) == [True] * 3
        index.commit = commit  # type: ignore[method-assign]
        assert disks.put(tier, [10]) == 1
        assert disks.numbers(tier) == [3, 2, 1, 10]
        disks.check_books(tier)


def test_evictions_that_failed_may_have_come_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is put while its old block is being evicted, which fails."""
    with disks.tier(tmp_path, 2) as tier:
        disks.put(tier, range(2))
        index, commit = tier._folder.index, tier._folder.index.commit
        tickets = []

        def fails(removed: Any, added: Any) -> None:
            again = keys([0, 1])
            tickets.append(tier.put(again, disks.contents(again)))
            tier._front.submit(int).result()  # it has begun
            index.commit = commit  # type: ignore[method-assign]
            raise OSError(errno.EIO, "for once")

        index.commit = fails  # type: ignore[method-assign]
        wanted = keys([5])
        with pytest.raises(OSError, match="for once"):
            tier.put(wanted, disks.contents(wanted)).result(60)
        with pytest.raises(OSError, match="for once"):
            tickets[0].result(60)
        assert disks.put(tier, [7]) == 1
        assert disks.read(tier, [7]) == [True]
        disks.check_books(tier)


def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        fault = Fault(slot_file.read_all, errno.EIO)
        monkeypatch.setattr(slot_file, "read_all", fault)
        out = np.zeros((4, BLOCK), np.uint8)
        with pytest.raises(DiskTierError, match=r"could not read .*its device fails"):
            tier.get(keys(range(4)), out).result(60)
        fault.number = None
        assert disks.read(tier, range(4)) == [True] * 4  # nothing was removed
        assert tier.stats().corrupt == 0
        disks.check_books(tier)


def test_a_file_that_ends_early_while_open(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        os.truncate(tier._slots.path, 4096)
        with pytest.raises(DiskTierError, match="the file ends early"):
            tier.get([key(1)], np.zeros((1, BLOCK), np.uint8)).result(60)


def test_an_index_that_fails_behind_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticket ends, and close does not wait for it."""
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
    with disks.tier(tmp_path, read_only=True) as tier:
        find, calls = index.Index.find, []

        def fails_later(self: index.Index, of: list[bytes]) -> list[Any]:
            calls.append(of)
            if len(calls) > 1:
                raise DiskTierError(errno.EIO, "no page of it can be read")
            return find(self, of)

        monkeypatch.setattr(index.Index, "find", fails_later)
        ticket = tier.get([key(1)], np.zeros((1, BLOCK), np.uint8))
        with pytest.raises(DiskTierError, match="no page of it"):
            ticket.result(20)


def test_short_reads_and_writes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may do less than it was asked for."""
    writev, readv = os.pwritev, os.preadv

    def less(buffers: list[memoryview]) -> list[memoryview]:
        """All but the last half page of many, or half of one."""
        if len(buffers) > 1:
            return [*buffers[:-1], buffers[-1][:4096]]
        return [buffers[0][: max(4096, len(buffers[0]) // 8192 * 4096)]]

    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: writev(fd, less(b), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: readv(fd, less(b), at))
    wanted = keys(range(6))
    blocks = aligned_empty(6, BLOCK)
    blocks[:] = disks.contents(wanted)
    with disks.tier(tmp_path) as tier:
        tier.put(wanted, blocks).result(60)
        out = aligned_empty(6, BLOCK)
        assert tier.get(wanted, out).result(60).all()
        np.testing.assert_array_equal(out, blocks)


def test_a_mistake_of_ours_ends_the_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And close does not wait for it."""
    with disks.tier(tmp_path) as tier:
        monkeypatch.setattr(reader, "share_out", None)
        disks.put(tier, [1])
        with pytest.raises(TypeError):
            tier.get([key(1)], np.zeros((1, BLOCK), np.uint8)).result(60)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (b"x" * 32, "keys must be a sequence of 32 bytes each, got 32 bytes"),
        (7, "keys must be a sequence of 32 bytes each, got int; pass [key] for one"),
        ([b"short"], "keys[0] must be 32 bytes, got 5 bytes; namespace.keys"),
        ([key(1), "x"], "keys[1] must be 32 bytes, got str"),
    ],
)
def test_wrong_keys(tmp_path: Path, given: Any, says: str) -> None:
    with disks.tier(tmp_path) as tier:
        out = np.zeros((2, BLOCK), np.uint8)
        for name, call in {
            "put": lambda: tier.put(given, out),
            "get": lambda: tier.get(given, out),
            "has": lambda: tier.has(given),
            "remove": lambda: tier.remove(given),
            "held": lambda: tier.held(given).__enter__(),
            "get_to_device": lambda: tier.get_to_device(given, [], lambda _: out),
        }.items():
            with pytest.raises(
                (TypeError, ValueError), match=re.escape(says)
            ) as caught:
                call()
            assert str(caught.value).startswith(f"DiskTier.{name}: ")
        disks.check_books(tier)


READ_ONLY = np.zeros((2, BLOCK), np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("rows", "start", "says"),
    [
        (b"x", 0, "must be uint8[2, bytes], or a list of uint8[bytes], got 1 bytes"),
        (np.zeros(BLOCK, np.uint8), 0, f"a list of uint8[bytes], got uint8[{BLOCK}]"),
        ([b"x", b"y"], 0, "a list of uint8[bytes], got list; view memory as bytes"),
        (np.zeros((3, BLOCK), np.uint8), 0, "a row for each of 2 keys, got 3 rows"),
        (np.zeros((2, 8), np.float32), 0, "must be uint8 and as long as the others"),
        (
            [np.zeros(BLOCK, np.uint8), np.zeros(5, np.uint8)],
            0,
            "[1] must be uint8 and as long as the others, got uint8[5]",
        ),
        (
            np.zeros((2, 2 * BLOCK), np.uint8)[:, ::2],
            0,
            "must have its bytes side by side, got strides (2,)",
        ),
    ],
)
def test_wrong_rows(tmp_path: Path, rows: Any, start: int, says: str) -> None:
    with disks.tier(tmp_path) as tier:
        for name, call in {
            "put: blocks": lambda: tier.put(keys(range(2)), rows),
            "get: out": lambda: tier.get(keys(range(2)), rows, start=start),
        }.items():
            with pytest.raises(
                (TypeError, ValueError), match=re.escape(says)
            ) as caught:
                call()
            assert str(caught.value).startswith(f"DiskTier.{name}")
        disks.check_books(tier)


def test_wrong_ranges(tmp_path: Path) -> None:
    two = keys(range(2))
    with disks.tier(tmp_path) as tier:
        says = f"blocks must have block_bytes={BLOCK} bytes to a row, got 16"
        with pytest.raises(ValueError, match=says):
            tier.put(two, np.zeros((2, 16), np.uint8))
        for start, count in ((-1, 4), (BLOCK - 3, 4), (0, BLOCK + 1), (0, 0)):
            says = f"a block of {BLOCK} bytes, got start={start} and {count} bytes"
            with pytest.raises(ValueError, match=says):
                tier.get(two, np.zeros((2, count), np.uint8), start=start)
        with pytest.raises(ValueError, match="must be writable, got a read-only array"):
            tier.get(two, READ_ONLY)
        assert tier.put(two, READ_ONLY).result(60) == 2
