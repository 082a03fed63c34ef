"""Attention over devices of other meshes: several axes, explicit and automatic ones.

Every result is held to the truth of the whole sequence, as in test_context_parallel.py.
"""

from __future__ import annotations

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import Call, jit
from context_calls import (
    CUTS,
    STRATEGIES,
    Cut,
    assert_right,
    attend_as_cut,
    attend_over,
    by_strategy,
    compute,
    documents,
    everything,
    inputs,
    laid_out,
    mesh_of,
    put_back,
    segments,
    simple,
    specs_of,
    with_gradients,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check

from jax_kvblock import flash_attention
from jax_kvblock.parallel import context_parallel_attention, from_zigzag, to_zigzag

pytestmark = pytest.mark.usefixtures("four_cpus")


def two_by_two(*names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2), names, (kind,) * 2, devices=devices)


def compute_over(call: Call, cut: Cut, mesh: Mesh, axis_name: Any, specs: Any) -> Any:
    there = laid_out(call, cut)
    arrays, operands, rows = specs
    over = jax.shard_map(
        functools.partial(attend_as_cut, there, cut, axis_name),
        mesh=mesh, in_specs=(arrays, operands), out_specs=(rows, rows),
    )  # fmt: skip
    return put_back(jit(with_gradients(over))(*inputs(there)), call, cut)


TOGETHER = [
    *((s, ("a", "b")) for s in STRATEGIES),
    *((s, ["b", "a"]) for s in STRATEGIES),
]


@pytest.mark.parametrize(("strategy", "names"), TOGETHER, ids=str)
def test_two_mesh_axes_together(rng, strategy, names):
    """Devices count in the order of the names, the last one fastest."""
    call, cut = simple(rng), Cut(strategy)
    specs = specs_of(call, tuple(names))
    got = compute_over(call, cut, two_by_two("a", "b"), names, specs)
    assert_right(call, got)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_two_axes_in_another_order_than_the_meshs(rng, cut):
    """Ids and lengths, too, of which every device gets those of others."""
    call = everything(rng, window=None)
    specs = specs_of(call, ("b", "a"))
    got = compute_over(call, cut, two_by_two("a", "b"), ["b", "a"], specs)
    assert_right(call, got)


BESIDE = [*((s, ("data", "c")) for s in STRATEGIES), ("ring", ("c", "data"))]


@pytest.mark.parametrize(("strategy", "names"), BESIDE, ids=str)
def test_a_batch_over_a_second_axis(rng, strategy, names):
    """Two sequences of the batch on either side, over two devices each."""
    lens = {"q_lens": np.int32([32, 9, 0, 27]), "kv_lens": np.int32([14, 32, 30, 5])}
    ids = segments(rng, 4, 32)
    call = everything(rng, batch=4, segment_ids=ids, window=None, **lens)
    arrays, operands, _ = specs_of(call)
    rows = P("data", "c")
    arrays |= {n: rows for n in "qkv"}
    operands |= {n: P("data") for n in lens} | {"segment_ids": rows}
    mesh, specs = two_by_two(*names), (arrays, operands, rows)
    got = compute_over(call, Cut(strategy, size=2), mesh, "c", specs)
    assert_right(call, got)


def test_the_example_of_the_docstring(rng, monkeypatch):
    """As it stands there, on a mesh as `jax.make_mesh` makes it."""
    four = jax.devices("cpu")[:4]
    make = functools.partial(jax.make_mesh, devices=four)
    monkeypatch.setattr(jax, "make_mesh", make)
    q, k, v = (jax.device_put(rng.standard_normal((1, 16, 2, 8), np.float32), four[0])
               for _ in "qkv")  # fmt: skip
    names = {
        "jax": jax,
        "PartitionSpec": P,
        "NamedSharding": NamedSharding,
        "context_parallel_attention": context_parallel_attention,
        "to_zigzag": to_zigzag,
        "from_zigzag": from_zigzag,
        **{"q": q, "k": k, "v": v},
    }
    lines = doctest.DocTestParser().get_examples(context_parallel_attention.__doc__)
    for line in lines:
        exec(line.source, names)
    want = flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(names["out"], want, rtol=0, atol=2e-6)


