"""Blocks from disk straight into the device's memory, by a stand-in for kvikio."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import disk_tiers as disks
import jax
import numpy as np
import pytest
from disk_tiers import BLOCK, key, keys
from kvikio_over_host import Kvikio, kvikio
from small_tiers import Setup
from test_tiers_disk import closed, opened
from waiting import wait_until

from jax_kvblock.cache import park, resume
from jax_kvblock.cache.copies import Copies, DeviceBytes
from jax_kvblock.cache.disk import DiskTier

__all__ = ["kvikio"]  # a fixture


def buffers(count: int) -> np.ndarray:
    return np.zeros((count, BLOCK), np.uint8)


def all_of_them(offset: int) -> bool:
    return True


def as_is(out: np.ndarray) -> Callable[[list[int]], Sequence[np.ndarray]]:
    """The host's way to what is on the host."""
    return lambda places: out[places]


def read(tier: DiskTier, of: Sequence[bytes], out: np.ndarray) -> list[bool]:
    return tier.get_to_device(of, list(out), as_is(out))


# ---- a disk tier ----


def test_reads_to_a_device(tmp_path: Path, kvikio: Kvikio) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        disks.flip(tier._slots.path, tier._slots.offset(disks.slot_of(tier, 2)))
        assert tier.reads_to_device and tier.stats().to_device == "kvikio"
        wanted, out = keys([0, 9, 2, 3]), buffers(4)
        hits = read(tier, wanted, out)
        assert hits == [True, False, False, True]
        np.testing.assert_array_equal(out[hits], disks.contents(wanted)[hits])
        assert [size for _, size in kvikio.reads] == [BLOCK] * 3
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.corrupt) == (2, 2, 1)
        assert not tier.has([key(2)])[0]
        disks.check_books(tier)


def test_of_no_block_nothing_is_read(tmp_path: Path, kvikio: Kvikio) -> None:
    with disks.tier(tmp_path) as tier:
        assert tier.get_to_device([], [], as_is(buffers(0))) == []
        assert read(tier, keys([7]), buffers(1)) == [False]
        assert kvikio.num_opened == 0 and tier.stats().misses == 1


def test_the_file_is_opened_once(tmp_path: Path, kvikio: Kvikio) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(2))
        for _ in range(3):
            assert all(read(tier, keys(range(2)), buffers(2)))
        assert (kvikio.num_opened, kvikio.open_files) == (1, 1)
    assert kvikio.open_files == 0


def test_closing_waits_for_a_read(tmp_path: Path, kvikio: Kvikio) -> None:
    """And who asks after that is told, and opens nothing."""
    tier = disks.tier(tmp_path)
    disks.put(tier, range(2))
    kvikio.gate.clear()
    out = buffers(2)
    with ThreadPoolExecutor(2) as threads:
        job = threads.submit(read, tier, keys([0, 1]), out)
        wait_until(lambda: len(kvikio.reads) == 2)
        closing = threads.submit(tier.close)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        kvikio.gate.set()
        assert job.result() == [True, True]
        closing.result(10)
    assert (kvikio.num_opened, kvikio.open_files) == (1, 0)
    with pytest.raises(ValueError, match="is closed"):
        tier._device_reads.read([out[0]], [0], BLOCK)
    assert kvikio.num_opened == 1


