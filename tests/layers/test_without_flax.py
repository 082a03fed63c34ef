"""Flax is imported when one of its modules is asked for, and may be missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_kvblock

PACKAGE_ROOT = Path(jax_kvblock.__file__).parent.parent
HIDDEN = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
"""


def run(code: str) -> str:
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_never_imports_flax() -> None:
    code = """
import sys
import jax.numpy as jnp
import jax_kvblock, jax_kvblock.layers as layers, jax_kvblock.hardware as hardware
took = layers.benchmark_attention_performance(jnp.tanh, (1, 8, 8), 1)
hardware.HardwareAbstractionLayer().optimize_for_hardware(lambda x: x)
assert not any(name.split(".")[0] == "flax" for name in sys.modules)
assert issubclass(layers.AttentionLayer, sys.modules["flax.nnx"].Module)
from jax_kvblock.layers import FusedGELU, OptimizedLinear
print("right")
"""
    assert run(code) == "right\n"


def test_without_flax_the_error_says_what_to_install() -> None:
    code = (
        HIDDEN
        + """
import jax.numpy as jnp
import jax_kvblock.layers as layers
for name in ("AttentionLayer", "OptimizedLinear", "FusedGELU"):
    for ask in (getattr, lambda m, n: exec(f"from {m.__name__} import {n}")):
        try:
            ask(layers, name)
        except ImportError as error:
            assert type(error) is ImportError
            print(error)
try:
    layers.ComponentValidator().validate_linear_component(jnp.tanh, 2, 2)
except TypeError as error:
    print(error)
print(layers.benchmark_attention_performance(jnp.tanh, (1, 8, 8), 1)["num_trials"])
"""
    )
    lines = run(code).splitlines()
    assert len(lines) == 8 and lines[-1] == "1"
    for i, name in enumerate(("AttentionLayer", "OptimizedLinear", "FusedGELU")):
        for line in lines[2 * i : 2 * i + 2]:
            assert line.startswith(f"jax_kvblock.layers: {name} ")
            assert "`pip install flax`" in line and "create_attention" in line
    assert lines[6].startswith("validate_linear_component: layer must be one of")


def test_names_that_there_are_not() -> None:
    from jax_kvblock import layers

    with pytest.raises(AttributeError, match=r"jax_kvblock\.layers.*Linear3"):
        layers.Linear3  # noqa: B018
    assert set(layers.__all__) <= {*dir(layers), *layers._MODULES}
