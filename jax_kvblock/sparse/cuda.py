"""The CUDA kernels that choose tiles: what they serve, how their launchers are called.

Each function describes a call to an FFI handler in `cpp/ops/select/select_ffi.cc`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi

POOL_PIECES = "kvblock_pool_pieces"
KEEP_TILES, LIST_TILES = "kvblock_keep_tiles", "kvblock_list_tiles"
POOLED = ("bfloat16", "float16", "float32")  # dtypes of what is pooled
MOST_COLUMNS = 16384  # KVBLOCK_MOST_COLUMNS: two million keys in tiles of 128


def serves(name: str, x: Any, platform: str | None) -> bool:
    """Whether the kernel of a primitive serves a call, lowered for a platform.

    x: its first operand: rows `[..., length, H, D]` to pool, or of a map `[..., C]`.
    """
    if platform != "cuda" or 0 in x.shape:
        return False
    if name == POOL_PIECES:
        bytes_wide = x.shape[-2] * x.shape[-1] * x.dtype.itemsize
        fits = str(x.dtype) in POOLED and bytes_wide % 16 == 0
    else:
        fits = x.shape[-1] <= MOST_COLUMNS
    if not fits or (not ffi.BUILD["cuda"] and ffi.gpu_present()):
        return False
    capabilities = ffi.gpu_capabilities()
    return not capabilities or min(capabilities) >= (8, 0)


def pool_pieces(
    x: Any, ends: Any, *, side: int, pieces: int, extremes: bool
) -> list[Any]:
    """`plain.pool_pieces` by the kernel."""
    *leading, length, heads, dim = x.shape
    flat = x.reshape(-1, length, heads * dim)
    members = flat.shape[0]  # a symbol, where the batch of an export is one
    shape = (members, pieces, heads * dim)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32)] * (3 if extremes else 1)
    launch = jax.ffi.ffi_call(POOL_PIECES, results)
    made = launch(flat, ends.reshape(members), side=np.int32(side))
    return [y.reshape(*leading, pieces, heads, dim) for y in made]


def keep_tiles(scores: Any, states: Any, limits: Any, *, tau: float) -> list[Any]:
    """`plain.keep_tiles` by the kernel."""
    rows, columns = limits.size, scores.shape[-1]
    results = [jax.ShapeDtypeStruct((rows, columns), jnp.bool_)]
    if tau:
        results.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    launch = jax.ffi.ffi_call(KEEP_TILES, results)
    flat = [x.reshape(rows, columns) for x in (scores, states)]
    kept, *held = launch(*flat, limits.reshape(rows), tau=np.float32(tau))
    return [kept.reshape(scores.shape), *(x.reshape(limits.shape) for x in held)]


def list_tiles(kept: Any, *, width: int) -> list[Any]:
    """`plain.list_tiles` by the kernel."""
    *leading, columns = kept.shape
    flat = kept.reshape(-1, columns)
    shapes = ((flat.shape[0], width), flat.shape[:1])
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    indices, counts = jax.ffi.ffi_call(LIST_TILES, results)(flat)
    return [indices.reshape(*leading, width), counts.reshape(leading)]
