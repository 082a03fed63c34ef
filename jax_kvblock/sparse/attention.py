"""Attention to the tiles that a selector lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from jax_kvblock.attention.arguments import check_flags
from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.flash import flash_attention
from jax_kvblock.attention.options import Output, PrecisionLike, Rows, SeedLike
from jax_kvblock.core.checks import check_array
from jax_kvblock.core.types import ArrayIn, IdRows, Integers
from jax_kvblock.sparse.select import Report, warn_if_short
from jax_kvblock.sparse.selector import MaskOptions, Selector

if TYPE_CHECKING:
    from jaxtyping import Float


class SparseOptions(TypedDict, total=False):
    """What `sparse_attention` hands on to `flash_attention`."""

    causal: bool
    window: tuple[int | None, int | None] | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    q_offset: Integers | int | None
    kv_offset: Integers | int | None
    scale: float | None
    softcap: float | None
    sinks: Float[ArrayIn, " N"] | None
    bias: Float[ArrayIn, "B_or_1 N_or_1 T S"] | None
    dropout_rate: float
    dropout_seed: SeedLike
    deterministic: bool
    precision: PrecisionLike
    implementation: str | None


def mask_options(where: str, options: Any) -> MaskOptions:
    """Those of the options that say who attends to whom."""
    if options.get("cu_seqlens") is not None:
        raise ValueError(
            f"{where}: cu_seqlens cannot be combined with tile lists; pass packed "
            "documents as one row, q[None], k[None] and v[None], with segment_ids"
        )
    names = MaskOptions.__annotations__
    made: Any = {name: x for name, x in options.items() if name in names}
    return made


@overload
def sparse_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    selector: Selector | AttentionTiles,
    *,
    return_lse: Literal[False] = ...,
    return_report: Literal[False] = ...,
    **options: Unpack[SparseOptions],
) -> Output: ...
@overload
def sparse_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    selector: Selector | AttentionTiles,
    *,
    return_lse: Literal[True],
    return_report: Literal[False] = ...,
    **options: Unpack[SparseOptions],
) -> tuple[Output, Rows]: ...
@overload
def sparse_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    selector: Selector | AttentionTiles,
    *,
    return_lse: Literal[False] = ...,
    return_report: Literal[True],
    **options: Unpack[SparseOptions],
) -> tuple[Output, Report | None]: ...
@overload
def sparse_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    selector: Selector | AttentionTiles,
    *,
    return_lse: Literal[True],
    return_report: Literal[True],
    **options: Unpack[SparseOptions],
) -> tuple[Output, Rows, Report | None]: ...
def sparse_attention(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    selector: Selector | AttentionTiles,
    *,
    return_lse: bool = False,
    return_report: bool = False,
    **options: Unpack[SparseOptions],
) -> Any:
    """Attention to the tiles that a selector lists; the others are never loaded.

    `flash_attention` with `tiles=selector(q, k)`. Gradients flow through the listed
    tiles; which ones are listed has no gradient.

    Args:
      q: `[B, T, N, D]`, bfloat16, float16 or float32.
      k: `[B, S, K, D]` in q's dtype, K a divisor of N.
      v: `[B, S, K, Dv]`.
      selector: a `Selector`, or tiles that one has made before.
      return_lse: also return the log-sum-exp of the listed scores, `[B, T, N]`.
      return_report: also return the selector's `Report` (None of tiles).
      **options: `causal`, `window`, `segment_ids`, `q_lens`, `kv_lens`, `q_offset`,
        `kv_offset`, `scale`, `softcap`, `sinks`, `bias`, `dropout_rate`,
        `dropout_seed`, `deterministic`, `precision` and `implementation`, as in
        `flash_attention`. Selectors know nothing of softcap, sinks, bias and dropout.

    Returns:
      `[B, T, N, Dv]` in q's dtype; with flags a tuple `(out, lse, report)` of what was
      asked for.

    Raises:
      TypeError, ValueError: as `flash_attention` and the selector.

    Warns:
      UserWarning: where rows are short of tau and the report is not returned; under
        jit, once it is traced, where tau has a bound, so that rows may be.

    Example:
      >>> selector = AntidiagonalThreshold(sparsity_ratio=0.9)
      >>> out = sparse_attention(q, k, v, selector, causal=True)
    """
    where = "sparse_attention"
    check_flags(where, return_lse=return_lse, return_report=return_report)
    report = None
    mask = mask_options(where, options)
    if isinstance(selector, Selector):
        tiles, report = selector.select(q, k, scale=options.get("scale"), **mask)
    elif isinstance(selector, AttentionTiles):
        tiles = selector
    else:
        raise TypeError(
            f"{where}: selector must be a Selector or AttentionTiles, got "
            f"{type(selector).__name__}; AntidiagonalThreshold(), say"
        )
    made = flash_attention(q, k, v, tiles=tiles, return_lse=return_lse, **options)
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if return_report:
        parts = (*parts, report)
    elif isinstance(selector, Selector) and report is not None:
        kv_len = check_array(where, "k", k, in_place=True).shape[1]
        bounded = selector.may_be_short(kv_len)
        warn_if_short(where, report, "pass return_report=True", bounded)
    return parts if len(parts) > 1 else parts[0]
