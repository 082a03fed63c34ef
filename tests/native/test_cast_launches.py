"""The kernel of casts on this GPU, by the C interface, every code and size.

compute-sanitizer looks at every address, and at who orders what threads do to shared
memory.
"""

from __future__ import annotations

import launches
import pytest
from cast_launches import DTYPES, FORMATS, SHAPES

COUNT = len(SHAPES) * len(DTYPES) * len(FORMATS)
SCRIPT, LINE = "cast_launches", f"{COUNT} launches"

pytestmark = pytest.mark.gpu


def test_every_code_is_right() -> None:
    launches.assert_ran(launches.run(SCRIPT), LINE)


@launches.watched
@launches.by_tool
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    done = launches.run(SCRIPT, tool=tool)
    launches.assert_ran(done, LINE)
    launches.assert_finds_nothing(done)


@launches.watched
def test_memcheck_sees_a_short_matrix() -> None:
    done = launches.run(SCRIPT, "short", tool="memcheck")
    launches.assert_sees_a_short_array(done, "Cast")
