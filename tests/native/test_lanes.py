"""Launches side by side, in streams that begin and end with the caller's."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from cpp_programs import PROJECT, built_once, compiler


def build(library: Path) -> None:
    folders = ("tests/support/emulator/streams", "cpp")
    command = [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall"]
    command += [f"-I{PROJECT / folder}" for folder in folders]
    source = str(PROJECT / "tests/support/emulator/lanes.cc")
    subprocess.run([*command, source, "-lpthread", "-o", str(library)], check=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built_once(tmp_path_factory, "liblanes.so", build)))


@pytest.mark.cpu
@pytest.mark.parametrize("slow", [0, 1])
def test_lanes_wait_for_the_caller_and_the_caller_for_both(library, slow):
    rounds = 5
    library.emulator_alive.restype = ctypes.c_int64
    before = library.emulator_alive()  # of other tests of this process
    found = (ctypes.c_int * rounds)()
    assert library.emulator_lanes(slow, rounds, found) == 0
    assert list(found) == [7] * rounds
    assert library.emulator_alive() == before  # a thread's streams end with it
