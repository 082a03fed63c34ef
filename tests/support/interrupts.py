"""Interrupts at every place where CPython may let one in, and storms of signals."""

from __future__ import annotations

import collections
import dis
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

PACKAGE = "jax_kvblock."


def interrupt_everywhere(work: Callable[[], Any], check: Callable[[], Any]) -> int:
    """Runs `work` again and again, interrupted at one more place each time.

    `check` runs after each. Returns at how many places there was an interrupt.
    """
    for count in itertools.count(1):
        tracer = _Tracer(count)
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one in settrace
        try:
            sys.settrace(tracer)
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        check()
        if tracer.left > 0:
            return count - 1
    raise AssertionError


class _Tracer:
    """Raises KeyboardInterrupt at the n-th place in the package.

    CPython looks for signals where a function begins, where a loop jumps back and after
    each call, and nowhere else. In between, it promises to keep `with` whole.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self._last: dict[int, str] = {}  # by the frame's id, so as not to hold it

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._last[id(frame)] = "RESUME"
        if event == "opcode":
            last = self._last.get(id(frame), "")
            self._last[id(frame)] = _operation(frame.f_code, frame.f_lasti)
            if last.startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
        return self


def _operation(code: CodeType, offset: int) -> str:
    return dis.opname[code.co_code[offset]]


class Alarm:
    """An alarm whose handler raises KeyboardInterrupt, once each time it is set."""

    def __init__(self) -> None:
        self._armed = False
        self._draw = random.Random(0)

    def __enter__(self) -> Alarm:
        self._handler = signal.signal(signal.SIGALRM, self._ring)
        # A finalizer that is interrupted, of JAX or another library, says so here.
        self._hook, sys.unraisablehook = sys.unraisablehook, _Nothing.append
        return self

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._hook
        signal.signal(signal.SIGALRM, self._handler)

    def _ring(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def interrupts(self, work: Callable[[], Any], after: float) -> bool:
        """Whether `work` was interrupted, `after` seconds."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, after)
            work()
            self._armed = False
        except KeyboardInterrupt:
            return True
        return False

    def storm(
        self, work: Callable[[], Any], check: Callable[[], Any], seconds: float
    ) -> int:
        """Runs `work` all the time and interrupts it at random; returns how often."""
        end, count = time.monotonic() + seconds, 0

        def until_the_alarm() -> None:
            while self._armed and time.monotonic() < end:
                work()

        while time.monotonic() < end:
            count += self.interrupts(until_the_alarm, self._draw.uniform(1e-6, 1e-3))
            check()
        return count


_Nothing: collections.deque[Any] = collections.deque(maxlen=0)
