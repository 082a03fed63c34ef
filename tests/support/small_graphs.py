"""Small graphs that tests share; their kernels are those of `emulated_kernels`."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from emulated_kernels import kernel

from jax_kvblock.graphs import BlockBuilder


def add_scale(builder, **options):
    """y = a x. (const float* x, float* y, float a, int n)"""
    return builder.add_kernel(
        kernel("scale"),
        block=64,
        scalars={"n": "n"},
        fallback=lambda x, a, n: a * x,
        **options,
    )


def add_shift(builder, **options):
    """x += a, in place. (float* x, double a, long long n)"""
    return builder.add_kernel(
        kernel("shift"),
        block=64,
        scalars={"n": "n"},
        fallback=lambda x, a, n: x + jnp.float32(a),
        **options,
    )


def line():
    """2 x + 1: one kernel behind another, the second in place."""
    builder = BlockBuilder("Line")
    scale, shift = add_scale(builder), add_shift(builder)
    builder.input("X", scale.in_("x"), "float32[n]")
    builder.connect(scale.out("y"), shift.in_("x"), "float32[n]")
    builder.input_scalar("Slope", scale.in_("a"), 2.0)
    builder.input_scalar("Offset", shift.in_("a"), 1.0)
    builder.output("Y", shift.out("x"))
    return builder.commit()


def fan():
    """(2 x) + (2 x · 3) · mean: out to two nodes, and in to one."""
    builder = BlockBuilder("Fan")
    split = add_scale(builder, name="split")
    builder.input("X", split.in_("x"), "float32[n]")
    builder.input_scalar("Slope", split.in_("a"), 2.0)
    mean = builder.add_captured(
        jnp.mean, inputs={"x": "float32[n]"}, outputs={"m": "float32[]"}
    )
    times = add_scale(builder, name="times")
    merge = builder.add_captured(
        lambda a, b, weight: a + weight * b,
        inputs=("a", "b"),
        outputs=("sum",),
        scalars={"weight": 3.0},
        name="merge",
    )
    builder.connect(split.out("y"), mean.in_("x"), "float32[n]")
    builder.connect(split.out("y"), times.in_("x"))
    builder.connect(mean.out("m"), times.scalar("a"))
    builder.connect(split.out("y"), merge.in_("a"))
    builder.connect(times.out("y"), merge.in_("b"), "float32[n]")
    builder.input_scalar("Weight", merge.scalar("weight"), 3.0)
    builder.output("Sum", merge.out("sum"))
    builder.output("Mean", mean.out("m"))
    return builder.commit()


def keep(capacity=40):
    builder = BlockBuilder("Keep")
    node = builder.add_kernel(
        kernel("keep_positive"),
        block=64,
        grid=lambda x: -(-x.size // 64),
        scalars={"n": "n", "capacity": capacity},
        fallback=lambda x, n, capacity: (
            x[jnp.nonzero(x > 0, size=capacity, fill_value=0)[0]],
            jnp.sum(x > 0),
        ),
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.append_output(
        "Kept", node.out("kept"), node.out("count"), capacity, "float32[]"
    )
    return builder.commit()


def twice():
    """Lines in a line, in a line: nested, with names of their own outside."""
    builder = BlockBuilder("Twice")
    first, second = builder.add_child(line()), builder.add_child(line())
    assert (first.name, second.name) == ("Line", "Line 2")
    builder.connect_children(first, "Y", second, "X")
    builder.expose_input("In", first, "X")
    builder.expose_output("Out", second, "Y")
    builder.expose_parameter("Slope", first, "Slope")
    builder.expose_parameter("Slope", second, "Slope")
    builder.expose_parameter("Last", second, "Offset", 7.0)
    return builder.commit()


def with_rules():
    builder = BlockBuilder("Rules")
    node = add_scale(
        builder,
        batch="sequential",
        vjp=lambda arrays, y, g: 2 * g,
        grid=lambda x: -(-x.size // 64),
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("A", node.in_("a"), 2.0)
    builder.output("Y", node.out("y"), "float32[n]")
    return builder.commit()


# ---- nodes of a builder, and what it says of them ----------------------------------


def add(builder, name=None, **options):
    options = {"scalars": {"n": "n", "a": 2.0}, "block": 64} | options
    return builder.add_kernel(
        kernel("scale"), name=name, fallback=lambda x, a, n: a * x, **options
    )


def function(builder, inputs=("x",), outputs=("y",), **options):
    return builder.add_captured(
        lambda *x: x[0], inputs=inputs, outputs=outputs, **({"name": "f"} | options)
    )


def says(text):
    return pytest.raises((ValueError, TypeError), match=f"^BlockBuilder 'G': {text}")


def one_kernel():
    builder = BlockBuilder("G")
    node = builder.add_kernel(
        kernel("scale"), block=64, scalars={"n": "n"}, fallback=lambda x, a, n: a * x
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("A", node.in_("a"), 2.0)
    builder.output("Y", node.out("y"), "float32[n]")
    return builder.commit()
