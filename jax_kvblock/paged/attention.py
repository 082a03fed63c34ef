"""`paged_attention`: the contract."""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeAlias,
    TypedDict,
    Unpack,
    overload,
)

import jax

from jax_kvblock.attention.options import Output, Rows
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.types import ArrayIn, Integers, LayerIndex
from jax_kvblock.paged import arguments
from jax_kvblock.paged.data import check_data
from jax_kvblock.paged.pages import Pages as LaidOut
from jax_kvblock.paged.primitive import attend

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer

    Pages: TypeAlias = (
        KVPool
        | tuple[Float[ArrayIn, "P T K D"], Float[ArrayIn, "P T K Dv"]]
        | Float[ArrayIn, "P T D"]
    )
    Tables: TypeAlias = Int[ArrayIn, "B W"] | list[list[int]]
    Ranges: TypeAlias = (
        Int[ArrayIn, "*tokens 2"] | list[list[int]] | list[list[list[int]]]
    )
    Bits: TypeAlias = (
        Integer[ArrayIn, "*tokens words"] | list[list[int]] | list[list[list[int]]]
    )
    Scale: TypeAlias = float | Float[ArrayIn, "*scales"]


class PagedOptions(TypedDict, total=False):
    """What attention over blocks takes by name, but for `return_lse`."""

    query_start: Integers | None
    q_lens: Integers | None
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Float[ArrayIn, " N"] | None
    scale: float | None
    ranges: Ranges | None
    tree_mask: Bits | None
    k_scale: Scale | None
    v_scale: Scale | None
    split_size: int | None
    q_heads: tuple[int | jax.Array, int] | None
    value_dim: int | None
    implementation: str | None


class AllPagedOptions(PagedOptions, total=False):
    """The same of `paged_attention`, which has all of its sequences' keys."""

    quantize_queries: bool


