"""Quantization in plain JAX: the specification, and where there is no kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.eight_bits import DTYPE, INTEGERS, SCALE_ROWS
from jax_kvblock.core.largest import largest_size
from jax_kvblock.fp8.call import Quantize, Way, blocks_of

LARGEST = {DTYPE: 448.0, INTEGERS: 127.0}
SMALLEST = np.float32(2.0**-126)  # of a scale: float32's smallest with all its digits
# Which columns change their sign, 32 to a word: digits of pi.
SIGNS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def quantize(call: Quantize, *operands: jax.Array) -> list[jax.Array]:
    """The results of a call."""
    made: list[jax.Array] = []
    lengths = call.lengths(operands)
    for way, x, lens in zip(call.ways, call.arrays(operands), lengths, strict=True):
        made += _quantize(way, x, lens)
    return made


def _quantize(way: Way, x: jax.Array, lens: jax.Array | None) -> list[jax.Array]:
    x = real_rows(x, lens)
    mean = _mean(x, lens) if way.centred else None
    # A turned mean is taken from turned rows: nothing is rounded to x's dtype between.
    y = _turned(x) if way.turned else x.astype(jnp.float32)
    if mean is not None:
        centre = _turned(mean) if way.turned else mean
        y = real_rows(y - centre[:, None], lens)
    codes, scales = _in_8_bits(y, way)
    return [codes, scales] if mean is None else [codes, scales, mean]


def real_rows(x: jax.Array, lens: jax.Array | None) -> jax.Array:
    """Rows beyond a length become zeros."""
    if lens is None:
        return x
    rows = jnp.arange(x.shape[1])[None, :] < lens[:, None]
    return jnp.where(rows[..., None, None], x, 0)


def _mean(x: jax.Array, lens: jax.Array | None) -> jax.Array:
    """Of each head's rows, float32 `[B, heads, D]`."""
    rows = x.shape[1]
    count = jnp.full((x.shape[0],), rows) if lens is None else jnp.clip(lens, 0, rows)
    total = jnp.sum(x.astype(jnp.float32), axis=1)
    return total / jnp.maximum(count, 1)[:, None, None].astype(jnp.float32)


@functools.cache
def _matrix(dim: int) -> tuple[np.ndarray, np.float32, bool]:
    """An orthogonal matrix, as one and a factor, and whether that has only ±1.

    Signs, and then a Hadamard matrix of the largest power of 2 that divides dim, times
    a matrix of cosines and sines for what is left. kvblock/quantize.h has the formula.
    """
    power = dim & -dim
    rest = dim // power
    word = np.array(SIGNS, np.uint32)[np.arange(dim) // 32 % len(SIGNS)]
    signs = np.where(word >> np.arange(dim, dtype=np.uint32) % 32 & 1, -1.0, 1.0)
    i = np.arange(power)
    hadamard = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) % 2)
    angle = 2 * np.pi / rest * np.outer(np.arange(rest), np.arange(rest))
    rotation = (np.cos(angle) + np.sin(angle)) / np.sqrt(rest)
    matrix = signs[:, None] * np.kron(rotation, hadamard)
    return matrix.astype(np.float32), np.float32(power**-0.5), rest == 1


def _turned(x: jax.Array) -> jax.Array:
    """Times the matrix, in float32 from exact products where there are only signs."""
    matrix, factor, only_signs = _matrix(x.shape[-1])
    if not only_signs:
        x = x.astype(jnp.float32)
    made = jnp.einsum(
        "...d,de->...e",
        x,
        matrix.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return made * factor


def _in_8_bits(x: jax.Array, way: Way) -> tuple[jax.Array, jax.Array]:
    """The codes of float32 numbers, and their scales `[B, heads, 1 or blocks]`."""
    batch, rows, heads, dim = x.shape
    shared, most = way.shared, LARGEST[way.dtype]
    # A product, which is the same everywhere: XLA makes one of some divisions.
    inverse = np.float32(1 / most)
    blocks = blocks_of(rows) if shared == "block" else 1
    length = SCALE_ROWS if shared == "block" else max(rows, 1)
    padded = jnp.pad(x, ((0, 0), (0, blocks * length - rows), (0, 0), (0, 0)))
    parts = padded.reshape(batch, blocks, length, heads, dim)
    if shared == "tensor":
        largest = largest_size(parts, (2, 3, 4))[:, :, None]
        largest = jnp.broadcast_to(largest, (batch, blocks, heads))
    else:
        largest = largest_size(parts, (2, 4))
    # Of zeros any scale serves. A NaN stays one.
    scales = jnp.where(largest == 0, 1.0, jnp.maximum(largest * inverse, SMALLEST))
    each = scales[:, :, None, :, None]
    # By the reciprocal, as kernels do and as XLA may rewrite a division: where a number
    # lies between two integers its last bit decides.
    parts = parts * (1 / each) if way.integers else parts / each
    parts = jnp.clip(parts, -most, most)
    if way.integers:  # of NaN the scale tells
        parts = jnp.where(jnp.isnan(parts), 0, jnp.rint(parts))
    x8 = parts.astype(way.dtype).reshape(batch, blocks * length, heads, dim)[:, :rows]
    return x8, jnp.swapaxes(scales, 1, 2)
