"""The benchmarks: imported as modules, or run at a tiny size."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jax_kvblock

FOLDER = Path(__file__).parents[2] / "benchmarks"


def imported(
    module: str, monkeypatch: pytest.MonkeyPatch, folder: Path = FOLDER
) -> Iterator[ModuleType]:
    """A module of a folder; what it brings of that and of this one goes with it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module(module)
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.is_relative_to(FOLDER) or file.is_relative_to(folder):
            del sys.modules[name]
            # A package that stays would give what went, `from package import module`.
            package, _, its_name = name.rpartition(".")
            if package in before:
                vars(sys.modules[package]).pop(its_name, None)


def small(tmp_path: Path, name: str, *options: str) -> dict[str, Any]:
    """The results file of a benchmark at a tiny size."""
    paths = [str(Path(jax_kvblock.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    files = [f"{start}{name.replace('-', '_')}.py" for start in ("bench_", "")]
    (file,) = (FOLDER / file for file in files if (FOLDER / file).exists())
    command = [sys.executable, str(file), "--small", *options]
    # A GPU adds up slopes of a gate's table in any order, but for this.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    own = {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags}
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--commit", "abc"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob(f"*/{name}-*.json")
    document: dict[str, Any] = json.loads(found.read_text())
    assert document["commit"] == "abc" and document["versions"]["jax"]
    return document
