"""`dot_product_attention`: flash_attention behind the signature of jax.nn."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from jax_kvblock.attention import arguments, cudnn
from jax_kvblock.attention.dispatch import IMPLEMENTATIONS, goes_to_cudnn
from jax_kvblock.attention.flash import flash_attention
from jax_kvblock.attention.options import DotProductOptions, Output, Rows
from jax_kvblock.attention.precision import resolve
from jax_kvblock.attention.qkv import DROP_IN, check_qkv
from jax_kvblock.core.checks import as_array, check_choice, show, shown
from jax_kvblock.core.types import ArrayIn, Integers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


_WHERE = "dot_product_attention"


@overload
def dot_product_attention(
    query: Float[ArrayIn, "*B T N H"],
    key: Float[ArrayIn, "*B S K H"],
    value: Float[ArrayIn, "*B S K Hv"],
    bias: Float[ArrayIn, "..."] | None = ...,
    mask: Bool[ArrayIn, "..."] | None = ...,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[DotProductOptions],
) -> Output: ...
@overload
def dot_product_attention(
    query: Float[ArrayIn, "*B T N H"],
    key: Float[ArrayIn, "*B S K H"],
    value: Float[ArrayIn, "*B S K Hv"],
    bias: Float[ArrayIn, "..."] | None = ...,
    mask: Bool[ArrayIn, "..."] | None = ...,
    *,
    return_residual: Literal[True],
    **options: Unpack[DotProductOptions],
) -> tuple[Output, Rows]: ...
@overload
def dot_product_attention(
    query: Float[ArrayIn, "*B T N H"],
    key: Float[ArrayIn, "*B S K H"],
    value: Float[ArrayIn, "*B S K Hv"],
    bias: Float[ArrayIn, "..."] | None = ...,
    mask: Bool[ArrayIn, "..."] | None = ...,
    *,
    return_residual: bool,
    **options: Unpack[DotProductOptions],
) -> Output | tuple[Output, Rows]: ...
def dot_product_attention(
    query: Float[ArrayIn, "*B T N H"],
    key: Float[ArrayIn, "*B S K H"],
    value: Float[ArrayIn, "*B S K Hv"],
    bias: Float[ArrayIn, "..."] | None = None,
    mask: Bool[ArrayIn, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integers | None = None,
    key_value_seq_lengths: Integers | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Output | tuple[Output, Rows]:
    """`jax.nn.dot_product_attention` in O((T + S) N H) memory.

    The same signature and meaning; where results differ:

    - A row that attends to nothing gives zeros, and −inf as its residual. (jax.nn
      gives the mean of the values, masked ones too.) Such rows are those beyond
      `query_seq_lengths`, those of batch members without keys, and those that the mask,
      the window and causality leave no key.
    - float32 is multiplied at the highest precision, not at jax's default one, where
      `jax.default_matmul_precision` is not set.
    - Probabilities are not rounded to the inputs' dtype before they meet the values.
    - Masked keys weigh exactly nothing, whatever their finite scores.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`, bfloat16, float16 or float32 (float64 where
        jax allows it), H up to 256. (An H that is no multiple of 8 is padded.)
      key: `[B, S, K, H]` or `[S, K, H]`, N a multiple of K.
      value: like `key`; its last dim may differ.
      bias: floats that broadcast to `[B, N, T, S]`, added to the scores;
        differentiable.
      mask: bool that broadcasts to `[B, N, T, S]`; False takes no part. One of keys
        alone, `[B|1, 1, 1, S]`, or of queries alone, `[B|1, 1, T, 1]`, costs O(S) or
        O(T) memory and skips what it masks; others become a bias.
      scale: of the scores, `1 / sqrt(H)` unless given. A Python number.
      is_causal: query `i` attends to keys up to `i`, counted from the first of both.
      query_seq_lengths, key_value_seq_lengths: int32 `[B]`.
      local_window_size: `(left, right)`, or one integer for both, compiled in: query
        `i` attends to keys from `i - left` to `i + right`, and with `is_causal` to none
        after `i`.
      implementation: as for `flash_attention`; "xla" is ours in blocks, not jax.nn's.
      return_residual: also return the log-sum-exp of the scores, `[B, T, N]` (or
        `[T, N]`), in key's dtype and without a gradient, as jax.nn does.
        `flash_attention(return_lse=True)` gives it in float32 and differentiable.

    Returns:
      An array like `query` (with value's last dim); with `return_residual` the pair of
      it and the residual.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; the message says
        what would.

    Example:
      >>> x = jnp.ones((2, 128, 4, 64))
      >>> mask = jnp.arange(128) < jnp.array([100, 128])[:, None]
      >>> dot_product_attention(x, x, x, mask=mask[:, None, None], is_causal=True).shape
      (2, 128, 4, 64)
    """
    return attend(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_residual=return_residual,
    )


def attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
    return_residual: Any = False,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
) -> Any:
    """`dot_product_attention`, and with dropout, as in `flash_attention`."""
    check_choice(_WHERE, "implementation", implementation, (None, *IMPLEMENTATIONS))
    arguments.check_flags(_WHERE, is_causal=is_causal, return_residual=return_residual)
    given = {"query": query, "key": key, "value": value}
    query, key, value = (as_array(_WHERE, name, x) for name, x in given.items())
    check_qkv(_WHERE, DROP_IN, query, key, value)
    batch = query.shape[0] if query.ndim == 4 else 1
    t, n, h = query.shape[-3:]
    full = (batch, n, t, key.shape[-3])
    return _attend(
        query,
        key,
        value,
        _bias(bias, full),
        _mask(mask, full),
        arguments.check_lengths(_WHERE, "query_seq_lengths", query_seq_lengths, batch),
        arguments.check_lengths(
            _WHERE, "key_value_seq_lengths", key_value_seq_lengths, batch
        ),
        causal=bool(is_causal),
        window=_window(local_window_size),
        scale=arguments.check_scale(_WHERE, scale, h),
        precision=resolve(_WHERE, None, query.dtype),
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        implementation=implementation,
        return_residual=bool(return_residual),
    )


# One program, also when called outside of jit: the mask's −inf is never a result that
# jax_debug_infs looks at.
@functools.partial(
    jax.jit,
    inline=True,
    static_argnames=(
        *("causal", "window", "scale", "precision", "implementation"),
        *("return_residual", "dropout_rate"),
    ),
)
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    q_lens: jax.Array | None,
    kv_lens: jax.Array | None,
    *,
    implementation: str | None,
    return_residual: bool,
    **options: Any,
) -> Any:
    """The checked call; a bias and a mask have four dims."""
    single = query.ndim == 3
    if single:
        query, key, value = query[None], key[None], value[None]
    batch, t, n, _ = query.shape
    s = key.shape[1]
    full = (batch, n, t, s)
    if mask is not None:
        segments = None if implementation == "cudnn" else _as_segments(mask, full)
        if segments is not None:
            options["segment_ids"] = segments
            mask = None
    if implementation == "cudnn" and (q_lens is None) != (kv_lens is None):
        # cuDNN wants both or none.
        q_lens = jnp.full(batch, t, jnp.int32) if q_lens is None else q_lens
        kv_lens = jnp.full(batch, s, jnp.int32) if kv_lens is None else kv_lens
    arrays = (_pad_dim(query), _pad_dim(key), _pad_dim(value))
    options |= dict(
        q_lens=q_lens,
        kv_lens=kv_lens,
        bias=_merge(bias, mask, full, query.dtype),
        implementation=implementation,
    )
    if implementation == "cudnn":
        config, x = arguments.normalize(_WHERE, *arrays, **options)
        goes_to_cudnn(_WHERE, config, x)
        result = cudnn.attention(config, x, return_residual)
    else:
        result = flash_attention(*arrays, return_lse=return_residual, **options)
    if single:
        result = jax.tree.map(lambda a: a[0], result)
    dv = value.shape[-1]
    if not return_residual:
        return result[..., :dv]
    out, lse = result
    return out[..., :dv], jax.lax.stop_gradient(lse.astype(key.dtype))


def _bias(x: Any, full: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = as_array(_WHERE, "bias", x)
    if x.dtype == jnp.bool_:
        raise TypeError(
            f"{_WHERE}: bias must be floats, got {show(x)}; pass a boolean as mask"
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"{_WHERE}: bias must be floats, got {show(x)}; pass its real part"
        )
    return _four_dims("bias", x, full)


def _mask(x: Any, full: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = as_array(_WHERE, "mask", x)
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"{_WHERE}: mask must be bool, got {show(x)}; cast it with .astype(bool), "
            "or pass what is added to the scores as bias"
        )
    return _four_dims("mask", x, full)


def _four_dims(name: str, x: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """A bias or mask with four dims, of which each is 1 or that of `full`."""
    dims = (1,) * (4 - x.ndim) + x.shape
    if len(dims) != 4 or any(a not in (1, b) for a, b in zip(dims, full, strict=True)):
        raise ValueError(
            f"{_WHERE}: {name} must broadcast to [B, N, T, S], here {list(full)}, got "
            f"{show(x)}; each of its dims must be 1 or that size"
        )
    return x.reshape(dims)


def _as_segments(mask: jax.Array, full: tuple[int, ...]) -> Any:
    """A mask of keys or of queries alone as segments, None for any other.

    What takes part is segment 0, what does not is a segment that nobody else is in.
    """
    batch, _, t, s = full
    if mask.shape[1] != 1 or (mask.shape[2] != 1 and mask.shape[3] != 1):
        return None
    q, kv = jnp.zeros((batch, t), jnp.int32), jnp.zeros((batch, s), jnp.int32)
    out = (~mask[:, 0]).astype(jnp.int32)
    if mask.shape[2] == 1:
        return q, kv + out[:, 0]
    return q + out[:, :, 0], kv


def _merge(
    bias: jax.Array | None,
    mask: jax.Array | None,
    full: tuple[int, ...],
    dtype: Any,
) -> jax.Array | None:
    """Bias and mask as one bias `[B|1, N|1, T, S]`."""
    if bias is not None and bias.dtype not in (dtype, jnp.float32):
        bias = bias.astype(jnp.float32)
    if mask is not None:
        zero = jnp.zeros((), dtype) if bias is None else bias
        bias = jnp.where(mask, zero, jnp.asarray(-jnp.inf, zero.dtype))
    if bias is None:
        return None
    return jnp.broadcast_to(bias, (*bias.shape[:2], *full[2:]))


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or any(side is None for side in pair):
        raise ValueError(
            f"{_WHERE}: local_window_size must be an integer of at least 0 or a pair "
            f"of them, got {shown(size)}; flash_attention has windows with open sides"
        )
    left, right = (
        arguments.window_side(_WHERE, "local_window_size", side) for side in pair
    )
    return left, right


def _pad_dim(x: jax.Array) -> jax.Array:
    """The last dim filled with zeros to a multiple of 8: the scores stay the same."""
    missing = -x.shape[-1] % 8
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x
