"""Attention in blocks of plain JAX: O((T + S) N D) memory, forward and backward.

Serves wherever there is no kernel, and float64. The method is FlashAttention-2's: an
online softmax over the blocks of keys that a block of queries can see (forward), and
the probabilities recomputed from the log-sum-exp (backward).

The loops walk the blocks that can see each other (block_problem.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import dropout
from jax_kvblock.attention.block_problem import (
    Labels,
    Problem,
    block_of,
    filled,
    pad,
    problem_of,
    visits,
)
from jax_kvblock.attention.config import (
    OPEN,
    AttentionConfig,
    Operands,
    accumulator,
    members_of_a_row,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.dense import tile_bits
from jax_kvblock.attention.ops import MOST_ABOVE_BASE, LogSumExp
from jax_kvblock.attention.precision import of_products


def forward(
    config: AttentionConfig,
    x: Operands,
    compute: Any = None,
    platform: str | None = None,
) -> tuple[jax.Array, LogSumExp]:
    """(o, lse), o `[B, T, N, Dv]` in q's dtype, lse `[B, N, T]` float32 or float64.

    The products take operands in `compute` (the inputs' dtype unless given) and add in
    float32 or float64. `platform` picks the size of the blocks.
    """
    size = sizes_of(config, x)
    p = problem_of(config, x, compute, platform)
    b, k, g = p.groups
    e = p.v.shape[-1]
    acc = accumulator(x.q.dtype)
    order, counts = visits(config, p)

    def one_block(i: Any, carry: Any) -> Any:
        o_all, rest_all, base_all = carry

        def step(c: Any, state: Any) -> Any:
            return add_block(config, x, p, i, order[i, c], state)

        state = loop(counts[i], step, no_keys(x, p, e))
        o, lse = finish(x, p, i, *state)
        at = i * p.block_q
        put = jax.lax.dynamic_update_slice_in_dim
        o_all, rest_all = put(o_all, o, at, 3), put(rest_all, lse.rest, at, 3)
        if base_all is not None:
            base_all = put(base_all, lse.base, at, 3)
        return o_all, rest_all, base_all

    t = p.q.shape[2]
    carry = (
        jnp.zeros((b, k, g, t, e), x.q.dtype),
        jnp.full((b, k, g, t), -jnp.inf, acc),
        None if x.bias is None else jnp.zeros((b, k, g, t), acc),
    )
    o, *parts = loop(t // p.block_q, one_block, carry)
    o = jnp.moveaxis(o.reshape(b, k * g, t, e), 1, 2)[:, : size.q_len]
    lse = LogSumExp(
        *(
            None if part is None else part.reshape(b, k * g, t)[..., : size.q_len]
            for part in parts
        )
    )
    if config.packed:  # these have no bias
        return o[0], LogSumExp(lse.rest[0])
    return o, lse


def no_keys(x: Operands, p: Problem, value_dim: int) -> tuple[Any, Any, Any]:
    """What a block of queries has before it has seen keys: `add_block`'s state."""
    rows, acc = (*p.groups, p.block_q), accumulator(x.q.dtype)
    return (
        jnp.zeros((*rows, value_dim), acc),
        jnp.full(rows, -jnp.inf, acc),
        jnp.zeros(rows, acc),
    )


def add_block(
    config: AttentionConfig,
    x: Operands,
    p: Problem,
    i: Any,
    j: Any,
    state: tuple[Any, Any, Any],
) -> tuple[Any, Any, Any]:
    """Adds key block j to query block i: (sums, maximum, total) of the online softmax.

    The sums `[B, K, G, block_q, E]` and totals are those of exp(score - maximum).
    """
    o, top, total = state
    scores, allowed, _ = _scores(config, p, i, j)
    scores = jnp.where(allowed, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(-1))
    base = jnp.where(jnp.isneginf(new_top), 0, new_top)
    weights = jnp.exp(scores - base[..., None])
    shrink = jnp.exp(top - base)
    v_j = block_of(p.v, j, p.block_kv, 2)
    added = _dot(
        "bkgts,bkse->bkgte", _dropped(config, p, i, j, weights), v_j, x, config
    )
    added = _select(p, i, j, added)
    o = o * shrink[..., None] + added
    return o, new_top, total * shrink + weights.sum(-1)


def finish(
    x: Operands, p: Problem, i: Any, o: Any, top: Any, total: Any
) -> tuple[Any, LogSumExp]:
    """Lets the sinks in, and divides by the sum."""
    if x.sinks is not None:
        b, k, g = p.groups
        sinks = row_of_each(x.sinks, b).reshape(b, k, g, 1).astype(top.dtype)
        new_top = jnp.maximum(top, sinks)
        base = jnp.where(jnp.isneginf(new_top), 0, new_top)
        shrink = jnp.exp(top - base)
        o = o * shrink[..., None]
        total = total * shrink + jnp.exp(sinks - base)
        top = new_top
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    real = block_of(p.q_labels.valid, i, p.block_q, 1)[:, None, None]
    o = jnp.where(real[..., None], o / safe[..., None], 0).astype(x.q.dtype)
    seen, rest = real & ~empty, jnp.log(safe)
    if p.bias is None:
        return o, LogSumExp(jnp.where(seen, rest + top, -jnp.inf))
    return o, LogSumExp(jnp.where(seen, rest, -jnp.inf), jnp.where(seen, top, 0))


class Cotangents(NamedTuple):
    """What the backward pass makes; `dbias` float32 or float64, in the bias's shape."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any


def backward(
    config: AttentionConfig,
    x: Operands,
    lse: LogSumExp,
    delta: jax.Array,
    d_o: jax.Array,
    with_bias: bool = False,
    compute: Any = None,
    platform: str | None = None,
    dq_before: jax.Array | None = None,
) -> Cotangents:
    """dq, dk, dv in their operands' dtypes, and dbias when it is asked for.

    `lse` and `delta` = rowsum(d_o * o) - d_lse are `[B, N, T]` (packed `[N, T]`).
    dq is added to `dq_before` where that is given, before it is rounded.
    """
    p = problem_of(config, x, compute, platform)
    b, k, g = p.groups
    t, d = p.q.shape[2:]
    s, e = p.v.shape[2:]
    acc = accumulator(x.q.dtype)
    rows = rows_of(config, p, x, lse, delta, d_o)
    names = ("q", "k", "v", "bias") if with_bias else ("q", "k", "v")

    order, counts = visits(config, p, transposed=True)
    bias_groups = None
    if with_bias:
        bias_groups = x.bias.shape[:2]

    def one_block(j: Any, carry: Any) -> Any:
        dq_all, dk_all, dv_all, dbias_all = carry

        def step(c: Any, state: Any) -> Any:
            dq_all, dk, dv, dbias_all = state
            i = order[j, c]
            found = gradients_of_block(config, p, x, rows, names, i, j)
            dq_i, dk_i, dv_i = found["q"], found["k"], found["v"]
            if with_bias:
                dbias_all = add_bias(p, dbias_all, bias_groups, found["bias"], i, j)
            at = i * p.block_q
            dq_i = dq_i + jax.lax.dynamic_slice_in_dim(dq_all, at, p.block_q, 3)
            dq_all = jax.lax.dynamic_update_slice_in_dim(dq_all, dq_i, at, 3)
            return dq_all, dk + dk_i, dv + dv_i, dbias_all

        state = (
            dq_all,
            jnp.zeros((b, k, p.block_kv, d), acc),
            jnp.zeros((b, k, p.block_kv, e), acc),
            dbias_all,
        )
        dq_all, dk, dv, dbias_all = loop(counts[j], step, state)
        at = j * p.block_kv
        dk_all = jax.lax.dynamic_update_slice_in_dim(
            dk_all, dk.astype(dk_all.dtype), at, 2
        )
        dv_all = jax.lax.dynamic_update_slice_in_dim(
            dv_all, dv.astype(dv_all.dtype), at, 2
        )
        return dq_all, dk_all, dv_all, dbias_all

    dbias = jnp.zeros((*bias_groups, t, s), acc) if bias_groups else jnp.zeros((), acc)
    carry = (
        jnp.zeros((b, k, g, t, d), acc),
        jnp.zeros((b, k, s, d), x.k.dtype),
        jnp.zeros((b, k, s, e), x.v.dtype),
        dbias,
    )
    dq, dk, dv, dbias = loop(s // p.block_kv, one_block, carry)
    size = sizes_of(config, x)
    dq = jnp.moveaxis(dq.reshape(b, k * g, t, d), 1, 2)[:, : size.q_len]
    dk, dv = (jnp.moveaxis(a, 1, 2)[:, : size.kv_len] for a in (dk, dv))
    if config.packed:
        dq, dk, dv = dq[0], dk[0], dv[0]
    if dq_before is not None:
        dq = dq + dq_before.astype(acc)
    dq = dq.astype(x.q.dtype)
    if with_bias:
        dbias = dbias[..., : size.q_len, : size.kv_len]
    return Cotangents(dq, dk, dv, dbias if with_bias else None)


# ---- one block -----------------------------------------------------------------------


class Rows(NamedTuple):
    """What the backward pass knows of rows, padded: `[B, K, G, T]`."""

    rest: jax.Array  # the log-sum-exp in two parts; inf where a row sees nothing
    base: Any
    delta: Any = None
    d_o: Any = None  # [B, N, T, E]


def rows_of(
    config: AttentionConfig,
    p: Problem,
    x: Operands,
    lse: LogSumExp,
    delta: Any = None,
    d_o: Any = None,
) -> Rows:
    """From lse and delta `[B, N, T]` and d_o `[B, T, N, E]` (packed without B)."""
    rest = padded_rows(config, p, lse.rest)
    base = None if lse.base is None else padded_rows(config, p, lse.base)
    outside = ~p.q_labels.valid[:, None, None] | jnp.isneginf(rest)
    # exp(score - inf) is 0: what rows without keys contribute.
    rest = jnp.where(outside, jnp.inf, rest)
    if d_o is None:
        return Rows(rest, base)
    delta = jnp.where(outside, 0, padded_rows(config, p, delta))
    return Rows(rest, base, delta, padded_queries(config, p, x, d_o))


def padded_rows(config: AttentionConfig, p: Problem, a: Any) -> Any:
    """`[B, N, T]` (packed `[N, T]`) as `[B, K, G, T]` in whole blocks."""
    a = pad(a[None] if config.packed else a, 2, p.q.shape[2])
    return a.reshape(*p.groups, p.q.shape[2])


def padded_queries(config: AttentionConfig, p: Problem, x: Operands, a: Any) -> Any:
    """`[B, T, N, E]` (packed `[T, N, E]`) as `[B, N, T, E]` in whole blocks."""
    a = a[None] if config.packed else a
    some = config.packed or x.q_lens is not None
    a = filled(a, p.q.shape[2], p.q_labels, some)
    return jnp.moveaxis(a, 1, 2).astype(p.q.dtype)


def padded_keys(config: AttentionConfig, p: Problem, x: Operands, a: Any) -> Any:
    """`[B, S, K, D]` (packed `[S, K, D]`) as `[B, K, S, D]` in whole blocks."""
    a = a[None] if config.packed else a
    some = config.packed or x.kv_lens is not None
    a = filled(a, p.k.shape[2], p.kv_labels, some)
    return jnp.moveaxis(a, 1, 2).astype(p.k.dtype)


def gradients_of_block(
    config: AttentionConfig,
    p: Problem,
    x: Operands,
    rows: Rows,
    wanted: Sequence[str],
    i: Any,
    j: Any,
    shift: Any = None,
) -> dict[str, Any]:
    """What block (i, j) adds to the gradient of the sum over queries and keys of

        p (d_o v - delta),    p = exp(score - lse)

    with respect to q, k, v, bias, lse, delta and o (this is d_o), as far as they are
    wanted. For o and delta neither d_o nor delta is needed. `shift` is added to scores.
    With dropout the products d_o v are 0 of pairs that are dropped.
    """
    q_i = p.query_block(p.q, i)
    k_j, v_j = (block_of(a, j, p.block_kv, 2) for a in (p.k, p.v))
    scores, allowed, slope = _scores(config, p, i, j)
    if shift is not None:
        scores = scores + shift
    if rows.base is not None:
        scores = scores - block_of(rows.base, i, p.block_q, 3)[..., None]
        # Where large scores lie far apart, one may round up here that rounded down in
        # the forward pass. It moves as any other.
        most = MOST_ABOVE_BASE + (scores - jax.lax.stop_gradient(scores))
        scores = jnp.where(scores > MOST_ABOVE_BASE, most, scores)
    rest_i = block_of(rows.rest, i, p.block_q, 3)[..., None]
    weights = jnp.where(allowed, jnp.exp(scores - rest_i), 0)
    dropped = _dropped(config, p, i, j, weights)
    made = {}
    if "o" in wanted:
        made["o"] = _select(p, i, j, _dot("bkgts,bkse->bkgte", dropped, v_j, x, config))
    if "delta" in wanted:
        made["delta"] = -weights.sum(-1)
    if {"o", "delta"}.issuperset(wanted):
        return made

    d_o_i = p.query_block(rows.d_o, i)
    if "v" in wanted:
        dv = _select(p, i, j, _dot("bkgts,bkgte->bkgse", dropped, d_o_i, x, config))
        made["v"] = dv.sum(2)
    dw = _dot("bkgte,bkse->bkgts", d_o_i, v_j, x, config)
    dw = _dropped(config, p, i, j, dw)
    ds = weights * (dw - block_of(rows.delta, i, p.block_q, 3)[..., None])
    ds = jnp.where(allowed, ds, 0)
    if "bias" in wanted:
        made["bias"] = ds
    if "lse" in wanted:
        made["lse"] = -ds.sum(-1)
    if slope is not None:
        ds = jnp.where(allowed, ds * slope, 0)
    ds = ds * config.scale
    if "q" in wanted:
        made["q"] = _select(p, i, j, _dot("bkgts,bksd->bkgtd", ds, k_j, x, config))
    if "k" in wanted:
        dk = _select(p, i, j, _dot("bkgts,bkgtd->bkgsd", ds, q_i, x, config))
        made["k"] = dk.sum(2)
    return made


def loop(count: Any, body: Any, state: Any) -> Any:
    """`fori_loop` with int32 indices, whatever jax's default integer is."""
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.fori_loop(zero, jnp.asarray(count, jnp.int32), body, state)


def _dot(equation: str, a: Any, b: Any, x: Operands, config: AttentionConfig) -> Any:
    """A product that takes operands in the inputs' dtype and adds in float32."""
    return jnp.einsum(
        equation,
        a.astype(b.dtype),
        b,
        precision=of_products(config.precision),
        preferred_element_type=accumulator(x.q.dtype),
    )


def _dropped(config: AttentionConfig, p: Problem, i: Any, j: Any, a: Any) -> Any:
    """What pairs `[B, K, G, block_q, block_kv]` have, after dropout."""
    if p.dropout is None:
        return a
    rows = p.query_block(p.dropout.rows, i)
    columns = block_of(p.dropout.columns, j, p.block_kv, 2)
    columns = columns.reshape(*rows.shape[:3], p.block_kv)
    row_shifts = block_of(p.dropout.row_shifts, i, p.block_q, 1)[:, None, None]
    column_shifts = block_of(p.dropout.column_shifts, j, p.block_kv, 1)[:, None, None]
    factors = block_of(p.dropout.factors, j, p.block_kv, 1)[:, None, None]
    parts = dropout.Parts(rows, columns, row_shifts, column_shifts, factors)
    return jnp.where(dropout.kept(config, parts), a * dropout.scale_of(config), 0)


def bias_block(p: Problem, i: Any, j: Any) -> Any:
    """The bias of a block as `[B, K, G, block_q, block_kv]` (or 1 for K and G)."""
    bias = block_of(block_of(p.bias, i, p.block_q, 2), j, p.block_kv, 3)
    return _to_heads(p, bias).astype(accumulator(p.q.dtype))


def _to_heads(p: Problem, a: Any) -> Any:
    """`[b, n, ...]` shared by batch or heads as `[B, K, G, ...]`, K G 1 if shared."""
    batch, k, g = p.groups
    if a.shape[0] not in (1, batch):
        a = row_of_each(a, batch)
    heads = (1, 1) if a.shape[1] == 1 else (k, g)
    return a.reshape(a.shape[0], *heads, *a.shape[2:])


def _scores(
    config: AttentionConfig, p: Problem, i: Any, j: Any
) -> tuple[Any, Any, Any]:
    """Scores of a block, who may attend, and the slope of the softcap (None without
    one): `[B, K, G, block_q, block_kv]`.
    """
    slope = None
    scores = config.scale * _products(config, p, i, j)
    if config.softcap:
        capped = jnp.tanh(scores / config.softcap)
        scores, slope = config.softcap * capped, 1 - jnp.square(capped)
    if p.bias is not None:
        scores = scores + bias_block(p, i, j)

    rows = Labels(*(block_of(a, i, p.block_q, 1)[:, :, None] for a in p.q_labels))
    keys = Labels(*(block_of(a, j, p.block_kv, 1)[:, None, :] for a in p.kv_labels))
    allowed = rows.valid & keys.valid & (rows.owner == keys.owner)
    allowed &= rows.segment == keys.segment
    if config.window_left != OPEN:
        allowed &= keys.first >= rows.first
    if config.window_right != OPEN:
        allowed &= keys.first <= rows.last
    if p.seen is not None:
        allowed &= p.seen
    allowed = allowed[:, None, None]
    if p.masks is not None:
        bits = tile_bits(p.masks, p.tiles[:, :, i, j], p.block_kv)
        allowed &= _to_heads(p, bits)
    elif p.listed is not None:
        allowed &= _to_heads(p, p.listed[:, :, i, j])[..., None, None]
    return scores, allowed, slope


def _products(config: AttentionConfig, p: Problem, i: Any, j: Any) -> Any:
    """Q Kᵀ of a block, float32 or float64 `[B, K, G, block_q, block_kv]`.

    XLA's CPU backend lays out anew what stands on the right. Of few queries that is the
    queries, and then the result. Forward and backward do alike: else they would round
    alike no more, and what cancels in gradients would not.
    """
    q = p.query_block(p.q, i)
    k = block_of(p.k, j, p.block_kv, 2)
    how: dict[str, Any] = {
        "precision": of_products(config.precision),
        "preferred_element_type": accumulator(p.q.dtype),
    }
    if p.keys_on_left:
        return jnp.moveaxis(jnp.einsum("bksd,bkgtd->bksgt", k, q, **how), 2, 4)
    return jnp.einsum("bkgtd,bksd->bkgts", q, k, **how)


def _select(p: Problem, i: Any, j: Any, a: Any) -> Any:
    """Nothing of a tile that is not listed, not even a NaN."""
    if p.listed is None:
        return a
    return jnp.where(_to_heads(p, p.listed[:, :, i, j])[..., None, None], a, 0)


def add_bias(p: Problem, total: Any, groups: Any, ds: Any, i: Any, j: Any) -> Any:
    """Adds a block of d_scores, summed over the batch and heads that share the bias."""
    batch, k, g = p.groups
    shared = members_of_a_row(batch, groups[0])
    ds = ds.reshape(groups[0], shared, k * g, p.block_q, p.block_kv).sum(1)
    if groups[1] == 1:
        ds = ds.sum(1, keepdims=True)
    zero = jnp.zeros((), jnp.int32)
    at = (zero, zero, i * p.block_q, j * p.block_kv)
    ds = ds + jax.lax.dynamic_slice(total, at, ds.shape)
    return jax.lax.dynamic_update_slice(total, ds, at)
