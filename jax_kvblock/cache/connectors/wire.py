"""`Wire`: what moves bytes between two processes, once both know what and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Side(Protocol):
    """One end of a wire between two processes.

    At any time one of them offers and the other fetches.

    Attributes:
      hello: what the other side has to know.
    """

    hello: bytes

    def meet(self, hello: bytes) -> None:
        """Takes in what the other side says of itself."""
        ...

    def offer(self, rows: np.ndarray) -> bytes:
        """Has rows fetched, uint8 `[n, bytes]`, dense; they stay as they are.

        Returns:
          What the other side needs to fetch them.
        """
        ...

    def taken(self) -> None:
        """What was offered has been fetched."""
        ...

    def withdraw(self) -> None:
        """What was offered, if anything, will not be fetched."""
        ...

    def fetch(
        self, description: bytes, rows: Sequence[np.ndarray], timeout: float
    ) -> None:
        """Fetches what the other side has offered into rows, uint8 `[bytes]` each.

        Raises:
          ConnectorError: when it fails, or takes longer than `timeout` seconds.
        """
        ...

    def close(self) -> None: ...


class Wire(Protocol):
    """A way to move bytes.

    Attributes:
      name: both processes have to use the same.
    """

    name: str

    def side(self, nbytes: int) -> Side:
        """An end for a new connection, which moves so many bytes at a time at most."""
        ...
