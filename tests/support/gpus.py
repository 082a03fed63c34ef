"""Which of a machine's GPUs a process of the suite takes first: each another one.

A test runs on JAX's default device. Were that the same GPU for all processes, the
others would wait for the tests that ask for several.
"""

from __future__ import annotations

import os
from pathlib import Path


def rotate(worker: str, devices: Path = Path("/dev")) -> None:
    """Puts another GPU first for each process, before CUDA starts.

    Args:
      worker: pytest-xdist's name of the process, "gw12"; "" for the one that is alone.
      devices: the folder where the driver has a file for each GPU.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        gpus = [str(i) for i in range(len(list(devices.glob("nvidia[0-9]*"))))]
    else:
        gpus = [each for each in named.split(",") if each]
    if len(gpus) < 2 or not worker:
        return
    first = int(worker.removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
