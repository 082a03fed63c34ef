"""`compiler_options`: by version, by device, and what are no devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_kvblock.parallel import compiler_options


class Gpu:
    """As much of a device as is looked at."""

    platform = "gpu"

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


COMBINED = "xla_gpu_collective_permute_combine_threshold_bytes"
ENGINES = "xla_gpu_collective_permute_mode"
AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.mark.parametrize(
    ("version", "processes", "engines"),
    [
        ("0.10.2", (0, 0), False),
        ("0.11.1", (0, 0), False),
        ("0.11.2", (0, 0), True),
        ("0.11.2+local", (0, 0), True),
        ("0.12.0rc1", (0,), True),
        ("0.12.0.1", (0, 1), False),
    ],
)
def test_compiler_options(monkeypatch, version, processes, engines):
    """Copy engines send within a process, where jaxlib knows how."""
    monkeypatch.setattr("jaxlib.__version__", version)
    found = compiler_options([Gpu(i) for i in processes])
    assert COMBINED in found and (ENGINES in found) == engines
    assert (AT_ONCE in found) == engines
    assert len(compiler_options([Gpu(0)], combine_gathers=True)) == len(
        compiler_options([Gpu(0)])
    ) + 2  # fmt: skip


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_compiler_options_of_a_mesh(monkeypatch, shape, four_cpus):
    """As of its devices."""
    devices = np.array(jax.devices("cpu")[:4]).reshape(shape)
    mesh = Mesh(devices, ("a", "b")[: len(shape)])
    assert compiler_options(mesh) == {}
    monkeypatch.setattr("jax_kvblock.parallel.options._are_gpus", lambda _: True)
    assert compiler_options(mesh) == compiler_options(mesh.devices.flat)
    assert COMBINED in compiler_options(mesh)


@pytest.mark.parametrize(
    "devices",
    [3, [3], [], "gpu", np.array([[Gpu(0)]])],
    ids=["a number", "numbers", "none", "a name", "an array of rows"],
)
def test_compiler_options_of_no_devices(devices):
    words = "compiler_options: devices must be .*; pass the mesh, or mesh.devices.flat"
    with pytest.raises(TypeError, match=words):
        compiler_options(devices)


def test_compiler_options_are_for_gpus(four_cpus):
    """Elsewhere there are none, and jit takes those that there are."""
    assert compiler_options(jax.devices("cpu")) == {}
    names = {COMBINED: 1 << 40}
    assert jax.jit(lambda x: x + 1, compiler_options=names)(1) == 2
