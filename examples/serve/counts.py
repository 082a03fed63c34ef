"""What an engine counts."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jax_kvblock import BlockManager
from serve.interface import FREE, HELD, IDLE, SHARED

WINDOW = 10.0  # seconds, of the tokens a second


@dataclass
class Counts:
    """Since the engine was made; see `Stats`."""

    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_tokens: int = 0
    seconds_to_first: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def read(self, now: float, num_tokens: int) -> None:
        """Note that a step has brought so many new tokens."""
        self.new_tokens += num_tokens
        self.recent.append((now, num_tokens))
        while self.recent[0][0] < now - WINDOW:
            self.recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, in the last seconds."""
        now = time.monotonic()
        recent = [(at, n) for at, n in tuple(self.recent) if at >= now - WINDOW]
        if len(recent) < 2:
            return 0.0
        return sum(n for _, n in recent[1:]) / (now - recent[0][0])

    @property
    def mean_time_to_first_token(self) -> float:
        """Seconds; nan before the first."""
        if not self.first_tokens:
            return float("nan")
        return self.seconds_to_first / self.first_tokens


def pool_map(manager: BlockManager) -> np.ndarray:
    """uint8[num_blocks]: what each block is doing."""
    books = manager._memory.free_list

    def state(block: int) -> int:
        held = books.references(block)
        if held:
            return SHARED if held > 1 else HELD
        return IDLE if books.is_published(block) else FREE

    return np.array([state(block) for block in range(manager.num_blocks)], np.uint8)
