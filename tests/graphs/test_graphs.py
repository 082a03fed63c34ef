"""Graphs as functions: what they compute, under JAX's transformations, and as values.

The kernels run as JAX functions, as C++ behind a driver that stands in, on a GPU.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import kernel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_graphs import add_scale, add_shift, fan, keep, line, twice, with_rules

import jax_kvblock
from jax_kvblock import kernels
from jax_kvblock.graphs import BlockBuilder


@pytest.fixture
def where(everywhere):
    return everywhere


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal(300, np.float32))


# ---- what is computed ----------------------------------------------------------------


def test_a_line(where, x):
    np.testing.assert_array_equal(line()(x)["Y"], 2 * x + 1)
    np.testing.assert_array_equal(line()(X=x, Slope=3.0, Offset=0.5)["Y"], 3 * x + 0.5)


def test_parameters_are_hot(where, x):
    graph, traced = line(), 0

    @jax.jit
    def run(x, a, b):
        nonlocal traced
        traced += 1
        return graph(x, Slope=a, Offset=b)["Y"]

    for i in range(100):
        a, b = np.float32(i / 8), np.float32(2 - i / 4)
        # XLA may round the product and the sum once, or each.
        want = a * np.asarray(x, np.float64) + b
        np.testing.assert_allclose(run(x, a, b), want, rtol=1e-6, atol=4e-6)
    assert traced == 1


def test_fan_out_and_fan_in(where, x):
    got = jax.jit(fan())(x)
    want = 2 * np.asarray(x, np.float64)
    mean = want.mean()
    np.testing.assert_allclose(got["Mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(got["Sum"], want + 3 * want * mean, rtol=1e-4)
    weightless = jax.jit(lambda x, w: fan()(x, Weight=w)["Sum"])(x, 0.0)
    np.testing.assert_allclose(weightless, want, rtol=1e-6)


def test_what_is_updated_in_place_elsewhere_stays(where, x):
    """A kernel updates its input in memory of its own where others need it, too."""
    builder = BlockBuilder("Both")
    scale, shift = add_scale(builder), add_shift(builder)
    builder.input("X", scale.in_("x"), "float32[n]")
    builder.connect(scale.out("y"), shift.in_("x"), "float32[n]")
    builder.input_scalar("A", scale.in_("a"), 2.0)
    builder.input_scalar("B", shift.in_("a"), 1.0)
    builder.output("Before", scale.out("y"))
    builder.output("After", shift.out("x"))
    got = jax.jit(builder.commit())(x)
    np.testing.assert_array_equal(got["Before"], 2 * x)
    np.testing.assert_array_equal(got["After"], 2 * x + 1)


@pytest.mark.parametrize("capacity", [40, 300])
def test_append_outputs(where, x, capacity):
    graph = keep(capacity)
    assert [port.name for port in graph.outputs] == [
        *("Kept", "Kept Count", "Kept Overflowed"),
    ]
    got = jax.jit(graph)(x)
    positive = np.asarray(x)[np.asarray(x) > 0]
    count = int(got["Kept Count"])
    assert count == min(capacity, positive.size)
    assert bool(got["Kept Overflowed"]) == (positive.size > capacity)
    data = np.asarray(got["Kept"])
    assert data.shape == (capacity,) and not data[count:].any()
    assert set(data[:count]) <= set(positive) and len(set(data[:count])) == count


def test_a_capacity_that_is_a_size(where, x):
    """No more are kept than came."""
    builder = BlockBuilder("All")
    node = builder.add_kernel(
        kernel("keep_positive"),
        block=64,
        grid=5,
        scalars={"n": "n", "capacity": "n"},
        fallback=lambda x, n, _: (jnp.sort(x, descending=True), jnp.sum(x > 0)),
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.append_output("K", node.out("kept"), node.out("count"), "n", "float32[]")
    got = builder.commit()(x)
    count = int(got["K Count"])
    assert got["K"].shape == (300,) and count == int((x > 0).sum())
    kept = np.sort(np.asarray(got["K"])[:count])
    np.testing.assert_array_equal(kept, np.sort(np.asarray(x)[np.asarray(x) > 0]))


def test_a_counter_is_an_output_of_its_own(where, x):
    """By its pin, too: the count, not whether there were more."""
    builder = BlockBuilder("Counts")
    node = builder.add_kernel(
        kernel("keep_positive"),
        block=64,
        grid=5,
        scalars={"n": "n"},
        fallback=lambda x, n, capacity: (jnp.zeros(capacity), jnp.sum(x > 0)),
    )
    builder.input("X", node.in_("x"), "float32[n]")
    pins = node.out("kept"), node.out("count")
    builder.append_output("K", *pins, 200, "float32[]", capacity=node.in_("capacity"))
    double = builder.add_captured(lambda n: 2 * n, inputs=("n",), outputs=("m",))
    builder.connect(node.out("count"), double.in_("n"))
    builder.output("Twice", double.out("m"))
    got = builder.commit()(x)
    assert int(got["Twice"]) == 2 * int(got["K Count"]) == 2 * int((x > 0).sum())


def test_a_count_goes_to_another_kernel(where, x):
    builder = BlockBuilder("Counted")
    child = builder.add_child(keep(200))
    scale = builder.add_kernel(
        kernel("scale"),
        block=64,
        fallback=lambda x, a, n: jnp.where(jnp.arange(x.size) < n, a * x, 0),
    )
    builder.expose_input("X", child, "X")
    builder.connect(child.out("Kept"), scale.in_("x"), "float32[200]")
    builder.connect(child.out("Kept Count"), scale.scalar("n"))
    builder.input_scalar("A", scale.in_("a"), 2.0)
    builder.output("Y", scale.out("y"), "float32[200]")
    builder.expose_output("Mine", child, "Kept")
    graph = builder.commit()
    got = jax.jit(graph)(x)
    count = int(got["Mine Count"])
    assert 0 < count < 200 and not bool(got["Mine Overflowed"])
    np.testing.assert_array_equal(got["Y"][:count], 2 * got["Mine"][:count])


def test_nested_graphs(where, x):
    builder = BlockBuilder("Outer")
    child = builder.add_child(twice())
    builder.expose_input("In", child, "In")
    builder.expose_output("Out", child, "Out")
    builder.expose_parameter("S", child, "Slope")
    outer = builder.commit()
    np.testing.assert_array_equal(outer(x)["Out"], 2 * (2 * x + 1) + 7)
    np.testing.assert_array_equal(outer(x, S=1.0)["Out"], x + 1 + 7)
    hot = jax.jit(lambda x, s: outer(x, S=s)["Out"])
    np.testing.assert_array_equal(hot(x, 0.5), 0.5 * (0.5 * x + 1) + 7)


def test_words_of_a_child_are_its_own(where, x):
    """Both graphs say n, of different sizes."""
    builder = BlockBuilder("Parts")
    half = builder.add_captured(
        lambda x: x[:100], inputs={"x": "float32[n]"}, outputs={"y": "float32[m]"}
    )
    child = builder.add_child(line())
    builder.input("X", half.in_("x"))
    builder.connect(half.out("y"), child.in_("X"))
    builder.output("Y", child.out("Y"))
    np.testing.assert_array_equal(builder.commit()(x)["Y"], 2 * x[:100] + 1)


def test_a_library_call_by_ffi_is_a_node(on_cpu, rng):
    """This library's own, whose conversions are custom calls."""
    convert = jax_kvblock.block_to_universal
    builder = BlockBuilder("Convert")
    node = builder.add_captured(
        convert, inputs={"blocks": "float32[b, 2, 2, 4, 3, 8]"}, outputs=("universal",)
    )
    builder.input("Blocks", node.in_(0))
    builder.output("Universal", node.out(0))
    blocks = jnp.asarray(rng.standard_normal((5, 2, 2, 4, 3, 8), np.float32))
    graph = builder.commit()
    np.testing.assert_array_equal(graph(blocks)["Universal"], convert(blocks))
    assert "kvblock" in jax.jit(graph).lower(blocks).as_text()


