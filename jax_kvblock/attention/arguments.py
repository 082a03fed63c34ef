"""From what the caller passes to a config and operands, or to an error that helps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock._checks import check_array, check_choice, check_int32, show
from jax_kvblock.attention.config import (
    OPEN,
    AttentionConfig,
    AttentionTiles,
    Operands,
    default_scale,
)
from jax_kvblock.attention.cuda import IMPLEMENTATIONS, MAX_HEAD_DIM
from jax_kvblock.attention.dense import saturating_add

_FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def normalize(
    where: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    cu_seqlens: Any = None,
    bias: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    q_offset: Any = None,
    kv_offset: Any = None,
    tiles: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[AttentionConfig, Operands]:
    """Checks every argument of `flash_attention`; says which is wrong and what fits."""
    packed = cu_seqlens is not None
    cu_q: Any = None
    cu_kv: Any = None
    _check_qkv(where, q, k, v, packed)
    check_flags(where, causal=causal, deterministic=deterministic)
    check_choice(where, "implementation", implementation, (None, *IMPLEMENTATIONS))
    if packed:
        _check_packed(
            where,
            segment_ids=segment_ids,
            q_lens=q_lens,
            kv_lens=kv_lens,
            bias=bias,
            tiles=tiles,
        )
        cu_q, cu_kv = _cu_seqlens(where, cu_seqlens)
        batch, (t, n, d), s = cu_q.shape[0] - 1, q.shape, k.shape[0]
    else:
        (batch, t, n, d), s = q.shape, k.shape[1]

    left, right = _window(where, causal, window)
    _check_tiles_type(where, tiles)
    q_segments, kv_segments = _segments(where, segment_ids, batch, t, s)
    config = AttentionConfig(
        scale=finite(where, "scale", scale, default_scale(d)),
        window_left=left,
        window_right=right,
        softcap=_softcap(where, softcap),
        packed=packed,
        block_q=tiles.block_q if tiles is not None else 0,
        block_kv=tiles.block_kv if tiles is not None else 0,
        deterministic=bool(deterministic),
        implementation=implementation,
    )
    indices, counts = _tiles(where, tiles, batch, n, t)
    return config, Operands(
        q=jnp.asarray(q),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        bias=_bias(where, bias, q, (batch, n, t, s)),
        sinks=_sinks(where, sinks, q, n),
        q_segments=q_segments,
        kv_segments=kv_segments,
        q_lens=check_lengths(where, "q_lens", q_lens, batch),
        kv_lens=check_lengths(where, "kv_lens", kv_lens, batch),
        shift=_shift(where, q_offset, kv_offset, batch),
        cu_q=cu_q,
        cu_kv=cu_kv,
        tile_indices=indices,
        tile_counts=counts,
    )


def _check_qkv(where: str, q: Any, k: Any, v: Any, packed: bool) -> None:
    forms = (
        {"q": "[total, N, D]", "k": "[total, K, D]", "v": "[total, K, Dv]"}
        if packed
        else {"q": "[B, T, N, D]", "k": "[B, S, K, D]", "v": "[B, S, K, Dv]"}
    )
    rank = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(where, name, x)
        if x.ndim != rank:
            if packed:
                fix = "flatten batch and sequence, x.reshape(-1, *x.shape[2:])"
            elif x.ndim == 3:
                fix = "add a batch axis, x[None], or pass cu_seqlens for packed inputs"
            else:
                fix = "under vmap, an axis of the batch is gone already"
            raise ValueError(
                f"{where}: {name} must be {forms[name]}, got {show(x)}; {fix}"
            )
        if x.dtype not in FLOATS:
            raise TypeError(
                f"{where}: {name} must be bfloat16, float16 or float32, got {show(x)}; "
                "cast it with .astype(jnp.bfloat16)"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{where}: {name} must have q's dtype, {q.dtype}, got {show(x)}; cast "
                f"it with .astype(q.dtype)"
            )
    heads, kv_heads, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if k.shape[-1] != d:
        raise ValueError(
            f"{where}: k must have q's head dim, {d}, got {show(k)}; only v's may "
            "differ"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{where}: v must be {[*k.shape[:-1], 'Dv']} like k, {show(k)}, got "
            f"{show(v)}".replace("'", "")
        )
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{where}: k and v must have q's batch, {q.shape[0]}, got {show(k)}; "
            "repeat them, or vmap with in_axes=None for what is shared"
        )
    if kv_heads == 0 or heads % kv_heads or heads == 0:
        raise ValueError(
            f"{where}: q's heads must be a multiple of k's, got {heads} and "
            f"{kv_heads}; every key head serves N // K query heads"
        )
    for name, dim in (("q and k", d), ("v", dv)):
        if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{where}: the head dim of {name} must be a multiple of 8 from 8 to "
                f"{MAX_HEAD_DIM}, got {dim}; pad it with zeros (and pass scale=, which "
                "is taken from the padded one otherwise)"
            )


def check_flags(where: str, **flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{where}: {name} must be True or False, got {flag!r}; it is compiled "
                "in and cannot be traced"
            )


def _check_packed(where: str, **others: Any) -> None:
    instead = {
        "segment_ids": "a packed sequence attends to itself alone already",
        "q_lens": "the differences of cu_seqlens are the lengths",
        "kv_lens": "the differences of cu_seqlens are the lengths",
        "bias": "pass a batch, [B, T, N, D], for a bias",
        "tiles": "pass a batch, [B, T, N, D], for tile lists",
    }
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{where}: {name} cannot be combined with cu_seqlens; {instead[name]}"
            )


def _cu_seqlens(where: str, cu_seqlens: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(cu_seqlens, (tuple, list)) or len(cu_seqlens) != 2:
        raise ValueError(
            f"{where}: cu_seqlens must be a pair of int32[B + 1], for q and for k and "
            f"v, got {show(cu_seqlens)}; pass (cu, cu) when both are the same"
        )
    pair = [
        check_int32(where, f"cu_seqlens[{i}]", x, "[B + 1]", 1)
        for i, x in enumerate(cu_seqlens)
    ]
    if pair[0].shape != pair[1].shape or pair[0].shape[0] < 2:
        raise ValueError(
            f"{where}: cu_seqlens must be a pair of int32[B + 1] with B of at least 1, "
            f"got {show(pair[0])} and {show(pair[1])}; both start at the first row of "
            "the first sequence and end behind the last"
        )
    return pair[0], pair[1]


def _window(where: str, causal: bool, window: Any) -> tuple[int, int]:
    left, right = OPEN, 0 if causal else OPEN
    if window is None:
        return left, right
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"{where}: window must be a pair (left, right), got {window!r}; None is a "
            "side without a bound: (1023, 0) or (1023, None) with causal=True"
        )
    for value in window:
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(
                f"{where}: window must hold integers or None, got {window!r}; it is "
                "compiled in and cannot be traced (q_offset and kv_offset can)"
            )
        if value < 0:
            raise ValueError(
                f"{where}: window must not be negative, got {window!r}; move the "
                "window with q_offset or kv_offset, or pass None for no bound"
            )
    most = 2**31 - 1  # of int32
    if window[0] is not None:
        left = min(int(window[0]), most)
    if window[1] is not None:
        right = min(int(window[1]), most) if right == OPEN else right
    return left, right


def finite(where: str, name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{where}: {name} must be a Python number, got a traced {show(value)}; it "
            f"is compiled in: multiply q by it and pass {name}=1.0 instead"
        )
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{where}: {name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{where}: {name} must be a number, got {value!r}") from None
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        raise ValueError(f"{where}: {name} must be finite in float32, got {number}")
    return number


def _softcap(where: str, softcap: Any) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, jax.core.Tracer):
        raise TypeError(
            f"{where}: softcap must be a Python number, got a traced {show(softcap)}; "
            "it is compiled in"
        )
    number = finite(where, "softcap", softcap, 0.0)
    if np.float32(number) <= 0:
        raise ValueError(
            f"{where}: softcap must be positive, got {softcap!r}; pass None for none"
        )
    return number


def _segments(
    where: str, segment_ids: Any, batch: int, t: int, s: int
) -> tuple[Any, Any]:
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, (tuple, list)):
        if len(segment_ids) != 2:
            raise ValueError(
                f"{where}: segment_ids must be int32[B, T] or a pair for q and k, got "
                f"{len(segment_ids)} arrays; pass (q_segment_ids, kv_segment_ids)"
            )
        pair = tuple(segment_ids)
    else:
        if t != s:
            raise ValueError(
                f"{where}: one segment_ids array serves T = S, got T = {t} and "
                f"S = {s}; pass a pair (q_segment_ids, kv_segment_ids)"
            )
        pair = (segment_ids, segment_ids)
    checked = []
    for i, (x, form, length) in enumerate(
        zip(pair, ("[B, T]", "[B, S]"), (t, s), strict=True)
    ):
        name = f"segment_ids[{i}]" if pair[0] is not pair[1] else "segment_ids"
        x = check_int32(where, name, x, form, 2)
        if x.shape != (batch, length):
            raise ValueError(
                f"{where}: {name} must be int32{[batch, length]} ({form}), got "
                f"{show(x)}; one id for each position"
            )
        checked.append(x)
    return checked[0], checked[1]


def check_lengths(where: str, name: str, lens: Any, batch: int) -> Any:
    if lens is None:
        return None
    if np.ndim(lens) == 1:
        lens = check_int32(where, name, lens, f"[{batch}]", 1)
    if np.shape(lens) != (batch,):
        raise ValueError(
            f"{where}: {name} must be int32[{batch}], a length for each batch member, "
            f"got {show(lens)}; use jnp.full({batch}, length) for one length"
        )
    return lens


def _shift(where: str, q_offset: Any, kv_offset: Any, batch: int) -> Any:
    if q_offset is None and kv_offset is None:
        return None
    total = jnp.zeros((batch,), jnp.int32)
    for name, x, sign in (("q_offset", q_offset, 1), ("kv_offset", kv_offset, -1)):
        if x is None:
            continue
        ndim = 1 if getattr(x, "ndim", 0) == 1 or isinstance(x, (list, tuple)) else 0
        if ndim == 0 and isinstance(x, (int, np.integer)):
            if not -(2**31) <= x < 2**31:
                raise ValueError(f"{where}: {name} must fit in int32, got {x}")
            x = np.asarray(x)  # negative positions are fine here
        x = check_int32(where, name, x, " or int32[B]", ndim)
        if ndim and x.shape != (batch,):
            raise ValueError(
                f"{where}: {name} must be an int32 scalar or int32[{batch}], got "
                f"{show(x)}; an offset for each batch member, or one for all"
            )
        x = jnp.maximum(x, -(2**31) + 1)  # has a negative
        total = saturating_add(total, sign * x)
    return total


def _bias(where: str, bias: Any, q: Any, full: tuple[int, ...]) -> Any:
    if bias is None:
        return None
    check_array(where, "bias", bias)
    batch, n, t, s = full
    fits = (
        bias.ndim == 4
        and bias.shape[0] in (1, batch)
        and bias.shape[1] in (1, n)
        and bias.shape[2:] == (t, s)
    )
    if not fits:
        raise ValueError(
            f"{where}: bias must be [B|1, N|1, T, S], here "
            f"[{batch}|1, {n}|1, {t}, {s}], got {show(bias)}; broadcast its last two "
            "dims with jnp.broadcast_to"
        )
    if bias.dtype == jnp.bool_:
        raise TypeError(
            f"{where}: bias must be {q.dtype} or float32, got {show(bias)}; pass "
            "jnp.where(mask, 0.0, -jnp.inf), or use dot_product_attention(mask=...)"
        )
    if bias.dtype not in (q.dtype, jnp.float32):
        raise TypeError(
            f"{where}: bias must be {q.dtype} or float32, got {show(bias)}; cast it "
            "with .astype(q.dtype)"
        )
    return jnp.asarray(bias)


def _sinks(where: str, sinks: Any, q: Any, n: int) -> Any:
    if sinks is None:
        return None
    check_array(where, "sinks", sinks)
    if sinks.shape != (n,):
        raise ValueError(
            f"{where}: sinks must be float32[{n}], one for each query head, got "
            f"{show(sinks)}"
        )
    if sinks.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{where}: sinks must be float32, got {show(sinks)}; cast them with "
            ".astype(jnp.float32)"
        )
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return jnp.asarray(sinks).astype(wide)[None]


def _check_tiles_type(where: str, tiles: Any) -> None:
    if tiles is not None and not isinstance(tiles, AttentionTiles):
        raise TypeError(
            f"{where}: tiles must be an AttentionTiles, got {type(tiles).__name__}; "
            "pass AttentionTiles(indices, counts)"
        )


def _tiles(where: str, tiles: Any, batch: int, n: int, t: int) -> tuple[Any, Any]:
    if tiles is None:
        return None, None
    for name in ("block_q", "block_kv"):
        size = getattr(tiles, name)
        if not isinstance(size, int) or size < 128 or size % 128:
            raise ValueError(
                f"{where}: tiles.{name} must be a multiple of 128, got {size!r}"
            )
    indices = check_int32(where, "tiles.indices", tiles.indices, "[B|1, N|1, i, m]", 4)
    counts = check_int32(where, "tiles.counts", tiles.counts, "[B|1, N|1, i]", 3)
    rows = -(-t // tiles.block_q)
    fits = (
        indices.shape[0] in (1, batch)
        and indices.shape[1] in (1, n)
        and indices.shape[2] == rows
    )
    if not fits:
        raise ValueError(
            f"{where}: tiles.indices must be "
            f"int32[{batch}|1, {n}|1, {rows}, max_tiles] for T = {t} and "
            f"block_q = {tiles.block_q}, got {show(indices)}; one row for each query "
            "tile"
        )
    if counts.shape != indices.shape[:3]:
        raise ValueError(
            f"{where}: tiles.counts must be int32{list(indices.shape[:3])} like "
            f"tiles.indices without its last dim, got {show(counts)}"
        )
    return indices, counts
