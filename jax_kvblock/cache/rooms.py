"""`Rooms`: arrays on the device that blocks pass through on their way up."""

from __future__ import annotations

import collections
from collections.abc import Callable

import jax


class Rooms:
    """Arrays of one size, which copies write and programs read, one after the other.

    An array that XLA has just made may have been another one's memory, which programs
    that were dispatched before still use: a copy into it waits for all of these. So
    rooms are made ahead, kept, and used again as soon as the one program that reads
    them has ended.

    Here is no lock, and single operations of a deque alone: bookings come back in
    finalizers, which may run anywhere.

    Args:
      make: makes one.
      count: how many may be booked at a time.
      spare: how many more, by those who have none yet and find none.
    """

    def __init__(
        self, make: Callable[[], jax.Array], count: int, spare: int = 0
    ) -> None:
        self._make, self._count = make, count + spare
        self._places = collections.deque(range(count))
        self._spare = collections.deque(range(spare))
        # Each with an output of the program that reads it, the oldest first.
        self._free: collections.deque[tuple[jax.Array, jax.Array | None]]
        self._free = collections.deque((make(), None) for _ in range(self._count))

    def book(self, *, spare: bool = False) -> Booking | None:
        """A place for one more, until it is dropped; None where all are booked.

        spare: one of the spare ones would do.
        """
        for places in (self._places, self._spare) if spare else (self._places,):
            try:
                return Booking(places, places.pop())
            except IndexError:
                continue
        return None

    def take(self) -> jax.Array:
        """One that nobody uses; it may wait for a program that was dispatched.

        Who has booked finds one that was made ahead.
        """
        try:
            room, read = self._free.popleft()
        except IndexError:
            return self._make()
        if read is not None:
            try:
                read.block_until_ready()
            except Exception:  # the pool's next user is told; this memory is let go
                return self._make()
        return room

    def give_back(self, room: jax.Array, read: jax.Array | None = None) -> None:
        """Has a room used again.

        Args:
          room: as taken; no copy into it is under way.
          read: an output of the last program that reads it, None when there is none.
        """
        if len(self._free) < self._count:
            self._free.append((room, read))

    def close(self) -> None:
        """Lets go of those that nobody has taken, and keeps none from now on."""
        self._count = 0
        self._free.clear()


class Booking:
    """One of so many rooms is somebody's."""

    def __init__(self, places: collections.deque[int], place: int) -> None:
        self._places, self._place = places, place

    def __del__(self) -> None:
        self._places.append(self._place)
