"""The append kernel on the emulator: compiled, and called by the C interface or by XLA.

`as_cuda` lowers calls for a CPU as they are lowered for a GPU: the FFI handler decodes
them, and what it launches runs on the emulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from cpp_programs import emulated_library, lowered_anew, serve_on_cpu

from jax_kvblock.append import cuda

SOURCES = (
    "tests/support/emulator/append.cc",
    "tests/support/emulator/append_ffi.cc",
    "cpp/host/append_check.cc",
    "cpp/host/message.cc",
)
# A product and a sum are two roundings.
ROUNDING = "-ffp-contract=off"


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = emulated_library(tmp_path_factory, "append", ROUNDING, *SOURCES)
    loaded.kvblock_append_cuda.restype = ctypes.c_char_p
    loaded.kvblock_append_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.emulator_pair_of.restype = ctypes.c_uint16
    loaded.emulator_pair_of.argtypes = [ctypes.c_int, ctypes.c_float, ctypes.c_float]
    serve_on_cpu(loaded, "append")
    return loaded


@pytest.fixture
def as_cuda(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that are lowered from now on take the kernel, on CPUs too."""
    choose = cuda.choose
    monkeypatch.setattr(cuda, "choose", lambda *call: choose(*call[:3], "cuda"))
    with lowered_anew():
        yield


PLAIN = pytest.param("plain", marks=pytest.mark.host)
KERNEL = pytest.param("kernel", marks=pytest.mark.cpu)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=[PLAIN, KERNEL])
def by_cpus(request: pytest.FixtureRequest) -> str:
    """The test twice: in plain JAX, and by the kernel on the emulator."""
    request.getfixturevalue("as_cuda" if request.param == "kernel" else "four_cpus")
    return request.param


@pytest.fixture(params=[PLAIN, KERNEL, GPU])
def by(request: pytest.FixtureRequest) -> str:
    """The same, and a third time where there is a GPU, by the kernel as it is."""
    if request.param != "gpu":
        request.getfixturevalue("as_cuda" if request.param == "kernel" else "four_cpus")
    return request.param
