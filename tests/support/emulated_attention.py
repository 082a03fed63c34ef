"""The library of the generic attention kernels for a CPU, which several tests run.

`paged_as_cuda` lowers calls of `paged_attention` for a CPU as they are lowered for a
GPU: the FFI handler decodes them, and what it launches runs on the emulator.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jax_kvblock.core import ffi
from jax_kvblock.paged import cuda, dispatch

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/support/emulator/attention.cc",
    "tests/support/emulator/paged_ffi.cc",
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
        + ["-isystem", jax.ffi.include_dir()]
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


@pytest.fixture
def paged_as_cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).EmulatedPagedAttention)
    jax.ffi.register_ffi_target("kvblock_paged_attention", handler, platform="cpu")
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *call: choose(*call[:2], "cuda"))
    monkeypatch.setattr(cuda, "unserved_by_gpu", lambda *_: [])
    monkeypatch.setattr(ffi, "require_cuda_build", lambda: None)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()
