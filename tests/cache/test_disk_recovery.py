"""After an end at any moment, and after the disk has changed bytes: nothing wrong is
served.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import disk_tiers as disks
import numpy as np
import pytest
from disk_tiers import BLOCK, NAMESPACE, key, keys

import jax_kvblock
from jax_kvblock.cache.disk.checksums import PAGE
from jax_kvblock.cache.disk.errors import DiskTierError

SUPPORT = Path(__file__).parents[1] / "support"
FOLDER = NAMESPACE.hex()


def run(mode: str, folder: Path, *more: float) -> str:
    """`disk_kills.py`, which forks, in a process without jax and its threads."""
    paths = [str(SUPPORT), str(Path(jax_kvblock.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, SUPPORT / "disk_kills.py", mode, folder, *map(str, more)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_writers_killed_at_random(tmp_path: Path) -> None:
    run("random", tmp_path, 3, 1)


@pytest.mark.wide
def test_writers_killed_at_random_for_long(tmp_path: Path) -> None:
    run("random", tmp_path, 20, 2)


def test_writers_killed_at_every_step(tmp_path: Path) -> None:
    run("steps", tmp_path)


def test_a_damaged_index(tmp_path: Path) -> None:
    run("damage", tmp_path, 1, 40)


@pytest.mark.slow
@pytest.mark.wide
def test_many_damaged_indexes(tmp_path: Path) -> None:
    run("damage", tmp_path, 2, 400)


def test_a_fork_may_not_use_the_tier(tmp_path: Path) -> None:
    run("fork", tmp_path)


def test_readers_beside_a_writer(tmp_path: Path) -> None:
    run("readers", tmp_path, 1)


def test_readers_that_end_or_stop_within_a_lookup(tmp_path: Path) -> None:
    run("stale", tmp_path)


def test_changed_bytes_are_a_miss(tmp_path: Path) -> None:
    """Counted once, removed, and its slot is used again."""
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(6))
        for number, at in ((1, 0), (2, BLOCK - 1), (4, 7777)):
            offset = tier._slots.offset(disks.slot_of(tier, number)) + at
            disks.flip(tmp_path / FOLDER / "slots", offset)
        right = [True, False, False, True, False, True]
        assert disks.read(tier, range(6)) == right
        assert disks.read(tier, range(6)) == right
        assert tier.stats().corrupt == 3
        assert tier.has(keys(range(6))) == right
        assert disks.put(tier, range(8)) == 5
        assert disks.read(tier, range(8)) == [True] * 8
        disks.check_books(tier)


def test_changed_bytes_spoil_their_part_alone(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
        second = tier._blocks._parts.size
        disks.flip(tier._slots.path, tier._slots.offset(0) + second)
        out = np.zeros((1, second), np.uint8)
        assert tier.get([key(1)], out).result().all()
        np.testing.assert_array_equal(out[0], disks.content(key(1))[:second])
        assert not tier.get([key(1)], out[:, :5], start=second - 4).result().any()
        assert tier.stats().corrupt == 1


def test_held_blocks_that_do_not_match_are_removed(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1, 2])
        with tier.held(keys([1, 2])) as (one, two):
            assert one is not None and two is not None
            assert one.matches(disks.content(key(1)))
            assert not two.matches(disks.content(key(1)))
        assert tier.stats().corrupt == 1
        assert tier.has(keys([1, 2])) == [True, False]


def test_a_torn_write_is_a_miss(tmp_path: Path) -> None:
    """The index came to the disk, the second half of the block did not."""
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
        path, start = tier._slots.path, tier._slots.offset(0)
    with path.open("r+b") as file:
        file.seek(start + 2 * PAGE)
        file.write(bytes(BLOCK - 2 * PAGE))
    with disks.tier(tmp_path) as tier:
        assert tier.has([key(1)]) == [True]
        assert disks.read(tier, [1]) == [False]
        assert tier.stats().corrupt == 1


@pytest.mark.parametrize("old", ["index.lmdb", "slots"])
def test_one_file_is_older_than_the_other(tmp_path: Path, old: str) -> None:
    """As if the disk had lost the last writes of one of them."""
    with disks.tier(tmp_path, 6) as tier:
        disks.put(tier, range(6))
        path = tier.path / old
    copy = shutil.copy(path, tmp_path / "copy")
    with disks.tier(tmp_path, 6) as tier:
        tier.remove(keys([0, 1])).result()
        disks.put(tier, [0, 1, 10, 11])  # 0 and 1 anew, in slots of the same file
    shutil.copy(copy, path)
    with disks.tier(tmp_path, 6) as tier:
        there = disks.numbers(tier)
        hits = disks.read(tier, there)
        assert any(hits) and not all(hits)
        assert tier.stats().corrupt == hits.count(False)
        disks.check_books(tier)


def test_a_wrong_record_is_dropped(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(3))
        path = tier.path / "index.lmdb"
    data = bytearray(path.read_bytes())
    at = data.rfind(key(1))  # the newest page that has it may be any: all of them
    while at >= 0:
        data[at + 32] ^= 1  # the slot
        at = data.rfind(key(1), 0, at)
    path.write_bytes(data)
    with disks.tier(tmp_path) as tier:
        assert tier.stats().corrupt == 1
        assert disks.numbers(tier) == [2, 0]
        assert disks.put(tier, [1]) == 1
        disks.check_books(tier)


def test_garbage_uses_do_no_harm(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        path = tier.path / "uses"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with disks.tier(tmp_path) as tier:
        assert disks.read(tier, range(4)) == [True] * 4
        assert disks.numbers(tier) == [3, 2, 1, 0]
    path.write_bytes(b"")
    with disks.tier(tmp_path) as tier:
        assert disks.read(tier, range(4)) == [True] * 4
    path.unlink()
    with disks.tier(tmp_path) as tier:
        assert disks.read(tier, range(4)) == [True] * 4


def test_without_its_slot_file_an_index_is_nothing(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        slots = tier._slots.path
    slots.unlink()
    with disks.tier(tmp_path) as tier:
        assert disks.numbers(tier) == []
        disks.check_books(tier)


def test_without_its_index_a_slot_file_is_empty(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(4))
        index = tier.path / "index.lmdb"
    index.unlink()
    with disks.tier(tmp_path) as tier:
        assert disks.numbers(tier) == []
        assert disks.put(tier, range(4)) == 4
        disks.check_books(tier)


def test_an_index_of_another_slot_file_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with disks.tier(tmp_path / name) as tier:
            disks.put(tier, range(4))
    shutil.copy(tmp_path / "a" / FOLDER / "index.lmdb", tmp_path / "b" / FOLDER)
    with pytest.raises(DiskTierError, match="it belongs to another slot file"):
        disks.tier(tmp_path / "b")
