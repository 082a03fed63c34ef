"""Attention over devices under JAX's transforms, in other modes, of other values.

Every result is held to the truth of the whole sequence, as in test_context_parallel.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import Call, Results, cast, jit
from attention_model import compute as compute_whole
from context_calls import (
    CUTS,
    F32,
    STRATEGIES,
    Cut,
    assert_right,
    attend_as_cut,
    attend_over,
    by_strategy,
    compute,
    documents,
    everything,
    expected,
    inputs,
    laid_out,
    mesh_of,
    put_back,
    segments,
    simple,
    specs_of,
    with_gradients,
)
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from test_strategy import collectives

from jax_kvblock import flash_attention
from jax_kvblock.attention import RESIDUAL_NAMES
from jax_kvblock.parallel import context_parallel_attention, from_zigzag, to_zigzag

pytestmark = pytest.mark.usefixtures("four_cpus")


def names_of(call: Call) -> tuple[Any, Any, Any]:
    """Like arrays, operands and cotangents of a call, but each is its own name."""
    named = {n: n for n in (*call.arrays, *call.operands)}
    arrays = {n: named[n] for n in call.arrays}
    operands = {n: jax.tree.map(lambda _, n=n: n, x) for n, x in call.operands.items()}
    return arrays, operands, ("d_out", "d_lse")


# ---- vmap ----------------------------------------------------------------------------

LENGTHS = {  # of two members
    "q_lens": (np.int32([11, 32]), np.int32([0, 29])),
    "kv_lens": (np.int32([21, 7]), np.int32([32, 13])),
}
BOUNDARIES = np.int32([8, 16, 56]), np.int32([0, 40, 64])
ARRAYS = ("q", "k", "v")


def calls_of_arrays(rng: np.random.Generator) -> list[Call]:
    call, other = simple(rng), simple(rng)
    changed = {n: other.arrays[n] for n in ARRAYS}
    return [call, call.replace(**changed)]


def calls_of_lengths(rng: np.random.Generator) -> list[Call]:
    """The same arrays, some lengths for each."""
    call = simple(rng)
    return [call.replace(**{n: x[i] for n, x in LENGTHS.items()}) for i in (0, 1)]


def calls_of_documents(rng: np.random.Generator) -> list[Call]:
    """Others in each; where they lie in zigzag depends on their boundaries."""
    call = documents(rng, q_lens=np.int32([8, 30]))
    other = {n: documents(rng).arrays[n] for n in ARRAYS}
    first, second = BOUNDARIES
    return [call.replace(cu_seqlens=first), call.replace(cu_seqlens=second, **other)]


def calls_of_ids(rng: np.random.Generator) -> list[Call]:
    """The same arrays, in which ids say what belongs together."""
    call = everything(rng, window=None)
    shape = call.operands["segment_ids"].shape
    return [call.replace(segment_ids=segments(rng, *shape)) for _ in range(2)]


def calls_of_sinks(rng: np.random.Generator) -> list[Call]:
    """The same arrays, and other sinks."""
    call, other = simple(rng), simple(rng)
    return [call, call.replace(sinks=other.arrays["sinks"])]


def calls_of_boundaries(rng: np.random.Generator) -> list[Call]:
    """The same arrays, cut into documents in two ways."""
    call = documents(rng)
    moved = BOUNDARIES[0] + np.int32([0, 3, -1])
    return [call.replace(cu_seqlens=cu) for cu in (BOUNDARIES[1], moved)]


MEMBERS = {  # the members' calls, what differs between them, and how they lie
    "arrays": (calls_of_arrays, ARRAYS, "zigzag"),
    "lengths": (calls_of_lengths, ("q_lens", "kv_lens"), "zigzag"),
    "documents": (calls_of_documents, (*ARRAYS, "cu_seqlens"), "zigzag"),
    "boundaries": (calls_of_boundaries, ("cu_seqlens",), "contiguous"),
    "ids": (calls_of_ids, ("segment_ids",), "zigzag"),
    "sinks": (calls_of_sinks, ("sinks",), "contiguous"),
}


def outside(call: Call, cut: Cut, axes: Any, wrap: Any = with_gradients) -> Any:
    """Members of the function over devices."""
    return jax.vmap(wrap(attend_over(call, cut)), axes)


def inside(call: Call, cut: Cut, axes: Any, wrap: Any = with_gradients) -> Any:
    """Members on each device."""
    arrays, operands, rows = specs_of(call)
    specs = arrays, operands, (rows, rows)
    along = lambda axis, spec: P(*(None,) * (axis == 0), *spec)  # noqa: E731
    made = {"out": rows, "lse": rows} | {f"d_{n}": x for n, x in arrays.items()}
    return jax.shard_map(
        jax.vmap(wrap(functools.partial(attend_as_cut, call, cut, "c")), axes),
        mesh=mesh_of(),
        in_specs=jax.tree.map(along, axes, specs, is_leaf=lambda x: x is None),
        out_specs={n: P(None, *x) for n, x in made.items()},
    )


def stacked(trees: Any, axes: Any) -> Any:
    """Leaves with axis 0 of all members, or those of the first alone."""
    return jax.tree.map(
        lambda axis, *x: x[0] if axis is None else jnp.stack(x),
        axes,
        *trees,
        is_leaf=lambda x: x is None,
    )


def over_members(calls: list[Call], differ: Any, cut: Cut, way: Any) -> list[Results]:
    """The gradients of each member, with cotangents of its own: vmap of grad."""
    there = [laid_out(call, cut) for call in calls]
    named = names_of(calls[0])
    mapped = (*differ, "d_out", "d_lse")
    axes = jax.tree.map(lambda n: 0 if n in mapped else None, named)
    args = stacked([inputs(call) for call in there], axes)
    got = jit(way(there[0], cut, axes))(*args)
    members = [{n: x[i] for n, x in got.items()} for i in range(len(calls))]
    return [put_back(x, call, cut) for x, call in zip(members, calls, strict=True)]


WAYS = [
    *(("arrays", inside, strategy) for strategy in (*STRATEGIES, "auto")),
    *(("arrays", outside, strategy) for strategy in ("ring", "ulysses_ring", "auto")),
    *(("lengths", inside, strategy) for strategy in STRATEGIES),
    ("lengths", outside, "auto"),
    *(("documents", outside, strategy) for strategy in STRATEGIES),
    *(("boundaries", inside, strategy) for strategy in STRATEGIES),
    *(("ids", inside, strategy) for strategy in STRATEGIES),
    *(("sinks", outside, strategy) for strategy in STRATEGIES),
    *((name, inside, "all_gather, tuned") for name in ("arrays", "boundaries")),
    *((name, outside, "ring, tuned") for name in ("arrays", "documents")),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "way", "strategy"), WAYS)
def test_vmap_of_gradients(rng, name, way, strategy):
    make, differ, layout = MEMBERS[name]
    strategy, _, tuned = strategy.partition(", ")
    calls, cut = make(rng), Cut(strategy, layout, tuned=bool(tuned))
    found = over_members(calls, differ, cut, way)
    for call, got in zip(calls, found, strict=True):
        assert_right(call, got)


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses_ring"])
def test_gradients_of_vmap_sum_what_is_shared(rng, strategy):
    """One k and one row of sinks serve all members."""
    call, other = simple(rng), simple(rng)
    members = [call, other.replace(**{n: call.arrays[n] for n in ("k", "sinks")})]
    cut = Cut(strategy)
    there = [laid_out(member, cut) for member in members]
    axes = {n: 0 if n in "qv" else None for n in call.arrays}
    attend = jax.vmap(attend_over(there[0], cut), (axes, None))
    arrays = stacked([x.arrays for x in there], axes)
    cotangents = tuple(map(jnp.stack, zip(*(x.cotangents for x in there), strict=True)))
    got = jit(with_gradients(attend))(arrays, {}, cotangents)
    wants = [expected(member) for member in members]
    shared = {n: got.pop(n) for n in ("d_k", "d_sinks")}
    for name, x in put_back(shared, call, cut).items():
        assert_close(x, sum(want[name] for want in wants), F32)
    for i, want in enumerate(wants):
        one = put_back({n: x[i] for n, x in got.items()}, call, cut)
        for name, x in one.items():
            assert_close(x, want[name], F32)


def test_vmap_of_vmap(rng):
    """Two axes, the inner one on each device, the outer one of all of it."""
    calls = [simple(rng, q_len=16, kv_len=16, batch=1) for _ in range(4)]
    sinks = calls[0].arrays["sinks"]
    calls, cut = [call.replace(sinks=sinks) for call in calls], Cut("ulysses_ring")
    there = [laid_out(call, cut).arrays for call in calls]
    axes = {n: None if n == "sinks" else 0 for n in there[0]}
    _, _, rows = specs_of(calls[0])
    over = jax.shard_map(
        jax.vmap(lambda x: attend_as_cut(calls[0], cut, "c", x, {}), (axes,)),
        mesh=mesh_of(),
        in_specs=({n: P() if n == "sinks" else P(None, *rows) for n in axes},),
        out_specs=P(None, *rows),
    )
    pairs = [stacked(there[i : i + 2], axes) for i in (0, 2)]
    out, lse = jit(jax.vmap(over, (axes,)))(stacked(pairs, axes))
    for i, call in enumerate(calls):
        want = expected(call)
        got = {"out": out[i // 2, i % 2], "lse": lse[i // 2, i % 2]}
        for name, x in put_back(got, call, cut).items():
            assert_close(x, want[name], F32)


# ---- remat and scan ------------------------------------------------------------------

SAVED = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)


REMATTED = {"batches": simple, "documents": documents, "everything": everything}


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", REMATTED)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_checkpoint(rng, cut, kind):
    call = REMATTED[kind](rng)
    there = laid_out(call, cut)
    attend = jax.checkpoint(attend_over(there, cut))
    got = jit(with_gradients(attend))(*inputs(there))
    assert_right(call, put_back(got, call, cut))


def counted(jaxpr: Any, name: str) -> int:
    """Equations of a primitive, at any depth."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name
        for inner in jaxprs_in_params(equation.params):
            found += counted(inner, name)
    return found


