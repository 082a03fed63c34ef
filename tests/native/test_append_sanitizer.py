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

pytestmark = [pytest.mark.gpu, pytest.mark.early]


class TestAppend(launches.ByTheCInterface):
    script, line, kernel = "append_launches", f"{LAUNCHED} launches", "Append"
