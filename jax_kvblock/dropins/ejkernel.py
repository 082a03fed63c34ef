"""`unified_attention` of ejkernel's modules/operations/unified_attention.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jax_kvblock.attention.arguments import check_flags
from jax_kvblock.attention.config import default_scale
from jax_kvblock.core.checks import check_int32, show
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.dropins import arguments, ragged
from jax_kvblock.paged.pages import PageLayout

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

LAYOUT = PageLayout("P T H D")


def unified_attention(
    queries: Float[ArrayIn, "tokens N D"],
    key_cache: Shaped[ArrayIn, "P page K D"],
    value_cache: Shaped[ArrayIn, "P page K D"],
    kv_lens: Int[ArrayIn, " S"],
    block_tables: Int[ArrayIn, "S W"],
    query_start_loc: Int[ArrayIn, " S_1"],
    alibi_slopes: Float[ArrayIn, " N"] | None = None,
    qq_bias: Float[ArrayIn, "T T"] | None = None,
    softmax_aux: Float[ArrayIn, " N"] | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    platform: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: tuple[jax.sharding.PartitionSpec | None, ...] | None = None,
    out_specs: jax.sharding.PartitionSpec | None = None,
    cfg: object = None,
) -> Float[jax.Array, "tokens N D"]:
    """Attention of sequences that lie one after the other, over a pair of pages.

    The function of that name and these arguments in ejkernel.

    Args:
      queries: `[tokens, N, D]`, floats of 16 bits or more. Query i of sequence b is at
        position `kv_lens[b] - q_len + i`.
      key_cache, value_cache: `[P, page, K, D]`, floats of 8 bits or more, or int8; the
        new keys are in them.
      kv_lens: int32 `[S]`, the keys of each sequence, its new ones among them.
      block_tables: int32 `[S, W]`. An id that is no page, like −1, is not seen.
      query_start_loc: int32 `[S + 1]`, the first token of each sequence, and the end
        of the last.
      alibi_slopes, qq_bias: None; biases are not served.
      softmax_aux: floats `[N]`, a score of each query head that takes its share of the
        softmax and has no value.
      softmax_scale: the factor of scores, 1 / sqrt(D) unless given.
      causal: a query sees keys up to its own position (False is served, too).
      sliding_window: a query sees so many positions, its own the last of them; None,
        and what is below 1, is no window.
      logits_soft_cap: scores become `cap * tanh(score / cap)`; None, and what is not
        above 0, is no cap.
      platform: None or "auto". Others are ejkernel's own.
      mesh, in_specs, out_specs: None; `jax.shard_map` around the call serves meshes.
      seq_threshold_3d, cfg: without effect.

    Returns:
      `[tokens, N, D]` in queries' dtype. Tokens of no sequence give zeros.

    Raises:
      NotImplementedError: alibi_slopes, qq_bias, a platform, a mesh.
      TypeError, ValueError: an argument's dtype, shape or value does not fit.
    """
    where = "dropins.ejkernel.unified_attention"
    del seq_threshold_3d, cfg
    biases = "gather_kv and flash_attention(bias=...) serve biases"
    arguments.refuse(where, biases, alibi_slopes=alibi_slopes, qq_bias=qq_bias)
    arguments.refuse(
        where,
        "ejkernel itself runs its own; None is what runs here",
        platform=None if platform == "auto" else platform,
    )
    arguments.refuse(
        where,
        "call it inside of jax.shard_map",
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    check_flags(where, causal=causal)
    q = arguments.queries(where, "queries", queries)
    cache = LAYOUT.check(where, (key_cache, value_cache))
    tables = check_int32(where, "block_tables", block_tables, "[S, W]", 2)
    sequences, heads = tables.shape[0], cache[0].shape[2]
    if q.shape[1] % heads or q.shape[2] != cache[0].shape[3]:
        raise ValueError(
            f"{where}: queries must have a multiple of the caches' {heads} heads and "
            f"their head dim, {cache[0].shape[3]}, got {show(q)}"
        )
    scale = default_scale(q.shape[2])
    if softmax_scale is not None:
        scale = arguments.number(where, "softmax_scale", softmax_scale)
    if sliding_window is not None and sliding_window < 1:
        sliding_window = None
    if logits_soft_cap is not None and logits_soft_cap <= 0:
        logits_soft_cap = None
    config = ragged.Ragged(
        where=where,
        layout=LAYOUT,
        scale=scale,
        out_dtype=q.dtype,
        causal=bool(causal),
        window=arguments.sliding_window(where, "sliding_window", sliding_window),
        softcap=arguments.soft_cap(where, "logits_soft_cap", logits_soft_cap),
    )
    starts = arguments.starts(where, "query_start_loc", query_start_loc, sequences)
    step = ragged.Step(
        q=q,
        k=None,
        v=None,
        tables=tables,
        kv_lens=arguments.lengths(where, "kv_lens", kv_lens, sequences),
        starts=starts,
        num_seqs=None,
        sinks=arguments.sinks(where, "softmax_aux", softmax_aux, q.shape[1]),
    )
    return ragged.attend(config, step, cache)[0]
