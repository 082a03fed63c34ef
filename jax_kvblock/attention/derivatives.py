"""How the primitives of attention are differentiated: twice, in either mode.

Forward mode of `forward` and `output` is `tangent`, linear in the directions; its
transpose is the backward pass, so that reverse mode keeps q, k, v, out and lse and
runs the backward kernels. Every other rule is one that follows:

    primitive       its derivative              its transpose
    forward         tangent                     -
    tangent         second_tangent, tangent     backward, backward_bias
    backward        hessian, backward           tangent
    second_tangent  in its directions alone     hessian
    hessian         in its directions alone     hessian

out and lse, where they are operands, are operands like any other: derivatives with
respect to them count, and come from `tangent`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_kvblock.attention import primitive
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.ops import (
    BACKWARD,
    BACKWARD_ADDED,
    BACKWARD_BIAS,
    FORWARD,
    HESSIAN,
    JOINED,
    OUTPUT,
    SECOND_TANGENT,
    TANGENT,
    Call,
    LogSumExp,
    Op,
)
from jax_kvblock.attention.tangent import beside_o, over_rows, per_row, sink_share

# What the forward pass keeps for the backward pass, for jax.checkpoint policies:
# jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES) saves all of it.
RESIDUAL_NAMES = (
    "flash_attention_q",
    "flash_attention_k",
    "flash_attention_v",
    "flash_attention_out",
    "flash_attention_lse",
    "flash_attention_lse_base",  # of calls with a bias
)
VALUES = ("q", "k", "v", "bias")


# ---- reverse mode --------------------------------------------------------------------


def gradients(
    config: AttentionConfig,
    x: Operands,
    o: jax.Array,
    lse: LogSumExp,
    d_o: jax.Array,
    d_lse: jax.Array | None,
    wanted: Sequence[str] = (*VALUES, "sinks"),
) -> dict[str, jax.Array]:
    """Of the arrays that are wanted and there, from the cotangents of o and lse."""
    # The log-sum-exp's gradient rides along: d(score) = p (dp - rowsum(d_o o) + d_lse).
    acc = lse.rest.dtype
    rowsum = jnp.sum(d_o.astype(acc) * o.astype(acc), axis=-1)
    delta = jnp.swapaxes(rowsum, -1, -2)
    if d_lse is not None:
        delta = delta - d_lse
    found: dict[str, jax.Array] = {}
    if {"q", "k", "v"} & set(wanted):
        made = primitive.backward(config, x, lse, delta, d_o)
        found |= dict(zip(("q", "k", "v"), made, strict=True))
    if x.bias is not None and "bias" in wanted:
        found["bias"] = primitive.backward_bias(config, x, lse, delta, d_o)
    if x.sinks is not None and "sinks" in wanted:
        found["sinks"] = sink_gradient(config, x.sinks, lse, delta)
    return found


# One program each, also when called outside of jit.
_one_program = functools.partial(jax.jit, static_argnums=0, inline=True)


@_one_program
def sink_gradient(
    config: AttentionConfig, sinks: jax.Array, lse: LogSumExp, delta: jax.Array
) -> jax.Array:
    """A sink is a key without a value: d(sink) = -p delta, with p = exp(sink - lse)."""
    share = sink_share(config, sinks, lse)
    taken = jnp.where(jnp.isneginf(lse.rest), 0, share * delta)
    return -over_rows(config, taken, sinks)


# ---- what the rules share ------------------------------------------------------------


class _Bound(NamedTuple):
    """A primitive's call as its rules see it; arrays by the names of operands."""

    call: Call
    given: dict[str, Any]
    moves: dict[str, Any]  # the tangents that are not zero; base's are in lse's

    @property
    def config(self) -> AttentionConfig:
        return self.call.config

    @property
    def x(self) -> Operands:
        return self.call.unpack([self.given[n] for n in self.call.present])

    @property
    def lse(self) -> LogSumExp:
        return LogSumExp(self.given["lse"], self.given.get("base"))

    def along(self, primes: str = "'") -> dict[str, Any]:
        """The directions among the operands, without their primes."""
        return _directions(self.given, primes)


