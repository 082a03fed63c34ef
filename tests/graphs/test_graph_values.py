"""Graphs as values: equal where they are built alike, and different where not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from emulated_kernels import kernel
from small_graphs import add_scale, fan, keep, line, twice, with_rules

from jax_kvblock import graphs
from jax_kvblock.graphs import BlockBuilder


@pytest.mark.parametrize("make", [line, fan, keep, twice, with_rules])
def test_a_graph_built_again_is_the_same(make):
    assert make() == make() and hash(make()) == hash(make())


def another(
    name="G",
    block=64,
    grid=None,
    default=2.0,
    type="float32[n]",
    factor=2,
    port="X",
    n="n",
    swap=False,
    after=False,
    show=0,
):
    """Two kernels side by side, described in one of many ways."""
    builder = BlockBuilder(name)
    one = add_scale(builder, name="one", grid=grid)
    two = builder.add_kernel(
        kernel("scale"),
        name="two",
        block=block,
        scalars={"n": n},
        after=one if after else (),
        fallback=lambda x, a, n: factor * a * x,
    )
    builder.input(port, (two if swap else one).in_("x"), type)
    builder.input("Z", (one if swap else two).in_("x"), "float32[n]")
    builder.input_scalar("A", one.in_("a"), default)
    builder.input_scalar("B", two.in_("a"), 2.0)
    outputs = [("Y", one), ("W", two)]
    builder.output("Y", outputs[show][1].out("y"), "float32[n]")
    builder.output("W", outputs[1 - show][1].out("y"), "float32[n]")
    return builder.commit()


CHANGES = {
    "name": "H",
    "block": 32,
    "grid": 7,
    "default": 3.0,
    "type": "float32[...]",
    "factor": 3,
    "port": "V",
    "n": 100,
    "swap": True,
    "after": True,
    "show": 1,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_built_otherwise_is_another(change):
    assert another() == another()
    assert another(**{change: CHANGES[change]}) != another()


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (1.0, 1.5), (float("nan"), 0.0), (2.0, None)]
)
def test_defaults_tell_graphs_apart(one, other):
    assert another(default=one) == another(default=one)
    assert another(default=one) != another(default=other)


def test_what_a_child_is_tells_graphs_apart():
    def around(graph):
        builder = BlockBuilder("Around")
        child = builder.add_child(graph, name="child")
        builder.expose_input("X", child, "X")
        builder.expose_output("Y", child, "Y")
        return builder.commit()

    assert around(line()) == around(line()) != around(with_rules())


def test_jit_traces_equal_graphs_once(on_cpu):
    """As a static argument, which is how an engine has them."""
    traced, x = 0, jnp.arange(300.0)

    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, x):
        nonlocal traced
        traced += 1
        return graph(x)

    for _ in range(3):
        run(line(), x)
    assert traced == 1
    run(fan(), x)
    assert traced == 2


def test_shown():
    assert repr(line()) == (
        "Graph 'Line'(X: float32[n], Slope: float32 = 2.0, Offset: float32 = 1.0) "
        "-> Y: float32[n]"
    )
    assert isinstance(line(), graphs.Graph)
