"""Graphs as pictures: each node, port and wire is there, also in Graphviz's eyes."""

from __future__ import annotations

import re
import shutil
import subprocess

import jax.numpy as jnp
import pytest

from jax_kvblock.graphs import BlockBuilder


def function(builder, name, **options):
    return builder.add_captured(
        jnp.sin, inputs={"x": "float32[n]"}, outputs=("y",), name=name, **options
    )


def inner():
    builder = BlockBuilder("Inner")
    node = builder.add_captured(
        lambda x, a: a * x,
        inputs=("x",),
        outputs=("y",),
        scalars={"a": 2.0},
        name="mul",
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("A", node.scalar("a"))
    builder.output("Y", node.out("y"))
    return builder.commit()


def outer():
    builder = BlockBuilder('A "quoted" name')
    first, second = function(builder, "first"), function(builder, "second")
    child = builder.add_child(inner(), name="child", after=second)
    builder.input("X", first.in_("x"))
    builder.input("X", second.in_("x"))
    builder.connect(first.out("y"), child.in_("X"))
    builder.output("Y", child.out("Y"))
    builder.output("Z", second.out("y"))
    return builder.commit()


def edges(text):
    """(from, to, style) by labels."""
    labels = dict(re.findall(r'(\w+) \[label="((?:[^"\\]|\\.)*)", shape', text))
    found = re.findall(r"(\w+) -> (\w+) \[style=(\w+)", text)
    return {(labels[a], labels[b], style) for a, b, style in found}


def test_nodes_and_wires():
    assert edges(outer().draw(depth=0)) == {
        ("X: float32[n]", "first", "solid"),
        ("X: float32[n]", "second", "solid"),
        ("first", "child", "solid"),
        ("second", "child", "dashed"),
        ("child", "Y", "solid"),
        ("second", "Z", "solid"),
    }


def test_graphs_in_graphs_are_opened():
    text = outer().draw()
    assert 'label="child";' in text
    assert {
        ("first", "mul", "solid"),
        ("A: float32 = 2.0", "mul", "solid"),
        ("second", "mul", "dashed"),
        ("mul", "Y", "solid"),
    } <= edges(text)
    assert 'label="a", fontsize=9' in text  # the port of mul
    assert "cluster_node_2_node" not in text


def test_as_deep_as_it_is_asked():
    builder = BlockBuilder("Deep")
    child = builder.add_child(outer(), name="middle")
    builder.expose_input("X", child, "X")
    builder.expose_output("Y", child, "Y")
    graph = builder.commit()
    opened = [graph.draw(depth=depth).count("subgraph") for depth in range(4)]
    assert opened == [0, 1, 2, 2]


def test_who_waits_in_an_opened_graph():
    """What takes the child's inputs, not what comes last in it."""
    builder = BlockBuilder("Two")
    one = function(builder, "one")
    two = function(builder, "two")
    builder.input("X", one.in_("x"))
    builder.connect(one.out("y"), two.in_("x"))
    builder.output("Y", two.out("y"))
    chain = builder.commit()
    outer = BlockBuilder("Outer")
    before = function(outer, "before")
    child = outer.add_child(chain, after=before)
    for node, port in ((before, "x"), (child, "X")):
        outer.input("X", node.in_(port))
    outer.output("Y", child.out("Y"))
    outer.output("Z", before.out("y"))
    graph = outer.commit()
    dashed = {edge for edge in edges(graph.draw()) if edge[2] == "dashed"}
    assert dashed == {("before", "one", "dashed")}


def test_text_to_a_file(tmp_path):
    path = tmp_path / "graph.dot"
    text = outer().draw(path)
    assert path.read_text() == text and text.startswith(
        'digraph "A \\"quoted\\" name" {'
    )


def test_a_picture(tmp_path):
    """With Graphviz or, where it is not here, by what is said."""
    path = tmp_path / "graph.svg"
    if shutil.which("dot") is None:
        with pytest.raises(RuntimeError, match=r"\.svg needs Graphviz's program dot"):
            outer().draw(path)
        return
    outer().draw(path)
    svg = path.read_text()
    for label in ("first", "second", "mul", "X: float32[n]"):
        assert label in svg


@pytest.fixture
def other_dot(tmp_path, monkeypatch):
    """A program in place of Graphviz's, that notes what it is given."""
    program = tmp_path / "dot"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/given\ncat > {tmp_path}/text\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_what_graphviz_is_asked_for(other_dot):
    text = outer().draw(other_dot / "g.svg")
    assert (other_dot / "given").read_text().split() == [
        *("-Tsvg", "-o", str(other_dot / "g.svg"))
    ]
    assert (other_dot / "text").read_text() == text


def test_a_program_that_fails_is_an_error(other_dot):
    (other_dot / "dot").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        outer().draw(other_dot / "g.svg")
