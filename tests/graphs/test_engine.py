"""`Engine`: what it counts, what it says, and when it compiles."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import kernel

from jax_kvblock.graphs import BlockBuilder, Engine, State


@pytest.fixture
def x():
    return jnp.arange(6.0)


def line(slope=2.0, word=False):
    """y = slope x + offset, as a captured function. word: the offset is the size."""
    builder = BlockBuilder("Line")
    node = builder.add_captured(
        lambda x, slope, offset: slope * x + offset,
        inputs={"x": "float32[n]"},
        outputs=("y",),
        scalars={"slope": 2.0, "offset": 1.0},
    )
    builder.input("X", node.in_("x"))
    builder.input_scalar("Slope", node.scalar("slope"), slope)
    builder.input_scalar("Offset", node.scalar("offset"), "n" if word else 1.0)
    builder.output("Y", node.out("y"))
    return builder.commit()


def steps():
    """An integer parameter, and one without a default."""
    builder = BlockBuilder("Steps")
    node = builder.add_captured(
        lambda x, n, start: x + n + start,
        inputs=("x",),
        outputs=("y",),
        scalars={"n": 3, "start": 0.0},
        name="step",
    )
    builder.input("X", node.in_("x"))
    builder.input_scalar("N", node.scalar("n"))
    builder.input_scalar("Start", node.scalar("start"))
    builder.output("Y", node.out("y"))
    return builder.commit()


# ---- what is compiled ----------------------------------------------------------------


def test_a_hundred_values_and_one_compilation(x):
    with Engine() as engine:
        block = engine.register(line())
        for i in range(100):
            block.set(Slope=i / 4)
            np.testing.assert_array_equal(block(x)["Y"], np.float32(i / 4) * x + 1)
        counted = engine.launches, engine.cold_rebuilds, engine.hot_updates
        # The first value came with the compilation.
        assert counted == (100, 1, 99)


def test_the_same_structure_is_not_compiled_again(x):
    with Engine() as engine:
        for _ in range(3):
            block = engine.register(line())
            np.testing.assert_array_equal(block(x)["Y"], 2 * x + 1)
            block.dispose()
        assert engine.cold_rebuilds == 1
        engine.register(line(slope=3.0))(x)  # another default is another graph
        assert engine.cold_rebuilds == 2
        engine.register(line())(jnp.arange(7.0))  # other shapes
        assert engine.cold_rebuilds == 3


def test_values_that_do_not_change_are_no_updates(x):
    with Engine() as engine:
        block = engine.register(line())
        block(x)
        block.set(Slope=2.0)
        assert not block.parameters["Slope"].is_dirty
        block(x)
        block.set(Slope=3.0, Offset=4.0)
        assert block.parameters["Slope"].is_dirty
        np.testing.assert_array_equal(block(x)["Y"], 3 * x + 4)
        assert not block.parameters["Slope"].is_dirty
        assert (engine.hot_updates, engine.cold_rebuilds) == (2, 1)


def test_a_failed_launch_keeps_what_is_dirty(x):
    with Engine() as engine:
        block = engine.register(line())
        block(x)
        block.set(Slope=5.0)
        with pytest.raises(TypeError, match="input 'X' must be"):
            block(jnp.ones(3, jnp.int32))
        assert block.parameters["Slope"].is_dirty
        np.testing.assert_array_equal(block(x)["Y"], 5 * x + 1)
        assert engine.hot_updates == 1


def test_a_default_that_is_a_size(x):
    with Engine() as engine:
        block = engine.register(line(word=True))
        assert block.parameters["Offset"].value is None
        np.testing.assert_array_equal(block(x)["Y"], 2 * x + 6)
        block.set(Offset=0.5)
        np.testing.assert_array_equal(block(x)["Y"], 2 * x + 0.5)
        assert engine.cold_rebuilds == 2


def test_values_on_the_device(x):
    with Engine() as engine:
        block = engine.register(line())
        block.set(Slope=jnp.max(x))
        np.testing.assert_array_equal(block(x)["Y"], 5 * x + 1)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("Slope", "2", r"parameter 'Slope' must be a number or float32\[\], got '2'"),
        (
            "Slope",
            jnp.ones(2),
            r"'Slope' must be a number or float32\[\], got float32\[2\]",
        ),
        ("Slope", jnp.int32(2), r"or float32\[\], got int32\[\]"),
        ("N", 2.5, "parameter 'N' must be an integer, got 2.5"),
        ("N", 2**31, "parameter 'N': 2147483648 does not fit int32"),
        ("Missing", 1, "has no parameter 'Missing'; it has"),
    ],
)
def test_values_that_do_not_fit(name, value, text):
    with Engine() as engine:
        block = engine.register(line() if name == "Slope" else steps())
        with pytest.raises((ValueError, TypeError), match=text):
            block.set(**{name: value})
        assert not any(p.is_dirty for p in block.parameters.values())


# ---- what is said --------------------------------------------------------------------


def keep(capacity):
    builder = BlockBuilder("Keep")
    node = builder.add_kernel(
        kernel("keep_positive"),
        block=64,
        grid=1,
        scalars={"n": "n", "capacity": capacity},
        fallback=lambda x, n, capacity: (jnp.ones(capacity), jnp.sum(x > 0)),
    )
    builder.input("X", node.in_("x"), "float32[n]")
    builder.append_output(
        "K", node.out("kept"), node.out("count"), capacity, "float32[]"
    )
    return builder.commit()


def test_states(x):
    with Engine() as engine, jax.default_device(jax.devices("cpu")[0]):
        block = engine.register(keep(4))
        assert block.debug_info.state is State.NOT_COMPILED
        assert block.debug_info.append_counts == {}
        block(jnp.asarray([1.0, 2.0, 0.0, 0.0]))
        info = block.debug_info
        assert (info.state, info.message) == (State.OK, None)
        assert info.append_counts == {"K": 2}
        block(jnp.ones(6))
        info = block.debug_info
        assert info.state is State.WARNING and info.append_counts == {"K": 4}
        assert info.message == "full, and there would have been more: 'K'"
        with pytest.raises(TypeError):
            block(jnp.ones(6, jnp.int32))
        info = block.debug_info
        assert info.state is State.ERROR and "input 'X' must be" in info.message
        block(jnp.ones(1))
        assert block.debug_info.state is State.OK
        assert repr(block) == "EngineBlock('Keep', OK)"


def test_times_on_request(x):
    with Engine() as engine:
        block = engine.register(line())
        block(x), block(x)
        assert block.debug_info.last_time is None
    with Engine(timed=True) as engine:
        block = engine.register(line())
        block(x)
        assert block.debug_info.last_time is None  # it compiled
        block(x), block(x)
        info = block.debug_info
        assert 0 < info.last_time < 1 and 0 < info.average_time < 1


# ---- life ----------------------------------------------------------------------------


def test_register_and_dispose(x):
    seen = []
    with Engine(structure_changed=lambda e: seen.append(len(e.blocks))) as engine:
        one = engine.register(line())
        two = engine.register(line(), name="other")
        assert (one.name, two.name) == ("Line", "other") and one.id != two.id
        assert engine.blocks == (one, two)
        one.dispose()
        one.dispose()
        assert engine.blocks == (two,)
        with pytest.raises(RuntimeError, match="block 'Line' is disposed; register"):
            one(x)
    assert seen == [1, 2, 1, 0]
    with pytest.raises(RuntimeError, match="block 'other' is disposed"):
        two(x)


def test_inputs_are_donated(x):
    with Engine() as engine:
        block = engine.register(line(), donate=("X",))
        mine = jnp.arange(6.0)
        np.testing.assert_array_equal(block(mine)["Y"], 2 * x + 1)
        assert mine.is_deleted()
        kept = jnp.arange(6.0)
        engine.register(line())(kept)
        assert not kept.is_deleted()


def test_bad_registrations(x):
    with Engine() as engine:
        with pytest.raises(
            TypeError, match=r"takes a Graph, which BlockBuilder.commit"
        ):
            engine.register(line)
        with pytest.raises(ValueError, match="donate names 'Z'; the inputs of graph"):
            engine.register(line(), donate=("Z",))
        block = engine.register(line())
        with pytest.raises(TypeError, match=r"'Slope' is a parameter: set\(Slope=…\)"):
            block(x, Slope=3.0)
        with pytest.raises(TypeError, match="input 'X' is missing"):
            block()


def test_a_closed_engine_keeps_nothing(x):
    engine = Engine()
    graph = line()
    gone = weakref.ref(graph)
    engine.register(graph)(x)
    del graph
    engine.close()
    gc.collect()
    assert gone() is None


def test_a_graph_and_a_block_compute_the_same():
    """Also where a number of Python would be of another type than an array is."""
    small = jnp.arange(4, dtype=jnp.bfloat16)
    builder = BlockBuilder("Times")
    node = builder.add_captured(
        lambda x, a: a * x, inputs=("x",), outputs=("y",), scalars={"a": 2.0}, name="f"
    )
    builder.input("X", node.in_("x"))
    builder.input_scalar("A", node.scalar("a"))
    builder.output("Y", node.out("y"))
    graph = builder.commit()
    with Engine() as engine:
        block = engine.register(graph)
        for given in (small, jnp.arange(4)):
            made, alone = block(given)["Y"], graph(given)["Y"]
            assert made.dtype == alone.dtype == jnp.float32
        rebuilds = engine.cold_rebuilds
        block.set(A=jnp.asarray(3.0))  # weakly typed
        np.testing.assert_array_equal(block(small)["Y"], 3 * small.astype("float32"))
        assert engine.cold_rebuilds == rebuilds
    np.testing.assert_array_equal(jax.jit(graph)(small, A=3)["Y"], [0, 3, 6, 9])
    with pytest.raises(TypeError, match=r"'A' must be a number or float32\[\], got"):
        graph(small, A=np.ones(4))


def test_a_failed_trace_is_no_rebuild(x):
    with Engine() as engine:
        block = engine.register(line())
        for _ in range(3):
            with pytest.raises(TypeError):
                block(jnp.ones(3, jnp.int32))
        assert (engine.cold_rebuilds, engine.launches) == (0, 0)


def test_values_are_set_together_or_not_at_all(x):
    with Engine() as engine:
        block = engine.register(line())
        with pytest.raises(TypeError, match="'Offset' must be a number"):
            block.set(Slope=9.0, Offset="bad")
        assert block.parameters["Slope"].value == 2.0


def test_a_port_may_have_any_name(x):
    builder = BlockBuilder("Names")
    node = builder.add_captured(jnp.sin, inputs=("x",), outputs=("y",))
    builder.input("self", node.in_("x"))
    builder.output("the output", node.out("y"))
    with Engine() as engine:
        made = engine.register(builder.commit())(self=x)
    np.testing.assert_array_equal(made["the output"], jnp.sin(x))


def test_the_average_of_times(x, monkeypatch):
    ticks = iter([0, 9, 10, 11, 20, 23, 30, 35])
    with Engine(timed=True) as engine:
        block = engine.register(line())
        monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
        for _ in range(4):
            block(x)
        monkeypatch.undo()
    assert (block.debug_info.last_time, block.debug_info.average_time) == (5, 3)


def test_minus_zero_is_a_new_value():
    builder = BlockBuilder("Sign")
    node = builder.add_captured(
        lambda x, a: jnp.copysign(x, a),
        inputs=("x",),
        outputs=("y",),
        scalars={"a": 0.0},
    )
    builder.input("X", node.in_("x"))
    builder.input_scalar("A", node.scalar("a"))
    builder.output("Y", node.out("y"))
    with Engine() as engine:
        block = engine.register(builder.commit())
        assert block(jnp.ones(1))["Y"] == 1
        block.set(A=-0.0)
        assert block(jnp.ones(1))["Y"] == -1
        assert (engine.cold_rebuilds, engine.hot_updates) == (1, 1)
