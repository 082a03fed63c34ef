"""A run of many processes takes each test once, and what takes long first."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import dealing
import pytest
from xdist.scheduler import WorkStealingScheduling


class Item:
    """What stands for a test: its number, and its markers."""

    def __init__(self, number: int, *markers: str) -> None:
        self.number, self.markers = number, markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def a_run(count: int) -> list[Any]:
    """A tenth takes long and half is skipped, each in one stretch."""
    long = range(count * 3 // 10, count * 4 // 10)
    skipped = range(count // 2, count)
    markers = {n: ("early",) for n in long} | {n: ("skip",) for n in skipped}
    return [Item(n, *markers.get(n, ())) for n in range(count)]


class Process:
    """What stands for a process of xdist's, and counts the tests that it is sent."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given = 0

    def send_runtest_some(self, tests: list[int]) -> None:
        self.given += len(tests)


def given_by_xdist(count: int, processes: int) -> list[int]:
    """How many tests each process gets at first, by xdist itself."""
    config = SimpleNamespace(
        option=SimpleNamespace(debug=False), getvalue=lambda _: ["popen"] * processes
    )
    scheduler = WorkStealingScheduling(config)  # type: ignore[arg-type]
    nodes = [Process(i) for i in range(processes)]
    for node in nodes:
        scheduler.add_node(node)  # type: ignore[arg-type]
    for node in nodes:
        scheduler.add_node_collection(node, [str(i) for i in range(count)])  # type: ignore[arg-type]
    scheduler.schedule()
    return [node.given for node in nodes]


@pytest.mark.parametrize(
    "count, processes", [(4000, 60), (4001, 31), (400, 8), (4123, 17)]
)
def test_each_process_has_its_share_of_what_runs(count: int, processes: int) -> None:
    items = a_run(count)
    dealt = dealing.deal(items, processes)
    assert sorted(dealt, key=lambda item: item.number) == items
    sizes = given_by_xdist(count, processes)
    assert sizes == list(dealing.stretches(count, processes))
    begin = 0
    for process, size in enumerate(sizes):
        mine = dealt[begin : begin + size]
        early = [bool(item.get_closest_marker("early")) for item in mine]
        skipped = [bool(item.get_closest_marker("skip")) for item in mine]
        assert abs(sum(skipped) - count / 2 / processes) <= 1
        assert skipped == sorted(skipped)  # at the end
        assert early == sorted(early, reverse=True)  # at the beginning
        takes_part = process < processes // 4
        shares = count / 10 / (processes // 4)
        assert abs(sum(early) - (shares if takes_part else 0)) <= 1
        begin += size


def test_neighbours_stay_neighbours() -> None:
    """Tests of one module share what they compile."""
    dealt = dealing.deal(a_run(4000), 40)
    breaks = sum(b.number != a.number + 1 for a, b in itertools.pairwise(dealt))
    assert breaks <= 3 * 40


@pytest.mark.parametrize("processes", [1, 2, 7, 20])
def test_few_tests_and_few_processes_stay_in_order(processes: int) -> None:
    items = a_run(900)
    assert dealing.deal(items, processes) == items
