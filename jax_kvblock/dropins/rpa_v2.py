"""Ragged paged attention, version 2: `ragged_paged_attention` of
jax.experimental.pallas.ops.tpu.ragged_paged_attention and of tpu-inference's v2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_int32, show
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments, packed, ragged

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


def ragged_paged_attention(
    q: Float[ArrayIn, "tokens N D"],
    kv_pages: Shaped[ArrayIn, "P page KV2 D"],
    kv_lens: Int[ArrayIn, " S"],
    page_indices: Int[ArrayIn, "S W"],
    cu_q_lens: Int[ArrayIn, " S_1"],
    num_seqs: Int[ArrayIn, " 1"],
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = -0.7 * float(jnp.finfo(jnp.float32).max),
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> Float[jax.Array, "tokens N D"]:
    """Causal attention of sequences that lie one after the other, over pages.

    The function of that name and these arguments in JAX's Pallas kernels for TPUs.

    Args:
      q: `[tokens, N, D]`, floats of 16 bits or more. Query i of sequence b is at
        position `kv_lens[b] - q_len + i`.
      kv_pages: `[P, page, 2 K, D]`, heads K0, V0, K1, V1, …: floats of 8 bits or more,
        or int8. The new keys are in it.
      kv_lens: int32 `[S]`, the keys of each sequence, its new ones among them.
      page_indices: int32 `[S, W]`. An id that is no page is not seen.
      cu_q_lens: int32 `[S + 1]`, the first token of each sequence, and the last's end.
      num_seqs: int32 `[1]`: so many of the sequences count. It may be traced.
      sm_scale: the factor of scores.
      sliding_window: a query sees so many positions, its own the last of them.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      k_scale, v_scale: factors of all keys and of all values.
      mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes:
        without effect.

    Returns:
      `[tokens, N, D]` in q's dtype. Tokens of no sequence give zeros (there,
      anything).

    Raises:
      TypeError, ValueError: an argument's dtype, shape or value does not fit.
    """
    where = "dropins.rpa_v2.ragged_paged_attention"
    del mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    q = arguments.queries(where, "q", q)
    cache = packed.check_cache(where, "kv_pages", kv_pages, (4,))
    heads = cache.shape[2] // 2
    layout = packed.by_turns(where, "kv_pages", cache, heads, q.shape[2])
    tables = check_int32(where, "page_indices", page_indices, "[S, W]", 2)
    sequences = tables.shape[0]
    if q.shape[1] % heads:
        raise ValueError(
            f"{where}: q must have a multiple of the {heads} KV heads of kv_pages, got "
            f"{show(q)}"
        )
    config = ragged.Ragged(
        where=where,
        layout=layout,
        scale=arguments.number(where, "sm_scale", sm_scale),
        out_dtype=q.dtype,
        window=arguments.sliding_window(where, "sliding_window", sliding_window),
        softcap=arguments.soft_cap(where, "soft_cap", soft_cap),
        k_scale=arguments.factor(where, "k_scale", k_scale),
        v_scale=arguments.factor(where, "v_scale", v_scale),
    )
    step = ragged.Step(
        q=q,
        k=None,
        v=None,
        tables=tables,
        kv_lens=arguments.lengths(where, "kv_lens", kv_lens, sequences),
        starts=arguments.starts(where, "cu_q_lens", cu_q_lens, sequences),
        num_seqs=arguments.count_of(where, "num_seqs", num_seqs, 1),
    )
    return ragged.attend(config, step, (cache,))[0]
