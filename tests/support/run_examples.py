"""The examples: run as a user runs them, or loaded as modules."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import jax_kvblock

Load = Callable[[str], ModuleType]
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """An example as a fresh module, which has compiled nothing yet."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def fresh(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return fresh


def run(example: str, *options: str) -> str:
    """What an example prints; it must end well."""
    package_root = str(pathlib.Path(jax_kvblock.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
