"""The books of a disk tier: which block is in which slot, which slots are free.

Nothing here does I/O or locks; who calls it holds the tier's lock.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from jax_kvblock.cache.disk.index import Record


class Entry:
    """A block in a slot. It is read by `readers`; `gone` when no key leads to it.

    put: the number of the put that stored it; 0 for one that was there at the start.
    """

    __slots__ = ("gone", "key", "put", "readers", "record")

    def __init__(self, key: bytes, record: Record, put: int = 0) -> None:
        self.key, self.record, self.put = key, record, put
        self.readers, self.gone = 0, False


class Books:
    """Each slot is free, being written, a block's, or a gone block's in its last use.

    uses: for each slot when it was last used, kept in a file.
    """

    def __init__(self, uses: np.ndarray) -> None:
        self._uses = uses
        self._clock = 0
        # The least recent use comes first.
        self._entries: collections.OrderedDict[bytes, Entry] = collections.OrderedDict()
        self._claimed: set[bytes] = set()
        self.free: list[int] = []

    def load(self, records: Iterable[tuple[bytes, Record | None]]) -> list[bytes]:
        """Takes over an index; the keys whose records are wrong."""
        num_slots, taken, wrong = len(self._uses), {}, []
        for key, record in records:
            if record is None or record.slot >= num_slots or record.slot in taken:
                wrong.append(key)
            else:
                taken[record.slot] = Entry(key, record)
        order = sorted(taken, key=lambda slot: self._uses[slot])
        self._entries.update((taken[slot].key, taken[slot]) for slot in order)
        self._uses[order] = np.arange(1, len(order) + 1)
        self._clock = len(order)
        self.free = [s for s in reversed(range(num_slots)) if s not in taken]
        return wrong

    def close(self) -> None:
        """Lets the file of the uses go."""
        self._uses = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> list[bytes]:
        """The least recently used first."""
        return list(self._entries)

    def claim(self, keys: Sequence[bytes]) -> list[int]:
        """Which keys are new, the caller's to write; what is there has been used."""
        self.use(keys)
        new = []
        for i, key in enumerate(keys):
            if key not in self._entries and key not in self._claimed:
                self._claimed.add(key)
                new.append(i)
        return new

    def unclaim(self, keys: Iterable[bytes]) -> None:
        self._claimed.difference_update(keys)

    def take(self, count: int) -> list[int]:
        """Up to `count` free slots, in their order in the file."""
        start = max(0, len(self.free) - count)
        taken = sorted(self.free[start:])
        del self.free[start:]
        return taken

    def publish(self, blocks: Sequence[tuple[bytes, Record]], put: int) -> None:
        """What was claimed and written can be found."""
        self.unclaim(key for key, _ in blocks)
        entries = [Entry(key, record, put) for key, record in blocks]
        self._entries.update((entry.key, entry) for entry in entries)
        self._use(entries)

    def use(self, keys: Sequence[bytes]) -> None:
        """What is there of them was used by one call."""
        self._use([entry for key in keys if (entry := self._entries.get(key))])

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The blocks of keys, to be read: they stay where they are until released."""
        found = [self._entries.get(key) for key in keys]
        held = [entry for entry in found if entry]
        for entry in held:
            entry.readers += 1
        self._use(held)
        return found

    def release(self, entry: Entry) -> None:
        entry.readers -= 1
        if entry.gone and not entry.readers:
            self.free.append(entry.record.slot)

    def drop(self, entry: Entry) -> bool:
        """No key leads to the block any more. False if that was so before."""
        if self._entries.get(entry.key) is not entry:
            return False
        del self._entries[entry.key]
        return True

    def drop_keys(self, keys: Iterable[bytes]) -> list[Entry]:
        return [entry for key in keys if (entry := self._entries.pop(key, None))]

    def all_slots_are(self, put: int, stored: int) -> bool:
        """Whether every slot has a block of one put, which has stored so many."""
        if stored < len(self._uses):
            return False
        blocks = self._entries.values()
        return sum(entry.put == put for entry in blocks) == len(self._uses)

    def drop_oldest(self, count: int, but: int | None) -> list[Entry]:
        """The least recently used blocks that nobody reads, but for those of one put,
        dropped."""
        found: list[Entry] = []
        for entry in self._entries.values():
            if len(found) >= count:
                break
            if not entry.readers and entry.put != but:
                found.append(entry)
        for entry in found:
            del self._entries[entry.key]
        return found

    def restore(self, entries: Sequence[Entry]) -> list[Entry]:
        """What `drop_oldest` gave is there after all, but for what has come anew."""
        late = []
        for entry in reversed(entries):
            if entry.key in self._claimed or entry.key in self._entries:
                late.append(entry)
            else:
                self._entries[entry.key] = entry
                self._entries.move_to_end(entry.key, last=False)
        return late

    def forget(self, entry: Entry) -> None:
        """A dropped block is out of the index; its slot is free once none reads it."""
        entry.gone = True
        if not entry.readers:
            self.free.append(entry.record.slot)

    def _use(self, entries: Sequence[Entry]) -> None:
        """Used just now, the last one the longest ago: it needs those before it."""
        for entry in reversed(entries):
            self._entries.move_to_end(entry.key)
        slots = [entry.record.slot for entry in entries]
        end = self._clock + len(entries)
        self._uses[slots] = np.arange(end, self._clock, -1)
        self._clock = end
