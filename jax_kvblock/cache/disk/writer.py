"""Puts and removals: data first, then one transaction for all that waits.

A put takes free slots, its blocks are written by several threads, and one thread
publishes what is complete: it has the slot file synced, then commits one transaction
with the new records, with removals, and with the evictions that puts in the queue wait
for. Only a slot whose removal has been committed is written again. So at any moment
the index that a process would find after an end has no slot that was being written.
"""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jax_kvblock.cache.disk.blocks import Blocks
from jax_kvblock.cache.disk.books import Books, Entry
from jax_kvblock.cache.disk.index import Index, Record
from jax_kvblock.cache.disk.requests import InFlight, share_out
from jax_kvblock.cache.disk.stats import Counters


class _Put:
    """Blocks to be stored: `left` are not, and of these `todo` have no slots yet."""

    def __init__(
        self,
        number: int,
        ticket: Future[int],
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
    ) -> None:
        self.number, self.ticket = number, ticket
        self.keys, self.rows = keys, rows
        self.todo: list[int] = []
        self.left = self.stored = 0
        self.error: BaseException | None = None


class _Part:
    """Blocks of a put that have slots, and generations from `generation` on."""

    def __init__(
        self, put: _Put, items: list[int], slots: list[int], generation: int
    ) -> None:
        self.put, self.slots, self.generation = put, slots, generation
        self.keys = [put.keys[i] for i in items]
        self.rows = [put.rows[i] for i in items]
        self.records: dict[int, list[Record]] = {}  # by the first block of a run
        self.error: BaseException | None = None

    def blocks(self) -> list[tuple[bytes, Record]]:
        records = [record for _, run in sorted(self.records.items()) for record in run]
        return list(zip(self.keys, records, strict=True))


