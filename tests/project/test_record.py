"""The record of a run of the suite, and the budgets of its folders, tell what was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.cpu
PLUGINS = Path(__file__).parents[1] / "support"
OF_BLOCKS = """
import pytest

def test_right(record_property):
    record_property("another", 1)
    record_property("measured", ["peak", 12345.5, "bytes"])

@pytest.mark.parametrize("x", [1, 2])
def test_half(x):
    assert x == 1

@pytest.mark.skip(reason="no moon tonight")
def test_skipped():
    pass

@pytest.mark.skipif(True, reason="no moon tonight")
def test_skipped_too():
    pass

@pytest.mark.xfail
def test_known():
    assert False
"""
OF_NATIVE = """
import time
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_error(broken):
    pass

def test_slow():
    start = time.process_time()
    while time.process_time() - start < 0.2:
        pass
"""

# In place of the benchmarks' module, which takes seconds to import.
QUICK = """
import json
import sys
import types

def write(document, name, out):
    path = out / "device" / f"{name}-{document['date']}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    return path

common = types.SimpleNamespace(
    device_name=str, today=lambda: "today", versions=dict, write=write
)
sys.modules["support"] = types.SimpleNamespace(common=common)
"""
BUDGET = "import budgets\nbudgets.BUDGETS = {'native': 0.02}\n"


PLUGIN_OPTIONS = ("-p", "record", "-p", "budgets", "-p", "no:cacheprovider")


class Run(NamedTuple):
    status: int
    said: str
    name: str | None
    document: dict[str, Any]

    def value(self, case: str, metric: str) -> float | None:
        rows = [
            row["value"]
            for row in self.document["rows"]
            if (row["case"], row["metric"]) == (case, metric)
        ]
        assert len(rows) < 2, rows
        return rows[0] if rows else None


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own."""
    files = {
        "pytest.ini": "[pytest]\ntestpaths = tests\n",
        "tests/conftest.py": "import budgets\nbudgets.BUDGETS = {'native': 0.02}\n",
        "tests/blocks/test_blocks.py": OF_BLOCKS,
        "tests/native/test_native.py": OF_NATIVE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(suite: Path, *options: str) -> Run:
    """pytest with both plugins, and what it recorded."""
    left_out = {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"}
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(PLUGINS), *map(os.path.abspath, given)]  # pytest runs elsewhere
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a second
    env["JAX_PLATFORMS"] = "cpu"  # a GPU's machine would not change what is recorded
    plugins = PLUGIN_OPTIONS
    plugins += ("-p", "xdist") if "-n" in options else ()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *plugins, *options],
        cwd=suite,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    written = list(suite.glob("records/*/*.json"))
    assert len(written) <= 1, written
    if not written:
        return Run(done.returncode, said, None, {})
    document = json.loads(written[0].read_text())
    stem = written[0].stem.removesuffix(f"-{document['date']}")
    written[0].unlink()
    assert f"wrote {written[0].relative_to(suite)}" in said
    return Run(done.returncode, said, stem, document)


def record(suite: Path, *options: str) -> Run:
    return run(suite, "--record", "records", "--commit", "abc", *options)


COUNTS = {"passed": 3, "failed": 1, "error": 1, "skipped": 2, "xfailed": 1}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_whole_run_is_recorded_as_it_was(suite: Path, processes: int) -> None:
    several = ("-n", "2", "tests") if processes == 2 else ()
    got = record(suite, *several)
    assert (got.status, got.name) == (1, "tests"), got.said
    assert got.document["whole"] is True
    assert got.document["exit status"] == 1
    plugins = PLUGIN_OPTIONS + (("-p", "xdist") if processes == 2 else ())
    command = " ".join(["pytest", *plugins, *several])
    assert got.document["command"] == command
    assert got.document["commit"] == "abc"
    assert {"jax", "python"} <= got.document["versions"].keys()
    assert got.value("all", "processes") == processes
    for outcome, count in (COUNTS | {"xpassed": 0, "deselected": 0}).items():
        assert got.value("all", outcome) == count, outcome
    assert got.value("tests/blocks/test_blocks.py::test_half[2]", "failed") == 1
    assert got.value("tests/native/test_native.py::test_error", "error") == 1
    assert got.value("no moon tonight", "skipped") == 2
    assert got.value("tests/blocks/test_blocks.py::test_right", "peak") == 12345.5
    assert got.value("tests/blocks/test_blocks.py", "passed") == 2
    assert got.value("tests/native/test_native.py", "passed") == 1
    assert got.value("tests/native/test_native.py", "failed") is None
    for metric in ("duration", "processors"):
        assert (got.value("tests/native/test_native.py", metric) or 0) >= 0.1, metric


