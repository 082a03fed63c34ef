"""The CUDA kernels of lists of tiles: what they serve, how their launchers are called.

Both describe a call to an FFI handler in `cpp/ops/select/select_ffi.cc`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi

KEEP, LISTS = "kvblock_keep", "kvblock_lists"
MOST_COLUMNS = 16384  # KVBLOCK_MOST_COLUMNS: two million keys in tiles of 128


def serves(shape: tuple[int, ...], platform: str | None) -> bool:
    """Whether the kernels serve a map `[..., C]`, lowered for a platform."""
    if platform != "cuda" or 0 in shape or shape[-1] > MOST_COLUMNS:
        return False
    if not ffi.BUILD["cuda"] and ffi.gpu_present():
        return False
    capabilities = ffi.gpu_capabilities()
    return not capabilities or min(capabilities) >= (8, 0)


def keep(scores: Any, states: Any, limits: Any, *, tau: float) -> list[Any]:
    """`plain.keep` by the kernel."""
    rows, columns = limits.size, scores.shape[-1]
    results = [jax.ShapeDtypeStruct((rows, columns), jnp.bool_)]
    if tau:
        results.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    launch = jax.ffi.ffi_call(KEEP, results)
    flat = [x.reshape(rows, columns) for x in (scores, states)]
    kept, *held = launch(*flat, limits.reshape(rows), tau=np.float32(tau))
    return [kept.reshape(scores.shape), *(x.reshape(limits.shape) for x in held)]


def lists(kept: Any, *, width: int) -> list[Any]:
    """`plain.lists` by the kernel."""
    *leading, columns = kept.shape
    flat = kept.reshape(-1, columns)
    shapes = ((len(flat), width), (len(flat),))
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    indices, counts = jax.ffi.ffi_call(LISTS, results)(flat)
    return [indices.reshape(*leading, width), counts.reshape(leading)]
