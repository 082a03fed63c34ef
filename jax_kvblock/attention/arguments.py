"""From what the caller passes to a config and operands, or to an error that helps."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention import dropout
from jax_kvblock.attention.config import (
    OPEN,
    AttentionConfig,
    Operands,
    default_scale,
)
from jax_kvblock.attention.dense import saturating_add
from jax_kvblock.attention.dispatch import IMPLEMENTATIONS
from jax_kvblock.attention.eight_bits import check_scales
from jax_kvblock.attention.integers import known_on_host, saturated, wrapped
from jax_kvblock.attention.precision import resolve
from jax_kvblock.attention.qkv import ALSO_NARROW, NARROW, PACKED, check_qkv
from jax_kvblock.attention.tile_arguments import check_tile_sides, check_tiles
from jax_kvblock.core.checks import (
    as_int,
    check_array,
    check_choice,
    check_int32,
    check_integer,
    check_static,
    show,
    shown,
    to_jax,
)

_FLOAT32_MAX = float(np.finfo(np.float32).max)


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
    scales: Any = None,
    dropout_rate: Any = 0.0,
    dropout_seed: Any = None,
    deterministic: bool = False,
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[AttentionConfig, Operands]:
    """Checks every argument of `flash_attention`; says which is wrong and what fits."""
    packed = cu_seqlens is not None
    cu_q: Any = None
    cu_kv: Any = None
    if packed:  # before dtypes: 8 bits with scales are wrong for being packed
        _check_packed(
            where,
            segment_ids=segment_ids,
            q_lens=q_lens,
            kv_lens=kv_lens,
            bias=bias,
            tiles=tiles,
            scales=scales,
        )
    q, k, v = check_qkv(where, PACKED if packed else ALSO_NARROW, q, k, v)
    check_flags(where, causal=causal, deterministic=deterministic)
    check_choice(where, "implementation", implementation, (None, *IMPLEMENTATIONS))
    if packed:
        cu_q, cu_kv = _cu_seqlens(where, cu_seqlens, (q.shape[0], k.shape[0]))
        batch, (t, n, d), s = cu_q.shape[0] - 1, q.shape, k.shape[0]
    else:
        (batch, t, n, d), s = q.shape, k.shape[1]

    left, right = check_window(where, causal, window)
    block_q, block_kv = check_tile_sides(where, tiles)
    q_segments, kv_segments = check_segments(where, segment_ids, batch, t, s)
    config = AttentionConfig(
        scale=check_scale(where, scale, d),
        window_left=left,
        window_right=right,
        softcap=check_softcap(where, softcap),
        packed=packed,
        block_q=block_q,
        block_kv=block_kv,
        deterministic=bool(deterministic),
        precision=resolve(where, precision, q.dtype),
        implementation=implementation,
        dropout=check_dropout_rate(where, dropout_rate),
    )
    indices, counts, partial, masks = check_tiles(
        where, tiles, config, (batch, n, t, s)
    )
    q_scales, k_scales, v_scales = check_scales(where, scales, q, k)
    q_offset, kv_offset = _offsets(where, q_offset, kv_offset, batch)
    return config, Operands(
        q=to_jax(q),
        k=to_jax(k),
        v=to_jax(v),
        bias=_bias(where, bias, q, (batch, n, t, s)),
        sinks=check_sinks(where, sinks, q, n),
        q_segments=q_segments,
        kv_segments=kv_segments,
        q_lens=check_lengths(where, "q_lens", q_lens, batch),
        kv_lens=check_lengths(where, "kv_lens", kv_lens, batch),
        shift=_shift(q_offset, kv_offset, batch),
        cu_q=cu_q,
        cu_kv=cu_kv,
        tile_indices=indices,
        tile_counts=counts,
        tile_partial=partial,
        tile_masks=masks,
        q_scales=q_scales,
        k_scales=k_scales,
        v_scales=v_scales,
        dropout_keys=check_dropout_keys(
            where, config, dropout_seed, (batch, n), (q_offset, kv_offset)
        ),
    )


def check_flags(where: str, **flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{where}: {name} must be True or False, got {shown(flag)}; it is "
                "compiled in and cannot be traced"
            )


def _check_packed(where: str, **others: Any) -> None:
    instead = {
        "segment_ids": "a packed sequence attends to itself alone already",
        "q_lens": "the differences of cu_seqlens are the lengths",
        "kv_lens": "the differences of cu_seqlens are the lengths",
        "bias": "pass a batch, [B, T, N, D], for a bias",
        "tiles": "pass a batch, [B, T, N, D], for tile lists",
        "scales": "pass a batch, [B, T, N, D], with segment_ids, for 8 bits",
    }
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{where}: {name} cannot be combined with cu_seqlens; {instead[name]}"
            )


def _cu_seqlens(
    where: str, cu_seqlens: Any, totals: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    if not isinstance(cu_seqlens, (tuple, list)) or len(cu_seqlens) != 2:
        raise ValueError(
            f"{where}: cu_seqlens must be a pair of int32[B + 1], for q and for k and "
            f"v, got {show(cu_seqlens)}; pass (cu, cu) when both are the same"
        )
    pair = [
        check_int32(where, f"cu_seqlens[{i}]", x, "[B + 1]", 1)
        for i, x in enumerate(cu_seqlens)
    ]
    for i, cu in enumerate(pair):
        check_static(where, f"cu_seqlens[{i}]", cu)
    if pair[0].shape != pair[1].shape or pair[0].shape[0] < 2:
        raise ValueError(
            f"{where}: cu_seqlens must be a pair of int32[B + 1] with B of at least 1, "
            f"got {show(pair[0])} and {show(pair[1])}; both start at the first row of "
            "the first sequence and end behind the last"
        )
    for i, rows in enumerate(("q", "k")):
        _check_boundaries(where, f"cu_seqlens[{i}]", cu_seqlens[i], rows, totals[i])
    return pair[0], pair[1]


def _check_boundaries(where: str, name: str, cu: Any, rows: str, total: int) -> None:
    """Where their values are known; traced ones cannot be looked at."""
    values = known_on_host(where, name, cu)
    if values is None:
        return
    (falls,) = np.nonzero(values[1:] < values[:-1])
    if falls.size:
        i = int(falls[0])
        got = f"{values[i]} at {i} and {values[i + 1]} at {i + 1}"
    elif values[0] < 0 or values[-1] > total:
        got = f"{values[0]} to {values[-1]}"
    else:
        return
    raise ValueError(
        f"{where}: {name} must rise from at least 0 to at most {total}, the rows of "
        f"{rows}, got {got}; pass the cumulative sum of the lengths, with 0 in front"
    )


def check_window(where: str, causal: bool, window: Any) -> tuple[int, int]:
    left, right = OPEN, 0 if causal else OPEN
    if window is None:
        return left, right
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"{where}: window must be a pair (left, right) of integers, got "
            f"{shown(window)}; windows are compiled in, and None is a side without a "
            "bound: (1023, 0), or (1023, None) with causal=True"
        )
    sides = [
        None if side is None else window_side(where, f"window[{i}]", side)
        for i, side in enumerate(window)
    ]
    if sides[0] is not None:
        left = sides[0]
    if sides[1] is not None and right == OPEN:
        right = sides[1]
    return left, right


def window_side(where: str, name: str, value: Any) -> int:
    """A bound of a window, as an int32."""
    moved = "flash_attention's q_offset and kv_offset move one"
    fix = f"windows are compiled in ({moved}, and may be traced)"
    side = check_integer(where, name, value, fix)
    if side < 0:
        raise ValueError(
            f"{where}: {name} must not be negative, got {side}; {moved}, and its "
            "window=(None, ...) has no bound"
        )
    return min(side, 2**31 - 1)


def finite(where: str, name: str, value: Any, default: float, fix: str) -> float:
    """A Python float. `fix` says what to do instead of tracing it."""
    if value is None:
        return default
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{where}: {name} must be a Python number, got {shown(value)}; it is "
            f"compiled in: {fix}"
        )
    try:
        if isinstance(value, (bool, str, bytes)) or _is_no_number(value):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: {name} must be a number, got {value!r}; pass a Python float"
        ) from None
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        raise ValueError(
            f"{where}: {name} must be finite in float32, got {number}; pass None for "
            "the default"
        )
    return number


def _is_no_number(x: Any) -> bool:
    """An array with dims, or one of bools or complex numbers."""
    kind = getattr(getattr(x, "dtype", None), "kind", "f")
    return kind in "bc" or bool(np.ndim(x))


def check_scale(where: str, scale: Any, head_dim: int) -> float:
    fix = "multiply q by it and pass scale=1.0"
    return finite(where, "scale", scale, default_scale(head_dim), fix)


def check_softcap(where: str, softcap: Any) -> float:
    if softcap is None:
        return 0.0
    fix = "close over a Python float, or make it a static argument of the jit"
    number = finite(where, "softcap", softcap, 0.0, fix)
    if np.float32(number) <= 0:
        raise ValueError(
            f"{where}: softcap must be positive, got {softcap!r}; pass None for none"
        )
    return number


def check_segments(
    where: str, segment_ids: Any, batch: int, t: int, s: int
) -> tuple[Any, Any]:
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, (tuple, list)) and not _is_rows(segment_ids):
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
        x = check_int32(where, name, wrapped(x), form, 2)
        if x.shape != (batch, length):
            raise ValueError(
                f"{where}: {name} must be int32{[batch, length]} ({form}), got "
                f"{show(x)}; one id for each position"
            )
        checked.append(x)
    return checked[0], checked[1]


def _is_rows(x: Any) -> bool:
    """Whether this is one array [B, T] as a list of its rows, and no pair of arrays."""
    return isinstance(x, list) and len(x) > 0 and all(_depth(row) == 1 for row in x)


def _depth(x: Any) -> int:
    """The rank of an array, or of nested lists by their first elements."""
    if isinstance(x, (list, tuple, range)):
        return 1 + (_depth(x[0]) if len(x) else 0)
    return getattr(x, "ndim", 0)


def check_lengths(where: str, name: str, lens: Any, batch: int) -> Any:
    if lens is None:
        return None
    if isinstance(lens, (list, tuple, range)) or getattr(lens, "ndim", 0) == 1:
        lens = check_int32(where, name, saturated(lens), f"[{batch}]", 1)
    if np.shape(lens) != (batch,):
        raise ValueError(
            f"{where}: {name} must be int32[{batch}], a length for each batch member, "
            f"got {show(lens)}; use jnp.full({batch}, length) for one length"
        )
    return lens


def _offsets(where: str, q_offset: Any, kv_offset: Any, batch: int) -> tuple[Any, Any]:
    given = {"q_offset": q_offset, "kv_offset": kv_offset}
    q_offset, kv_offset = (
        None if x is None else _offset(where, name, x, batch)
        for name, x in given.items()
    )
    return q_offset, kv_offset


def _shift(q_offset: Any, kv_offset: Any, batch: int) -> Any:
    if q_offset is None and kv_offset is None:
        return None
    return _difference(batch, q_offset, kv_offset)


# One program, also when called outside of jit: a transfer guard would stop the
# constants of single steps.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _difference(batch: int, q_offset: Any, kv_offset: Any) -> jax.Array:
    total = jnp.zeros((batch,), jnp.int32)
    for x, sign in ((q_offset, 1), (kv_offset, -1)):
        if x is not None:
            x = jnp.maximum(x, -(2**31) + 1)  # has a negative
            total = saturating_add(total, sign * x)
    return total


def _offset(where: str, name: str, x: Any, batch: int) -> jax.Array:
    number = None if isinstance(x, jax.Array) else as_int(x)
    if number is not None:
        if not -(2**31) <= number < 2**31:
            raise ValueError(
                f"{where}: {name} must fit in int32, got {number}; only the difference "
                "of q_offset and kv_offset counts"
            )
        return to_jax(np.asarray(number, np.int32))
    must = f"{where}: {name} must be an int32 scalar or int32[{batch}], got"
    fix = "an offset for each batch member, or one for all"
    listed = isinstance(x, (list, tuple, range))
    if not listed and not hasattr(x, "dtype"):
        raise TypeError(f"{must} {x!r}; pass integers, {fix}")
    ndim = 1 if listed else x.ndim
    if ndim > 1:
        raise ValueError(f"{must} {show(x)}; {fix}")
    x = check_int32(where, name, saturated(x), " or int32[B]", ndim)
    if ndim and x.shape != (batch,):
        raise ValueError(f"{must} {show(x)}; {fix}")
    return x


def check_dropout_rate(where: str, rate: Any) -> int:
    """Of 128 probabilities, how many become 0."""
    fix = (
        "close over a Python float, or make it a static argument of the jit "
        "(dropout_seed may be traced)"
    )
    return dropout.threshold_of(where, finite(where, "dropout_rate", rate, 0.0, fix))


def check_dropout_keys(
    where: str,
    config: AttentionConfig,
    seed: Any,
    size: tuple[int, int],
    offsets: tuple[Any, Any] = (None, None),
) -> Any:
    """The keys of a batch and its heads; None where nothing is dropped."""
    words = None
    if seed is not None:
        words = dropout.check_seed(where, seed, *size)
    if not config.dropout:
        return None
    if words is None:
        raise ValueError(
            f"{where}: dropout_seed must be given with a dropout_rate above 0, got "
            "None; pass an integer or a key of jax.random, another one for each step"
        )
    return dropout.keys_of(words, *size, *offsets)


def _bias(where: str, bias: Any, q: Any, full: tuple[int, ...]) -> Any:
    if bias is None:
        return None
    bias = check_array(where, "bias", bias)
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
    own = np.dtype(jnp.bfloat16) if q.dtype in NARROW else q.dtype  # that of the result
    kinds = " or ".join(dict.fromkeys((str(own), "float32")))
    if bias.dtype == jnp.bool_:
        raise TypeError(
            f"{where}: bias must be {kinds}, got {show(bias)}; pass "
            "jnp.where(mask, 0.0, -jnp.inf), or use dot_product_attention(mask=...)"
        )
    if bias.dtype not in (own, jnp.float32):
        cast = "q.dtype" if own == q.dtype else "jnp.float32"
        raise TypeError(
            f"{where}: bias must be {kinds}, got {show(bias)}; cast it "
            f"with .astype({cast})"
        )
    return to_jax(bias)


def check_sinks(where: str, sinks: Any, q: Any, n: int) -> Any:
    if sinks is None:
        return None
    sinks = check_array(where, "sinks", sinks)
    if sinks.shape != (n,):
        raise ValueError(
            f"{where}: sinks must be float32[{n}], one for each query head, got "
            f"{show(sinks)}; use jnp.full({n}, sink) for one sink"
        )
    if sinks.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{where}: sinks must be float32, got {show(sinks)}; cast them with "
            ".astype(jnp.float32)"
        )
    computed = jax.dtypes.canonicalize_dtype(q.dtype)  # of NumPy's float64, say
    wide = jnp.float64 if computed == jnp.float64 else jnp.float32
    return jnp.expand_dims(to_jax(sinks).astype(wide), 0)
