"""Directional derivatives of attention in blocks of plain JAX: O((T + S) N D) memory.

With lse known, attention is the derivative of one sum over pairs of queries and keys,

    Phi = sum_ij p_ij (d_o_i v_j - delta_i),    p_ij = exp(s_ij - lse_i)

for scores s_ij. The backward pass is its gradient with respect to q, k, v and bias, and
what the rules of `derivatives.py` ask for beyond that are its second and third
derivatives along directions, which have primes here:

    hessian         the gradient's change: of any of q, k, v, bias, lse, delta and d_o
    tangent         out of the changes of d_o's, rowsum(p s' v + p v'), and of delta's,
                    -rowsum(p s'), come those of o and lse
    second_tangent  the change of these two along a second direction

All are the jvp, once or twice, of what a block adds to the gradient
(`blocked.gradients_of_block`), summed up over the blocks that meet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention import block_problem, blocked
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    accumulator,
    members_of_a_row,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.ops import (
    HESSIAN,
    SECOND_TANGENT,
    Call,
    LogSumExp,
    Op,
)

Arrays = Mapping[str, Any]  # by the names of operands and results
KEYS, ROWS = ("k", "v"), ("lse", "delta")


def run(
    op: Op, call: Call, compute: Any, platform: str | None, *arrays: Any
) -> tuple[Any, ...]:
    """The results of one of the operations above; o is d_o in `hessian`."""
    x = call.unpack(arrays[: len(call.present)])
    given = dict(zip(op.operand_names(call), arrays, strict=True))
    lse = LogSumExp(given["lse"], given.get("base"))
    first, second = (
        {n.rstrip("'"): given[n] for n in call.along if n.count("'") == primes}
        for primes in (1, 2)
    )
    change = functools.partial(_change, call.config, x, lse, compute, platform)
    if op is HESSIAN:
        made = change(call.wanted, [first], given["delta"], given["o"])
        like = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "o": x.q}
        return tuple(
            a.astype(like[name].dtype) if name in like else a
            for name, a in made.items()
        )
    if op is SECOND_TANGENT:
        made = change(("o", "delta"), [first, second])
        return made["o"].astype(x.q.dtype), -made["delta"]

    sinks = first.pop("sinks", None)
    made = change(("o", "delta"), [first])
    o, lse_moves = given["o"], -made["delta"]
    if sinks is not None:
        share = sink_share(call.config, x.sinks, lse)
        lse_moves = lse_moves + share * per_row(call.config, sinks, share)
    o_moves = made["o"] - beside_o(lse_moves) * o.astype(lse_moves.dtype)
    return o_moves.astype(o.dtype), lse_moves


# ---- sinks, and rows beside o --------------------------------------------------------


def sink_share(config: AttentionConfig, sinks: Any, lse: LogSumExp) -> jax.Array:
    """The probability of a row's sink, shaped like lse."""
    rest, base = lse
    rows = per_row(config, sinks, rest)
    rows = rows if base is None else rows - base
    return jnp.exp(rows - jnp.where(jnp.isneginf(rest), jnp.inf, rest))


def per_row(config: AttentionConfig, sinks: Any, rows: jax.Array) -> jax.Array:
    """Sinks `[b, N]` as `[B, N, 1]` (packed `[N, 1]`), in the dtype of `rows`."""
    sinks = sinks.astype(rows.dtype)
    if config.packed:
        return sinks[0, :, None]
    return row_of_each(sinks, rows.shape[0])[..., None]


def over_rows(config: AttentionConfig, rows: jax.Array, sinks: Any) -> jax.Array:
    """Rows shaped like lse summed up for each sink; the transpose of `per_row`."""
    total = rows.sum(-1)
    if config.packed:
        total = total[None]
    shared = members_of_a_row(total.shape[0], sinks.shape[0])
    total = total.reshape(sinks.shape[0], shared, sinks.shape[1])
    return total.sum(1).astype(sinks.dtype)


def beside_o(rows: jax.Array) -> jax.Array:
    """`[B, N, T]` (packed `[N, T]`) as `[B, T, N, 1]`."""
    return jnp.swapaxes(rows, -1, -2)[..., None]


# ---- sums over blocks ----------------------------------------------------------------


