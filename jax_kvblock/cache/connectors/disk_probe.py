"""How fast a folder of the disk connector is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jax_kvblock.cache.connector import check_rate


class Readable(Protocol):
    """Attributes:
    bytes_read: how much was asked for since it was opened.
    """

    bytes_read: int

    def keys(self) -> list[bytes]: ...

    def get(
        self, keys: Sequence[bytes], rows: Sequence[np.ndarray], *, start: int
    ) -> Future[Any]: ...


class ReadingProbe:
    """Reads blocks of a part once, and takes the time.

    An eighth of `nbytes` is enough to tell. What is read for others is counted, not
    timed: one small block says how long a disk takes to answer, not how fast it is.

    Args:
      part: what is measured.
      size: of a block of it, in bytes.
      nbytes: how much is read at most.
    """

    def __init__(self, part: Readable, size: int, nbytes: int) -> None:
        self._part, self._size = part, size
        self._count, self._enough = max(1, nbytes // size), nbytes // 8
        self._due = self._enough
        self._ticket: Future[Any] | None = None
        self._began = 0.0
        self._ended: list[float] = []

    @property
    def due(self) -> bool:
        """Whether enough was read for others that its speed matters."""
        return self._ticket is None and self._part.bytes_read >= self._due

    @property
    def done(self) -> bool:
        return self._ticket is not None and self._ticket.done()

    def begin(self) -> bool:
        """Begins to read, where enough is there; whether it reads."""
        if self._ticket is not None:
            return True
        self._due = self._part.bytes_read + self._enough  # of the next try
        keys = self._part.keys()[: self._count]
        if not keys or len(keys) * self._size < self._enough:
            return False
        rows = np.empty((len(keys), self._size), np.uint8)
        ended: list[float] = []
        self._began, self._ended = time.perf_counter(), ended
        self._ticket = self._part.get(keys, list(rows), start=0)
        self._ticket.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return True

    def rate(self, where: str, least: float) -> float | None:
        """Bytes a second, when all is read; None where too much was gone by then.

        Raises:
          SlowConnectorError: when these are fewer than `least`.
          OSError: when it could not be read.
        """
        assert self._ticket is not None
        ticket, self._ticket = self._ticket, None
        self._due = self._part.bytes_read + self._enough
        nbytes = int(sum(ticket.result())) * self._size
        # Who waits may be told before callbacks are.
        ended = self._ended[0] if self._ended else time.perf_counter()
        if nbytes < max(1, self._enough):
            return None
        return check_rate(where, nbytes, ended - self._began, least)
