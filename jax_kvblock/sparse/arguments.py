"""The checks of what selectors are given: from arguments to a `Grid`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_kvblock.attention.arguments import check_flags, check_window
from jax_kvblock.attention.config import OPEN, default_scale
from jax_kvblock.attention.mask_tiles import check_tile_side
from jax_kvblock.core.checks import (
    as_int,
    check_array,
    check_int32,
    check_random_key,
    show,
    to_jax,
)
from jax_kvblock.core.spmd import reshard
from jax_kvblock.sparse.budget import check_number
from jax_kvblock.sparse.grid import Grid

# Offsets beyond it stop there: sums of two of them and of a position fit in int32.
FARTHEST = 1 << 29
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_qk(
    where: str, q: Any, k: Any, *, may_be_empty: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, T, N, D]` and keys `[B, S, K, D]`, as JAX arrays.

    With `may_be_empty` B and T may be 0.
    """
    arrays = {name: check_array(where, name, x) for name, x in (("q", q), ("k", k))}
    forms = {"q": "[B, T, N, D]", "k": "[B, S, K, D]"}
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(
                f"{where}: {name} must be {forms[name]}, got {show(x)}; add a batch "
                "axis with x[None], and pass packed documents as one row with "
                "segment_ids"
            )
        if x.dtype not in FLOATS:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got {show(x)}; "
                "cast it with .astype(jnp.bfloat16)"
            )
    q, k = arrays.values()
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or k.dtype != q.dtype:
        raise ValueError(
            f"{where}: k must be [B, S, K, D] with q's B, D and dtype, got {show(k)} "
            f"beside {show(q)}; cast it, or repeat what is shared"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{where}: k must have a number of heads that divides q's, {q.shape[2]}, "
            f"got {show(k)}; every key head serves as many query heads"
        )
    sizes = (*q.shape[2:], *k.shape[1:]) if may_be_empty else (*q.shape, *k.shape)
    if 0 in sizes:
        raise ValueError(
            f"{where}: q and k must not be empty, got {show(q)} and {show(k)}; leave "
            "the call out"
        )
    return to_jax(q), to_jax(k)


def key_of(where: str, key: Any) -> jax.Array:
    """A key of jax.random, that of 0 unless given."""
    if key is None:
        return jax.random.key(0)
    fix = "pass jax.random.key(0), or one of those that jax.random.split gives"
    return check_random_key(where, "key", key, fix)


def check_blocks(where: str, block_q: Any, block_kv: Any) -> None:
    check_tile_side(where, "block_q", block_q)
    check_tile_side(where, "block_kv", block_kv)


def scale_of(where: str, scale: Any, head_dim: int) -> float:
    if scale is None:
        return default_scale(head_dim)
    return check_number(where, "scale", scale, -1e30, 1e30)


def grid_of(
    where: str,
    sizes: tuple[int, int, int],
    blocks: tuple[int, int],
    *,
    causal: Any = False,
    window: Any = None,
    q_offset: Any = None,
    kv_offset: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    segment_ids: Any = None,
    **unknown: Any,
) -> Grid:
    """The grid of a call: sizes are B, T and S."""
    if unknown:
        raise TypeError(
            f"{where}: options must be causal, window, q_offset, kv_offset, q_lens, "
            f"kv_lens or segment_ids, got {', '.join(unknown)}; what else attention "
            "takes is given to sparse_attention"
        )
    batch, q_len, kv_len = sizes
    check_flags(where, causal=causal)
    left, right = (
        None if side == OPEN or side >= FARTHEST else side
        for side in check_window(where, bool(causal), window)
    )
    offsets = [
        _offset(where, name, x, batch)
        for name, x in (("q_offset", q_offset), ("kv_offset", kv_offset))
    ]
    lens = [
        None if x is None else _row(where, name, x, batch)
        for name, x in (("q_lens", q_lens), ("kv_lens", kv_lens))
    ]
    segments = _segments(where, segment_ids, sizes)
    # Only a causal mask and a window ask where positions are.
    placed = causal or left is not None or right is not None
    shift = offsets[0] - offsets[1] if placed else 0
    return Grid(
        q_len,
        kv_len,
        *blocks,
        causal=bool(causal),
        shift=shift,
        left=left,
        right=None if causal else right,
        q_lens=lens[0],
        kv_lens=lens[1],
        q_segments=segments[0],
        kv_segments=segments[1],
        aligned=segments[0] is segments[1]
        and isinstance(shift, int)
        and shift == 0
        and (kv_lens is None or kv_lens is q_lens),
    )


def _offset(where: str, name: str, x: Any, batch: int) -> Any:
    """A Python integer, or int32 `[]` or `[B]`."""
    if x is None:
        return 0
    number = None if isinstance(x, jax.Array) else as_int(x)
    if number is not None:
        return max(-FARTHEST, min(number, FARTHEST))
    if getattr(x, "ndim", 1) == 0:
        x = check_int32(where, name, x, "[]", 0)
    else:
        x = _row(where, name, x, batch)
    return jnp.clip(x, -FARTHEST, FARTHEST)


def _row(where: str, name: str, x: Any, batch: int) -> jax.Array:
    row = check_int32(where, name, x, f"[{batch}]", 1)
    if row.shape != (batch,):
        raise ValueError(
            f"{where}: {name} must be int32[{batch}], one for each batch member, got "
            f"{show(row)}"
        )
    return _whole(row)


def _segments(where: str, ids: Any, sizes: tuple[int, int, int]) -> tuple[Any, Any]:
    if ids is None:
        return None, None
    batch, q_len, kv_len = sizes
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(
            f"{where}: segment_ids must be one array or a pair, got {len(pair)}"
        )
    if pair[0] is pair[1] and q_len == kv_len:
        pair = pair[:1]
    found = []
    for x, length in zip(pair, (q_len, kv_len), strict=False):
        x = check_int32(where, "segment_ids", x, "[B, length]", 2)
        if x.shape != (batch, length):
            raise ValueError(
                f"{where}: segment_ids must be int32[{batch}, {length}], got "
                f"{show(x)}; a pair (of queries, of keys) where their lengths differ"
            )
        found.append(_whole(x))
    return found[0], found[-1]


def _whole(x: jax.Array) -> jax.Array:
    """On an explicit mesh all members are on each device, to be sorted and searched."""
    return reshard(x, PartitionSpec(*[None] * x.ndim))
