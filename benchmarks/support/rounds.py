"""Times of several calls that take turns, in random order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

K = TypeVar("K")
ROUNDS, ROUND = 9, 0.03  # how many, and about how many seconds of each call in one


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
    for key in keys:
        seconds(key, 1)
    counts = {
        key: 1 if quick else max(1, min(50, int(ROUND / seconds(key, 1))))
        for key in keys
    }
    found: dict[K, list[float]] = {key: [] for key in keys}
    order = random.Random(0)
    for _ in range(1 if quick else ROUNDS):
        for key in order.sample(keys, len(keys)):
            found[key].append(seconds(key, counts[key]))
    return {key: statistics.median(times) for key, times in found.items()}
