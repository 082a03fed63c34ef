"""The tiles of attention on `[B, H, N, D]`: which there are, and the fastest.

A tile is Br queries by Bc keys, and belongs to an implementation:

- The default, 32 x 32, asks for none: the best kernels where they serve the call, in
  their own tile, and "xla" in such blocks elsewhere.
- Else both powers of two from 16 to 512: the blocks of "xla", on every device.
- The one that "cuda" is compiled for at this head dim and dtype (`cuda.tiles_of`):
  these kernels where they serve the call (on a GPU), and "xla" in blocks of that size
  elsewhere, on every device. Where "cuda_sm90" serves, the one of its kernels, too.
- Of float32 those that the kernels have for 16 bits as well: they ask for the kernels,
  which compute float32 in its own tile.

Any other is an error that lists them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_kvblock.attention import block_problem, cuda
from jax_kvblock.core.checks import check_dtype, check_integer, check_positive

XLA_BLOCKS = (16, 32, 64, 128, 256, 512)
DEFAULT = (32, 32)
TILE_FIX = "tiles are compiled in; get_optimal_block_sizes picks one"


def available_tiles(
    head_dim: int, *, dtype: DTypeLike = jnp.bfloat16
) -> dict[str, list[tuple[int, int]]]:
    """The tiles `(Bc, Br)` of each implementation at a head dim, the fastest first.

    Those of "cuda_sm90" are there on a GPU that it serves. dtype: that of Q, or float16
    with `use_half`; both of 16 bits have the same.
    """
    where, fix = "available_tiles", "pass the last dim of Q"
    head_dim = check_integer(where, "head_dim", head_dim, fix)
    return _tiles(head_dim, check_dtype(where, "dtype", dtype))


def _tiles(head_dim: int, dtype: Any) -> dict[str, list[tuple[int, int]]]:
    tiles = {}
    for kernels in dict.fromkeys((*cuda.best_kernels(), "cuda")):
        tile = cuda.forward_tile(kernels, head_dim, dtype)
        tiles[kernels] = [] if tile is None else [(tile[1], tile[0])]
    return {**tiles, "xla": [(bc, br) for bc in XLA_BLOCKS for br in XLA_BLOCKS]}


def get_optimal_block_sizes(
    sequence_length: int, head_dim: int, *, dtype: DTypeLike = jnp.bfloat16
) -> tuple[int, int]:
    """The fastest tile `(Bc, Br)` on the default device.

    On a GPU it is the tile that the CUDA kernels are compiled for at this head dim;
    these fit into shared memory. Without a dtype it is that of 16 bits, which asks for
    the kernels in float32 too. Elsewhere it is that of "xla", no longer than the
    sequence rounded up.

    Raises:
      ValueError: head_dim is no multiple of 8 up to 256, so that no tile serves it.

    Example:
      >>> Bc, Br = get_optimal_block_sizes(1024, 128)
    """
    where = "get_optimal_block_sizes"
    sequence_length, head_dim = check_positive(
        where, sequence_length=sequence_length, head_dim=head_dim
    )
    _check_head_dim(where, head_dim)
    dtype = check_dtype(where, "dtype", dtype)
    *kernels, _ = _tiles(head_dim, dtype).values()
    compiled = [tile for tiles in kernels for tile in tiles]
    if compiled and jax.default_backend() == "gpu":
        return compiled[0]
    br, bc = block_problem.default_blocks(jax.default_backend())
    fits = next((b for b in XLA_BLOCKS if b >= sequence_length), XLA_BLOCKS[-1])
    return min(bc, fits), min(br, fits)


def find_tile(
    where: str, bc: Any, br: Any, head_dim: int, dtype: Any
) -> tuple[int, int, str]:
    """Bc, Br, and the implementation that this tile stands for in this dtype.

    Kernels compute where they serve the call, else "xla" in such blocks.
    """
    _check_head_dim(where, head_dim)
    bc = check_integer(where, "Bc", bc, TILE_FIX)
    br = check_integer(where, "Br", br, TILE_FIX)
    tiles = _tiles(head_dim, jnp.bfloat16)
    if float32 := jnp.dtype(dtype) == jnp.float32:
        own = _tiles(head_dim, dtype)
        tiles |= {name: [*own[name], *those] for name, those in tiles.items()}
    for implementation, those in tiles.items():
        if (bc, br) in those or ((bc, br) == DEFAULT and those):
            others = float32 and implementation == "cuda_sm90"
            return bc, br, "cuda" if others else implementation
    kernels = dict.fromkeys(tile for k in cuda.KERNELS for tile in tiles.get(k, ()))
    compiled = ", ".join(f"({c}, {r})" for c, r in kernels)
    raise ValueError(
        f"{where}: no tile (Bc, Br) = ({bc}, {br}) for head dim {head_dim}; compiled "
        f"for CUDA: {compiled}; 'xla': each of Bc and Br one of {list(XLA_BLOCKS)}; "
        "get_optimal_block_sizes picks one"
    )


def _check_head_dim(where: str, head_dim: int) -> None:
    if head_dim % 8 or not 8 <= head_dim <= cuda.MAX_HEAD_DIM:
        fix = (
            "jax.nn.dot_product_attention has no such limit"
            if head_dim > cuda.MAX_HEAD_DIM
            else "dot_product_attention takes any, or pad Q, K and V with zeros to P "
            "dims and multiply Q by sqrt(P / D)"
        )
        raise ValueError(
            f"{where}: the head dim D must be a multiple of 8 up to "
            f"{cuda.MAX_HEAD_DIM}, got {head_dim}; {fix}"
        )
