"""The folder of a disk tier: its bound, other sizes, and what is refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import disk_tiers as disks
import numpy as np
import pytest
from disk_tiers import BLOCK, NAMESPACE, key

from jax_kvblock.cache.disk import DiskTier, index, slot_file
from jax_kvblock.cache.disk.checksums import PAGE
from jax_kvblock.cache.disk.errors import DiskTierError
from jax_kvblock.cache.disk.folder import slots_within

FOLDER = NAMESPACE.hex()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ---- max_bytes ----


@pytest.mark.parametrize(
    ("block_bytes", "mib"),
    [(512, 2), (PAGE, 4), (BLOCK, 3), (100_001, 6), (1 << 20, 9)],
)
def test_max_bytes_are_never_passed(
    tmp_path: Path, rng: np.random.Generator, block_bytes: int, mib: int
) -> None:
    """Watched by another thread, while random blocks push each other out."""
    most = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, disks.disk_bytes(tmp_path / FOLDER))

    with disks.tier(tmp_path, block_bytes=block_bytes, max_bytes=mib << 20) as tier:
        watching = threading.Thread(target=watch)
        watching.start()
        slots = tier.stats().num_slots
        assert slots * block_bytes < mib << 20
        number = 0
        while number < 5 * slots:
            count = int(rng.integers(1, min(slots, 300) + 1))
            disks.put(tier, rng.integers(1 << 60, size=count).tolist())
            number += count
        over.set()
        watching.join()
        assert tier.stats().num_blocks == slots
        disks.check_books(tier)
        # The least that can be: all is taken from the start.
        assert slots * block_bytes < most <= mib << 20
        assert tier.path.joinpath("index.lmdb").stat().st_size < (mib << 20) / 2


def test_an_index_whose_blocks_are_all_new_has_room(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Everything is replaced, in a transaction of any size, again and again."""
    with disks.tier(tmp_path, 1500, block_bytes=1) as tier:
        for _ in range(12):
            count = int(rng.choice([1500, 1499, 700]))
            some = rng.integers(1 << 60, size=count).tolist()
            assert disks.put(tier, some) == count
        used = tier._folder.index._env.info()["last_pgno"] * PAGE
        assert used < tier.path.joinpath("index.lmdb").stat().st_size


def test_the_least_max_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least") as caught:
        disks.tier(tmp_path, max_bytes=100_000)
    (least,) = re.findall(r"at least (\d+)", str(caught.value))
    assert slots_within(int(least), BLOCK) == 1
    with disks.tier(tmp_path, max_bytes=int(least)) as tier:
        disks.put(tier, range(3))
        disks.put(tier, [5])
        assert disks.read(tier, range(6)) == [False] * 5 + [True]
        assert disks.disk_bytes(tier.path) <= int(least)


def test_other_sizes_keep_what_has_room(tmp_path: Path) -> None:
    sizes = {}
    for slots in (20, 33, 5, 4, 40):
        with disks.tier(tmp_path, slots) as tier:
            there = disks.numbers(tier)
            assert tier.stats().num_slots == slots and not tier.stats().corrupt
            assert all(disks.read(tier, there))
            disks.put(tier, range(slots * 100, slots * 100 + 4))
            sizes[slots] = len(there)
            disks.check_books(tier)
            assert disks.disk_bytes(tier.path) <= disks.bytes_for(slots)
    assert sizes == {20: 0, 33: 4, 5: 5, 4: 4, 40: 4}


# ---- what is refused ----


def test_one_process_writes(tmp_path: Path) -> None:
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
        with pytest.raises(DiskTierError) as caught:
            disks.tier(tmp_path)
        assert caught.value.errno == errno.EAGAIN
        says = f"{tier.path} is open for writing in process {os.getpid()}; close it"
        assert says in str(caught.value)
        assert disks.read(tier, [1]) == [True]
    with disks.tier(tmp_path) as tier:
        assert disks.read(tier, [1]) == [True]


def test_read_only(tmp_path: Path) -> None:
    with pytest.raises(DiskTierError, match="holds no blocks of this namespace"):
        disks.tier(tmp_path, read_only=True)
    assert not (tmp_path / FOLDER).exists()
    with disks.tier(tmp_path) as tier:
        disks.put(tier, range(5))
        disks.flip(tier._slots.path, tier._slots.offset(disks.slot_of(tier, 3)))
    with disks.tier(tmp_path, read_only=True) as tier:
        assert sorted(disks.numbers(tier)) == [0, 1, 2, 3, 4]
        assert disks.read(tier, range(6)) == [True, True, True, False, True, False]
        assert disks.read(tier, [3]) == [False]
        assert tier.has([key(4), key(5)]) == [True, False]
        stats = tier.stats()
        assert (stats.num_blocks, stats.corrupt, stats.misses) == (5, 2, 3)
        for call in (lambda: tier.put([], []), lambda: tier.remove([])):
            with pytest.raises(ValueError, match="is read-only; open it without"):
                call()
        with tier.held([key(1)]) as (place,):
            assert place is not None and place.matches(disks.content(key(1)))


