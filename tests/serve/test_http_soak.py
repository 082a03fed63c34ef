"""A short soak holds; one of an engine that loses things says which."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
from soak import soak

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and files by /proc"),
]


def test_nothing_is_lost_in_a_short_soak() -> None:
    report = soak(4, processes=2, threads=2, kill_every=1.5)
    assert not report.wrong, str(report)
    assert report.numbers["client processes killed"] >= 1
    assert report.numbers["requests cancelled"] >= 1
    assert report.numbers["requests taken"] > 3


def test_a_disk_that_is_full_slow_and_fails_costs_time_alone() -> None:
    pytest.importorskip("lmdb")
    report = soak(6, engine="disk", processes=1, threads=3, kill_every=3)
    assert not report.wrong, str(report)
    assert report.numbers["requests taken"] > 3


def test_what_is_lost_is_noticed() -> None:
    wrong = soak(3, engine="broken", processes=1, threads=4, patience=0.5).wrong
    for said in ("blocks are held by nobody", "memory grew", "gave 'You answer"):
        assert any(said in text for text in wrong), wrong