def test_the_path_may_be_of_a_folder_that_is_left(
    tmp_path: Path, kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with disks.tier(Path("here")) as tier:
        disks.put(tier, [1])
        (tmp_path / "there").mkdir()
        monkeypatch.chdir(tmp_path / "there")
        assert read(tier, keys([1]), buffers(1)) == [True]


@pytest.mark.parametrize("gpudirect", [None, True])
def test_a_block_that_comes_wrong_of_a_disk_that_is_right(
    tmp_path: Path, kvikio: Kvikio, gpudirect: bool | None
) -> None:
    """It stays, and unless it is demanded nobody reads so again."""
    with disks.tier(tmp_path, gpudirect=gpudirect) as tier:
        disks.put(tier, range(2))
        kvikio.flips = True
        with pytest.raises(
            OSError, match=r"2 blocks of .*slots came to the device wrong"
        ):
            read(tier, keys(range(2)), buffers(2))
        assert tier.has(keys(range(2))) == [True, True]
        assert tier.stats().corrupt == 0 and tier.stats().hits == 0
        assert tier.reads_to_device == bool(gpudirect)
        assert disks.read(tier, range(2)) == [True, True]
        disks.check_books(tier)


def test_nothing_is_evicted_under_a_read(tmp_path: Path, kvikio: Kvikio) -> None:
    with disks.tier(tmp_path, 4) as tier, ThreadPoolExecutor(1) as thread:
        disks.put(tier, range(4))
        kvikio.gate.clear()
        out = buffers(2)
        job = thread.submit(read, tier, keys([0, 1]), out)
        wait_until(lambda: len(kvikio.reads) == 2)
        put = tier.put(keys(range(10, 14)), disks.contents(keys(range(10, 14))))
        with pytest.raises(TimeoutError):
            put.result(0.2)
        kvikio.gate.set()
        assert job.result() == [True, True]
        assert put.result() == 4
        np.testing.assert_array_equal(out, disks.contents(keys([0, 1])))


@pytest.mark.parametrize("gpudirect", [None, True])
@pytest.mark.parametrize("how", ["short", "broken"])
def test_reads_that_fail(
    tmp_path: Path, kvikio: Kvikio, gpudirect: bool | None, how: str
) -> None:
    """Where nobody demands it, that was the last one."""
    with disks.tier(tmp_path, gpudirect=gpudirect) as tier:
        disks.put(tier, range(2))
        if how == "short":
            kvikio.short = 1
            words = f"{BLOCK - 1} bytes of {BLOCK} came from .*slots"
        else:
            kvikio.broken = all_of_them, RuntimeError("the driver is gone")
            words = "the driver is gone"
        with pytest.raises((OSError, RuntimeError), match=words):
            read(tier, keys(range(2)), buffers(2))
        assert tier.has(keys(range(2))) == [True, True]  # they are right
        assert tier.reads_to_device == bool(gpudirect)
        kvikio.short, kvikio.broken = 0, None
        if gpudirect:
            assert read(tier, keys(range(2)), buffers(2)) == [True, True]
        else:
            assert re.match(f"kvikio failed: {words}", tier.stats().to_device)
            with pytest.raises(ValueError, match=r"kvikio failed: .*; `get` reads"):
                read(tier, keys(range(2)), buffers(2))
        assert disks.read(tier, range(2)) == [True, True]
        disks.check_books(tier)


def test_one_read_fails_when_all_have_ended(tmp_path: Path, kvikio: Kvikio) -> None:
    """What is read into next is not written any more."""
    with disks.tier(tmp_path) as tier, ThreadPoolExecutor(1) as thread:
        disks.put(tier, range(8))
        bad = tier._slots.offset(disks.slot_of(tier, 0))
        kvikio.broken = lambda offset: offset == bad, RuntimeError("a bad sector")
        kvikio.gate.clear()
        job = thread.submit(read, tier, keys(range(8)), out := buffers(8))
        wait_until(lambda: len(kvikio.reads) == 8)
        with pytest.raises(TimeoutError):
            job.result(0.1)
        kvikio.gate.set()
        with pytest.raises(RuntimeError, match="a bad sector"):
            job.result()
        assert (out.any(1)).sum() == 7


@pytest.mark.parametrize(
    ("state", "gpudirect", "why"),
    [
        ("missing", None, "kvikio is not installed"),
        ("there", False, "gpudirect=False"),
        ("missing", False, "gpudirect=False"),
        ("compat", None, "kvikio finds no GPUDirect here"),
        ("no driver", None, "kvikio finds no GPUDirect here"),
        ("buffered", None, "the file goes through the page cache"),
        ("buffered", True, "kvikio"),
        ("no driver", True, "kvikio"),
        ("broken", None, "kvikio does not load: no symbol"),
        ("there", None, "kvikio"),
        ("compat", True, "kvikio"),
        ("there", True, "kvikio"),
    ],
)
def test_when_kvikio_reads(
    tmp_path: Path,
    kvikio: Kvikio,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    gpudirect: bool | None,
    why: str,
) -> None:
    kvikio.defaults.compat_mode = state == "compat"
    kvikio.cufile_driver.has_storage = state != "no driver"
    kvikio.any_file = state != "buffered"
    if state == "missing":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    if state == "broken":

        def is_compat_mode_preferred() -> bool:
            raise RuntimeError("no symbol")

        monkeypatch.setattr(
            kvikio.defaults, "is_compat_mode_preferred", is_compat_mode_preferred
        )
    direct = False if state == "buffered" else None
    with disks.tier(tmp_path, gpudirect=gpudirect, direct=direct) as tier:
        assert tier.stats().to_device == why
        assert tier.reads_to_device == (why == "kvikio")
        if why != "kvikio":
            words = f"get_to_device: no block is read to a device: {why}; `get` reads"
            with pytest.raises(ValueError, match=re.escape(words)):
                read(tier, keys([1]), buffers(1))


def test_without_kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open."""
    monkeypatch.setitem(sys.modules, "kvikio", None)
    words = re.escape("needs kvikio; pip install kvikio-cu13 (or -cu12), or leave")
    with pytest.raises(ImportError, match=words):
        disks.tier(tmp_path, gpudirect=True)
    disks.tier(tmp_path).close()


def test_wrong_arguments(tmp_path: Path, kvikio: Kvikio) -> None:
    with pytest.raises(ValueError, match="gpudirect must be a bool, got 'yes'"):
        disks.tier(tmp_path, gpudirect="yes")
    with disks.tier(tmp_path) as tier:
        words = "get_to_device: buffers must be one for each of 2 keys, got 1"
        with pytest.raises(ValueError, match=words):
            read(tier, keys([1, 2]), buffers(1))
    with pytest.raises(ValueError, match=r"get_to_device: the tier of .* is closed"):
        read(tier, keys([1]), buffers(1))


# ---- under a cache in tiers ----


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Ten blocks, on disk alone."""
    first, tier = opened(tmp_path)
    first.only_below(range(41))
    closed(first, tier)
    return tmp_path


Watched = Callable[..., tuple[Setup, DiskTier, list[int]]]


@pytest.fixture
def watched(stored: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Opens a cache over them, and says how many each read to the host asks for."""

    def opens(gpudirect: bool | None = None) -> tuple[Setup, DiskTier, list[int]]:
        one, tier = opened(stored, gpudirect=gpudirect)
        asked: list[int] = []
        get = tier.get

        def counted(keys: Sequence[bytes], *rest: Any, **more: Any) -> Any:
            asked.append(len(keys))
            return get(keys, *rest, **more)

        monkeypatch.setattr(tier, "get", counted)
        return one, tier, asked

    return opens


def brought(one: Setup, tokens: Sequence[int]) -> Any:
    """A table, of which what came is right, and its ticket."""
    table, ticket = one.tiers.open(tokens)
    ticket.wait()
    assert table.match() == 4 * (ticket.num_blocks - ticket.num_missing)
    one.holds(table)
    return table, ticket


def test_a_prompt_comes_straight_from_disk(watched: Watched, kvikio: Kvikio) -> None:
    """And is in host memory then, as what is read to the host is."""
    one, tier, asked = watched()
    table, ticket = brought(one, range(41))
    assert table.num_committed_tokens == 40 and ticket.num_missing == 0
    assert len(kvikio.reads) == 10 and not asked
    stats = one.tiers.stats()
    assert stats["store"]["blocks_out"] == 10 and stats["host"]["idle"] == 10
    table.free()
    one.cache.clear()
    table, _ = brought(one, range(41))  # by way of the host this time
    assert table.num_committed_tokens == 40 and len(kvikio.reads) == 10
    closed(one, tier)


def test_some_blocks_lie_on_the_host(stored: Path, kvikio: Kvikio) -> None:
    """Every other one: each part comes from both, into its places of one room."""
    one, tier = opened(stored)
    table, _ = brought(one, range(41))
    table.free()
    one.cache.clear()
    of = one.cache.namespace.keys(np.arange(40, dtype=np.int32))
    one.tiers.below.host.books.forget(of[::2])
    kvikio.reads.clear()
    table, _ = brought(one, range(41))
    assert table.num_committed_tokens == 40 and len(kvikio.reads) == 5
    closed(one, tier)


def test_a_block_that_rots_is_a_miss(stored: Path, kvikio: Kvikio) -> None:
    one, tier = opened(stored)
    of = one.cache.namespace.keys(np.arange(40, dtype=np.int32))
    with tier.held([of[6]]) as (place,):
        disks.flip(place.path, place.offset + place.num_bytes // 2)
    table, ticket = brought(one, range(41))
    assert table.num_committed_tokens == 24 and ticket.num_missing == 4
    assert tier.stats().corrupt == 1 and one.tiers.stats()["store"]["lost"] == 1
    closed(one, tier)


@pytest.mark.parametrize("gpudirect", [None, True])
@pytest.mark.parametrize("how", ["it fails", "it brings them wrong"])
def test_where_it_cannot_blocks_come_by_way_of_the_host(
    watched: Watched, kvikio: Kvikio, gpudirect: bool | None, how: str
) -> None:
    one, tier, asked = watched(gpudirect)
    error = RuntimeError("the driver is gone")
    if how == "it fails":
        kvikio.broken = all_of_them, error
    else:
        kvikio.flips = True
    table, ticket = brought(one, range(41))
    assert table.num_committed_tokens == 40 and ticket.num_missing == 0
    assert asked == [4, 4, 2]
    told = one.tiers.store_error
    assert told is error or "came to the device wrong" in str(told)
    # Whoever does not demand it has tried it once.
    assert len(kvikio.reads) == (10 if gpudirect else 4)
    stats = one.tiers.stats()["store"]
    assert (stats["blocks_out"], stats["lost"], tier.stats().corrupt) == (10, 0, 0)
    closed(one, tier)


def test_a_room_of_what_cannot_be_placed_is_used_again(
    stored: Path, kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tier = opened(stored)
    rooms = one.tiers.below.rooms
    free = len(rooms._free)

    def broken(*given: object, **more: object) -> None:
        raise RuntimeError("no place")

    monkeypatch.setattr(one.tiers.below, "place", broken)
    _, ticket = one.tiers.open(range(41))
    with pytest.raises(RuntimeError, match="no place"):
        ticket.wait()
    one.tiers.below.up.submit(lambda: None).result()
    assert len(rooms._free) == free
    monkeypatch.undo()
    closed(one, tier)


def test_layers_come_by_way_of_the_host(watched: Watched, kvikio: Kvikio) -> None:
    one, tier, asked = watched()
    table, ticket = one.tiers.open(range(41), by_layer=True)
    ticket.wait()
    assert table.match() == 40 and sum(asked) == 10 and not kvikio.reads
    one.holds(table)
    closed(one, tier)


def test_a_parked_sequence_comes_back_with_its_last_block(
    tmp_path: Path, kvikio: Kvikio
) -> None:
    one, tier = opened(tmp_path, host_blocks=4)
    table = one.computed(range(14))
    contents = [one.content(k) for k in table.keys]
    parked = park(one.tiers, table, 14)
    one.tiers.drain()
    one.cache.clear()
    books, stored = one.tiers.below.host.books, tier.keys()
    books.forget([k for k in stored if books.find(k) is not None])
    kvikio.reads.clear()
    table, written = resume(one.tiers, parked)
    assert written == 14 and len(kvikio.reads) == 4
    pool = np.asarray(one.manager.pool.data)
    for place, wanted in enumerate(contents[:3]):
        np.testing.assert_array_equal(pool[table.ids[place]], wanted)
    table.free()
    closed(one, tier)


@pytest.mark.gpu
def test_kvikio_itself(stored: Path) -> None:
    """By GPUDirect storage, or by way of host memory where there is none."""
    pytest.importorskip("kvikio", reason="kvikio is not installed")
    sample, tier = opened(stored, gpudirect=True)
    asked = sample.cache.namespace.keys(np.arange(40, dtype=np.int32))
    table, ticket = brought(sample, range(41))
    assert table.num_committed_tokens == 40 and sample.tiers.store_error is None
    assert tier.stats().hits == len(asked) == 10 and ticket.num_missing == 0
    closed(sample, tier)


# ---- places of a room ----


def test_places_of_a_room(four_cpus: None) -> None:
    copies = Copies(jax.devices("cpu")[0])
    room = copies.room((6, 4), np.float32)
    first, second = copies.places(room, [4, 1], 16)
    np.frombuffer(first, np.float32)[:] = [1, 2, 3, 4]
    np.frombuffer(second, np.float32)[:] = 7
    wanted = np.zeros((6, 4), np.float32)
    wanted[4], wanted[1] = [1, 2, 3, 4], 7
    np.testing.assert_array_equal(np.asarray(room), wanted)
    with pytest.raises(IndexError, match="places must be from 0 to 5, got 6 to 6"):
        copies.places(room, [6], 16)
    there = jax.device_put(room, jax.devices("cpu")[1])
    with pytest.raises(ValueError, match="the array must lie on"):
        copies.places(there, [0], 16)


def test_memory_of_a_gpu_is_told_as_others_take_it() -> None:
    told = DeviceBytes(1 << 40, 4096).__cuda_array_interface__
    assert told["data"] == (1 << 40, False) and told["shape"] == (4096,)
    assert np.dtype(told["typestr"]) == np.uint8 and told["version"] == 3
    assert told["strides"] is None