# ---- order ---------------------------------------------------------------------------


def ordered(after):
    builder = BlockBuilder("Ordered")
    one = add_scale(builder, name="one")
    two = add_scale(builder, name="two", after=[one] if after else ())
    for node, name in ((one, "X"), (two, "Z")):
        builder.input(name, node.in_("x"), "float32[n]")
        builder.output(f"{name}2", node.out("y"), "float32[n]")
        builder.input_scalar("A", node.in_("a"), 2.0)
    return builder.commit()


@pytest.mark.parametrize("after", [True, False])
def test_after_is_an_operand(where, x, after):
    """Of a kernel that takes nothing else from the first, so none overtakes it."""
    graph = ordered(after)
    got = jax.jit(graph)(x, 3 * x)
    np.testing.assert_array_equal(got["X2"], 2 * x)
    np.testing.assert_array_equal(got["Z2"], 6 * x)
    calls = [
        equation
        for equation in jax.make_jaxpr(graph)(x, x).jaxpr.eqns
        if equation.primitive.name == "kvblock_kernel_call"
    ]
    assert len(calls) == 2
    assert [len(call.invars) for call in calls] == [1, 1 + after]


def test_functions_and_graphs_wait_as_well(where, x):
    """In the program that XLA gets; what it cannot move is its matter from there on."""
    builder = BlockBuilder("Wait")
    first = add_scale(builder, name="first")
    second = builder.add_captured(
        jnp.sin, inputs=("x",), outputs=("y",), name="sin", after=first
    )
    third = builder.add_child(line(), after=(first, second))
    builder.input_scalar("A", first.in_("a"), 2.0)
    for node, port in ((first, "x"), (second, "x"), (third, "X")):
        builder.input(f"In {node.name}", node.in_(port), "float32[n]")
    builder.output("One", first.out("y"), "float32[n]")
    builder.output("Two", second.out("y"))
    builder.output("Three", third.out("Y"))
    graph = builder.commit()
    got = jax.jit(graph)(x, x, x)
    np.testing.assert_array_equal(got["Three"], 2 * x + 1)
    np.testing.assert_allclose(got["Two"], jnp.sin(x), rtol=1e-6)
    barriers = [
        equation
        for equation in jax.make_jaxpr(graph)(x, x, x).jaxpr.eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    # The input of sin and what it waits for; the child's input and both that it waits
    # for.
    assert [len(barrier.invars) for barrier in barriers][:2] == [2, 3]


@pytest.mark.parametrize("option", ["grid", "fallback"])
def test_variables_of_a_loop(on_cpu, x, option):
    """Each node's function would compute with the last value."""
    made = []
    for n in range(3):
        builder = BlockBuilder("Late")
        given = {"grid": 5, "fallback": lambda x, a, n: a * x}
        given[option] = {
            "grid": lambda x: 5 + n,  # noqa: B023
            "fallback": lambda x, a, _: a * x + n,  # noqa: B023
        }[option]
        node = builder.add_kernel(
            kernel("scale"), block=64, scalars={"n": "n"}, **given
        )
        builder.input("X", node.in_("x"), "float32[n]")
        builder.input_scalar("A", node.in_("a"), 2.0)
        builder.output("Y", node.out("y"), "float32[n]")
        made.append(builder.commit())
    np.testing.assert_array_equal(made[2](x)["Y"], 2 * x + (option == "fallback") * 2)
    with pytest.raises(ValueError, match="uses a variable that has another value now"):
        made[0](x)


def test_after_a_child_whose_nodes_have_no_inputs(on_cpu, x):
    inner = BlockBuilder("Inner")
    fill = inner.add_kernel(kernel("nothing"), block=32, grid=1)
    inner.output("Z", fill.out("x"), "float32[4]")
    more = inner.add_captured(jnp.cos, inputs=("x",), outputs=("y",))
    inner.input("X", more.in_("x"))
    inner.output("Y", more.out("y"))
    outer = BlockBuilder("Outer")
    first = outer.add_captured(jnp.sin, inputs=("x",), outputs=("y",))
    child = outer.add_child(inner.commit(), after=first)
    outer.input("X", first.in_("x"))
    outer.input("X", child.in_("X"))
    for name in ("Y", "Z"):
        outer.output(name, child.out(name))
    equations = jax.make_jaxpr(outer.commit())(x).jaxpr.eqns
    (call,) = (e for e in equations if e.primitive.name == "kvblock_kernel_call")
    assert len(call.invars) == 1


def test_all_that_a_node_computes_is_waited_for(on_cpu, x):
    builder = BlockBuilder("Many")
    first = builder.add_captured(
        lambda x, a: (x + a, jnp.sin(x)),
        inputs=("x",),
        outputs=("sum", "sine"),
        scalars={"a": 1.0},
        name="first",
    )
    second = builder.add_captured(
        lambda x, b: x * b,
        inputs=("x",),
        outputs=("y",),
        scalars={"b": 2.0},
        name="second",
        after=first,
    )
    builder.input("X", first.in_("x"))
    builder.input("X", second.in_("x"))
    builder.input_scalar("B", second.scalar("b"))
    builder.output("Y", second.out("y"))
    graph = builder.commit()
    run = jax.make_jaxpr(lambda x, b: graph(x, B=b))(x, jnp.float32(3))
    (barrier,) = (
        e for e in run.jaxpr.eqns if e.primitive.name == "optimization_barrier"
    )
    assert len(barrier.invars) == 4  # x, b, the sum and the sine
    np.testing.assert_array_equal(graph(x)["Y"], 2 * x)


# ---- transformations -----------------------------------------------------------------


def test_vmap_and_grad(where, x):
    graph = with_rules()
    both = jnp.stack([x, x + 1, x * x])
    np.testing.assert_array_equal(jax.vmap(graph)(both)["Y"], 2 * both)
    loss = jax.grad(lambda x: jnp.sum(graph(x)["Y"] ** 2))
    np.testing.assert_allclose(loss(x), 8 * x, rtol=1e-6)
    batched = jax.vmap(jax.grad(lambda x: jnp.sum(graph(x)["Y"])))(both)
    np.testing.assert_array_equal(batched, np.full((3, 300), 2, np.float32))


def test_scan(where, x):
    graph = line()

    def step(x, offset):
        return graph(x, Slope=0.5, Offset=offset)["Y"], None

    offsets = jnp.arange(4.0)
    got, _ = jax.jit(lambda x: jax.lax.scan(step, x, offsets))(x)
    want = x
    for offset in offsets:
        want = 0.5 * want + offset
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_shard_map(driver, x):
    """Each device runs the graph on its part; words are sizes of that."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices("cpu")[:4])
    lies = NamedSharding(mesh, P("d"))
    x = jax.device_put(x, lies)
    run = jax.jit(
        jax.shard_map(
            lambda x, a: line()(x, Slope=a)["Y"],
            mesh=mesh,
            in_specs=(P("d"), P()),
            out_specs=P("d"),
        )
    )
    got = run(x, jnp.float32(3))
    np.testing.assert_array_equal(got, 3 * x + 1)
    text = run.lower(x, jnp.float32(3)).compile().as_text()
    assert "all-gather" not in text and "f32[75]" in text


def test_a_mesh_needs_shard_map():
    with pytest.raises(TypeError, match="'sharding' is none of"):
        add_scale(BlockBuilder("G"), sharding="i -> i")


# ---- how a kernel is launched --------------------------------------------------------


def test_options_reach_the_launch(driver):
    builder = BlockBuilder("Launch")
    node = builder.add_kernel(
        kernel("nothing"),
        block=(8, 4, 2),
        grid=[2, 4, 6],
        cluster=(2, 1, 2),
        shared_memory=100_000,
        cooperative=True,
    )
    builder.output("X", node.out("x"), "float32[4]")
    graph = builder.commit()
    assert hash(graph) == hash(graph)
    graph()["X"].block_until_ready()
    numbers = (ctypes.c_uint * 11)()
    driver.emulator_last_launch(numbers)
    assert list(numbers) == [2, 4, 6, 8, 4, 2, 100_000, 2, 1, 2, 1]


def test_tensor_maps(driver):
    builder = BlockBuilder("Maps")
    node = builder.add_kernel(
        kernel("show_map"),
        block=32,
        grid=1,
        tensor_maps={"map": kernels.TensorMap(box=(16, 8))},
    )
    builder.input("X", node.in_("map"), "float32[64, 32]")
    builder.output("Words", node.out("words"), "uint32[32]")
    words = builder.commit()(jnp.ones((64, 32)))["Words"]
    sizes = np.asarray(words).view(np.uint64)[2:4]
    assert list(sizes) == [32, 64]  # the innermost first


def test_a_kernel_of_which_nothing_is_known():
    """A cubin's parameters are counted, and numbers have NumPy's types."""
    cubin = kernels.from_cubin(b"\x7fELF" + bytes(60), "f")

    def build(a):
        builder = BlockBuilder("Cubin")
        node = builder.add_kernel(
            cubin, block=64, scalars={2: a}, fallback=lambda x, a, n: a * x
        )
        builder.input("X", node.in_(0), "float32[n]")
        builder.output("Y", node.out(1), "float32[n]")
        builder.input_scalar("N", node.scalar(3), np.int32(7))
        return builder.commit()

    assert build(np.float32(2)) == build(np.float32(2))
    assert build(np.float32(2)) != build(np.int32(2))
    assert str(build(np.float32(2)).parameters[0]) == "N: int32 = 7"
    with jax.default_device(jax.devices("cpu")[0]):
        got = build(np.float32(2))(jnp.ones(7))["Y"]
    np.testing.assert_array_equal(got, np.full(7, 2, np.float32))
