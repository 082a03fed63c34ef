"""Blocks on disk: the tier below host memory.

The design is told in `docs/disk_tier.md`. What happens in which file: `folder.py`
opens and locks; `slot_file.py` and `index.py` are the two files; `books.py`
knows what is where; `writer.py` and `reader.py` do the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_kvblock.cache.disk import arguments
from jax_kvblock.cache.disk.aligned import aligned_empty
from jax_kvblock.cache.disk.blocks import Blocks
from jax_kvblock.cache.disk.books import Books, Entry
from jax_kvblock.cache.disk.folder import Folder, slots_within
from jax_kvblock.cache.disk.gds import DeviceReads
from jax_kvblock.cache.disk.reader import Reader, ReadOnly, Source
from jax_kvblock.cache.disk.requests import InFlight
from jax_kvblock.cache.disk.slot_file import Header, SlotFile
from jax_kvblock.cache.disk.stats import Counters, DiskStats
from jax_kvblock.cache.disk.writer import Writer


class Place:
    """Where a block lies: `num_bytes` from byte `offset` of the file `path`."""

    def __init__(self, slots: SlotFile, blocks: Blocks, entry: Entry) -> None:
        self.path = slots.path
        self.offset = slots.offset(entry.record.slot)
        self.num_bytes = slots.header.block_bytes
        self.entry, self.is_wrong = entry, False
        self._blocks = blocks

    def matches(self, data: np.ndarray) -> bool:
        """Whether uint8[num_bytes] that were read there are what was put."""
        key, record = self.entry.key, self.entry.record
        self.is_wrong = not self._blocks.matches(key, record, data)
        return not self.is_wrong


class DiskTier:
    """Blocks by their keys in a folder of `path`, at most `max_bytes` of disk.

    namespace: 32 bytes; blocks of another model, dtype or extents have another, and a
        folder of their own, each with its own bound; the layout of a pool is no part of
        it. `PrefixCache.namespace.digest` is one.
    block_bytes: of one block; keys are 32 bytes each.
    max_bytes: never passed, index and all. All of it is taken at the start. Another
        value than last time keeps the blocks that have room.
    num_threads: that read, and as many that write.
    direct: True reads and writes around the page cache (O_DIRECT) or fails; False goes
        through it; None takes the first where the filesystem can, and `stats().io` says
        what it took.
    gpudirect: whether kvikio reads blocks straight into GPU memory (`get_to_device`):
        None where it is installed and has GPUDirect storage, True in any case, False
        never; `stats().to_device` says what it does. Puts go by host memory.
    policy: "lru", what was not used for the longest time is evicted.
    read_only: what is there is read, also while another process writes it.

    Puts, gets and removals are tickets, `concurrent.futures.Future`: `result()` waits
    for it. A block is found when all of it is on disk, and not before. One that does
    not match its checksums is a miss; it is counted and removed.

    Raises DiskTierError (an OSError) if the folder is open for writing elsewhere, is of
    another version, namespace or block size, is damaged, or has no room.

        with DiskTier("/ssd/kv", namespace=space, block_bytes=1 << 20,
                      max_bytes=64 << 30) as tier:
            tier.put(keys, blocks).result()   # uint8[n, 1 << 20]
            hits = tier.get(keys, out).result()  # bool[n]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: bytes,
        block_bytes: int,
        max_bytes: int,
        num_threads: int = 4,
        direct: bool | None = None,
        gpudirect: bool | None = None,
        policy: str = "lru",
        read_only: bool = False,
    ) -> None:
        sizes = {"block_bytes": block_bytes, "max_bytes": max_bytes}
        sizes["num_threads"] = num_threads
        switches = {"direct": direct, "gpudirect": gpudirect, "read_only": read_only}
        checked = arguments.check_open(path, namespace, policy, sizes, switches)
        block_bytes, max_bytes, num_threads = checked
        wanted = Header(namespace, block_bytes, slots_within(max_bytes, block_bytes))
        self.namespace, self.block_bytes = namespace, block_bytes
        self.path = Path(path) / namespace.hex()
        DeviceReads.check(gpudirect)
        self._in_flight, self._counters = InFlight(), Counters()
        self._folder = Folder(self.path, wanted, read_only=read_only, direct=direct)
        self._slots = self._folder.slots
        direct = self._slots.direct
        self._device_reads = DeviceReads(self._slots.path, gpudirect, direct)
        self._blocks = Blocks(self._slots, num_threads)
        self._source: Source
        self._writer: Writer | None = None
        shared = (self._in_flight, self._counters, num_threads)
        if self._folder.uses is None:
            self._source = ReadOnly(self._folder.index)
        else:
            books = self._load_books(self._folder.uses)
            self._writer = Writer(books, self._blocks, self._folder.index, *shared)
            self._source = self._writer
        self._reader = Reader(self._source, self._blocks, *shared)
        # Requests begin here, one after the other, out of the reach of interrupts.
        self._front = ThreadPoolExecutor(1, "kvblock-disk")
        self._process = os.getpid()
        self._closed = False
        _open.add(self)

    def _load_books(self, uses: np.ndarray) -> Books:
        books = Books(uses)
        if wrong := books.load(self._folder.index.load()):
            self._folder.index.commit(wrong, [])
            self._counters.add(corrupt=len(wrong))
        return books

    @property
    def takes(self) -> bool:
        """Whether blocks may be put here, or are only read."""
        return self._writer is not None

    def put(self, keys: Sequence[bytes], blocks: Any) -> Future[int]:
        """Stores blocks; the ticket has the number of those that were not there before.

        blocks: uint8[n, block_bytes], or n arrays uint8[block_bytes], which stay as
        they are until the ticket is done. Memory of `aligned_empty` is written without
        a copy. Keys that are there, or that another put is writing, are left out. Where
        room is needed, blocks are evicted, and the put waits for those that are read;
        of a put with more blocks than there are slots, the first ones are stored. If
        the ticket fails, blocks that were not published by then are not stored.
        """
        writer = self._writing("put")
        where = "DiskTier.put"
        found = arguments.check_keys(where, keys)
        rows = arguments.check_rows(where, "blocks", blocks, len(found), writable=False)
        self._check_range(where, "blocks", rows, 0, whole=True)
        return self._begin(writer.put, found, rows)

    def get(
        self, keys: Sequence[bytes], out: Any, *, start: int = 0
    ) -> Future[np.ndarray]:
        """Reads blocks into rows; the ticket has bool[n], True for each that was there.

        out: uint8[n, count], or n arrays uint8[count]; count may be less than
        block_bytes, to read that many bytes of each block from byte `start`: a range
        of heads of universal blocks. The rows of misses may have been overwritten.
        """
        where = "DiskTier.get"
        found = arguments.check_keys(where, keys)
        rows = arguments.check_rows(where, "out", out, len(found), writable=True)
        self._check_range(where, "out", rows, start)
        return self._begin(self._reader.get, found, rows, start)

    @property
    def reads_to_device(self) -> bool:
        """Whether `get_to_device` serves; what takes a `Store` asks each time."""
        return self._device_reads.work

    def get_to_device(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        to_host: Callable[[list[int]], Sequence[np.ndarray]],
    ) -> list[bool]:
        """Reads blocks into GPU memory and waits; of each, whether it was there.

        buffers: for each key what kvikio reads into, of block_bytes: what has
            `__cuda_array_interface__`, for example.
        to_host: brings the bytes of these places of `buffers` to the host, uint8
            [block_bytes] each, to be held to their checksums: no block that does not
            match is said to be there.

        Raises what kvikio fails with; nothing is being read then. Unless `gpudirect` is
        True, `reads_to_device` is False from then on.
        """
        where = "DiskTier.get_to_device"
        found = arguments.check_keys(where, keys)
        if len(buffers) != len(found):
            raise ValueError(
                f"{where}: buffers must be one for each of {len(found)} keys, got "
                f"{len(buffers)}"
            )
        if not self.reads_to_device:
            raise ValueError(
                f"{where}: no block is read to a device: {self._device_reads.why}; "
                "`get` reads to the host"
            )
        hits = [False] * len(found)
        with self._in_flight.one():  # `close` waits for it
            self._check_open("get_to_device")
            with self.held(found) as places:
                held = {i: place for i, place in enumerate(places) if place}
                offsets = [place.offset for place in held.values()]
                if held:
                    into = [buffers[i] for i in held]
                    self._device_reads.read(into, offsets, self.block_bytes)
                    rows = to_host([*held])
                    for (i, place), row in zip(held.items(), rows, strict=True):
                        hits[i] = place.matches(row)
                    self._blame(place for place in held.values() if place.is_wrong)
        good = sum(hits)
        self._counters.add(hits=good, misses=len(hits) - good)
        return hits

    def _blame(self, wrong: Iterable[Place]) -> None:
        """Blocks that came wrong to a device: the disk's, or its way there?"""
        memory = aligned_empty(1, self.block_bytes)[0]
        came_wrong = []
        for place in wrong:
            key, record = place.entry.key, place.entry.record
            if self._blocks.read([key], [record], 0, [memory])[0]:
                place.is_wrong = False
                came_wrong.append(place.offset)
        if came_wrong:
            error = OSError(
                f"{len(came_wrong)} blocks of {self._slots.path} came to the device "
                f"wrong, the first one of byte {came_wrong[0]}"
            )
            self._device_reads.failed(error)
            raise error

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are there, as far as the index knows."""
        self._check_open("has")
        return self._source.has(arguments.check_keys("DiskTier.has", keys))

    def keys(self) -> list[bytes]:
        """Of all blocks that are there, the least recently used first."""
        self._check_open("keys")
        return self._source.keys()

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """Removes blocks; the ticket has the number of those that were there."""
        writer = self._writing("remove")
        return self._begin(writer.remove, arguments.check_keys("DiskTier.remove", keys))

    @contextlib.contextmanager
    def held(self, keys: Sequence[bytes]) -> Iterator[list[Place | None]]:
        """Where blocks lie, for readers of one's own; None for what is not there.

        Until the context ends, nothing else is written there. What was read is to be
        verified by `Place.matches`; what does not match is removed at the end.
        """
        self._check_open("held")
        entries = self._source.hold(arguments.check_keys("DiskTier.held", keys))
        slots, blocks = self._slots, self._blocks
        places = [Place(slots, blocks, entry) if entry else None for entry in entries]
        try:
            yield places
        finally:
            held = [place for place in places if place]
            wrong = [place.entry for place in held if place.is_wrong]
            corrupt = self._source.release([place.entry for place in held], wrong)
            self._counters.add(corrupt=corrupt)

    def stats(self) -> DiskStats:
        """What is there, and what has been counted since the tier was opened."""
        self._check_open("stats")
        return DiskStats(
            num_blocks=len(self._source),
            num_slots=self._slots.header.num_slots,
            direct=self._slots.direct,
            io=self._slots.why,
            to_device=self._device_reads.why,
            **dataclasses.asdict(self._counters.read()),
        )

    def close(self) -> None:
        """Waits for what is in flight and closes the files; once is enough."""
        self._closed = True
        _open.discard(self)
        self._front.shutdown()
        self._in_flight.wait()
        self._reader.close()
        self._device_reads.close()
        self._source.close()
        self._folder.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"DiskTier({str(self.path)!r}, closed)"
        stats = self.stats()
        return (
            f"DiskTier({str(self.path)!r}, {stats.num_blocks} of {stats.num_slots} "
            f"blocks of {self.block_bytes} bytes, {stats.io})"
        )

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise ValueError(f"DiskTier.{name}: the tier of {self.path} is closed")
        if os.getpid() != self._process:
            raise ValueError(
                f"DiskTier.{name}: the tier of {self.path} is of process "
                f"{self._process}, whose threads a fork has not; open one here with "
                "read_only=True"
            )

    def _writing(self, name: str) -> Writer:
        self._check_open(name)
        if self._writer is None:
            raise ValueError(
                f"DiskTier.{name}: the tier of {self.path} is read-only; open it "
                "without read_only"
            )
        return self._writer

    def _check_range(
        self,
        where: str,
        name: str,
        rows: list[np.ndarray],
        start: int,
        whole: bool = False,
    ) -> None:
        count = len(rows[0]) if rows else self.block_bytes
        if whole and count != self.block_bytes:
            raise ValueError(
                f"{where}: {name} must have block_bytes={self.block_bytes} bytes to a "
                f"row, got {count}"
            )
        if start < 0 or not count or start + count > self.block_bytes:
            raise ValueError(
                f"{where}: start and the bytes of a row of {name} must lie in a block "
                f"of {self.block_bytes} bytes, got start={start} and {count} bytes"
            )

    def _begin(self, request: Callable[..., None], *args: Any) -> Future[Any]:
        """A ticket for a request that the front thread begins."""
        self._check_open(request.__name__)
        ticket: Future[Any] = Future()
        ticket.set_running_or_notify_cancel()  # it cannot be cancelled
        self._front.submit(self._run, request, ticket, *args)
        return ticket

    def _run(
        self, request: Callable[..., None], ticket: Future[Any], *args: Any
    ) -> None:
        self._in_flight.begin()
        try:
            request(ticket, *args)
        except BaseException as error:
            self._in_flight.end(ticket, error)


_open: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _close_all() -> None:
    """What is in flight when the interpreter ends is done."""
    for tier in list(_open):
        if tier._process == os.getpid():  # not a fork's: it has none of the threads
            with contextlib.suppress(Exception):  # the next one is closed all the same
                tier.close()


# Executors take no jobs any more when `atexit` comes, and tickets that need some would
# never be done. So this comes before these end: what is registered last goes first.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
