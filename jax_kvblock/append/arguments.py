"""The checks of `append_kv` and `rope_append`, from arguments to a call's operands."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_kvblock.append.cuda import DTYPES
from jax_kvblock.append.plain import LARGEST
from jax_kvblock.append.scales import check_scales
from jax_kvblock.blocks.pool import KVPool, check_pool
from jax_kvblock.core.checks import (
    as_int,
    check_array,
    check_choice,
    check_int32,
    check_integer,
    plural,
    show,
    shown,
    to_jax,
)
from jax_kvblock.core.spmd import reshard

EIGHT_BITS = tuple(LARGEST)


def check_append_pool(where: str, pool: Any) -> KVPool:
    """A pool in device memory."""
    check_pool(where, "pool", pool)
    if pool.memory_kind == "pinned_host":
        raise ValueError(
            f"{where}: the pool must be in device memory, got one in pinned_host, "
            "which takes copies alone; append on the device and move the blocks with "
            "transfer_blocks"
        )
    return pool


def check_tokens(
    where: str,
    pool: KVPool,
    k: Any,
    v: Any,
    slots: Any,
    *,
    all_layers: bool = False,
    computed: bool = True,
) -> dict[str, Any]:
    """k and v of the new tokens, and their slots; `computed`: they are floats."""
    spec = pool.spec
    slots = check_int32(where, "slots", slots, "[tokens]", 1)
    layers = (spec.num_layers,) if all_layers else ()
    shape = (*layers, slots.shape[0], spec.num_kv_heads, spec.head_dim)
    k = _rows(where, "k", k, shape, computed)
    if spec.num_outer == 2:
        v = _rows(where, "v", v, shape, computed)
        if k.dtype != v.dtype:
            raise TypeError(
                f"{where}: k and v must have one dtype, got {show(k)} and {show(v)}"
            )
    elif v is not None:
        raise ValueError(
            f"{where}: v must be None for a pool with num_outer 1, got {show(v)}; pass "
            "the combined cache as k"
        )
    return {"k": k, "v": v, "slots": slots}


def check_joined(
    where: str, pool: KVPool, qkv: Any, v: Any, slots: Any
) -> dict[str, Any]:
    """q, k and v of the new tokens in one array, the argument q, and their slots."""
    spec = pool.spec
    slots = check_int32(where, "slots", slots, "[tokens]", 1)
    tokens, heads, dim = slots.shape[0], spec.num_kv_heads, spec.head_dim
    if v is not None:
        raise TypeError(
            f"{where}: without k, q holds queries, keys and values, and v must be "
            f"None, got {show(v)}"
        )
    qkv = check_array(where, "q", qkv)
    must = f"{where}: without k, q must be [{tokens}, N + {2 * heads}, {dim}]"
    if qkv.ndim != 3 or (qkv.shape[0], qkv.shape[2]) != (tokens, dim):
        raise ValueError(
            f"{must}, queries, keys and values side by side, got {show(qkv)}"
        )
    queries = qkv.shape[1] - 2 * heads
    if queries < 1 or queries % heads:
        raise ValueError(
            f"{must}, N a multiple of the pool's {plural(heads, 'KV head')}, got "
            f"{show(qkv)}"
        )
    if qkv.dtype.name not in DTYPES:
        raise TypeError(
            f"{where}: q must be one of {', '.join(DTYPES)}, got {show(qkv)}; cast it "
            "with .astype"
        )
    return {"qkv": _whole_heads(where, to_jax(qkv)), "slots": slots}


def _whole_heads(where: str, qkv: jax.Array) -> jax.Array:
    """The array, which no explicit axis cuts by heads; axes of one device do not."""
    sharding = jax.typeof(qkv).sharding
    rows, heads, dims = sharding.spec
    if heads is None:
        return qkv
    axes = heads if isinstance(heads, tuple) else (heads,)
    if math.prod(sharding.mesh.shape[axis] for axis in axes) > 1:
        raise ValueError(
            f"{where}: without k, the heads in q must lie whole on each device, got "
            f"{show(qkv)} along {sharding.spec}; project q, k and v apart, or reshard q"
        )
    return reshard(qkv, PartitionSpec(rows, None, dims))


def _rows(
    where: str, name: str, x: Any, shape: tuple[int, ...], computed: bool
) -> jax.Array:
    x = check_array(where, name, x)
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{where}: {name} must have shape {list(shape)}, got {show(x)}"
        )
    if computed and x.dtype.name not in DTYPES:
        raise TypeError(
            f"{where}: {name} must be one of {', '.join(DTYPES)}, got {show(x)}; cast "
            "it with .astype"
        )
    return to_jax(x)


def check_storing(
    where: str,
    pool: KVPool,
    k: Any,
    k_scale: Any,
    v_scale: Any,
    scales: Any,
    name: str = "k",
) -> dict[str, Any]:
    """How numbers become the pool's: as they are, by given scales, or computed ones."""
    dtype, outer = pool.spec.dtype, pool.spec.num_outer
    given = {"k_scale": k_scale, "v_scale": v_scale}
    named = [name for name, value in given.items() if value is not None]
    if scales is not None and named:
        raise ValueError(
            f"{where}: scales holds scales that are computed, {' and '.join(named)} "
            "are given ones; pass one of both"
        )
    if scales is None and not named:
        if dtype != k.dtype:
            also = ", or pass k_scale and v_scale" if dtype.name in EIGHT_BITS else ""
            raise TypeError(
                f"{where}: {name} must have the pool's dtype {dtype}, got {show(k)}; "
                f"cast it with .astype({str(dtype)!r}){also}"
            )
        return {}
    if dtype.name not in EIGHT_BITS:
        raise TypeError(
            f"{where}: scales are for pools of {', '.join(EIGHT_BITS)}, got a pool of "
            f"{dtype}; leave {'scales' if scales is not None else ' and '.join(named)} "
            "out"
        )
    if scales is not None:
        spec = pool.spec
        shape = (spec.num_layers, pool.num_blocks, spec.block_size, spec.num_kv_heads)
        check_scales(where, scales, shape, outer)
        return {"k_scales": to_jax(scales.k), "v_scales": _or_none(scales.v)}
    wanted = ["k_scale", "v_scale"][:outer]
    if named != wanted:
        raise ValueError(
            f"{where}: a pool with num_outer {outer} takes {' and '.join(wanted)}, got "
            f"{' and '.join(named)} alone"
            if len(named) < len(wanted)
            else f"{where}: v_scale must be None for a pool with num_outer 1"
        )
    heads = pool.spec.num_kv_heads
    return {name: _scale(where, name, given[name], heads) for name in wanted}


