"""The CUDA kernels of casts to 8 bits: what they serve, and the calls of launchers.

`narrow` describes the call to the FFI handler in `cpp/ops/cast/cast_ffi.cc`,
`norm_narrow` to the one in `norm_cast_ffi.cc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi
from jax_kvblock.training.config import FP8Format

TARGET = "kvblock_cast"
# Rows and columns whose largest size is one number: KVBLOCK_CAST_TILE_ROWS, _COLUMNS.
TILE = (256, 128)
NORM_TARGET = "kvblock_norm_cast"
# KVBLOCK_NORM_CAST_ROWS, of a number; _COLUMNS, at least; _PARTS of a row, at most.
NORM_ROWS, NORM_COLUMNS, NORM_PARTS = 32, 512, 16


def refusal(shape: tuple[int, int], platform: str | None) -> str | None:
    """Why the kernel does not serve a matrix on a platform; None where it does."""
    if platform != "cuda":
        return (
            f"needs an NVIDIA GPU, and this is lowered for "
            f"{platform or 'another platform'}; use implementation='xla' or None"
        )
    if any(size % 16 for size in shape):
        return (
            "serves matrices whose rows and columns are multiples of 16, got "
            f"{list(shape)}; use implementation='xla' or None, or pad them"
        )
    return None


def narrow(
    x: jax.Array, scale: jax.Array, form: FP8Format, orders: Sequence[str]
) -> list[jax.Array]:
    """Codes of a matrix in these orders, and the largest size, by the launcher."""
    ffi.require_cuda_build()
    rows, columns = x.shape
    tiles = (-(-rows // TILE[0]), -(-columns // TILE[1]))
    results = _codes(x.shape, form, orders)
    results.append(jax.ShapeDtypeStruct(tiles, jnp.float32))
    call = jax.ffi.ffi_call(TARGET, results)
    *made, sizes = call(x, scale, **_flags(orders))
    return [*made, _largest(sizes)]


def _largest(sizes: jax.Array) -> jax.Array:
    """Of sizes, 0 of none. In one pass: jnp.max with initial=0 is two."""
    return jax.lax.reduce(sizes, np.float32(0), jax.lax.max, (0, 1))


def _codes(shape: Sequence[int], form: FP8Format, orders: Sequence[str]) -> list[Any]:
    shapes = {"codes": tuple(shape), "transposed": tuple(reversed(shape))}
    return [jax.ShapeDtypeStruct(shapes[order], form.dtype) for order in orders]


def _flags(orders: Sequence[str]) -> dict[str, np.int32]:
    return {name: np.int32(name in orders) for name in ("codes", "transposed")}


def norm_refusal(
    shape: tuple[int, int], dtype: np.dtype, platform: str | None
) -> str | None:
    """Why the kernel of norms does not serve a matrix; None where it does."""
    if reason := refusal(shape, platform):
        return reason
    most = 8192 if dtype == jnp.float32 else 16384
    if shape[1] > most:
        return (
            f"norms rows of up to {most} numbers of {dtype}, got {list(shape)}; use "
            "implementation='xla' or None"
        )
    capabilities = sorted(ffi.gpu_capabilities())
    if capabilities and (9, 0) not in capabilities:
        here = ".".join(map(str, capabilities[0]))
        return (
            f"norms on GPUs of compute capability 9.0, and this one has {here}; use "
            "implementation='xla' or None"
        )
    return None


def norm_part(columns: int) -> int:
    """kvblock_norm_cast_part: of how many columns a largest size is."""
    part = NORM_COLUMNS
    while part * NORM_PARTS < columns:
        part *= 2
    return part


def norm_narrow(
    x: jax.Array, gamma: jax.Array, scale: jax.Array, *residual: jax.Array,
    form: FP8Format, orders: Sequence[str], eps: float,
) -> list[jax.Array]:  # fmt: skip
    """Codes of a normed matrix in these orders, the largest size, 1 / rms of rows.

    With a residual also the sum.
    """
    ffi.require_cuda_build()
    rows, columns = x.shape
    tiles = (-(-rows // NORM_ROWS), -(-columns // norm_part(columns)))
    results = [
        *_codes(x.shape, form, orders),
        jax.ShapeDtypeStruct(tiles, jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for _ in residual),
    ]
    call = jax.ffi.ffi_call(NORM_TARGET, results)
    made = call(x, gamma, scale, *residual, **_flags(orders), eps=np.float32(eps))
    at = len(orders)
    return [*made[:at], _largest(made[at]), *made[at + 1 :]]
