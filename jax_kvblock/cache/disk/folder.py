"""The folder of a namespace: its lock, its files, how max_bytes is shared out.

    <path>/<namespace in hex>/
        lock         locked by the process that writes, with its id
        slots        the slot file
        index.lmdb   the index, and lmdb's own lock file beside it
        uses         when each slot was last used, for eviction after a restart

A name that ends in `.tmp` is a file that was being made; it goes at the next start.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np

from jax_kvblock.cache.disk.checksums import PAGE, Parts, round_up
from jax_kvblock.cache.disk.errors import DiskTierError, failed
from jax_kvblock.cache.disk.index import Index, create_index, index_bytes, record_bytes
from jax_kvblock.cache.disk.slot_file import Header, SlotFile, opened

# Beside slots and index: the header, locks, what the folder itself takes, and what the
# filesystem notes of each slot that has been written.
_FIXED_BYTES = 16 * PAGE
_NOTED_BYTES = 24
_USE_BYTES = 8


def slots_within(max_bytes: int, block_bytes: int) -> int:
    """How many blocks `max_bytes` have room for, with all that is kept of them."""
    parts = Parts(block_bytes)
    fixed = _FIXED_BYTES + index_bytes(0, parts)
    each = round_up(block_bytes, PAGE) + record_bytes(parts) + _USE_BYTES + _NOTED_BYTES
    if max_bytes < fixed + each:
        raise ValueError(
            f"DiskTier: max_bytes must have room for a block and its index, at least "
            f"{fixed + each} where block_bytes={block_bytes}, got {max_bytes}"
        )
    return (max_bytes - fixed) // each


class Folder:
    """The open files of a namespace: `slots`, `index`, and `uses` where they change."""

    def __init__(
        self, path: Path, wanted: Header, *, read_only: bool, direct: bool | None
    ) -> None:
        self.path = path
        self.uses: np.ndarray | None = None
        self._parts = Parts(wanted.block_bytes)
        self._lock = -1
        try:
            if not read_only:
                self._lock = _locked(path)
                self._make_slots(wanted)
            elif not self._slots_path.exists():
                raise DiskTierError(
                    f"DiskTier: {path} holds no blocks of this namespace; open it for "
                    "writing first, or look whether path and namespace are right"
                )
            self.slots = SlotFile(self._slots_path, read_only=read_only, direct=direct)
            _check_header(self._slots_path, self.slots.header, wanted)
            if not read_only:
                self._fit(wanted.num_slots)
            self.index = self._open_index(read_only)
        except BaseException:
            self.close()
            raise

    @property
    def _slots_path(self) -> Path:
        return self.path / "slots"

    @property
    def _index_path(self) -> Path:
        return self.path / "index.lmdb"

    def _open_index(self, read_only: bool = False) -> Index:
        file_id = self.slots.header.file_id
        return Index(self._index_path, file_id, self._parts, read_only=read_only)

    def _make_slots(self, wanted: Header) -> None:
        """Clears what an end in between left; makes the slot file if there is none."""
        try:
            for draft in self.path.glob("*.tmp"):
                draft.unlink()
            if self._slots_path.exists():
                return
            self._index_path.unlink(missing_ok=True)  # of a slot file that is gone
        except OSError as error:
            raise failed("clear", self.path, error) from error
        SlotFile.create(self._slots_path, wanted)

    def _fit(self, num_slots: int) -> None:
        """The files get the sizes of `num_slots`; blocks in slots beyond are lost.

        The index forgets them before the slots go: it never leads to a slot that was
        made anew.
        """
        header, index = self.slots.header, self._index_path
        size = index_bytes(num_slots, self._parts)
        there = index.stat().st_size if index.exists() else 0
        if there and (num_slots < header.num_slots or there > size):
            self._shrink_index(size, num_slots)
        found = self._slots_path.stat().st_size
        if (header.num_slots, header.file_bytes) != (num_slots, found):
            self.slots.resize(num_slots)
        if index.exists():
            self._take(index, size)
        else:
            create_index(index, size, header.file_id)
        path = self.path / "uses"
        self._take(path, num_slots * _USE_BYTES)
        self.uses = np.memmap(path, np.uint64, "r+", shape=num_slots)

    def _take(self, path: Path, size: int) -> None:
        """A file has `size` bytes, all of them taken."""
        try:
            with opened(path, os.O_RDWR | os.O_CREAT) as fd:
                os.posix_fallocate(fd, 0, size)
                os.ftruncate(fd, size)
        except OSError as error:
            raise failed(f"take {size} bytes for", path, error) from error

    def _shrink_index(self, size: int, num_slots: int) -> None:
        """lmdb's file never shrinks: its records go to a new one.

        The old one goes first, so that both together never take more than one; a
        process that ends here starts over without blocks.
        """
        old = self._open_index()
        records = list(old.load())
        old.close()
        kept = [(key, r) for key, r in records if r is not None and r.slot < num_slots]
        self._index_path.unlink()
        create_index(self._index_path, size, self.slots.header.file_id)
        new = self._open_index()
        new.commit([], kept)
        new.close()

    def close(self) -> None:
        self.uses = None
        for name in ("index", "slots"):
            if hasattr(self, name):
                getattr(self, name).close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __del__(self) -> None:
        self.close()


def _locked(path: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise failed("make", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise failed("lock", path, error) from error
        raise DiskTierError(
            error.errno,
            f"DiskTier: {path} is open for writing in process {holder}; close it "
            "there, or pass read_only=True",
        ) from error
    return fd


def _check_header(path: Path, found: Header, wanted: Header) -> None:
    """What is there is of the same namespace and block size."""
    for name in ("namespace", "block_bytes"):
        there, asked = getattr(found, name), getattr(wanted, name)
        if there != asked:
            shown = [x.hex() if isinstance(x, bytes) else x for x in (there, asked)]
            raise DiskTierError(
                f"DiskTier: {path} was made with {name}={shown[0]}, not {shown[1]}; "
                "give each model, dtype and extents of a block a namespace of its own, "
                f"or remove the folder {path.parent}, which only holds a cache"
            )
