"""The examples run, and say what they promise to say."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jax_kvblock

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_a_model_decodes_on_from_a_cache_that_was_moved() -> None:
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make demo` installs it")
    printed = run("demo.py")
    assert "the same text, token for token" in printed
    assert "GB/s" in printed


def test_a_gpt_learns_the_same_with_flash_and_with_plain_attention(
    tmp_path: pathlib.Path,
) -> None:
    options = ["--quick"]
    plot = tmp_path / "loss.svg"
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", str(plot)]
    printed = run("train_gpt.py", *options)
    assert "the same curve" in printed
    found = re.findall(r"(\w+) +attention: +([\d,]+) tokens .* ([\d.]+) MiB", printed)
    assert [name for name, _, _ in found] == ["flash", "plain"]
    flash, plain = (float(mebibytes) for *_, mebibytes in found)
    assert flash < plain
    assert plot.exists() == ("--plot" in options)


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
