"""Layers of flax: values, masks, dropout, levels, what GELU keeps, messages."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from flax import nnx
from messages import check

from jax_kvblock.layers import AttentionLayer, FusedGELU, OptimizedLinear

pytestmark = pytest.mark.usefixtures("exact_products")

WIDTH, HEADS, BATCH, LENGTH = 32, 4, 2, 24


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32)


def layer_of(**options):
    return AttentionLayer(WIDTH, HEADS, **options, rngs=nnx.Rngs(0))


def call(layer, *inputs, **options):
    """A call, compiled; `rngs` of the call are an operand."""
    definition, state = nnx.split(layer)
    return jit(lambda state, *inputs: nnx.merge(definition, state)(*inputs, **options))(
        state, *inputs
    )


def truth(layer, x, seen):
    """By definition, in NumPy's float64; seen: bools that broadcast to `[B, N, S, S]`.

    A row that sees nothing gives what the projection makes of zeros.
    """
    x, qkv, out = (np.float64(a) for a in (x, layer.qkv[...], layer.out[...]))
    n, k = layer.num_heads, layer.num_kv_heads
    bias = 0 if layer.qkv_bias is None else np.float64(layer.qkv_bias[...])
    wide = (x @ qkv + bias).reshape(*x.shape[:2], n + 2 * k, -1).transpose(0, 2, 1, 3)
    q, keys, values = np.split(wide, (n, n + k), axis=1)
    keys, values = (np.repeat(a, n // k, axis=1) for a in (keys, values))
    scores = q @ keys.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    seen = np.broadcast_to(seen, scores.shape)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total, total, 1)
    o = (weights @ values).transpose(0, 2, 1, 3).reshape(x.shape)
    bias = 0 if layer.out_bias is None else np.float64(layer.out_bias[...])
    return o @ out + bias


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "num_kv_heads": 2}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("mask", [None, "keys", "pairs"])
def test_the_layer_is_its_definition(rng, x, options, mask):
    layer = layer_of(**options)
    for bias in (layer.qkv_bias, layer.out_bias):
        if bias is not None:
            bias[...] = jnp.asarray(rng.standard_normal(bias.shape), jnp.float32)
    masks = {
        "keys": rng.random((BATCH, LENGTH)) < 0.7,
        "pairs": rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.1,
    }
    given = masks.get(mask)
    seen = np.ones((1, 1, 1, 1), bool) if given is None else given
    seen = seen if seen.ndim == 4 else seen[:, None, None]
    if layer.causal:
        seen = seen & np.tril(np.ones((LENGTH, LENGTH), bool))
    got = call(layer, x, given, deterministic=True)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, truth(layer, x, seen), rtol=0, atol=5e-6)


def test_two_axes_of_a_mask_are_keys():
    """Also where B is S; one of queries and keys has four."""
    layer, x = layer_of(), jnp.ones((4, 4, WIDTH))
    x += jnp.arange(16.0).reshape(4, 4, 1) % 5
    lower = np.tril(np.ones((4, 4), bool))
    got = call(layer, x, lower.astype(np.int32), deterministic=True)
    keys, pairs = lower[:, None, None], lower[None, None]
    np.testing.assert_allclose(got, truth(layer, x, keys), rtol=0, atol=5e-5)
    got = call(layer, x, pairs, deterministic=True)
    np.testing.assert_allclose(got, truth(layer, x, pairs), rtol=0, atol=5e-5)


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH)])
def test_nothing_gives_nothing(shape):
    for layer in (layer_of(dropout=0.0), layer_of(num_kv_heads=1, causal=True)):
        layer.eval()
        x = jnp.zeros(shape)
        assert layer(x).shape == shape
        assert jax.grad(lambda x, layer=layer: layer(x).sum())(x).shape == shape


def test_dropout_leaves_the_mean_and_follows_its_keys(x):
    layer = layer_of(dropout=0.5)
    kept = np.asarray(call(layer, x, deterministic=True))

    def of(key):
        return layer(x, rngs=jax.random.key(key))

    outs = np.asarray(jit(jax.vmap(of))(jnp.arange(400)))
    apart = outs.mean(0) - kept
    spread = outs.std(0) / 20  # of a mean of 400
    assert np.abs(outs - kept).max() > 0.1
    assert np.mean(np.abs(apart) < 3 * spread) > 0.98
    again = np.asarray(jit(of)(7))
    np.testing.assert_allclose(again, outs[7], rtol=0, atol=1e-5)
    # The layer's own stream moves on with each call, and stands still after eval().
    first, second = (np.asarray(layer(x)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    layer.eval()
    np.testing.assert_allclose(layer(x), kept, rtol=0, atol=1e-5)
    layer.train()
    assert np.abs(np.asarray(layer(x)) - kept).max() > 1e-3
    np.testing.assert_allclose(layer(x, deterministic=True), kept, rtol=0, atol=1e-5)
    quiet = nnx.view(layer, deterministic=True)
    np.testing.assert_allclose(quiet(x), kept, rtol=0, atol=1e-5)
    for rngs in (nnx.Rngs(dropout=3), nnx.Rngs(3)["dropout"]):
        assert np.abs(np.asarray(layer(x, rngs=rngs)) - kept).max() > 1e-3


def test_each_member_and_head_drops_others(x):
    layer = AttentionLayer(WIDTH, 2, 0.5, rngs=nnx.Rngs(0))
    half = layer.head_dim  # both heads have the same weights
    wide = layer.qkv[...].reshape(WIDTH, 3, 2, half)
    layer.qkv[...] = wide.at[:, :, 1].set(wide[:, :, 0]).reshape(WIDTH, -1)
    layer.out[...] = jnp.eye(WIDTH)  # and what comes out are the heads, side by side
    twice = jnp.stack([x[0], x[0]])
    kept = np.asarray(call(layer, twice, deterministic=True))
    dropped = np.asarray(call(layer, twice))
    for out, alike in ((kept, True), (dropped, False)):
        assert np.allclose(out[0], out[1], rtol=0, atol=1e-5) == alike
        heads = out[..., :half], out[..., half:]
        assert np.allclose(*heads, rtol=0, atol=1e-5) == alike


def test_no_rate_needs_no_keys(x):
    layer = AttentionLayer(WIDTH, HEADS, 0.0, rngs=nnx.Rngs(params=0))
    assert layer.rngs is None
    np.testing.assert_array_equal(layer(x), layer(x))


def test_the_layer_learns(x):
    layer = layer_of(causal=True)

    def loss(layer):
        return jnp.mean(layer(x) ** 2)

    before = loss(layer)
    slopes = nnx.grad(loss)(layer)
    flat = jax.tree.leaves(slopes)
    assert len(flat) == 4
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in flat)
    _, weights, rest = nnx.split(layer, nnx.Param, ...)
    stepped = jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes)
    nnx.update(layer, stepped)
    assert loss(layer) < before
    assert jax.tree.leaves(rest)  # the stream of dropout's keys is no weight


def test_half_precision(x):
    half = layer_of(dtype=jnp.bfloat16)
    assert half.qkv[...].dtype == jnp.float32
    out = call(half, x, deterministic=True)
    assert out.dtype == jnp.bfloat16
    want = call(layer_of(), x, deterministic=True)
    np.testing.assert_allclose(np.float32(out), want, rtol=0, atol=0.03)
    stored = layer_of(param_dtype="bfloat16")
    assert stored.out[...].dtype == jnp.bfloat16
    assert call(stored, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


# ---- linear --------------------------------------------------------------------------


def linear_of(level, **options):
    return OptimizedLinear(48, 16, True, level, **options, rngs=nnx.Rngs(0))


def test_the_default_level():
    assert OptimizedLinear(4, 4, rngs=nnx.Rngs(0)).optimization_level == "balanced"


@pytest.mark.parametrize("level", ["precise", "balanced", "fast"])
def test_levels_are_what_is_multiplied(rng, level):
    layer = linear_of(level)
    layer.bias[...] = jnp.asarray(rng.standard_normal(16), jnp.float32)
    x = jnp.asarray(rng.standard_normal((5, 3, 48)), jnp.float32)

    def loss(layer, x):
        return jnp.sum(layer(x) ** 2)

    with jax.default_matmul_precision(None):
        forward = str(jax.make_jaxpr(lambda x: layer(x))(x))
        both = str(jax.make_jaxpr(lambda layer, x: nnx.grad(loss)(layer, x))(layer, x))
    products = re.findall(r":(\w+)\[[^\n]*\] = dot_general\[(.*?)\]\s", both, re.S)
    assert len(products) >= 2 and "dot_general" in forward
    for dtype, words in products:
        assert dtype == ("bf16" if level == "fast" else "f32")
        assert ("HIGHEST" in words) == (level == "precise")
    out = call(layer, x)
    assert out.dtype == jnp.float32 and out.shape == (5, 3, 16)
    kernel, bias = np.float64(layer.kernel[...]), np.float64(layer.bias[...])
    apart = np.abs(np.float64(x) @ kernel + bias - np.float64(out)).max()
    # Rounding to 8 bits is seen where it is asked for, and nowhere else.
    assert 1e-4 < apart < 0.1 if level == "fast" else apart < 5e-6


@pytest.mark.parametrize("level", ["precise", "balanced", "fast"])
def test_16_bits_are_multiplied_as_they_are(rng, level):
    layer = linear_of(level, param_dtype=jnp.float16)
    x = jnp.asarray(rng.standard_normal((7, 48)), jnp.float16)
    got = np.asarray(call(layer, x))
    assert got.dtype == np.float16
    want = np.float64(x) @ np.float64(layer.kernel[...])
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_without_a_bias(rng):
    layer = OptimizedLinear(48, 16, False, rngs=nnx.Rngs(0))
    assert layer.bias is None
    assert not np.asarray(layer(jnp.zeros((2, 48)))).any()


# ---- GELU ----------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_is_its_definition_with_both_derivatives(approximate):
    layer = FusedGELU(approximate)
    x = np.linspace(-8, 8, 401)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(a / math.sqrt(2))) / 2 for a in x])
    atol = 1e-3 if approximate else 1e-6
    got = jit(layer)(jnp.float32(x))
    np.testing.assert_allclose(got, x * below, rtol=0, atol=atol)
    first = jax.vmap(jax.grad(layer))
    np.testing.assert_allclose(
        jit(first)(jnp.float32(x)), below + x * density, rtol=0, atol=3 * atol
    )
    second = jax.vmap(jax.grad(jax.grad(layer)))
    np.testing.assert_allclose(
        jit(second)(jnp.float32(x)), (2 - x**2) * density, rtol=0, atol=1e1 * atol
    )


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_keeps_its_input_alone_for_the_way_back(approximate):
    x = jnp.linspace(-3, 3, 64)

    def kept(function):
        """Bytes of what is as large as the input."""
        held = jax.tree.leaves(jax.vjp(function, x)[1])
        return sum(a.nbytes for a in held if a.size == x.size)

    def plain(x):
        return jax.nn.gelu(x, approximate=approximate)

    assert kept(FusedGELU(approximate)) == x.nbytes < kept(plain)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_takes_less_room_with_gelu_that_keeps_its_input(dtype):
    """The table of docs/layers.md, with fewer layers; compiled, and not run."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    weights = [(shape((512, 2048)), shape((2048, 512)))] * 3

    def temporaries(act):
        def loss(weights, x):
            for up, down in weights:
                x = x + act(x @ up) @ down
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        grads = jax.jit(jax.grad(loss)).lower(weights, shape((4096, 512)))
        return grads.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(FusedGELU(True)) < 0.8 * temporaries(jax.nn.gelu)


