"""compute-sanitizer watches the attention kernels of this GPU, and finds nothing.

memcheck looks at every address that the threads use, racecheck at who orders what they
do to shared memory. Of the Hopper kernels racecheck sees the ordinary accesses alone,
not those of bulk tensor copies and warpgroup products.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import launches
import pytest
from attention_launches import DIMS, NARROW, NARROW_DIMS
from served_kernels import skip_unless_served

SCRIPT = "attention_launches"

pytestmark = [pytest.mark.gpu, pytest.mark.early, launches.watched]


@launches.by_tool
@pytest.mark.parametrize(
    ("implementation", "kernels"),
    [("cuda", "generic"), ("cuda_sm90", "sm90"), ("cuda", "float32")],
)
def test_finds_nothing(implementation: str, kernels: str, tool: str) -> None:
    skip_unless_served(implementation, backward=True)
    with ThreadPoolExecutor() as pool:
        runs = pool.map(
            lambda dims: launches.run(SCRIPT, kernels, dims, tool=tool), DIMS
        )
    for dims, done in zip(DIMS, runs, strict=True):
        launches.assert_finds_nothing(done)
        found = re.search(r"^(\d+) launches", done.stdout, re.MULTILINE)
        wide_float32 = kernels == "float32" and dims > "128x128"  # forward alone
        assert found and int(found[1]) >= (15 if wide_float32 else 45), dims


@launches.by_tool
@pytest.mark.parametrize("kernels", ["e4m3", "int8"])
def test_finds_nothing_in_8_bits(kernels: str, tool: str) -> None:
    skip_unless_served("cuda_sm90", backward=False)
    with ThreadPoolExecutor() as pool:
        runs = pool.map(
            lambda dims: launches.run(SCRIPT, kernels, dims, tool=tool), NARROW_DIMS
        )
    for done in runs:
        launches.assert_ran(done, f"{len(NARROW)} launches")
        launches.assert_finds_nothing(done)


def test_memcheck_sees_a_short_array() -> None:
    skip_unless_served("cuda", backward=False)
    done = launches.run(SCRIPT, "short", "64x64", "plain", tool="memcheck")
    launches.assert_sees_a_short_array(done, "AttentionForward")
