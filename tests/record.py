"""What a run of the suite found, as a results file beside the benchmarks'.

    pytest --record benchmarks/results

writes <folder>/<device>/tests-<date>.json: how many tests had which outcome, in all and
by file, how long they took, why tests were skipped, and which commit and versions ran.
"""

from __future__ import annotations

import collections
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", metavar="DIR", help="write the run's record there")
    group.addoption("--commit", help="the commit that runs, where git is not at hand")


def pytest_configure(config: pytest.Config) -> None:
    # With several processes, the one that hands out the tests has all the reports.
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "kvblock-recorder")


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = time.time()
        self.seconds: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report)] += report.duration

    def pytest_terminal_summary(
        self, terminalreporter: Any, exitstatus: int, config: pytest.Config
    ) -> None:
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
        path = write(rows, config, int(exitstatus))
        terminalreporter.write_line(f"wrote {path}")


def row(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": round(value, 1), "unit": unit}


def file_of(report: Any) -> str:
    return report.nodeid.split("::")[0]


def why(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "no reason"
    return re.sub(r"^Skipped: ", "", text)


def write(rows: list[dict[str, Any]], config: pytest.Config, status: int) -> Path:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import common

    document = {
        "device": common.device_name(),
        "date": common.today(),
        "commit": config.getoption("--commit") or common.commit(),
        "versions": common.versions(),
        "exit status": status,
        "command": " ".join(["pytest", *config.invocation_params.args]),
        "rows": rows,
    }
    return common.write(document, "tests", Path(config.getoption("--record")))