def test_gelu_of_16_bits_is_rounded_once():
    x = jnp.linspace(-8, 8, 401).astype(jnp.bfloat16)
    got = FusedGELU()(x)
    want = jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(jnp.bfloat16)
    # All on a CPU; of what bfloat16's own steps give, 58 %.
    assert got.dtype == jnp.bfloat16 and np.mean(got == want) > 0.99


# ---- messages ------------------------------------------------------------------------

ROWS = [
    ("AttentionLayer", ValueError, "num_heads|divide|32|5",
     lambda: AttentionLayer(32, 5, rngs=nnx.Rngs(0))),
    ("AttentionLayer", ValueError, "num_kv_heads|divide|4|3",
     lambda: layer_of(num_kv_heads=3)),
    ("AttentionLayer", ValueError, "dropout|less than 1|1.0",
     lambda: layer_of(dropout=1.0)),
    ("AttentionLayer", ValueError, "d_model|at least 1|0",
     lambda: AttentionLayer(0, 1, rngs=nnx.Rngs(0))),
    ("AttentionLayer", TypeError, "bias|True or False|1", lambda: layer_of(bias=1)),
    ("AttentionLayer", TypeError, "dtype|floats|int32|jnp.float32",
     lambda: layer_of(dtype="int32")),
    ("AttentionLayer", TypeError, "hidden_states|floats|int32[1, 3, 32]|.astype",
     lambda: layer_of()(np.ones((1, 3, 32), np.int32))),
    ("AttentionLayer", ValueError, "hidden_states|[B, S, 32]|float32[3, 32]|x[None]",
     lambda: layer_of()(jnp.zeros((3, 32)))),
    ("AttentionLayer", ValueError, "attention_mask|[1, 3]|bool[3]|four axes",
     lambda: layer_of()(jnp.zeros((1, 3, 32)), jnp.ones(3, bool))),
    ("AttentionLayer", TypeError, "attention_mask|float32[1, 3]|mask == 0|mask != 0",
     lambda: layer_of()(jnp.zeros((1, 3, 32)), jnp.array([[0.0, 0.0, -1e9]]))),
    ("AttentionLayer", ValueError, "attention_mask|[1, 4, 3, 3]|bool[1, 1, 3, 2]",
     lambda: layer_of()(jnp.zeros((1, 3, 32)), jnp.ones((1, 1, 3, 2), bool))),
    ("AttentionLayer", TypeError, "rngs|got int|nnx.Rngs(0)",
     lambda: AttentionLayer(32, 4, rngs=0)),
    ("OptimizedLinear", TypeError, "rngs|got NoneType|nnx.Rngs(0)",
     lambda: OptimizedLinear(3, 2, rngs=None)),
    ("AttentionLayer", TypeError, "rngs|int|deterministic=True",
     lambda: layer_of()(jnp.zeros((1, 3, 32)), rngs=3)),
    ("OptimizedLinear", ValueError,
     "optimization_level|'precise', 'balanced', 'fast'|'aggressive'",
     lambda: linear_of("aggressive")),
    ("OptimizedLinear", ValueError, "optimization_level|None",
     lambda: linear_of(None)),
    ("OptimizedLinear", ValueError, "out_features|at least 1",
     lambda: OptimizedLinear(3, 0, rngs=nnx.Rngs(0))),
    ("OptimizedLinear", ValueError, "inputs|[..., 48]|float32[2, 3]",
     lambda: linear_of("fast")(jnp.zeros((2, 3)))),
    ("FusedGELU", TypeError, "x|floats|int32[2]|astype",
     lambda: FusedGELU()(jnp.zeros(2, jnp.int32))),
    ("FusedGELU", TypeError, "approximate|True or False|'tanh'",
     lambda: FusedGELU("tanh")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "error", "words", "wrong"), ROWS, ids=[f"{r[0]}-{r[2]}" for r in ROWS]
)
def test_what_is_refused(where, error, words, wrong):
    check(where, error, words, wrong)
