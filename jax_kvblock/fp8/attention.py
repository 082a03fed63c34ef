"""`fp8_attention`: quantize, and attend in 8 bits; gradients in the inputs' dtype."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_kvblock.attention import flash_attention
from jax_kvblock.attention.arguments import check_flags, normalize
from jax_kvblock.attention.options import Output, Rows
from jax_kvblock.attention.qkv import BATCHED, check_qkv
from jax_kvblock.core.types import ArrayIn, IdRows, Integers
from jax_kvblock.fp8 import derivatives
from jax_kvblock.fp8.config import FP8AttentionConfig
from jax_kvblock.fp8.quantize import quantize_qkv

if TYPE_CHECKING:
    from jaxtyping import Float

_WHERE = derivatives.WHERE


class FP8Options(TypedDict, total=False):
    """What `fp8_attention` takes by name, but for `return_lse`."""

    causal: bool
    window: tuple[int | None, int | None] | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    scale: float | None
    q_offset: Integers | int | None
    kv_offset: Integers | int | None
    implementation: str | None


@overload
def fp8_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[FP8Options],
) -> Output: ...
@overload
def fp8_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[FP8Options],
) -> tuple[Output, Rows]: ...
@overload
def fp8_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = ...,
    *,
    return_lse: bool,
    **options: Unpack[FP8Options],
) -> Output | tuple[Output, Rows]: ...
def fp8_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: IdRows | tuple[IdRows, IdRows] | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    scale: float | None = None,
    q_offset: Integers | int | None = None,
    kv_offset: Integers | int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Output | tuple[Output, Rows]:
    """Attention whose two products are in 8 bits, of arrays that are quantized first.

    The same as `quantize_qkv` and `flash_attention(..., scales=...)`, with the
    log-sum-exp of the keys as they were. Probabilities are rounded to e4m3, too: beside
    `flash_attention` a row differs by about 5 % of its size where queries, keys and
    values are normally distributed, or 4 % with queries and keys in int8. Sums are
    float32: the tensor cores' own, which keep fewer bits, never go beyond 512 keys.

    The gradients of q, k and v are those of `flash_attention`, in their dtype and of
    the arrays as they are; the forward pass is computed once more for them. They are of
    reverse mode, once: forward mode and derivatives of gradients are errors, and
    `flash_attention` of the arrays in bfloat16 has both.

    Args:
      q, k, v: `[B, T, N, D]`, `[B, S, K, D]`, `[B, S, K, Dv]`, bfloat16 or float16 (or
        float32, whose gradients are float32 then).
      config: which numbers share a scale, and what queries and keys become;
        `FP8AttentionConfig()` unless given.
      causal, window, segment_ids, q_lens, kv_lens, scale, q_offset, kv_offset,
        return_lse: as in `flash_attention`.
      implementation: "cuda_sm90" (Hopper; head dims that are multiples of 16 up to
        128), or None, which is that or an error: nothing is computed in more bits
        unasked. "xla" computes the same from the quantized arrays in float32.

    Returns:
      `[B, T, N, Dv]` in bfloat16; with `return_lse` the pair `(out, lse)`, float32 `[B,
      T, N]`. lse is of the rounded probabilities: off by up to 0.06, beside what the
      rounding of queries and keys does.

    Raises:
      TypeError, ValueError: an argument does not fit, or no hardware in reach
        multiplies 8 bits; the message says what would.
      NotImplementedError: a derivative of forward mode or of a gradient.

    Example:
      >>> q = jnp.ones((2, 1024, 8, 128), jnp.bfloat16)
      >>> k = v = jnp.ones((2, 1024, 2, 128), jnp.bfloat16)
      >>> fp8_attention(q, k, v, causal=True, implementation="xla").shape
      (2, 1024, 8, 128)

    Source: Shah et al., FlashAttention-3 (arXiv:2407.08608); Zhang et al.,
    SageAttention2 (arXiv:2411.10958).
    """
    check_flags(_WHERE, return_lse=return_lse)
    if config is None:
        config = FP8AttentionConfig()
    if not isinstance(config, FP8AttentionConfig):
        raise TypeError(
            f"{_WHERE}: config must be an FP8AttentionConfig, got "
            f"{type(config).__name__}; options go by name"
        )
    q, k, v = check_qkv(_WHERE, BATCHED, q, k, v)
    static: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    arrays: dict[str, Any] = {
        "segment_ids": segment_ids,
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
    }
    # The one check of these, in this function's name.
    normalize(_WHERE, q, k, v, **static, **arrays)
    known = {name: x for name, x in arrays.items() if x is not None}
    options = tuple(static.items())
    how = (config, options, return_lse, implementation)
    q, k, v = (derivatives.in_reverse(jnp.asarray(x)) for x in (q, k, v))
    return _attend(how, q, k, v, known)


def _forward(how: Any, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    config, options, return_lse, implementation = how
    lens = {n: arrays[n] for n in ("q_lens", "kv_lens") if n in arrays}
    by = "xla" if implementation == "xla" else None
    x = quantize_qkv(q, k, v, config, implementation=by, **lens)
    made = flash_attention(
        x.q,
        x.k,
        x.v,
        scales=x.scales,
        return_lse=return_lse,
        implementation=implementation,
        **dict(options),
        **arrays,
    )
    if not return_lse or x.shift is None:
        return made
    out, lse = made
    scale = dict(options)["scale"]
    factor = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    return out, lse + factor * x.shift


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Any, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    return _forward(how, q, k, v, arrays)


def _attend_forward(how: Any, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    q, k, v = (derivatives.once(x) for x in (q, k, v))
    return _forward(how, q, k, v, arrays), (q, k, v, arrays)


def _attend_backward(how: Any, kept: Any, cotangents: Any) -> Any:
    _, options, return_lse, _ = how
    q, k, v, arrays = kept

    def exact(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(
            q, k, v, return_lse=return_lse, **dict(options), **arrays
        )

    made, transpose = jax.vjp(exact, q, k, v)
    out = made[0] if return_lse else made
    if return_lse:
        cotangents = (cotangents[0].astype(out.dtype), cotangents[1])
    else:
        cotangents = cotangents.astype(out.dtype)
    return (*transpose(cotangents), None)


_attend.defvjp(_attend_forward, _attend_backward)
