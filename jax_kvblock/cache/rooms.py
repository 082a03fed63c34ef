"""`Rooms`: arrays on the device that blocks pass through on their way up."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import jax


class Rooms:
    """Arrays of one size, which copies write and programs read, one after the other.

    An array that XLA has just made may have been another one's memory, which programs
    that were dispatched before still use: a copy into it waits for all of these. So
    rooms are made ahead, kept, and used again as soon as the one program that reads
    them has ended.

    Args:
      make: makes one.
      count: how many may be booked at a time.
      spare: how many more are made now and kept, for those who have not booked and need
        one. Who takes still more gets new ones, for once.
    """

    def __init__(
        self, make: Callable[[], jax.Array], count: int, spare: int = 0
    ) -> None:
        self._make, self._places, self._count = make, count, count + spare
        self._lock = threading.Lock()
        # Each with an output of the program that reads it, the oldest first.
        self._free: collections.deque[tuple[jax.Array, jax.Array | None]]
        self._free = collections.deque((make(), None) for _ in range(count + spare))

    def book(self) -> Booking | None:
        """A place for one more, until it is dropped; None where all are booked."""
        with self._lock:
            if not self._places:
                return None
            self._places -= 1
        return Booking(self)

    def take(self) -> jax.Array:
        """One that nobody uses; it may wait for a program that was dispatched."""
        room, read = self._next()
        if room is None:
            return self._make()
        if read is not None:
            try:
                read.block_until_ready()
            except Exception:  # the pool's next user is told; this memory is let go
                return self._make()
        return room

    def _next(self) -> tuple[jax.Array | None, jax.Array | None]:
        with self._lock:
            return self._free.popleft() if self._free else (None, None)

    def give_back(self, room: jax.Array, read: jax.Array | None = None) -> None:
        """Has a room used again.

        Args:
          room: as taken; no copy into it is under way.
          read: an output of the last program that reads it, None when there is none.
        """
        with self._lock:
            if len(self._free) < self._count:
                self._free.append((room, read))

    def close(self) -> None:
        """Lets go of those that nobody has taken, and keeps none from now on."""
        with self._lock:
            self._count = 0
            self._free.clear()


class Booking:
    """One of so many rooms is somebody's."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def __del__(self) -> None:
        with self._rooms._lock:
            self._rooms._places += 1
