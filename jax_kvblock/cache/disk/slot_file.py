"""The slot file: a header of one page, then slots of whole pages for one block each.

All of its space is taken when it is made. What it is for stands in the header: a file
of another version, namespace or block size is refused. Reads and writes go around the
page cache (O_DIRECT) where the filesystem lets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jax_kvblock.cache.disk.aligned import aligned_empty
from jax_kvblock.cache.disk.checksums import PAGE, round_up
from jax_kvblock.cache.disk.errors import DiskTierError, damaged, failed, needed

MAGIC, VERSION = b"KVBSLOTS", 1
# Magic, version, bytes to a block, slots, namespace, the file's own id; a checksum.
_HEADER = struct.Struct("<8sQQQ32s16s")


@dataclasses.dataclass(frozen=True)
class Header:
    """What a slot file is for, and which one it is."""

    namespace: bytes
    block_bytes: int
    num_slots: int
    file_id: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def slot_bytes(self) -> int:
        return round_up(self.block_bytes, PAGE)

    @property
    def file_bytes(self) -> int:
        return PAGE + self.num_slots * self.slot_bytes

    def pack(self) -> np.ndarray:
        """As one aligned page."""
        fields = (MAGIC, VERSION, self.block_bytes, self.num_slots)
        packed = _HEADER.pack(*fields, self.namespace, self.file_id)
        packed += needed("xxhash").xxh3_128_digest(packed)
        page = aligned_empty(PAGE)
        page[: len(packed)] = np.frombuffer(packed, np.uint8)
        return page

    @classmethod
    def unpack(cls, path: Path, page: bytes) -> Header:
        fields = _HEADER.unpack_from(page)
        magic, version, block_bytes, num_slots, namespace, file_id = fields
        if magic != MAGIC:
            raise damaged(path, "it does not begin as a slot file")
        # The checksum's place may be another version's, so the version comes first.
        if version != VERSION:
            raise DiskTierError(
                f"DiskTier: {path} must be of format {VERSION}, is of {version}; "
                f"remove the folder {path.parent}, which only holds a cache"
            )
        end = _HEADER.size
        digest = needed("xxhash").xxh3_128_digest(page[:end])
        if page[end : end + len(digest)] != digest:
            raise damaged(path, "its header does not match its checksum")
        return cls(namespace, block_bytes, num_slots, file_id)


class SlotFile:
    """An open slot file; `direct` says how it is read and written, `why` why so."""

    def __init__(
        self, path: Path, *, read_only: bool = False, direct: bool | None = None
    ) -> None:
        self.path, self.read_only = path, read_only
        self._fd = -1
        try:
            self.direct, self.why = self._open(direct)
        except OSError as error:
            self.close()
            if isinstance(error, DiskTierError):
                raise
            raise failed("open", path, error) from error

    def _open(self, direct: bool | None) -> tuple[bool, str]:
        """Opens around the page cache if that is wished and works here."""
        mode = os.O_RDONLY if self.read_only else os.O_RDWR
        if direct is not False:
            try:
                self._fd = os.open(self.path, mode | os.O_DIRECT | os.O_CLOEXEC)
                self._load_header()
                return True, "O_DIRECT"
            except OSError as error:
                self.close()
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                if direct:
                    raise DiskTierError(
                        f"DiskTier: direct=True, but the filesystem of {self.path} "
                        "takes no O_DIRECT; pass direct=None to go by the page cache"
                    ) from error
        self._fd = os.open(self.path, mode | os.O_CLOEXEC)
        self._load_header()
        asked = "asked for" if direct is False else "no O_DIRECT here"
        return False, f"buffered: {asked}"

    def _load_header(self) -> None:
        """Reads the header and, as a trial of writing, writes it as it was."""
        page = aligned_empty(PAGE)
        if os.preadv(self._fd, [page], 0) != PAGE:
            raise damaged(self.path, "it has no header")
        self.header = Header.unpack(self.path, page.tobytes())
        found = os.fstat(self._fd).st_size
        if found < self.header.file_bytes:
            says = f"it has {found} bytes, not {self.header.file_bytes}"
            raise damaged(self.path, says)
        if not self.read_only:
            write_all(self._fd, [page], 0)

    @classmethod
    def create(cls, path: Path, header: Header) -> None:
        """Makes the file whole under another name, then gives it its own."""
        with (
            drafted(path, header.file_bytes) as draft,
            opened(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd,
        ):
            os.posix_fallocate(fd, 0, header.file_bytes)
            write_all(fd, [header.pack()], 0)
            os.fsync(fd)

    def resize(self, num_slots: int) -> None:
        """Other slots at the end. The file is never shorter than its header says."""
        old, fd = self.header, self._fd
        new = dataclasses.replace(old, num_slots=num_slots)
        try:
            if num_slots > old.num_slots:
                try:
                    os.posix_fallocate(fd, 0, new.file_bytes)
                except OSError:
                    os.ftruncate(fd, old.file_bytes)  # gives back what it got
                    raise
            write_all(fd, [new.pack()], 0)
            os.fsync(fd)
            os.ftruncate(fd, new.file_bytes)
        except OSError as error:
            what = f"take {new.file_bytes} bytes for"
            raise failed(what, self.path, error) from error
        self.header = new

    def offset(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        return PAGE + slot * self.header.slot_bytes

    def read(self, slot: int, start: int, into: Sequence[np.ndarray]) -> None:
        """Fills arrays from byte `start` of the slot and on; pages where direct."""
        try:
            read_all(self._fd, into, self.offset(slot) + start)
        except OSError as error:
            raise failed("read", self.path, error) from error

    def write(self, slot: int, data: Sequence[np.ndarray]) -> None:
        """Writes arrays from the slot's beginning and on; pages where direct."""
        try:
            write_all(self._fd, data, self.offset(slot))
        except OSError as error:
            raise failed("write", self.path, error) from error

    def sync(self) -> None:
        """What has been written is on the device when this returns."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise failed("sync", self.path, error) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def drafted(path: Path, size: int) -> Iterator[Path]:
    """Another name for a file of `size` bytes, which gets its own when it is whole."""
    draft = path.with_suffix(".tmp")
    try:
        yield draft
        os.rename(draft, path)
        sync_folder(path.parent)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, DiskTierError):
            raise failed(f"take {size} bytes for", path, error) from error
        raise


def sync_folder(path: Path) -> None:
    """The names in a folder are on the device when this returns."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def read_all(fd: int, into: Sequence[np.ndarray], offset: int) -> None:
    """`os.preadv` until all is there."""
    views = [memoryview(array) for array in into]
    while views:
        count = os.preadv(fd, views, offset)
        if not count:
            raise OSError(errno.EIO, "the file ends early")
        views, offset = _after(views, count), offset + count


def write_all(fd: int, data: Sequence[np.ndarray], offset: int) -> None:
    """`os.pwritev` until all is written; the one place that writes slots."""
    views = [memoryview(array) for array in data]
    while views:
        count = os.pwritev(fd, views, offset)
        views, offset = _after(views, count), offset + count


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers after the first `count` bytes."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    return [left[0][count:], *left[1:]] if count else left
