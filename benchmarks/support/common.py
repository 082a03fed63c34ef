"""What the benchmarks share: named shapes, the machine, results files, options."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import platform as host_platform
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import bars
import jax
import jaxlib
import numpy as np

import jax_kvblock
from jax_kvblock.core import ffi
from support import cuda_runtime

ROOT = Path(__file__).resolve().parents[2]
OURS = "jax_kvblock"
MIB = 1 << 20
GIB = 1 << 30


def load_module(name: str, path: str | Path) -> ModuleType:
    """A module from a file that is on no import path."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it loads
    spec.loader.exec_module(module)
    return module


# The shapes live with the tests, so that what is timed is what is tested.
cases = load_module("kvblock_cases", ROOT / "tests" / "support" / "cases.py")
RUNS_OF_8 = cases.Case("runs of 8 bytes", 24, 2, 16, 8, 4)


# ---- the machine ---------------------------------------------------------------------


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


@functools.cache
def device_name() -> str:
    """ "NVIDIA H200", or the CPU's model and how many of its cores we may use."""
    if on_gpu():
        return jax.devices()[0].device_kind
    model = host_platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        model = found.group(1) if found else model
    model = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", "", model)
    return f"{' '.join(model.split())}, {num_cpus()} cores"


def num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    found = {
        "platform": "gpu" if on_gpu() else "cpu",
        "jax_kvblock": jax_kvblock.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "build": ", ".join(f"{k} {v}" for k, v in ffi.BUILD.items()),
        "python": host_platform.python_version(),
        "system": f"{host_platform.system()} {host_platform.release()}",
        "cpus": str(num_cpus()),
    }
    if on_gpu():
        found |= cuda_runtime.versions()
    return found


def commit() -> str:
    """The checkout's commit, with "-dirty" when a tracked file has changed."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def today() -> str:
    return datetime.date.today().isoformat()


# ---- results -------------------------------------------------------------------------


@dataclasses.dataclass
class Results:
    """Rows of one run. A case is "shape / work"; the part before an implementation's
    first comma says whose it is ("xla, layered pool" is XLA's)."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of peers
    # Writes what there is so far: a run that is cut off keeps its numbers.
    save: Callable[[], Any] = lambda: None

    def add(
        self,
        case: str,
        implementation: str,
        metric: str,
        value: float,
        unit: str,
        show: bool = True,
    ) -> None:
        row = {
            "case": case,
            "implementation": implementation,
            "metric": metric,
            "value": float(f"{value:.6g}"),
            "unit": unit,
        }
        self.rows.append(row)
        if show:
            what = "" if metric == "bandwidth" else f" {metric}"
            print(f"{case:42} {implementation:25}{value:9.4g} {unit}{what}", flush=True)

    def fail(self, case: str, implementation: str, error: BaseException | str) -> None:
        """What did not run must not cost the others their numbers."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        first = " ".join(text.split())[:300]
        self.failures.append(f"{case}, {implementation}: {first}")
        print(f"{case:42} {implementation:25} DID NOT RUN: {first}", flush=True)

    def document(self, options: argparse.Namespace) -> dict[str, Any]:
        return {
            "device": device_name(),
            "date": today(),
            "commit": options.commit or commit(),
            "versions": versions() | self.versions,
            "rows": self.rows,
        }


def write(document: dict[str, Any], name: str, out: Path) -> Path:
    """Saves a document as <out>/<device>/<name>-<date>.json."""
    folder = out / slug(document["device"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{document['date']}.json"
    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    head = json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1)
    path.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')
    return path


# ---- options -------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--quick",
        "--small",
        action="store_true",
        help="tiny sizes: checks the script, not speed",
    )
    made.add_argument(
        "--out", type=Path, default=None, help="where results go; benchmarks/results"
    )
    made.add_argument("--commit", help="the commit, where git is not at hand")
    made.add_argument(
        "--check", action="store_true", help="exit with 1 when a bar is missed"
    )
    made.add_argument("--cases", default="", help="a regular expression of shape names")
    made.add_argument(
        "--peer", action="append", default=[], help="a file with peers(); see README.md"
    )
    return made


Bench = Callable[[argparse.Namespace, Results], None]


Outcome = tuple[dict[str, Any], list[str]]  # the results file, what did not run


def run_bench(name: str, bench: Bench, options: argparse.Namespace) -> Outcome:
    """Runs one benchmark, saves its results and prints them beside the bars."""
    print(f"\n== {name} on {device_name()} ==", flush=True)
    results = Results()
    # Quick numbers mean nothing, so they never land beside the real ones.
    default = ROOT / "build" / "quick" if options.quick else ROOT / "benchmarks/results"
    out = options.out or default
    results.save = lambda: write(results.document(options), name, out)
    try:
        bench(options, results)
    except Exception as error:  # what was measured before it is still worth saving
        traceback.print_exc()
        results.fail(name, "benchmark", error)
    document = results.document(options)
    path = write(document, name, out)
    bars.report(document)
    print(f"wrote {path}", flush=True)
    return document, results.failures


def exit_status(outcomes: Sequence[Outcome], options: argparse.Namespace) -> int:
    """1 when something did not run, or, with --check, missed a bar."""
    if any(failures for _, failures in outcomes):
        return 1
    met = all(verdict.met for doc, _ in outcomes for verdict in bars.judge(doc))
    return 0 if met or not options.check else 1


def main(name: str, bench: Bench, doc: str | None) -> None:
    """The command line of one benchmark file."""
    options = parser(doc).parse_args()
    outcome = run_bench(name, bench, options)
    for failure in outcome[1]:
        print(f"did not run: {failure}")
    sys.exit(exit_status([outcome], options))


def wanted(options: argparse.Namespace, shapes: Any) -> list[Any]:
    return [case for case in shapes if re.search(options.cases, case.name)]