PARTS = {
    "a file": (["tests/blocks/test_blocks.py"], 0, 1),
    "a folder": (["tests/native"], 0, 1),
    "a keyword": (["-k", "right or slow"], 6, 0),
    "a keyword in two processes": (["-n", "2", "-k", "right or slow"], 6, 0),
    "an ignored folder": (["--ignore", "tests/native"], 0, 1),
    "the first failure": (["-x"], 0, 1),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_run_of_some_tests_is_recorded_beside(suite: Path, part: str) -> None:
    options, deselected, status = PARTS[part]
    (suite / "tests/conftest.py").write_text(QUICK)
    got = record(suite, *options)
    assert (got.status, got.name) == (status, "part-of-tests"), got.said
    assert got.document["whole"] is False
    assert got.document["exit status"] == status
    assert got.value("all", "deselected") == deselected


# A signal that comes again where the first one is told of.
INTERRUPTED = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_keyboard_interrupt():
    raise KeyboardInterrupt
"""


def test_an_interrupted_run_is_no_whole_one(suite: Path) -> None:
    (suite / "tests/conftest.py").write_text(QUICK + INTERRUPTED)
    (suite / "tests/z").mkdir()
    interrupts = "def test_interrupted():\n    raise KeyboardInterrupt\n"
    (suite / "tests/z/test_interrupted.py").write_text(interrupts)
    got = record(suite)
    assert got.name == "part-of-tests" and got.document["whole"] is False, got.said
    assert got.value("all", "passed") == 3


KILLED = """
import os
import signal

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_the_names_of_what_failed(suite: Path) -> None:
    (suite / "tests/z").mkdir()
    (suite / "tests/z/test_killed.py").write_text(KILLED)
    got = record(suite)
    assert (got.status, got.name) == (-9, None), got.said
    left = (suite / "records/failed-so-far.txt").read_text()
    assert "test_blocks.py::test_half[2]: " in left and "assert 2 == 1" in left
    assert "test_native.py::test_error: " in left and "RuntimeError" in left
    assert "test_right" not in left
    (suite / "tests/z/test_killed.py").unlink()
    assert record(suite).name == "tests"
    assert not any((suite / "records").glob("*.txt"))


SLOW_AND_KILLED = """
import os
import signal
import time

def test_quick():
    pass

def test_killed():
    time.sleep(2.5)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.parametrize("processes", [(), ("-n", "1")])
def test_a_killed_run_leaves_the_names_of_what_ran(
    suite: Path, processes: tuple[str, ...]
) -> None:
    """The process that hands out the tests is killed, or the only one."""
    (suite / "tests/z").mkdir()
    text = SLOW_AND_KILLED if processes else SLOW_AND_KILLED.replace("ppid", "pid")
    (suite / "tests/z/test_killed.py").write_text(text)
    got = record(suite, *processes)
    assert (got.status, got.name) == (-9, None), got.said
    left = (suite / "records/running.txt").read_text()
    assert "test_killed.py::test_killed\n" in left
    assert "test_quick" not in left and "test_right" not in left


@pytest.mark.parametrize("part", [(), ("-k", "right"), ("tests/blocks",)])
def test_the_whole_suite_wants_what_its_tests_import(
    suite: Path, part: tuple[str, ...]
) -> None:
    wanted = '["pytest>=8", "nobody-has-this[fast]==1.*", "nor-this; extra"]'
    project = f"[project]\n[project.optional-dependencies]\ntest = {wanted}\n"
    (suite / "pyproject.toml").write_text(project)
    (suite / "tests/conftest.py").write_text(QUICK)
    got = record(suite, *part)
    if part:
        assert got.name == "part-of-tests", got.said
        return
    assert (got.status, got.name) == (pytest.ExitCode.USAGE_ERROR, None), got.said
    assert "missing here: pip install nobody-has-this nor-this\n" in got.said


def test_without_the_option_nothing_is_recorded(suite: Path) -> None:
    got = run(suite, "tests/blocks/test_blocks.py::test_right")
    assert (got.status, got.name) == (0, None), got.said


def test_a_folder_over_its_budget_fails_where_budgets_hold(suite: Path) -> None:
    slow = "tests/native/test_native.py::test_slow"
    (suite / "tests/conftest.py").write_text(QUICK + BUDGET)
    free = run(suite, slow)
    assert free.status == 0 and "OVER BUDGET" not in free.said, free.said
    assert "seconds of a processor, by folder: native" in free.said
    got = record(suite, "--budgets", slow)
    assert got.status == 1 and "OVER BUDGET: native; make these" in got.said, got.said
    assert got.document["exit status"] == 1
    (suite / "tests/conftest.py").write_text("")  # the budgets of this suite
    within = run(suite, "--budgets", slow)
    assert within.status == 0 and "OVER BUDGET" not in within.said, within.said
