"""The kernels that choose tiles on this GPU, by the C interface, every number.

compute-sanitizer looks at every address, and at who orders what threads do to shared
memory.
"""

from __future__ import annotations

import launches
import pytest
from select_launches import DTYPES, POOLS, SHAPES, TAUS, WEIGHED, WEIGHS

COUNT = 3 * len(POOLS) * len(DTYPES) + 2 * len(SHAPES) * len(TAUS)
COUNT += len(WEIGHS) * len(WEIGHED)

pytestmark = pytest.mark.gpu


class TestSelect(launches.ByTheCInterface):
    script, line, kernel = "select_launches", f"{COUNT} launches", "PoolPieces"
