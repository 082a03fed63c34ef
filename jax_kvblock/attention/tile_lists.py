"""The kernel that makes lists of tiles out of a map: what it serves, how it is called.

`list_tiles` describes a call to an FFI handler in `cpp/ops/select/select_ffi.cc`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LIST_TILES = "kvblock_list_tiles"
MOST_COLUMNS = 16384  # KVBLOCK_MOST_COLUMNS: two million keys in tiles of 128


def serves(kept: Any) -> bool:
    """Whether the kernel serves a map of this shape, where CUDA kernels run at all."""
    return 0 not in kept.shape and kept.shape[-1] <= MOST_COLUMNS


def list_tiles(kept: Any, *, width: int) -> list[jax.Array]:
    """Which columns of a map each row has, in order, by the kernel.

    Args:
      kept: bool `[..., C]`, a map that it serves.
      width: entries of a list, at least 1.

    Returns:
      Indices int32 `[..., width]`, −1 behind those of a row, and counts `[...]`.
    """
    *leading, columns = kept.shape
    flat = kept.reshape(-1, columns)
    shapes = ((flat.shape[0], width), flat.shape[:1])
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    indices, counts = jax.ffi.ffi_call(LIST_TILES, results)(flat)
    return [indices.reshape(*leading, width), counts.reshape(leading)]
