"""Counted references to a pool's blocks: who holds which, and what is free."""

from __future__ import annotations

import threading


class FreeList:
    """Which blocks are free, and how many references hold each of the others."""

    def __init__(self, num_blocks: int) -> None:
        self.lock = threading.RLock()  # a finalizer may run inside a locked region
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        with self.lock:
            if count > len(self._free):
                return None
            ids = [self._free.pop() for _ in range(count)]
            for i in ids:
                self._references[i] = 1
            return ids

    def retain(self, block_id: int) -> None:
        with self.lock:
            self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        with self.lock:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]


class Lease:
    """One counted reference to a block, given back when it is released or collected."""

    __slots__ = ("block_id", "free_list", "released")

    def __init__(self, free_list: FreeList, block_id: int) -> None:
        self.free_list = free_list
        self.block_id = block_id
        self.released = False

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.free_list.release(self.block_id)

    def __del__(self) -> None:
        self.release()


class ExportLease(Lease):
    """The reference that a DLPack export holds; listed among the live ones.

    Attributes:
      live: the manager's live exports, (block, layer or None) by the lease's id.
    """

    __slots__ = ("live",)

    def __init__(
        self,
        free_list: FreeList,
        key: tuple[int, int | None],
        live: dict[int, tuple[int, int | None]],
    ) -> None:
        free_list.retain(key[0])
        super().__init__(free_list, key[0])
        self.live = live
        live[id(self)] = key

    def release(self) -> None:
        super().release()
        self.live.pop(id(self), None)
