"""Disk tiers for tests: blocks whose bytes follow from their keys, small tiers, and
what must hold of their books.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_kvblock.cache.disk import DiskTier
from jax_kvblock.cache.disk.checksums import PAGE, round_up
from jax_kvblock.cache.disk.folder import slots_within

NAMESPACE = bytes(range(32))
BLOCK = 5 * PAGE  # two parts, the second one short


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def content(of: bytes, block_bytes: int = BLOCK) -> np.ndarray:
    """What the block of a key holds, and none of another key."""
    bits = np.random.PCG64(int.from_bytes(of, "little"))
    return np.frombuffer(np.random.Generator(bits).bytes(block_bytes), np.uint8)


def contents(of: Sequence[bytes], block_bytes: int = BLOCK) -> np.ndarray:
    made = [content(one, block_bytes) for one in of]
    return np.stack(made) if made else np.empty((0, block_bytes), np.uint8)


def bytes_for(num_slots: int, block_bytes: int = BLOCK) -> int:
    """The least max_bytes that make as many slots."""
    low, high = 0, (num_slots + 1) * (round_up(block_bytes, PAGE) + (1 << 20))
    while high - low > 1:
        middle = (low + high) // 2
        try:
            enough = slots_within(middle, block_bytes) >= num_slots
        except ValueError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high


def tier(path: Path, num_slots: int = 8, **changed: Any) -> DiskTier:
    arguments = {"namespace": NAMESPACE, "block_bytes": BLOCK, "num_threads": 2}
    arguments |= changed
    if "max_bytes" not in arguments:
        arguments["max_bytes"] = bytes_for(num_slots, arguments["block_bytes"])
    return DiskTier(path, **arguments)


def put(to: DiskTier, numbers: Iterable[int]) -> int:
    """Stores the blocks of keys; how many were new."""
    wanted = keys(numbers)
    return to.put(wanted, contents(wanted, to.block_bytes)).result(60)


def read(of: DiskTier, numbers: Iterable[int]) -> list[bool]:
    """Which blocks are there; those that are must hold what they should."""
    wanted = keys(numbers)
    out = np.zeros((len(wanted), of.block_bytes), np.uint8)
    hits = of.get(wanted, out).result(60)
    expected = contents(wanted, of.block_bytes)
    np.testing.assert_array_equal(out[hits], expected[hits])
    return hits.tolist()


def numbers(of: DiskTier) -> list[int]:
    """The blocks that are there, the least recently used first."""
    there = of.keys()
    return [int.from_bytes(one, "little") for one in there]


def disk_bytes(folder: Path) -> int:
    """What the folder and all in it take of the disk."""
    found = [folder, *folder.rglob("*")]
    return sum(path.stat().st_blocks * 512 for path in found)


def check_books(of: DiskTier) -> None:
    """When no ticket is open, each slot is free or a block's, and the index knows the
    same blocks."""
    of._writer._publisher.submit(int).result()  # what was to be removed is
    books, index = of._writer._books, of._folder.index
    entries = dict(books._entries)
    slots = [entry.record.slot for entry in entries.values()] + books.free
    again = [slot for slot, count in collections.Counter(slots).items() if count > 1]
    assert not again, f"slots {again} are twice in the books"
    lost = set(range(of.stats().num_slots)) - set(slots)
    assert not lost, f"slots {lost} are lost"
    assert not books._claimed, "keys are claimed that nobody writes"
    assert not any(entry.readers for entry in entries.values()), "blocks are held"
    assert dict(index.load()) == {one: entries[one].record for one in entries}


def slot_of(of: DiskTier, number: int) -> int:
    return of._writer._books._entries[key(number)].record.slot


def flip(path: Path, offset: int, count: int = 1) -> None:
    """Changes bytes of a file, as a disk does that fails."""
    with path.open("r+b") as file:
        file.seek(offset)
        found = file.read(count)
        file.seek(offset)
        file.write(bytes(byte ^ 0x55 for byte in found))
