"""What `--cases` leaves of the suite, and what a test is charged for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import budgets
import pytest

SUPPORT = Path(budgets.__file__).parent
SUITE = """
import pytest

@pytest.mark.parametrize("y", range(5))
@pytest.mark.parametrize("x", range(5))
def test_grid(x, y): pass

@pytest.mark.wide
@pytest.mark.parametrize("x", range(9))
def test_sweep(x): pass

def test_alone(): pass

@pytest.mark.cases(7)
@pytest.mark.parametrize("x", range(9))
def test_things(x): pass

@pytest.mark.parametrize(
    "x", [*range(9), *(pytest.param(x, marks=pytest.mark.often) for x in (20, 30))]
)
def test_some_often(x): pass

def skipped(x): return pytest.param(x, marks=pytest.mark.skip)

@pytest.mark.parametrize("x", [4, *map(skipped, range(10, 30)), 5])
def test_some_skipped(x): pass

class TestBase:
    @pytest.mark.parametrize("x", range(2))
    def test_inherited(self, x): pass

class TestOther(TestBase): pass
"""

BUILDING = """
import budgets

def test_that_asks_first():
    with budgets.building():
        end = budgets.processor_seconds() + 1.2
        while budgets.processor_seconds() < end: pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "case_limit"]
    done = subprocess.run(
        [*command, "--collect-only", "-q", *options],
        cwd=folder,
        env={"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return re.findall("^test_suite.py::(.*)$", done.stdout, re.M) or [done.stderr]


def test_every_function_stays_with_so_many_cases(tmp_path: Path) -> None:
    whole = collected(tmp_path)
    assert len(whole) == 25 + 9 + 1 + 9 + 11 + 22 + 4
    kept = collected(tmp_path, "--cases=3")
    assert set(kept) < set(whole) and kept == collected(tmp_path, "--cases=3")
    counts = {
        name: sum(name in test for test in kept)
        for name in (
            *("test_grid", "test_sweep", "test_alone", "test_things"),
            *("TestBase", "TestOther"),
        )
    }
    assert counts == {
        "test_grid": 3,
        "test_sweep": 3,
        "test_alone": 1,
        "test_things": 7,
        "TestBase": 2,
        "TestOther": 2,
    }
    grid = re.findall(r"test_grid\[(\d)-(\d)\]", " ".join(kept))
    assert all(len(set(values)) > 1 for values in zip(*grid, strict=True)), grid


def test_cases_that_are_taken_often(tmp_path: Path) -> None:
    """Beside as many as are drawn, in a first run alone; in a sweep, too."""
    often = {"test_some_often[20]", "test_some_often[30]"}
    for option in ("--cases=1", "--wide-cases=1"):
        kept = collected(tmp_path, option, "-k", "some_often")
        assert often <= set(kept)
        assert len(kept) in ((2, 3) if option == "--cases=1" else (11,))
    seen = {
        test
        for k in range(1, 12)
        for test in collected(tmp_path, "--cases=1", f"--cases-from={k}")
        if "some_often" in test
    }
    assert len(seen) == 11  # one at a time
    (one,) = collected(tmp_path, "--cases=1", "--cases-from=1", "-k", "some_often")
    assert one in seen


def test_what_is_skipped_comes_last(tmp_path: Path) -> None:
    """One of the two that run is drawn, each in turn; then come the others."""

    def drawn(cases: int, first: int) -> list[str]:
        options = f"--cases={cases}", f"--cases-from={first}"
        return collected(tmp_path, *options, "-k", "some_skipped")

    seen = {test for k in range(4) for test in drawn(1, k)}
    assert seen == {"test_some_skipped[4]", "test_some_skipped[5]"}
    assert drawn(1, 0) == drawn(1, 2) != drawn(1, 1)
    assert set(drawn(3, 1)) > seen and len(drawn(3, 1)) == 3


def test_another_run_takes_other_cases(tmp_path: Path) -> None:
    def drawn(folder: Path, *options: str) -> list[str]:
        return collected(folder, "--cases=2", *options, "-k", "not often")

    one = drawn(tmp_path)
    other = drawn(tmp_path, "--cases-from=2")
    both = set(one) & set(other)
    assert len(one) == len(other) + 5  # one has seven things
    assert all(
        any(name in test for name in ("alone", "inherited", "things", "skipped"))
        for test in both
    )
    assert "test_alone" in both
    around = drawn(tmp_path, "--cases-from=450")
    assert {x for x in one if "things" not in x} < set(around)


def test_a_part_takes_functions_with_all_of_their_cases(tmp_path: Path) -> None:
    whole, part = collected(tmp_path), collected(tmp_path, "--part=2")
    names = {test.partition("[")[0] for test in part}
    assert part == [test for test in whole if test.partition("[")[0] in names]
    assert 0 < len(names) < 8


def test_what_other_options_leave_is_drawn_from(tmp_path: Path) -> None:
    assert len(collected(tmp_path, "--cases=3", "-k", "grid and [4-")) == 3


@pytest.mark.parametrize(
    "options, grid, sweep", [("", 25, 4), ("--cases=6", 6, 4), ("--cases=2", 2, 2)]
)
def test_sweeps_alone(tmp_path: Path, options: str, grid: int, sweep: int) -> None:
    kept = collected(tmp_path, "--wide-cases=4", *options.split())
    assert sum("test_sweep" in test for test in kept) == sweep
    assert sum("test_grid" in test for test in kept) == grid


@pytest.mark.parametrize("option", ["--cases", "--wide-cases", "--part"])
@pytest.mark.parametrize("limit", ["0", "-1"])
def test_no_cases_are_refused(tmp_path: Path, option: str, limit: str) -> None:
    (said,) = collected(tmp_path, f"{option}={limit}")
    assert f"{option} must be at least 1, got {limit}" in said


def test_a_library_is_not_the_tests_that_asked_first(tmp_path: Path) -> None:
    (tmp_path / "test_building.py").write_text(BUILDING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "budgets", "-q", "-n", "1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    counted = re.findall(r"(\S+) (\d+) of \d+", done.stdout)
    spent = {folder: int(seconds) for folder, seconds in counted}
    assert list(spent) == [".", "builds"], done.stdout + done.stderr
    assert spent["builds"] >= 1 and spent["."] <= spent["builds"]
