"""Attention layers over devices: what they refuse, and in which words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from messages import Table, check, check_row, f32
from parallel_layers import HEADS, WIDTH, four, square

from jax_kvblock.core.spmd import reshard
from jax_kvblock.parallel import (
    AttentionConfig,
    AttentionPatterns,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
)

pytestmark = pytest.mark.usefixtures("four_cpus")


def config(**options):
    return lambda: AttentionConfig(**{"d_model": WIDTH, "num_heads": HEADS} | options)


def ring(device=lambda: None, **options):
    return lambda: create_ring_attention(WIDTH, HEADS, device=device(), **options)


def call(shape=(2, 32, WIDTH), mask=None, **options):
    def run():
        layer = create_ring_attention(WIDTH, HEADS, device=four(), **options)
        return layer(jnp.ones(shape), mask)

    return run


WRONG = {
    "heads that do not divide": (
        config(num_heads=5), ValueError, "d_model must be a multiple of num_heads"),
    "in ring attention": (
        lambda: create_ring_attention(512, 7), ValueError, "got 512 and 7"),
    "a head dim of no multiple of 8": (
        lambda: create_ring_attention(36, 6), ValueError,
        "^AttentionConfig: d_model / num_heads.* multiple of 8 from 8 to 256, got "
        "36 / 6 = 6; make the layer with another d_model or other num_heads$"),
    "a head dim that is too large": (
        config(d_model=264, num_heads=1), ValueError, "got 264 / 1 = 264"),
    "key heads that do not divide": (
        config(num_kv_heads=3), ValueError, "num_kv_heads must divide num_heads, 4"),
    "no pattern": (config(pattern="ring"), TypeError, "AttentionPatterns.RING"),
    "no window": (
        config(pattern=AttentionPatterns.SLIDING_WINDOW), ValueError, "needs a window"),
    "no strategy": (config(strategy="star"), ValueError, "strategy must be"),
    "no layout": (config(layout="striped"), ValueError, "layout must be"),
    "no heads": (config(num_heads=0), ValueError, "num_heads"),
    "no config": (
        lambda: create_attention(512), TypeError, "must be an AttentionConfig"),  # type: ignore[arg-type]
    "an axis that is not there": (
        lambda: create_ring_attention(
            WIDTH, HEADS, device=Mesh(np.array(four()), ("rows",))
        ), ValueError, "the axis 'context', got \\('rows',\\)"),
    "more devices than there are": (
        lambda: create_context_parallel_attention(WIDTH, HEADS, 64),
        ValueError, "context_parallel_size must be at most"),
    "a mesh of another size": (
        lambda: create_context_parallel_attention(
            WIDTH, HEADS, 2, Mesh(np.array(four()), ("context",))
        ), ValueError, "axis 'context', 4, got 2"),
    "another width": (call((2, 32, 8)), ValueError, "\\[B, S, 32\\], got"),
    "no batch": (call((32, WIDTH)), ValueError, "x\\[None\\]"),
    "too long": (call(max_sequence_length=31), ValueError, "max_sequence_length = 31"),
    "a length that does not divide": (
        call((2, 30, WIDTH)), ValueError, "multiple of 4 long.*got 30.*pad_sequence"),
    "of a zigzag": (
        call((2, 36, WIDTH), layout="zigzag"), ValueError, "multiple of 8 long"),
    "dropout, and a length of no blocks": (
        lambda: create_ring_attention(
            WIDTH, HEADS, device=four(), dropout=0.1, layout="zigzag"
        )(jnp.ones((2, 32, WIDTH)), dropout_seed=1), ValueError,
        "^RingAttentionLayer: sequences must be a multiple of 128 long with dropout, "
        "got 32; pad hidden_states with zeros behind the sequence by jnp.pad .in "
        "zigzag before to_zigzag., and pass an attention_mask of them$"),
    "a degree of no strategy": (
        lambda: create_ring_attention(64, 8, ulysses_degree=2), ValueError,
        "^AttentionConfig: ulysses_degree is of strategy='ulysses_ring', got it with "
        "'auto'; pass that strategy, or leave it out$"),
    "a mask of queries and keys": (
        call(mask=np.ones((2, 32, 32), bool)), ValueError, "attention_mask must be"),
    "a mask of floats": (
        call(mask=np.ones((2, 32))), TypeError, "bools or integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    run, kind, says = WRONG[name]
    with pytest.raises(kind, match=says):
        run()


CALLS, MAKES = Table(), Table()


def cut(mesh, shape=(2, 32, WIDTH), heads=HEADS, kv_heads=None, **options):
    """A layer's call over a mesh of two axes or three, from shapes alone."""
    pattern = AttentionPatterns.CONTEXT_PARALLEL

    def run(x):
        config = AttentionConfig(
            8 * heads, heads, kv_heads, pattern, max_sequence_length=64, **options
        )
        return create_attention(config, mesh())(x)

    return run, [f32(*shape[:2], 8 * heads)]


