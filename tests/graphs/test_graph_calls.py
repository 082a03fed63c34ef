"""What a graph is called with is held to its types, and errors tell the node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from emulated_kernels import kernel
from small_graphs import add, function, one_kernel, says

from jax_kvblock.graphs import BlockBuilder


@pytest.fixture
def builder():
    return BlockBuilder("G")


def calls(**given):
    return jax.eval_shape(lambda: one_kernel()(**given))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "input 'X' is missing; it takes X"),
        ({"Z": 1}, "has no input or parameter 'Z'; it has 'X', 'A'"),
        (
            {"X": jnp.ones(5, jnp.int32)},
            r"input 'X' must be float32\[n\], got int32\[5\]",
        ),
        (
            {"X": jnp.ones((5, 2))},
            r"input 'X' must be float32\[n\], got float32\[5, 2\]",
        ),
        (
            {"X": jnp.ones(5), "A": jnp.ones(2)},
            r"parameter 'A' must be a number or float32\[\], got float32\[2\]",
        ),
        (
            {"X": jnp.ones(5), "A": jnp.int32(2)},
            r"parameter 'A' must be a number or float32\[\], got int32\[\]",
        ),
    ],
)
def test_bad_calls(given, text):
    with pytest.raises((ValueError, TypeError), match=f"^graph 'G': {text}"):
        calls(**given)


def test_too_many_inputs():
    with pytest.raises(TypeError, match=r"takes 1 input .X., got 2; parameters go by"):
        one_kernel()(jnp.ones(5), jnp.ones(5))
    with pytest.raises(TypeError, match="input 'X' came twice"):
        one_kernel()(jnp.ones(5), X=jnp.ones(5))


def test_words_are_one_size(builder):
    f = function(builder, inputs=("x", "z"))
    builder.input("X", f.in_("x"), "float32[n]")
    builder.input("Z", f.in_("z"), "float32[2, n]")
    builder.output("Y", f.out("y"))
    with pytest.raises(
        ValueError,
        match=r"input 'Z' must be float32\[2, n\] where n = 5 \(input 'X'\), got "
        r"float32\[2, 6\]",
    ):
        builder.commit()(jnp.ones(5), jnp.ones((2, 6)))


def test_what_a_function_returns_is_checked(builder):
    f = function(builder, outputs={"y": "float32[2]"})
    builder.input("X", f.in_("x"))
    builder.output("Y", f.out("y"))
    graph = builder.commit()
    assert graph(jnp.ones(2))["Y"].shape == (2,)
    with pytest.raises(
        ValueError, match=r"output 'y' of 'f' must be float32\[2\], got"
    ):
        graph(jnp.ones(3))
    with pytest.raises(TypeError, match=r"output 'y' of 'f' must be float32\[2\], got"):
        graph(jnp.ones(2, jnp.int32))


def test_a_function_returns_each_output(builder):
    f = function(builder, outputs=("y", "z"))
    builder.input("X", f.in_("x"))
    builder.output("Y", f.out("y"))
    with pytest.raises(
        ValueError, match="'f': the captured function must return 'y', 'z'"
    ):
        builder.commit()(jnp.ones(3))


def test_a_parameter_without_a_default(builder):
    node = add(builder, scalars={"n": "n"})
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("k", node.in_("a"))
    builder.output("Y", node.out("y"), "float32[n]")
    with says("add_captured: scalar 'k' has a number as its default, got None"):
        function(builder, scalars={"k": None})
    with pytest.raises(
        TypeError, match="parameter 'a' has no default, so it needs a val"
    ):
        builder.commit()(jnp.ones(3))


def test_errors_tell_the_node():
    """By notes, which tracebacks show, from the inner graph to the outer one."""
    inner = BlockBuilder("Inner")
    broken = inner.add_captured(
        lambda x: x @ jnp.ones((7, 7)), inputs=("x",), outputs=("y",), name="product"
    )
    inner.input("X", broken.in_(0))
    inner.output("Y", broken.out(0))
    outer = BlockBuilder("Outer")
    child = outer.add_child(inner.commit(), name="part")
    outer.expose_input("X", child, "X")
    outer.expose_output("Y", child, "Y")
    with pytest.raises(TypeError) as raised:
        outer.commit()(jnp.ones(3))
    notes = [note for note in raised.value.__notes__ if note.startswith("in node")]
    assert notes == [
        "in node 'product' of graph 'Inner'",
        "in node 'part' of graph 'Outer'",
    ]


def test_a_kernel_without_a_fallback_says_so(builder):
    node = builder.add_kernel(kernel("scale"), block=64, scalars={"n": "n", "a": 2.0})
    builder.input("X", node.in_("x"), "float32[n]")
    builder.output("Y", node.out("y"), "float32[n]")
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match="pass fallback=, a function of"),
    ):
        builder.commit()(jnp.ones(5))
