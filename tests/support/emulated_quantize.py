"""Quantization's kernels on the emulator: compiled, and called by C or by XLA.

`quantize_as_cuda` lowers calls for a CPU as they are lowered for a GPU: the FFI handler
decodes them, and what it launches runs on the emulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from cpp_programs import emulated_library, lowered_anew, serve_on_cpu

from jax_kvblock.fp8 import cuda

SOURCES = (
    "tests/support/emulator/quantize.cc",
    "tests/support/emulator/quantize_ffi.cc",
    "cpp/host/quantize_check.cc",
    "cpp/host/message.cc",
)
# A product and a sum are two roundings.
ROUNDING = "-ffp-contract=off"


@pytest.fixture(scope="session")
def emulated_quantize(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = emulated_library(tmp_path_factory, "quantize", ROUNDING, *SOURCES)
    loaded.kvblock_quantize_cuda.restype = ctypes.c_char_p
    loaded.kvblock_quantize_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.kvblock_quantize_workspace.restype = ctypes.c_int64
    loaded.kvblock_quantize_workspace.argtypes = [ctypes.c_void_p]
    loaded.emulator_divide.restype = ctypes.c_float
    loaded.emulator_divide.argtypes = [ctypes.c_float, ctypes.c_float]
    serve_on_cpu(loaded, "quantize")
    return loaded


@pytest.fixture
def quantize_as_cuda(
    emulated_quantize: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    choose = cuda.choose
    monkeypatch.setattr(cuda, "choose", lambda *call: choose(*call[:3], "cuda"))
    with lowered_anew():
        yield


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["plain", "kernel"])
def quantized_by_cpus(request: pytest.FixtureRequest) -> str:
    """The test twice: in plain JAX, and by the kernels on the emulator."""
    fixture = "quantize_as_cuda" if request.param == "kernel" else "four_cpus"
    request.getfixturevalue(fixture)
    return request.param


@pytest.fixture(params=["plain", "kernel", GPU])
def quantized_by(request: pytest.FixtureRequest) -> str:
    """The same, and a third time where there is a GPU, by the kernels as they are."""
    if request.param == "kernel":
        request.getfixturevalue("quantize_as_cuda")
    elif request.param == "plain":
        request.getfixturevalue("four_cpus")
    return request.param