def _or_none(x: Any) -> Any:
    return None if x is None else to_jax(x)


def _scale(where: str, name: str, value: Any, heads: int) -> jax.Array:
    """float32 `[]`, or `[nh]`, one for each head."""
    must = f"{where}: {name} must be a number, float32[] or float32[{heads}]"
    if isinstance(value, (int, float, np.generic)) and not isinstance(value, bool):
        number = np.float32(value)
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{must}, positive and finite, got {value!r}")
        return to_jax(np.asarray(number))
    x = check_array(where, name, value)
    if x.shape not in ((), (heads,)):
        raise ValueError(
            f"{must}, got {show(x)}; for a scale of each token and head pass scales="
        )
    if x.dtype != jnp.float32:
        raise TypeError(f"{must}, got {show(x)}; cast it with .astype(jnp.float32)")
    return to_jax(x)


def check_queries(where: str, q: Any, k: Any) -> jax.Array:
    """q `[tokens, N, D]` beside k `[tokens, K, D]`."""
    q = check_array(where, "q", q)
    tokens, heads, dim = k.shape
    if q.ndim != 3 or q.shape[0] != tokens or q.shape[2] != dim:
        raise ValueError(
            f"{where}: q must be [{tokens}, N, {dim}] beside k, {show(k)}, got "
            f"{show(q)}"
        )
    if not q.shape[1] or q.shape[1] % heads:
        raise ValueError(
            f"{where}: q must have a multiple of the pool's "
            f"{plural(heads, 'KV head')}, got {q.shape[1]}"
        )
    if q.dtype != k.dtype:
        raise TypeError(
            f"{where}: q and k must have one dtype, got {show(q)} and {show(k)}"
        )
    return to_jax(q)


