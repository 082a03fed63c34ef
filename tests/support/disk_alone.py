"""The disk tier without jax: a process that starts in a tenth of a second, and forks.

Import this first. The packages above the tier's modules are there, but what they
import is not.
"""

from __future__ import annotations

import importlib.util
import sys
import types


def _stub(name: str, path: list[str]) -> list[str]:
    package = types.ModuleType(name)
    package.__path__ = path
    sys.modules[name] = package
    return path


def install() -> None:
    spec = importlib.util.find_spec("jax_kvblock")
    assert spec and spec.submodule_search_locations
    folders = _stub("jax_kvblock", list(spec.submodule_search_locations))
    _stub("jax_kvblock.cache", [f"{folder}/cache" for folder in folders])


install()
