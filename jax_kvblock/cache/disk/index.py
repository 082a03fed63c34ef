"""The index: an lmdb file from keys to slots, generations and checksums.

A transaction is whole or not there, and on the device when it returns (lmdb's sync and
metasync). Each record has a checksum of its own, seeded by the id of the slot file, so
that records of another file are none of this one's. The file takes all of its space
when it is made: a full disk cannot stop a transaction.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_kvblock.cache.disk.checksums import PAGE, SUM_BYTES, Parts, round_up
from jax_kvblock.cache.disk.errors import DiskTierError, damaged, failed, needed
from jax_kvblock.cache.disk.index_check import Damage, check_heads, check_pages
from jax_kvblock.cache.disk.slot_file import drafted, opened

KEY_BYTES = 32
_FILE_ID = b"slot file"  # a key that is no block's: it has 9 bytes
_PLACE = struct.Struct("<QQ")  # slot, generation
_CHECK = struct.Struct("<Q")
_NODE_BYTES = 8 + 2  # what lmdb adds to a record in a page
# Leaves of random keys are half to two thirds full, and two transactions' old pages
# wait beside the newest ones; 4.7 times the records were seen, of 8 that are there.
_ROOM = 8
_LEAST_BYTES = 64 * PAGE
_TRIES = 100  # to see a transaction that nobody replaces meanwhile


class Record(NamedTuple):
    """Where a block is, and what it must match."""

    slot: int
    generation: int
    sums: bytes


def record_bytes(parts: Parts) -> int:
    """What a block costs in the index."""
    value = _PLACE.size + parts.count * SUM_BYTES + _CHECK.size
    return _ROOM * (_NODE_BYTES + KEY_BYTES + value)


def index_bytes(num_slots: int, parts: Parts) -> int:
    """The size of the index of as many blocks."""
    return round_up(_LEAST_BYTES + num_slots * record_bytes(parts), PAGE)


def create_index(path: Path, size: int, file_id: bytes) -> None:
    """Makes an empty index of `size` bytes under another name, then renames it.

    lmdb's lock file goes with the index of before: it has the number of that one's last
    transaction, and lmdb keeps it as long as another process has that one open.
    """
    lmdb = needed("lmdb")
    with drafted(path, size) as draft:
        path.with_name(f"{path.name}-lock").unlink(missing_ok=True)
        try:
            env = lmdb.open(str(draft), subdir=False, map_size=size, lock=False)
            with env, env.begin(write=True) as transaction:
                transaction.put(_FILE_ID, file_id)
        except lmdb.Error as error:
            raise _error("create", path, error) from error
        with opened(draft, os.O_RDWR) as fd:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)


class Index:
    """An open index. One thread commits; any may find."""

    def __init__(
        self, path: Path, file_id: bytes, parts: Parts, *, read_only: bool = False
    ) -> None:
        self.path = path
        self._value_bytes = _PLACE.size + parts.count * SUM_BYTES + _CHECK.size
        self._lmdb, xxhash = needed("lmdb"), needed("xxhash")
        self._hash = xxhash.xxh3_64_intdigest
        self._seed = int.from_bytes(file_id[:8], "little")
        try:
            check_heads(path)
            self._env = self._lmdb.open(
                str(path),
                subdir=False,
                map_size=path.stat().st_size,
                readonly=read_only,
                readahead=False,
                max_spare_txns=16,
            )
        except Damage as error:
            raise damaged(path, str(error)) from error
        except OSError as error:
            raise failed("open", path, error) from error
        except self._lmdb.Error as error:
            raise _error("open", path, error) from error
        try:
            self._check(file_id)
        except BaseException:
            self.close()
            raise

    def _check(self, file_id: bytes) -> None:
        """Its pages, and that it is of this slot file."""
        for _ in range(_TRIES):  # another process may commit meanwhile
            with self._env.begin() as transaction:
                try:
                    if check_pages(self.path, transaction.id()):
                        break
                except Damage as error:
                    raise damaged(self.path, str(error)) from error
        else:
            raise DiskTierError(
                errno.EBUSY,
                f"DiskTier: {self.path} is not the file that its lock is of: another "
                "process makes it anew; open it again. If it stays so, remove the "
                f"folder {self.path.parent}, which only holds a cache",
            )
        if self._read(lambda transaction: transaction.get(_FILE_ID)) != file_id:
            raise damaged(self.path, "it belongs to another slot file")

    def load(self) -> Iterator[tuple[bytes, Record | None]]:
        """All keys, with None for records that do not match their checksum."""
        with self._env.begin() as transaction:
            for key, value in transaction.cursor():
                if key != _FILE_ID:
                    yield key, self._unpack(key, value)

    def find(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The records of one moment; None for a key that has none, or a wrong one."""
        values = self._read(lambda transaction: [transaction.get(key) for key in keys])
        return [
            None if value is None else self._unpack(key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    def commit(
        self, removed: Sequence[bytes], added: Sequence[tuple[bytes, Record]]
    ) -> None:
        """All of it or nothing, on the device when this returns."""
        full: type[Exception] = self._lmdb.MapFullError
        try:
            try:
                self._write(removed, added)
            except full:
                if not self._env.reader_check():
                    raise
                self._write(removed, added)  # a reader had died within a lookup
        except full as error:
            raise DiskTierError(
                errno.ENOSPC,
                f"DiskTier: {self.path} has no free page left: a process that reads it "
                "has stopped within a lookup; end that process",
            ) from error
        except self._lmdb.Error as error:
            raise _error("write", self.path, error) from error

    def _write(
        self, removed: Sequence[bytes], added: Sequence[tuple[bytes, Record]]
    ) -> None:
        with self._env.begin(write=True) as transaction:
            for key in removed:
                transaction.delete(key)
            for key, record in added:
                transaction.put(key, self._pack(key, record))

    def close(self) -> None:
        self._env.close()

    def _read(self, reader: Any) -> Any:
        try:
            with self._env.begin() as transaction:
                return reader(transaction)
        except self._lmdb.Error as error:
            raise _error("read", self.path, error) from error

    def _pack(self, key: bytes, record: Record) -> bytes:
        body = _PLACE.pack(record.slot, record.generation) + record.sums
        return body + _CHECK.pack(self._hash(key + body, self._seed))

    def _unpack(self, key: bytes, value: bytes) -> Record | None:
        body, check = value[: -_CHECK.size], value[-_CHECK.size :]
        if len(key) != KEY_BYTES or len(value) != self._value_bytes:
            return None
        if check != _CHECK.pack(self._hash(key + body, self._seed)):
            return None
        slot, generation = _PLACE.unpack_from(body)
        return Record(slot, generation, body[_PLACE.size :])


def _error(what: str, path: Path, error: Exception) -> DiskTierError:
    fix = f"if it goes on, remove the folder {path.parent}, which only holds a cache"
    if "already open" in str(error):
        fix = "share the DiskTier that this process has open, or close it before"
    elif getattr(error, "code", 0) in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = f"who reads has to write its lock, too: {path}-lock"
    return DiskTierError(f"DiskTier: could not {what} {path}: {error}; {fix}")
