"""The kernel of casts on the emulator: compiled, and called by C or by XLA."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from cpp_programs import built_once, compiler

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/support/emulator/cast.cc",
    "tests/support/emulator/cast_ffi.cc",
    "cpp/host/cast_check.cc",
    "cpp/host/message.cc",
)


def build(library: Path) -> None:
    folders = ("tests/support/emulator", "cpp", "cpp/include")
    subprocess.run(
        [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
        + [f"-I{ROOT / folder}" for folder in folders]
        + ["-isystem", jax.ffi.include_dir()]
        + [str(ROOT / source) for source in SOURCES]
        + ["-o", str(library)],
        check=True,
    )


@pytest.fixture(scope="session")
def emulated_cast(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = built_once(tmp_path_factory, "libkvblock_cast_emulated.so", build)
    loaded = ctypes.CDLL(str(made))
    handler = jax.ffi.pycapsule(loaded.EmulatedCast)
    jax.ffi.register_ffi_target("kvblock_cast", handler, platform="cpu")
    return loaded


@pytest.fixture
def cast_as_cuda(
    emulated_cast: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernel, on CPUs too."""
    from jax_kvblock.training import cuda

    check = cuda.check
    monkeypatch.setattr(cuda, "check", lambda *call: check(*call[:-1], "cuda"))
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()
