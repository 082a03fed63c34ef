"""What scripts of launches say is read as they say it; by stand-ins, without a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import launches
import pytest

Done = subprocess.CompletedProcess[str]


def done(stdout: str, status: int = 0) -> Done:
    return subprocess.CompletedProcess([], status, stdout, "")


CLEAN = "89 launches, none wrong\n========= ERROR SUMMARY: 0 errors\n"
SHORT = "Invalid __global__ read of size 4 bytes\n at void kvblock::Append<>\n"
WRONG: dict[str, Callable[[], None]] = {
    "fewer launches": lambda: launches.assert_ran(done(CLEAN), "9 launches"),
    "more launches": lambda: launches.assert_ran(done(CLEAN), "890 launches"),
    "a status": lambda: launches.assert_ran(done(CLEAN, 1), "89 launches"),
    "found nothing, but ended badly": lambda: launches.assert_finds_nothing(
        done(CLEAN, 9)
    ),
    "an error": lambda: launches.assert_finds_nothing(
        done(CLEAN.replace("0 errors", "10 errors"))
    ),
    "a short array is not seen": lambda: launches.assert_sees_a_short_array(
        done(CLEAN), "Append"
    ),
    "another kernel's": lambda: launches.assert_sees_a_short_array(
        done(SHORT, 9), "Cast"
    ),
    "seen, and ended well": lambda: launches.assert_sees_a_short_array(
        done(SHORT), "Append"
    ),
}


def test_what_is_right() -> None:
    launches.assert_ran(done(CLEAN), "89 launches")
    launches.assert_finds_nothing(done(CLEAN))
    launches.assert_sees_a_short_array(done(SHORT, 9), "Append")


@pytest.mark.cases(99)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name: str) -> None:
    with pytest.raises(AssertionError):
        WRONG[name]()
