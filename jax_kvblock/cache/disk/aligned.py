"""Memory that direct I/O takes as it is: whole pages."""

from __future__ import annotations

import math
import mmap
import threading
from typing import Any

import numpy as np

from jax_kvblock.cache.disk.checksums import PAGE


def aligned_empty(*shape: int) -> np.ndarray:
    """uint8 zeros that begin on a page; NumPy's own arrays begin 16 bytes into one.

    aligned_empty(64, 1 << 20) has 64 rows of 1 MiB that a disk reads and writes
    without a copy.
    """
    size = math.prod(shape)
    if not size:
        return np.empty(shape, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(shape)


def address(row: np.ndarray) -> int:
    where: int = row.__array_interface__["data"][0]
    return where


def is_aligned(row: np.ndarray) -> bool:
    """Whether direct I/O may use a row's own memory."""
    return not (address(row) | row.nbytes) % PAGE


class Bounce:
    """A buffer for each thread that does I/O, for memory that is not aligned."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of_thread: Any = threading.local()

    def buffer(self) -> np.ndarray:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = aligned_empty(self._size)
        buffer: np.ndarray = self._of_thread.buffer
        return buffer
