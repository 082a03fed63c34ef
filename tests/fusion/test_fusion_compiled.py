"""What XLA fuses for NVIDIA GPUs by itself, and what a wording hides from it.

Compiled by a CUDA plugin of JAX, where no GPU is (KVBLOCK_CUDA_PLUGIN, see
tests/parallel/test_gpu_schedules.py), and on a GPU for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_epilogues
import jax
import pytest

FOLDER = os.environ.get("KVBLOCK_CUDA_PLUGIN")


@pytest.mark.skipif(FOLDER is None, reason="KVBLOCK_CUDA_PLUGIN names no CUDA plugin")
def test_without_a_gpu():
    assert FOLDER is not None
    script = Path(gpu_epilogues.__file__)
    own = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([FOLDER, str(script.parent), *own])
    ran = subprocess.run(
        [sys.executable, "-P", str(script), *gpu_epilogues.CASES],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    want = list(map(gpu_epilogues.wanted, gpu_epilogues.CASES))
    for name, (_, size) in gpu_epilogues.TEMPORARIES.items():
        want.append(f"{name}: {size} MiB")
    assert ran.stdout.splitlines() == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_epilogues.CASES)
def test_on_a_gpu(name):
    compiled = gpu_epilogues.compile_for(jax.devices()[0], name)
    assert gpu_epilogues.line_of(name, compiled) == gpu_epilogues.wanted(name)
