"""compute-sanitizer watches the kernels of quantization on this GPU, and finds nothing.

The same run holds every code, scale and mean to float64, without jax on the GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quantize_launches import CASES, DTYPES

import jax_kvblock

SANITIZER = shutil.which("compute-sanitizer")
LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
LAUNCHES = Path(__file__).parents[1] / "support" / "quantize_launches.py"
CALLED = len(CASES) * len(DTYPES)

pytestmark = [pytest.mark.gpu, pytest.mark.early]
watched = pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def watch(tool: str, *call: str) -> subprocess.CompletedProcess[str]:
    command = [str(SANITIZER), "--tool", tool, "--print-limit", "5"]
    command += ["--error-exitcode", "9", sys.executable, str(LAUNCHES), str(LIBRARY)]
    return run(*command, *call)


def assert_all_ran(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    calls = re.search(r"^(\d+) calls", done.stdout, re.MULTILINE)
    assert calls and int(calls[1]) == CALLED, said


def test_every_case_is_right_by_the_c_interface() -> None:
    assert_all_ran(run(sys.executable, str(LAUNCHES), str(LIBRARY)))


@watched
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_finds_nothing(tool: str) -> None:
    done = watch(tool)
    assert_all_ran(done)
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-4000:]


@watched
def test_memcheck_sees_a_short_array() -> None:
    done = watch("memcheck", "short")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout
    assert "Quantize" in done.stdout
