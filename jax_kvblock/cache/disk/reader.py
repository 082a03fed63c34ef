"""Gets: blocks of a source, read and verified by several threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from jax_kvblock.cache.disk.blocks import Blocks
from jax_kvblock.cache.disk.books import Entry
from jax_kvblock.cache.disk.index import Index
from jax_kvblock.cache.disk.requests import InFlight, share_out
from jax_kvblock.cache.disk.stats import Counters


class Source(Protocol):
    """Who knows where blocks are: a `Writer`, or a `ReadOnly` index."""

    def has(self, keys: Sequence[bytes]) -> list[bool]: ...

    def keys(self) -> list[bytes]: ...

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]: ...

    def release(self, entries: Sequence[Entry], wrong: Sequence[Entry]) -> int: ...

    def __len__(self) -> int: ...

    def close(self) -> None: ...


class ReadOnly:
    """An index that another process may be writing. What it evicts meanwhile is a miss:
    the slot does not match its record any more, and the record has gone."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [record is not None for record in self._index.find(keys)]

    def keys(self) -> list[bytes]:
        return [key for key, record in self._index.load() if record is not None]

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]:
        records = self._index.find(keys)
        return [
            None if record is None else Entry(key, record)
            for key, record in zip(keys, records, strict=True)
        ]

    def release(self, entries: Sequence[Entry], wrong: Sequence[Entry]) -> int:
        found = self._index.find([entry.key for entry in wrong])
        return sum(
            entry.record == record for entry, record in zip(wrong, found, strict=True)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self._records())

    def _records(self) -> Iterator[bytes]:
        return (key for key, record in self._index.load() if record is not None)

    def close(self) -> None:
        """Nothing of its own is open."""


class Reader:
    """Reads blocks into rows of memory."""

    def __init__(
        self,
        source: Source,
        blocks: Blocks,
        in_flight: InFlight,
        counters: Counters,
        num_threads: int,
    ) -> None:
        self._source, self._blocks = source, blocks
        self._in_flight, self._counters = in_flight, counters
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kvblock-disk-read")

    def get(
        self,
        ticket: Future[np.ndarray],
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        start: int,
    ) -> None:
        """Fills the rows from byte `start` of each block that is there."""
        entries = self._source.hold(keys)
        held = [(i, entry) for i, entry in enumerate(entries) if entry]
        held.sort(key=lambda one: one[1].record.slot)
        hits = np.zeros(len(keys), bool)
        slots = [entry.record.slot for _, entry in held]
        runs = self._blocks.runs(slots, [rows[i] for i, _ in held])

        def read(run: int) -> None:
            blocks = [held[j] for j in runs[run]]
            places = [i for i, _ in blocks]
            hits[places] = self._blocks.read(
                [keys[i] for i in places],
                [entry.record for _, entry in blocks],
                start,
                [rows[i] for i in places],
            )

        def done(error: BaseException | None) -> None:
            # After an error some have not been read, which says nothing of them.
            wrong = [] if error else [entry for i, entry in held if not hits[i]]
            try:
                corrupt = self._source.release([entry for _, entry in held], wrong)
            except Exception as failed:  # an index that cannot be read
                error = error or failed
            if not error:
                found = int(hits.sum())
                misses = len(keys) - found
                self._counters.add(hits=found, misses=misses, corrupt=corrupt)
            self._in_flight.end(ticket, error or hits)

        if held:
            share_out(self._threads, self._num_threads, len(runs), read, done)
        else:
            done(None)

    def close(self) -> None:
        self._threads.shutdown()
