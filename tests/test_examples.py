"""The examples run, and say what they promise to say."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import jax_kvblock

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_a_model_decodes_on_from_a_cache_that_was_moved() -> None:
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make demo` installs it")
    package_root = str(pathlib.Path(jax_kvblock.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same text, token for token" in done.stdout
    assert "GB/s" in done.stdout
