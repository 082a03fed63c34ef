"""Devices, what serves each op on them, and how large a batch fits in their memory.

It imports `core`, `blocks`, `append`, `attention`, `fp8` and `paged`.
"""

from jax_kvblock.hardware.devices import detect_available_devices
from jax_kvblock.hardware.layer import HardwareAbstractionLayer
from jax_kvblock.hardware.programs import attention_in
from jax_kvblock.hardware.search import BatchSize
from jax_kvblock.hardware.served import Served, capabilities
from jax_kvblock.hardware.usage import MemoryUsage

__all__ = [
    "BatchSize",
    "HardwareAbstractionLayer",
    "MemoryUsage",
    "Served",
    "attention_in",
    "capabilities",
    "detect_available_devices",
]
