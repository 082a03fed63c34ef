"""C++ that tests compile: small programs, and libraries for all workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import budgets
import jax
import pytest

PROJECT = Path(__file__).parents[2]
ROOT = PROJECT / "cpp"


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert found, "the emulator needs a C++ compiler; set CXX to one"
    return found


def folder_of(factory: pytest.TempPathFactory) -> Path:
    """Where all workers find what one of them built."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def built_once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]
) -> Path:
    """A file that `build` makes where it is told, by whichever worker comes first."""
    folder = folder_of(factory)
    made = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = folder / f"{name}.part"
            with budgets.building():
                build(part)
            part.rename(made)
    return made


def build_emulated(library: Path, *given: str) -> None:
    """A library of sources that see the emulator in CUDA's place; given: paths below
    the project, and flags."""
    command = [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared"]
    command += ["-Wno-unknown-pragmas", "-fno-omit-frame-pointer"]  # fibers.h, CallPath
    # A device, its memory and what is counted are this library's, whatever others are
    # loaded beside it. Only GCC shares them, and only it knows the flag.
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True)
    if "clang" not in version.stdout:
        command += ["-fno-gnu-unique"]
    folders = ("tests/support/emulator", "cpp", "cpp/include")
    command += [f"-I{PROJECT / folder}" for folder in folders]
    command += ["-isystem", jax.ffi.include_dir()]
    command += [x for x in given if x.startswith("-")]
    sources = [PROJECT / x for x in given if not x.startswith("-")]
    objects = compile_each(command, sources, library)
    link = [*command, *objects, "-ldl", "-o", str(library)]
    subprocess.run(link, check=True)


def emulated_library(
    factory: pytest.TempPathFactory, op: str, *given: str
) -> ctypes.CDLL:
    """An op's kernels on the emulator, built once for all workers; given: as above."""
    name = f"libkvblock_{op}_emulated.so"
    made = built_once(factory, name, lambda library: build_emulated(library, *given))
    return ctypes.CDLL(str(made))


def serve_on_cpu(library: ctypes.CDLL, *targets: str) -> None:
    """Registers handlers of an emulated library: `EmulatedCast` for kvblock_cast."""
    for target in targets:
        name = "".join(word.title() for word in target.split("_"))
        handler = jax.ffi.pycapsule(getattr(library, f"Emulated{name}"))
        jax.ffi.register_ffi_target(f"kvblock_{target}", handler, platform="cpu")


@contextlib.contextmanager
def lowered_anew() -> Iterator[None]:
    """Calls in it run on a CPU, and none is lowered as before it, or after it as in
    it."""
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()


def compile_each(command: list[str], sources: list[Path], library: Path) -> list[str]:
    """Object files beside a library, compiled side by side."""
    folder = library.with_name(f"{library.name}.objects")
    folder.mkdir(exist_ok=True)

    def compile_one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        subprocess.run([*command, "-c", str(source), "-o", made], check=True)
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def run_cpp(folder: Path, program: str, *sources: str) -> str:
    """What a program says that is compiled with these sources of the library."""
    file, binary = folder / "program.cc", folder / "program"
    file.write_text(program)
    paths = [str(file), *(str(ROOT / source) for source in sources)]
    include = [f"-I{ROOT}", f"-I{ROOT / 'include'}"]
    subprocess.run(
        [compiler(), "-std=c++17", *include, *paths, "-o", binary], check=True
    )
    done = subprocess.run([binary], check=True, capture_output=True, text=True)
    return done.stdout
