"""How XLA should compile programs in which devices talk to each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jax_kvblock.core.checks import show

_WHOLE = 1 << 40  # bytes; more than any collective has
# Where copy engines send, sends to several devices hide under one kernel.
_BESIDE = "xla_gpu_experimental_parallel_collective_overlap_limit"
_MOST_AT_ONCE = 16


def compiler_options(
    devices: Mesh | Iterable[jax.Device] | None = None, *, combine_gathers: bool = False
) -> dict[str, Any]:
    """Options of `jax.jit` under which what travels hides best under what is computed.

    Without them everything is right, and most of it hides.

    - Permutations that begin together are one: XLA hides but one collective at a time.
    - `ppermute` among devices of one process is done by the GPUs' copy engines, with
      jaxlib 0.11.2 or newer. NCCL's kernels need multiprocessors, and attention kernels
      have taken all of them. Up to 16 collectives may then hide at a time.

    Args:
      devices: a mesh, or its devices; all there are unless given.
      combine_gathers: also make one of all-gathers, and of reduce-scatters, that could
        begin together. It is for strategy "all_gather", and for programs without other
        gathers: weights that are cut over devices would be gathered all at once.

    Returns:
      A dict; empty where the devices are no NVIDIA GPUs.

    Raises:
      TypeError: devices is neither.

    Example:
      >>> step = jax.jit(train_step, compiler_options=compiler_options())
    """
    devices = _list_of(devices)
    if not _are_gpus(devices):
        return {}
    kinds = ["collective_permute"]
    if combine_gathers:
        kinds += ["all_gather", "reduce_scatter"]
    found: dict[str, Any] = {
        f"xla_gpu_{kind}_combine_threshold_bytes": _WHOLE for kind in kinds
    }
    engines = engine_options(devices)
    if engines:
        found[_BESIDE] = _MOST_AT_ONCE
    return found | engines


def _list_of(devices: Any) -> list[jax.Device]:
    if isinstance(devices, Mesh):
        return list(devices.devices.flat)
    if devices is None:
        return jax.devices()
    found = list(devices) if isinstance(devices, Iterable) else []
    if not found or not all(hasattr(device, "platform") for device in found):
        raise TypeError(
            "compiler_options: devices must be a jax.sharding.Mesh or a sequence of "
            f"devices, got {show(devices)}; pass the mesh, or mesh.devices.flat"
        )
    return found


def engine_options(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Those under which copy engines send, where they can."""
    one_process = len({d.process_index for d in devices}) == 1
    if not (_are_gpus(devices) and one_process and engines_can_send()):
        return {}
    return {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def _are_gpus(devices: Sequence[jax.Device]) -> bool:
    return all(d.platform in ("gpu", "cuda") for d in devices)


def engines_can_send() -> bool:
    """Whether this jaxlib can have copy engines do what `ppermute` sends."""
    version = [int(part) for part in re.findall(r"\d+", jaxlib.__version__)[:3]]
    return version >= [0, 11, 2]
