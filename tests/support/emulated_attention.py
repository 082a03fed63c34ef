"""The library of the generic attention kernels for a CPU, which several tests run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/support/emulator/attention.cc",
    *(
        f"cpp/host/{name}.cc"
        for name in (
            "attention_check",
            "attention_workspace",
            "message",
            "paged_check",
        )
    ),
)


def build(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the emulator needs a C++ compiler; set CXX to one"
    folders = ("tests/support/emulator", "cpp", "cpp/include")
    made = library.with_suffix(".made")
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
        + ["-DKVBLOCK_MOST_FEW_QUERIES=1000"]  # all calls, for the kernels' sake
        + [f"-I{ROOT / folder}" for folder in folders]
        + [str(ROOT / source) for source in SOURCES]
        + ["-o", str(made)],
        check=True,
    )
    made.rename(library)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once, whoever of the workers comes first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    made = folder / "libkvblock_emulated.so"
    with (folder / "emulator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            build(made)
    return made
