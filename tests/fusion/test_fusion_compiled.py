"""What XLA fuses for NVIDIA GPUs by itself, and what a wording hides from it.

Compiled by a CUDA plugin of JAX, where no GPU is, and on a GPU for it.
"""

from __future__ import annotations

import gpu_epilogues
import jax
import pytest
from cuda_plugin import needs_plugin, run


@needs_plugin
def test_without_a_gpu():
    printed = run(gpu_epilogues.__file__, *gpu_epilogues.CASES)
    want = list(map(gpu_epilogues.wanted, gpu_epilogues.CASES))
    for name, (_, size) in gpu_epilogues.TEMPORARIES.items():
        want.append(f"{name}: {size} MiB")
    assert printed.splitlines() == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_epilogues.CASES)
def test_on_a_gpu(name):
    compiled = gpu_epilogues.compile_for(jax.devices()[0], name)
    assert gpu_epilogues.line_of(name, compiled) == gpu_epilogues.wanted(name)
