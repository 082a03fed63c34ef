"""Tickets: what a transfer is known by while it is under way."""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import jax
import numpy as np

from jax_kvblock.cache.below import Arrival
from jax_kvblock.cache.rooms import Booking, Rooms


class Offload:
    """Blocks on their way down. They are found there when their copy has ended.

    Attributes:
      keys: of the blocks that are copied, 32 bytes each.
      num_skipped: how many had no room below, where all slots were in use.
    """

    def __init__(
        self, keys: Sequence[bytes], futures: Sequence[Future[None]], num_skipped: int
    ) -> None:
        self.keys = tuple(keys)
        self.num_skipped = num_skipped
        self._futures = tuple(futures)

    @property
    def done(self) -> bool:
        """Whether all copies have ended, right or wrong."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the blocks are below; timeout: seconds, for each part.

        Raises:
          TimeoutError: when they are not by then.
          Exception: what a copy failed with; its blocks are not below.
        """
        for future in self._futures:
            future.result(timeout)


@dataclass
class Stage:
    """One step of what arrives: where its bytes come from, and what takes them in.

    Attributes:
      arriving: a copy into a room, once it has begun.
      take: dispatches the program that writes what has come into the pool; returns an
        output of it.
      layer: the last layer that is whole with it.
      end: of a part's last stage: called with the room and that output.
      booking: of a part's last stage: what the part has of the rooms, until it ends.
    """

    arriving: Future[Arrival]
    take: Callable[[jax.Array], jax.Array]
    layer: int
    end: Callable[[jax.Array, jax.Array], None] | None
    booking: Booking | None = None

    @property
    def arrived(self) -> bool:
        """Whether `take` need not wait, for it has come or has failed."""
        if not self.arriving.done():
            return False
        failed = self.arriving.cancelled() or self.arriving.exception() is not None
        return failed or self.arriving.result().copy.done


@dataclass
class Part:
    """What passes through one room: stages, once `start` was called.

    Attributes:
      layer: of its first stage.
    """

    layer: int
    start: Callable[[], list[Stage]]


class Onboard:
    """Blocks on their way up. A block is found on the device when all of it is there:
    as soon as the program that writes its part is dispatched, or, layer by layer, when
    all layers have come.

    What has arrived is written into the pool by `poll` and `wait`, in the thread that
    calls them: an engine calls one of them between its steps. As many parts are on
    their way at a time as there are rooms that nobody has booked.

    Attributes:
      ids: the blocks of the pool into which they come, int32, in order: those behind
        the table's own, for programs of one layer that call `wait(layer)`. They are the
        ticket's until it is done; `table.match()` says what the table has then.
      num_blocks: how many are on the way.
      num_missing: when it is done, how many have not come, from the first one on that
        the store has lost, or whose checksum does not match. They are computed again.
    """

    def __init__(
        self,
        ids: np.ndarray,
        parts: Sequence[Part],
        rooms: Rooms,
        finish: Callable[[], int],
        drop: Callable[[], None],
    ) -> None:
        self.ids = ids
        self.num_blocks, self.num_missing = len(ids), 0
        self._waiting = collections.deque(parts)
        self._stages: collections.deque[Stage] = collections.deque()
        self._finish, self._drop = finish, drop
        self._lock = threading.RLock()
        self._all_taken = not parts
        self._error: BaseException | None = None
        self._cancelled = False
        self._rooms = rooms
        if parts:
            self._fill()
        else:
            self.num_missing = finish()

    @property
    def done(self) -> bool:
        """Whether it has ended: all is in the pool, or it failed or was cancelled."""
        with self._lock:
            return self._all_taken or self._dropped

    @property
    def exception(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def _dropped(self) -> bool:
        return self._error is not None or self._cancelled

    def poll(self) -> bool:
        """Writes into the pool what has arrived; returns `done`."""
        with self._lock:
            self._fill()
            while not self.done and self._stages and self._stages[0].arrived:
                self._take()
            return self.done

    def wait(self, layer: int | None = None, timeout: float | None = None) -> None:
        """Waits until the blocks are in the pool.

        Args:
          layer: wait for layers up to this one alone, where they come `by_layer`; else
            for all. The programs that write them are dispatched then; those that read
            them come after, and take the blocks from `ids`.
          timeout: seconds, for each part that has to arrive.

        Raises:
          TimeoutError: when one has not arrived by then; wait again.
          RuntimeError: when it was cancelled.
          Exception: what the transfer failed with. Blocks that had come are found.
        """
        with self._lock:
            while not self.done:
                if layer is not None and self._layers_taken() > layer:
                    break
                self._fill(waits=True)
                if not self.done:
                    self._await(timeout)
                    self._take()
            if self._error is not None:
                raise self._error
            if self._cancelled:
                raise RuntimeError("Onboard.wait: it was cancelled")

    def cancel(self) -> None:
        """Gives the blocks back. Copies under way are waited for, and thrown away; what
        had come is found."""
        with self._lock:
            if self.done:
                return
            self._cancelled = True
            self._drop()
            self._end()

    def _fill(self, *, waits: bool = False) -> None:
        """Has parts begin, as many as there are rooms for.

        waits: somebody waits for this ticket, and others need not be polled meanwhile;
          one part begins in any case.
        """
        try:
            while self._waiting:
                none = not self._stages
                booking = self._rooms.book(spare=none)
                if booking is None and not (none and waits):
                    return
                stages = self._waiting[0].start()
                stages[-1].booking = booking
                self._waiting.popleft()
                self._stages += stages
        except BaseException as error:
            self._fail(error)

    def _layers_taken(self) -> int:
        """How many layers are whole: those whose last stage was taken."""
        layers = [stage.layer for stage in self._stages]
        layers += [part.layer for part in self._waiting]
        return min(layers, default=2**31)

    def _await(self, timeout: float | None) -> None:
        """Waits until the next stage has arrived, or has failed."""
        stage, end = self._stages[0], time.monotonic() + (timeout or 0.0)
        late = bool(wait([stage.arriving], timeout).not_done)
        while timeout is not None and not late and not stage.arrived:
            time.sleep(0.0005)  # a copy is under way
            late = time.monotonic() > end
        if late:
            raise TimeoutError(f"Onboard.wait: nothing came within {timeout} seconds")

    def _take(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._fail(error)
            return
        self._fill()
        if not self._stages and not self._waiting and not self._dropped:
            try:
                self.num_missing = self._finish()
            except BaseException as error:
                self._fail(error)
                return
            self._all_taken = True
            self._end()

    def _write(self) -> None:
        """The next stage goes into the pool."""
        stage = self._stages[0]
        arrival = stage.arriving.result()
        arrival.copy.wait()
        read = stage.take(arrival.room)
        self._stages.popleft()
        if stage.end is not None:
            stage.end(arrival.room, read)

    def _fail(self, error: BaseException) -> None:
        # Or its traceback would keep rooms and bookings.
        traceback.clear_frames(error.__traceback__)
        self._error = error
        self._drop()
        self._end()
        if not isinstance(error, Exception):
            raise error

    def _end(self) -> None:
        """Lets go of what the ticket has held, blocks below the device, too."""
        for stage in self._stages:
            stage.arriving.cancel()
            stage.booking = None
        self._stages.clear()
        self._waiting.clear()
        self._finish, self._drop = lambda: 0, lambda: None
