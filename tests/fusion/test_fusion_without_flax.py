"""Flax is imported when it is needed, and may be missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_kvblock
from jax_kvblock import fusion

PACKAGE_ROOT = Path(jax_kvblock.__file__).parent.parent
CODE = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
import jax.numpy as jnp
from jax_kvblock import fusion
for name in fusion._OF_FLAX:
    try:
        getattr(fusion, name)
    except ImportError as error:
        assert type(error) is ImportError
        print(error)
fusion.FusionConfig("qkv_only", "aggressive")
print(fusion.benchmark_fusion_performance(jnp.sin, jnp.sin, jnp.ones(3), 1).num_runs)
"""


def test_without_flax_what_needs_none_works() -> None:
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *errors, last = done.stdout.splitlines()
    assert last == "1" and len(errors) == 3
    for name, line in zip(fusion._OF_FLAX, errors, strict=True):
        assert line.startswith(f"jax_kvblock.fusion: {name} must have flax")
        assert "`pip install flax`" in line


def test_names_that_there_are_not() -> None:
    with pytest.raises(AttributeError, match=r"jax_kvblock\.fusion.*FuseAll"):
        fusion.FuseAll  # noqa: B018
    assert {name for name in fusion.__all__ if getattr(fusion, name)} == {
        *fusion.__all__
    }
