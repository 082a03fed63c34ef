"""Scripts that compile for NVIDIA GPUs where no GPU is, by a CUDA plugin of JAX.

KVBLOCK_CUDA_PLUGIN is the folder it was installed into, apart from the other packages,
since it would look for a driver in each process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("KVBLOCK_CUDA_PLUGIN")

needs_plugin = pytest.mark.skipif(
    FOLDER is None, reason="KVBLOCK_CUDA_PLUGIN names no CUDA plugin of JAX"
)


def run(script: str | None, *words: str) -> str:
    """What a script prints in a process of its own, whose JAX has the plugin.

    Args:
      script: its file, as the `__file__` of what was imported.
      words: what it is called with.
    """
    assert FOLDER is not None and script is not None
    own = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([FOLDER, str(Path(script).parent), *own])
    ran = subprocess.run(
        [sys.executable, "-P", script, *words],
        env={**os.environ, "JAX_PLATFORMS": "", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
