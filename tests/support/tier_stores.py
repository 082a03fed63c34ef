"""A store below host memory that tests watch, slow down and break."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np


class MemoryStore:
    """Keeps blocks in a dict, on a thread of its own.

    Attributes:
      gate: what is put and read waits for it.
      broken: what putting and reading raise, if anything.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.broken: Exception | None = None
        self._thread = ThreadPoolExecutor(1)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[None]:
        return self._thread.submit(self._put, list(keys), rows)

    def _put(self, keys: list[bytes], rows: np.ndarray) -> None:
        assert self.gate.wait(30)
        if self.broken is not None:
            raise self.broken
        for key, row in zip(keys, rows, strict=True):
            self.blocks[key] = row.tobytes()

    def get(self, keys: Sequence[bytes], out: np.ndarray) -> Future[list[bool]]:
        return self._thread.submit(self._get, list(keys), out)

    def _get(self, keys: list[bytes], out: np.ndarray) -> list[bool]:
        assert self.gate.wait(30)
        if self.broken is not None:
            raise self.broken
        found = [key in self.blocks for key in keys]
        for row, key in zip(out, keys, strict=True):
            if key in self.blocks:
                row[:] = np.frombuffer(self.blocks[key], np.uint8)
        return found
