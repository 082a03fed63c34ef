"""The kernel of casts on this GPU, by the C interface, every code and size.

compute-sanitizer looks at every address, and at who orders what threads do to shared
memory.
"""

from __future__ import annotations

import launches
import pytest
from cast_launches import DTYPES, FORMATS, SHAPES

COUNT = len(SHAPES) * len(DTYPES) * len(FORMATS)

pytestmark = pytest.mark.gpu


class TestCast(launches.ByTheCInterface):
    script, line, kernel = "cast_launches", f"{COUNT} launches", "Cast"
