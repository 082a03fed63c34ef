"""What a cache tells others: which blocks it stored, and which it dropped.

A pool's books note each block that is published, evicted or forgotten. An `EventStream`
takes the notes, joins blocks that follow each other, numbers the batches without gaps,
and gives them to publishers: a function, a log that replays, a ZMQ socket
(`event_socket.py`). The words and fields are those of vLLM's KV events, so that routers
that follow vLLM's caches follow these, too; `event_wire.py` writes them as bytes.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from jax_kvblock.cache.event_source import EventReader, EventSource
from jax_kvblock.cache.event_types import (
    CPU,
    GPU,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)

__all__ = [
    "CPU",
    "GPU",
    "STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CallbackPublisher",
    "Event",
    "EventBatch",
    "EventLog",
    "EventPublisher",
    "EventSource",
    "EventStream",
]


class EventPublisher(Protocol):
    """Takes batches in their order. It must not wait for whoever reads them."""

    def publish(self, batch: EventBatch) -> None: ...

    def close(self) -> None: ...


class CallbackPublisher:
    """Calls a function with each batch, in the thread that flushes.

    Args:
      function: takes an `EventBatch`. What it raises comes out of
        `EventStream.flush`, after all other publishers had the batch.
    """

    def __init__(self, function: Callable[[EventBatch], object]) -> None:
        self._function = function

    def publish(self, batch: EventBatch) -> None:
        self._function(batch)

    def close(self) -> None:
        """Nothing is kept."""


class EventLog:
    """The last batches, for who comes late or missed some.

    Args:
      capacity: how many batches are kept; the oldest ones leave.

    Example:
      >>> log = EventLog(capacity=1000)
      >>> stream = EventStream([EventSource.of(cache)], [log])
      >>> missed = log.replay(last_seen + 1)
    """

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(
                f"EventLog: capacity must be at least 1 batch, got {capacity}"
            )
        self._batches: collections.deque[EventBatch] = collections.deque(
            maxlen=capacity
        )
        self._lock = threading.Lock()

    def publish(self, batch: EventBatch) -> None:
        with self._lock:
            self._batches.append(batch)

    def replay(self, start: int = 0) -> list[EventBatch]:
        """All batches that are kept with a sequence number of `start` or more.

        Those that have left are missing: then the first one's number is beyond
        `start`, and the reader has to begin anew, as after `AllBlocksCleared`.
        """
        with self._lock:
            newest_first = itertools.takewhile(
                lambda batch: batch.sequence >= start, reversed(self._batches)
            )
            return list(newest_first)[::-1]

    def close(self) -> None:
        """The log stays readable."""


class EventStream:
    """Takes what books noted, numbers it, and gives it to publishers.

    An engine calls `flush` once a step. It may do so in any thread: batches come out
    in the order of their numbers, and each event is in one batch. The first one begins
    with `AllBlocksCleared`: readers forget what an engine before this one had stored.

    Args:
      sources: the books of each place; see `EventSource`.
      publishers: who gets the batches; see `EventPublisher`. The stream closes them.
      rank: of several engines, which one this is.

    Raises:
      TypeError: for sources that are none.

    Example:
      >>> log = EventLog()
      >>> with EventStream([EventSource.of(cache)], [log]) as stream:
      ...     stream.flush()
    """

    def __init__(
        self,
        sources: Iterable[EventSource],
        publishers: Iterable[EventPublisher],
        *,
        rank: int | None = None,
    ) -> None:
        given = () if isinstance(sources, EventSource) else tuple(sources)
        wrong = [x for x in given if not isinstance(x, EventSource)]
        if isinstance(sources, EventSource) or wrong:
            raise TypeError(
                "EventStream: sources must be several EventSources, got "
                f"{wrong[0] if wrong else sources!r}; pass [EventSource.of(cache)]"
            )
        self._readers = [EventReader(source) for source in given]
        self._publishers = tuple(publishers)
        self._rank = rank
        self._sequence = itertools.count()
        self._lock = threading.Lock()
        self._begins, self._closed = True, False

    def flush(self) -> EventBatch | None:
        """Publishes what happened since the last call; None if nothing did.

        Raises:
          ExceptionGroup: publishers raised these errors. All others had the batch.
          RuntimeError: the stream is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("EventStream.flush: the stream is closed")
            return self._flush()

    def close(self) -> None:
        """Publishes what is left, and closes the publishers. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._flush()
            finally:
                for publisher in self._publishers:
                    publisher.close()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _flush(self) -> EventBatch | None:
        events: list[Event] = [AllBlocksCleared()] if self._begins else []
        self._begins = False
        for reader in self._readers:
            events += reader.read()
        if not events:
            return None
        batch = EventBatch(next(self._sequence), time.time(), tuple(events), self._rank)
        errors: list[Exception] = []
        for publisher in self._publishers:
            try:
                publisher.publish(batch)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup(
                f"EventStream.flush: publishers failed at batch {batch.sequence}",
                errors,
            )
        return batch