LAYER = "ContextParallelAttention"


for label, (run, shapes), words in (
    (
        "heads", cut(lambda: square("h", "context"), heads=3, head_axis="h"),
        "num_heads must be a multiple of the 2 devices of head_axis 'h', got 3; make",
    ),
    (
        "KV heads",
        cut(lambda: square("h", "context"), kv_heads=1, head_axis="h"),
        "num_kv_heads must be a multiple of the 2 devices of head_axis 'h', got 1; ",
    ),
    (
        "batch",
        cut(lambda: square("b", "context"), (3, 32), batch_axis="b"),
        "hidden_states must have a batch that is a multiple of the 2 devices of "
        "batch_axis 'b', got float32[3, 32, 32]; pad the batch",
    ),
    (
        "length over two axes",
        cut(lambda: square("a", "b"), (2, 30), axis_name=("a", "b")),
        "sequences must be a multiple of 4 long, to be cut evenly, got 30; pad",
    ),
    (
        "length of a zigzag over two axes",
        cut(lambda: square("a", "b"), (2, 36), axis_name=("a", "b"), layout="zigzag"),
        "sequences must be a multiple of 8 long, to be cut evenly, got 36; pad",
    ),
):  # fmt: skip
    CALLS.value(LAYER, label, run, shapes, words)


@pytest.mark.parametrize("bad", CALLS, ids=str)
def test_what_the_mesh_does_not_cut(bad):
    check_row(bad)


def whole(mesh=None, pattern=AttentionPatterns.CAUSAL, **options):
    return lambda: create_attention(
        AttentionConfig(WIDTH, HEADS, pattern=pattern, **options), mesh and mesh()
    )


RING, CONFIG, CREATE = "create_ring_attention", "AttentionConfig", "create_attention"
OVER = "create_context_parallel_attention"
DEVICES = "must be a jax.sharding.Mesh, a jax.Device or a sequence of devices, got "


for where, label, call_, words in (
    (RING, "device of an int", ring(lambda: 5), f"device {DEVICES}5; pass jax.devices"),
    (RING, "device of text", ring(lambda: "cpu"), f"device {DEVICES}'cpu'; "),
    (RING, "devices that are none", ring(lambda: [0, 1]), f"device {DEVICES}[0, 1]; "),
    (
        RING, "devices in two rows", ring(lambda: np.array([[0], [1]])),
        f"device {DEVICES}array(",
    ),
    (
        CREATE, "mesh of an int",
        lambda: create_attention(
            AttentionConfig(WIDTH, HEADS, pattern=AttentionPatterns.RING), 5  # type: ignore[arg-type]
        ),
        f"mesh {DEVICES}5; ",
    ),
    (
        OVER, "device_mesh of an int",
        lambda: create_context_parallel_attention(WIDTH, HEADS, 2, 5),  # type: ignore[arg-type]
        f"device_mesh {DEVICES}5; ",
    ),
    (CONFIG, "axis of an int", config(axis_name=0), "axis_name must be a mesh axis or"),
    (CONFIG, "no axis", config(axis_name=()), "a tuple of them, got (); pass a name"),
    (CONFIG, "axis None", config(axis_name=None), "axis_name must be|got None; pass"),
    (CONFIG, "a dict", config(batch_axis={}), "batch_axis must be|got {}; pass a name"),
    (CONFIG, "causal", config(causal=1), "causal must be True or False, got 1; "),
    (CONFIG, "scale", config(scale="x"), "scale must be a number, got 'x'; pass a"),
    (CONFIG, "softcap", config(softcap="2"), "softcap must be a number, got '2'; pass"),
    (CONFIG, "dtype", config(dtype="x"), "dtype must be a dtype, like|got 'x'"),
    *(
        (
            CONFIG, name, config(dtype=name),
            f"dtype must be bfloat16, float16 or float32, got {name}; what goes in",
        )
        for name in ("int32", "float64", "float8_e4m3fn", "float8_e5m2", "bool")
    ),
):  # fmt: skip
    MAKES.kind(where, label, call_, [], words)