def parts(jaxpr: Any) -> int:
    """Forward calls, of the first part and of those that are joined with it."""
    names = "kvblock_attention_forward", "kvblock_attention_joined"
    return sum(counted(jaxpr, name) for name in names)


@by_strategy
def test_checkpoint_runs_forward_again_only_where_nothing_is_saved(rng, strategy):
    """A policy that saves the residuals by their names saves calls and messages."""
    call = laid_out(simple(rng, sinks=None), cut := Cut(strategy))

    def traced(**how: Any) -> tuple[int, int]:
        attend = attend_over(call, cut)
        if how:
            attend = jax.checkpoint(attend, **how)
        made = jax.make_jaxpr(with_gradients(attend))(*inputs(call)).jaxpr
        return parts(made), collectives(made).total()

    forward = jax.make_jaxpr(attend_over(call, cut))(*inputs(call)[:2]).jaxpr
    calls, sent = traced()
    assert calls == parts(forward)
    assert traced(policy=SAVED) == (calls, sent)
    again = traced(policy=jax.checkpoint_policies.nothing_saveable)
    assert again[0] == 2 * calls and again[1] > sent


def through_layers(attend: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (x * each for each in w)
        return x + attend(q, k[..., :2, :], v[..., :2, :]), None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]


def pulled(f: Any, x: Any, weights: Any, cotangent: Any) -> Any:
    """The result, and the gradients of both."""
    out, pull = jax.vjp(f, x, weights)
    return out, *pull(cotangent)


