"""What a disk tier counts."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass
class Counts:
    """Blocks, since the tier was opened.

    stored blocks are published; duplicates were there, or being written, when they were
    put; refused ones had no room beside the others of their own put; failed ones were
    not stored, by an error that their ticket has. A block that does not match its
    checksums, or whose index record does not, is corrupt: a miss, too, where it was
    asked for.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    duplicates: int = 0
    refused: int = 0
    failed: int = 0
    evicted: int = 0
    removed: int = 0


@dataclasses.dataclass(kw_only=True)
class DiskStats(Counts):
    """Of one moment: the blocks that are there, the slots that there are for them.

    direct, io: whether the file is read and written around the page cache: "O_DIRECT",
    or "buffered" and why.
    to_device: what reads straight into GPU memory: "kvikio", or why nothing does.
    """

    num_blocks: int
    num_slots: int
    direct: bool
    io: str
    to_device: str


class Counters:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def add(self, **counts: int) -> None:
        """By the names of `Counts`."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)

    def read(self) -> Counts:
        with self._lock:
            return dataclasses.replace(self._counts)
