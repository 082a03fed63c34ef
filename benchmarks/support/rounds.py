"""Times of several calls that take turns, in random order."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

K = TypeVar("K")
ROUNDS, ROUND = 9, 0.03  # how many, and about how many seconds of each call in one
TRIED = 5  # calls by which it is known how many are in a round


def median_seconds(
    calls: Mapping[K, Callable[[], Any]], quick: bool = False
) -> dict[K, float]:
    """Seconds of each call, the median of rounds.

    In a round each is called some times back to back, and the host waits once.
    """

    def seconds(key: K, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            made = calls[key]()
        jax.block_until_ready(made)
        return (time.perf_counter() - begun) / count

    keys = list(calls)
    counts = {key: _count(functools.partial(seconds, key, 1), quick) for key in keys}
    found: dict[K, list[float]] = {key: [] for key in keys}
    order = random.Random(0)
    for _ in range(1 if quick else ROUNDS):
        for key in order.sample(keys, len(keys)):
            found[key].append(seconds(key, counts[key]))
    return {key: statistics.median(times) for key, times in found.items()}


def _count(once: Callable[[], float], quick: bool) -> int:
    """How many calls, of so many seconds each, are a round.

    The first calls of a program can take many times as long as the others. By one of
    these a round would be of a call or two, and what the host adds to it would be taken
    for theirs.
    """
    least = min(once() for _ in range(1 if quick else TRIED))
    return 1 if quick else max(1, min(50, int(ROUND / least)))
