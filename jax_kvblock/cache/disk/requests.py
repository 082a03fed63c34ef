"""Requests in flight: what `close` waits for, and work shared out among threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any


class InFlight:
    """Counts requests that have begun; each ends by the result of its ticket."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def begin(self) -> None:
        with self._changed:
            self._count += 1

    def end(self, ticket: Future[Any], result: Any) -> None:
        """The ticket has its result, or fails where that is an exception."""
        if isinstance(result, BaseException):
            ticket.set_exception(result)
        else:
            ticket.set_result(result)
        self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A request without a ticket, which ends with the context."""
        self.begin()
        try:
            yield
        finally:
            self._ended()

    def wait(self) -> None:
        """Until there are none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)


def share_out(
    threads: Executor,
    num_threads: int,
    count: int,
    work: Callable[[int], None],
    done: Callable[[BaseException | None], None],
) -> None:
    """Has `work(i)` done for each i below `count`, by several threads.

    `done` is called once, by the last thread, with the first error if there was one;
    after an error nothing more is begun.
    """
    left = iter(range(count))
    errors: list[BaseException] = []
    lock = threading.Lock()
    running = min(num_threads, count)

    def run() -> None:
        nonlocal running
        try:
            for i in left:
                work(i)
                if errors:
                    break
        except BaseException as error:
            errors.append(error)
        with lock:
            running -= 1
            last = not running
        if last:
            done(errors[0] if errors else None)

    for _ in range(running):
        threads.submit(run)
