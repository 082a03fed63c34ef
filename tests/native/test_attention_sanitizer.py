"""compute-sanitizer watches the attention kernels of this GPU, and finds nothing.

memcheck looks at every address that the threads use, racecheck at who orders what they
do to shared memory. Of the Hopper kernels racecheck sees the ordinary accesses alone,
not those of bulk tensor copies and warpgroup products.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attention_launches import DIMS, NARROW, NARROW_DIMS

import jax_kvblock
from jax_kvblock.attention.cuda import unserved_by_gpu

SANITIZER = shutil.which("compute-sanitizer")
LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
LAUNCHES = Path(__file__).parents[1] / "support" / "attention_launches.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.early,
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here"),
]


def watch(tool: str, *call: str) -> subprocess.CompletedProcess[str]:
    command = [str(SANITIZER), "--tool", tool, "--print-limit", "5"]
    command += ["--error-exitcode", "9", sys.executable, str(LAUNCHES), str(LIBRARY)]
    return subprocess.run([*command, *call], capture_output=True, text=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("implementation", "kernels"),
    [("cuda", "generic"), ("cuda_sm90", "sm90"), ("cuda", "float32")],
)
def test_finds_nothing(implementation: str, kernels: str, tool: str) -> None:
    if missing := unserved_by_gpu(implementation, backward=True):
        pytest.skip(f"{implementation} does not serve {missing[0]}")
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda dims: watch(tool, kernels, dims), DIMS)
    for dims, done in zip(DIMS, runs, strict=True):
        said = f"{dims}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        assert done.returncode == 0, said
        assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), said
        launches = re.search(r"^(\d+) launches", done.stdout, re.MULTILINE)
        wide_float32 = kernels == "float32" and dims > "128x128"  # forward alone
        assert launches and int(launches[1]) >= (15 if wide_float32 else 45), said


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_finds_nothing_in_8_bits(tool: str) -> None:
    if missing := unserved_by_gpu("cuda_sm90", backward=False):
        pytest.skip(f"cuda_sm90 does not serve {missing[0]}")
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda dims: watch(tool, "e4m3", dims), NARROW_DIMS)
    for dims, done in zip(NARROW_DIMS, runs, strict=True):
        said = f"{dims}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        assert done.returncode == 0, said
        assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), said
        assert f"\n{len(NARROW)} launches" in f"\n{done.stdout}", said


def test_memcheck_sees_a_short_array() -> None:
    if missing := unserved_by_gpu("cuda", backward=False):
        pytest.skip(f"cuda does not serve {missing[0]}")
    done = watch("memcheck", "short", "64x64", "plain")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout
    assert "AttentionForward" in done.stdout
