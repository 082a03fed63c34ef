"""Paged attention's kernels on this GPU, by the C interface, against float64.

What is beside arrays, and what nobody may read, is NaN; compute-sanitizer looks at
every address, and at who orders what threads do to shared memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jax_kvblock
from jax_kvblock.attention.cuda import unserved_by_gpu

SANITIZER = shutil.which("compute-sanitizer")
LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
LAUNCHES = Path(__file__).parents[1] / "support" / "paged_launches.py"
PARTS = 8

pytestmark = pytest.mark.gpu


def launches(*options: str, tool: str = "") -> list[subprocess.CompletedProcess[str]]:
    """All cases, in parts side by side."""
    if missing := unserved_by_gpu("cuda", backward=False):
        pytest.skip(f"cuda does not serve {missing[0]}")
    watch = [str(SANITIZER), "--tool", tool, "--print-limit", "5"] if tool else []
    watch += ["--error-exitcode", "9"] * bool(tool)

    def run(part: int) -> subprocess.CompletedProcess[str]:
        command = [*watch, sys.executable, str(LAUNCHES), str(LIBRARY), *options]
        command += ["--part", f"{part}/{PARTS}"]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(PARTS)))


def test_every_case_is_right() -> None:
    count = 0
    for done in launches():
        said = done.stdout[-4000:] + done.stderr[-4000:]
        assert done.returncode == 0, said
        told = re.search(r"^(\d+) cases, 0 wrong", done.stdout, re.MULTILINE)
        assert told, said
        count += int(told[1])
    assert count > 90


@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    for done in launches("--exact", tool=tool):
        said = done.stdout[-4000:] + done.stderr[-4000:]
        assert done.returncode == 0, said
        assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), said
