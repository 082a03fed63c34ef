"""The append in plain JAX: its specification, and the path where there is no kernel.

    k = rotated(normed(k)), v = v, both in float32
    scale = the given one, or one for each token and head: the largest |x| / the dtype's
    stored = x / scale, rounded to nearest even, at most the dtype's largest number
    pool[block, layer, outer, token in the block, head] = stored

The angle of a position and a frequency is their product in float64, less whole turns:
in float32 that of position 2**20 would be wrong by 0.06.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.append.call import Append
from jax_kvblock.blocks.copy import local_block_copy
from jax_kvblock.blocks.plan import Copy, Form, Side

# The largest number that a scale is computed for: of int8 the range is symmetric then.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SMALLEST_SCALE = np.float32(2.0**-126)  # the smallest normal number
HUGE = np.finfo(np.float32).max


def append(call: Append, *operands: Any) -> list[jax.Array]:
    """q, the pool's arrays and the arrays of scales, as the primitive returns them."""
    if call.joined:
        call, operands = call.apart(operands)
    x = call.unpack(operands)
    turns = angles(call, x)
    q = _turned(call, x, "q", turns) if "q" in x else None
    given = {"k": _turned(call, x, "k", turns), "v": x.get("v")}
    values: dict[str, Any] = {"pool": []}
    for name in ("k", "v")[: call.num_outer]:
        stored, scale = _stored(given[name], x, name)
        values["pool"].append(stored)
        values[f"{name}_scales"] = [scale]
    return [*([] if q is None else [q]), *_write(call, x, values)]


# ---- what is written -----------------------------------------------------------------


