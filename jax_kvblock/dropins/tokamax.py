"""`batched_ragged_paged_attention` of tokamax's ops/batched_rpa/api.py, which is also
its `ragged_paged_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jax_kvblock.attention.arguments import check_flags
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments, packed, ragged

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int, Shaped

    Out = Float[jax.Array, "tokens N D"]
    Cache = Shaped[jax.Array, "P page *rows padded"]
    Lse = Float[jax.Array, "tokens N"]

_OTHERS = "keep a factor for the tensor: k_scale and v_scale are served"
_PARTS = "paged_attention and merge_attention serve parts of the keys"


def batched_ragged_paged_attention(
    queries: Float[ArrayIn, "tokens N D"],
    keys: Shaped[ArrayIn, "tokens K D"],
    values: Shaped[ArrayIn, "tokens K D"],
    kv_cache: Shaped[ArrayIn, "P page *rows padded"],
    kv_lens: Int[ArrayIn, " S"],
    page_indices: Int[ArrayIn, " S_W"],
    cu_q_lens: Int[ArrayIn, " S_1"],
    distribution: Int[ArrayIn, " 3"],
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    use_per_token_scale: bool = False,
    per_token_scale_dtype: DTypeLike | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    dynamic_k_scale: Shaped[ArrayIn, "..."] | None = None,
    dynamic_v_scale: Shaped[ArrayIn, "..."] | None = None,
    chunk_prefill_size: int | None = None,
    decode_block_sizes: object = None,
    prefill_block_sizes: object = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    out_dtype: DTypeLike | None = None,
    use_causal_mask: bool = True,
    skip_kv_update: bool = False,
    update_kv_cache: bool | None = None,
    kv_layout: str = "head_along_sublane",
    decode_query_size: int = 1,
    cp_group_size: int | None = None,
    cp_rank: Int[ArrayIn, " 1"] | None = None,
    attention_scope: str = "full",
    return_lse: bool = False,
    implementation: str | None = None,
) -> tuple[Out, Cache] | tuple[Out, Cache, Lse]:
    """`rpa_v3.ragged_paged_attention` with lse, by tokamax's arguments.

    The function of that name and these arguments in tokamax. The cache is donated: it
    is updated in place, and what was passed is gone. Where tokamax's reference and its
    kernel differ, this is the kernel: k_scale and v_scale multiply, and so does q_scale
    what it has divided.

    Args:
      queries, keys, values, kv_lens, page_indices, cu_q_lens, distribution, sm_scale,
        sliding_window, soft_cap, out_dtype, use_causal_mask, q_scale, k_scale, v_scale:
        as in `rpa_v3`; distribution[2] sequences count.
      kv_cache: as in `rpa_v3`, or `[P, page, 2 K, at least D]`.
      skip_kv_update: keys and values are not written; the cache holds them already.
      update_kv_cache: the opposite; it decides where it is given.
      kv_layout: "head_along_sublane", as a name or tokamax's own.
      attention_scope: "full"; or "cache_only", by which queries see the keys ahead of
        the new ones, and nothing is written (not with sliding_window).
      return_lse: also return the log-sum-exp of the scores.
      implementation: None. Others are tokamax's own.
      mask_value, chunk_prefill_size, decode_block_sizes, prefill_block_sizes,
        vmem_limit_bytes, debug_mode, decode_query_size: without effect.

    Returns:
      `[tokens, N, D]`, the cache, and with `return_lse` float32 `[tokens, N]`. Tokens
      of no sequence give zeros and −inf.

    Raises:
      NotImplementedError: for factors of each token, another kv_layout, parts of the
        context on several devices (cp_group_size, cp_rank), attention to the new
        tokens alone, and tokamax's implementations.
      TypeError, ValueError: an argument's dtype, shape or value does not fit.
    """
    where = "dropins.tokamax.batched_ragged_paged_attention"
    del mask_value, chunk_prefill_size, decode_block_sizes, prefill_block_sizes
    del vmem_limit_bytes, debug_mode, decode_query_size, per_token_scale_dtype
    arguments.refuse(where, _OTHERS, use_per_token_scale=use_per_token_scale)
    arguments.refuse(
        where,
        _OTHERS,
        dynamic_k_scale=dynamic_k_scale,
        dynamic_v_scale=dynamic_v_scale,
    )
    arguments.refuse(where, _PARTS, cp_group_size=cp_group_size, cp_rank=cp_rank)
    arguments.refuse(
        where, "tokamax itself runs its own", implementation=implementation
    )
    if update_kv_cache is not None:
        check_flags(where, update_kv_cache=update_kv_cache)
        skip_kv_update = not update_kv_cache
    check_flags(
        where,
        use_causal_mask=use_causal_mask,
        skip_kv_update=skip_kv_update,
        return_lse=return_lse,
    )
    _check_layout(where, kv_layout)
    cache_only = _cache_only(where, attention_scope, sliding_window)
    q = arguments.queries(where, "queries", queries)
    cache = packed.check_cache(where, "kv_cache", kv_cache, (4, 5))
    k, v = arguments.new_tokens(where, q, cache, keys=keys, values=values)
    layout = packed.by_turns(where, "kv_cache", cache, k.shape[1], k.shape[2])
    tables, lens = arguments.flat_tables(where, page_indices, kv_lens)
    config = ragged.Ragged(
        where=where,
        layout=layout,
        scale=arguments.number(where, "sm_scale", sm_scale),
        out_dtype=arguments.result_dtype(where, "out_dtype", out_dtype, q),
        causal=bool(use_causal_mask),
        window=arguments.sliding_window(where, "sliding_window", sliding_window),
        softcap=arguments.soft_cap(where, "soft_cap", soft_cap),
        q_scale=arguments.divisor(where, "q_scale", q_scale),
        k_scale=arguments.factor(where, "k_scale", k_scale),
        v_scale=arguments.factor(where, "v_scale", v_scale),
        append=not (skip_kv_update or cache_only),
        cache_only=cache_only,
    )
    step = ragged.Step(
        q=q,
        k=k,
        v=v,
        tables=tables,
        kv_lens=lens,
        starts=arguments.starts(where, "cu_q_lens", cu_q_lens, lens.shape[0]),
        num_seqs=arguments.count_of(where, "distribution", distribution, 3),
    )
    out, lse, cache = ragged.append_and_attend(config, step, cache)
    return (out, cache, lse) if return_lse else (out, cache)


ragged_paged_attention = batched_ragged_paged_attention


def _check_layout(where: str, kv_layout: str) -> None:
    if str(kv_layout).lower() != "head_along_sublane":
        raise NotImplementedError(
            f"{where}: kv_layout must be 'head_along_sublane', got {kv_layout!r}; "
            "tokens that lie innermost are served by nobody here"
        )


def _cache_only(where: str, scope: str, sliding_window: int | None) -> bool:
    name = str(scope).lower()
    if name == "full":
        return False
    if name != "cache_only":
        raise NotImplementedError(
            f"{where}: attention_scope must be 'full' or 'cache_only', got {scope!r}; "
            "flash_attention with cu_seqlens attends to new tokens alone"
        )
    if sliding_window is not None:
        raise NotImplementedError(
            f"{where}: sliding_window is not served with attention_scope='cache_only'; "
            "gather_kv and flash_attention with q_offset serve both"
        )
    return True
