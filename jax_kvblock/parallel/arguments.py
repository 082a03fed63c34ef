"""From what the caller passes to a plan and operands, or to an error that helps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention import dropout
from jax_kvblock.attention.arguments import (
    check_dropout_keys,
    check_dropout_rate,
    check_flags,
    check_lengths,
    check_scale,
    check_segments,
    check_sinks,
    check_softcap,
    check_window,
)
from jax_kvblock.attention.config import OPEN, AttentionConfig
from jax_kvblock.attention.dispatch import IMPLEMENTATIONS
from jax_kvblock.attention.integers import known_on_host
from jax_kvblock.attention.precision import resolve
from jax_kvblock.attention.qkv import BATCHED, PACKED, check_qkv
from jax_kvblock.core import debug
from jax_kvblock.core.checks import check_choice, check_positive, show, to_jax
from jax_kvblock.parallel import axes
from jax_kvblock.parallel.local import Mask, Plan
from jax_kvblock.parallel.options import engines_can_send
from jax_kvblock.parallel.others import are_apart
from jax_kvblock.parallel.pieces import NO_KEY, reach_of
from jax_kvblock.parallel.sequence import LAYOUTS, check_boundaries, check_divides
from jax_kvblock.parallel.strategy import (
    STRATEGIES,
    Work,
    choose,
    groups,
    largest_group,
    serves_heads,
    work_of,
)
from jax_kvblock.parallel.ulysses import Exchange


class Normalized(NamedTuple):
    """A checked call. Without `exchange` heads stay where they are."""

    plan: Plan
    exchange: Exchange | None
    q: jax.Array
    k: jax.Array
    v: jax.Array
    sinks: Any
    mask: Mask


# What a call names its integers, as `Mask` has them.
_NAMES = (
    *("segment_ids", "segment_ids", "q_lens", "kv_lens"),
    *("cu_seqlens", "cu_seqlens", "dropout_seed"),
)


def normalize(
    where: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    strategy: str,
    ulysses_degree: Any = None,
    layout: str,
    causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_rate: Any = 0.0,
    dropout_seed: Any = None,
    dropout_keys: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    compiler_options: bool = False,
    implementation: str | None = None,
) -> Normalized:
    """Checks every argument of `context_parallel_attention`."""
    packed = cu_seqlens is not None
    axis_name = axes.hashable(axis_name)
    size = axes.axis_size(where, axis_name)
    q, k, v = check_qkv(where, PACKED if packed else BATCHED, q, k, v)
    axes.check_own(where, ("q", q), ("k", k), ("v", v))
    check_flags(
        where,
        causal=causal,
        deterministic=deterministic,
        compiler_options=compiler_options,
        return_lse=return_lse,
    )
    check_choice(where, "strategy", strategy, STRATEGIES)
    check_choice(where, "layout", layout, LAYOUTS)
    served = (None, *(name for name in IMPLEMENTATIONS if name != "cudnn"))
    check_choice(where, "implementation", implementation, served)
    heads, head_dim = q.shape[-2:]
    left, right = check_window(where, causal, window)
    config = AttentionConfig(
        scale=check_scale(where, scale, head_dim),
        window_left=left,
        window_right=right,
        softcap=check_softcap(where, softcap),
        packed=packed,
        deterministic=bool(deterministic),
        precision=resolve(where, None, q.dtype),
        implementation=implementation,
        where=where,
        dropout=check_dropout_rate(where, dropout_rate),
    )
    rows, keys = q.shape[-3], k.shape[-3]
    zigzag = layout == "zigzag" and size > 1
    if zigzag:
        for name, length in (("T", rows), ("S", keys)):
            check_divides(where, f"{name}, a device's rows in zigzag,", length, 2)
    if packed:
        mask = _packed_mask(where, cu_seqlens, segment_ids, (rows, keys), size, zigzag)
        alike = mask.cu_q is mask.cu_kv
        documents = (mask.cu_q.shape[0] - 1, mask.cu_kv.shape[0] - 1)
    else:
        mask = _batched_mask(where, segment_ids, q.shape[0], rows, keys)
        alike, documents = rows == keys, (q.shape[0],) * 2
    longest, cu_q = _longest(where, max_seqlen, cu_seqlens, mask.cu_q)
    mask = mask._replace(cu_q=cu_q)
    most = longest if alike else OPEN  # it is rows' alone
    lens = _documents(where, cu_seqlens, rows * size, keys * size, most)
    if zigzag or not alike:  # rows are not as far apart as their positions
        longest = OPEN
    if config.dropout:
        _check_runs(where, packed, 2 if zigzag else 1, T=rows, S=keys)
    if dropout_keys is None:
        batch_and_heads = (q.shape[0], heads)
        dropout_keys = check_dropout_keys(where, config, dropout_seed, batch_and_heads)
    mask = mask._replace(
        dropout_keys=dropout_keys,
        q_lens=_lengths(where, "q_lens", q_lens, documents[0], rows * size),
        kv_lens=_lengths(where, "kv_lens", kv_lens, documents[1], keys * size),
    )
    sinks = check_sinks(where, sinks, q, heads)
    axes.check_own(where, ("sinks", sinks), *zip(_NAMES, mask, strict=True))
    sizes = (heads, k.shape[-2], head_dim, v.shape[-1])
    unknown = packed and (zigzag or not alike)
    shape = config, size, rows, keys, zigzag, alike, longest
    reach = size if unknown else reach_of(*shape)
    batch = 1 if packed else q.shape[0]
    by_engines = compiler_options and engines_can_send() and jax.process_count() == 1
    segments = mask.kv_segments is not None
    apart = are_apart(config, alike=alike, zigzag=zigzag, segments=segments)
    direct, itemsize = by_engines and apart, q.dtype.itemsize
    work = work_of(
        config, size, sizes, batch, rows, keys, lens, itemsize, reach, direct
    )
    strategy, group = _resolve(where, strategy, ulysses_degree, work)
    gathered = strategy == "all_gather"
    plan = Plan(
        config=config,
        axis_name=axis_name,
        size=size // group,
        group=group,
        zigzag=zigzag,
        gathered=gathered,
        direct=gathered and direct,
        packed=packed,
        alike=alike,
        as_one=not compiler_options,
        beside_nccl=not (direct if gathered else by_engines),
        longest=longest,
    )
    exchange = Exchange(axis_name, size, group, zigzag) if group > 1 else None
    return Normalized(
        plan, exchange, to_jax(q), to_jax(k), to_jax(v),
        sinks, mask,
    )  # fmt: skip


def _check_runs(where: str, packed: bool, runs: int, **lengths: int) -> None:
    """What dropout wants of the rows, so that blocks of 16 positions stay whole."""
    if packed:
        raise ValueError(
            f"{where}: dropout_rate cannot be combined with cu_seqlens; say documents "
            "by segment_ids, of batches [B, T, N, D]"
        )
    for name, length in lengths.items():
        if length % (runs * dropout.BLOCK):
            raise ValueError(
                f"{where}: {name}, a device's rows, must be a multiple of "
                f"{runs * dropout.BLOCK} with dropout_rate, got {length}; pad the "
                "sequence, and pass q_lens and kv_lens"
            )


def _resolve(where: str, strategy: str, degree: Any, work: Work) -> tuple[str, int]:
    """The strategy, and how many devices exchange heads."""
    if degree is not None:
        return strategy, _degree(where, strategy, degree, work)
    if strategy == "auto":
        return choose(work)
    if strategy == "ulysses":
        if not serves_heads(work.heads, work.kv_heads, work.size):
            raise ValueError(
                f"{where}: strategy='ulysses' needs query heads that are a multiple of "
                f"the {work.size} devices, and KV heads that are one or divide their "
                f"number, got {work.heads} and {work.kv_heads}; 'ulysses_ring' "
                "exchanges in smaller groups, and 'ring' exchanges none"
            )
        return strategy, work.size
    if strategy == "ulysses_ring":
        return strategy, largest_group(work)
    return strategy, 1


def check_degree_of(where: str, strategy: str) -> None:
    """Whether a strategy has a ulysses_degree."""
    if strategy != "ulysses_ring":
        raise ValueError(
            f"{where}: ulysses_degree is of strategy='ulysses_ring', got it with "
            f"{strategy!r}; pass that strategy, or leave it out"
        )


def _degree(where: str, strategy: str, degree: Any, work: Work) -> int:
    check_degree_of(where, strategy)
    (degree,) = check_positive(where, ulysses_degree=degree)
    served = list(groups(work))
    if degree not in served:
        raise ValueError(
            f"{where}: ulysses_degree must divide the {work.size} devices and the "
            f"{work.heads} query heads, and divide the {work.kv_heads} KV heads or be "
            f"a multiple of them: one of {served}, got {degree}"
        )
    return degree


def _lengths(where: str, name: str, lens: Any, count: int, most: int) -> Any:
    """None, or lengths from 0 to all there is: what they are added to stays small."""
    lens = check_lengths(where, name, lens, count)
    return None if lens is None else jnp.clip(lens, 0, most)


def _longest(
    where: str, max_seqlen: Any, cu_seqlens: Any, bounds: Any
) -> tuple[int, Any]:
    """Rows of the longest packed document; OPEN where nobody knows.

    And the boundaries of rows, `bounds`, once they were looked at.
    """
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(
                f"{where}: max_seqlen is of packed documents, and needs cu_seqlens; a "
                "batch has T rows"
            )
        return OPEN, bounds
    cu = cu_seqlens[0] if isinstance(cu_seqlens, tuple) else cu_seqlens
    known = known_on_host(where, "cu_seqlens", cu)
    if max_seqlen is None:
        most = OPEN if known is None else max(int(np.diff(known).max()), 1)
        return most, bounds
    (most,) = check_positive(where, max_seqlen=max_seqlen)
    if known is None:
        bounds = debug.checked(_look_at_longest, bounds, where, most, name="bounds")
    else:
        _look_at_longest(where, most, bounds=known)
    return most, bounds


def _documents(
    where: str, cu_seqlens: Any, rows: int, keys: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and keys of each document; a sequence is one.

    Where boundaries are not on the host: one, whose rows see what the longest has.
    """
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens,) * 2
    ends = pair[0], pair[-1]  # one serves both
    q, kv = (None if x is None else known_on_host(where, "cu_seqlens", x) for x in ends)
    if q is None or kv is None:
        most = keys if longest == OPEN else min(keys, longest)
        return np.array([rows]), np.array([most])
    return np.diff(q), np.diff(kv)


