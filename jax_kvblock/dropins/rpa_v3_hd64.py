"""Ragged paged attention, version 3 for head dim 64: `ragged_paged_attention_hd64` of
tpu-inference's kernels/ragged_paged_attention/v3/kernel_hd64.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments, packed, ragged

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


def ragged_paged_attention_hd64(
    queries: Float[ArrayIn, "tokens N D"],
    keys: Shaped[ArrayIn, "tokens K D"],
    values: Shaped[ArrayIn, "tokens K D"],
    kv_cache: Shaped[ArrayIn, "P page rows pack D2"],
    kv_lens: Int[ArrayIn, " S"],
    page_indices: Int[ArrayIn, " S_W"],
    cu_q_lens: Int[ArrayIn, " S_1"],
    distribution: Int[ArrayIn, " 3"],
    attention_sink: Float[ArrayIn, " N"] | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = -0.7 * float(jnp.finfo(jnp.float32).max),
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
) -> tuple[Float[jax.Array, "tokens N D"], Shaped[jax.Array, "P page rows pack D2"]]:
    """`rpa_v3.ragged_paged_attention` over rows of a key and its value, with sinks.

    The function of that name and these arguments in tpu-inference. The cache is
    donated: it is updated in place, and what was passed is gone.

    Args:
      queries, keys, values, kv_lens, page_indices, cu_q_lens, distribution, sm_scale,
        sliding_window, soft_cap, q_scale, k_scale, v_scale: as in `rpa_v3`; always
        causal. Any head dim will do.
      kv_cache: `[P, page, ceil(K / pack), pack, 2 D]`: a head's key, then its value.
      attention_sink: floats `[N]`, a score of each query head that takes its share of
        the softmax and has no value; as it is, neither scaled nor capped.
      mask_value, chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block,
        vmem_limit_bytes, debug_mode: without effect.

    Returns:
      `[tokens, N, D]` in queries' dtype, and the cache. Tokens of no sequence give
      zeros.

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit.
    """
    where = "dropins.rpa_v3_hd64.ragged_paged_attention_hd64"
    del mask_value, chunk_prefill_size, vmem_limit_bytes, debug_mode
    del num_kv_pages_per_block, num_queries_per_block
    q = arguments.queries(where, "queries", queries)
    cache = packed.check_cache(where, "kv_cache", kv_cache, (5,))
    k, v = arguments.new_tokens(where, q, cache, keys=keys, values=values)
    layout = packed.in_rows(where, "kv_cache", cache, k.shape[1], k.shape[2])
    tables, lens = arguments.flat_tables(where, page_indices, kv_lens)
    config = ragged.Ragged(
        where=where,
        layout=layout,
        scale=arguments.number(where, "sm_scale", sm_scale),
        out_dtype=q.dtype,
        window=arguments.sliding_window(where, "sliding_window", sliding_window),
        softcap=arguments.soft_cap(where, "soft_cap", soft_cap),
        q_scale=arguments.divisor(where, "q_scale", q_scale),
        k_scale=arguments.factor(where, "k_scale", k_scale),
        v_scale=arguments.factor(where, "v_scale", v_scale),
        append=True,
    )
    step = ragged.Step(
        q=q,
        k=k,
        v=v,
        tables=tables,
        kv_lens=lens,
        starts=arguments.starts(where, "cu_q_lens", cu_q_lens, lens.shape[0]),
        num_seqs=arguments.count_of(where, "distribution", distribution, 3),
        sinks=arguments.sinks(where, "attention_sink", attention_sink, q.shape[1]),
    )
    out, _, cache = ragged.append_and_attend(config, step, cache)
    return out, cache
