"""Which devices there are, and how much memory each has."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.extend import backend

from jax_kvblock.core import ffi
from jax_kvblock.core.checks import check_positive, shown


def detect_available_devices() -> dict[str, list[jax.Device]]:
    """This process's devices by platform, all that JAX has, the default one's first.

    Platforms are what programs are lowered for: "cuda" for GPUs of NVIDIA, "rocm" for
    AMD's (JAX calls both "gpu"), "cpu", "tpu", and what plugins call theirs. Those that
    `JAX_PLATFORMS` leaves out are not there. `capabilities(device)` says which
    implementation serves each op on one.

    Returns:
      Lists that are not empty, in JAX's order.

    Example:
      >>> detect_available_devices()
      {'cpu': [CpuDevice(id=0)]}
    """
    found: dict[str, list[jax.Device]] = {}
    others = [
        device
        for name in backend.backends()
        for device in jax.local_devices(backend=name)
    ]
    for device in dict.fromkeys([*jax.local_devices(), *others]):
        found.setdefault(ffi.platform_of(device), []).append(device)
    return found


def memory_limit(where: str, device: jax.Device) -> int:
    """The bytes that programs may take of a device's memory.

    What the platform's allocator may have, everything in it included; on a CPU the
    memory of the host, or the part of it that this process's control group may have,
    shared out evenly to JAX's devices on it.

    Raises:
      ValueError: the platform does not tell.
    """
    try:
        told = (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, NotImplementedError, RuntimeError):
        told = None  # a device that is described alone, to compile for
    if told:
        return int(told)
    host = _host_memory() if device.platform == "cpu" else None
    if host is None:
        raise ValueError(
            f"{where}: limit must be given for {device}, which does not tell how much "
            "memory it has, got None; pass bytes, limit=16 * 2**30 say"
        )
    return host // len(jax.local_devices(backend="cpu"))


def check_limit(where: str, limit: object, devices: list[jax.Device]) -> int:
    """The limit of each device; the least of what they tell unless given."""
    if limit is None:
        return min(memory_limit(where, device) for device in devices)
    if isinstance(limit, float):
        raise TypeError(
            f"{where}: limit must be a whole number of bytes, got {shown(limit)}; "
            "round it with int()"
        )
    return check_positive(where, limit=limit)[0]


# Of version 2 of control groups, and of version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def _host_memory(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of the host's memory that this process may have; None if nothing says."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return None
    for name in _LIMITS:
        try:
            said = (groups / name).read_text().strip()
        except OSError:
            continue
        if said.isdigit():  # "max" is no limit
            found.append(int(said))
    return min(found)
