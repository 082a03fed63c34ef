"""In which order a run of many processes takes the tests, and which process takes what.

pytest-xdist's `worksteal` gives each process a stretch of the list, and moves tests
from who has many left to who has none. Two things it does not know:

- What takes long (`early`) should not be left for the end. And each process that takes
  part in a collective over several GPUs makes its own communicators, while all others
  want the same GPUs. So a quarter of the processes begin with it, and share it alone.
- What is skipped takes no time, and stands in the list in long stretches: whole
  folders, where there is a GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest

ENOUGH = 50  # tests for each process: fewer stay as they are


# Last of all: after deselection, and after pytest has sorted by fixtures' parameters.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def deal(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """The same tests, so that each process' stretch has as many that will run."""
    if processes < 8 or len(items) < ENOUGH * processes:
        return list(items)
    early, skipped, others = [], [], []
    for item in items:
        if item.get_closest_marker("skip"):
            skipped.append(item)
        elif item.get_closest_marker("early"):
            early.append(item)
        else:
            others.append(item)
    first = cut(early, processes // 4) + [[]] * (processes - processes // 4)
    last = cut(skipped, processes)
    rest = iter(others)
    dealt: list[pytest.Item] = []
    for size, begin, end in zip(
        stretches(len(items), processes), first, last, strict=True
    ):
        middle = itertools.islice(rest, max(0, size - len(begin) - len(end)))
        dealt += [*begin, *middle, *end]
    return [*dealt, *rest]


def stretches(count: int, processes: int) -> Iterator[int]:
    """How many tests `worksteal` gives each process at first."""
    for left in range(processes, 0, -1):
        yield count // left
        count -= count // left


def cut(items: list[pytest.Item], parts: int) -> list[list[pytest.Item]]:
    """Neighbours stay together: they share what is compiled."""
    ends = [len(items) * part // parts for part in range(parts + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]
