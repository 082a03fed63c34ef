"""Kernels of one's own where there is no GPU: a driver that runs them as C++.

`driver` lowers kernel calls for a CPU as they are lowered for a GPU: the FFI handlers
decode them, and the launcher loads and launches through a driver that is the
emulator's. The code that is loaded is what NVRTC made; what runs in its place is the
same source, compiled for the emulator (`emulator/own_kernels.h`).
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from cpp_programs import build_emulated, built_once

from jax_kvblock.kernels import Kernel, cuda, from_cuda, kernel_call

SOURCE = """
#include <kvblock/append_buffer.cuh>

extern "C" __global__ void scale(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}

extern "C" __global__ void scale_members(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, at = blockIdx.z * n + i;
  if (i < n) y[at] = a * x[at];
}

extern "C" __global__ void shift(float* x, double a, long long n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += static_cast<float>(a);
}

extern "C" __global__ void keep_positive(const float* x, float* kept, unsigned* count,
                                         int n, unsigned capacity) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x[i] > 0.0f) kvblock::append(kept, count, capacity, x[i]);
}

struct alignas(64) Map {
  unsigned long long words[16];
};
extern "C" __global__ void show_map(const __grid_constant__ Map map,
                                    unsigned long long* words) {
  if (threadIdx.x < 16) words[threadIdx.x] = map.words[threadIdx.x];
}

extern "C" __global__ void nothing(float* x) {}
"""


# What the emulator has in place of examples/instructions.cuh.
INSTRUCTIONS = """
#define KVBLOCK_EMULATOR
#include "device/cp_async.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
inline void Mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  kvblock::Mma16x8x16<__nv_bfloat16>(c, a, b0, b1);
}
inline void Copy16(void* to, const void* from) { kvblock::CopyAsync<16>(to, from); }
inline void EndCopies() { kvblock::CopyAsyncCommit(); }
template <int kLast>
void WaitForCopies() {
  kvblock::CopyAsyncWait<kLast>();
}
"""
SHARED = "#define shared kvblock::DynamicShared()"  # behind all that is included
NAMES = [n for n in re.findall(r"__global__ void (\w+)", SOURCE) if n != "nothing"]
BLOCK = 64  # threads
DRIVER, HANDLERS = "libdriver.so", "libkernel_call.so"


@functools.cache
def kernel(name: str) -> Kernel:
    """One of `SOURCE`."""
    return from_cuda(SOURCE, name)


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def scale(x: Any, a: Any, **options: Any) -> Any:
    """a x, by the kernel of this name."""
    options = {"block": BLOCK, "grid": lambda x: blocks(x.size)} | options
    return kernel_call(kernel("scale"), x, out=x, scalars=(a, x.size), **options)


def _build_driver(library: Path) -> None:
    build_emulated(library, "tests/support/emulator/driver.cc")


def _build_handlers(driver: Path, library: Path) -> None:
    build_emulated(
        library,
        "tests/support/emulator/kernel_call_ffi.cc",
        "cpp/host/message.cc",
        "cpp/ops/kernel_call/kernel_call.cc",
        "cpp/ops/kernel_call/driver.cc",
        f'-DKVBLOCK_DRIVER_LIBRARY="{driver}"',
    )


def emulate(
    driver: ctypes.CDLL,
    factory: pytest.TempPathFactory,
    name: str,
    source: str,
    *kernels: Kernel,
    prelude: str = "",
) -> None:
    """Has the driver run these kernels of a CUDA source.

    name: of the library that is made, once for all workers. prelude: C++ in front of
    the source, for what the emulator has instead of instructions.
    """

    def build(library: Path) -> None:
        text = f'#include "own_kernels.h"\n{prelude}\n{source}\n'
        for i, kernel in enumerate(kernels):
            expression = kernel.shown.split(" of ")[0]
            text += (
                f'extern "C" void run_{i}(const emulator::OwnLaunch* launch) '
                f"{{ emulator::RunOwn({expression}, launch); }}\n"
            )
        file = library.with_suffix(".cc")
        file.write_text(text)
        build_emulated(library, "-ffp-contract=off", str(file))

    made = built_once(factory, f"lib{name}.so", build)
    add_kernels(driver, made, [kernel.name for kernel in kernels])


def add_kernels(driver: ctypes.CDLL, library: Path, names: Sequence[str]) -> None:
    """Tells the driver where the kernels are that `emulate` built."""
    loaded = ctypes.CDLL(str(library))
    for i, name in enumerate(names):
        run = ctypes.cast(getattr(loaded, f"run_{i}"), ctypes.c_void_p)
        driver.emulator_add_kernel(name.encode(), run)


@pytest.fixture(scope="session")
def kernel_handlers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The driver, for questions; the handlers are registered."""
    # Found by its path: where there is a GPU, its own driver is loaded, too.
    own_driver = built_once(tmp_path_factory, DRIVER, _build_driver)
    build = functools.partial(_build_handlers, own_driver)
    built_once(tmp_path_factory, HANDLERS, build)
    driver = register(own_driver.parent)
    emulate(driver, tmp_path_factory, "sources", SOURCE, *map(kernel, NAMES))
    return driver


def register(folder: Path) -> ctypes.CDLL:
    """Registers the handlers that were built there; the driver that stands in."""
    driver = ctypes.CDLL(str(folder / DRIVER))
    handlers = ctypes.CDLL(str(folder / HANDLERS))
    for ask in ("emulator_kernel_state_id", "emulator_kernel_state_info"):
        getattr(handlers, ask).restype = ctypes.c_void_p
    capsule = jax.ffi.pycapsule
    registration = {
        "type_id": _pointer(handlers.emulator_kernel_state_id()),
        "type_info": _pointer(handlers.emulator_kernel_state_info()),
    }
    jax.ffi.register_ffi_type("kvblock_kernel_call", registration, platform="cpu")
    for name, execute in (
        (cuda.TARGET, handlers.KvblockKernelExecute),
        (cuda.TARGET_THAT_WAITS, handlers.KvblockKernelExecuteAndWait),
    ):
        stages = {
            "instantiate": capsule(handlers.KvblockKernelInstantiate),
            "prepare": capsule(handlers.KvblockKernelPrepare),
            "execute": capsule(execute),
        }
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    return driver


def _pointer(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)


@pytest.fixture
def driver(
    kernel_handlers: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ctypes.CDLL]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    monkeypatch.setattr(cuda, "runs_on", lambda platform: True)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield kernel_handlers
    jax.clear_caches()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Kernels' fallbacks, also where a GPU is."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(
    params=[
        pytest.param("fallback", marks=pytest.mark.host),
        pytest.param("emulator", marks=pytest.mark.cpu),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def everywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test by fallbacks, by the driver that stands in, and by a GPU's."""
    if request.param == "emulator":
        request.getfixturevalue("driver")
    if request.param == "fallback":
        with jax.default_device(jax.devices("cpu")[0]):
            yield request.param
    else:
        yield request.param