@overload
def paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AllPagedOptions],
) -> Output: ...
@overload
def paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[AllPagedOptions],
) -> tuple[Output, Rows]: ...
@overload
def paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    return_lse: bool,
    **options: Unpack[AllPagedOptions],
) -> Output | tuple[Output, Rows]: ...
def paged_attention(
    q: Float[ArrayIn, "*tokens N D"],
    pages: Pages,
    layer: LayerIndex | None,
    block_tables: Tables,
    kv_lens: Integers,
    *,
    query_start: Integers | None = None,
    q_lens: Integers | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[ArrayIn, " N"] | None = None,
    scale: float | None = None,
    ranges: Ranges | None = None,
    tree_mask: Bits | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    split_size: int | None = None,
    q_heads: tuple[int | jax.Array, int] | None = None,
    value_dim: int | None = None,
    quantize_queries: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Output | tuple[Output, Rows]:
    """Attention of sequences whose keys and values lie in the blocks of a cache.

    Key position p of sequence b lies in slot `p % T` of block
    `block_tables[b, p // T]`, T the block size. A sequence's queries are its last
    positions: query i of q_len is at position `kv_lens[b] - q_len + i`. So a decode
    step, a chunk of a prefill and a draft are the same call. Scores, softcap, sinks and
    lse are those of `flash_attention`; the blocks are where vLLM's PagedAttention has
    them (Kwon et al., 2023).

    Args:
      q: `[tokens, N, D]` with query_start, else `[B, T, N, D]`; in the blocks' dtype,
        or any float beside blocks of float8_e4m3fn, float8_e5m2 and int8.
      pages: a `KVPool` with keys and values, or a pair of one layer's k_pages
        `[P, T, K, D]` and v_pages `[P, T, K, Dv]`; N is a multiple of K. With
        value_dim, a latent cache: a `KVPool` with num_outer and num_kv_heads 1, or one
        layer's pages `[P, T, D]`.
      layer: of the pool, an integer or a traced int32 scalar; None without a pool. A
        traced layer outside the pool has no keys.
      block_tables: int32 `[B, W]`. The keys of an id that is no block, like −1, are
        seen by nobody.
      kv_lens: int32 `[B]`, the keys of each sequence, its new ones among them. Lengths
        beyond `W T` are `W T`, those below 0 are 0.
      query_start: int32 `[B + 1]`, the first row of each sequence in q and the end of
        the last. Rows of no sequence give zeros and −inf; where it falls anywhere, all
        rows are such.
      q_lens: int32 `[B]`, how many of the T queries of each sequence count; all unless
        given.
      causal: a query sees keys up to its own position.
      window: `(left, right)`, integers that are compiled in: it sees keys at most
        `left` before and `right` after its position; None is no bound.
      softcap, sinks, scale: as in `flash_attention`. The scale is 1 / sqrt(D) unless
        given; models with a latent cache pass their own, since their D is not that of
        the heads that they were trained with.
      ranges: int32 `[tokens, 2]` (else `[B, T, 2]`), the keys that each row sees: the
        positions from the first to before the second, as far as causal and window let
        it. Where none are between them it sees nothing; any values are safe.
      tree_mask: int32 or uint32 `[tokens, words]` (else `[B, T, words]`), which of its
        sequence's queries, the draft, each query sees, as far as causal and window let
        it: bit `j % 32` of word `j // 32` is that of query j's key, position
        `kv_lens[b] - q_len + j`. Other keys it sees as without; -1 is all of them.
      k_scale, v_scale: of blocks of 8 bits, what their keys and values are multiplied
        by: a number, or float32 `[K]` for each head, `[P, T, K]` for each token and
        head, `[num_layers, P, T, K]` for all layers of a pool (`KVScales` holds those).
        Those of tokens are not below 0. 1 unless given. A latent cache has k_scale
        alone.
      split_size: an integer, and a row has the same bits in every call: they depend on
        its own sequence, not on what else is in the batch, on its order or padding, or
        on the width of the tables. What a sequence's queries see is then cut after
        so many keys (rounded up to a multiple of 256) and nowhere else, and
        the parts are put together in order. Small ones share long sequences out
        better, and need a larger workspace. Unless given, keys are cut where it is
        fastest.
      q_heads: `(first, total)`, where q has only N of `total` query heads, which the
        pages serve: those from `first` on, a multiple of N that may be traced. It is
        for `shard_map`; automatic partitioning does it by itself.
      value_dim: of a latent cache (multi-head latent attention, DeepSeek-V2), from 1 to
        D: a value is the first so many columns of its key. Heads' own projections of
        keys and values are the caller's, on q and on the result (the absorbed form).
      quantize_queries: with blocks of float8_e4m3fn, queries of sequences with many of
        them are rounded to e4m3, and both products of these sequences are in 8 bits, by
        a kernel for Hopper, which rounds probabilities, too. Many are more than 16
        queries and more than 64 packed rows, queries times N / K (of a device). Other
        sequences, and calls with no more rows than sequences and no split_size, are
        computed as without. Queries share a scale where they share a KV head, as many
        of a sequence as make up to 128 rows; what is not finite becomes NaN. k_scale
        and v_scale are a number or `[K]`; where k_scale is below 0 these sequences
        become NaN.
      return_lse: also return the log-sum-exp of the scores, float32, shaped like q
        without D.
      implementation: "cuda" (kernels for sm_80 and newer GPUs, of bfloat16 and
        float16), "xla" (plain JAX in blocks, everywhere; on a GPU far from the speed of
        memory), or None, which takes the kernels where they serve the call.

    Returns:
      out, shaped like q but for its last dim, Dv, in q's dtype; with `return_lse` the
      pair `(out, lse)`. A row that sees no key gives zeros, and −inf (its sink).

    Values in slots beyond the lengths, and in blocks that no table names, may be
    anything, also NaN. Tables and lengths are operands: new ones never recompile. It
    has no derivative; `flash_attention` has.

    Raises:
      TypeError, ValueError, IndexError: an argument's dtype, shape or value does not
        fit.

    Example:
      >>> pool = append_kv(pool, layer, k, v, slots)
      >>> out = paged_attention(q, pool, layer, tables, lens, query_start=starts)
    """
    where = "paged_attention"
    config, x, lead = arguments.normalize(
        where,
        q,
        pages,
        layer,
        block_tables,
        kv_lens,
        query_start=query_start,
        q_lens=q_lens,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        ranges=ranges,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        split_size=split_size,
        q_heads=q_heads,
        value_dim=value_dim,
        quantize_queries=quantize_queries,
        return_lse=return_lse,
        implementation=implementation,
    )
    check_data(where, config, x)
    out, lse = attend(config, x)
    if len(lead) == 1:  # one call, of ragged sequences
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def attend_pages(
    where: str,
    q: Any,
    pages: LaidOut,
    block_tables: Any,
    kv_lens: Any,
    *,
    query_start: Any = None,
    q_lens: Any = None,
    causal: bool = True,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    implementation: str | None = None,
    table_first: jax.Array | None = None,
    scales: LaidOut | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` over pages that lie as a `PageLayout` says: (out, lse).

    The pages may also hold floats of other widths than q's, and int8: they are read as
    numbers, and one factor of all is the caller's (of keys in `scale`, of values on
    the result). `scales` are factors of their own for each key and value, in a layout
    without D. With table_first, int32 `[B]`, block_tables is `[W]`: there begins each
    sequence's table, from 0 to W. `where` names the caller in messages.
    """
    config, x, lead = arguments.normalize(
        where,
        q,
        pages,
        None,
        block_tables,
        kv_lens,
        query_start=query_start,
        q_lens=q_lens,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=True,
        implementation=implementation,
        table_first=table_first,
        scales=scales,
    )
    out, lse = attend(config, x)
    if len(lead) == 1:  # one call, of ragged sequences
        out, lse = out[0], lse[0]
    return out, lse
