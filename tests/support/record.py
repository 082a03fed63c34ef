"""What a run of the suite found, as a results file beside the benchmarks'.

    pytest --record benchmarks/results

writes <folder>/<device>/tests-<date>.json: how many tests had which outcome, in all and
by file, how long they took and how much of that of processors, why tests were skipped,
what tests say they measured (`record_property("measured", [metric, value, unit])`), and
which commit and versions ran. A run that left tests out goes to
part-of-tests-<date>.json and is not "whole". While it runs, <folder>/failed-so-far.txt
has the tests that failed, and where and how, and <folder>/running.txt those that have
begun and not ended: what is left of a run that is killed. The whole suite does not
begin where a package is missing that its tests import (pyproject.toml's extra "test").
"""

from __future__ import annotations

import collections
import importlib.metadata
import re
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Options that leave tests out without deselecting them.
NARROWING = ("ignore", "ignore_glob", "lf", "stepwise", "collectonly")
MEASURED = "measured"
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", metavar="DIR", help="write the run's record there")
    group.addoption("--commit", help="the commit that runs, where git is not at hand")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        if not hasattr(config, "workerinput"):
            ask_for_packages(config)
        # With several processes, the one that hands out the tests has all the reports,
        # and the others, each of which collects the whole suite, know what is left out.
        part = Deselected if hasattr(config, "workerinput") else Recorder
        config.pluginmanager.register(part(config), "kvblock-recorder")


def ask_for_packages(config: pytest.Config) -> None:
    """Ends a run of the whole suite before it begins, if it could not be all there."""
    part = config.getoption("keyword") or config.getoption("markexpr")
    project = config.rootpath / "pyproject.toml"
    if part or not asks_for_all(config) or not project.exists():
        return
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[\[<>=!~; ]", wanted)[0] for wanted in extras.get("test", [])]
    if missing := [name for name in names if not is_installed(name)]:
        raise pytest.UsageError(
            f"a record of the whole suite, but its tests import what is missing here: "
            f"pip install {' '.join(missing)}"
        )


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Deselected:
    """How many tests were left out, as a worker tells it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.count = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.count += len(items)

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput["deselected"] = self.count  # type: ignore[attr-defined]


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = time.time()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.of_processors: collections.Counter[str] = collections.Counter()
        self.measured: list[dict[str, Any]] = []
        self.deselected = 0
        self.stopped = False
        self.session: pytest.Session | None = None
        folder = Path(config.getoption("--record"))
        folder.mkdir(parents=True, exist_ok=True)
        self.so_far = folder / "failed-so-far.txt"
        self.so_far.unlink(missing_ok=True)
        self.running = Running(folder / "running.txt")

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """The status does not tell where what follows fails, too."""
        self.stopped = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        told = getattr(node, "workeroutput", {}).get("deselected", 0)
        self.deselected = max(self.deselected, told)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.session = session
        self.stopped = bool(session.shouldstop or session.shouldfail)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report)] += report.duration
        spent = getattr(report, "processor_seconds", 0.0)  # by the budgets' clock
        self.of_processors[file_of(report)] += spent
        if report.when == "call":
            told = [given for name, given in report.user_properties if name == MEASURED]
            self.measured += [row(report.nodeid, *given) for given in told]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash and f"{crash.path}:{crash.lineno}: {crash.message}"
            with self.so_far.open("a") as file:
                file.write(f"{report.nodeid}: {said or report.longrepr}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.begins(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.ends(nodeid)

    def pytest_terminal_summary(
        self, terminalreporter: Any, exitstatus: int, config: pytest.Config
    ) -> None:
        here = len(terminalreporter.stats.get("deselected", []))
        self.deselected = max(self.deselected, here)
        stats = {name: terminalreporter.stats.get(name, []) for name in OUTCOMES}
        rows = [row("all", "duration", time.time() - self.start, "s")]
        workers = config.getoption("numprocesses", None) or 1
        rows.append(row("all", "processes", workers, "processes"))
        rows += [row("all", name, len(found), "tests") for name, found in stats.items()]
        for outcome in ("failed", "error"):
            rows += [row(r.nodeid, outcome, 1, "tests") for r in stats[outcome]]
        reasons = collections.Counter(why(report) for report in stats["skipped"])
        rows += [row(reason, "skipped", n, "tests") for reason, n in reasons.items()]
        for file in sorted(self.seconds):
            for name, found in stats.items():
                if count := sum(file_of(report) == file for report in found):
                    rows.append(row(file, name, count, "tests"))
            rows.append(row(file, "duration", self.seconds[file], "s of one process"))
            spent = self.of_processors[file]
            rows.append(row(file, "processors", spent, "s of a processor"))
        rows += self.measured
        # Other plugins, like the budgets, may have changed the status at the end.
        status = int(self.session.exitstatus if self.session else exitstatus)
        ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        ended &= not self.stopped
        # Failures under a status of none: the run did not come to its end.
        failures = stats["failed"] + stats["error"]
        ended &= not (status == pytest.ExitCode.OK and failures)
        whole = ended and not self.deselected and asks_for_all(config)
        rows.append(row("all", "deselected", self.deselected, "tests"))
        path = write(rows, config, status, whole)
        self.so_far.unlink(missing_ok=True)
        self.running.close()
        terminalreporter.write_line(f"wrote {path}")


class Running:
    """A file of the tests that run, and for how long, a second old at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._timer: threading.Timer | None = None

    def begins(self, nodeid: str) -> None:
        with self._lock:
            self._since[nodeid] = time.time()
            self._write_soon()

    def ends(self, nodeid: str) -> None:
        with self._lock:
            self._since.pop(nodeid, None)
            self._write_soon()

    def close(self) -> None:
        """All tests have ended."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self.path.unlink(missing_ok=True)

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(1, self._write)
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        with self._lock:
            if self._timer is None:
                return  # closed while it waited for the lock
            now, self._timer = time.time(), None
            lines = [f"{now - t:.0f} s: {name}\n" for name, t in self._since.items()]
            self.path.write_text("".join(lines))


def row(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": round(value, 1), "unit": unit}


def asked_for(config: pytest.Config) -> list[str]:
    """The arguments of the run, but for where its record goes."""
    own, kept, skip = ("--record", "--commit"), [], False
    for given in map(str, config.invocation_params.args):
        if not skip and not given.startswith(own):
            kept.append(given)
        skip = given in own  # its value comes next
    return kept


def file_of(report: Any) -> str:
    return report.nodeid.split("::")[0]


def why(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "no reason"
    return re.sub(r"^Skipped: ", "", text)


def asks_for_all(config: pytest.Config) -> bool:
    """Whether the command line names the folder of tests, and leaves no file out."""
    if any(config.getoption(option, None) for option in NARROWING):
        return False
    tests = config.rootpath / "tests"
    given = (config.invocation_params.dir / argument for argument in config.args)
    return any(tests.is_relative_to(path.resolve()) for path in given)


def write(
    rows: list[dict[str, Any]], config: pytest.Config, status: int, whole: bool
) -> Path:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from support import common

    document = {
        "device": common.device_name(),
        "date": common.today(),
        "commit": config.getoption("--commit") or common.commit(),
        "versions": common.versions(),
        "whole": whole,
        "exit status": status,
        "command": " ".join(["pytest", *asked_for(config)]),
        "rows": rows,
    }
    name = "tests" if whole else "part-of-tests"
    return common.write(document, name, Path(config.getoption("--record")))
