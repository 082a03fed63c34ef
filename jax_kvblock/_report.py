"""The capability report: versions, build, devices, and who serves each op here."""

from __future__ import annotations

import platform
from importlib import metadata

import jax

from jax_kvblock.core import ffi
from jax_kvblock.hardware.served import capabilities


def report() -> str:
    """The whole report as text."""
    build = ffi.BUILD
    cuda = (
        f"CUDA {build['cuda_version']} for {build['cuda_architectures']}"
        if build["cuda"]
        else "without CUDA"
    )
    lines = [
        f"jax_kvblock {build['version']}",
        f"  python {platform.python_version()}, jax {jax.__version__}, "
        f"jaxlib {metadata.version('jaxlib')}, numpy {metadata.version('numpy')}",
        f"  built with {build['compiler']}, {cuda}",
        "devices",
        *(f"  {d} ({d.device_kind}), memories: {_memories(d)}" for d in jax.devices()),
        "ops on the default device",
    ]
    rows = capabilities()
    width = max(len(row.op) for row in rows)
    middle = max(len(row.implementation) for row in rows)
    lines += [
        f"  {row.op:<{width}}  {row.implementation:<{middle}}  {row.why}"
        for row in rows
    ]
    return "\n".join(lines)


def _memories(device: jax.Device) -> str:
    return ", ".join(memory.kind for memory in device.addressable_memories())
