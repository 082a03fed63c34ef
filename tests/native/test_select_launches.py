"""The kernels that choose tiles on this GPU, by the C interface, every number.

compute-sanitizer looks at every address, and at who orders what threads do to shared
memory.
"""

from __future__ import annotations

import launches
import pytest
from select_launches import DTYPES, POOLS, SHAPES, TAUS

COUNT = 2 * len(POOLS) * len(DTYPES) + 2 * len(SHAPES) * len(TAUS)
SCRIPT, LINE = "select_launches", f"{COUNT} launches"

pytestmark = pytest.mark.gpu


def test_every_tile_is_right() -> None:
    launches.assert_ran(launches.run(SCRIPT), LINE)


@launches.watched
@launches.by_tool
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    done = launches.run(SCRIPT, tool=tool)
    launches.assert_ran(done, LINE)
    launches.assert_finds_nothing(done)


@launches.watched
def test_memcheck_sees_a_short_array() -> None:
    done = launches.run(SCRIPT, "short", tool="memcheck")
    launches.assert_sees_a_short_array(done, "Pool")
