"""`ragged_paged_attention` of sglang-jax's
srt/kernels/ragged_paged_attention/ragged_paged_attention_v3.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_int32
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments, packed, ragged

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int, Shaped

    Blocks = tuple[int, int, int, int] | None


def ragged_paged_attention(
    queries: Float[ArrayIn, "tokens N D"],
    keys: Shaped[ArrayIn, "tokens K D"],
    values: Shaped[ArrayIn, "tokens K D"],
    kv_cache_fused: Shaped[ArrayIn, "P page rows pack padded"],
    kv_lens: Int[ArrayIn, " S"],
    page_indices: Int[ArrayIn, " pages"],
    cu_q_lens: Int[ArrayIn, " S_1"],
    cu_kv_lens: Int[ArrayIn, " S_1"],
    distribution: Int[ArrayIn, " 3"],
    custom_mask: Shaped[ArrayIn, " mask"] | None,
    attention_sink: Float[ArrayIn, " N"] | float | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = -0.7 * float(jnp.finfo(jnp.float32).max),
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: DTypeLike | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: Blocks = None,
    p_block_sizes: Blocks = None,
    m_block_sizes: Blocks = None,
    vmem_limit_bytes: int | None = None,
    out_dtype: DTypeLike | None = None,
    skip_kv_mask: bool = False,
    disable_semaphore_checks: bool = True,
    debug_mode: bool = False,
    mask_aligned_to_cu_kv: bool = False,
) -> tuple[
    Float[jax.Array, "tokens N D"], Shaped[jax.Array, "P page rows pack padded"]
]:
    """`rpa_v3.ragged_paged_attention` with tables of their own lengths, and sinks.

    The function of that name and these arguments in sglang-jax. The cache is donated:
    it is updated in place, and what was passed is gone.

    Args:
      queries, keys, values, kv_lens, cu_q_lens, distribution, sm_scale, sliding_window,
        soft_cap, q_scale, k_scale, v_scale, out_dtype: as in `rpa_v3`.
      kv_cache_fused: as `kv_cache` in `rpa_v3`. It comes back in its own shape (there,
        padded to a head dim of 128).
      page_indices: int32 `[pages]`, the tables of all sequences in a row.
      cu_kv_lens: int32 `[S + 1]`, sums of lengths that are rounded up to whole pages:
        sequence b's table begins at `ceil(cu_kv_lens[b] / page)` of page_indices, and
        has no pages where that is outside of them.
      custom_mask: None; masks are not served.
      attention_sink: floats `[N]`, or one for all heads: a score of each query head
        that takes its share of the softmax and has no value.
      causal: 1; 0, for a mask of its own, is not served.
      xai_temperature_len: beyond this position scores grow by
        `log2(position) / log2(xai_temperature_len)`, ahead of soft_cap.
      softmax_dtype, mask_value, chunk_prefill_size, d_block_sizes, p_block_sizes,
        m_block_sizes, vmem_limit_bytes, skip_kv_mask, disable_semaphore_checks,
        debug_mode, mask_aligned_to_cu_kv: without effect; sums are in float32.

    Returns:
      `[tokens, N, D]`, and the cache. Tokens of no sequence give zeros.

    Raises:
      NotImplementedError: custom_mask, or causal is 0.
      TypeError, ValueError: an argument's dtype, shape or value does not fit.
    """
    where = "dropins.sglang.ragged_paged_attention"
    del softmax_dtype, mask_value, chunk_prefill_size, vmem_limit_bytes, debug_mode
    del d_block_sizes, p_block_sizes, m_block_sizes, skip_kv_mask
    del disable_semaphore_checks, mask_aligned_to_cu_kv
    masks = "gather_kv and flash_attention with AttentionTiles.from_mask serve masks"
    arguments.refuse(where, masks, custom_mask=custom_mask)
    if causal != 1:
        raise NotImplementedError(f"{where}: causal must be 1, got {causal!r}; {masks}")
    q = arguments.queries(where, "queries", queries)
    cache = packed.check_cache(where, "kv_cache_fused", kv_cache_fused, (5,))
    k, v = arguments.new_tokens(where, q, cache, keys=keys, values=values)
    layout = packed.by_turns(where, "kv_cache_fused", cache, k.shape[1], k.shape[2])
    lens = arguments.lengths(where, "kv_lens", kv_lens)
    sequences = lens.shape[0]
    begins = arguments.starts(where, "cu_kv_lens", cu_kv_lens, sequences)
    config = ragged.Ragged(
        where=where,
        layout=layout,
        scale=arguments.number(where, "sm_scale", sm_scale),
        out_dtype=arguments.result_dtype(where, "out_dtype", out_dtype, q),
        window=arguments.sliding_window(where, "sliding_window", sliding_window),
        softcap=arguments.soft_cap(where, "soft_cap", soft_cap),
        q_scale=arguments.divisor(where, "q_scale", q_scale),
        k_scale=arguments.factor(where, "k_scale", k_scale),
        v_scale=arguments.factor(where, "v_scale", v_scale),
        temperature=arguments.temperature(
            where, "xai_temperature_len", xai_temperature_len
        ),
        append=True,
    )
    step = ragged.Step(
        q=q,
        k=k,
        v=v,
        tables=check_int32(where, "page_indices", page_indices, "[pages]", 1),
        kv_lens=lens,
        starts=arguments.starts(where, "cu_q_lens", cu_q_lens, sequences),
        num_seqs=arguments.count_of(where, "distribution", distribution, 3),
        sinks=arguments.sinks(where, "attention_sink", attention_sink, q.shape[1]),
        table_first=_first_entries(begins, cache.shape[1]),
    )
    out, _, cache = ragged.append_and_attend(config, step, cache)
    return out, cache


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _first_entries(begins: jax.Array, page: int) -> jax.Array:
    return -(-begins[:-1] // page)