@functools.cache
def layers_of_one_device() -> tuple[Any, Any]:
    """Arguments of `pulled`, and what three layers give without a mesh."""
    rng = np.random.default_rng(0)
    shapes = (1, 16, 4, 8), (3, 3, 8), (1, 16, 4, 8)
    args = tuple(cast(rng.standard_normal(shape), F32) for shape in shapes)

    def whole(x: Any, weights: Any) -> Any:
        causal = lambda *x: flash_attention(*x, causal=True)  # noqa: E731
        return through_layers(causal, x, weights)

    return args, jit(lambda *args: pulled(whole, *args))(*args)


@by_strategy
def test_scan_over_layers(strategy):
    """Three layers, each run again for its gradients, as on one device."""
    (x, weights, cotangent), want = layers_of_one_device()
    rows = P(None, "c")

    def attend(q: Any, k: Any, v: Any) -> Any:
        how = {"axis_name": "c", "strategy": strategy, "causal": True}
        return context_parallel_attention(q, k, v, **how)

    over = jax.shard_map(
        lambda x, weights: through_layers(attend, x, weights),
        mesh=mesh_of(), in_specs=(rows, P()), out_specs=rows,
    )  # fmt: skip
    there = to_zigzag(x, 4), weights, to_zigzag(cotangent, 4)
    out, d_x, d_weights = jit(lambda *args: pulled(over, *args))(*there)
    got = from_zigzag(out, 4), from_zigzag(d_x, 4), d_weights
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, F32)


# ---- modes ---------------------------------------------------------------------------


