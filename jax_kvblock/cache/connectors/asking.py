"""`Questions`: which blocks a server has, asked for by callers who cannot wait long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

_KEPT_SECONDS = 30.0  # an answer that nobody waited for
_KEPT_KEYS = 1 << 16  # of such answers; the oldest go
_MOST_KEYS = 1 << 16  # of a message that nobody waits for to the end


class Questions:
    """A server's answers, by a thread of its own.

    Who asks while a message is under way shares the next one. Once an answer was late
    nobody with a deadline is waited for until one came in time: they are told what came
    late for others, or for them.

    Args:
      ask: sends keys, one behind the other, and gives a byte for each.
      seconds: what is late: an answer that takes longer.
    """

    def __init__(self, ask: Callable[[bytes], bytes], seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self._thread = ThreadPoolExecutor(1, "kvblock-peer-asks")
        self._lock = threading.Lock()
        self._wanted: dict[bytes, None] = {}  # by the next message
        self._next: Future[dict[bytes, bool]] | None = None  # its answer
        self._late = False
        self._kept: dict[bytes, tuple[bool, float]] = {}  # and until when; oldest first

    def has(self, keys: Sequence[bytes], timeout: float | None) -> list[bool | None]:
        """Of each key, what the server says; None where it has not said so in time.

        timeout: seconds; None waits for the answer.
        """
        with self._lock:
            try:
                asked = self._asked(keys, timeout)
            except RuntimeError:  # it was closed meanwhile
                return [False] * len(keys)
            if self._late and timeout is not None:
                timeout = 0.0
        if asked is not None:
            try:
                told = asked.result(timeout)
                return [told[key] for key in keys]
            except TimeoutError:
                pass
        now = time.monotonic()
        with self._lock:
            if asked is not None and asked.done():  # just now
                told = asked.result()
                return [told[key] for key in keys]
            self._late = True  # the answer itself says whether it stays so
            kept = [self._kept.get(key, (None, now)) for key in keys]
        return [there if until >= now else None for there, until in kept]

    def close(self) -> None:
        self._thread.shutdown()

    # ---- inside ----

    def _asked(
        self, keys: Sequence[bytes], timeout: float | None
    ) -> Future[dict[bytes, bool]] | None:
        """The answer of the next message, which asks for these keys, too, or is full.

        Raises:
          RuntimeError: when it is closed.
        """
        full = self._wanted and len(self._wanted) + len(keys) > _MOST_KEYS
        if full and timeout is not None:
            return None
        if self._next is None:
            self._thread.submit(self._ask_next)
            self._next = Future()
        self._wanted.update(dict.fromkeys(keys))
        return self._next

    def _ask_next(self) -> None:
        """In the thread: one message, for all who asked until now."""
        with self._lock:
            keys, answer = list(self._wanted), self._next
            self._wanted, self._next = {}, None
        assert answer is not None
        began = time.monotonic()
        try:
            said = map(bool, self._ask(b"".join(keys)))
            told = dict(zip(keys, said, strict=True))
        except BaseException as error:
            answer.set_exception(error)
            return
        now = time.monotonic()
        with self._lock:
            late = now - began > self._seconds
            if late or self._late:
                self._keep(told, now)
            self._late = late
            answer.set_result(told)

    def _keep(self, told: dict[bytes, bool], now: float) -> None:
        for key, there in told.items():
            self._kept.pop(key, None)
            self._kept[key] = there, now + _KEPT_SECONDS
        for key, (_, until) in list(self._kept.items()):
            if len(self._kept) <= _KEPT_KEYS and until >= now:
                break
            del self._kept[key]
