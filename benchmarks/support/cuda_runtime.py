"""The CUDA runtime without a Python package: just the calls that ceilings need.

`runtime()` is a ctypes view of the libcudart that jax brought along; where that is not
found, CuPy's `cupy.cuda.runtime`, whose names this one follows.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from pathlib import Path
from typing import Any

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


class Cudart:
    """A handful of CUDA runtime calls; each raises when CUDA returns an error."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        self.path = path
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            text = self._library.cudaGetErrorString(status).decode()
            raise RuntimeError(f"{name}: {text}")

    def _new(self, name: str, *args: Any) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *args)
        return made.value or 0

    def malloc(self, size: int) -> int:
        return self._new("cudaMalloc", ctypes.c_size_t(size))

    def free(self, pointer: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._new("cudaHostAlloc", ctypes.c_size_t(size), ctypes.c_uint(flags))

    def freeHost(self, pointer: int) -> None:
        self._call("cudaFreeHost", ctypes.c_void_p(pointer))

    def memcpyAsync(
        self, dst: int, src: int, size: int, kind: int, stream: int
    ) -> None:
        self._call(
            "cudaMemcpyAsync", ctypes.c_void_p(dst), ctypes.c_void_p(src),
            ctypes.c_size_t(size), ctypes.c_int(kind), ctypes.c_void_p(stream),
        )  # fmt: skip

    def streamCreate(self) -> int:
        return self._new("cudaStreamCreate")

    def streamDestroy(self, stream: int) -> None:
        self._call("cudaStreamDestroy", ctypes.c_void_p(stream))

    def eventCreate(self) -> int:
        return self._new("cudaEventCreate")

    def eventDestroy(self, event: int) -> None:
        self._call("cudaEventDestroy", ctypes.c_void_p(event))

    def eventRecord(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def eventSynchronize(self, event: int) -> None:
        self._call("cudaEventSynchronize", ctypes.c_void_p(event))

    def eventElapsedTime(self, start: int, end: int) -> float:
        """Milliseconds between two events."""
        elapsed = ctypes.c_float()
        self._call(
            "cudaEventElapsedTime", ctypes.byref(elapsed),
            ctypes.c_void_p(start), ctypes.c_void_p(end),
        )  # fmt: skip
        return elapsed.value

    def deviceSynchronize(self) -> None:
        self._call("cudaDeviceSynchronize")

    def runtimeGetVersion(self) -> int:
        return self._version("cudaRuntimeGetVersion")

    def driverGetVersion(self) -> int:
        return self._version("cudaDriverGetVersion")

    def _version(self, name: str) -> int:
        version = ctypes.c_int()
        self._call(name, ctypes.byref(version))
        return version.value


def _candidates() -> list[str]:
    """Where libcudart may be, the copy that jax loads first."""
    found: list[str] = []
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations if nvidia else None) or ():
        found += map(str, sorted(Path(folder).glob("**/libcudart.so*"), reverse=True))
    found += ["libcudart.so.13", "libcudart.so.12"]
    for pattern in ("lib64/libcudart.so*", "targets/*/lib/libcudart.so*"):
        found += map(str, sorted(Path("/usr/local/cuda").glob(pattern), reverse=True))
    system = ctypes.util.find_library("cudart")
    return [*found, system] if system else found


@functools.cache
def runtime() -> Any:
    """A `Cudart`, or `cupy.cuda.runtime`, or None when neither is here."""
    for path in _candidates():
        try:
            made = Cudart(ctypes.CDLL(path), path)
            made.runtimeGetVersion()
            return made
        except (OSError, AttributeError, RuntimeError):
            continue
    try:
        from cupy.cuda import runtime as cupy_runtime
    except ImportError:
        return None
    return cupy_runtime


def synchronize() -> None:
    """Waits for all work on the GPU, whoever launched it."""
    if (cuda := runtime()) is not None:
        cuda.deviceSynchronize()
        return
    import torch

    torch.cuda.synchronize()


def versions() -> dict[str, str]:
    """CUDA's runtime and driver interface, and the driver's own version."""
    found = {}
    if (cuda := runtime()) is not None:
        for name, number in (
            ("cuda_runtime", cuda.runtimeGetVersion()),
            ("cuda_driver", cuda.driverGetVersion()),
        ):
            found[name] = f"{number // 1000}.{number % 1000 // 10}"
    kernel = Path("/proc/driver/nvidia/version")
    if kernel.exists():
        words = kernel.read_text().split()
        found["nvidia_driver"] = next((w for w in words if w.count(".") >= 1), "")
    return found
