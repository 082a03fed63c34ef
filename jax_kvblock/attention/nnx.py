"""`attention_fn`: flash_attention for flax's `nnx.MultiHeadAttention`.

Nothing of flax is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_kvblock.attention import arguments, dropout
from jax_kvblock.attention.dot_product import attend
from jax_kvblock.attention.options import PrecisionLike
from jax_kvblock.attention.precision import resolve
from jax_kvblock.core.checks import (
    as_array,
    check_dtype,
    check_random_key,
    show,
)
from jax_kvblock.core.types import ArrayIn

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

_WHERE = "attention_fn"


def attention_fn(
    query: Float[ArrayIn, "*batch T N H"],
    key: Float[ArrayIn, "*batch S K H"],
    value: Float[ArrayIn, "*batch S K Hv"],
    bias: Float[ArrayIn, "..."] | None = None,
    mask: Shaped[ArrayIn, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: object = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: object = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> Float[jax.Array, "*batch T N Hv"]:
    """The `attention_fn` of `flax.nnx.MultiHeadAttention`, with flash attention.

    Its parameters are those of `flax.nnx.dot_product_attention`, its results those of
    `jax_kvblock.dot_product_attention`, its dropout that of `flash_attention`: other
    probabilities become 0 than flax's own function takes for the same key.

    Args:
      query: `[batch..., T, N, H]`, any number of batch dims.
      key: `[batch..., S, K, H]`, N a multiple of K.
      value: like `key`.
      bias: broadcasts to `[batch..., N, T, S]`.
      mask: the same; False (or 0: flax's masks may be floats) takes no part. Also that
        of the layer's decoding cache, which costs O(S) memory.
      broadcast_dropout: True drops the same pairs of a query and a key in every batch
        member and head, as flax does; False others in each.
      dropout_rng: which ones, a key of `jax.random` (typed, or raw, uint32[2] or
        uint32[4]); the layer takes it from its `rngs`. It may be traced.
      dropout_rate: the share of the weights that become 0, as in `flash_attention`: a
        Python number below 1, rounded to a 128th. What is left is divided by what the
        rounded rate leaves.
      deterministic: True drops nothing, whatever the rate.
      dtype: what q, k and v are cast to, their common dtype unless given.
      precision: of the products of float32, as for `flash_attention`; those of 16-bit
        inputs are exact and added in float32.
      module: the module that wants the weights (`sow_weights=True`): an error, since
        the weights are never in memory.
      promote_dtype: casts q, k and v, `promote_dtype((q, k, v), dtype=dtype)`.
      is_causal: query `i` attends to keys up to `i`.

    Returns:
      `[batch..., T, N, H]`.

    Raises:
      NotImplementedError: weights to sow.
      TypeError, ValueError: see `dot_product_attention` and the rate of
        `flash_attention`; there is a rate and `dropout_rng` is no key.

    Example:
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=jax_kvblock.attention_fn,
      ... )
      >>> layer(jnp.ones((2, 16, 64)), is_causal=True).shape
      (2, 16, 64)
    """
    rate = _rate(dropout_rate, broadcast_dropout, deterministic)
    if module is not None:
        raise NotImplementedError(
            f"{_WHERE}: sow_weights=True is not supported: the weights are never in "
            "memory; use attention_fn=nnx.dot_product_attention where they are wanted"
        )
    given = {"query": query, "key": key, "value": value}
    q, k, v = (as_array(_WHERE, name, x) for name, x in given.items())
    if dtype is not None:
        dtype = check_dtype(_WHERE, "dtype", dtype)
    if promote_dtype is not None:
        q, k, v = promote_dtype((q, k, v), dtype=dtype)
    else:
        if dtype is None:
            dtype = jnp.result_type(q, k, v)
        q, k, v = (a.astype(dtype) for a in (q, k, v))
    if bias is not None:
        bias = as_array(_WHERE, "bias", bias)
    if mask is not None:
        mask = as_array(_WHERE, "mask", mask).astype(bool)

    dims = q.shape[:-3]
    if q.ndim < 3 or k.shape[:-3] != dims or v.shape[:-3] != dims:
        raise ValueError(
            f"{_WHERE}: query, key and value must be [batch..., length, heads, dim] "
            f"with the same batch, got {show(q)}, {show(k)} and {show(v)}; "
            "broadcast them to one batch, or add the missing axes with x[None]"
        )
    q, k, v = (a.reshape(math.prod(dims), *a.shape[-3:]) for a in (q, k, v))
    products = resolve(_WHERE, precision, q.dtype)
    seed = None
    if rate:
        members = (q.shape[0], q.shape[2]) if broadcast_dropout else ()
        seed = jnp.broadcast_to(_key(dropout_rng), members)
    with jax.default_matmul_precision(products):  # jax.nn has no argument for it
        out = attend(
            q,
            k,
            v,
            _one_batch("bias", bias, dims),
            _one_batch("mask", mask, dims),
            is_causal=is_causal,
            dropout_rate=rate,
            dropout_seed=seed,
        )
    return out.reshape(*dims, *out.shape[-3:])


def _rate(rate: Any, broadcast: Any, deterministic: Any) -> float:
    """The rate at which this call drops."""
    fix = "close over a Python float, or build the layer with dropout_rate=0.0"
    rate = arguments.finite(_WHERE, "dropout_rate", rate, 0.0, fix)
    if rate == 0:
        return 0.0
    arguments.check_flags(
        _WHERE, broadcast_dropout=broadcast, deterministic=deterministic
    )
    if deterministic:
        return 0.0
    dropout.threshold_of(_WHERE, rate)
    return rate


def _key(rng: Any) -> jax.Array:
    """The key of jax.random, typed."""
    if rng is None:
        raise ValueError(
            f"{_WHERE}: dropout_rng must be given with a dropout_rate above 0, got "
            "None; pass a key of jax.random (layers take it from rngs=nnx.Rngs(0)), or "
            "deterministic=True"
        )
    fix = "pass jax.random.key(seed), or what rngs.dropout() gives"
    return check_random_key(_WHERE, "dropout_rng", rng, fix)


def _one_batch(name: str, x: Any, dims: tuple[int, ...]) -> Any:
    """`x`, which broadcasts to `[*dims, N, T, S]`, with one batch dim."""
    if x is None or x.ndim <= 3:
        return x
    own, tail = x.shape[:-3], x.shape[-3:]
    if all(size == 1 for size in own):
        return x.reshape(1, *tail)
    try:
        x = jnp.broadcast_to(x, (*dims, *tail))
    except ValueError:
        raise ValueError(
            f"{_WHERE}: {name} must broadcast to [batch..., N, T, S] with the batch "
            f"{list(dims)}, got {show(x)}; each of its dims must be 1 or that size"
        ) from None
    return x.reshape(math.prod(dims), *tail)
