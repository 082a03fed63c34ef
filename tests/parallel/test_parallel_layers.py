"""Attention layers by patterns: as dense attention says, on one device and on four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check
from parallel_layers import HEADS, WIDTH, four, square
from test_strategy import collectives, trace

from jax_kvblock import flash_attention
from jax_kvblock.parallel import (
    Attention,
    AttentionConfig,
    AttentionPatterns,
    ContextParallelAttention,
    RingAttentionLayer,
    context_parallel_attention,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
    layers,
    to_zigzag,
)
from jax_kvblock.parallel.sequence import LAYOUTS
from jax_kvblock.parallel.strategy import STRATEGIES
from jax_kvblock.sparse import create_sparse_attention

pytestmark = pytest.mark.usefixtures("four_cpus")


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 32, WIDTH)), jnp.float32)


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
    mesh = four() if config.is_parallel else None
    layer = create_attention(config, mesh, key=jax.random.key(3))
    assert type(layer) is KINDS.get(config.pattern, Attention)
    mask = MASK if masked else None
    got = jit(lambda layer, x: layer(x, mask))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x, mask), rtol=0, atol=2e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "ring"])
def test_determinism_is_handed_on(x, name, deterministic):
    config = AttentionConfig(WIDTH, HEADS, deterministic=deterministic, **CONFIGS[name])
    layer = create_attention(config, four() if config.is_parallel else None)
    text = str(jax.make_jaxpr(jax.grad(lambda layer: layer(x).sum()))(layer))
    assert f"deterministic={deterministic}" in text
    assert f"deterministic={not deterministic}" not in text


def test_a_layer_outside_of_jit_compiles_once(x):
    """A `shard_map` alone would do so in each call, for seconds."""
    layer = create_ring_attention(WIDTH, HEADS, device=four())
    before = layers._attend_over._cache_size()
    for scale in (1.0, 2.0):
        got = layer(scale * x)
        np.testing.assert_allclose(
            got, by_definition(layer, scale * x), rtol=0, atol=1e-5 * scale
        )
    assert layers._attend_over._cache_size() == before + 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_under_plain_jit(x, axis_type):
    """Batch, sequence and heads cut; the result is cut as it came."""
    mesh = square("data", "context", axis_types=(axis_type,) * 2)
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


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_heads_cut_too(x, axis_type, rate):
    """With gradients, and a mask; beside the same layer on one device."""
    mesh = square("heads", "context", axis_types=(axis_type,) * 2)
    config = AttentionConfig(
        *(WIDTH, HEADS), pattern=AttentionPatterns.RING, causal=True,
        head_axis="heads", dropout=rate,
    )  # fmt: skip
    layer = create_attention(config, mesh)
    config = AttentionConfig(
        WIDTH, HEADS, pattern=AttentionPatterns.CAUSAL, dropout=rate
    )
    alone = (jnp.asarray(np.asarray(w)) for w in (layer.qkv, layer.out))
    seed = jax.random.key(1) if rate else None

    def out_and_slopes(layer: Any, x: Any) -> Any:
        def loss(layer: Any, x: Any) -> Any:
            out = layer(x, MASK, seed)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    want = jit(out_and_slopes)(Attention(*alone, config), x)
    put = jax.device_put(x, NamedSharding(mesh, P(None, "context")))
    with jax.set_mesh(mesh):
        got = jit(out_and_slopes)(layer, put)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bar = 2e-6 * (1 + np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bar)


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


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy(x, strategy, layout, masked):
    options = {"causal": True, "layout": layout, "strategy": strategy}
    layer = create_context_parallel_attention(WIDTH, HEADS, 4, four(), **options)
    mask = MASK if masked else None
    lay = (lambda a: to_zigzag(a, 4)) if layout == "zigzag" else jnp.asarray
    given = None if mask is None else lay(mask)
    got = jit(lambda layer, x: layer(x, given))(layer, lay(x))
    want = lay(by_definition(layer, x, mask))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def sent_by(layer: Any, x: Any) -> Any:
    """Among how many devices, and of which shapes, a layer's attention sends."""
    return collectives(jax.make_jaxpr(lambda layer, x: layer(x))(layer, x).jaxpr)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])  # but "auto"