class Writer:
    """The blocks of a folder that is open for writing, for many threads."""

    def __init__(
        self,
        books: Books,
        blocks: Blocks,
        index: Index,
        in_flight: InFlight,
        counters: Counters,
        num_threads: int,
    ) -> None:
        self._books, self._blocks, self._index = books, blocks, index
        self._in_flight, self._counters = in_flight, counters
        self._lock = threading.Lock()
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kvblock-disk-write")
        self._publisher = ThreadPoolExecutor(1, "kvblock-disk-publish")
        self._will_publish = False
        self._puts = 0
        # No block ever has the generation that another one had in its slot.
        self._generation = secrets.randbits(63)
        self._queue: collections.deque[_Put] = collections.deque()
        self._written: list[_Part] = []
        self._dropped: list[Entry] = []
        self._removals: list[tuple[Future[int], int]] = []

    # ---- what is there ----

    def __len__(self) -> int:
        with self._lock:
            return len(self._books)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._books for key in keys]

    def keys(self) -> list[bytes]:
        with self._lock:
            return self._books.keys()

    # ---- reading ----

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]:
        with self._lock:
            return self._books.hold(keys)

    def release(self, entries: Sequence[Entry], wrong: Sequence[Entry]) -> int:
        """Ends the reading of `entries`; those of them that are wrong are removed.

        Gives the number of blocks that were found to be wrong by this.
        """
        with self._lock:
            for entry in entries:
                self._books.release(entry)
            dropped = [entry for entry in wrong if self._books.drop(entry)]
            self._dropped += dropped
            if self._queue or dropped:
                self._wake()
        return len(dropped)

    # ---- writing ----

    def put(
        self, ticket: Future[int], keys: Sequence[bytes], rows: Sequence[np.ndarray]
    ) -> None:
        with self._lock:
            self._puts += 1
            put = _Put(self._puts, ticket, keys, rows)
            put.todo = self._books.claim(keys)
            put.left = len(put.todo)
            self._counters.add(duplicates=len(keys) - put.left)
            if put.left:
                self._queue.append(put)
            parts = self._give_slots()
            if self._queue:
                self._wake()
        if not put.left:
            self._in_flight.end(ticket, 0)
        for part in parts:
            self._write(part)

    def remove(self, ticket: Future[int], keys: Sequence[bytes]) -> None:
        with self._lock:
            dropped = self._books.drop_keys(keys)
            self._dropped += dropped
            self._counters.add(removed=len(dropped))
            if dropped:
                self._removals.append((ticket, len(dropped)))
                self._wake()
        if not dropped:
            self._in_flight.end(ticket, 0)

    def close(self) -> None:
        self._threads.shutdown()
        self._publisher.shutdown()
        self._books.close()

    def _give_slots(self) -> list[_Part]:
        """Free slots to those who wait, in order."""
        parts = []
        while self._queue and self._books.free:
            put = self._queue[0]
            slots = self._books.take(len(put.todo))
            items = put.todo[: len(slots)]
            parts.append(_Part(put, items, slots, self._generation))
            self._generation += len(slots)
            del put.todo[: len(slots)]
            if not put.todo:
                self._queue.popleft()
        return parts

    def _write(self, part: _Part) -> None:
        runs = self._blocks.runs(part.slots, part.rows)

        def write(run: int) -> None:
            start, stop = runs[run].start, runs[run].stop
            part.records[start] = self._blocks.write(
                part.keys[start:stop],
                part.generation + start,
                part.slots[start],
                part.rows[start:stop],
            )

        def done(error: BaseException | None) -> None:
            part.error = error
            with self._lock:
                self._written.append(part)
                self._wake()

        share_out(self._threads, self._num_threads, len(runs), write, done)

    def _wake(self) -> None:
        """The publisher looks at what waits, once for all that comes until then."""
        if not self._will_publish:
            self._will_publish = True
            self._publisher.submit(self._publish)

    def _publish(self) -> None:
        """One transaction for all that waits, then the tickets of what is settled."""
        with self._lock:
            self._will_publish = False
            written, self._written = self._written, []
            dropped, self._dropped = self._dropped, []
            removals, self._removals = self._removals, []
            wanted = sum(len(put.todo) for put in self._queue)
            # A put does not push out its own first blocks, which the others need.
            first = self._queue[0].number if self._queue else None
            evicted = self._books.drop_oldest(wanted - len(dropped), first)
        error = self._commit(written, [*dropped, *evicted])
        with self._lock:
            if error:
                # What could not be removed is so with the next transaction.
                late = self._books.restore(evicted)
                self._dropped += [*dropped, *late]
                settled = [p for p in list(self._queue) if self._fail(p, error)]
            else:
                for entry in (*dropped, *evicted):
                    self._books.forget(entry)
                self._counters.add(evicted=len(evicted))
                settled = []
            settled += [p.put for p in written if self._settle(p, p.error or error)]
            refused = self._refuse()
            settled += refused
            for put in settled:
                self._books.use(put.keys)  # its parts were published in any order
            parts = self._give_slots()
            if self._queue and (written or refused):
                self._wake()  # what was published may go for what waits
        for ticket, count in removals:
            self._in_flight.end(ticket, error or count)
        for put in settled:
            self._in_flight.end(put.ticket, put.error or put.stored)
        for part in parts:
            self._write(part)

    def _commit(
        self, written: Sequence[_Part], gone: Sequence[Entry]
    ) -> Exception | None:
        """Data before the index that leads to it."""
        complete = [part for part in written if not part.error]
        new = [block for part in complete for block in part.blocks()]
        try:
            if new:
                self._blocks.sync()
            if new or gone:
                self._index.commit([entry.key for entry in gone], new)
        except Exception as error:
            return error
        return None

    def _settle(self, part: _Part, error: BaseException | None) -> bool:
        """A part is published or its slots are free again; is its put at its end?"""
        put, count = part.put, len(part.slots)
        put.left -= count
        if error:
            self._books.unclaim(part.keys)
            self._books.free += part.slots
            self._counters.add(failed=count)
            return self._fail(put, error)
        self._books.publish(part.blocks(), put.number)
        self._counters.add(stored=count)
        put.stored += count
        return not put.left

    def _refuse(self) -> list[_Put]:
        """A put whose own blocks have all the slots there are: its rest has no room."""
        put = self._queue[0] if self._queue else None
        if not put or not self._books.all_slots_are(put.number, put.stored):
            return []
        self._counters.add(refused=len(put.todo))
        self._drop_todo(put)
        return [put]

    def _drop_todo(self, put: _Put) -> None:
        self._books.unclaim(put.keys[i] for i in put.todo)
        put.left -= len(put.todo)
        put.todo = []
        self._queue.remove(put)

    def _fail(self, put: _Put, error: BaseException) -> bool:
        """What has no slots yet gets none; is the put at its end?"""
        put.error = put.error or error
        if put.todo:
            self._counters.add(failed=len(put.todo))
            self._drop_todo(put)
        return not put.left
