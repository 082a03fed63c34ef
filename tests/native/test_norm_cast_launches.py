"""The kernel of norms in 8 bits on this GPU, by the C interface, every number.

compute-sanitizer looks at every address, and at who orders what threads do to shared
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
from norm_cast_launches import cases

import jax_kvblock
from jax_kvblock.core import ffi

SANITIZER = shutil.which("compute-sanitizer")
LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
LAUNCHES = Path(__file__).parents[1] / "support" / "norm_cast_launches.py"
COUNT = len(list(cases()))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        (9, 0) not in ffi.gpu_capabilities(),
        reason="the kernel runs on GPUs of compute capability 9.0",
    ),
]
watched = pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")


def run(*call: str, tool: str = "") -> subprocess.CompletedProcess[str]:
    watch = [str(SANITIZER), "--tool", tool, "--print-limit", "5"] if tool else []
    watch += ["--error-exitcode", "9"] * bool(tool)
    return subprocess.run(
        [*watch, sys.executable, str(LAUNCHES), str(LIBRARY), *call],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def assert_all_ran(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    assert re.search(rf"^{COUNT} launches", done.stdout, re.MULTILINE), said


def test_every_number_is_right() -> None:
    assert_all_ran(run())


@watched
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    done = run(tool=tool)
    assert_all_ran(done)
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-4000:]


@watched
def test_memcheck_sees_a_short_matrix() -> None:
    done = run("short", tool="memcheck")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout
    assert "NormCast" in done.stdout
