"""I/O around the page cache: whole pages from aligned memory, or said not to be."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import disk_tiers as disks
import numpy as np
import pytest
from disk_tiers import BLOCK, keys

from jax_kvblock.cache.disk.aligned import address, aligned_empty, is_aligned
from jax_kvblock.cache.disk.checksums import PAGE
from jax_kvblock.cache.disk.errors import DiskTierError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The bytes of each buffer of each read and write; all of them whole pages."""
    found = []

    def recorded(call: Any) -> Any:
        def io(fd: int, buffers: Sequence[Any], offset: int) -> int:
            arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
            assert not offset % PAGE
            assert all(is_aligned(array) for array in arrays)
            found.append([array.nbytes for array in arrays])
            done: int = call(fd, buffers, offset)
            return done

        return io

    monkeypatch.setattr(os, "pwritev", recorded(os.pwritev))
    monkeypatch.setattr(os, "preadv", recorded(os.preadv))
    return found


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a filesystem does that takes no O_DIRECT."""
    call = os.open

    def refusing(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)


@pytest.fixture
def direct(tmp_path: Path) -> Path:
    """A folder where O_DIRECT works."""
    try:
        disks.tier(tmp_path / "trial", direct=True).close()
    except DiskTierError:
        pytest.skip("no O_DIRECT on the filesystem of the tests")
    return tmp_path


def test_what_is_open(direct: Path) -> None:
    for wanted in (None, True, False):
        with disks.tier(direct, direct=wanted) as tier:
            flags = fcntl.fcntl(tier._slots._fd, fcntl.F_GETFL)
            assert (
                bool(flags & os.O_DIRECT)
                == tier.stats().direct
                == (wanted is not False)
            )
            assert ("O_DIRECT" in repr(tier)) == tier.stats().direct
    with disks.tier(direct, read_only=True) as tier:
        assert tier.stats().io == "O_DIRECT"


@pytest.mark.parametrize("block_bytes", [BLOCK, 100, 50_001])
def test_whole_pages(direct: Path, calls: list[list[int]], block_bytes: int) -> None:
    """Whatever is asked for, from any memory."""
    wanted = keys(range(6))
    blocks = disks.contents(wanted, block_bytes)
    with disks.tier(direct, 12, block_bytes=block_bytes, direct=True) as tier:
        for out in (
            np.zeros((6, block_bytes), np.uint8),
            aligned_empty(6, block_bytes),
        ):
            out[:] = blocks
            tier.put(wanted, out).result(60)
            out[:] = 0
            assert tier.get(wanted, out).result(60).all()
            np.testing.assert_array_equal(out, blocks)
            some = out[:, : block_bytes // 3]
            assert tier.get(wanted, some, start=7).result(60).all()
            tier.remove(wanted).result(60)
    assert len(calls) > 6


def test_blocks_side_by_side_go_in_one_call(
    direct: Path, calls: list[list[int]]
) -> None:
    """Of aligned memory; as many calls as there are threads, or more of 1 MiB."""
    wanted = keys(range(6))
    blocks = aligned_empty(6, BLOCK)
    blocks[:] = disks.contents(wanted)
    with disks.tier(direct, 60, direct=True) as tier:
        calls.clear()
        tier.put(wanted, blocks).result(60)
        assert sorted(calls) == [[BLOCK] * 3] * 2
        calls.clear()
        assert tier.get(wanted[::-1], blocks).result(60).all()  # in the disk's order
        assert sorted(calls) == [[BLOCK] * 3] * 2
        calls.clear()
        apart = [np.zeros(BLOCK + 9, np.uint8)[9:] for _ in wanted]
        assert tier.get(wanted, apart).result(60).all()
        assert calls == [[BLOCK]] * 6
        np.testing.assert_array_equal(np.stack(apart), disks.contents(wanted))


def test_threads_read_and_write_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two calls waits until the other has begun, too."""
    both = threading.Barrier(2)

    def meeting(call: Any) -> Any:
        def io(*given: Any) -> int:
            both.wait(30)
            done: int = call(*given)
            return done

        return io

    wanted = keys(range(6))
    blocks = aligned_empty(6, BLOCK)
    blocks[:] = disks.contents(wanted)
    with disks.tier(tmp_path, 60, num_threads=2) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", meeting(os.pwritev))
            assert tier.put(wanted, blocks).result(60) == 6
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", meeting(os.preadv))
            assert tier.get(wanted, blocks).result(60).all()


def test_a_call_has_at_most_two_mebibytes(direct: Path, calls: list[list[int]]) -> None:
    wanted = keys(range(16))
    blocks = aligned_empty(16, 1 << 18)
    with disks.tier(direct, 16, block_bytes=1 << 18, num_threads=1) as tier:
        calls.clear()
        tier.put(wanted, blocks).result(60)
        assert calls == [[1 << 18] * 8] * 2


def test_where_there_is_no_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    with pytest.raises(DiskTierError, match="takes no O_DIRECT; pass direct=None"):
        disks.tier(tmp_path, direct=True)
    with disks.tier(tmp_path) as tier:
        assert not tier.stats().direct
        assert tier.stats().io == "buffered: no O_DIRECT here"
        assert "buffered: no O_DIRECT here" in repr(tier)
        disks.put(tier, range(4))
        assert disks.read(tier, range(5)) == [True] * 4 + [False]


def test_direct_io_that_fails_at_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some filesystems let O_DIRECT be opened, and no more."""
    disks.tier(tmp_path).close()
    call = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    before = len(os.listdir("/proc/self/fd"))
    with disks.tier(tmp_path) as tier:
        assert tier.stats().io == "buffered: no O_DIRECT here"
    assert len(os.listdir("/proc/self/fd")) == before


def test_aligned_memory() -> None:
    for shape in ((3, PAGE), (5,), (2, 3), (0, PAGE)):
        made = aligned_empty(*shape)
        assert made.shape == shape and made.dtype == np.uint8 and made.flags.writeable
        assert not made.size or not address(made) % PAGE
        assert not made.any()
    assert is_aligned(aligned_empty(2, PAGE)[1])
    assert not is_aligned(aligned_empty(2, PAGE)[1, 16:])
    assert not is_aligned(aligned_empty(2, PAGE)[1, :16])