def wide(jaxpr: Any) -> set[str]:
    """Results of 64 bits, at any depth. Python's own numbers are none yet."""
    found = set()
    for equation in jaxpr.eqns:
        for x in equation.outvars:
            if getattr(x.aval, "weak_type", False):
                continue
            if getattr(x.aval, "dtype", np.dtype("V1")).itemsize > 4:
                found.add(f"{equation.primitive.name}: {x.aval}")
        for inner in jaxprs_in_params(equation.params):
            found |= wide(inner)
    return found


shown = lambda x: getattr(x, "__name__", str(x))  # noqa: E731
TRACED = [
    *((kind, cut) for kind in (simple, documents) for cut in CUTS),
    *((everything, Cut(strategy)) for strategy in STRATEGIES),
]


@pytest.mark.parametrize(("kind", "cut"), TRACED, ids=shown)
def test_strict_promotion_with_64_bits(rng, kind, cut):
    """No dtype is promoted, and nothing becomes wider than it is."""
    call = laid_out(kind(rng), cut)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        attend = with_gradients(attend_over(call, cut))
        made = jax.make_jaxpr(attend)(*inputs(call))
    assert wide(made.jaxpr) == set()


@by_strategy
def test_results_with_64_bits(rng, strategy):
    kind = documents if strategy in ("all_gather", "ulysses") else simple
    call = kind(rng)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got = compute(call, Cut(strategy))
    assert_right(call, got)


# ---- values --------------------------------------------------------------------------

MOST, LEAST = 2**31 - 1, -(2**31)
HUGE = [  # of queries and of keys
    ([0, MOST, MOST], [MOST, MOST, MOST]),
    ([LEAST, MOST, 7], [MOST, LEAST, MOST]),
    ([MOST, -1, MOST - 1], [-5, 9, MOST - 1]),
]


def check_values(calls: list[Call], cut: Cut, compiles: list[str]) -> None:
    """One program serves all calls, and each result is right."""
    there = [laid_out(each, cut) for each in calls]
    f = jit(with_gradients(attend_over(there[0], cut)))
    found = [f(*inputs(there[0]))]
    before = len(compiles)
    found += [f(*inputs(each)) for each in there[1:]]
    assert len(compiles) == before > 0
    for got, each in zip(found, calls, strict=True):
        assert_right(each, put_back(got, each, cut))
        if "cu_seqlens" not in each.operands:
            whole = compute_whole(each, None)
            for name, x in put_back(got, each, cut).items():
                assert_close(x, whole[name], F32)


FULL = {"causal": False}
LONG = [
    *((s, {}) for s in STRATEGIES),
    ("ring", FULL), ("all_gather", FULL), ("all_gather", {"window": (5, None)}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "mask"), LONG, ids=str)
def test_lengths_up_to_the_last_integer(rng, strategy, mask, compiles):
    """As on one device: more than there is stands for all, below zero for nothing."""
    call = simple(rng, batch=3, **mask)
    calls = [call.replace(q_lens=np.int32(a), kv_lens=np.int32(b)) for a, b in HUGE]
    check_values(calls, Cut(strategy), compiles)


OTHER_BOUNDARIES = [8, 16, 24, 56], [0, 0, 40, 64], [24, 40, 48, 48]


@pytest.mark.parametrize("cut", [*CUTS[::2], Cut("ring", "contiguous")], ids=str)
def test_documents_of_any_lengths(rng, cut, compiles):
    """Long and short ones, empty ones, and none at some places, in one program."""
    call = documents(rng, q_lens=None, kv_lens=None)
    calls = [
        call.replace(cu_seqlens=np.int32(cu), q_lens=np.int32(a), kv_lens=np.int32(b))
        for cu, (a, b) in zip(OTHER_BOUNDARIES, HUGE, strict=True)
    ]
    check_values(calls, cut, compiles)


# ---- second derivatives --------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_second_derivatives_in_reverse(rng, strategy):
    """Of what is plain JAX."""
    call = simple(rng, sinks=None)
    rows = P(None, "c")

    def local(q: Any, k: Any, v: Any) -> Any:
        how = {"axis_name": "c", "strategy": strategy, "layout": "contiguous"}
        return context_parallel_attention(q, k, v, causal=True, **how)

    over = jax.shard_map(local, mesh=mesh_of(), in_specs=rows, out_specs=rows)

    def slope(f: Any) -> Any:
        loss = lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v)))  # noqa: E731
        first = lambda q, k, v: jnp.sum(jax.grad(loss, 1)(q, k, v) ** 2)  # noqa: E731
        return jax.jit(jax.grad(first))

    args = [call.arrays[n] for n in "qkv"]
    got = slope(over)(*args)
    want = slope(lambda q, k, v: flash_attention(q, k, v, causal=True))(*args)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
