"""The kernels that choose tiles on the emulator, called by C or by XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from cpp_programs import emulated_library, lowered_anew, serve_on_cpu

TARGETS = ("pool_pieces", "weigh_tiles", "keep_tiles", "list_tiles")
SOURCES = (
    "tests/support/emulator/select.cc",
    "tests/support/emulator/select_ffi.cc",
    "cpp/host/message.cc",
    "cpp/host/select_check.cc",
)


@pytest.fixture(scope="session")
def emulated_select(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = emulated_library(tmp_path_factory, "select", *SOURCES)
    serve_on_cpu(loaded, *TARGETS)
    return loaded


@pytest.fixture
def select_as_cuda(
    emulated_select: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    from jax_kvblock.sparse import cuda

    serves = cuda.serves
    monkeypatch.setattr(
        cuda,
        "serves",
        lambda name, operands, _, **static: serves(name, operands, "cuda", **static),
    )
    with lowered_anew():
        yield
