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
from jax_kvblock.blocks.layout import BlockSpec, Layout
from jax_kvblock.blocks.pool import KVPool, check_pool
from jax_kvblock.core.checks import (
    as_int,
    check_array,
    check_choice,
    check_int32,
    check_static,
    show,
    shown,
    to_jax,
)
from jax_kvblock.paged.call import Paged, PagedConfig, dtype_of, page_shapes
from jax_kvblock.paged.dispatch import IMPLEMENTATIONS
from jax_kvblock.paged.pages import PAIR, Pages

# What blocks may hold, whatever q is.
NARROW = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)))
STORED = (*FLOATS, *NARROW)
LATENT = Layout("latent", "L (O T H) D")  # one layer is an array [P, T, D]


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
    split_size: Any = None,
    ranges: Any = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_heads: Any = None,
    value_dim: Any = None,
    quantize_queries: bool = False,
    table_first: Any = None,
    scales: Pages | None = None,
) -> tuple[PagedConfig, Paged, tuple[int, ...]]:
    """Checks every argument; says which is wrong and what fits.

    Returns the call, and the axes in front of q's heads.
    """
    flags = {"causal": causal, "return_lse": return_lse}
    check_flags(where, **flags, quantize_queries=quantize_queries)
    check_choice(where, "implementation", implementation, (None, *IMPLEMENTATIONS))
    q = _queries(where, q, query_start)
    check_static(where, "q", q)
    stored = (_pages if value_dim is None else _latent)(where, pages)
    number, layer = _layer(where, pages, layer)
    if isinstance(stored, KVPool) and layer is None:
        number = number or 0  # of pages that became a pool
    k_shape = page_shapes(stored)[0]
    q_first, query_heads = _query_heads(where, q, q_heads)
    _check_heads(where, q, k_shape, query_heads)
    value_dim = _value_dim(where, value_dim, k_shape[3], v_scale)
    if not isinstance(pages, Pages):
        _check_dtype(where, q, stored)
    given = {"k_scale": k_scale, "v_scale": v_scale}
    read = {name: _scale(where, name, a, stored) for name, a in given.items()}
    if quantize_queries:
        others = {"ranges": ranges, "tree_mask": tree_mask, "value_dim": value_dim}
        _check_quantized(where, stored, read, others)
    if table_first is None:
        tables = check_int32(where, "block_tables", block_tables, "[B, W]", 2)
        batch = tables.shape[0]
    else:
        tables = check_int32(where, "block_tables", block_tables, "[W]", 1)
        batch = table_first.shape[0]
    check_static(where, "block_tables", tables)
    lengths = check_lengths(where, "kv_lens", _given(where, kv_lens), batch)
    starts, lens = _sequences(where, q, query_start, q_lens, batch)
    left, right = check_window(where, causal, window)
    scores = AttentionConfig(
        scale=check_scale(where, scale, q.shape[-1]),
        window_left=left,
        window_right=right,
        softcap=check_softcap(where, softcap),
    )
    ragged = starts is not None
    x = Paged(
        q=to_jax(q)[None] if ragged else to_jax(q),
        pages=stored,
        layer=None if layer is None else layer[None],
        tables=tables,
        kv_lens=lengths,
        query_start=starts,
        q_lens=lens,
        sinks=check_sinks(where, sinks, q, q.shape[-2]),
        table_first=table_first,
        scales=scales,
        ranges=_ranges(where, ranges, q),
        tree_mask=_tree_mask(where, tree_mask, q),
        q_first=q_first,
        **read,
    )
    split = _split_size(where, split_size)
    config = PagedConfig(
        scores,
        number,
        implementation,
        split,
        query_heads,
        value_dim,
        quantize_queries,
    )
    return config, x, q.shape[:-2]


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