EXPLICIT = [
    *((documents, Cut(strategy)) for strategy in STRATEGIES),
    *((everything, Cut(strategy)) for strategy in STRATEGIES),
    *((everything, cut) for cut in CUTS if cut.tuned),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "cut"), EXPLICIT, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_explicit_axes(rng, kind, cut):
    """Arrays say in their types how they are cut; gradients are cut alike."""
    call = kind(rng)
    mesh, there = mesh_of(kind=AxisType.Explicit), laid_out(call, cut)
    arrays, operands, rows = specs_of(there)
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    args = jax.tree.map(put, (arrays, operands, (rows, rows)), inputs(there))
    with jax.set_mesh(mesh):
        got = jit(with_gradients(attend_over(there, cut, mesh)))(*args)
    for name, spec in arrays.items():
        made = got[f"d_{name}"]
        assert made.sharding.is_equivalent_to(NamedSharding(mesh, spec), made.ndim)
    assert_right(call, put_back(got, call, cut))


@pytest.mark.parametrize("name", ["q", "kv_lens", "segment_ids"])
def test_an_explicit_axis_beside_the_shard_map_is_refused(name):
    """All of it would be of types that no part here computes with."""
    mesh, rows = two_by_two("d", "c", kind=AxisType.Explicit), P(None, "c")
    specs = {"q": rows, "k": rows, "v": rows, "segment_ids": rows, "kv_lens": P()}

    def attend(given: Any) -> Any:
        return context_parallel_attention(**given, axis_name="c")

    over = jax.shard_map(
        attend, mesh=mesh, in_specs=(specs,), out_specs=rows, axis_names={"c"}
    )
    shapes = {n: (2, 16, 2, 8) for n in "qkv"} | {"segment_ids": (2, 16)}
    given = {n: np.ones(s, np.float32 if n in "qkv" else np.int32)
             for n, s in shapes.items()} | {"kv_lens": np.int32([9, 16])}  # fmt: skip
    cut = {n: P("d" if n == name else None, *specs[n][1:]) for n in given}
    with jax.set_mesh(mesh):
        put = {n: jax.device_put(x, NamedSharding(mesh, cut[n]))
               for n, x in given.items()}  # fmt: skip
        words = f"{name} must not be cut over explicit axes|got 'd'|axis_names"
        check("context_parallel_attention", ValueError, words,
              lambda: jax.eval_shape(over, put))  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_beside_an_automatic_axis(rng, strategy):
    """Only one of two mesh axes is the shard_map's."""
    call = simple(rng, sinks=None)
    mesh, rows = two_by_two("d", "c"), P(None, "c")

    def local(x: Any) -> Any:
        how = {"axis_name": "c", "strategy": strategy, "layout": "contiguous"}
        return context_parallel_attention(**x, causal=True, **how)

    over = jax.shard_map(
        local, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"c"}
    )
    place = NamedSharding(mesh, P("d", "c"))
    arrays = {n: jax.device_put(a, place) for n, a in call.arrays.items()}

    def run(f: Any, x: Any) -> Any:
        out, pull = jax.vjp(f, x)
        return out, pull(out)[0]

    got = jax.jit(lambda x: run(over, x))(arrays)
    want = run(lambda x: flash_attention(**x, causal=True), call.arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@by_strategy
def test_without_check_vma(rng, strategy):
    """Nothing but types rests on which values vary over devices."""
    call = everything(rng, window=None)
    assert_right(call, compute(call, Cut(strategy), check_vma=False))


# A `shard_map` that checks what varies ends in JAX's own errors for some of these.
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "ulysses_ring"])
def test_members_over_a_second_axis(rng, strategy):
    """Without that check vmap's `spmd_axis_name` serves every strategy."""
    mesh = two_by_two("b", "c")
    make = documents if strategy == "ulysses" else simple
    calls, cut = [make(rng) for _ in range(2)], Cut(strategy, size=2)
    there = [laid_out(call, cut) for call in calls]
    operands = there[0].operands
    over = attend_over(there[0], cut, mesh, check_vma=False)
    axes = ({n: 0 for n in there[0].arrays}, jax.tree.map(lambda _: None, operands))
    attend = jax.vmap(over, axes, spmd_axis_name="b")
    args = [jax.tree.map(lambda *x: jnp.stack(x), *(x.arrays for x in there)), operands]
    cotangents = jax.tree.map(lambda *x: jnp.stack(x), *(x.cotangents for x in there))
    got = jit(with_gradients(attend))(*args, cotangents)
    assert got["out"].sharding.spec[0] == "b"
    for i, call in enumerate(calls):
        member = {n: x[i] for n, x in got.items()}
        assert_right(call, put_back(member, call, cut))
