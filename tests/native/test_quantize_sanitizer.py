"""compute-sanitizer watches the kernels of quantization on this GPU, and finds nothing.

The same run holds every code, scale and mean to float64, without jax on the GPU.
"""

from __future__ import annotations

import launches
import pytest
from quantize_launches import CASES, DTYPES

CALLED = len(CASES) * len(DTYPES)

pytestmark = [pytest.mark.gpu, pytest.mark.early]


class TestQuantize(launches.ByTheCInterface):
    script, line, kernel = "quantize_launches", f"{CALLED} calls", "Quantize"
