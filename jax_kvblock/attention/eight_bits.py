"""Queries, keys and values in 8 bits: their scales, and what they stand for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import Operands, row_of_each
from jax_kvblock.core import debug
from jax_kvblock.core.checks import check_array, show, to_jax
from jax_kvblock.core.types import ArrayIn

if TYPE_CHECKING:
    from jaxtyping import Float

# Rows that share a scale, where there are several; KVBLOCK_ATTENTION_SCALE_ROWS.
SCALE_ROWS = 128
DTYPE = np.dtype(jnp.float8_e4m3fn)
INTEGERS = np.dtype(np.int8)  # of queries and keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionScales:
    """What queries, keys and values in 8 bits are multiplied by, float32.

    Each is a number for the whole array, one for each of its heads, `[N]` or `[K]`, or
    `[B|1, N|1, blocks]`: for a head one number, or one for each 128 rows, `ceil(T /
    128)` or `ceil(S / 128)`. Values have one for a head. A scale is not negative: a
    negative one, or NaN, makes NaN of every row that it reaches. With 0 an array is
    zeros there. An infinite one of NumPy is an error, and any under `debug_checks`;
    elsewhere rows that it reaches have no meaning.

    Attributes:
      q, k, v: the scales of each.
    """

    q: Float[ArrayIn, "*B_N_blocks"]
    k: Float[ArrayIn, "*B_K_blocks"]
    v: Float[ArrayIn, "*B_K_1"]


def check_scales(where: str, scales: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """The scales as operands: float32 `[B|1, heads, 1 or blocks]`; Nones without."""
    if q.dtype not in (DTYPE, INTEGERS):
        if scales is not None:
            raise TypeError(
                f"{where}: scales are for 8 bits, got {show(q)}; leave them out, or "
                "quantize with jax_kvblock.fp8.quantize_qkv"
            )
        return None, None, None
    if not isinstance(scales, AttentionScales):
        raise TypeError(
            f"{where}: {q.dtype} needs scales=AttentionScales(q, k, v), got "
            f"{type(scales).__name__}; jax_kvblock.fp8.quantize_qkv makes them"
        )
    batch = q.shape[0]

    def operand(name: str, heads: int, rows: int | None) -> jax.Array:
        x = check_array(where, f"scales.{name}", getattr(scales, name))
        if x.dtype != jnp.float32:
            raise TypeError(
                f"{where}: scales.{name} must be float32, got {show(x)}; cast it with "
                ".astype(jnp.float32)"
            )
        blocks = 1 if rows is None else -(-rows // SCALE_ROWS)
        if x.ndim == 3:
            fits = (
                x.shape[0] in (1, batch)
                and x.shape[1] in (1, heads)
                and x.shape[2] in (1, blocks)
            )
        else:
            fits = x.shape in ((), (heads,))
        if not fits:
            of_blocks = "" if rows is None else f" or {blocks}"
            raise ValueError(
                f"{where}: scales.{name} must be [], [{heads}] or [1 or {batch}, 1 or "
                f"{heads}, 1{of_blocks}] (a block is {SCALE_ROWS} rows), got {show(x)}"
            )
        if not isinstance(x, jax.Array):
            _look(where, name, scales=np.asarray(x))
        x = to_jax(x)
        debug.check(_look, where, name, scales=x)
        if x.ndim < 3:
            x = x.reshape(1, -1, 1)
        return jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2]))

    heads, kv_heads = q.shape[-2], k.shape[-2]
    return (
        operand("q", heads, q.shape[-3]),
        operand("k", kv_heads, k.shape[-3]),
        operand("v", kv_heads, None),
    )


def _look(where: str, name: str, *, scales: np.ndarray) -> None:
    at = debug.first_bad(np.isinf(scales))
    if at is not None:
        raise ValueError(
            f"{where}: {debug.place(f'scales.{name}', at)} must be finite, got "
            f"{float(scales[at])}; leave what is not finite out of the largest number "
            "that a scale is made of"
        )


def widened(x: Operands) -> Operands:
    """The same call in float32: what the numbers in 8 bits stand for."""

    def of(a: jax.Array, scales: jax.Array) -> jax.Array:
        batch, rows = a.shape[:2]
        each = jnp.where(scales >= 0, scales, jnp.nan)
        if each.shape[2] > 1:
            each = jnp.repeat(each, SCALE_ROWS, axis=2)[..., :rows]
        each = row_of_each(jnp.swapaxes(each, 1, 2), batch)
        # Or XLA drops the conversion to 8 bits, where that is in the same program.
        return jax.lax.optimization_barrier(a).astype(jnp.float32) * each[..., None]

    return x._replace(
        q=of(x.q, x.q_scales),
        k=of(x.k, x.k_scales),
        v=of(x.v, x.v_scales),
        q_scales=None,
        k_scales=None,
        v_scales=None,
    )