def test_each_strategy_sends_as_the_function_does(x, strategy):
    options = {"causal": True, "layout": "zigzag", "dtype": jnp.bfloat16}
    dims = (2, 8, 8, HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    want = trace(strategy, dims, causal=True)
    layer = create_context_parallel_attention(
        WIDTH, HEADS, 4, four(), strategy=strategy, **options
    )
    assert want and sent_by(layer, x) == want
    others = [trace(s, dims, causal=True) for s in STRATEGIES[1:] if s != strategy]
    assert want not in others


@pytest.mark.parametrize("strategy", ["auto", "ring"])
def test_a_ring_is_a_ring(x, strategy):
    """By any of the functions that make layers."""
    options = {"causal": True, "strategy": strategy, "dtype": jnp.bfloat16}
    dims = (2, 8, 8, HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    want = trace("ring", dims, causal=True, layout="contiguous")
    config = AttentionConfig(WIDTH, HEADS, pattern=AttentionPatterns.RING, **options)
    for layer in (
        create_ring_attention(WIDTH, HEADS, device=four(), **options),
        create_attention(config, four()),
        create_context_parallel_attention(config, 4, four()),
    ):
        assert sent_by(layer, x) == want


@pytest.mark.parametrize("name", ["full", "context parallel"])
def test_softcap_and_scale_are_handed_on(x, name):
    options = CONFIGS[name] | {"window": None, "softcap": 0.1, "scale": 3.0}
    config = AttentionConfig(WIDTH, HEADS, **options)
    layer = create_attention(config, four() if config.is_parallel else None)
    n, k, d = HEADS, config.kv_heads, config.head_dim
    q, keys, values = np.split((x @ layer.qkv).reshape(2, 32, -1, d), [n, n + k], 2)
    attended = flash_attention(
        *map(jnp.asarray, (q, keys, values)),
        causal=config.is_causal, softcap=0.1, scale=3.0,
    )  # fmt: skip
    want = attended.reshape(2, 32, WIDTH) @ layer.out
    got = jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["full", "context parallel"])
def test_who_serves_is_handed_on(x, name):
    config = AttentionConfig(WIDTH, HEADS, implementation="xla", **CONFIGS[name])
    layer = create_attention(config, four() if config.is_parallel else None)
    text = str(jax.make_jaxpr(lambda layer: layer(x))(layer))
    assert "implementation='xla'" in text or "implementation=xla" in text
    assert "implementation=None" not in text


def test_compiler_options_are_handed_on(x):
    """Keys and values are sent one by one then, and else as one array."""
    counts = []
    for tuned in (False, True):
        layer = create_ring_attention(
            WIDTH, HEADS, device=four(), compiler_options=tuned
        )
        counts.append(sum(sent_by(layer, x).values()))
    assert counts == [3, 6]


def test_zigzag_over_a_head_axis_with_a_mask(x):
    config = AttentionConfig(
        WIDTH, HEADS, 2, AttentionPatterns.RING, causal=True, layout="zigzag",
        head_axis="heads",
    )  # fmt: skip
    layer = create_attention(config, square("heads", "context"))
    got = jit(lambda layer, x: layer(x, to_zigzag(MASK, 2)))(layer, to_zigzag(x, 2))
    want = to_zigzag(by_definition(layer, x, MASK), 2)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("length", [1, 7, 32])
def test_zigzag_on_one_device_has_any_length(x, length):
    """Its order is that of the sequence."""
    layer = create_ring_attention(
        WIDTH, HEADS, device=four()[1], causal=True, layout="zigzag"
    )
    x, mask = x[:, :length], MASK[:, :length]
    got = jit(lambda layer, x: layer(x, mask))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x, mask), rtol=0, atol=2e-6)


