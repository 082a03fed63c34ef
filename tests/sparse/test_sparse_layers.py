"""S2's layer: `create_sparse_attention` by every pattern, trained and refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_model import jit
from messages import check
from sparse_cases import listed, pairs, spread, truth

from jax_kvblock import flash_attention
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    BlockSparse,
    DynamicSparseAttention,
    LearnedGate,
    LocalGlobal,
    Random,
    SparsePattern,
    Streaming,
    Strided,
    create_sparse_attention,
    init_gate,
    train_gate,
)

pytestmark = pytest.mark.usefixtures("exact_products")

WIDTH, HEADS, LENGTH = 32, 4, 160
TILES = {"block_q": 16, "block_kv": 16}
KINDS = {
    SparsePattern.RANDOM: Random,
    SparsePattern.BLOCK_SPARSE: BlockSparse,
    SparsePattern.STRIDED: Strided,
    SparsePattern.LOCAL_GLOBAL: LocalGlobal,
    SparsePattern.DYNAMIC_THRESHOLD: AntidiagonalThreshold,
    SparsePattern.LEARNED: LearnedGate,
}
DOCUMENTS = np.repeat([[0, 1]], [70, 90], axis=1).repeat(2, 0).astype(np.int32)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, LENGTH, WIDTH)), jnp.float32)


def test_the_names_of_the_patterns():
    assert [(p.name, p.value) for p in SparsePattern] == [
        ("RANDOM", "random"),
        ("BLOCK_SPARSE", "block_sparse"),
        ("STRIDED", "strided"),
        ("LOCAL_GLOBAL", "local_global"),
        ("DYNAMIC_THRESHOLD", "dynamic_threshold"),
        ("LEARNED", "learned"),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_each_pattern(x, pattern, causal):
    layer = create_sparse_attention(
        WIDTH, HEADS, 0.7, pattern, num_kv_heads=2, causal=causal, **TILES
    )
    assert isinstance(layer, DynamicSparseAttention)
    assert type(layer.selector) is KINDS[pattern]
    got, report = jit(lambda layer, x: layer.with_report(x, DOCUMENTS))(layer, x)
    q, k = layer.queries_and_keys(x)
    v = (x @ layer.qkv)[..., 48:].reshape(2, LENGTH, 2, 8)
    mask = {"causal": causal, "segment_ids": DOCUMENTS}
    tiles = layer.selector(q, k, **mask)
    allowed = pairs(2, LENGTH, LENGTH, **mask)[:, None]
    allowed = allowed & spread(listed(tiles, 10), LENGTH, LENGTH, tiles)
    want = truth(q, k, v, allowed).reshape(2, LENGTH, -1) @ np.float64(layer.out)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    np.testing.assert_allclose(layer(x, DOCUMENTS), got, rtol=0, atol=1e-6)
    assert 0.2 < float(report.share) < 0.6  # of few tiles one is much


def test_by_default_a_tenth_of_the_tiles_by_threshold():
    layer = create_sparse_attention(d_model=512, num_heads=8)
    assert layer.selector == AntidiagonalThreshold(sparsity_ratio=0.9, tau=None)
    shape = jax.eval_shape(layer, jax.ShapeDtypeStruct((1, 2048, 512), jnp.float32))
    assert shape.shape == (1, 2048, 512)


def test_a_layer_learns_like_any_other(x):
    layer = create_sparse_attention(WIDTH, HEADS, 0.5, **TILES)
    slopes = jit(jax.grad(lambda layer: jnp.sum(layer(x) ** 2)))(layer)
    for weight in (slopes.qkv, slopes.out):
        assert np.isfinite(weight).all() and np.abs(weight).max() > 1e-3
    assert jax.tree.structure(slopes) == jax.tree.structure(layer)


def test_a_gate_is_trained_on_the_layer_and_put_back(x, rng):
    layer = create_sparse_attention(
        WIDTH, HEADS, 0.7, SparsePattern.LEARNED, causal=True, **TILES
    )
    q, k = layer.queries_and_keys(3 * x)
    gate, losses = train_gate(
        layer.selector.gate, [(q, k)] * 20, optax.adam(1e-2), causal=True, **TILES
    )
    assert losses[-1] < losses[0]
    trained = layer.with_gate(gate)
    assert trained.selector.gate is gate and trained.qkv is layer.qkv
    assert trained.selector.sparsity_ratio == 0.7
    changed = np.asarray(trained(3 * x)) - np.asarray(layer(3 * x))
    assert np.abs(changed).max() > 0


def test_a_selector_in_place_of_a_pattern(x):
    selector = Streaming(sinks=1, window=2, **TILES)
    layer = create_sparse_attention(WIDTH, HEADS, selector=selector, causal=True)
    assert layer.selector is selector
    assert layer(x).shape == x.shape
    assert layer(x[:0]).shape == (0, *x.shape[1:])


def test_half_precision_inside(x):
    layer = create_sparse_attention(WIDTH, HEADS, 0.5, dtype="bfloat16", **TILES)
    assert layer.qkv.dtype == jnp.bfloat16
    assert layer(x).dtype == jnp.float32


@pytest.mark.parametrize(
    "pattern", [SparsePattern.RANDOM, SparsePattern.DYNAMIC_THRESHOLD]
)
def test_dropout_where_a_call_has_a_seed(x, pattern):
    """As `flash_attention` drops; which tiles are chosen has nothing to do with it."""
    layer = create_sparse_attention(
        WIDTH, HEADS, 0.5, pattern, causal=True, dropout=0.3, **TILES
    )
    assert layer.dropout == 0.3
    seed = jax.random.key(3)
    made, report = jit(lambda layer, x, seed: layer.with_report(x, None, seed))(
        layer, x, seed
    )
    q, k = layer.queries_and_keys(x)
    v = (x @ layer.qkv)[..., 64:].reshape(2, LENGTH, HEADS, 8)
    tiles = layer.selector(q, k, causal=True)
    np.testing.assert_array_equal(report.listed, tiles.counts)
    want = flash_attention(
        q, k, v, causal=True, tiles=tiles, dropout_rate=0.3, dropout_seed=seed
    )
    want = want.reshape(2, LENGTH, -1) @ layer.out
    np.testing.assert_allclose(made, want, rtol=0, atol=3e-6)
    np.testing.assert_allclose(
        layer(x, None, dropout_seed=seed), made, rtol=0, atol=3e-6
    )
    none = create_sparse_attention(WIDTH, HEADS, 0.5, pattern, causal=True, **TILES)
    without = np.asarray(none(x))
    np.testing.assert_array_equal(layer(x), without)
    np.testing.assert_array_equal(none(x, None, seed), without)
    assert np.abs(made - without).max() > 0.01
    assert np.abs(layer(x, None, 4) - made).max() > 0.01


def test_vmap_of_layers(x):
    layers = [
        create_sparse_attention(
            WIDTH, HEADS, 0.5, SparsePattern.LEARNED, key=jax.random.key(i), **TILES
        )
        for i in range(2)
    ]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    got = jit(jax.vmap(lambda layer: layer(x)))(stacked)
    for i in range(2):
        np.testing.assert_allclose(got[i], layers[i](x), rtol=0, atol=2e-6)


def make(*args, **options):
    return lambda: create_sparse_attention(*(args or (WIDTH, HEADS)), **options)


WHERE = "create_sparse_attention"
BAD = {
    "ratio": (make(WIDTH, HEADS, 0.96), WHERE, ValueError, "0 to 0.95|got 0.96"),
    "negative": (make(WIDTH, HEADS, -1), WHERE, ValueError, "sparsity_ratio|got -1"),
    "heads": (make(30, 4), WHERE, ValueError, "num_heads must divide d_model, 30"),
    "kv": (make(num_kv_heads=3), WHERE, ValueError, "num_kv_heads must divide"),
    "pattern": (
        make(pattern="random"),
        WHERE,
        TypeError,
        "SparsePattern.RANDOM|'random'",
    ),
    "option": (
        make(pattern=SparsePattern.RANDOM, stride=8),
        WHERE,
        TypeError,
        "fields of Random|got stride",
    ),
    "both": (
        make(selector=Streaming(), stride=8),
        WHERE,
        TypeError,
        "without other options|stride",
    ),
    "a ratio beside a selector": (
        make(selector=Streaming(), sparsity_ratio=7),
        WHERE,
        TypeError,
        "without other options|got sparsity_ratio",
    ),
    "a pattern beside a selector": (
        make(selector=Streaming(), pattern=SparsePattern.RANDOM),
        WHERE,
        TypeError,
        "without other options|got pattern",
    ),
    "head dim": (
        make(60, 4),
        WHERE,
        ValueError,
        "d_model|a multiple of 8 up to 256, got 60 for 4 heads, of 15 each",
    ),
    "large head dim": (make(2048, 4), WHERE, ValueError, "up to 256|of 512 each"),
    "key": (make(key=3), WHERE, TypeError, "a key of jax.random, got int|key(0)"),
    "key of a gate": (
        lambda: init_gate(4, 2, 16, key=jnp.zeros(3)),
        "init_gate",
        TypeError,
        "a key of jax.random, got float32[3]",
    ),
    "selector": (make(selector=0.9), WHERE, TypeError, "Selector|float"),
    "dtype": (make(dtype="float64"), WHERE, TypeError, "bfloat16, float16 or float32"),
    "size": (make(0, 4), WHERE, ValueError, "d_model|at least 1"),
    "causal": (make(causal=1), WHERE, TypeError, "causal"),
    "dropout": (
        make(dropout=1.0),
        WHERE,
        ValueError,
        "dropout must be at least 0 and less than 1|got 1.0",
    ),
    "dropout's type": (
        make(dropout="0.1"),
        WHERE,
        TypeError,
        "dropout must be a number|'0.1'",
    ),
    "seed": (
        lambda: make(dropout=0.1, **TILES)()(jnp.ones((1, 32, WIDTH)), None, 0.5),
        "flash_attention",
        TypeError,
        "dropout_seed must be an integer",
    ),
    "width": (
        lambda: make(**TILES)()(jnp.ones((1, 32, 16))),
        "DynamicSparseAttention",
        ValueError,
        "[B, S, 32]|[1, 32, 16]",
    ),
    "integers": (
        lambda: make()()(jnp.ones((1, 32, 32), jnp.int32)),
        "DynamicSparseAttention",
        TypeError,
        "hidden_states must be floats|int32[1, 32, 32]|astype",
    ),
    "empty": (
        lambda: make()()(jnp.ones((1, 0, 32))),
        "DynamicSparseAttention",
        ValueError,
        "hidden_states must not be empty|[1, 0, 32]|leave",
    ),
    "gate": (
        lambda: make()().with_gate(None),
        "DynamicSparseAttention",
        TypeError,
        "pattern LEARNED",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(name):
    call, where, error, words = BAD[name]
    check(where, error, words, call)
