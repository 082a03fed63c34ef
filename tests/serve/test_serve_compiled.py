"""What NVIDIA GPUs run for several steps in one program.

It is compiled for one by a CUDA plugin of JAX, where no GPU is, and on a GPU for it.
"""

from __future__ import annotations

import gpu_serve
import jax
import pytest
from cuda_plugin import needs_plugin, run


@needs_plugin
def test_kernels_read_no_slices_of_a_loop_without_a_gpu() -> None:
    """Else its CUDA graph would have to be changed for each of them in each step."""
    printed = run(gpu_serve.__file__)
    assert printed.splitlines() == list(gpu_serve.WANTED.values())


@pytest.mark.gpu
def test_kernels_read_no_slices_of_a_loop_on_a_gpu() -> None:
    sizes = gpu_serve.SMALL
    text = gpu_serve.compile_for(jax.devices()[0], sizes, False)
    assert gpu_serve.line_of(text) == gpu_serve.WANTED[sizes]
