"""Loads the native module, registers its FFI targets, and says how it was built."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax


def _missing(package: Path, path: list[str]) -> str | None:
    """What to do where the package's folder holds no native module; None if it does.

    The source folder lies beside a pyproject.toml, an installed package does not.
    """

    def built(folder: Path) -> bool:
        return any(folder.glob("_native.*so")) or any(folder.glob("_native.*pyd"))

    if built(package):
        return None
    said = f"jax_kvblock's native module is missing from {package}"
    if not (package.parent / "pyproject.toml").exists():
        return (
            f"{said}: the installation is broken. Install the package again, in its "
            "source folder: `pip install -v --force-reinstall --no-deps .`"
        )
    said += ", the source folder"
    elsewhere = (Path(entry) / package.name for entry in path)
    installed = next((folder for folder in elsewhere if built(folder)), None)
    if installed is None:
        return f"{said}. Install the package: `pip install -v {package.parent}`"
    return (
        f"{said}, which comes before the installed package in {installed}. Run Python "
        "from another folder or as `python -P`, like `python -P -m jax_kvblock`; the "
        "command `jax-kvblock` works anywhere"
    )


try:
    from jax_kvblock import _native
except ImportError as error:
    if message := _missing(Path(__file__).parents[1], sys.path):
        raise ImportError(message) from None
    raise ImportError(
        f"jax_kvblock's native module does not load: {error}. It was built for another "
        "Python or another machine; build it again: `pip install -v --force-reinstall "
        "--no-deps .` in its source folder"
    ) from error

BUILD: dict[str, Any] = _native.build_info()
attention_workspace = _native.attention_workspace
paged_attention_workspace = _native.paged_attention_workspace

REBUILD = (
    "this build of jax_kvblock has no CUDA kernels. Rebuild it where nvcc (CUDA 12.1 "
    "or newer) is on the PATH: `KVBLOCK_CUDA=ON pip install --force-reinstall .`; or "
    "pass implementation='xla' where the function takes it"
)


def register_targets() -> None:
    """Registers every handler with XLA. Importing the package does."""
    for name, registration in _native.state_types().items():
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")  # type: ignore[arg-type]
    for platform, handlers in _native.handlers().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform, api_version=1)


# At import, not at the first lowering: a program that was exported elsewhere is never
# lowered here.
register_targets()


def platform_of(device: jax.Device) -> str:
    """What programs for a device are lowered for: "cpu", "cuda", "rocm", …

    JAX calls GPUs of NVIDIA and of AMD "gpu"; their clients' versions tell them apart.
    """
    if device.platform not in ("gpu", "cuda", "rocm"):
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def default_device() -> jax.Device:
    """Where arrays go that nothing else says a place for: one of this process's."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def on_device(device: jax.Device | None) -> AbstractContextManager[Any]:
    """Makes it the default device; None leaves the one that a caller has set, which
    `jax.default_device(None)` would undo."""
    return nullcontext() if device is None else jax.default_device(device)


def default_platform() -> str:
    """What programs for the default device are lowered for."""
    backend = jax.default_backend()
    return platform_of(jax.devices()[0]) if backend == "gpu" else backend


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
