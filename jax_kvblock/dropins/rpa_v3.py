"""Ragged paged attention, version 3: `ragged_paged_attention` of tpu-inference's
kernels/ragged_paged_attention/v3/kernel.py.
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

    Blocks = tuple[int, int, int, int] | None


def ragged_paged_attention(
    queries: Float[ArrayIn, "tokens N D"],
    keys: Shaped[ArrayIn, "tokens K D"],
    values: Shaped[ArrayIn, "tokens K D"],
    kv_cache: Shaped[ArrayIn, "P page rows pack padded"],
    kv_lens: Int[ArrayIn, " S"],
    page_indices: Int[ArrayIn, " S_W"],
    cu_q_lens: Int[ArrayIn, " S_1"],
    distribution: Int[ArrayIn, " 3"],
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: DTypeLike | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: Blocks = None,
    p_block_sizes: Blocks = None,
    m_block_sizes: Blocks = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> tuple[
    Float[jax.Array, "tokens N D"], Shaped[jax.Array, "P page rows pack padded"]
]:
    """Appends the new keys to the cache and attends over it, sequence by sequence.

    The function of that name and these arguments in tpu-inference, version 3. The
    cache is donated: it is updated in place, and what was passed is gone.

    Args:
      queries: `[tokens, N, D]`, floats of 16 bits or more, sequences one after the
        other. Query i of sequence b is at position `kv_lens[b] - q_len + i`.
      keys, values: `[tokens, K, D]`, those of the same tokens, in the cache's dtype:
        who quantizes does it ahead.
      kv_cache: `[P, page, ceil(2 K / pack), pack, at least D]`, heads K0, V0, K1, V1,
        …, of floats of 8 bits or more, or int8. Any pack will do, and any padding,
        which stays as it is.
      kv_lens: int32 `[S]`, the keys of each sequence, its new ones among them.
      page_indices: int32 `[S W]`, the tables of the sequences in a row. An id that is
        no page is not seen, and not written.
      cu_q_lens: int32 `[S + 1]`, the first token of each sequence, and the last's end.
      distribution: int32 `[3]`: distribution[2] sequences count, and may be traced.
        The first two tell that kernel who decodes, which needs no telling here.
      use_causal_mask: a query sees keys up to its own position; else all of them.
      update_kv_cache: whether keys and values are written. If not, the cache holds
        them already, and keys and values are not looked at.
      sm_scale: the factor of scores.
      sliding_window: a query sees so many positions, its own the last of them; and
        those behind it, unless use_causal_mask.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      out_dtype: the result's; queries' unless given.
      q_scale: queries are divided by it, rounded to the cache's dtype, and multiplied.
      k_scale, v_scale: factors of all keys and of all values.
      skip_kv_mask, mask_value, chunk_prefill_size, d_block_sizes, p_block_sizes,
        m_block_sizes, vmem_limit_bytes, debug_mode, disable_bounds_checks,
        disable_semaphore_checks: without effect.

    Returns:
      `[tokens, N, D]`, and the cache. Tokens of no sequence give zeros (there, the
      queries).

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit.

    Example:
      >>> out, kv_cache = ragged_paged_attention(
      ...     q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution,
      ...     sm_scale=128**-0.5)
    """
    where = "dropins.rpa_v3.ragged_paged_attention"
    del skip_kv_mask, mask_value, chunk_prefill_size, vmem_limit_bytes, debug_mode
    del d_block_sizes, p_block_sizes, m_block_sizes
    del disable_bounds_checks, disable_semaphore_checks
    check_flags(where, use_causal_mask=use_causal_mask, update_kv_cache=update_kv_cache)
    q = arguments.queries(where, "queries", queries)
    cache = packed.check_cache(where, "kv_cache", kv_cache, (5,))
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
        append=bool(update_kv_cache),
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
    out, _, cache = ragged.append_and_attend(config, step, cache)
    return out, cache
