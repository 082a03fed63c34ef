"""Which devices have tensor cores of 8 bits."""

from __future__ import annotations

import jax

from jax_kvblock.core import ffi

# The first with e4m3 and e5m2 in its tensor cores: Ada.
_FIRST = (8, 9)


def served_by(where: str, device: jax.Device | None = None) -> str:
    """How products of 8 bits run on a device, the default one unless given.

    "tensor cores" on NVIDIA GPUs of compute capability 8.9 and newer; "emulated" on a
    CPU: numbers are rounded to the same 8 bits, and their products added in float32.

    Raises:
      RuntimeError: there is no unit for them, and none is pretended.
    """
    if device is None:
        device = ffi.default_device()
    platform = ffi.platform_of(device)
    if platform == "cpu":
        return "emulated"
    capability = getattr(device, "compute_capability", "")
    known = platform == "cuda" and tuple(map(int, str(capability).split(".")))
    if known and known >= _FIRST:
        return "tensor cores"
    kind = getattr(device, "device_kind", "a device")
    raise RuntimeError(
        f"{where}: products of 8 bits need an NVIDIA GPU of compute capability 8.9 or "
        f"newer, or a CPU, which emulates them; got {kind} ({platform} {capability}); "
        "use bfloat16 products there"
    )
