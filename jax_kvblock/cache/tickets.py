"""Tickets: what a transfer is known by while it is under way."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

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
    """Blocks on their way up. A block is found on the device when all of it is there.

    What has arrived is written into the pool by `poll` and `wait`, in the thread that
    calls them: an engine calls one of them between its steps. As many parts are on
    their way at a time as there are rooms that nobody has booked, or one.

    Attributes:
      num_blocks: how many are on the way.
      num_missing: when it is done, how many have not come, from the first one on that
        the store has lost, or whose checksum does not match. They are computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        parts: Sequence[Part],
        rooms: Rooms,
        publish: Callable[[], int],
        drop: Callable[[], None],
    ) -> None:
        self.num_blocks, self.num_missing = num_blocks, 0
        self._waiting = collections.deque(parts)
        self._stages: collections.deque[Stage] = collections.deque()
        self._publish, self._drop = publish, drop
        self._lock = threading.RLock()
        self._all_taken = not parts
        self._error: BaseException | None = None
        self._cancelled = False
        self._rooms = rooms
        self._fill()
        if not parts:
            self.num_missing = publish()

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
            while not self.done and self._stages[0].arrived:
                self._take(None)
            return self.done

    def wait(self, layer: int | None = None, timeout: float | None = None) -> None:
        """Waits until the blocks are in the pool.

        Args:
          layer: wait for layers up to this one alone. The programs that write them are
            dispatched then; those that read them come after.
          timeout: seconds, for each part that has to arrive.

        Raises:
          TimeoutError: when they have not arrived by then; wait again.
          RuntimeError: when it was cancelled.
          Exception: what the transfer failed with. No block is found then.
        """
        with self._lock:
            while not self.done:
                if layer is not None and self._layers_taken() > layer:
                    break
                self._fill()
                self._take(timeout)
            if self._error is not None:
                raise self._error
            if self._cancelled:
                raise RuntimeError("Onboard.wait: it was cancelled")

    def cancel(self) -> None:
        """Gives the blocks back. What is under way ends, and is thrown away."""
        with self._lock:
            if self.done:
                return
            self._cancelled = True
            for stage in self._stages:
                stage.arriving.cancel()
            self._drop()
            self._end()

    def _fill(self) -> None:
        """Has parts begin: as many as there is room for, and one in any case."""
        while self._waiting:
            booking = self._rooms.book()
            if booking is None and self._stages:
                return
            stages = self._waiting.popleft().start()
            stages[-1].booking = booking
            self._stages += stages

    def _layers_taken(self) -> int:
        """How many layers are whole: those whose last stage was taken."""
        layers = [stage.layer for stage in self._stages]
        layers += [part.layer for part in self._waiting]
        return min(layers, default=2**31)

    def _take(self, timeout: float | None) -> None:
        stage = self._stages[0]
        try:
            arrival = stage.arriving.result(timeout)
            arrival.copy.wait()
            read = stage.take(arrival.room)
            self._stages.popleft()
            if stage.end is not None:
                stage.end(arrival.room, read)
                stage.booking = None
                self._fill()
        except TimeoutError:
            if not stage.arriving.done():
                raise
            self._fail(stage.arriving.exception())
        except BaseException as error:
            self._fail(error)
        else:
            if not self._stages:
                self._all_taken = True
                self.num_missing = self._publish()
                self._end()

    def _fail(self, error: BaseException | None) -> None:
        self._error = error or RuntimeError("Onboard: a transfer failed")
        self._drop()
        self._end()

    def _end(self) -> None:
        """Lets go of what the ticket has held, blocks below the device, too."""
        self._stages.clear()
        self._waiting.clear()
        self._publish, self._drop = lambda: 0, lambda: None
