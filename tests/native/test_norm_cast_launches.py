"""The kernel of norms in 8 bits on this GPU, by the C interface, every number.

compute-sanitizer looks at every address, and at who orders what threads do to shared
memory.
"""

from __future__ import annotations

import launches
import pytest
from norm_cast_launches import cases

from jax_kvblock.core import ffi

COUNT = len(list(cases()))
SCRIPT, LINE = "norm_cast_launches", f"{COUNT} launches"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        (9, 0) not in ffi.gpu_capabilities(),
        reason="the kernel runs on GPUs of compute capability 9.0",
    ),
]


def test_every_number_is_right() -> None:
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
    launches.assert_sees_a_short_array(done, "NormCast")