def _look_at_longest(where: str, most: int, *, bounds: np.ndarray) -> None:
    rows = np.diff(bounds)
    if rows.size and rows.max() > most:
        raise ValueError(
            f"{where}: max_seqlen must be at least the rows of the longest document, "
            f"{rows.max()}, got {most}"
        )


def _packed_mask(
    where: str,
    cu_seqlens: Any,
    segment_ids: Any,
    lengths: tuple[int, int],
    size: int,
    zigzag: bool,
) -> Mask:
    if segment_ids is not None:
        raise ValueError(
            f"{where}: segment_ids cannot be combined with cu_seqlens; a packed "
            "document attends to itself alone already"
        )
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens,)
    if len(pair) not in (1, 2):
        raise ValueError(
            f"{where}: cu_seqlens must be int32[documents + 1], or a pair for q and "
            f"for k and v, got a tuple of {len(pair)}"
        )
    by = 2 * size if zigzag else 1
    names = ("cu_seqlens",) if len(pair) == 1 else ("cu_seqlens[0]", "cu_seqlens[1]")
    bounds = [
        check_boundaries(where, cu, length * size, by, name)
        for name, cu, length in zip(names, pair, lengths, strict=False)
    ]
    # The same array twice is one for both, unless they differ in rows.
    apart = pair[0] is not pair[-1] or lengths[0] != lengths[1]
    if len(pair) == 2 and apart:
        if bounds[0].shape != bounds[1].shape:
            raise ValueError(
                f"{where}: cu_seqlens must have as many documents of queries as of "
                f"keys, got {show(bounds[0])} and {show(bounds[1])}"
            )
        return Mask(cu_q=bounds[0], cu_kv=bounds[1])
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"{where}: one cu_seqlens serves as many rows of q as of k, got "
            f"{lengths[0]} and {lengths[1]}; pass a pair (cu_q, cu_kv)"
        )
    return Mask(cu_q=bounds[0], cu_kv=bounds[0])


def _batched_mask(
    where: str, segment_ids: Any, batch: int, rows: int, keys: int
) -> Mask:
    ids = check_segments(where, segment_ids, batch, rows, keys)
    given = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
    for x in given:
        known = None if x is None else known_on_host(where, "segment_ids", x)
        if known is not None and known.size and known.min() <= NO_KEY:
            raise ValueError(
                f"{where}: segment_ids must be above {NO_KEY}, got {known.min()}; the "
                "two smallest int32 mark rows that take no part"
            )
    return Mask(q_segments=ids[0], kv_segments=ids[1])
