"""Scripts that launch kernels by the C interface, in processes of their own.

A script is called with the library and more. compute-sanitizer may watch it: memcheck
looks at every address that threads use, racecheck at who orders what they do to shared
memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_kvblock

SANITIZER = shutil.which("compute-sanitizer")
LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
FOLDER = Path(__file__).parent

watched = pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")
by_tool = pytest.mark.parametrize("tool", ["memcheck", "racecheck"])


def run(script: str, *call: str, tool: str = "") -> subprocess.CompletedProcess[str]:
    """A script of this folder; `tool` of the sanitizer watches it."""
    watch = [str(SANITIZER), "--tool", tool, "--print-limit", "5"] if tool else []
    watch += ["--error-exitcode", "9"] * bool(tool)
    return subprocess.run(
        [*watch, sys.executable, str(FOLDER / f"{script}.py"), str(LIBRARY), *call],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the GPU is the kernels' alone
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what it said, for who reads why it failed."""
    return done.stdout[-4000:] + done.stderr[-4000:]


def assert_ran(done: subprocess.CompletedProcess[str], line: str) -> None:
    """It ended well, and a line begins so: how many launches there were."""
    assert done.returncode == 0, told(done)
    assert re.search(rf"^{line}\b", done.stdout, re.MULTILINE), told(done)


def assert_finds_nothing(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, told(done)
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), told(done)


def assert_sees_a_short_array(
    done: subprocess.CompletedProcess[str], kernel: str
) -> None:
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout
    assert kernel in done.stdout


class ByTheCInterface:
    """What a script launches on this GPU: held to the truth, and watched.

    Attributes:
      script: which holds all that it launches to the truth.
      line: how a line begins in which it says how much that was.
      kernel: which reads too far where the script is told to give it a short array.
    """

    script: str
    line: str
    kernel: str

    def test_every_number_is_right(self) -> None:
        assert_ran(run(self.script), self.line)

    @watched
    @by_tool
    def test_the_sanitizer_finds_nothing(self, tool: str) -> None:
        done = run(self.script, tool=tool)
        assert_ran(done, self.line)
        assert_finds_nothing(done)

    @watched
    def test_memcheck_sees_a_short_array(self) -> None:
        done = run(self.script, "short", tool="memcheck")
        assert_sees_a_short_array(done, self.kernel)
