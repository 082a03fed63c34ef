"""Dropout in flax's layer, in layers by patterns and in sparse attention.

The probabilities that a call keeps are read off it: with the identity as values its
output is the probabilities themselves. Plain JAX with what was read is the truth.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of, put

import jax_kvblock as kv
from jax_kvblock import attention_fn, flash_attention
from jax_kvblock.parallel import (
    AttentionConfig,
    AttentionPatterns,
    create_attention,
)
from jax_kvblock.sparse import Random, sparse_attention

B, T, S, N, K, H = 2, 40, 56, 4, 2, 16
RATE = 0.1  # of which 13 / 128 is left
LEFT = 128 / 115
jit = jax.jit
broadcast_or_not = pytest.mark.parametrize("broadcast", [True, False])


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def factors(dims: tuple, t: int, s: int, **options: Any) -> jax.Array:
    """What attention_fn multiplies probabilities by, `[dims..., N, T, S]`."""
    q, k = jnp.zeros((*dims, t, N, 8)), jnp.zeros((*dims, s, N, 8))
    ones = jnp.broadcast_to(jnp.eye(s)[:, None], (*dims, s, N, s))
    return jnp.swapaxes(s * attention_fn(q, k, ones, **options), -2, -3)


def plain(
    query: Any, key: Any, value: Any, *, mask: Any, is_causal: bool, **options: Any
) -> jax.Array:
    """An `attention_fn` of plain JAX."""
    t, s = query.shape[-3], key.shape[-3]
    given = ("dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic")
    kept = factors(query.shape[:-3], t, s, **{name: options[name] for name in given})
    key, value = (jnp.repeat(x, N // x.shape[-2], -2) for x in (key, value))
    scores = jnp.einsum("...tnd,...snd->...nts", query, key) / np.sqrt(key.shape[-1])
    seen = jnp.tri(t, s, dtype=bool) if is_causal else jnp.ones((t, s), bool)
    seen = seen if mask is None else seen & (mask != 0)
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) * kept
    return jnp.einsum("...nts,...snd->...tnd", p, value)


def layer(attention: Any, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        num_heads=N,
        in_features=N * H,
        attention_fn=attention,
        rngs=nnx.Rngs(0),
        precision=jax.lax.Precision.HIGHEST,
        **{"decode": False, "dropout_rate": 0.3, **options},
    )


# ---- attention_fn --------------------------------------------------------------------


@broadcast_or_not
@pytest.mark.parametrize("dims", [(), (B,), (2, 3)])
def test_what_becomes_0(dims: tuple, broadcast: bool) -> None:
    """The same pairs everywhere, as flax has it, or others in each member and head."""
    options = {"broadcast_dropout": broadcast, "dropout_rate": RATE}
    x = factors(dims, T, S, dropout_rng=jax.random.key(1), **options)
    found = np.asarray(x).reshape(-1, T, S)
    dropped = found == 0
    np.testing.assert_allclose(found[~dropped], LEFT, rtol=1e-5)
    assert abs(dropped.mean() - 13 / 128) < 0.03
    each = {a.tobytes() for a in dropped}
    assert len(each) == (1 if broadcast else len(dropped))
    other = factors(dims, T, S, dropout_rng=jax.random.key(2), **options)
    assert ((np.asarray(other).reshape(found.shape) == 0) != dropped).any((1, 2)).all()


def test_they_are_those_of_flash_attention(rng: np.random.Generator) -> None:
    """Also what to do for the same without flax."""
    x = draw(rng, B, T, N, H)
    key = jax.random.key(3)
    for broadcast, seed in ((False, key), (True, jnp.broadcast_to(key, (B, N)))):
        got = attention_fn(
            x, x, x, dropout_rng=key, dropout_rate=0.3, broadcast_dropout=broadcast
        )
        want = flash_attention(x, x, x, dropout_rate=0.3, dropout_seed=seed)
        np.testing.assert_array_equal(got, want)


@broadcast_or_not
def test_keys_of_any_style(rng: np.random.Generator, broadcast: bool) -> None:
    x = draw(rng, B, T, N, H)

    def run(key: Any) -> Any:
        return attention_fn(
            x, x, x, dropout_rng=key, dropout_rate=0.3, broadcast_dropout=broadcast
        )

    want = run(jax.random.key(5))
    raw = jax.random.PRNGKey(5)
    np.testing.assert_array_equal(run(raw), want)
    np.testing.assert_allclose(jit(run)(raw), want, atol=2e-6)
    np.testing.assert_array_equal(run(np.asarray(raw)), want)
    long = jax.random.key(5, impl="rbg")
    np.testing.assert_array_equal(run(jax.random.key_data(long)), run(long))
    assert (np.asarray(run(long)) != np.asarray(want)).any()


@broadcast_or_not
@pytest.mark.parametrize(
    ("dims", "causal", "masked", "num_kv_heads"),
    [((), True, False, N), ((B,), False, True, K), ((2, 3), True, True, N)],
)
def test_a_layer_that_is_trained(
    rng: np.random.Generator,
    dims: tuple,
    causal: bool,
    masked: bool,
    num_kv_heads: int,
    broadcast: bool,
) -> None:
    """Results and gradients: forward and backward drop the same pairs."""
    x = draw(rng, *dims, T, N * H)
    mask = None
    if masked:
        some = jnp.asarray(rng.random((*dims, N, T, T)) < 0.7)
        mask = some | jnp.eye(T, dtype=bool)
    options = {"num_kv_heads": num_kv_heads, "broadcast_dropout": broadcast}

    def run(attention: Any) -> Any:
        graph, state = nnx.split(layer(attention, keep_rngs=False, **options))

        def loss(state: Any, x: Any, key: Any) -> Any:
            made = nnx.merge(graph, state)
            out = made(
                x,
                mask=mask,
                is_causal=causal,
                deterministic=False,
                rngs=nnx.Rngs(dropout=key),
            )
            return (out**2).sum(), out

        with jax.default_matmul_precision("highest"):
            grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            return jax.jit(grad)(state, x, jax.random.key(4))

    (_, out), grads = run(attention_fn)
    (_, want), wanted = run(plain)
    np.testing.assert_allclose(out, want, atol=3e-5)
    got, wanted = (
        {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, (grads, wanted))
    )
    assert got.keys() == wanted.keys()
    for name, leaf in got.items():
        want, bar = wanted[name], 4e-5
        bar *= max(1, float(jnp.abs(want).max()))
        if "'key'" in name and "'bias'" in name:
            # All scores of a row move alike: it is 0, and both have what is left of
            # sums of numbers that are as large as the kernel's.
            of_kernel = wanted[name.replace("bias", "kernel")]
            want, bar = 0 * want, 1e-6 * float(jnp.abs(of_kernel).max())
        np.testing.assert_allclose(leaf, want, atol=bar, err_msg=name)
    without = layer(attention_fn, **options)(
        x, mask=mask, is_causal=causal, deterministic=True
    )
    assert np.abs(np.asarray(out - without)).max() > 0.01


def test_a_layer_takes_a_key_for_each_call_of_its_stream(
    rng: np.random.Generator,
) -> None:
    x = draw(rng, B, T, N * H)
    made = layer(attention_fn)
    run = nnx.jit(lambda made, x: made(x, deterministic=False))
    first, second = run(made, x), run(made, x)
    assert np.abs(np.asarray(first - second)).max() > 0.01
    again = layer(attention_fn)
    np.testing.assert_array_equal(run(again, x), first)


def test_a_layer_that_is_evaluated(rng: np.random.Generator) -> None:
    """No key is taken, and nothing dropped."""
    x = draw(rng, B, T, N * H)
    made = layer(attention_fn, deterministic=True)
    with jax.default_matmul_precision("highest"):
        want = layer(nnx.dot_product_attention, dropout_rate=0.0)(x)
    np.testing.assert_allclose(made(x), want, atol=1e-5)
    made.eval()
    np.testing.assert_array_equal(made(x), layer(attention_fn, dropout_rate=0.0)(x))


def test_vmap_over_keys(rng: np.random.Generator) -> None:
    x, keys = draw(rng, 3, B, T, N, H), jax.random.split(jax.random.key(0), 3)

    def run(x: Any, key: Any) -> Any:
        return attention_fn(x, x, x, dropout_rng=key, dropout_rate=0.3)

    got = jit(jax.vmap(run))(x, keys)
    for i in range(3):
        np.testing.assert_allclose(got[i], run(x[i], keys[i]), atol=2e-6)
    alike = jit(jax.vmap(run, (None, 0)))(x[0], keys)
    assert len({np.asarray(a).tobytes() for a in alike}) == 3


@pytest.mark.usefixtures("four_cpus")
@broadcast_or_not
@by_axis_type
def test_sharded_arrays(
    rng: np.random.Generator, axis_type: Any, broadcast: bool
) -> None:
    """The same pairs as on one device."""
    q, k, v = (draw(rng, 4, 24, N, 8) for _ in range(3))
    mesh = mesh_of(axis_type)

    def run(q: Any, k: Any, v: Any, key: Any) -> Any:
        out = attention_fn(
            q, k, v, dropout_rng=key, dropout_rate=0.3, broadcast_dropout=broadcast
        )
        return jnp.sum(out**2), out

    grad = jax.grad(run, (0, 1, 2), has_aux=True)
    key = jax.random.key(2)
    want = jit(grad)(q, k, v, key)
    with jax.set_mesh(mesh):
        cut = (put(x, mesh, "b", None, "h", None) for x in (q, k, v))
        got = jit(grad)(*cut, key)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_parts_of_a_batch_share_what_is_broadcast(rng: np.random.Generator) -> None:
    """Under shard_map a device's members drop what those of all devices do."""
    x = draw(rng, 4, 24, N, 8)
    mesh = mesh_of()
    run = lambda x: attention_fn(  # noqa: E731
        x, x, x, dropout_rng=jax.random.key(2), dropout_rate=0.3
    )
    spec = P("b", None, "h")
    cut = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jit(cut)(x), run(x), atol=2e-6)


