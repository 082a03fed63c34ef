"""Processes with a cache in three tiers that are killed, and what the next one finds.

    python tier_kills.py <folder> <kills> <seed>

Forks come before JAX has a device, and so before its threads. A writer computes
sequences, sends them down and brings older ones up until SIGKILL ends it. Then another
process opens the folder: every block on disk is that of its key, byte for byte, and so
is what comes up from there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from small_tiers import Setup

from jax_kvblock.cache.disk import DiskTier

BYTES = 1 << 20  # of disk; a writer pushes out blocks after some rounds
LENGTHS = range(9, 58, 4)


def opened(folder: Path) -> tuple[Setup, DiskTier]:
    sample = Setup()
    sample.tiers.close()
    space, size = sample.cache.namespace.digest, sample.size
    tier = DiskTier(folder, namespace=space, block_bytes=size, max_bytes=BYTES)
    return Setup(num_blocks=40, host_blocks=20, store=tier), tier


def tokens(number: int) -> list[int]:
    """A sequence of this number; some begin alike."""
    length = LENGTHS[number % len(LENGTHS)]
    return [number // 3, *range(length // 2), number, *range(length // 2)]


def write(folder: Path, first: int, told: int) -> None:
    one, _ = opened(folder)
    rng = random.Random(first)
    for number in range(first, first + 10_000):
        with one.computed(tokens(number)) as table:
            one.tiers.offload(table)
        one.cache.clear()
        if number == first + 5:
            os.write(told, b"1")
        if number % 4 == 3:
            table, ticket = one.tiers.open(tokens(rng.randrange(first, number)))
            ticket.wait()
            table.match()
            one.holds(table)
            table.free()


def verify(folder: Path, first: int, told: int) -> None:
    one, tier = opened(folder)
    there = tier.keys()
    rows = np.zeros((len(there), one.size), np.uint8)
    assert tier.get(there, rows).result().all(), "a block is in the index, but a miss"
    for key, row in zip(there, rows, strict=True):
        assert row.tobytes() == np.ascontiguousarray(one.universal(key)).tobytes()
    came = 0
    for number in range(first, first + 40):
        table, ticket = one.tiers.open(tokens(number))
        ticket.wait()
        assert not ticket.num_missing
        came += table.match()
        one.holds(table)
        table.free()
        one.cache.clear()
    assert tier.stats().corrupt == 0, tier.stats()
    os.write(told, f"{len(there)} {came}".encode())
    one.tiers.close()
    tier.close()


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A process that does some work, and where one reads what it tells."""
    here, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(told)
        except BaseException as error:
            print("failed:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    os.close(told)
    return child, here


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    most = came = 0
    for first in range(0, kills * 1000, 1000):
        child, here = forked(lambda told, first=first: write(folder, first, told))
        assert os.read(here, 1) == b"1", "the writer came to nothing"
        time.sleep(rng.uniform(0, 0.25))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(here)
        child, here = forked(lambda told, first=first: verify(folder, first, told))
        found = os.read(here, 64).split()
        assert os.waitpid(child, 0)[1] == 0 and len(found) == 2
        os.close(here)
        most, came = max(most, int(found[0])), came + int(found[1])
    assert most > 100 and came > 100 * kills, (most, came)
    print(f"{kills} kills; up to {most} blocks on disk; {came} tokens came up")


if __name__ == "__main__":
    main()