def _change(
    config: AttentionConfig,
    x: Operands,
    lse: LogSumExp,
    compute: Any,
    platform: str | None,
    wanted: Sequence[str],
    directions: Sequence[Arrays],
    delta: Any = None,
    d_o: Any = None,
) -> dict[str, Any]:
    """What Phi's gradient changes by along `directions`, one after the other.

    Shaped like what is wanted, in float32 or float64. o and delta need no d_o.
    """
    p = block_problem.problem_of(config, x, compute, platform)
    rows = blocked.rows_of(config, p, x, lse, delta, d_o)
    at = {"q": p.q, "k": p.k, "v": p.v, "lse": rows.rest}
    at |= {"delta": rows.delta, "o": rows.d_o}
    moves = [
        {n: _padded(config, p, x, rows, n, a) for n, a in along.items()}
        for along in directions
    ]

    def of_block(i: Any, j: Any) -> dict[str, Any]:
        def gradient(arrays: Arrays) -> dict[str, Any]:
            moved = p._replace(**{n: arrays[n] for n in ("q", "k", "v")})
            beside = blocked.Rows(
                arrays["lse"], rows.base, arrays["delta"], arrays["o"]
            )
            shift = arrays.get("bias")
            return blocked.gradients_of_block(
                config, moved, x, beside, wanted, i, j, shift
            )

        change: Callable[[Arrays], Any] = gradient
        here = dict(at)
        for along in moves:
            if "bias" in along:  # what scores change by, whoever shares the bias
                shift = blocked.bias_block(p._replace(bias=along["bias"]), i, j)
                along = along | {"bias": shift}
                here["bias"] = jnp.zeros_like(shift)
            change = _along(change, along)
        return change(here)

    return _add_up(config, p, x, wanted, of_block)


def _along(f: Callable[[Arrays], Any], direction: Arrays) -> Callable[[Arrays], Any]:
    """The change of `f` along a direction of some of its arrays."""

    def change(arrays: Arrays) -> Any:
        moving = {n: arrays[n] for n in direction}
        part = lambda moving: f({**arrays, **moving})  # noqa: E731
        return jax.jvp(part, (moving,), (dict(direction),))[1]

    return change


def _padded(
    config: AttentionConfig,
    p: block_problem.Problem,
    x: Operands,
    rows: blocked.Rows,
    name: str,
    a: Any,
) -> Any:
    """A direction like the array that moves by it, as the loops see that."""
    if name in ROWS:
        outside = jnp.isposinf(rows.rest)
        return jnp.where(outside, 0, blocked.padded_rows(config, p, a))
    if name == "bias":
        return block_problem.pad(block_problem.pad(a, 2, p.q.shape[2]), 3, p.k.shape[2])
    if name in KEYS:
        return blocked.padded_keys(config, p, x, a)
    return blocked.padded_queries(config, p, x, a)


def _add_up(
    config: AttentionConfig,
    p: block_problem.Problem,
    x: Operands,
    wanted: Sequence[str],
    of_block: Callable[[Any, Any], Arrays],
) -> dict[str, Any]:
    """The sums of what blocks of queries and keys that meet have, by name."""
    size, (b, k, g) = sizes_of(config, x), p.groups
    t, d = p.q.shape[2:]
    s, e = p.v.shape[2:]
    shapes = {"q": (b, k, g, t, d), "o": (b, k, g, t, e), "k": (b, k, s, d)}
    shapes |= {"v": (b, k, s, e), "lse": (b, k, g, t), "delta": (b, k, g, t)}
    shared = ()
    if "bias" in wanted:
        shared = x.bias.shape[:2]
        shapes["bias"] = (*shared, t, s)

    def add(name: str, total: Any, a: Any, i: Any, j: Any) -> Any:
        if name == "bias":
            return blocked.add_bias(p, total, shared, a, i, j)
        axis, index, block = (2, j, p.block_kv) if name in KEYS else (3, i, p.block_q)
        at = index * block
        a = a + jax.lax.dynamic_slice_in_dim(total, at, block, axis)
        return jax.lax.dynamic_update_slice_in_dim(total, a, at, axis)

    order, counts = block_problem.visits(config, p)

    def one_block(i: Any, totals: dict[str, Any]) -> dict[str, Any]:
        def step(c: Any, totals: dict[str, Any]) -> dict[str, Any]:
            j = order[i, c]
            made = of_block(i, j)
            return {n: add(n, total, made[n], i, j) for n, total in totals.items()}

        return blocked.loop(counts[i], step, totals)

    def cropped(name: str, a: Any) -> Any:
        if name == "bias":
            return a[..., : size.q_len, : size.kv_len]
        if name in KEYS:
            a = jnp.moveaxis(a, 1, 2)[:, : size.kv_len]
        else:
            a = a.reshape(b, k * g, *a.shape[3:])[:, :, : size.q_len]
            a = a if name in ROWS else jnp.moveaxis(a, 1, 2)
        return a[0] if config.packed else a

    zeros = {n: jnp.zeros(shapes[n], accumulator(x.q.dtype)) for n in wanted}
    totals = blocked.loop(t // p.block_q, one_block, zeros)
    return {name: cropped(name, totals[name]) for name in wanted}