def test_an_index_is_open_once_in_a_process(tmp_path: Path) -> None:
    with (
        disks.tier(tmp_path),
        pytest.raises(DiskTierError, match="share the DiskTier that this process has"),
    ):
        disks.tier(tmp_path, read_only=True)


def test_who_reads_needs_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmdb = pytest.importorskip("lmdb")
    disks.tier(tmp_path).close()

    def refused(*args: object, **options: object) -> None:
        error = lmdb.ReadonlyError("index: Permission denied")
        error.code = errno.EACCES
        raise error

    monkeypatch.setattr(lmdb, "open", refused)
    with pytest.raises(DiskTierError, match="who reads has to write its lock, too: "):
        disks.tier(tmp_path, read_only=True)


def test_an_index_that_is_not_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened while another process makes it anew: an error, no endless look."""
    with disks.tier(tmp_path) as tier:
        disks.put(tier, [1])
    with monkeypatch.context() as changed:
        changed.setattr(index, "check_pages", lambda path, transaction: False)
        with pytest.raises(DiskTierError, match=r"makes it anew; open it again") as e:
            disks.tier(tmp_path)
        assert e.value.errno == errno.EBUSY
    with disks.tier(tmp_path) as tier:
        assert disks.read(tier, [1]) == [True]


def test_another_block_size(tmp_path: Path) -> None:
    disks.tier(tmp_path).close()
    says = f"{tmp_path / FOLDER / 'slots'} was made with block_bytes={BLOCK}, not 512"
    for read_only in (False, True):
        with pytest.raises(DiskTierError, match=re.escape(says)) as caught:
            disks.tier(tmp_path, block_bytes=512, read_only=read_only)
        assert f"remove the folder {tmp_path / FOLDER}" in str(caught.value)
    disks.tier(tmp_path).close()  # and nothing was changed


def test_another_namespace(tmp_path: Path) -> None:
    disks.tier(tmp_path).close()
    shutil.move(tmp_path / FOLDER, tmp_path / bytes(32).hex())
    says = f"was made with namespace={FOLDER}, not {bytes(32).hex()}"
    with pytest.raises(DiskTierError, match=says):
        disks.tier(tmp_path, namespace=bytes(32))


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(slot_file, "VERSION", 2)
        disks.tier(tmp_path).close()
    with pytest.raises(DiskTierError, match="must be of format 1, is of 2; remove the"):
        disks.tier(tmp_path)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: os.truncate(path, 100), "it has no header"),
        (lambda path: os.truncate(path, 5 * PAGE), r"it has 20480 bytes, not \d+"),
        (lambda path: disks.flip(path, 0), "it does not begin as a slot file"),
        (lambda path: disks.flip(path, 20), "its header does not match its checksum"),
    ],
)
def test_a_damaged_slot_file(tmp_path: Path, change: object, says: str) -> None:
    assert callable(change)
    disks.tier(tmp_path).close()
    path = tmp_path / FOLDER / "slots"
    change(path)
    for read_only in (False, True):
        with pytest.raises(DiskTierError, match=says) as caught:
            disks.tier(tmp_path, read_only=read_only)
        assert str(path) in str(caught.value)
        assert f"remove the folder {path.parent}, which only" in str(caught.value)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda path: os.truncate(path, 100),
            "it ends after 100 bytes|page 1 is no head",
        ),
        (
            lambda path: os.truncate(path, 3 * PAGE),
            "is not what it should be|not in it",
        ),
        (lambda path: path.write_bytes(b"x" * 40 * PAGE), "page 0 is no head"),
    ],
)
def test_a_damaged_index(tmp_path: Path, change: object, says: str) -> None:
    assert callable(change)
    with disks.tier(tmp_path, 60) as tier:
        disks.put(tier, range(60))
        path = tier.path / "index.lmdb"
    change(path)
    for read_only in (True, False):
        with pytest.raises(DiskTierError, match=says) as caught:
            disks.tier(tmp_path, 60, read_only=read_only)
        assert str(path) in str(caught.value)
        assert "remove the folder" in str(caught.value)


def test_drafts_are_cleared(tmp_path: Path) -> None:
    disks.tier(tmp_path).close()
    for name in ("slots.tmp", "index.tmp"):
        (tmp_path / FOLDER / name).write_bytes(b"x" * 10_000)
    with disks.tier(tmp_path) as tier:
        assert not list(tier.path.glob("*.tmp"))


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="pass a folder, or a path where one can"):
        disks.tier(tmp_path / "file")


# ---- a disk that is full, or cannot be written ----


def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    with pytest.raises(DiskTierError) as caught:
        disks.tier(small_disk, max_bytes=64 << 20)
    assert caught.value.errno == errno.ENOSPC
    says = f"{small_disk / FOLDER / 'slots'}: No space left on device; free space on "
    assert says + "its filesystem, or lower max_bytes" in str(caught.value)
    with disks.tier(small_disk, max_bytes=3 << 20) as tier:
        slots = tier.stats().num_slots
        for first in (0, slots):
            disks.put(tier, range(first, first + slots))
        assert all(disks.read(tier, range(slots, 2 * slots)))
    with pytest.raises(DiskTierError, match="lower max_bytes"):
        disks.tier(small_disk, max_bytes=64 << 20)
    with disks.tier(small_disk, max_bytes=3 << 20) as tier:  # as it was
        assert all(disks.read(tier, range(slots, 2 * slots)))
        # What else fills the disk takes nothing from a tier that has its space.
        with (
            (small_disk / "other").open("wb", buffering=0) as other,
            pytest.raises(OSError, match="No space left"),
        ):
            while True:
                other.write(bytes(PAGE))
        disks.put(tier, range(2 * slots, 3 * slots))
        assert all(disks.read(tier, range(2 * slots, 3 * slots)))


def test_a_disk_that_cannot_be_written(small_disk: Path) -> None:
    with disks.tier(small_disk, max_bytes=2 << 20) as tier:
        disks.put(tier, range(4))
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    with pytest.raises(DiskTierError) as caught:
        disks.tier(small_disk, max_bytes=2 << 20)
    assert caught.value.errno == errno.EROFS
    assert "or pass read_only=True" in str(caught.value)
    with disks.tier(small_disk, max_bytes=2 << 20, read_only=True) as tier:
        assert disks.read(tier, range(5)) == [True] * 4 + [False]


@pytest.mark.parametrize("step", ["posix_fallocate", "fsync", "rename"])
def test_a_folder_that_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(DiskTierError, match="lower max_bytes") as caught:
            disks.tier(tmp_path)
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["lock"]
    with disks.tier(tmp_path) as tier:
        assert disks.put(tier, [1]) == 1


def test_a_tier_that_could_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was, also in bytes."""
    with disks.tier(tmp_path, 6) as tier:
        disks.put(tier, range(6))
    before, take = disks.disk_bytes(tmp_path), os.posix_fallocate

    def full(fd: int, start: int, size: int) -> None:
        take(fd, start, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskTierError, match="lower max_bytes"):
            disks.tier(tmp_path, 60)
    assert disks.disk_bytes(tmp_path) == before
    with disks.tier(tmp_path, 6) as tier:
        assert disks.read(tier, range(6)) == [True] * 6


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("xxhash", "lmdb"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, name, None)
            says = f"DiskTier: needs {name}; pip install 'jax-kvblock\\[cache\\]'"
            with pytest.raises(ImportError, match=says):
                disks.tier(tmp_path / name)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"namespace": "model"}, "namespace must be 32 bytes, got str"),
        ({"namespace": b"short"}, "namespace must be 32 bytes, got 5 bytes"),
        ({"block_bytes": 0}, "block_bytes must be a positive int of 64 bits, got 0"),
        (
            {"max_bytes": 1e9},
            "max_bytes must be a positive int of 64 bits, got 1000000000.0",
        ),
        (
            {"max_bytes": 2**70},
            f"max_bytes must be a positive int of 64 bits, got {2**70}",
        ),
        ({"direct": np.ones(2)}, "direct must be a bool, got array([1., 1.])"),
        (
            {"num_threads": True},
            "num_threads must be a positive int of 64 bits, got True",
        ),
        ({"policy": "lfu"}, "policy must be 'lru', got 'lfu'"),
        ({"direct": "yes"}, "direct must be a bool, got 'yes'"),
    ],
)
def test_wrong_arguments(tmp_path: Path, changed: dict[str, object], says: str) -> None:
    arguments = {"namespace": NAMESPACE, "block_bytes": BLOCK, "max_bytes": 1 << 22}
    with pytest.raises(ValueError, match=re.escape(f"DiskTier: {says}")):
        DiskTier(tmp_path, **(arguments | changed))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, b"here", 3])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(TypeError, match="DiskTier: path must be a str or os"):
        DiskTier(path, namespace=NAMESPACE, block_bytes=BLOCK, max_bytes=1 << 22)  # type: ignore[arg-type]


def test_sizes_may_be_numpys(tmp_path: Path) -> None:
    sizes = {"block_bytes": np.int64(BLOCK), "max_bytes": np.int32(1 << 22)}
    with DiskTier(tmp_path, namespace=NAMESPACE, **sizes) as tier:  # type: ignore[arg-type]
        assert type(tier.block_bytes) is int
