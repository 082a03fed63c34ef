"""Compiles, verifies and times the implementations of one piece of work, side by side.

How a time comes about. Each implementation is compiled ahead, called once to warm up,
and its whole result compared bit for bit. Then rounds: in each, every implementation in
turn is called k times back to back, and the host waits once at the end; a round's time
is divided by k, and the median of the rounds is the result. Taking turns lets a slow
second of the machine hit all of them. k makes a round long enough that starting and
waiting (some 30 µs) are a fraction of a percent. Every call is given the previous
call's result to write over (it is donated), so that no call waits for fresh memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import ceilings
import jax
import jax.numpy as jnp

from support import common, peers
from support.common import MIB, Results
from support.jobs import Group, Job


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds` rounds of at least `seconds` and `min_calls` each.

    One that is so slow that its rounds took `enough` seconds has only three.
    """

    rounds: int
    seconds: float
    min_calls: int
    enough: float

    def calls(self, seconds: float) -> int:
        """How many calls of about `seconds` make a round."""
        fit = int(self.seconds / max(seconds, 1e-6)) + 1
        return max(self.min_calls, min(200, fit))

    @classmethod
    def usual(cls, quick: bool) -> Effort:
        if quick:
            return cls(rounds=2, seconds=0.0, min_calls=1, enough=1.0)
        if common.on_gpu():
            return cls(rounds=5, seconds=0.12, min_calls=2, enough=0.6)
        return cls(rounds=11, seconds=0.0, min_calls=1, enough=0.35)


def measure(
    groups: Sequence[Group],
    results: Results,
    options: argparse.Namespace,
    effort: Effort | None = None,
) -> None:
    """Compiles all groups (in parallel: XLA takes seconds for some), then runs each."""
    effort = effort or Effort.usual(options.quick)
    for group in groups:
        peers.add(group, options, results)
    broken: dict[int, BaseException] = {}

    def compile_one(job: Job) -> None:
        try:
            job.compile()
        except Exception as error:
            broken[id(job)] = error

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, [job for group in groups for job in group.jobs]))
    for group in groups:
        alive = []
        for job in group.jobs:
            if id(job) in broken:
                results.fail(group.case, job.implementation, broken[id(job)])
            else:
                alive.append(job)
        _measure_group(group, alive, results, effort)
        for job in group.jobs:
            job.finish()


def _measure_group(
    group: Group, jobs: list[Job], results: Results, effort: Effort
) -> None:
    running: list[tuple[Job, int, list[float]]] = []
    for job in jobs:
        try:
            job.start()
            job.step()
            job.wait()
            _verify(job)
            running.append((job, effort.calls(_round(job, 1)), []))
        except Exception as error:
            results.fail(group.case, job.implementation, error)
            job.finish()
    for _ in range(effort.rounds):
        for job, calls, times in running:
            if len(times) < 3 or sum(times) * calls < effort.enough:
                times.append(_round(job, calls))
    if group.run:
        results.add(group.case, "layout", "run", group.run, "B", show=False)
    unit = group.unit or ceilings.device_unit()
    for job, _, times in running:
        name, seconds = job.implementation, statistics.median(times)
        rate = ceilings.in_unit(group.moved / seconds, unit)
        results.add(group.case, name, "bandwidth", rate, unit)
        if group.parts:
            time_each = seconds / group.parts * 1e6
            results.add(group.case, name, "time", time_each, f"us a {group.part}")
        if (extra := job.temporaries()) is not None:
            results.add(group.case, name, "temporaries", extra, "B", show=extra > MIB)


def _round(job: Job, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        job.step()
    job.wait()
    return (time.perf_counter() - start) / calls


# ---- right first ---------------------------------------------------------------------


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[a.dtype.itemsize]
    cast = jax.lax.bitcast_convert_type
    return jnp.array_equal(cast(a, bits), cast(b, bits))


def _verify(job: Job) -> None:
    got, want = jax.tree.leaves(job.result()), jax.tree.leaves(job.expected)
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} arrays came out, expected {len(want)}")
    flags = []
    for a, b in zip(got, want, strict=True):
        a = a if isinstance(a, jax.Array) else jnp.from_dlpack(a)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{a.dtype}{a.shape} came out, not {b.dtype}{b.shape}")
        # Compared on the device. (np.asarray of a pinned array would be cached inside
        # it as a view, and XLA would not let the next step write over it.)
        device = jax.sharding.SingleDeviceSharding(
            next(iter(a.devices())), memory_kind="device"
        )
        flags.append(_same_bits(*jax.device_put((a, b), device)))
    if not all(bool(flag) for flag in flags):
        raise AssertionError("the result is wrong: its bits are not the expected ones")