# ---- layers by patterns --------------------------------------------------------------

WIDTH = 32
BY_PATTERN = {
    "full": {"pattern": AttentionPatterns.FULL},
    "causal": {"pattern": AttentionPatterns.CAUSAL, "num_kv_heads": 2},
    "window": {"pattern": AttentionPatterns.SLIDING_WINDOW, "window": 9},
}


def by_definition(made: Any, x: jax.Array, mask: Any, seed: Any) -> jax.Array:
    """The layer with the pairs that flash_attention drops, in plain JAX."""
    c = made.config
    b, s, _ = x.shape
    n, k, d = c.num_heads, c.kv_heads, c.head_dim
    wide = (x @ made.qkv).reshape(b, s, n + 2 * k, d)
    q, keys, values = jnp.split(wide, (n, n + k), axis=2)
    keys, values = (jnp.repeat(a, n // k, 2) for a in (keys, values))
    zeros = jnp.zeros((b, s, n, 8))
    ones = jnp.broadcast_to(jnp.eye(s)[:, None], (b, s, n, s))
    kept = s * flash_attention(
        zeros, zeros, ones, dropout_rate=c.dropout, dropout_seed=seed
    )
    away = np.arange(s)[:, None] - np.arange(s)
    seen = np.ones((s, s), bool) if not c.is_causal else away >= 0
    seen = seen & (away <= (s if c.window is None else c.window))
    seen = jnp.asarray(seen & (mask != 0)[:, None, None])
    scores = jnp.einsum("btnd,bsnd->bnts", q, keys) / np.sqrt(d)
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) * jnp.swapaxes(kept, 1, 2)
    o = jnp.einsum("bnts,bsnd->btnd", p, values).reshape(b, s, n * d)
    return o @ made.out


@pytest.mark.parametrize("name", BY_PATTERN)
def test_layers_by_patterns(rng: np.random.Generator, name: str) -> None:
    config = AttentionConfig(WIDTH, N, dropout=0.3, **BY_PATTERN[name])
    made = create_attention(config, key=jax.random.key(1))
    x, mask = draw(rng, 2, 24, WIDTH), np.ones((2, 24), np.int32)
    mask[1, 20:] = 0
    seed = jax.random.key(7)

    def loss(run: Any) -> Any:
        return jit(jax.value_and_grad(lambda made: jnp.sum(run(made) ** 2)))(made)

    with jax.default_matmul_precision("highest"):
        got = loss(lambda made: made(x, mask, dropout_seed=seed))
        want = loss(lambda made: by_definition(made, x, mask, seed))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * max(1, float(jnp.abs(b).max())))
    none = create_attention(
        AttentionConfig(WIDTH, N, **BY_PATTERN[name]), key=jax.random.key(1)
    )
    without = none(x, mask)
    np.testing.assert_array_equal(made(x, mask), without)
    np.testing.assert_array_equal(none(x, mask, dropout_seed=seed), without)
    dropped = [np.asarray(made(x, mask, seed)) for seed in (0, 1)]
    assert (dropped[0] != dropped[1]).any() and (dropped[0] != without).any()


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (1.0, ValueError, "dropout must be at least 0 and less than 1, got 1.0"),
        (-0.1, ValueError, "dropout must be at least 0 and less than 1, got -0.1"),
        (1e-4, ValueError, "dropout must round to 1/128 at least"),
        ("0.1", TypeError, "dropout must be a number, got '0.1'"),
    ],
)
def test_rates_that_a_layer_cannot_have(value: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=f"^AttentionConfig: {says}"):
        AttentionConfig(WIDTH, N, dropout=value)


def test_a_config_with_a_rate_can_be_hashed() -> None:
    config = AttentionConfig(WIDTH, N, dropout=np.float32(0.5))
    assert type(config.dropout) is float and hash(config) == hash(config)


# ---- sparse attention ----------------------------------------------------------------


def test_sparse_attention_hands_it_on(rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, 1, 128, 2, 16) for _ in range(3))
    selector = Random(sparsity_ratio=0.5, block_q=16, block_kv=16)
    options = {"dropout_rate": 0.3, "dropout_seed": 4, "causal": True}
    got = sparse_attention(q, k, v, selector, **options)
    tiles = selector(q, k, causal=True)
    want = kv.flash_attention(q, k, v, tiles=tiles, **options)
    np.testing.assert_array_equal(got, want)
    without = sparse_attention(q, k, v, selector, causal=True)
    assert np.abs(np.asarray(got - without)).max() > 0.1
