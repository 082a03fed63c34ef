"""dot_product_attention beside jax.nn's, and attention_fn inside flax's layer."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import AS_USERS_DO
from flax import nnx

import jax_kvblock as kv
from jax_kvblock import attention_fn, dot_product_attention

B, T, S, N, K, H = 2, 40, 56, 4, 2, 16


def draw(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(rng: np.random.Generator, dtype: Any = jnp.float32, **sizes: int) -> list:
    b, t, s, n, k, h = (
        sizes.get(name, size)
        for name, size in zip("btsnkh", (B, T, S, N, K, H), strict=True)
    )
    return [
        draw(rng, b, t, n, h, dtype=dtype),
        draw(rng, b, s, k, h, dtype=dtype),
        draw(rng, b, s, k, h, dtype=dtype),
    ]


def theirs(*args: Any, **kwargs: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(*args, implementation="xla", **kwargs)


def rows_with_keys(
    mask: Any, causal: bool, q_lens: Any, kv_lens: Any, window: Any
) -> np.ndarray:
    """Which rows attend to something, bool `[B, T, N]`: there both must agree."""
    seen = np.ones((B, N, T, S), bool)
    i, j = np.arange(T)[:, None], np.arange(S)[None]
    if mask is not None:
        seen &= np.asarray(mask)
    if causal:
        seen &= j <= i
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        seen &= (j >= i - left) & (j <= i + right)
    if q_lens is not None:
        seen &= i < np.asarray(q_lens)[:, None, None, None]
    if kv_lens is not None:
        seen &= j < np.asarray(kv_lens)[:, None, None, None]
    return seen.any(-1).transpose(0, 2, 1)


def agree(args: list, names: tuple[str, ...], rows: Any = None, **options: Any) -> None:
    """Values, residuals and gradients of both are equal on the rows with keys."""
    weights = draw(np.random.default_rng(7), B, T, N, H)
    rows = np.ones((B, T, N), bool) if rows is None else rows
    # A row without keys gives nothing here and the mean of the values there.
    weights = jnp.where(rows[..., None], weights, 0)

    def loss(attend: Any) -> Any:
        def value(*args: Any) -> Any:
            given = dict(zip(names, args, strict=True))
            out, residual = attend(**given, **options, return_residual=True)
            return (out.astype(jnp.float32) * weights).sum(), (out, residual)

        floats = [i for i, a in enumerate(args) if a.dtype != jnp.bool_]
        grad = jax.value_and_grad(value, argnums=tuple(floats), has_aux=True)
        return jax.jit(grad)

    (_, (out, lse)), grads = loss(dot_product_attention)(*args)
    (_, (out2, lse2)), grads2 = loss(theirs)(*args)
    assert out.dtype == out2.dtype and lse.dtype == lse2.dtype
    np.testing.assert_allclose(
        jnp.where(rows[..., None], out, 0),
        jnp.where(rows[..., None], out2, 0),
        atol=4e-6,
    )
    np.testing.assert_allclose(
        jnp.where(rows, lse, 0), jnp.where(rows, lse2, 0), atol=4e-6
    )
    assert np.isneginf(np.asarray(lse)[~rows]).all()
    assert (np.asarray(out)[~rows] == 0).all()
    for got, want in zip(grads, grads2, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        size = max(1, float(jnp.abs(want).max()))
        np.testing.assert_allclose(got, want, atol=1e-5 * size)


def test_it_has_the_signature_of_jax_nn() -> None:
    ours = inspect.signature(dot_product_attention).parameters
    jaxs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours) == list(jaxs)
    for name, theirs in jaxs.items():
        assert ours[name].default == theirs.default
        assert ours[name].kind == theirs.kind


MASKS = {
    "keys": (B, 1, 1, S),
    "shared keys": (1, 1, 1, S),
    "queries": (B, 1, T, 1),
    "all": (B, N, T, S),
    "of heads": (1, N, 1, S),
    "shared": (1, 1, T, S),
    "of members": (B, 1, 1, 1),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("causal", "window", "lengths"),
    [
        (False, None, ""),
        (True, None, "q"),
        (False, None, "kv"),
        (True, 5, ""),
        (False, 5, "both"),
        (True, (3, 0), "kv"),
        (False, (3, 0), "q"),
        (True, (0, 7), "both"),
        (False, (0, 7), ""),
        (True, (2, 9), ""),
        (False, (2, 9), "both"),
    ],
)
def test_positions_mean_the_same(
    rng: np.random.Generator, causal: bool, window: Any, lengths: str
) -> None:
    q_lens = jnp.array([T, 11], jnp.int32) if lengths in ("q", "both") else None
    kv_lens = jnp.array([S - 9, 3], jnp.int32) if lengths in ("kv", "both") else None
    agree(
        qkv(rng),
        ("query", "key", "value"),
        rows_with_keys(None, causal, q_lens, kv_lens, window),
        is_causal=causal,
        local_window_size=window,
        query_seq_lengths=q_lens,
        key_value_seq_lengths=kv_lens,
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("form", "bias", "causal"),
    [
        *((form, None, i % 2 == 0) for i, form in enumerate(MASKS)),
        ("keys", (B, N, T, S), False),
        ("queries", (1, 1, 1, S), True),
        ("all", (1, N, T, 1), False),
        ("shared", (B, 1, T, S), True),
    ],
)
def test_masks_and_biases_mean_the_same(
    rng: np.random.Generator, form: str, bias: Any, causal: bool
) -> None:
    mask = jnp.asarray(rng.random(MASKS[form]) < 0.6)
    args, names = [*qkv(rng), mask], ["query", "key", "value", "mask"]
    if bias is not None:
        args.append(draw(rng, *bias))
        names.append("bias")
    rows = rows_with_keys(mask, causal, None, None, None)
    agree(args, tuple(names), rows, is_causal=causal)


@pytest.mark.parametrize("scale", [None, 0.3, np.float32(1.7)])
def test_everything_at_once(rng: np.random.Generator, scale: Any) -> None:
    mask = jnp.asarray(rng.random((B, N, T, S)) < 0.7)
    kv_lens = jnp.array([40, 20], jnp.int32)
    agree(
        [*qkv(rng), draw(rng, B, 1, T, S), mask],
        ("query", "key", "value", "bias", "mask"),
        rows_with_keys(mask, True, None, kv_lens, (20, 4)),
        is_causal=True,
        scale=scale,
        local_window_size=(20, 4),
        key_value_seq_lengths=kv_lens,
    )


@pytest.mark.parametrize("h", [1, 2, 5, 24])
def test_any_head_dim(rng: np.random.Generator, h: int) -> None:
    args = qkv(rng, h=h)
    got = dot_product_attention(*args, is_causal=True)
    np.testing.assert_allclose(got, theirs(*args, is_causal=True), atol=2e-6)


def test_no_batch_dim_and_numpy_inputs(rng: np.random.Generator) -> None:
    q, k, v = (np.asarray(a[0]) for a in qkv(rng))
    mask = rng.random((N, T, S)) < 0.9
    bias = rng.standard_normal((T, S)).astype(np.float32)
    lens = np.array([30], np.int32)
    options = {"key_value_seq_lengths": lens, "return_residual": True}
    got = dot_product_attention(q, k, v, bias, mask, **options)
    want = theirs(q, k, v, bias, mask, **options)
    assert got[0].shape == (T, N, H) and got[1].shape == (T, N)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=4e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(rng: np.random.Generator, dtype: Any) -> None:
    args = qkv(rng, dtype)
    bias = draw(rng, 1, N, T, S)
    out, lse = dot_product_attention(*args, bias, is_causal=True, return_residual=True)
    assert out.dtype == lse.dtype == dtype
    wide = [a.astype(jnp.float32) for a in args]
    want = theirs(*wide, bias, is_causal=True, return_residual=True)
    own = theirs(*args, bias, is_causal=True, return_residual=True)
    for got, jaxs, exact in zip((out, lse), own, want, strict=True):
        error = jnp.abs(got.astype(jnp.float32) - exact).max()
        assert error <= 1.5 * jnp.abs(jaxs.astype(jnp.float32) - exact).max()


def test_a_mask_of_keys_takes_no_memory_of_T_times_S() -> None:
    length = 4096
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.bool_)

    def attend(x: Any, mask: Any) -> Any:
        return dot_product_attention(x, x, x, mask=mask, implementation="xla")

    stats = jax.jit(attend).lower(x, mask).compile(AS_USERS_DO).memory_analysis()
    assert stats.temp_size_in_bytes < 4 * length * length / 8


def test_transforms(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    mask = jnp.asarray(rng.random((B, N, T, S)) < 0.8)

    def member(q: Any, mask: Any) -> Any:
        return dot_product_attention(q, k, v, mask=mask)

    got = jax.jit(jax.vmap(member))(jnp.stack([q, 2 * q]), jnp.stack([mask, ~mask]))
    for i, (scale, m) in enumerate(((1, mask), (2, ~mask))):
        np.testing.assert_allclose(got[i], theirs(scale * q, k, v, mask=m), atol=2e-6)


# ---- flax ----------------------------------------------------------------------------


def layer(attention: Any, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        num_heads=N,
        in_features=N * H,
        attention_fn=attention,
        rngs=nnx.Rngs(0),
        precision=jax.lax.Precision.HIGHEST,
        **{"decode": False, **options},
    )


def test_attention_fn_has_the_parameters_of_flax() -> None:
    ours = inspect.signature(attention_fn).parameters
    flaxs = inspect.signature(nnx.dot_product_attention).parameters
    assert list(ours) == list(flaxs), flax.__version__
    for name, parameter in flaxs.items():
        if name != "promote_dtype":
            assert ours[name].default == parameter.default


@pytest.mark.parametrize(
    ("dims", "causal", "masked", "num_kv_heads"),
    [
        ((), False, "bool", N),
        ((), True, "", K),
        ((B,), True, "", N),
        ((B,), False, "float", K),
        ((B,), False, "of members", N),
        ((B, 3), True, "bool", K),
        ((B, 3), False, "", N),
    ],
)
def test_a_layer_gives_what_it_gives_with_flax_own_attention(
    rng: np.random.Generator, dims: tuple, causal: bool, masked: str, num_kv_heads: int
) -> None:
    x = draw(rng, *dims, T, N * H)
    mask = None
    if masked == "float":
        mask = nnx.make_causal_mask(jnp.ones((*dims, T)))
    elif masked == "bool":
        mask = jnp.asarray(rng.random((*dims, N, T, T)) < 0.7) | jnp.eye(T, dtype=bool)
    elif masked == "of members":
        mask = jnp.ones((*dims, 1, 1, T), bool)

    def run(attention: Any) -> Any:
        graph, state = nnx.split(layer(attention, num_kv_heads=num_kv_heads))

        def loss(state: Any, x: Any) -> Any:
            out = nnx.merge(graph, state)(x, mask=mask, is_causal=causal)
            return (out**2).sum(), out

        with jax.default_matmul_precision("highest"):
            grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            return jax.jit(grad)(state, x)

    (_, out), grads = run(attention_fn)
    (_, want), wanted = run(nnx.dot_product_attention)
    np.testing.assert_allclose(out, want, atol=2e-5)
    for a, b in zip(*map(jax.tree.leaves, (grads, wanted)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * max(1, float(jnp.abs(b).max())))


@pytest.mark.parametrize("dims", [(B,), (2, 3)])
def test_decoding_over_flax_cache_gives_the_causal_rows(
    rng: np.random.Generator, dims: tuple
) -> None:
    x = draw(rng, *dims, 9, N * H)
    made = layer(attention_fn, decode=True)
    whole = layer(attention_fn)(x, is_causal=True)
    made.init_cache(x.shape)
    step = nnx.jit(lambda module, token: module(token))
    for i in range(9):
        token = step(made, x[..., i : i + 1, :])
        np.testing.assert_allclose(token, whole[..., i : i + 1, :], atol=1e-5)


def test_weights_cannot_be_sown(rng: np.random.Generator) -> None:
    with pytest.raises(NotImplementedError, match=r"sow_weights"):
        layer(attention_fn)(draw(rng, B, T, N * H), sow_weights=True)


def test_the_layer_casts_to_its_dtype(rng: np.random.Generator) -> None:
    x = draw(rng, B, T, N * H)
    assert layer(attention_fn, dtype=jnp.bfloat16)(x).dtype == jnp.bfloat16
    q, k, v = qkv(rng)
    assert attention_fn(q, k, v, dtype=jnp.float16).dtype == jnp.float16
    assert attention_fn(q.astype(jnp.bfloat16), k, v).dtype == jnp.float32


def test_everything_is_exported() -> None:
    assert kv.dot_product_attention is dot_product_attention
    assert kv.attention_fn is attention_fn
    assert list(itertools.filterfalse(lambda name: hasattr(kv, name), kv.__all__)) == []
