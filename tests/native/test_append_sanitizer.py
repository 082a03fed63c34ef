"""compute-sanitizer watches the append kernel of this GPU, and finds nothing.

The same run holds every result to float64, without jax on the GPU.
"""

from __future__ import annotations

import launches
import pytest
from append_cases import CASES, KEPT, MANY, MANY_KEPT

# Without tokens there is nothing to launch.
EVERY = (CASES, KEPT, MANY, MANY_KEPT)
LAUNCHED = sum(case.tokens > 0 for cases in EVERY for case in cases.values())
SCRIPT, LINE = "append_launches", f"{LAUNCHED} launches"

pytestmark = [pytest.mark.gpu, pytest.mark.early]


def test_every_case_is_right_by_the_c_interface() -> None:
    launches.assert_ran(launches.run(SCRIPT), LINE)


@launches.watched
@launches.by_tool
def test_finds_nothing(tool: str) -> None:
    done = launches.run(SCRIPT, tool=tool)
    launches.assert_ran(done, LINE)
    launches.assert_finds_nothing(done)


@launches.watched
def test_memcheck_sees_a_short_array() -> None:
    done = launches.run(SCRIPT, "short", tool="memcheck")
    launches.assert_sees_a_short_array(done, "Append")
