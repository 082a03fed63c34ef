"""Whether a real model's weights are here, or can be fetched."""

from __future__ import annotations

import importlib.util

import jax
import pytest


def skip_without_model() -> None:
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make demo` installs it")
    import fake_engine  # noqa: F401  puts the examples on the path
    from smollm2 import cache, weights

    path = cache.cache_dir() / weights.MODEL
    if jax.default_backend() == "gpu" and not path.exists():
        pytest.skip(f"a GPU's machine may have no network, and has no {path.name}")
