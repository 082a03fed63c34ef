"""Streams of copies on the emulator: compiled, and put in CUDA's place."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_programs import PROJECT, built_once, compiler

from jax_kvblock.cache.copy_lines import CudaLine, typed

SOURCES = (
    "tests/support/emulator/copy_stream.cc",
    "cpp/host/copy_stream_check.cc",
    "cpp/host/message.cc",
)
PAGEABLE, DEVICE = 0, 2  # cudaMemoryType


def build(library: Path) -> None:
    folders = ("tests/support/emulator/streams", "cpp", "cpp/include")
    command = [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall"]
    command += [f"-I{PROJECT / folder}" for folder in folders]
    command += [str(PROJECT / source) for source in SOURCES]
    subprocess.run([*command, "-lpthread", "-o", str(library)], check=True)


class Streams:
    """The library, and what tests do with its device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.native = typed(library)
        for name in ("copies", "alive"):
            getattr(library, f"emulator_{name}").restype = ctypes.c_int64

    def line(self, device: int = 0) -> CudaLine:
        return CudaLine(self.native, device)

    def hold(self) -> None:
        """No copy goes on from now on."""
        self.native.emulator_hold(1)

    def go_on(self) -> None:
        self.native.emulator_hold(0)

    @property
    def copies(self) -> int:
        """Calls of cudaMemcpy…Async so far."""
        return int(self.native.emulator_copies())

    @property
    def alive(self) -> int:
        """Streams and events that are not destroyed."""
        return int(self.native.emulator_alive())

    def fail_at(self, number: int) -> None:
        self.native.emulator_fail_at(ctypes.c_int64(number))

    def place(self, address: int, nbytes: int, kind: int, device: int = 0) -> None:
        """Says where memory lies."""
        size = ctypes.c_int64(nbytes)
        self.native.emulator_memory(ctypes.c_void_p(address), size, kind, device)


@pytest.fixture(scope="session")
def streams_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built_once(tmp_path_factory, "libstreams.so", build)))


@pytest.fixture
def streams(streams_library: ctypes.CDLL) -> Iterator[Streams]:
    yield (given := Streams(streams_library))
    given.go_on()
    given.fail_at(0)
    streams_library.emulator_forget_memory()
