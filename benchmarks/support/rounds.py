"""Times of several calls that take turns, in random order."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from support.common import Results

K = TypeVar("K")
TRIED = 5  # calls by which it is known how many are in a round


@dataclasses.dataclass(frozen=True)
class Turns:
    """In a turn one is called in rounds, of which the first ones do not count.

    In a round it is called back to back for about so many seconds, and the host waits
    once. A round has at least so many calls.
    """

    turns: int
    rounds: int
    seconds: float
    warm_up: int = 0
    least: int = 1

    def calls(self, seconds: float) -> int:
        """How many calls, of so many seconds each, are a round."""
        return max(self.least, min(2000, int(self.seconds / seconds)))


BRIEF = Turns(turns=9, rounds=1, seconds=0.03)
# Attention takes a GPU to its power limit within 0.1 s, and the clock goes down. What
# is timed shorter has the clock of whoever came before, and of how long that rested.
HOT = Turns(turns=3, rounds=2, seconds=0.2, warm_up=1)
ONCE = Turns(turns=1, rounds=1, seconds=0)


def median_seconds(
    calls: Mapping[K, Callable[[], Any]],
    quick: bool = False,
    how: Turns = BRIEF,
    wait: Callable[[K, Any], Any] = lambda key, made: jax.block_until_ready(made),
) -> dict[K, float]:
    """Seconds of each call, the median of all rounds that count."""
    how = ONCE if quick else how

    def seconds(key: K, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            made = calls[key]()
        wait(key, made)
        return (time.perf_counter() - begun) / count

    # The first calls of a program can take many times as long as the others. By one of
    # these a round would be of a call or two, and what the host adds to it would be
    # taken for theirs. Of what takes longer than a round anyhow, two say as much.
    def one(key: K) -> float:
        times = [seconds(key, 1)]
        while not quick and len(times) < TRIED and sum(times[1:]) < how.seconds:
            times.append(seconds(key, 1))
        return min(times)

    counts = {key: how.calls(one(key)) for key in calls}
    found: dict[K, list[float]] = {key: [] for key in calls}
    order = random.Random(0)
    for _ in range(how.turns):
        for key in order.sample(list(calls), len(calls)):
            times = [seconds(key, counts[key]) for _ in range(how.warm_up + how.rounds)]
            found[key] += times[how.warm_up :]
    return {key: statistics.median(times) for key, times in found.items()}


def median_of_each(
    running: Mapping[str, Callable[[], Any]],
    results: Results,
    case: str,
    quick: bool,
    how: Turns,
) -> dict[str, float]:
    """`median_seconds`; of those that do not run it is reported."""
    calls = {}
    for who, call in running.items():
        try:
            jax.block_until_ready(call())
        except Exception as error:
            results.fail(case, who, error)
            continue
        calls[who] = call
    return median_seconds(calls, quick, how)
