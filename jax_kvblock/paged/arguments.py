"""The checks of `paged_attention`, from its arguments to a `Paged` call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.arguments import (
    check_flags,
    check_lengths,
    check_scale,
    check_sinks,
    check_softcap,
    check_window,
)
from jax_kvblock.attention.config import AttentionConfig
from jax_kvblock.attention.qkv import FLOATS
from jax_kvblock.blocks.pool import KVPool, check_pool
from jax_kvblock.core.checks import (
    as_int,
    check_array,
    check_choice,
    check_int32,
    show,
    to_jax,
)
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes

IMPLEMENTATIONS = ("xla",)


def normalize(
    where: str,
    q: Any,
    pages: Any,
    layer: Any,
    block_tables: Any,
    kv_lens: Any,
    *,
    query_start: Any,
    q_lens: Any,
    causal: bool,
    window: Any,
    softcap: Any,
    sinks: Any,
    scale: Any,
    return_lse: bool,
    implementation: str | None,
) -> tuple[PagedConfig, Paged, tuple[int, ...]]:
    """Checks every argument; says which is wrong and what fits.

    Returns the call, and the axes in front of q's heads.
    """
    check_flags(where, causal=causal, return_lse=return_lse)
    check_choice(where, "implementation", implementation, (None, *IMPLEMENTATIONS))
    q = _queries(where, q, query_start)
    pages = _pages(where, pages)
    number, layer = _layer(where, pages, layer)
    k_shape, v_shape = page_shapes(pages)
    _check_heads(where, q, pages, k_shape, v_shape)
    tables = check_int32(where, "block_tables", block_tables, "[B, W]", 2)
    batch, width = tables.shape
    lengths = check_lengths(where, "kv_lens", _given(where, kv_lens), batch)
    first, lens = _sequences(where, q, query_start, q_lens, batch)
    left, right = check_window(where, causal, window)
    scores = AttentionConfig(
        scale=check_scale(where, scale, q.shape[-1]),
        window_left=left,
        window_right=right,
        softcap=check_softcap(where, softcap),
    )
    rows = to_jax(q).reshape(-1, *q.shape[-2:])
    x = Paged(
        q=rows,
        pages=pages,
        layer=layer,
        tables=tables,
        kv_lens=jnp.clip(lengths, 0, min(width * k_shape[1], 2**31 - 1)),
        q_first=first,
        q_lens=lens,
        sinks=check_sinks(where, sinks, q, q.shape[-2]),
    )
    mean_rows = -(-rows.shape[0] // max(batch, 1))
    return PagedConfig(scores, number, mean_rows), x, q.shape[:-2]


def _given(where: str, kv_lens: Any) -> Any:
    if kv_lens is None:
        raise TypeError(
            f"{where}: kv_lens is missing; pass int32[B], the keys of each sequence, "
            "its new ones among them"
        )
    return kv_lens


def _queries(where: str, q: Any, query_start: Any) -> Any:
    q = check_array(where, "q", q)
    ragged = query_start is not None
    form = "[tokens, N, D]" if ragged else "[B, T, N, D]"
    if q.ndim != (3 if ragged else 4):
        fix = (
            "with query_start, sequences lie one after the other in q"
            if ragged
            else "pass query_start for q [tokens, N, D]; q[:, None] is a query each"
        )
        raise ValueError(f"{where}: q must be {form}, got {show(q)}; {fix}")
    if q.dtype not in FLOATS:
        raise TypeError(
            f"{where}: q must be floats, got {show(q)}; cast it with .astype"
        )
    return q


def _pages(where: str, pages: Any) -> Any:
    if isinstance(pages, KVPool):
        check_pool(where, "pages", pages)
        if pages.spec.num_outer != 2:
            raise ValueError(
                f"{where}: the pool must hold keys and values, num_outer=2, got "
                f"num_outer={pages.spec.num_outer}"
            )
        return pages
    if not isinstance(pages, (tuple, list)) or len(pages) != 2:
        raise TypeError(
            f"{where}: pages must be a KVPool or a pair (k_pages, v_pages), got "
            f"{show(pages)}"
        )
    k, v = (check_array(where, f"pages[{i}]", a) for i, a in enumerate(pages))
    for i, (name, a) in enumerate((("k_pages", k), ("v_pages", v))):
        if a.ndim != 4:
            raise ValueError(
                f"{where}: pages[{i}], {name}, must be [P, T, K, D] (blocks, tokens, "
                f"heads, dim), got {show(a)}; a KVPool holds other layouts"
            )
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise ValueError(
            f"{where}: k_pages and v_pages must be alike but for their last dim, got "
            f"{show(k)} and {show(v)}"
        )
    if 0 in k.shape[:2]:
        raise ValueError(
            f"{where}: k_pages must have blocks of at least one token, got {show(k)}; "
            "a table of -1 names none"
        )
    return to_jax(k), to_jax(v)


def _layer(where: str, pages: Any, layer: Any) -> tuple[int | None, jax.Array | None]:
    """The layer, static or traced; a pair has none."""
    if not isinstance(pages, KVPool):
        if layer is not None:
            raise ValueError(
                f"{where}: layer must be None with a pair of pages, which are one "
                f"layer's, got {show(layer)}"
            )
        return None, None
    if isinstance(layer, jax.Array):
        return None, check_int32(where, "layer", layer, "[]", 0)
    number = as_int(layer)
    if number is None:
        raise TypeError(
            f"{where}: layer must be an integer or an int32 scalar, got {show(layer)}; "
            "pass an int, or jnp.int32(layer) not to recompile"
        )
    if not 0 <= number < pages.spec.num_layers:
        raise IndexError(
            f"{where}: layer must be 0 to {pages.spec.num_layers - 1}, got {number}"
        )
    return number, None


def _check_heads(
    where: str, q: Any, pages: Any, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    heads, dim = q.shape[-2:]
    of = pages.spec.dtype if isinstance(pages, KVPool) else pages[0].dtype
    if k_shape[3] != dim:
        raise ValueError(
            f"{where}: q and the keys must have one head dim, got {show(q)} and blocks "
            f"of {list(k_shape[1:])}"
        )
    if not k_shape[2] or heads % k_shape[2]:
        raise ValueError(
            f"{where}: q must have a multiple of the blocks' {k_shape[2]} KV heads, "
            f"got {heads} query heads"
        )
    if jnp.dtype(of) != q.dtype:
        raise TypeError(
            f"{where}: q and the blocks must have one dtype, got {q.dtype} and {of}; "
            f"cast q with .astype({str(jnp.dtype(of))!r})"
        )


def _sequences(
    where: str, q: Any, query_start: Any, q_lens: Any, batch: int
) -> tuple[jax.Array, jax.Array]:
    """Each sequence's first row of q, and how many it has, inside of q."""
    if query_start is None:
        if q.shape[0] != batch:
            raise ValueError(
                f"{where}: q and block_tables must have one batch, got {show(q)} and "
                f"{batch} rows of block_tables"
            )
        length = q.shape[1]
        first = np.arange(batch, dtype=np.int32) * length
        if q_lens is None:
            return to_jax(first), jnp.full(batch, length, jnp.int32)
        lens = check_lengths(where, "q_lens", q_lens, batch)
        return to_jax(first), jnp.clip(lens, 0, length)
    if q_lens is not None:
        raise ValueError(
            f"{where}: query_start and q_lens say the same; pass query_start alone "
            "with q [tokens, N, D], q_lens with q [B, T, N, D]"
        )
    starts = check_int32(where, "query_start", query_start, f"[{batch + 1}]", 1)
    if starts.shape != (batch + 1,):
        raise ValueError(
            f"{where}: query_start must be int32[{batch + 1}], the first row of each "
            f"sequence of block_tables and the end of the last, got {show(starts)}"
        )
    starts = jnp.clip(starts, 0, q.shape[0])
    return starts[:-1], jnp.maximum(starts[1:] - starts[:-1], 0)
