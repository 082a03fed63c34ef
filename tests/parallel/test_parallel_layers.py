"""Attention layers by patterns: as dense attention says, on one device and on four."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.parallel import (
    Attention,
    AttentionConfig,
    AttentionPatterns,
    ContextParallelAttention,
    RingAttentionLayer,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
    to_zigzag,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

WIDTH, HEADS = 32, 4


def by_definition(layer, x, mask=None):
    """In NumPy float64, head by head."""
    config = layer.config
    n, k, d = config.num_heads, config.kv_heads, config.head_dim
    wide = np.asarray(x, np.float64) @ np.asarray(layer.qkv, np.float64)
    wide = wide.reshape(*x.shape[:2], n + 2 * k, d)
    q, keys, values = np.split(wide, (n, n + k), axis=2)
    keys, values = (np.repeat(a, n // k, axis=2) for a in (keys, values))
    scores = np.einsum("btnd,bsnd->bnts", q, keys) / np.sqrt(d)
    i, j = np.indices(scores.shape[-2:])
    seen = np.ones(scores.shape, bool)
    if config.is_causal:
        seen &= j <= i
    if config.window is not None:
        seen &= j >= i - config.window
    if mask is not None:
        seen &= np.asarray(mask, bool)[:, None, None, :]
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    o = np.einsum("bnts,bsnd->btnd", p, values).reshape(*x.shape[:2], n * d)
    return o @ np.asarray(layer.out, np.float64)


def four() -> list[jax.Device]:
    return jax.devices("cpu")[:4]


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 32, WIDTH)), jnp.float32)


MASK = np.ones((2, 32), np.int32)
MASK[0, 27:] = MASK[1, :5] = 0
CONFIGS = {
    "full": {"pattern": AttentionPatterns.FULL},
    "causal": {"pattern": AttentionPatterns.CAUSAL, "num_kv_heads": 2},
    "window": {"pattern": AttentionPatterns.SLIDING_WINDOW, "window": 5},
    "ring": {"pattern": AttentionPatterns.RING},
    "causal ring": {"pattern": AttentionPatterns.RING, "causal": True},
    "context parallel": {
        "pattern": AttentionPatterns.CONTEXT_PARALLEL,
        "causal": True,
        "window": 9,
        "num_kv_heads": 1,
    },
}
KINDS = {
    AttentionPatterns.RING: RingAttentionLayer,
    AttentionPatterns.CONTEXT_PARALLEL: ContextParallelAttention,
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_pattern(x, name, masked):
    config = AttentionConfig(WIDTH, HEADS, **CONFIGS[name])
    layer = create_attention(config, four(), key=jax.random.key(3))
    assert type(layer) is KINDS.get(config.pattern, Attention)
    mask = MASK if masked else None
    got = jit(lambda layer, x: layer(x, mask))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x, mask), rtol=0, atol=2e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_under_plain_jit(x, axis_type):
    """Batch, sequence and heads cut; the result is cut as it came."""
    devices = np.array(four()).reshape(2, 2)
    mesh = Mesh(devices, ("data", "context"), axis_types=(axis_type,) * 2)
    config = AttentionConfig(
        WIDTH, HEADS, pattern=AttentionPatterns.RING, causal=True, batch_axis="data"
    )
    layer = create_attention(config, mesh)
    place = NamedSharding(mesh, P("data", "context"))
    put = jax.device_put(x, place)
    with jax.set_mesh(mesh):
        got = jit(lambda layer, x: layer(x))(layer, put)
    assert got.sharding.is_equivalent_to(place, 3)
    np.testing.assert_allclose(got, by_definition(layer, x), rtol=0, atol=2e-6)


def test_heads_cut_too(x):
    mesh = Mesh(np.array(four()).reshape(2, 2), ("heads", "context"))
    config = AttentionConfig(
        WIDTH, HEADS, pattern=AttentionPatterns.RING, causal=True, head_axis="heads"
    )
    layer = create_attention(config, mesh)
    got = jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x), rtol=0, atol=2e-6)


def test_gradients_of_the_weights(x):
    """Beside the same layer on one device."""
    ring = create_ring_attention(WIDTH, HEADS, device=four(), causal=True)
    config = AttentionConfig(WIDTH, HEADS, pattern=AttentionPatterns.CAUSAL)
    one = Attention(ring.qkv, ring.out, config)
    loss = lambda layer: jnp.sum(jnp.sin(layer(x)))  # noqa: E731
    got, want = (jit(jax.grad(loss))(layer) for layer in (ring, one))
    for name in ("qkv", "out"):
        np.testing.assert_allclose(
            getattr(got, name), getattr(want, name), rtol=0, atol=2e-5
        )


def test_zigzag_goes_in_and_comes_out(x):
    options = {"causal": True, "layout": "zigzag"}
    layer = create_context_parallel_attention(WIDTH, HEADS, 4, four(), **options)
    got = jit(lambda layer, x: layer(x))(layer, to_zigzag(x, 4))
    want = to_zigzag(by_definition(layer, x), 4)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_both_ways_to_say_it():
    config = AttentionConfig(WIDTH, HEADS, causal=True)
    mesh = Mesh(np.array(four()), ("context",))
    by_config = create_context_parallel_attention(config, 4, mesh)
    by_names = create_context_parallel_attention(WIDTH, HEADS, 4, mesh, causal=True)
    assert by_config.config == by_names.config
    assert by_config.mesh == by_names.mesh == mesh
    np.testing.assert_array_equal(by_config.qkv, by_names.qkv)
    two = create_context_parallel_attention(WIDTH, HEADS, context_parallel_size=2)
    assert two.mesh is not None
    assert two.mesh.size == 2


def test_one_device(x):
    layer = create_ring_attention(WIDTH, HEADS, device=four()[0])
    assert layer.mesh is not None
    assert layer.mesh.size == 1
    np.testing.assert_allclose(layer(x), by_definition(layer, x), rtol=0, atol=2e-6)


def test_a_row_that_sees_no_key_gives_zeros(x):
    mask = np.zeros((2, 32), bool)
    mask[1] = True
    layer = create_ring_attention(WIDTH, HEADS, device=four())
    got = layer(x, mask)
    np.testing.assert_array_equal(got[0], np.zeros((32, WIDTH)))
    np.testing.assert_allclose(got[1], by_definition(layer, x)[1], rtol=0, atol=2e-6)


def config(**options):
    return lambda: AttentionConfig(**{"d_model": WIDTH, "num_heads": HEADS} | options)


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
