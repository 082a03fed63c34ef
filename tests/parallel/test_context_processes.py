"""One job of several processes: two with two devices each, and four with one.

And eight devices, which are more than the suite's own process has.
"""

from __future__ import annotations

import re
from pathlib import Path

import context_processes
import decode_processes
import pytest
from processes import hold_processes, run_processes

pytestmark = pytest.mark.host
SCRIPT = Path(context_processes.__file__)


SEVERAL = "ring,all_gather,ulysses_ring,ring of documents"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("count", "cases", "right"), [(2, "all", 8), (4, SEVERAL, 5)], ids=["2", "4"]
)
def test_attention_over_processes(count, cases, right):
    """Strategies, documents, and a layer."""
    hold_processes(SCRIPT, count, str(right), cases, seconds=300)


def test_attention_over_eight_devices():
    hold_processes(SCRIPT, 1, "5", SEVERAL, "8")


@pytest.mark.cases(2)
@pytest.mark.parametrize("count", [2, 4])
def test_decoding_over_processes(count):
    """From blocks that are dealt out, and with heads that are cut."""
    hold_processes(Path(decode_processes.__file__), count, "4", seconds=300)


# What the process says that goes on: its service's client, or a collective.
GONE = re.compile(
    r"the JAX distributed service detected fatal errors"
    r"|coordination service"
    r"|stopped sending heartbeats"
    r"|[Cc]onnection (closed|reset) by peer"
)


@pytest.mark.parametrize("which", ["last", "first"])
def test_a_process_that_dies_ends_the_job(which):
    """The other one stops, by an error of JAX's and not by waiting for ever.

    The first one serves what all of them look at. A heartbeat may be 10 seconds late;
    all else is the time that processes take to begin, beside many others minutes.
    """
    ended = run_processes(SCRIPT, 2, f"{which} dies", seconds=300)
    (code, said), (dead, _) = ended if which == "last" else ended[::-1]
    assert dead == 7
    assert code != 0, said
    assert "it came through" not in said
    assert GONE.search(said), said
    assert "AssertionError" not in said
