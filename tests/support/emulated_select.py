"""The kernels that choose tiles on the emulator, called by C or by XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from cpp_programs import build_emulated, built_once

SOURCES = (
    "tests/support/emulator/select.cc",
    "tests/support/emulator/select_ffi.cc",
    "cpp/host/message.cc",
    "cpp/host/select_check.cc",
)


def build(library: Path) -> None:
    build_emulated(library, *SOURCES)


@pytest.fixture(scope="session")
def emulated_select(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = built_once(tmp_path_factory, "libkvblock_select_emulated.so", build)
    loaded = ctypes.CDLL(str(made))
    for name in ("pool", "keep", "lists"):
        handler = jax.ffi.pycapsule(getattr(loaded, f"Emulated{name.title()}"))
        jax.ffi.register_ffi_target(f"kvblock_{name}", handler, platform="cpu")
    return loaded


@pytest.fixture
def select_as_cuda(
    emulated_select: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    from jax_kvblock.sparse import cuda

    serves = cuda.serves
    monkeypatch.setattr(cuda, "serves", lambda name, x, _: serves(name, x, "cuda"))
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()
