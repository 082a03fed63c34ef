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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        (9, 0) not in ffi.gpu_capabilities(),
        reason="the kernel runs on GPUs of compute capability 9.0",
    ),
]


class TestNormCast(launches.ByTheCInterface):
    script, line, kernel = "norm_cast_launches", f"{COUNT} launches", "NormCast"
