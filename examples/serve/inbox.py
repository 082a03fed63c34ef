"""What other threads ask of an engine, until it looks."""

import threading
from collections.abc import Callable

from serve.interface import QueueFullError
from serve.sequences import Sequence


class Inbox:
    """Requests that came, and those that nobody wants any more.

    Args:
        most: requests that may wait, those among them that the engine has taken.
        num_waiting: how many these are.
    """

    def __init__(self, most: int, num_waiting: Callable[[], int]) -> None:
        self._most, self._num_waiting = most, num_waiting
        self._changed = threading.Condition()
        self._came: list[Sequence] = []
        self._gone: list[Sequence] = []
        self.closed = False

    def __len__(self) -> int:
        return len(self._came)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not (self._came or self._gone)

    def check(self) -> None:
        """Whether a request may come.

        Raises:
            QueueFullError: if as many wait as may.
            RuntimeError: if it is closed.
        """
        if self.closed:
            raise RuntimeError("submit: the engine has stopped")
        if len(self._came) + self._num_waiting() >= self._most:
            raise QueueFullError(
                f"submit: {self._most} requests wait already; try again later"
            )

    def add(self, sequence: Sequence) -> None:
        """A request comes.

        Raises:
            QueueFullError, RuntimeError: as `check`.
        """
        with self._changed:
            self.check()
            self._came.append(sequence)
            self._changed.notify_all()

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants a request any more."""
        with self._changed:
            if sequence in self._came:  # its place is another one's at once
                self._came.remove(sequence)
            self._gone.append(sequence)
            self._changed.notify_all()

    def take(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that came, in order, and those that nobody wants."""
        with self._changed:
            taken = self._came, self._gone
            self._came, self._gone = [], []
            return taken

    def wait(self, seconds: float | None) -> None:
        """Until there is something to take, or so long."""
        with self._changed:
            if self.empty and not self.closed:
                self._changed.wait(seconds)

    def close(self) -> bool:
        """Refuse what comes from now on; whether it was open."""
        with self._changed:
            was_open, self.closed = not self.closed, True
            self._changed.notify_all()
            return was_open