def _pages(where: str, pages: Any) -> KVPool | Pages:
    if isinstance(pages, Pages):
        return _laid_out(where, pages)
    if isinstance(pages, KVPool):
        check_pool(where, "pages", pages)
        if pages.spec.num_outer != 2:
            raise ValueError(
                f"{where}: the pool must hold keys and values, num_outer=2, got "
                f"num_outer={pages.spec.num_outer}; pass value_dim where values are "
                "columns of the keys"
            )
        return pages
    if not isinstance(pages, (tuple, list)) or len(pages) != 2:
        raise TypeError(
            f"{where}: pages must be a KVPool or a pair (k_pages, v_pages), got "
            f"{show(pages)}; with value_dim it may be one array [P, T, D]"
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
    return Pages((to_jax(k), to_jax(v)), PAIR)


def _latent(where: str, pages: Any) -> KVPool:
    """A pool of one key head without values; pages `[P, T, D]` as one of one layer."""
    if isinstance(pages, KVPool):
        check_pool(where, "pages", pages)
        spec = pages.spec
        if spec.num_outer != 1 or spec.num_kv_heads != 1:
            raise ValueError(
                f"{where}: with value_dim the pool must have num_outer=1 and "
                f"num_kv_heads=1, got num_outer={spec.num_outer} and num_kv_heads="
                f"{spec.num_kv_heads}; leave value_dim out where values lie beside keys"
            )
        return pages
    if isinstance(pages, (tuple, list)):
        raise TypeError(
            f"{where}: with value_dim pages must be a KVPool or one array [P, T, D], "
            f"got {show(pages)}; leave value_dim out with a pair (k_pages, v_pages)"
        )
    array = check_array(where, "pages", pages)
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(
            f"{where}: with value_dim pages must be [P, T, D] (blocks, tokens, dim), "
            f"none of them 0, got {show(array)}; pages[:, :, 0] drops an axis of one "
            "head"
        )
    if array.dtype not in STORED:
        raise TypeError(
            f"{where}: pages must hold floats of 8 bits or more, or int8, got "
            f"{show(array)}; cast them with .astype"
        )
    _, size, dim = array.shape
    spec = BlockSpec(1, 1, size, 1, dim, array.dtype, layout=LATENT)
    return KVPool((to_jax(array),), spec)


def _value_dim(where: str, value_dim: Any, dim: int, v_scale: Any) -> int | None:
    if value_dim is None:
        return None
    number = as_int(value_dim)
    if number is None or not 0 < number <= dim:
        raise (TypeError if number is None else ValueError)(
            f"{where}: value_dim must be an integer from 1 to the head dim {dim}, got "
            f"{shown(value_dim)}; values are the first value_dim columns of the keys"
        )
    if v_scale is not None:
        raise ValueError(
            f"{where}: v_scale must be None with value_dim, got {show(v_scale)}; "
            "values are columns of the keys, and k_scale is theirs, too"
        )
    return number


def _laid_out(where: str, pages: Pages) -> Pages:
    arrays = pages.layout.check(where, pages.arrays)
    if arrays[0].dtype not in STORED:
        raise TypeError(
            f"{where}: pages must hold floats of 8 bits or more, or int8, got "
            f"{show(arrays[0])}; cast them with .astype"
        )
    return Pages(arrays, pages.layout)


def _layer(where: str, pages: Any, layer: Any) -> tuple[int | None, jax.Array | None]:
    """The layer, static or traced; of arrays of pages there is one."""
    if not isinstance(pages, KVPool):
        if layer is not None:
            raise ValueError(
                f"{where}: layer must be None with a pair of pages or one array, "
                f"which are one layer's, got {show(layer)}; a KVPool has layers"
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


def _query_heads(
    where: str, q: Any, q_heads: Any
) -> tuple[jax.Array | None, int | None]:
    """The first of q's heads, int32 `[1]`, and how many there are with the others."""
    if q_heads is None:
        return None, None
    heads = q.shape[-2]
    if not isinstance(q_heads, (tuple, list)) or len(q_heads) != 2:
        raise TypeError(
            f"{where}: q_heads must be a pair (first, total), got {show(q_heads)}"
        )
    first, total = q_heads[0], as_int(q_heads[1])
    if total is None or total < 1 or not heads or total % heads:
        raise ValueError(
            f"{where}: q_heads[1], of all query heads, must be a multiple of q's "
            f"{heads}, got {shown(q_heads[1])}"
        )
    number = None if isinstance(first, jax.Array) else as_int(first)
    if number is not None and number not in range(0, total, heads):
        raise ValueError(
            f"{where}: q_heads[0], the first of q's heads, must be a multiple of their "
            f"number, {heads}, below {total}, got {number}"
        )
    return check_int32(where, "q_heads[0]", first, "[]", 0)[None], total


def _check_heads(
    where: str, q: Any, k_shape: tuple[int, ...], query_heads: int | None
) -> None:
    heads, dim = q.shape[-2:]
    heads = query_heads or heads
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


def _check_dtype(where: str, q: Any, pages: KVPool | Pages) -> None:
    of = dtype_of(pages)
    if of != q.dtype and of not in NARROW:
        raise TypeError(
            f"{where}: q and the blocks must have one dtype, got {q.dtype} and {of}; "
            f"cast q with .astype({of.name!r}). Blocks of "
            f"{', '.join(d.name for d in NARROW)} go with any q"
        )


def _check_quantized(
    where: str,
    pages: KVPool | Pages,
    scales: dict[str, jax.Array | None],
    others: dict[str, Any],
) -> None:
    """What goes with quantize_queries, whoever computes it."""
    if (stored := dtype_of(pages)) != jnp.float8_e4m3fn:
        raise TypeError(
            f"{where}: quantize_queries is for blocks of float8_e4m3fn, got blocks of "
            f"{stored}; leave it out"
        )
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"{where}: quantize_queries does not go with {name}; leave one of them "
                "out"
            )
    for name, scale in scales.items():
        if scale is not None and scale.ndim > 1:
            raise ValueError(
                f"{where}: with quantize_queries {name} must be a number or one for "
                f"each KV head, got {show(scale)} of tokens and heads; quantize keys "
                "and values with one scale for each head, or leave quantize_queries "
                "out"
            )


def _split_size(where: str, split_size: Any) -> int:
    """0 for none."""
    if split_size is None:
        return 0
    number = as_int(split_size)
    if number is None or not 1 <= number < 2**31:
        raise ValueError(
            f"{where}: split_size must be a positive integer, keys of a part, got "
            f"{shown(split_size)}; it is compiled in, and 2048 is a good one"
        )
    return number


def _scale(where: str, name: str, scale: Any, pages: KVPool | Pages) -> Any:
    """float32 `[1]`, `[K]`, `[P, T, K]` or `[L, P, T, K]`."""
    if scale is None:
        return None
    if dtype_of(pages) not in NARROW:
        raise ValueError(
            f"{where}: {name} is for blocks of {', '.join(d.name for d in NARROW)}, "
            f"got blocks of {dtype_of(pages)}; leave {name} out"
        )
    blocks, size, heads, _ = page_shapes(pages)[0]
    forms = {"[]": (), "[K]": (heads,), "[P, T, K]": (blocks, size, heads)}
    if isinstance(pages, KVPool):
        forms["[L, P, T, K]"] = (pages.spec.num_layers, blocks, size, heads)
    shapes = ", ".join(f"{form} = {list(n)}" for form, n in forms.items())
    must = f"{where}: {name} must be a number or float32 {shapes}, got"
    made = scale
    if not hasattr(scale, "dtype"):
        try:
            if isinstance(scale, (bool, str, bytes)):
                raise TypeError
            made = np.float32(scale)
        except (TypeError, ValueError):
            raise TypeError(
                f"{must} {scale!r}; pass a Python float, or an array of float32"
            ) from None
    made = check_array(where, name, made)
    if made.shape not in forms.values() or made.dtype != jnp.float32:
        fix = "cast it with .astype(jnp.float32)"
        if made.dtype == jnp.float32:
            fix = "one for all, for each KV head, or for each token and head"
        raise ValueError(f"{must} {show(made)}; {fix}")
    return to_jax(made).reshape(made.shape or (1,))


def _ranges(where: str, ranges: Any, q: Any) -> jax.Array | None:
    """int32 `[C, R, 2]`."""
    if ranges is None:
        return None
    form = "[tokens, 2]" if q.ndim == 3 else "[B, T, 2]"
    ranges = check_int32(where, "ranges", ranges, form, q.ndim - 1)
    if ranges.shape != (*q.shape[:-2], 2):
        raise ValueError(
            f"{where}: ranges must be int32{form} = {[*q.shape[:-2], 2]}, of each row "
            f"of q the first key and the end, got {show(ranges)}; stack them along the "
            "last axis"
        )
    return ranges[None] if q.ndim == 3 else ranges


def _tree_mask(where: str, tree_mask: Any, q: Any) -> jax.Array | None:
    """int32 `[C, R, words]`; None where there are no words."""
    if tree_mask is None:
        return None
    form = "[tokens, words]" if q.ndim == 3 else "[B, T, words]"
    if hasattr(tree_mask, "dtype"):
        tree_mask = check_array(where, "tree_mask", tree_mask)
        if tree_mask.dtype == jnp.uint32:  # its bits, not its numbers
            tree_mask = jax.lax.bitcast_convert_type(to_jax(tree_mask), jnp.int32)
        elif tree_mask.dtype != jnp.int32:
            raise TypeError(
                f"{where}: tree_mask must be bits in int32 or uint32{form}, got "
                f"{show(tree_mask)}; np.packbits(mask, axis=-1, bitorder='little')"
                ".view(np.uint32) packs a mask of 32 keys a word"
            )
    tree_mask = check_int32(where, "tree_mask", tree_mask, form, q.ndim - 1)
    if tree_mask.shape[:-1] != q.shape[:-2]:
        raise ValueError(
            f"{where}: tree_mask must be int32{form} with a row for each of q's "
            f"{list(q.shape[:-2])}, got {show(tree_mask)}; rows without a mask are -1"
        )
    if not tree_mask.shape[-1]:
        return None
    return tree_mask[None] if q.ndim == 3 else tree_mask


def _sequences(
    where: str, q: Any, query_start: Any, q_lens: Any, batch: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """query_start `[1, S + 1]`, or q_lens, or neither."""
    if query_start is None:
        if q.shape[0] != batch:
            raise ValueError(
                f"{where}: q and block_tables must have one batch, got {show(q)} and "
                f"{batch} rows of block_tables"
            )
        if q_lens is None:
            return None, None
        return None, check_lengths(where, "q_lens", q_lens, batch)
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
    return starts[None], None