@pytest.mark.parametrize("axis_name", [("a", "b"), ["a", "b"], ("b",)])
def test_several_axes(x, axis_name):
    """Sequences are cut over all of them together."""
    options = {"causal": True, "axis_name": axis_name}
    layer = create_ring_attention(WIDTH, HEADS, device=square("a", "b"), **options)
    assert hash(layer.config) == hash(layer.config)
    got = jit(lambda layer, x: layer(x, MASK))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x, MASK), rtol=0, atol=2e-6)
    size = 2 ** len(axis_name)
    same = create_context_parallel_attention(
        layer.config, size, device_mesh=square("a", "b")
    )
    assert same.config.axis_name == tuple(axis_name)


def test_several_axes_of_the_batch(x):
    mesh = Mesh(np.array(four()).reshape(2, 1, 2), ("a", "b", "context"))
    layer = create_ring_attention(WIDTH, HEADS, device=mesh, batch_axis=("a", "b"))
    got = jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x), rtol=0, atol=2e-6)


def test_a_line_of_devices_along_a_tuple_of_one(x):
    layer = create_ring_attention(WIDTH, HEADS, device=four()[:2], axis_name=("c",))
    assert layer.mesh is not None
    assert dict(layer.mesh.shape) == {"c": 2}
    got = jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, by_definition(layer, x), rtol=0, atol=2e-6)


def test_a_causal_config_stays_causal(x):
    """Where the pattern is another, what it says of the mask is kept."""
    for name in ("causal", "window"):
        config = AttentionConfig(WIDTH, HEADS, **CONFIGS[name])
        layer = create_context_parallel_attention(config, 4, four())
        assert layer.config.is_causal
        got = jit(lambda layer, x: layer(x))(layer, x)
        one = Attention(layer.qkv, layer.out, config)
        np.testing.assert_allclose(got, by_definition(one, x), rtol=0, atol=2e-6)


def test_both_ways_to_say_it():
    config = AttentionConfig(WIDTH, HEADS, causal=True)
    mesh = Mesh(np.array(four()), ("context",))
    by_config = create_context_parallel_attention(config, 4, mesh)
    by_names = create_context_parallel_attention(WIDTH, HEADS, 4, mesh, causal=True)
    assert by_config.config == by_names.config
    assert by_config.mesh == by_names.mesh == mesh
    by_keyword = create_context_parallel_attention(config, 4, device_mesh=mesh)
    assert by_keyword.mesh == mesh
    by_names = create_context_parallel_attention(
        config, context_parallel_size=4, device_mesh=mesh
    )
    assert (by_names.config, by_names.mesh) == (by_config.config, mesh)
    np.testing.assert_array_equal(by_config.qkv, by_names.qkv)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="one device of the default kind")
def test_without_a_mesh_it_is_of_the_first_devices():
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


