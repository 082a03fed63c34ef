"""What each folder of tests may cost, so that CI does not grow unseen.

Seconds of a processor, those of children and threads included, for what CI takes on the
oldest jax (`.ci/run`: one case of each test): what else a machine does counts little.
Every run prints what its folders took; with --budgets, as in CI, it fails where one
took much more. Who adds tests looks here first, and takes from a folder what another
one needs: CI is to take 25 minutes.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
BUDGETS = {
    "append": 45,
    "attention": 400,
    "blocks": 50,
    "builds": 340,
    "cache": 130,
    "fp8": 60,
    "fusion": 60,
    "graphs": 20,
    "hardware": 15,
    "kernels": 20,
    "layers": 40,
    "native": 190,
    "objects": 40,
    "paged": 100,
    "parallel": 420,
    "precision": 55,
    "project": 650,
    "serve": 210,
    "sparse": 220,
    "training": 180,
}
LEEWAY = 1.5  # machines differ from day to day

_built = 0.0


@contextlib.contextmanager
def building() -> Iterator[None]:
    """What one process builds for all is charged to "builds", not to a test."""
    global _built
    before = processor_seconds()
    try:
        yield
    finally:
        _built += processor_seconds() - before


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "fail where a folder of tests takes much more than its budget"
    parser.getgroup("budgets").addoption(
        "--budgets", action="store_true", help=help_text
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Clock(), "kvblock-clock")
    # With several processes, the one that hands out the tests has all the reports.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budgets(config), "kvblock-budgets")


class Clock:
    """Notes in each report what its part of a test took, in whichever process."""

    def __init__(self) -> None:
        self.last, self.built = processor_seconds(), _built

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        now = processor_seconds()
        report.built_seconds = _built - self.built
        report.processor_seconds = now - self.last - report.built_seconds
        self.last, self.built = now, _built
        return report


def processor_seconds() -> float:
    times = os.times()
    return sum(times[:4])  # of this process and of children, of the user and the system


class Budgets:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test whose process died has a report of xdist's, without times.
        taken = getattr(report, "processor_seconds", 0.0)
        self.seconds[folder_of(report.nodeid)] += taken
        if built := getattr(report, "built_seconds", 0.0):
            self.seconds["builds"] += built

    def over(self) -> list[str]:
        return [
            folder
            for folder, seconds in self.seconds.items()
            if seconds > LEEWAY * BUDGETS.get(folder, 0)
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed = session.exitstatus == pytest.ExitCode.OK
        if passed and self.config.getoption("--budgets") and self.over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        spent = ", ".join(
            f"{folder} {seconds:.0f} of {BUDGETS.get(folder, 0)}"
            for folder, seconds in sorted(self.seconds.items())
        )
        terminalreporter.write_line(f"seconds of a processor, by folder: {spent}")
        if self.config.getoption("--budgets") and self.over():
            terminalreporter.write_line(
                f"OVER BUDGET: {', '.join(self.over())}; make these tests cheaper, or "
                "change tests/support/budgets.py and what it takes the time from"
            )


def folder_of(nodeid: str) -> str:
    """The folder of a test, "." for a file beside the folders."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."
