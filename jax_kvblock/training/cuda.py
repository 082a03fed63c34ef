"""The CUDA kernel of casts to 8 bits: what it serves, and the call of its launcher.

`narrow` describes the call to the FFI handler in `cpp/ops/cast/cast_ffi.cc`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core import ffi
from jax_kvblock.training.config import FP8Format

TARGET = "kvblock_cast"
TILE = 128  # KVBLOCK_CAST_TILE: rows, and columns, whose largest size is one number


def check(where: str, x: Any, platform: str | None) -> None:
    """Whether the kernel serves a matrix that is lowered for a platform.

    Raises:
      ValueError: it does not; the message says who does.
    """
    if platform != "cuda":
        raise ValueError(
            f"{where}: implementation='cuda' needs an NVIDIA GPU, and this is lowered "
            f"for {platform or 'another platform'}; use implementation='xla' or None"
        )
    if any(size % 16 for size in x.shape):
        raise ValueError(
            f"{where}: implementation='cuda' serves matrices whose rows and columns "
            f"are multiples of 16, got {list(x.shape)}; use implementation='xla' or "
            "None, or pad them"
        )
    ffi.require_cuda_build()


def narrow(x: jax.Array, scale: jax.Array, form: FP8Format) -> list[jax.Array]:
    """Codes, those of the transpose, and the largest size, by the launcher."""
    rows, columns = x.shape
    tiles = (-(-rows // TILE), -(-columns // TILE))
    results = [
        jax.ShapeDtypeStruct((rows, columns), form.dtype),
        jax.ShapeDtypeStruct((columns, rows), form.dtype),
        jax.ShapeDtypeStruct(tiles, jnp.float32),
    ]
    codes, transposed, sizes = jax.ffi.ffi_call(TARGET, results)(x, scale)
    return [codes, transposed, jnp.max(sizes, initial=0)]