class Foreign:
    """A tensor of another library: all that it has is DLPack."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


FORMS = {
    "uncommitted": lambda x: x,
    "NumPy": np.asarray,
    "a list": lambda x: np.asarray(x).tolist(),
    "a tensor": lambda x: Foreign(np.array(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_anywhere_goes_to_the_mesh(x, form):
    layer = create_ring_attention(WIDTH, HEADS, device=four()[2:], causal=True)
    got = layer(FORMS[form](x), FORMS[form](MASK))
    np.testing.assert_allclose(got, by_definition(layer, x, MASK), rtol=0, atol=2e-6)


def another_order() -> NamedSharding:
    return NamedSharding(Mesh(np.array(four()[1::-1]), ("c",)), P(None, "c"))


# Where the layer of `test_other_devices` is not.
ELSEWHERE = {
    "one device": lambda: four()[3],
    "one of the mesh's": lambda: four()[0],
    "another mesh": lambda: NamedSharding(square("a", "b"), P()),
    "another order": another_order,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_devices(x, name):
    """Refused where JAX would; a constant of a program may lie anywhere."""
    layer = create_ring_attention(WIDTH, HEADS, device=four()[:2])
    there = jax.device_put(x, ELSEWHERE[name]())
    first, second, *_ = map(str, four())
    fix = "NamedSharding(layer.mesh, PartitionSpec(None, 'context'))) moves it"

    def words(argument, got):
        lies = "|".join(map(str, got.devices()))
        must = f"{argument} must lie on the devices of the layer's mesh, in its order, "
        return f"{must}{first}, {second}, got |{lies}|jax.device_put({argument}, {fix}"

    where = "RingAttentionLayer"
    check(where, ValueError, words("hidden_states", there), lambda: layer(there))
    loss = lambda layer: jnp.sum(layer(there))  # noqa: E731
    check(
        where, ValueError, words("hidden_states", there), lambda: jax.grad(loss)(layer)
    )
    mask = jax.device_put(MASK, ELSEWHERE[name]())
    check(where, ValueError, words("attention_mask", mask), lambda: layer(x, mask))
    got = jit(lambda layer: layer(there, mask))(layer)
    np.testing.assert_allclose(got, by_definition(layer, x, MASK), rtol=0, atol=2e-6)
    moved = jax.device_put(there, NamedSharding(layer.mesh, P(None, "context")))
    got = jit(lambda layer, x: layer(x))(layer, moved)
    np.testing.assert_allclose(got, by_definition(layer, x), rtol=0, atol=2e-6)


HEADING = "Received incompatible devices for jitted computation"


def test_the_docs_have_a_heading_for_other_devices():
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert page.read_text().count(f"\n### `{HEADING}`\n") == 1


LIES_ON = {"one device": [3], "one of the mesh's": [0], "another mesh": [0, 1, 2, 3],
           "another order": [1, 0]}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_devices_under_jit(x, name):
    """There JAX refuses them, and outside of it where no layer is. It names the
    argument and both sets of devices.
    """
    layer = create_ring_attention(WIDTH, HEADS, device=four()[:2])
    how = {"axis_name": "context", "strategy": "ring"}
    rows = P(None, "context")
    over = jax.shard_map(
        lambda q: context_parallel_attention(q, q, q, **how),
        mesh=layer.mesh, in_specs=rows, out_specs=rows,
    )  # fmt: skip
    there = jax.device_put(x, ELSEWHERE[name]())
    heads = jax.device_put(x.reshape(2, 32, HEADS, -1), ELSEWHERE[name]())
    calls = {
        "argument x": lambda: jax.jit(lambda x: layer(x))(there),
        "argument layer.qkv|argument x": lambda: jax.jit(lambda layer, x: layer(x))(
            layer, there
        ),
        "argument q": lambda: jax.jit(lambda q: over(q))(heads),
        "argument": lambda: over(heads),
    }
    sets = [[four()[i].id for i in numbers] for numbers in ([0, 1], LIES_ON[name])]
    for arguments, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(HEADING)
        for word in (*arguments.split("|"), *map(str, sets)):
            assert word in message, message


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_layers_themselves_can_be_wrapped(x, wrap):
    """What JAX is given it hashes; a layer is itself and no other."""
    for layer in (
        create_attention(AttentionConfig(WIDTH, HEADS)),
        create_ring_attention(WIDTH, HEADS, device=four()),
        create_sparse_attention(WIDTH, HEADS),
    ):
        np.testing.assert_allclose(wrap(layer)(x), layer(x), rtol=1e-5, atol=1e-5)
        assert layer == layer and jax.tree.map(lambda leaf: leaf, layer) != layer


def test_numbers_in_a_config_can_be_hashed():
    config = AttentionConfig(
        WIDTH, HEADS, scale=jnp.float32(0.5), softcap=np.float32(2), dtype="bfloat16"
    )  # fmt: skip
    assert (config.scale, config.softcap) == (0.5, 2.0)
    assert hash(config) == hash(config)
    assert create_attention(config).qkv.dtype == jnp.bfloat16
