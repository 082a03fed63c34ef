"""The kernels of casts on the emulator: compiled, and called by C or by XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from cpp_programs import emulated_library, lowered_anew, serve_on_cpu

SOURCES = (
    "tests/support/emulator/cast.cc",
    "tests/support/emulator/cast_ffi.cc",
    "tests/support/emulator/norm_cast.cc",
    "tests/support/emulator/norm_cast_ffi.cc",
    "cpp/host/cast_check.cc",
    "cpp/host/message.cc",
    "cpp/host/norm_cast_check.cc",
)


@pytest.fixture(scope="session")
def emulated_cast(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = emulated_library(tmp_path_factory, "cast", *SOURCES)
    serve_on_cpu(loaded, "cast", "norm_cast")
    return loaded


@pytest.fixture
def cast_as_cuda(
    emulated_cast: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernel, on CPUs too."""
    from jax_kvblock.training import cuda

    refusal = cuda.refusal
    monkeypatch.setattr(cuda, "refusal", lambda shape, _: refusal(shape, "cuda"))
    with lowered_anew():
        yield