def angles(call: Append, x: dict[str, Any]) -> tuple[jax.Array, jax.Array] | None:
    """cos and sin, float32 `[t, 1, rotary_dim / 2]`; None where nothing turns."""
    if not call.rotary_dim:
        return None
    if "cos_sin" in x:
        rows = x["cos_sin"]
        if "positions" in x:
            rows = rows.at[jnp.clip(x["positions"], 0, len(rows) - 1)].get(
                mode="promise_in_bounds"
            )
        cos, sin = jnp.split(rows[:, None], 2, -1)
        return cos, sin
    angle = reduced_angles(x["positions"], x["inv_freq"])
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def reduced_angles(positions: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Positions times frequencies without whole turns, float32 `[t, frequencies]`."""
    with jax.enable_x64(True):
        wide = positions.astype(jnp.float64), inv_freq.astype(jnp.float64)
        angle = wide[0][:, None] * wide[1][None]
        turn = np.float64(2 * np.pi)
        return (angle - jnp.round(angle / turn) * turn).astype(jnp.float32)


def _turned(call: Append, x: dict[str, Any], name: str, turns: Any) -> jax.Array:
    """q in its dtype, k in float32 where anything is done to it."""
    given, weight = x[name], x.get(f"{name}_norm")
    if weight is None and turns is None:
        return given
    y = given.astype(jnp.float32)
    if weight is not None:
        mean = jnp.mean(y * y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(mean + np.float32(call.norm_eps))
        y = y * weight.astype(jnp.float32)
    if turns is not None:
        cos, sin = turns
        y = rotate(y, cos, sin, call.rotary_dim, call.interleaved)
    return y.astype(given.dtype) if name == "q" else y


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, rotary_dim: int, interleaved: bool
) -> jax.Array:
    """The pairs among the first `rotary_dim` elements of each row, turned."""
    pairs = x[..., :rotary_dim]
    if interleaved:
        pairs = pairs.reshape(*x.shape[:-1], rotary_dim // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
        turned = turned.reshape(*x.shape[:-1], rotary_dim)
    else:
        a, b = jnp.split(pairs, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return jnp.concatenate([turned, x[..., rotary_dim:]], -1)


def _stored(x: Any, of: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Tokens in the pool's dtype, and their scales where these are computed."""
    dtype = of["pool"][0].dtype
    if f"{name}_scales" in of:
        scale = row_scales(x, dtype)
        return quantize(x, scale[..., None], dtype), scale
    if f"{name}_scale" in of:
        # The compiler would turn a division by a constant into a product.
        scale = jax.lax.optimization_barrier(of[f"{name}_scale"])
        return quantize(x, scale[:, None] if scale.ndim else scale, dtype), None
    return x.astype(dtype), None


def row_scales(x: jax.Array, dtype: Any) -> jax.Array:
    """The scale of each row, float32 without its last axis.

    NaNs do not count, and infinities count as the largest number.
    """
    size = jnp.abs(x.astype(jnp.float32))
    size = jnp.where(jnp.isnan(size), np.float32(0), jnp.minimum(size, HUGE))
    largest = jax.lax.optimization_barrier(jnp.float32(LARGEST[dtype.name]))
    return jnp.maximum(size.max(-1) / largest, SMALLEST_SCALE)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale, rounded to nearest even; beyond the dtype's range the nearest end.

    NaN stays NaN, and is 0 as an int8.
    """
    y = x.astype(jnp.float32) / scale
    if dtype == jnp.int8:
        y = jnp.where(jnp.isnan(y), np.float32(0), y)
        return jnp.clip(jnp.round(y), np.float32(-128), np.float32(127)).astype(dtype)
    largest = np.float32(LARGEST[dtype.name])
    return jnp.clip(y, -largest, largest).astype(dtype)


# ---- where it is written -------------------------------------------------------------


def _sides(call: Append, x: dict[str, Any]) -> list[tuple[str, Side, tuple[str, ...]]]:
    """What is written: its name, how it lies, and the axes of a token's values."""
    layers = ("L",) if call.all_layers else ()
    found = [("pool", call.pool, (*layers, "O", "H", "D"))]
    for name in ("k_scales", "v_scales"):
        if name not in x:
            continue
        axes = "LBTH"[4 - x[name].ndim :]  # of all layers, or of the one written
        sizes = tuple((axis, call.extents[axis]) for axis in axes)
        side = Side(Form((), tuple((axis,) for axis in axes)), sizes, ("B", "T"))
        if "layer" in x and "L" in axes:
            side = dataclasses.replace(side, start="L")
        elif "L" in axes and not call.all_layers:
            side = dataclasses.replace(side, first=(("L", call.layer),))
        found.append((name, side, (*layers, "H")))
    return found


def _write(call: Append, x: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    """The arrays that hold `values` now, by block copies."""
    slots, start = x["slots"], x.get("layer")
    if start is not None:
        slots = jnp.where((start >= 0) & (start < call.num_layers), slots, -1)
    made: list[Any] = []
    for name, side, axes in _sides(call, x):
        arrays = x["pool"] if name == "pool" else [x[name]]
        at = start if side.start else None
        if call.zero_tail:
            arrays = _clear(call, side, axes, arrays, slots, at)
        made += _copy_tokens(call, side, axes, arrays, values[name], slots, at)
    return made


def _copied_by(call: Append) -> str | None:
    """Who moves what is computed here: the copy kernel, or what was asked for."""
    return "xla" if call.implementation == "xla" else None


def _copy_tokens(
    call: Append, side: Side, axes: Any, arrays: Any, values: Any, slots: Any, at: Any
) -> list[Any]:
    """Arrays with a token's values in each slot."""
    sizes = call.extents
    extents = (("N", slots.shape[0]), *((axis, sizes[axis]) for axis in axes))
    table = ("O",) if "O" in axes else ()
    stored = [("L",)] if "L" in axes else []
    stored += [("N",), *((axis,) for axis in axes if axis in "HD")]
    copy = Copy(
        extents=extents,
        src=Side(Form(table, tuple(stored)), extents),
        dst=side,
        in_place=True,
        implementation=_copied_by(call),
    )
    return local_block_copy(copy, values, arrays, (None, slots, None, at))


def _clear(
    call: Append, side: Side, axes: Any, arrays: Any, slots: Any, at: Any
) -> list[Any]:
    """Arrays with zeros in each block whose first slot is written.

    They are copies of a block with the id −1, which reads zeros.
    """
    sizes, count = call.extents, slots.shape[0]
    first = (slots >= 0) & (slots % sizes["T"] == 0)
    blocks = jnp.where(first, slots // sizes["T"], -1)
    box = [*axes, "T"]
    block = tuple((axis, sizes[axis]) for axis in box)
    form = Form((), (("B",), *((axis,) for axis in box)))
    copy = Copy(
        extents=(("N", count), *block),
        src=Side(form, (("B", 1), *block), ("B",)),
        dst=dataclasses.replace(side, index=("B",)),
        in_place=True,
        implementation=_copied_by(call),
    )
    none = jnp.zeros([1, *(n for _, n in block)], arrays[0].dtype)
    bad = jnp.full(count, -1, jnp.int32)
    return local_block_copy(copy, [none], arrays, (bad, blocks, None, at))
