"""GPUs whose kernels multiply no 8 bits, as JAX would tell of them."""

from __future__ import annotations

import re

import pytest

from jax_kvblock.attention import cuda
from jax_kvblock.core import ffi

# What a message says of them, and the capabilities that are here.
GPUS = {
    "8.0": ("compute capability 8.0 (9.0 alone is served)", (8, 0)),
    "8.9, which multiplies 8 bits": ("compute capability 8.9", (8, 9)),
    "10.0": ("compute capability 10.0 (9.0 alone is served)", (10, 0)),
    "one of two": ("compute capability 8.0", (8, 0), (9, 0)),
    "a build without 90a": ("this build (rebuild it with 90a", (9, 0)),
}
on_each_gpu = pytest.mark.parametrize("name", GPUS)


def pretend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """These GPUs are here; the words of an error, as a pattern."""
    words, *capabilities = GPUS[name]
    monkeypatch.setattr(ffi, "gpu_capabilities", lambda: frozenset(capabilities))
    monkeypatch.setattr(cuda, "_built_for_hopper", lambda: "90a" not in name)
    return re.escape(words)
