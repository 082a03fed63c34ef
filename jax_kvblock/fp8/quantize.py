"""Queries, keys and values in 8 bits, with their scales."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention import AttentionScales
from jax_kvblock.attention.arguments import check_lengths
from jax_kvblock.attention.eight_bits import DTYPE, SCALE_ROWS
from jax_kvblock.attention.qkv import BATCHED, check_qkv
from jax_kvblock.core.types import ArrayIn, Integers
from jax_kvblock.fp8.config import FP8AttentionConfig, Shared

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST = 448.0  # of e4m3
PLAIN = dataclasses.replace(BATCHED, narrow=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedQKV:
    """What `flash_attention(q, k, v, scales=scales)` takes, for these arrays.

    Attributes:
      q, k, v: `float8_e4m3fn`, in the shapes of the arrays.
      scales: float32, `AttentionScales`.
      shift: float32 `[B, T, N]`: scale-free products of the queries with the mean that
        was taken from the keys, or None. `scale * shift` is what the log-sum-exp of
        `q`, `k` lacks. Computed where it is used, under jit.
    """

    q: Float[jax.Array, "B T N D"]
    k: Float[jax.Array, "B S K D"]
    v: Float[jax.Array, "B S K Dv"]
    scales: AttentionScales
    shift: Float[jax.Array, "B T N"] | None


def quantize_qkv(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = None,
    *,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
) -> QuantizedQKV:
    """q, k and v as `float8_e4m3fn` and scales; works under jit, vmap and sharding.

    Numbers are divided by their scale and rounded to nearest, ties to even.

    Args:
      q, k, v: `[B, T, N, D]`, `[B, S, K, D]`, `[B, S, K, Dv]`, one of bfloat16, float16
        and float32.
      config: which numbers share a scale; `FP8AttentionConfig()` unless given.
      q_lens, kv_lens: int32 `[B]`. Rows beyond may hold anything: they count for no
        scale and no mean, and become zeros.

    Returns:
      A `QuantizedQKV`.

    Raises:
      TypeError, ValueError: a shape, a dtype or the config does not fit.

    Example:
      >>> x = quantize_qkv(q, k, v)
      >>> out = flash_attention(x.q, x.k, x.v, scales=x.scales, causal=True)
    """
    where = "quantize_qkv"
    checked = check_qkv(where, PLAIN, q, k, v)
    if config is None:
        config = FP8AttentionConfig()
    if not isinstance(config, FP8AttentionConfig):
        raise TypeError(
            f"{where}: config must be an FP8AttentionConfig, got "
            f"{type(config).__name__}; lengths go by name"
        )
    arrays = [jnp.asarray(x) for x in checked]
    batch = arrays[0].shape[0]
    lens = (
        check_lengths(where, "q_lens", q_lens, batch),
        check_lengths(where, "kv_lens", kv_lens, batch),
    )
    return _quantize(config, *arrays, *lens)


# One program, also outside of jit.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _quantize(
    config: FP8AttentionConfig, q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any
) -> QuantizedQKV:
    shift = None
    q, k, v = _real(q, q_lens), _real(k, kv_lens), _real(v, kv_lens)
    if config.smooth_keys:
        mean = _mean(k, kv_lens)
        group = q.shape[2] // k.shape[2]
        split = q.reshape(*q.shape[:2], k.shape[2], group, q.shape[3])
        shift = jnp.einsum(
            "btkgd,bkd->btkg",
            split.astype(jnp.float32),
            mean,
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(q.shape[:3])
        centred = k.astype(jnp.float32) - mean[:, None]
        k = _real(centred.astype(k.dtype), kv_lens)
    if config.rotate:
        turn = _rotation(q.shape[3])
        q, k = _turned(q, turn), _turned(k, turn)
    q8, q_scales = _in_8_bits(q, config.queries)
    k8, k_scales = _in_8_bits(k, config.keys)
    v8, v_scales = _in_8_bits(v, config.values)
    return QuantizedQKV(
        q8, k8, v8, AttentionScales(q_scales, k_scales, v_scales), shift
    )


@functools.cache
def _rotation(dim: int) -> np.ndarray:
    """A random orthogonal matrix, float32, always the same."""
    rng = np.random.default_rng(dim)
    return np.linalg.qr(rng.normal(size=(dim, dim)))[0].astype(np.float32)


def _turned(x: jax.Array, turn: np.ndarray) -> jax.Array:
    """In x's dtype: what 16 bits round is little beside what 8 bits will."""
    return jnp.einsum("bthd,de->bthe", x, turn.astype(x.dtype))


def _real(x: jax.Array, lens: jax.Array | None) -> jax.Array:
    """Rows beyond a length become zeros."""
    if lens is None:
        return x
    rows = jnp.arange(x.shape[1])[None, :] < lens[:, None]
    return jnp.where(rows[..., None, None], x, 0)


def _mean(k: jax.Array, lens: jax.Array | None) -> jax.Array:
    """Of each head's keys, float32 `[B, K, D]`."""
    rows = k.shape[1]
    count = jnp.full((k.shape[0],), rows) if lens is None else jnp.clip(lens, 0, rows)
    total = jnp.sum(k.astype(jnp.float32), axis=1)
    return total / jnp.maximum(count, 1)[:, None, None].astype(jnp.float32)


def _in_8_bits(x: jax.Array, shared: Shared) -> tuple[jax.Array, jax.Array]:
    """The numbers and their scales, `[B, heads, 1 or blocks]`."""
    batch, rows, heads, dim = x.shape
    length = SCALE_ROWS if shared == "block" else max(rows, 1)
    blocks = max(-(-rows // length), 1)
    wide = x.astype(jnp.float32)
    padded = jnp.pad(wide, ((0, 0), (0, blocks * length - rows), (0, 0), (0, 0)))
    parts = padded.reshape(batch, blocks, length, heads, dim)
    largest = jnp.max(jnp.abs(parts), axis=(2, 4), initial=0.0)
    if shared == "tensor":
        largest = jnp.broadcast_to(largest.max(2, keepdims=True), largest.shape)
    # Of zeros any scale serves. A NaN stays one.
    scales = jnp.where(largest == 0, 1.0, largest / LARGEST)
    parts = jnp.clip(parts / scales[:, :, None, :, None], -LARGEST, LARGEST)
    x8 = parts.astype(DTYPE).reshape(batch, -1, heads, dim)[:, :rows]
    return x8, jnp.swapaxes(scales, 1, 2)
