"""The CUDA kernels that choose tiles: what they serve, how their launchers are called.

Each function describes a call to an FFI handler in `cpp/ops/select/select_ffi.cc`; the
one of lists, which attention calls, too, is in `attention/tile_lists.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention import tile_lists
from jax_kvblock.core import ffi
from jax_kvblock.sparse import plain

POOL_PIECES, WEIGH_TILES = "kvblock_pool_pieces", "kvblock_weigh_tiles"
KEEP_TILES = "kvblock_keep_tiles"
POOLED = ("bfloat16", "float16", "float32")  # dtypes of what is pooled, and weighed
NORMED = tuple(16 << i for i in range(6))  # bytes of a head that is normed
PIECES = (1, 2, 4, 8, 16, 32)  # of a tile, in a call of kvblock_weigh_tiles
MOST_PIECE_DIM = 256  # KVBLOCK_MOST_PIECE_DIM


def serves(
    name: str, operands: Sequence[Any], platform: str | None, **static: Any
) -> bool:
    """Whether the kernel of a primitive serves a call, lowered for a platform.

    operands: what it is bound to; the first one are rows `[..., length, H, D]` to pool,
      queries to weigh by, or a map `[..., C]`.
    """
    x = operands[0]
    if platform != "cuda" or 0 in x.shape:
        return False
    if name == POOL_PIECES:
        bytes_wide = x.shape[-2] * x.shape[-1] * x.dtype.itemsize
        fits = str(x.dtype) in POOLED and bytes_wide % 16 == 0
    elif name == WEIGH_TILES:
        fits = _weighs(operands, **static)
    else:  # both kernels of maps serve the same
        fits = tile_lists.serves(x)
    if not fits or (not ffi.BUILD["cuda"] and ffi.gpu_present()):
        return False
    capabilities = ffi.gpu_capabilities()
    return not capabilities or min(capabilities) >= (8, 0)


def _weighs(
    operands: Sequence[Any], *, tiles: tuple[int, int], fine: bool, **static: Any
) -> bool:
    queries, keys = operands[:2]
    dim = queries.shape[-1]
    per_tile = [x.shape[-3] // n for x, n in zip(operands[:2], tiles, strict=True)]
    return (
        str(queries.dtype) in POOLED
        and queries.dtype == keys.dtype
        and not fine
        and dim % 8 == 0
        and dim <= MOST_PIECE_DIM
        and all(pieces in PIECES for pieces in per_tile)
        and 0 not in keys.shape
    )


def pool_pieces(
    x: Any, ends: Any, *, side: int, pieces: int, wanted: plain.Pooled
) -> list[Any]:
    """`plain.pool_pieces` by the kernel, which norms heads that some lanes have."""
    normed = wanted == "normed"
    if normed and x.shape[-1] * x.dtype.itemsize not in NORMED:
        three = pool_pieces(x, ends, side=side, pieces=pieces, wanted="extremes")
        return [plain.side_by_side(three)]
    *leading, length, heads, dim = x.shape
    flat = x.reshape(-1, length, heads * dim)
    members = flat.shape[0]  # a symbol, where the batch of an export is one
    width = 3 * dim if normed else dim
    shape = (members, pieces, heads * width)
    dtype = x.dtype if wanted == "rounded" else jnp.float32
    results = [jax.ShapeDtypeStruct(shape, dtype)] * (3 if wanted == "extremes" else 1)
    launch = jax.ffi.ffi_call(POOL_PIECES, results)
    how = {"side": np.int32(side), "normed": np.int32(dim if normed else 0)}
    made = launch(flat, ends.reshape(members), **how)
    return [y.reshape(*leading, pieces, heads, width) for y in made]


def weigh_tiles(
    *operands: Any,
    scale: float,
    tiles: tuple[int, int],
    parts: Any,
    ranged: bool,
    near: bool,
    fine: bool,
) -> list[Any]:
    """`plain.weigh_tiles` by the kernel, which needs no parts.

    Of float32 it multiplies float16, of numbers that a power of two has divided, near
    the largest of their head: 11 binary digits, as TF32 has, down to 2^-14 of that one,
    and 0 below 2^-25 of it. So a head in which a number is infinite or NaN is NaN.
    """
    queries, keys, *more = operands
    leading, heads = queries.shape[:-3], queries.shape[-2]
    factored = queries.dtype == jnp.float32
    if factored:
        (queries, of_q), (keys, of_k) = map(_halved, (queries, keys))
        factors = of_q * jnp.repeat(of_k, heads // keys.shape[-2], -1)
        more = [more[0], factors, *more[1:]]
    given = (queries, keys, *more)
    flat = [x.reshape(-1, *x.shape[len(leading) :]) for x in given]
    shape = (flat[0].shape[0], heads, *tiles)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    launch = jax.ffi.ffi_call(WEIGH_TILES, results)
    how = {"scale": np.float32(scale), "factored": factored, "ranged": ranged}
    (made,) = launch(*flat, **how, near=near)
    return [made.reshape(*leading, heads, *tiles)]


def _halved(x: Any) -> tuple[Any, Any]:
    """`[..., length, H, D]` in float16, and what each head's is to be multiplied by."""
    most = jnp.abs(x).max((-3, -1))
    # The power of two below the largest, by its exponent alone: it divides exactly.
    exponent = jax.lax.bitcast_convert_type(most, jnp.uint32) & np.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    power = jnp.where(power == 0, 1, power)
    return (x / power[..., None, :, None]).astype(jnp.float16), power


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
