"""`flash_attention`: the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from jax_kvblock.attention import arguments, cudnn, dispatch, primitive
from jax_kvblock.attention.config import AttentionConfig, AttentionTiles, Operands
from jax_kvblock.attention.derivatives import RESIDUAL_NAMES
from jax_kvblock.attention.eight_bits import AttentionScales
from jax_kvblock.attention.options import (
    FlashOptions,
    Output,
    PrecisionLike,
    Rows,
    SeedLike,
)
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.core.types import ArrayIn, IdRows, Integers

if TYPE_CHECKING:
    from jaxtyping import Float, Int8

__all__ = ["RESIDUAL_NAMES", "attention", "flash_attention", "output"]


@overload
def flash_attention(
    q: Float[ArrayIn, "*B T N D"] | Int8[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"] | Int8[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[FlashOptions],
) -> Output: ...
@overload
def flash_attention(
    q: Float[ArrayIn, "*B T N D"] | Int8[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"] | Int8[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    return_lse: Literal[True],
    **options: Unpack[FlashOptions],
) -> tuple[Output, Rows]: ...
@overload
def flash_attention(
    q: Float[ArrayIn, "*B T N D"] | Int8[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"] | Int8[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    return_lse: bool,
    **options: Unpack[FlashOptions],
) -> Output | tuple[Output, Rows]: ...
def flash_attention(
    q: Float[ArrayIn, "*B T N D"] | Int8[ArrayIn, "*B T N D"],
    k: Float[ArrayIn, "*B S K D"] | Int8[ArrayIn, "*B S K D"],
    v: Float[ArrayIn, "*B S K Dv"],
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: IdRows | tuple[IdRows, IdRows] | None = None,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    cu_seqlens: tuple[Integers, Integers] | None = None,
    bias: Float[ArrayIn, "B_or_1 N_or_1 T S"] | None = None,
    softcap: float | None = None,
    sinks: Float[ArrayIn, " N"] | None = None,
    scale: float | None = None,
    q_offset: Integers | int | None = None,
    kv_offset: Integers | int | None = None,
    tiles: AttentionTiles | None = None,
    scales: AttentionScales | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: SeedLike = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> Output | tuple[Output, Rows]:
    """Softmax attention in O((T + S) N D) memory.

    For query `i` and key `j` of one batch member and head, with query head `n` reading
    key head `n // (N // K)`::

        score = scale * dot(q[i], k[j])
        score = softcap * tanh(score / softcap)      with softcap
        score = score + bias[i, j]                   with bias
        lse[i] = log(sum_j exp(score) + exp(sink))   the sink with sinks
        p[i, j] = exp(score - lse[i])
        p[i, j] = p[i, j] / (1 - rate) or 0          with dropout_rate
        out[i] = sum_j p[i, j] v[j]

    over the keys that `i` attends to. A row that attends to nothing gives zeros, and
    −inf as its lse (its sink, with sinks).

    Args:
      q: `[B, T, N, D]`, bfloat16, float16 or float32 (float64 where jax allows it). D
        is a multiple of 8 up to 256. Packed (with `cu_seqlens`): `[total, N, D]`.
      k: `[B, S, K, D]` in q's dtype, N a multiple of K. Packed: `[total, K, D]`.
      v: `[B, S, K, Dv]`; Dv may differ from D.
      causal: a query at `i` attends to keys `j` with `j + kv_offset <= i + q_offset`.
      window: `(left, right)`, integers that are compiled in: it attends to keys at most
        `left` before and `right` after its position; None is no bound.
      segment_ids: int32 `[B, T]` when T = S, or a pair `[B, T]`, `[B, S]`. A query
        attends to the keys of its own segment. Tiles without a common segment are
        skipped. A list of rows is an array; a tuple is a pair. Ids beyond int32 are an
        error in NumPy arrays and lists; in JAX arrays they count modulo 2**32: two
        that are 2**32 apart are one segment.
      q_lens, kv_lens: int32 `[B]`. What lies beyond is never read; outputs there are
        zeros and −inf. A length above T or S is T or S, one below 0 is 0.
      cu_seqlens: a pair of int32 `[B + 1]`, the first rows of B sequences that lie one
        after the other in q, and in k and v, and the end of the last. Sequences attend
        to themselves alone; the boundaries must not decrease. Rows of no sequence give
        zeros.
      bias: `[B|1, N|1, T, S]`, float32 or q's dtype; differentiable. −inf masks.
      softcap: a positive bound of the scores.
      sinks: float32 `[N]`: a score that every row of a head has beside its keys, with
        no value; differentiable.
      scale: a float, `1 / sqrt(D)` unless given.
      q_offset, kv_offset: int32 scalars or `[B]`: the positions of the first query and
        of the first key. They may be traced.
      tiles: `AttentionTiles`, the KV tiles that each query tile visits, and who attends
        in those that are partial. `AttentionTiles.from_mask` makes them of any mask.
      scales: `AttentionScales`, for q, k and v in `float8_e4m3fn`, or q and k in int8
        beside such v, which are multiplied by them. Products are in 8 bits then,
        probabilities are rounded to e4m3, and `out` is bfloat16. "cuda_sm90" computes
        that; "xla", by name alone, in float32. No derivatives:
        `jax_kvblock.fp8.fp8_attention` has them, and quantizes.
      dropout_rate: the share of the probabilities that become 0, a Python float from 0
        on and below 1, which is compiled in; the others are divided by what is left. It
        is rounded to a 128th, and that is the rate, exactly: 0.1 is 13 / 128. One that
        is rounded to 0 or 1 is an error, but 0 is none. lse is as without.
      dropout_seed: which ones, an integer, integers `[B]` or `[B, N]`, or a key of
        `jax.random` (typed of these shapes, or raw, uint32[2]). Needed with a rate. Of
        one for the call each batch member and head has bits of its own, of `[B]` each
        head. It may be traced; the same seed gives the same bits, forward and backward,
        on every device and by every implementation, however the call is batched or
        sharded. A pair's bit depends on its positions, of which offsets count in whole
        blocks of 16. Packed, `[B]` are the sequences.
      return_lse: also return the log-sum-exp of the scores, float32 `[B, T, N]` (packed
        `[total, N]`). It is differentiable.
      deterministic: the gradients' bits are the same every time.
      precision: of the products of float32, compiled in; 16-bit inputs have exact
        products, and float64 is float64. "highest": near float32's own error, in the
        kernels by three products on tensor cores for each. "default": in the kernels
        operands are rounded to TF32, 11 binary digits; in "xla" the products are of
        `jax.lax.Precision.DEFAULT`. None is `jax.default_matmul_precision`, and
        "highest" where that is not set. jax's names serve as well: all but HIGHEST
        ("float32") and algorithms with more digits are "default", as on GPUs.
      implementation: "cuda_sm90" (kernels for Hopper), "cuda" (kernels for sm_80 and
        newer, float32 too), "xla" (plain JAX in blocks, everywhere),
        "cudnn" (through jax.nn), or None for the best that serves the call; `python -m
        jax_kvblock` says which.

    Returns:
      `[B, T, N, Dv]` in q's dtype (packed `[total, N, Dv]`); with `return_lse` the pair
      `(out, lse)`.

    Where int32 is said, integers of any dtype serve, and lists, ranges and tensors of
    other libraries (by DLPack). Lengths and offsets beyond int32 stop at its ends.

    Values beyond `q_lens` and `kv_lens` and in tiles that are not listed may be
    anything, also NaN. Elsewhere, a masked key's score and bias may be anything, its
    value must be finite (and for gradients, or under a bias of −inf alone, the key as
    well).

    q, k, v, bias and sinks have first and second derivatives in forward and reverse
    mode (`jax.jvp`, `jax.grad`, `jax.hessian`). The kernels compute out, lse and first
    derivatives in reverse mode; forward mode and second derivatives are plain JAX in
    blocks on every platform.

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit, or two
        options exclude each other. The message says what would. The values of operands
        are looked at where they lie on the host: packed boundaries and tile lists.
      NotImplementedError: a third derivative is asked for.

    Example:
      >>> q = jnp.ones((2, 128, 8, 64), jnp.bfloat16)
      >>> k = v = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
      >>> flash_attention(q, k, v, causal=True).shape
      (2, 128, 8, 64)

    Source: Dao, FlashAttention-2 (arXiv:2307.08691).
    """
    where = "flash_attention"
    arguments.check_flags(where, return_lse=return_lse)
    config, x = arguments.normalize(
        where,
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        q_lens=q_lens,
        kv_lens=kv_lens,
        cu_seqlens=cu_seqlens,
        bias=bias,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        q_offset=q_offset,
        kv_offset=kv_offset,
        tiles=tiles,
        scales=scales,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )
    if dispatch.goes_to_cudnn(where, config, x, return_lse):
        return cudnn.attention(config, x, return_residual=False)
    if not return_lse:
        return output(config, x)
    out, lse = attention(config, x)
    return out, jnp.swapaxes(lse, -1, -2)


def attention(config: AttentionConfig, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a checked call; lse is `[B, N, T]` (packed `[N, T]`)."""
    o, lse = primitive.forward(config, Operands(*vary_alike(x)))
    return o, lse.value


def output(config: AttentionConfig, x: Operands) -> jax.Array:
    """out alone of a checked call."""
    return primitive.output(config, Operands(*vary_alike(x)))
