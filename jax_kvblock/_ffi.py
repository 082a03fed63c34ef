"""Loads the native module, registers its FFI targets, and says how it was built."""

from __future__ import annotations

from typing import Any

import jax

try:
    from jax_kvblock import _native
except ImportError as error:  # a source tree without a build, or a broken install
    raise ImportError(
        "jax_kvblock's native module is missing or does not load. Install the package "
        "with `pip install .` from its source folder, and import it from elsewhere or "
        f"from that install. ({error})"
    ) from error

BUILD: dict[str, Any] = _native.build_info()

REBUILD = (
    "this build of jax_kvblock has no CUDA kernels. Rebuild it where nvcc (CUDA 12.1 "
    "or newer) is on the PATH: `KVBLOCK_CUDA=ON pip install --force-reinstall .`; or "
    "pass implementation='xla' where the function takes it"
)


def register_targets() -> None:
    """Registers every handler with XLA. Importing the package does."""
    for platform, handlers in _native.handlers().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform, api_version=1)


# At import, not at the first lowering: a program that was exported elsewhere is never
# lowered here.
register_targets()


def gpu_present() -> bool:
    """Whether this process has an NVIDIA GPU that jax can use."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def gpu_capabilities() -> frozenset[tuple[int, int]]:
    """The compute capabilities of this process's NVIDIA GPUs; empty without any."""
    if not gpu_present():
        return frozenset()
    found = (d.compute_capability for d in jax.local_devices(backend="cuda"))
    return frozenset((int(x), int(y)) for x, y in (name.split(".") for name in found))


def require_cuda_build() -> None:
    """Raises when a GPU is here and the build cannot use it.

    Exporting for CUDA from a machine without a GPU stays possible.
    """
    if not BUILD["cuda"] and gpu_present():
        raise RuntimeError(f"jax_kvblock: an NVIDIA GPU is present, but {REBUILD}.")