def _bound(
    op: Op, call: Call, operands: Sequence[Any], tangents: Sequence[Any] = ()
) -> _Bound:
    names = op.operand_names(call)
    moves = {
        name: tangent
        for name, tangent in zip(names, tangents, strict=False)
        if not _is_zero(tangent) and jnp.issubdtype(tangent.dtype, jnp.floating)
    }
    if "base" in moves:  # a probability depends on the sum of both parts
        base = moves.pop("base")
        moves["lse"] = ad.add_tangents(moves["lse"], base) if "lse" in moves else base
    return _Bound(call, dict(zip(names, operands, strict=True)), moves)


def _directions(arrays: dict[str, Any], primes: str = "'") -> dict[str, Any]:
    end = len(primes)
    return {n[:-end]: a for n, a in arrays.items() if n.count("'") == end}


def _of(names: Sequence[str], arrays: dict[str, Any]) -> dict[str, Any]:
    return {n: arrays[n] for n in names if n in arrays}


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _zero(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _sum(a: Any, b: Any) -> Any:
    """Of two sets of tangents, either of them None for zeros."""
    if a is None or b is None:
        return a if b is None else b
    return [ad.add_tangents(x, y) for x, y in zip(a, b, strict=True)]


def _dense(a: Any, like: Any) -> jax.Array:
    """`a`, or zeros of this shape and dtype."""
    return jnp.zeros(like.shape, like.dtype) if a is None else a


def _transposed(
    op: Op, rule: Callable[..., dict[str, Any]], linear: Sequence[str] = ()
) -> Callable[..., Any]:
    """The transpose by a rule that gives the cotangents of operands by their names.

    The operation is linear in its directions, and in `linear`.
    """

    def transpose(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
        at = _bound(op, call, operands)
        asked = [n for n, a in at.given.items() if ad.is_undefined_primal(a)]
        if not all(n.endswith("'") or n in linear for n in asked):
            _not_linear()
        results = zip(op.result_names(call), cotangents, strict=True)
        moving = {name: ct for name, ct in results if not _is_zero(ct)}
        found = rule(at, moving, asked) if moving else {}
        return [
            _cotangent(found.get(n), a.aval) if n in asked else None
            for n, a in at.given.items()
        ]

    return transpose


def _cotangent(found: Any, aval: Any) -> Any:
    """On an explicit mesh it is sharded as its array is."""
    if found is None:
        return ad.Zero(aval)
    sharding = aval.sharding
    if sharding.mesh.empty or jax.typeof(found).sharding == sharding:
        return found
    return jax.sharding.reshard(found, sharding)


# ---- forward, output -----------------------------------------------------------------


def _forward_jvp(
    op: Op, primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    at = _bound(op, call, primals, tangents)
    if at.x.q_scales is not None:
        raise NotImplementedError(
            f"{call.config.where}: there are no derivatives of attention in 8 bits; "
            "jax_kvblock.fp8.fp8_attention has those of the arrays that it quantizes"
        )
    names = dict(zip(("q", "k", "v"), RESIDUAL_NAMES, strict=False))
    x = at.x._replace(
        **{n: checkpoint_name(at.given[n], name) for n, name in names.items()}
    )
    o, lse = primitive.forward(at.config, x)
    o = checkpoint_name(o, RESIDUAL_NAMES[3])
    parts = zip(lse.parts, RESIDUAL_NAMES[4:], strict=False)
    lse = LogSumExp(*(checkpoint_name(part, name) for part, name in parts))
    if not at.moves:
        results = [o] if op is OUTPUT else [o, *lse.parts]
        return results, [_zero(r) for r in results]
    o_moves, lse_moves = primitive.tangent(at.config, x, o, lse, at.moves)
    if op is OUTPUT:
        return [o], [o_moves]
    # How the log-sum-exp moves belongs to `rest`; `base` is any number near it.
    return [o, *lse.parts], [o_moves, lse_moves, *map(_zero, lse.parts[1:])]


def _not_linear(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "flash_attention: it is not linear in its arrays, so jax.linear_transpose does "
        "not apply; jax.vjp gives the transpose of its derivative"
    )


# ---- tangent -------------------------------------------------------------------------


def _tangent_transpose(
    at: _Bound, cotangents: dict[str, Any], asked: Sequence[str]
) -> dict[str, Any]:
    o = at.given["o"]
    d_o, d_lse = _dense(cotangents.get("o"), o), cotangents.get("lse")
    wanted = [n.rstrip("'") for n in asked]
    found = gradients(at.config, at.x, o, at.lse, d_o, d_lse, wanted)
    return {f"{n}'": gradient for n, gradient in found.items()}


def _tangent_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    at = _bound(TANGENT, call, primals, tangents)
    o, lse, along = at.given["o"], at.lse, at.along()
    o_moves, lse_moves = primitive.tangent(at.config, at.x, o, lse, along)
    further = None
    if moves := _directions(at.moves):
        further = list(primitive.tangent(at.config, at.x, o, lse, moves))
    if any("'" not in n for n in at.moves):
        bent = _bend(at, along, lse_moves)
        further = _sum(further, bent)
    return [o_moves, lse_moves], further or [_zero(o_moves), _zero(lse_moves)]


def _bend(at: _Bound, along: dict[str, Any], lse_moves: jax.Array) -> list[jax.Array]:
    """How o' = (a sum over keys) - lse' o and lse' move with x, o and lse."""
    o, lse, config = at.given["o"], at.lse, at.config
    acc = lse.rest.dtype
    o_bends, lse_bends = None, jnp.zeros_like(lse.rest)
    first, second = _of(VALUES, along), _of((*VALUES, "lse"), at.moves)
    if first and second:
        o_bends, lse_bends = primitive.second_tangent(config, at.x, lse, first, second)
    if "sinks" in along and {"sinks", "lse"} & set(at.moves):
        sinks = at.given["sinks"]
        sinks_move = _dense(at.moves.get("sinks"), sinks)
        more = _dense(at.moves.get("lse"), lse.rest)
        lse_bends += _share_bends(config, sinks, lse, sinks_move, more, along["sinks"])
    beside = beside_o(lse_bends) * o.astype(acc)
    if "o" in at.moves:
        beside += beside_o(lse_moves) * at.moves["o"].astype(acc)
    o_bends = -beside if o_bends is None else o_bends.astype(acc) - beside
    return [o_bends.astype(o.dtype), lse_bends]


@_one_program
def _share_bends(
    config: AttentionConfig,
    sinks: jax.Array,
    lse: LogSumExp,
    sinks_move: jax.Array,
    lse_moves: jax.Array,
    along: jax.Array,
) -> jax.Array:
    """How a sink's part of lse' moves: p' sink', with p = exp(sink - lse)."""
    share = sink_share(config, sinks, lse)
    moves = per_row(config, sinks_move, share) - lse_moves
    return share * moves * per_row(config, along, share)


# ---- backward, backward_bias ---------------------------------------------------------


def _backward_jvp(
    op: Op, primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    at = _bound(op, call, primals, tangents)
    results = primitive.bind(op, primals, call)
    return results, _backward_moves(op, at, results)


def _backward_moves(op: Op, at: _Bound, results: Sequence[Any]) -> list[Any]:
    delta, d_o = at.given["delta"], at.given["o"]
    if set(at.moves) <= {"delta", "o"}:  # linear: by the same kernels
        arrays = at.given | {
            "delta": _dense(at.moves.get("delta"), delta),
            "o": _dense(at.moves.get("o"), d_o),
        }
        return primitive.bind(op, list(arrays.values()), at.call)
    moves = _of((*VALUES, "lse", "delta", "o"), at.moves)
    if not moves:  # sinks alone, which lse holds
        return [_zero(r) for r in results]
    made = primitive.hessian(
        at.config, at.x, at.lse, delta, d_o, moves, op.result_names(at.call)
    )
    return list(made.values())


def _added_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    """As backward moves, and dq as what it is added to."""
    results = primitive.bind(BACKWARD_ADDED, primals, call)
    at = _bound(BACKWARD, call, primals[:-1], tangents[:-1])
    dq, *others = _backward_moves(BACKWARD, at, results)
    return results, [ad.add_tangents(dq, tangents[-1]), *others]


def _backward_transpose(
    at: _Bound, cotangents: dict[str, Any], asked: Sequence[str]
) -> dict[str, Any]:
    """From the cotangents of q, k, v or bias: those of delta and d_o."""
    d_o = at.given["o"]
    like = d_o.aval if ad.is_undefined_primal(d_o) else d_o
    o = _dense(None, like)  # the sums alone, without - lse' o
    o_moves, lse_moves = primitive.tangent(at.config, at.x, o, at.lse, cotangents)
    return {"o": o_moves, "delta": -lse_moves}


def _added_transpose(
    at: _Bound, cotangents: dict[str, Any], asked: Sequence[str]
) -> dict[str, Any]:
    """What dq is added to has dq's cotangent."""
    found = _backward_transpose(at, cotangents, asked)
    return found | ({"dq": cotangents["q"]} if "q" in cotangents else {})


# ---- joined --------------------------------------------------------------------------


def _joined_jvp(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "flash_attention: a joined call has no derivative of its own; who joins parts "
        "has the rule for all of them together (context_parallel_attention), or merges "
        "them by merge_attention"
    )


# ---- second derivatives --------------------------------------------------------------


def _second_jvp(
    op: Op, primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    """Linear in its directions; anything else would be a third derivative."""
    at = _bound(op, call, primals, tangents)
    results = primitive.bind(op, primals, call)
    if not all(name.endswith("'") for name in at.moves):
        raise NotImplementedError(
            "flash_attention: it has first and second derivatives, and this is a third "
            "(the derivative of a Hessian, say); for that, write the attention in "
            "jax.numpy or use jax.nn.dot_product_attention(implementation='xla')"
        )
    further = None
    for primes in ("'", "''"):
        # Linear in the first directions together, and in the second ones.
        moves = {n: a for n, a in at.moves.items() if n.count("'") == len(primes)}
        if moves:
            still = {n: a for n, a in at.given.items() if n.count("'") != len(primes)}
            arrays = still | moves
            names = tuple(n for n in call.along if n in arrays)
            there = dataclasses.replace(call, along=names)
            operands = [arrays[n] for n in op.operand_names(there)]
            further = _sum(further, primitive.bind(op, operands, there))
    return results, further or [_zero(r) for r in results]


def _hessian_transpose(
    at: _Bound, cotangents: dict[str, Any], asked: Sequence[str]
) -> dict[str, Any]:
    """Second derivatives are symmetric: the same, from results to directions."""
    wanted = [n.rstrip("'") for n in asked]
    delta, d_o = at.given["delta"], at.given["o"]
    made = primitive.hessian(at.config, at.x, at.lse, delta, d_o, cotangents, wanted)
    return {f"{n}'": a for n, a in made.items()}


def _second_tangent_transpose(
    at: _Bound, cotangents: dict[str, Any], asked: Sequence[str]
) -> dict[str, Any]:
    """Third derivatives of which o and delta are one: cotangents take their place."""
    primes = "''" if asked[0].endswith("''") else "'"
    others = at.along("'" if primes == "''" else "''")
    q, v = at.x.q, at.x.v
    none = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    d_o = _dense(cotangents.get("o"), none)
    delta = -_dense(cotangents.get("lse"), at.lse.rest)
    wanted = [n.rstrip("'") for n in asked]
    made = primitive.hessian(at.config, at.x, at.lse, delta, d_o, others, wanted)
    return {n + primes: a for n, a in made.items()}


# ---- the table -----------------------------------------------------------------------

JVPS: dict[Op, Callable[..., Any]] = {
    FORWARD: functools.partial(_forward_jvp, FORWARD),
    OUTPUT: functools.partial(_forward_jvp, OUTPUT),
    JOINED: _joined_jvp,
    TANGENT: _tangent_jvp,
    BACKWARD_ADDED: _added_jvp,
    BACKWARD: functools.partial(_backward_jvp, BACKWARD),
    BACKWARD_BIAS: functools.partial(_backward_jvp, BACKWARD_BIAS),
    SECOND_TANGENT: functools.partial(_second_jvp, SECOND_TANGENT),
    HESSIAN: functools.partial(_second_jvp, HESSIAN),
}
TRANSPOSES: dict[Op, Callable[..., Any]] = {
    FORWARD: _not_linear,
    OUTPUT: _not_linear,
    JOINED: _not_linear,
    TANGENT: _transposed(TANGENT, _tangent_transpose),
    BACKWARD: _transposed(BACKWARD, _backward_transpose, ("delta", "o")),
    BACKWARD_ADDED: _transposed(BACKWARD_ADDED, _added_transpose, ("delta", "o", "dq")),
    BACKWARD_BIAS: _transposed(BACKWARD_BIAS, _backward_transpose, ("delta", "o")),
    SECOND_TANGENT: _transposed(SECOND_TANGENT, _second_tangent_transpose),
    HESSIAN: _transposed(HESSIAN, _hessian_transpose),
}
for _op in JVPS:
    primitive.set_derivatives(_op, JVPS[_op], TRANSPOSES[_op])
