"""What does not fit in a graph is said at once, with the names of both ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import kernel
from small_graphs import add, function, says

from jax_kvblock.graphs import BlockBuilder


# scale: (const float* x, float* y, float a, int n)
@pytest.fixture
def builder():
    return BlockBuilder("G")


# ---- wires ---------------------------------------------------------------------------


def test_a_cycle_names_its_nodes(builder):
    a, b, c = (add(builder, name) for name in "abc")
    builder.connect(a.out("y"), b.in_("x"), "float32[n]")
    builder.connect(b.out("y"), c.in_("x"), "float32[n]")
    with says(
        r"connect: parameter 1, 'y' \(u64\) of 'c' to parameter 0, 'x' \(u64\) of 'a' "
        "would close a cycle: 'a' → 'b' → 'c' → 'a'"
    ):
        builder.connect(c.out("y"), a.in_("x"), "float32[n]")
    with says("connect: .* would close a cycle; what a kernel updates in place"):
        builder.connect(a.out("y"), a.in_("x"))


def test_a_cycle_by_order_alone(builder):
    first = add(builder, "first")
    second = add(builder, "second", after=first)
    with says("connect: .* would close a cycle: 'first' → 'second' → 'first'"):
        builder.connect(second.out("y"), first.in_("x"), "float32[n]")


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        ("float32[n]", "int32[n]", True),
        ("float32[n]", "float32[n, 2]", True),
        ("float32[3]", "float32[4]", True),
        ("float32[n]", "float32[m]", False),
        ("float32[n]", "float32[4]", False),
        ("float32[n]", "float32[...]", False),
        ("float32[n, ?]", "float32[3, 4]", False),
    ],
)
def test_types_of_both_ends(builder, ours, theirs, differ):
    a = function(builder, outputs={"y": ours}, name="a")
    b = function(builder, inputs={"x": theirs}, name="b")
    if not differ:
        builder.connect(a.out("y"), b.in_("x"))
        return
    with says("connect: output 'y' of 'a' is .*, and input 'x' of 'b' takes"):
        builder.connect(a.out("y"), b.in_("x"))


def test_a_scalar_takes_what_has_no_dimensions(builder):
    node = add(builder, scalars={"n": "n"})
    many = function(builder, outputs={"y": "float32[n]"})
    with says(r"connect: output 'y' of 'f' is float32\[n\], and parameter 2, 'a' "):
        builder.connect(many.out("y"), node.scalar("a"))


def test_directions(builder):
    a, b = add(builder, "a"), add(builder, "b")
    with says("connect: .* of 'a' was taken as an input, and this takes an output"):
        builder.connect(a.in_("x"), b.in_("x"))
    with says("connect: .* of 'b' was taken as an output, and this takes an input"):
        builder.connect(a.out("y"), b.out("y"))
    with says("input 'X': .* was taken as an output"):
        builder.input("X", a.out("y"), "float32[n]")
    with says("output 'Y': .* was taken as an input"):
        builder.output("Y", a.in_("x"))
    with pytest.raises(ValueError, match=r"'n' \(u32\) of 'a' is no pointer, so no"):
        a.out("n")


def test_one_value_for_a_pin(builder):
    a, b = add(builder, "a"), add(builder, "b")
    builder.input("X", b.in_("x"), "float32[n]")
    with says("connect: .* of 'b' has its value from input 'X' already, so .* of 'a'"):
        builder.connect(a.out("y"), b.in_("x"), "float32[n]")
    with says("input_scalar 'A': parameter 2, 'a' .* is fixed by scalars= already"):
        builder.input_scalar("A", b.in_("a"), 2.0)


def test_pins_that_are_not_there(builder):
    node, f = add(builder, "a"), function(builder)
    with pytest.raises(
        ValueError, match=r"node 'a': .* has no parameter 'z'; its names"
    ):
        node.in_("z")
    with pytest.raises(ValueError, match="none with the number 9"):
        node.out(9)
    with pytest.raises(ValueError, match="'f' has no output 'z'; it has 'y'"):
        f.out("z")
    with pytest.raises(ValueError, match="'f' has no scalar 0; it has none"):
        f.scalar(0)


def test_nodes_of_another_graph(builder):
    stranger = add(BlockBuilder("H"), "theirs")
    mine = add(builder)
    with says("connect: 'theirs' is no node of this graph"):
        builder.connect(stranger.out("y"), mine.in_("x"), "float32[n]")
    with says("add_kernel: 'theirs' is no node of this graph"):
        add(builder, after=stranger)
    with says("add_kernel: 'mine' is no node of this graph"):
        add(builder, after="mine")
    with says(r"input 'X': takes a pin of a node, such as node.in_\(0\), got"):
        builder.input("X", mine, "float32[n]")


# ---- names ---------------------------------------------------------------------------


def test_names_are_given_once(builder):
    a, b = add(builder, "a", scalars={"n": "n"}), add(builder, "b", scalars={"n": "n"})
    builder.input("X", a.in_("x"), "float32[n]")
    builder.output("Y", a.out("y"), "float32[n]")
    with says("output 'Y': there is an output 'Y' already"):
        builder.output("Y", b.out("y"), "float32[n]")
    with says("input_scalar 'X': there is an input or a parameter 'X' already"):
        builder.input_scalar("X", a.in_("a"))
    builder.input_scalar("A", a.in_("a"))
    with says("input 'A': there is an input or a parameter 'A' already"):
        builder.input("A", b.in_("x"), "float32[n]")
    with says("add_captured: two inputs or scalars are named 'x'"):
        function(builder, inputs=("x", "x"))


def test_one_name_for_two_pins_of_one_type(builder):
    a, b = add(builder, "a", scalars={"n": "n"}), add(builder, "b", scalars={"n": "n"})
    builder.input("X", a.in_("x"), "float32[n]")
    builder.input("X", b.in_("x"), "float32[n]")
    f = function(builder, inputs={"x": "int32[n]"}, scalars={"k": 3})
    with says(r"input 'X': it is float32\[n\], and input 'x' of 'f' takes int32\[n\]"):
        builder.input("X", f.in_("x"))
    builder.input_scalar("A", a.in_("a"))
    with says("input_scalar 'A': it is float32, and scalar 'k' of 'f' takes int32"):
        builder.input_scalar("A", f.scalar("k"))


def test_defaults_of_one_name_agree(builder):
    a, b, c = (add(builder, n, scalars={"n": "n"}) for n in "abc")
    assert builder.input_scalar("A", a.in_("a")).default is None
    assert builder.input_scalar("A", b.in_("a"), 2.0).default == 2.0
    with says("input_scalar 'A': it is 2.0 by default, and 3.0 came"):
        builder.input_scalar("A", c.in_("a"), 3.0)


def test_defaults_of_children_agree_or_one_is_said(builder):
    def child(default):
        inner = BlockBuilder("Inner")
        f = function(inner, scalars={"k": default})
        inner.input("X", f.in_("x"))
        inner.input_scalar("K", f.scalar("k"))
        inner.output("Y", f.out("y"))
        return builder.add_child(inner.commit())

    two, three = child(2.0), child(3.0)
    assert builder.expose_parameter("K", two, "K").default == 2.0
    with says("input_scalar 'K': it is 2.0 by default, and 3.0 came"):
        builder.expose_parameter("K", three, "K")
    again, other = child(2.0), child(3.0)
    assert builder.expose_parameter("L", again, "K", 5.0).default == 5.0
    assert builder.expose_parameter("L", other, "K").default == 5.0


# ---- commit --------------------------------------------------------------------------


def test_a_parameter_without_a_role(builder):
    node = builder.add_kernel(kernel("scale"), block=64)
    builder.input("X", node.in_("x"), "float32[n]")
    builder.output("Y", node.out("y"), "float32[n]")
    builder.input_scalar("A", node.in_("a"))
    with says(r"commit: parameter 3, 'n' \(u32\) of 'scale' has no value"):
        builder.commit()


def test_an_input_without_a_value(builder):
    f = function(builder, inputs=("x", "z"))
    builder.input("X", f.in_("x"))
    builder.output("Y", f.out("y"))
    with says("commit: input 'z' of 'f' has no value; connect it or expose it"):
        builder.commit()


def test_an_output_without_a_shape(builder):
    a, b = add(builder, "a"), add(builder, "b")
    builder.input("X", a.in_("x"), "float32[n]")
    builder.connect(a.out("y"), b.in_("x"))
    builder.output("Y", b.out("y"), "float32[n]")
    with says("commit: parameter 1, 'y' .* of 'a' has no shape; say it where"):
        builder.commit()


@pytest.mark.parametrize("part", ["result", "constant", "default"])
def test_a_word_that_nothing_tells(builder, part):
    node = add(builder, scalars={"n": "m" if part == "constant" else "n"})
    builder.input("X", node.in_("x"), "float32[n]")
    kind = "float32[m]" if part == "result" else "float32[n]"
    builder.input_scalar("A", node.in_("a"), "m" if part == "default" else 2.0)
    builder.output("Y", node.out("y"), kind)
    with says("commit: .* has the size 'm', which no input tells; known are 'n'"):
        builder.commit()


def test_nothing_comes_out(builder):
    node = add(builder)
    builder.input("X", node.in_("x"), "float32[n]")
    with says("commit: the graph has no output, so nothing would run"):
        builder.commit()
    f = function(builder)
    builder.input("Z", f.in_("x"))
    builder.output("Y", f.out("y"))
    with says("commit: .* 'y' .* of 'scale' has no value"):
        builder.commit()


def test_a_committed_graph_is_done(builder):
    f = function(builder)
    builder.input("X", f.in_("x"))
    builder.output("Y", f.out("y"))
    builder.commit()
    for call in (
        lambda: builder.output("Z", f.out("y")),
        lambda: function(builder),
        builder.commit,
    ):
        with says(".*the graph is committed; another BlockBuilder makes another"):
            call()


def test_append_outputs(builder):
    a = builder.add_kernel(kernel("keep_positive"), block=64, grid=1)
    b = builder.add_kernel(kernel("keep_positive"), block=64, grid=1)
    with says("append_output 'K': data and counter are two parameters of one kernel"):
        builder.append_output("K", a.out("kept"), b.out("count"), 5, "float32[]")
    for capacity in (2.5, "2*n"):
        with says("append_output 'K': max_capacity must be 1 or more, or a word, got"):
            builder.append_output(
                "K", a.out("kept"), a.out("count"), capacity, "float32[]"
            )
    for pin, text in (
        (a.in_("x"), "parameter 0, 'x' .* was taken as an input, and this takes a sca"),
        (
            b.in_("capacity"),
            "parameter 4, 'capacity' .* is no scalar of 'keep_pos",
        ),
        (16, "takes a pin of a node"),
    ):
        with says(f"append_output 'K': {text}"):
            builder.append_output(
                *("K", a.out("kept"), a.out("count"), 5, "float32[]"), capacity=pin
            )
    builder.append_output("K", a.out("kept"), a.out("count"), 5, "float32[]")
    for data, counter in (("kept", "n"), ("x", "count")):
        says_why = r"no pointer|is of another output already"
        with pytest.raises(ValueError, match=says_why):
            builder.append_output("L", a.out(data), a.out(counter), 5, "float32[]")


def test_a_capacity_reaches_the_kernel(builder):
    node = builder.add_kernel(kernel("keep_positive"), block=64, grid=1)
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("N", node.in_("n"), "n")
    builder.append_output(
        *("K", node.out("kept"), node.out("count"), 40, "float32[]"),
        capacity=node.in_("capacity"),
    )
    with says("input_scalar 'C': parameter 4, 'capacity' .* is fixed by scalars= alre"):
        builder.input_scalar("C", node.in_("capacity"), 80)
    (only,) = builder.commit().nodes
    ((number, packed),) = only.operation.constants
    assert (number, packed.value) == (4, 40)


def test_append_outputs_need_a_grid(builder):
    node = builder.add_kernel(kernel("keep_positive"), block=64)
    with says("append_output 'K': max_capacity must be 1 or more, or a word, got 0"):
        builder.append_output("K", node.out("kept"), node.out("count"), 0, "float32[]")
    with says("append_output 'K': data and counter are two parameters of one kernel"):
        builder.append_output("K", node.out("kept"), node.out("kept"), 5, "float32[]")
    builder.append_output("K", node.out("kept"), node.out("count"), "n", "float32[]")
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("N", node.in_("n"), "n")
    builder.input_scalar("C", node.in_("capacity"), "n")
    with says("commit: 'keep_positive' appends to all its outputs, so nothing says"):
        builder.commit()


def test_types_of_append_outputs(builder):
    node = builder.add_kernel(kernel("keep_positive"), block=64)
    with says(r"append_output 'K': type must have a shape, got float32\[\.\.\.\]"):
        builder.append_output("K", node.out("kept"), node.out("count"), 5, "float32")


def test_what_is_appended_to_is_no_input(builder):
    node = builder.add_kernel(kernel("keep_positive"), block=64, grid=1)
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input("K", node.in_("kept"), "float32[40]")
    builder.append_output("K", node.out("kept"), node.out("count"), 40, "float32[]")
    builder.input_scalar("N", node.in_("n"), "n")
    builder.input_scalar("C", node.in_("capacity"), 40)
    with says("commit: parameter 1, 'kept' .* is an input and what it appends to"):
        builder.commit()


# ---- a step that failed --------------------------------------------------------------


def test_a_step_that_fails_changes_nothing(builder):
    """So it may be taken again, rightly: in a notebook, for example."""
    first = add(builder, "first", scalars={"n": "n"})
    wrong = [
        lambda: add(builder, "b", scalars={"zz": 1}),
        lambda: add(builder, "b", scalars={"n": 2.5}),
        lambda: add(builder, "first"),
        lambda: add(builder, "b", after="first"),
        lambda: function(builder, outputs="y", after=first),
        lambda: function(builder, inputs=(), after=first),
        lambda: builder.input_scalar("A", first.in_("a"), "?"),
        lambda: builder.input_scalar("A", first.out("y"), 0),
    ]
    for step in wrong:
        with pytest.raises((ValueError, TypeError)):
            step()
    builder.input("X", first.in_("x"), "float32[n]")
    builder.input_scalar("A", first.in_("a"), 2.0)
    second = function(builder, name="second")
    for step in (
        lambda: builder.input("Z", first.in_("x")),
        lambda: builder.input("X", second.in_("x"), "int32[n]"),
        lambda: builder.connect(first.out("y"), first.in_("x"), "float32[n]"),
        lambda: builder.connect(second.out("y"), second.in_("x")),
        lambda: builder.output("Y", first.out("y"), "float32[n"),
    ):
        with pytest.raises((ValueError, TypeError)):
            step()
    builder.connect(first.out("y"), second.in_("x"), "float32[n]")
    builder.output("Y", second.out("y"))
    graph = builder.commit()
    assert [port.name for port in graph.inputs] == ["X"]
    assert [node.after for node in graph.nodes] == [(), ()]
    np.testing.assert_array_equal(graph(jnp.ones(3))["Y"], np.full(3, 2, np.float32))


def test_an_append_output_that_fails_leaves_nothing(builder):
    node = builder.add_kernel(kernel("keep_positive"), block=64, grid=1)
    f = function(builder)
    builder.output("K Count", f.out("y"))
    with says("append_output 'K': there is an output 'K Count' already"):
        builder.append_output("K", node.out("kept"), node.out("count"), 5, "float32[]")
    builder.append_output("L", node.out("kept"), node.out("count"), 6, "float32[]")


# ---- types come together -------------------------------------------------------------


def test_the_tighter_type_holds(builder):
    a, b = add(builder, "a"), add(builder, "b")
    builder.input("X", a.in_("x"), "float32[n]")
    builder.connect(a.out("y"), b.in_("x"), "float32[n]")
    builder.output("Y", a.out("y"), "float32[...]")
    builder.output("Z", b.out("y"), "float32[n]")
    graph = builder.commit()
    assert [str(port) for port in graph.outputs] == ["Y: float32[n]", "Z: float32[n]"]


def test_types_travel_by_wires(builder):
    """Nobody says what f returns, but those that take it."""
    f = function(builder)
    builder.input("X", f.in_("x"))
    a = function(builder, inputs={"x": "float32[n]"}, name="a")
    b = function(builder, inputs={"x": "int32[n]"}, name="b")
    builder.connect(f.out("y"), a.in_("x"))
    with says(
        r"connect: output 'y' of 'f' is float32\[n\], and input 'x' of 'b' takes"
    ):
        builder.connect(f.out("y"), b.in_("x"))
    c = function(builder, inputs=("x",), name="c")
    d = function(builder, inputs={"x": "int32[n]"}, name="d")
    builder.input("Z", c.in_("x"))
    builder.input("Z", a_second := function(builder, name="e").in_("x"), "float32[n]")
    assert a_second.handle.name == "e"
    with says(r"input 'Z': it is float32\[n\], and input 'x' of 'd' takes int32"):
        builder.input("Z", d.in_("x"))


def test_what_is_updated_in_place_has_one_type(builder):
    node = builder.add_kernel(
        kernel("shift"), block=64, scalars={"a": 1.0, "n": "n"}, fallback=jnp.add
    )
    builder.output("Y", node.out("x"), "float32[n]")
    with says(r"input 'X': .* is float32\[n\], and int32\[n\] is asked for"):
        builder.input("X", node.in_("x"), "int32[n]")
    assert str(builder.input("X", node.in_("x"))) == "X: float32[n]"


def test_all_that_was_said_of_a_wire_holds(builder):
    """Words of both of its ends."""
    a = add(builder, "a")
    f = function(builder, inputs=("x", "z"))
    builder.input("X", a.in_("x"), "float32[n]")
    builder.output("Y", a.out("y"), "float32[n]")
    builder.connect(a.out("y"), f.in_("x"), "float32[m]")
    builder.input("Z", f.in_("z"), "float32[m]")
    builder.output("F", f.out("y"))
    graph = builder.commit()
    assert graph(jnp.ones(5), jnp.ones(5))["Y"].shape == (5,)
    with pytest.raises(ValueError, match=r"must be float32\[m\] where m = 8"):
        graph(jnp.ones(5), jnp.ones(8))


def test_what_is_said_of_functions_wires_holds(builder):
    f, g = function(builder, name="f"), function(builder, name="g")
    builder.input("X", f.in_("x"))
    builder.connect(f.out("y"), g.in_("x"), "float32[3]")
    builder.output("Y", g.out("y"))
    graph = builder.commit()
    assert graph(jnp.ones(3))["Y"].shape == (3,)
    with pytest.raises(ValueError, match=r"must be float32\[3\], got float32\[5\]"):
        graph(jnp.ones(5))


def test_one_input_of_two_words(builder):
    a, b = add(builder, "a"), add(builder, "b", scalars={"n": "m", "a": 1.0})
    builder.input("X", a.in_("x"), "float32[n]")
    builder.input("X", b.in_("x"), "float32[m]")
    builder.output("Y", a.out("y"), "float32[n]")
    builder.output("Z", b.out("y"), "float32[m]")
    made = builder.commit()(jnp.ones(4))
    assert made["Y"].shape == made["Z"].shape == (4,)


def test_a_default_is_known_at_the_start(builder):
    f = function(builder, outputs={"y": "float32[n]"})
    node = builder.add_kernel(kernel("scale"), block=64, scalars={"a": 2.0})
    builder.input("X", f.in_("x"))
    builder.connect(f.out("y"), node.in_("x"))
    builder.output("Y", node.out("y"), "float32[n]")
    builder.input_scalar("N", node.in_("n"), "n")
    with says("commit: parameter 'N' has the size 'n', which no input tells"):
        builder.commit()


def test_numpys_wide_defaults(builder):
    node = builder.add_kernel(kernel("scale"), block=64, fallback=lambda x, a, n: a * x)
    builder.input("X", node.in_("x"), "float32[n]")
    wide = np.linspace(0, 1, 3)[1], np.int64(4)
    assert str(builder.input_scalar("A", node.in_("a"), wide[0])) == "A: float32 = 0.5"
    assert str(builder.input_scalar("N", node.in_("n"), wide[1])) == "N: uint32 = 4"
    builder.output("Y", node.out("y"), "float32[n]")
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(builder.commit())(jnp.ones(4), A=jnp.float32(3))["Y"]
    np.testing.assert_array_equal(got, np.full(4, 3, np.float32))


def test_outputs_of_a_child_are_exposed_together_or_not_at_all(builder):
    inner = BlockBuilder("Inner")
    node = inner.add_kernel(
        kernel("keep_positive"), block=64, grid=1, scalars={"n": "n"}
    )
    inner.input("X", node.in_("x"), "float32[n]")
    pins = node.out("kept"), node.out("count")
    inner.append_output("K", *pins, 5, "float32[]", capacity=node.in_("capacity"))
    child = builder.add_child(inner.commit())
    f = function(builder)
    builder.output("P Count", f.out("y"))
    with says("expose_output 'P': there is an output 'P Count' already"):
        builder.expose_output("P", child, "K")
    builder.expose_output("Q", child, "K")
    with says("expose_output 'R': takes a child; output"):
        builder.expose_output("R", add(builder), "y")
    with says("add_kernel: parameter 3, 'n' .* came twice"):
        add(builder, scalars={"n": 1, 3: 2, "a": 1.0})
    made = function(builder, inputs={"x": None}, name="any")
    assert made.type_of(made.in_("x")) is None


def test_numbers_are_checked_where_they_are_said(builder):
    with says(r"add_kernel: parameter 3, 'n' \(u32\) .* must be an integer, got 2.5"):
        add(builder, scalars={"n": 2.5, "a": 1.0})
    node = add(builder, scalars={"n": "n"})
    with says("input_scalar 'A': parameter .*'a'.* must be a number or float32"):
        builder.input_scalar("A", node.in_("a"), (1, 2))
    f = function(builder, scalars={"k": 3})
    with says("input_scalar 'K': parameter \"scalar 'k' of 'f'\" must be an integer"):
        builder.input_scalar("K", f.scalar("k"), 0.5)
    with pytest.raises(
        TypeError, match="connect_children: takes children and captured"
    ):
        builder.connect_children(node, "y", f, "x")


# ---- nodes ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [3.9, [4, 3.9], np.array([3.9]), "4", (1, 2, 3, 4)])
@pytest.mark.parametrize("name", ["grid", "block", "cluster"])
def test_sizes_are_integers(builder, name, given):
    with says(f"add_kernel: {name} must be one to three integers"):
        builder.add_kernel(kernel("scale"), **{"block": 64, name: given})


def test_what_is_no_node(builder, tmp_path):
    with says("add_kernel: 'threads' is none of batch, block, cluster"):
        builder.add_kernel(kernel("scale"), threads=64)
    with says("add_captured: 3 cannot be called"):
        builder.add_captured(3, inputs=(), outputs=())
    with says(r"add_child: a child is a Graph, which commit\(\) returns, got Block"):
        builder.add_child(builder)
    with says("after: 'f' has no input, so nothing keeps it behind another"):
        function(builder, inputs=(), after=add(builder))
    with says("add_captured: names come as a sequence, got 'xy'"):
        function(builder, inputs="xy")
    with says(r"input 'X': a type is text like 'float32\[n, 3\]'"):
        builder.input("X", function(builder, name="g").in_(0), "float33[n]")


def test_kernels_by_the_path_of_their_ptx(builder, tmp_path):
    path = tmp_path / "scale.ptx"
    path.write_bytes(kernel("scale").image)
    beside = '{"entryPoint": "scale", "blockSize": 64, "parameters": ["x","y","a","n"]}'
    (tmp_path / "scale.json").write_text(beside)
    node = builder.add_kernel(path, scalars={"n": "n"}, fallback=lambda x, a, n: a * x)
    builder.input("X", node.in_("x"), "float32[n]")
    builder.input_scalar("A", node.in_(2), 2.0)
    builder.output("Y", node.out(1), "float32[n]")
    with jax.default_device(jax.devices("cpu")[0]):
        got = builder.commit()(jnp.ones(100))
    np.testing.assert_array_equal(got["Y"], np.full(100, 2, np.float32))
