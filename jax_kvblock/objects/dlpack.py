"""DLPack exports of parts of jax arrays.

The rule of the house: an export holds the pool's buffer, so XLA will not give that
memory away, and it holds a reference to the block, so the pool will not hand it to
somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_kvblock import _native

CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType
CPU_DEVICE = (CPU, 0)


def device_of(array: jax.Array) -> tuple[int, int]:
    """The DLPack device of a single-device jax array: (type, id)."""
    devices = array.devices()
    if len(devices) != 1:
        raise BufferError(
            f"DLPack: the pool is spread over {len(devices)} devices; export inside "
            "each process or device from a pool that lies on one device"
        )
    (device,) = devices
    if device.platform == "cpu":
        return CPU_DEVICE
    if device.platform not in ("gpu", "cuda"):
        raise BufferError(f"DLPack: no device type for platform {device.platform!r}")
    index = device.local_hardware_id
    kind = CUDA_HOST if array.sharding.memory_kind == "pinned_host" else CUDA
    return kind, 0 if index is None else int(index)


def export(
    array: jax.Array,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    device: tuple[int, int],
    *,
    lease: Any,
    stream: Any,
    max_version: tuple[int, int] | None,
    copied: bool = False,
) -> Any:
    """A capsule over part of `array`, which stays alive until the capsule's tensor
    dies.

    Args:
      array: a jax array on one device.
      offset, shape, strides: the part, in elements.
      device: the array's DLPack device, as `device_of` tells it.
      lease: any object to keep alive as long.
      stream: as in `__dlpack__`: the consumer's stream, None, or -1 for no waiting.
      max_version: the newest protocol version that the consumer reads.
      copied: whether the array is a copy made for this export.
    """
    kind, index = device
    if kind == CUDA and stream not in (None, -1):
        owner = array.__dlpack__(stream=stream)  # type: ignore[call-arg]
    else:
        if stream != -1:
            array.block_until_ready()
        owner = array.__dlpack__()
    versioned = max_version is not None and max_version[0] >= 1
    return _native.export_view(
        owner, lease, offset, shape, strides, kind, index, versioned, copied
    )
