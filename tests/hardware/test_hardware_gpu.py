"""On a GPU: predictions beside the allocator's peak, and batches at the edge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_kvblock
from jax_kvblock.hardware import HardwareAbstractionLayer, capabilities

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "support" / "memory_processes.py"


def measured(*options: str, **settings: str) -> dict[str, Any]:
    paths = [str(Path(jax_kvblock.__file__).parent.parent)]
    paths.append(os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("batch_size", [8, 64])
def test_predictions_are_within_a_tenth_of_the_peak(
    batch_size: int, record_property: Callable[[str, object], None]
) -> None:
    said = measured("peak", str(batch_size), XLA_PYTHON_CLIENT_PREALLOCATE="false")
    for metric in ("predicted", "peak"):  # a run's record has them
        record_property("measured", [metric, said[metric], "bytes"])
    assert abs(said["predicted"] - said["peak"]) <= 0.1 * said["peak"], said


def test_the_batch_that_is_found_runs_and_the_next_does_not(
    record_property: Callable[[str, object], None],
) -> None:
    memory = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
    }
    said = measured("edge", **memory)
    for metric in ("size", "next"):
        record_property("measured", [metric, said[metric], "members of a batch"])
    assert said["ran"], said
    assert "RESOURCE_EXHAUSTED" in said["refused"], said


def test_the_limit_is_the_allocators() -> None:
    device = jax.devices()[0]
    found = HardwareAbstractionLayer(device).find_batch_size(
        lambda x: x + 1, jax.ShapeDtypeStruct((1, 2**20), "float32"), multiple_of=64
    )
    assert found.limit == device.memory_stats()["bytes_limit"]
    assert found.usage.total <= found.limit < found.next_usage.total


def test_what_serves_this_gpu() -> None:
    rows = {row.op: row for row in capabilities(jax.devices()[0])}
    assert rows["paged_attention, bfloat16"].implementation == "cuda (kernels)"
