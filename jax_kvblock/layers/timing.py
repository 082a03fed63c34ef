"""Times of calls, each waited for by itself, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import numpy as np


class Times(TypedDict):
    """Of calls, in milliseconds."""

    avg_latency: float
    std: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def times_in_turns(
    calls: Sequence[Callable[[], Any]], num_trials: int, warmup: int
) -> list[Times]:
    """Times of each call, one call of each in turn, again and again.

    Args:
      calls: what is called; what comes back is waited for.
      num_trials: how often each is timed.
      warmup: calls of each before these, not timed.
    """
    times: list[list[float]] = [[] for _ in calls]
    for trial in range(-warmup, num_trials):
        for call, found in zip(calls, times, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(call())
            if trial >= 0:
                found.append(1e3 * (time.perf_counter() - started))
    return [_summed_up(found) for found in times]


def _summed_up(times: list[float]) -> Times:
    p50, p90, p99 = (float(p) for p in np.percentile(times, (50, 90, 99)))
    return Times(
        avg_latency=float(np.mean(times)),
        std=float(np.std(times)),
        min=min(times),
        p50=p50,
        p90=p90,
        p99=p99,
        max=max(times),
    )
