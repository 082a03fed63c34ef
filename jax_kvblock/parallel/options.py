"""How XLA should compile programs in which devices talk to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jaxlib

_WHOLE = 1 << 40  # bytes; more than any collective has
_SINCE = (0, 11, 2)


def compiler_options(devices: Iterable[jax.Device] | None = None) -> dict[str, Any]:
    """Options of `jax.jit` under which what travels hides best under what is computed.

    Without them everything is right, and most of it hides.

    - Collectives that begin together are one: XLA hides but one at a time.
    - `ppermute` among devices of one process is done by the GPUs' copy engines, with
      jaxlib 0.11.2 or newer. NCCL's kernels need multiprocessors, and attention kernels
      have taken all of them.

    Args:
      devices: those of the mesh; all there are unless given.

    Returns:
      A dict; empty where the devices are no NVIDIA GPUs.

    Example:
      >>> step = jax.jit(train_step, compiler_options=compiler_options())
    """
    devices = jax.devices() if devices is None else list(devices)
    if any(d.platform not in ("gpu", "cuda") for d in devices):
        return {}
    found: dict[str, Any] = {
        f"xla_gpu_{kind}_combine_threshold_bytes": _WHOLE
        for kind in ("collective_permute", "all_gather", "reduce_scatter")
    }
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])
    if version >= _SINCE and len({d.process_index for d in devices}) == 1:
        found["xla_gpu_collective_permute_mode"] = "COLLECTIVES_PEER_MEMORY"
    return found
