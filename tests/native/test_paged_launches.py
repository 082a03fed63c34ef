"""Paged attention's kernels on this GPU, by the C interface, against float64.

What is beside arrays, and what nobody may read, is NaN; compute-sanitizer looks at
every address, and at who orders what threads do to shared memory.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import launches
import pytest
from served_kernels import skip_unless_served

PARTS = 8

pytestmark = pytest.mark.gpu


def in_parts(*options: str, tool: str = "") -> list[subprocess.CompletedProcess[str]]:
    """All cases, in parts side by side."""
    skip_unless_served("cuda", backward=False)

    def run(part: int) -> subprocess.CompletedProcess[str]:
        options_and_part = (*options, "--part", f"{part}/{PARTS}")
        return launches.run("paged_launches", *options_and_part, tool=tool)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(PARTS)))


def test_every_case_is_right() -> None:
    count = 0
    for done in in_parts():
        assert done.returncode == 0, launches.told(done)
        found = re.search(r"^(\d+) cases, 0 wrong", done.stdout, re.MULTILINE)
        assert found, launches.told(done)
        count += int(found[1])
    assert count > 90


@launches.watched
@launches.by_tool
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    for done in in_parts("--exact", tool=tool):
        launches.assert_finds_nothing(done)