def check_rotation(
    where: str,
    tokens: int,
    head_dim: int,
    positions: Any,
    theta: Any,
    inv_freq: Any,
    cos_sin: Any,
    rotary_dim: Any,
) -> tuple[dict[str, Any], int]:
    """The operands that say how far each pair turns, and how many elements do."""
    given = {"theta": theta, "inv_freq": inv_freq, "cos_sin": cos_sin}
    named = [name for name, value in given.items() if value is not None]
    if rotary_dim is not None:
        fix = "it sets which elements turn, so it cannot be traced"
        rotary_dim = check_integer(where, "rotary_dim", rotary_dim, fix)
    if rotary_dim == 0 and not named:
        if positions is not None:
            check_int32(where, "positions", positions, "[tokens]", 1)
        return {}, 0
    if len(named) != 1:
        raise ValueError(
            f"{where}: one of theta, inv_freq and cos_sin says how far pairs turn, got "
            f"{' and '.join(named) or 'none'}; rotary_dim=0 turns nothing"
        )
    if inv_freq is not None:
        inv_freq = _float32(where, "inv_freq", inv_freq, "[rotary_dim / 2]", 1)
        told: int | None = 2 * inv_freq.shape[0]
    elif cos_sin is not None:
        cos_sin = _float32(where, "cos_sin", cos_sin, "[rows, rotary_dim]", 2)
        told = cos_sin.shape[1]
    else:
        told = None
    size = rotary_dim if rotary_dim is not None else told or head_dim
    if told not in (None, size):
        raise ValueError(
            f"{where}: {named[0]} is for {told} elements that turn, rotary_dim is "
            f"{size}"
        )
    if size % 2 or not 0 < size <= head_dim:
        given_by = "" if told is None else f" of {named[0]}"
        raise ValueError(
            f"{where}: rotary_dim{given_by} must be even, above 0 and at most the head "
            f"dim {head_dim}, got {size}; it is how many elements of a head turn"
        )
    if theta is not None:
        inv_freq = to_jax(inverse_frequencies(where, theta, size))
    operands = {"inv_freq": inv_freq, "cos_sin": cos_sin}
    if positions is None:
        if cos_sin is None or cos_sin.shape[0] != tokens:
            raise ValueError(
                f"{where}: positions must be int32[{tokens}]; only cos_sin of "
                f"{plural(tokens, 'row')}, one for each token, does without"
            )
        return operands, size
    positions = check_int32(where, "positions", positions, "[tokens]", 1)
    if positions.shape[0] != tokens:
        raise ValueError(
            f"{where}: positions must be int32[{tokens}], one for each token, got "
            f"{show(positions)}"
        )
    if cos_sin is not None and not cos_sin.shape[0]:
        raise ValueError(f"{where}: cos_sin must have rows, got {show(cos_sin)}")
    return operands | {"positions": positions}, size


def inverse_frequencies(where: str, theta: Any, rotary_dim: int) -> np.ndarray:
    """theta ** (−2 i / rotary_dim), float32 `[rotary_dim / 2]` (RoFormer, 2021)."""
    number = theta if isinstance(theta, (float, np.floating)) else as_int(theta)
    if number is None or not (number > 0 and math.isfinite(number)):
        raise ValueError(
            f"{where}: theta must be a positive number, got {shown(theta)}; pass "
            "frequencies that are traced as inv_freq"
        )
    powers = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies: np.ndarray = np.float64(number) ** -powers
    return frequencies.astype(np.float32)


def _float32(where: str, name: str, x: Any, shape: str, ndim: int) -> jax.Array:
    x = check_array(where, name, x)
    if x.ndim != ndim:
        raise ValueError(f"{where}: {name} must be float32{shape}, got {show(x)}")
    if x.dtype != jnp.float32:
        raise TypeError(
            f"{where}: {name} must be float32{shape}, got {show(x)}; cast it with "
            ".astype(jnp.float32)"
        )
    return to_jax(x)


def check_norms(
    where: str, head_dim: int, eps: Any, **weights: Any
) -> tuple[dict[str, Any], float]:
    """The weights of the RMS norms, and their epsilon."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float, np.number)):
        raise TypeError(f"{where}: norm_eps must be a number, got {shown(eps)}")
    eps = float(eps)
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"{where}: norm_eps must be at least 0, got {eps!r}")
    operands = {}
    for name, weight in weights.items():
        if weight is None:
            continue
        weight = check_array(where, name, weight)
        if tuple(weight.shape) != (head_dim,):
            raise ValueError(
                f"{where}: {name} must be [{head_dim}], a weight for each element of a "
                f"head, got {show(weight)}"
            )
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            raise TypeError(
                f"{where}: {name} must be floats, got {show(weight)}; cast it with "
                ".astype"
            )
        operands[name] = to_jax(weight)
    return operands, eps


def check_flag(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{where}: {name} must be True or False, got {shown(value)}")
    return bool(value)


def check_implementation(where: str, value: Any) -> str | None:
    check_choice(where, "implementation", value, (None, "cuda", "xla"))
    return value
