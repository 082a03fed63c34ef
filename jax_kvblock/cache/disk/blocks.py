"""Blocks between memory and slots, with their checksums.

Rows that begin on a page and have whole pages are read and written where they lie, and
those of slots side by side in one call; all others go through a buffer of the thread
when the file is open around the page cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_kvblock.cache.disk.aligned import Bounce, is_aligned
from jax_kvblock.cache.disk.checksums import PAGE, Checksums, Parts, round_up
from jax_kvblock.cache.disk.index import Record
from jax_kvblock.cache.disk.slot_file import SlotFile

# Calls of this size reach a disk's rate; larger ones leave threads without work.
_RUN_BYTES = 2 << 20


class Blocks:
    """Reads and writes whole blocks, and verified ranges of them; for many threads."""

    def __init__(self, slots: SlotFile, num_threads: int) -> None:
        self._slots = slots
        self._num_threads = num_threads
        self._parts = Parts(slots.header.block_bytes)
        self._checksums = Checksums(self._parts)
        self._bounce = Bounce(slots.header.slot_bytes)

    def runs(self, slots: Sequence[int], rows: Sequence[np.ndarray]) -> list[range]:
        """Cuts the blocks into runs that one call reads or writes."""
        slot_bytes = self._slots.header.slot_bytes
        share = -(-len(rows) // self._num_threads)
        longest = max(1, min(_RUN_BYTES // slot_bytes, share))
        fits = [len(row) == slot_bytes and self._in_place(row) for row in rows]
        runs, start = [], 0
        for i in range(1, len(rows) + 1):
            side_by_side = (
                i < len(rows)
                and i - start < longest
                and fits[i - 1]
                and fits[i]
                and slots[i] == slots[i - 1] + 1
            )
            if not side_by_side:
                runs.append(range(start, i))
                start = i
        return runs

    def _in_place(self, row: np.ndarray) -> bool:
        """Whether the file is read and written from the row's own memory."""
        return not self._slots.direct or is_aligned(row)

    def write(
        self,
        keys: Sequence[bytes],
        generation: int,
        slot: int,
        rows: Sequence[np.ndarray],
    ) -> list[Record]:
        """Writes a run from `slot` on, and says what the index shall know of it.

        Its blocks have the generations from `generation` on.
        """
        if not self._in_place(rows[0]):
            buffer = self._bounce.buffer()
            size = len(rows[0])
            buffer[:size] = rows[0]
            self._slots.write(slot, [buffer])
            rows = [buffer[:size]]
        else:
            self._slots.write(slot, rows)
        records = []
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            sums = self._checksums.take(row, key, generation + i, slot + i)
            records.append(Record(slot + i, generation + i, sums))
        return records

    def read(
        self,
        keys: Sequence[bytes],
        records: Sequence[Record],
        start: int,
        rows: Sequence[np.ndarray],
    ) -> list[bool]:
        """Fills the rows of a run from byte `start` of its blocks.

        False for each block that is not what was put. The parts around the range are
        read whole. Where they are not the range itself, a row is only touched when
        they match their checksums.
        """
        count = len(rows[0])
        first, end = self._parts.around(start, count)
        begin, stop = self._parts.begin(first), self._parts.begin(end)
        exact = (begin, stop) == (start, start + count)
        found: Sequence[np.ndarray] = rows
        if exact and self._in_place(rows[0]):
            self._slots.read(records[0].slot, begin, rows)
        else:
            buffer = self._bounce.buffer()[: round_up(stop - begin, PAGE)]
            found = [buffer[: stop - begin]]
            read = [buffer] if self._slots.direct else found
            self._slots.read(records[0].slot, begin, read)
        good = []
        for key, (slot, generation, sums), data in zip(
            keys, records, found, strict=True
        ):
            good.append(self._checksums.hold(data, first, sums, key, generation, slot))
        if found is not rows and good[0]:
            rows[0][:] = found[0][start - begin : start - begin + count]
        return good

    def matches(self, key: bytes, record: Record, data: np.ndarray) -> bool:
        """Whether a whole block, read by somebody else, is what was put."""
        slot, generation, sums = record
        return self._checksums.hold(data, 0, sums, key, generation, slot)

    def sync(self) -> None:
        self._slots.sync()
