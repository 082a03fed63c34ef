"""compute-sanitizer watches the kernels of quantization on this GPU, and finds nothing.

The same run holds every code, scale and mean to float64, without jax on the GPU.
"""

from __future__ import annotations

import launches
import pytest
from quantize_launches import CASES, DTYPES

CALLED = len(CASES) * len(DTYPES)
SCRIPT, LINE = "quantize_launches", f"{CALLED} calls"

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
    launches.assert_sees_a_short_array(done, "Quantize")
