"""What NVIDIA GPUs run for several steps in one program.

It is compiled for one by a CUDA plugin of JAX, where no GPU is (KVBLOCK_CUDA_PLUGIN,
see tests/parallel/test_gpu_schedules.py), and on a GPU for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_serve
import jax
import pytest

FOLDER = os.environ.get("KVBLOCK_CUDA_PLUGIN")


@pytest.mark.skipif(FOLDER is None, reason="KVBLOCK_CUDA_PLUGIN names no CUDA plugin")
def test_kernels_read_no_slices_of_a_loop_without_a_gpu() -> None:
    """Else its CUDA graph would have to be changed for each of them in each step."""
    assert FOLDER is not None
    script = Path(gpu_serve.__file__)
    own = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([FOLDER, str(script.parent), *own])
    ran = subprocess.run(
        [sys.executable, "-P", str(script)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == list(gpu_serve.WANTED.values())


@pytest.mark.gpu
def test_kernels_read_no_slices_of_a_loop_on_a_gpu() -> None:
    sizes = gpu_serve.SMALL
    text = gpu_serve.compile_for(jax.devices()[0], sizes, False)
    assert gpu_serve.line_of(text) == gpu_serve.WANTED[sizes]