for where, label, call_, words in (
    (
        CONFIG, "a ring by heads", ring(strategy="ulysses"),
        "strategy must be 'ring' or 'auto' with pattern RING, got 'ulysses'; "
        "create_context_parallel_attention, or pattern CONTEXT_PARALLEL, serves it",
    ),
    (CONFIG, "softcap 0", config(softcap=0), "softcap must be positive, got 0; pass"),
    (CONFIG, "scale inf", config(scale=np.inf), "scale must be finite in float32, got"),
    (
        CONFIG, "implementation", config(implementation="best"),
        "implementation must be one of None, |got 'best'",
    ),
    (
        CONFIG, "an axis twice", config(axis_name=("a", "b"), head_axis="b"),
        "head_axis must be another mesh axis than axis_name, got 'b' for both; an axis",
    ),
    (
        CREATE, "devices that are left out", whole(four),
        "mesh must be left out with pattern CAUSAL, which cuts no sequence, got a list"
        "; pattern CONTEXT_PARALLEL, with causal=True, serves it",
    ),
    (
        CREATE, "a mesh that is left out",
        whole(lambda: square("a", "b"), AttentionPatterns.FULL),
        "mesh must be left out with pattern FULL|got a Mesh; pattern CONTEXT_PARALLEL "
        "serves it",
    ),
    (
        CREATE, "a strategy without a mesh", whole(strategy="ring"),
        "strategy must be left out with pattern CAUSAL|got 'ring'; pattern CONTEXT",
    ),
    (
        CREATE, "zigzag without a mesh", whole(layout="zigzag"),
        "layout must be left out with pattern CAUSAL|got 'zigzag'; ",
    ),
    (
        CREATE, "a batch axis without a mesh", whole(batch_axis="data"),
        "batch_axis must be left out with pattern CAUSAL|got 'data'|jit's shardings",
    ),
    (
        RING, "one axis of two", ring(
            lambda: Mesh(np.array(four()), ("a",)), axis_name=("a", "b")
        ),
        "device must have the axis 'b', got ('a',); pass a jax.sharding.Mesh that has "
        "it, or name another in axis_name=",
    ),
    (
        RING, "axes against the mesh's order",
        ring(lambda: square("a", "b"), axis_name=("b", "a")),
        "axis_name must name axes in the order of the mesh's, ('a', 'b'), got "
        "('b', 'a'); pass axis_name=('a', 'b')",
    ),
    (
        RING, "a batch axis of a line", ring(four, batch_axis="data"),
        "device must have the axis 'data', got ('context',)|another in batch_axis=",
    ),
    (
        RING, "a line along two axes", ring(four, axis_name=("a", "b")),
        "device must be a jax.sharding.Mesh where axis_name is several axes, "
        "('a', 'b'), got list; jax.make_mesh((2, 2), ('a', 'b'))",
    ),
    (RING, "no device", ring(list), "at least one device, and none twice, got []"),
    (RING, "a device twice", ring(lambda: four()[:1] * 2), "and none twice, got [|; "),
    (
        OVER, "two meshes",
        lambda: create_context_parallel_attention(  # type: ignore[call-overload]
            AttentionConfig(WIDTH, HEADS), 4, four(), device_mesh=four()
        ),
        "device_mesh must be given once, got two; behind a config come",
    ),
):  # fmt: skip
    MAKES.value(where, label, call_, [], words)


@pytest.mark.parametrize("bad", MAKES, ids=str)
def test_what_makes_no_layer(bad):
    check(bad.where, bad.error, bad.words, bad.call)


def test_arrays_are_cut_along_explicit_axes_alone():
    """Of an array's own mesh, or of one that is named; None stays."""
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = square("data", "context", axis_types=kinds)
    rows = P(("data", "context"), "context")

    def cut(given: Any) -> Any:
        got = reshard(jnp.ones((8, 8)), rows, mesh)
        assert jax.typeof(got).sharding.spec == P("data", None)
        own = reshard(got, P(None, "data"))
        assert jax.typeof(own).sharding.spec == P(None, "data")
        assert reshard(None, rows, mesh) is None
        return own + given

    with jax.set_mesh(mesh):
        jax.eval_shape(cut, 1.0)
    plain = jnp.ones((8, 8))
    assert reshard(plain, rows) is plain
    assert reshard(plain, rows, square("data", "context")) is plain
