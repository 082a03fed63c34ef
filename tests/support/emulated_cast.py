"""The kernels of casts on the emulator: compiled, and called by C or by XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from cpp_programs import build_emulated, built_once

SOURCES = (
    "tests/support/emulator/cast.cc",
    "tests/support/emulator/cast_ffi.cc",
    "tests/support/emulator/norm_cast.cc",
    "tests/support/emulator/norm_cast_ffi.cc",
    "cpp/host/cast_check.cc",
    "cpp/host/message.cc",
    "cpp/host/norm_cast_check.cc",
)


def build(library: Path) -> None:
    build_emulated(library, *SOURCES)


@pytest.fixture(scope="session")
def emulated_cast(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = built_once(tmp_path_factory, "libkvblock_cast_emulated.so", build)
    loaded = ctypes.CDLL(str(made))
    handlers = {"cast": loaded.EmulatedCast, "norm_cast": loaded.EmulatedNormCast}
    for name, function in handlers.items():
        handler = jax.ffi.pycapsule(function)
        jax.ffi.register_ffi_target(f"kvblock_{name}", handler, platform="cpu")
    return loaded


@pytest.fixture
def cast_as_cuda(
    emulated_cast: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernel, on CPUs too."""
    from jax_kvblock.training import cuda

    refusal = cuda.refusal
    monkeypatch.setattr(cuda, "refusal", lambda shape, _: refusal(shape, "cuda"))
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()
