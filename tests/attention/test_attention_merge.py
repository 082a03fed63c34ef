"""`merge_attention`: parts of the keys, joined, are attention over all of them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_kvblock import flash_attention, merge_attention

B, T, S, N, K, D = 2, 5, 24, 4, 2, 16
CUTS = {"halves": (12,), "three": (1, 20), "one": (), "many": tuple(range(3, S, 3))}


def draw(rng: np.random.Generator, dtype: Any = np.float32) -> list[jax.Array]:
    shapes = (B, T, N, D), (B, S, K, D), (B, S, K, D)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def truth(q: Any, k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention over all keys, in float64, and its log-sum-exp `[B, T, N]`."""
    q, k, v = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, N // K, 2) for a in (k, v))
    scores = np.einsum("btnd,bsnd->btns", q, k) / np.sqrt(D)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("btns,bsnd->btnd", np.exp(scores - lse[..., None]), v), lse


def parts_of(q: Any, k: Any, v: Any, cuts: tuple[int, ...]) -> list[Any]:
    """A call for each piece of the keys."""
    edges = (0, *cuts, S)
    attend = functools.partial(flash_attention, implementation="xla", return_lse=True)
    return [attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("cuts", CUTS)
def test_the_parts_together_are_the_whole(cuts, dtype, rng):
    q, k, v = draw(rng, dtype)
    out, lse = merge_attention(parts_of(q, k, v, CUTS[cuts]))
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    want, want_lse = truth(q, k, v)
    atol = {jnp.float32: 2e-6, jnp.float16: 2e-3, jnp.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=atol)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=4e-6)


def test_float64_stays_float64(rng):
    with jax.enable_x64(True):
        q, k, v = draw(rng, np.float64)
        out, lse = merge_attention(parts_of(q, k, v, (7,)))
        want, want_lse = truth(q, k, v)
        assert out.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-14)


def test_large_scores_neither_overflow_nor_vanish(rng):
    """exp of either lse is not a float32."""
    out = jnp.asarray(rng.standard_normal((2, 3, N, D)), jnp.float32)
    for shift in (-3000.0, 0.0, 3000.0):
        lse = jnp.full((2, 3, N), shift)
        got, got_lse = merge_attention([(out, lse), (-out, lse - 1.0)])
        share = 1 / (1 + np.exp(-1.0))
        np.testing.assert_allclose(got, out * (2 * share - 1), rtol=0, atol=2e-6)
        np.testing.assert_allclose(got_lse, shift - np.log(share), rtol=1e-6)


def test_who_saw_nothing_has_no_part(rng):
    """Its out may hold anything; a row that nobody saw a key for is zeros and −inf."""
    q, k, v = draw(rng)
    (seen,) = parts_of(q, k, v, ())
    nothing = jnp.full_like(seen[0], jnp.nan), jnp.full_like(seen[1], -jnp.inf)
    for parts in ([seen, nothing], [nothing, seen], [nothing, seen, nothing]):
        out, lse = merge_attention(parts)
        np.testing.assert_allclose(out, seen[0], rtol=1e-6)
        np.testing.assert_allclose(lse, seen[1], rtol=1e-6)
    out, lse = merge_attention([nothing, nothing])
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a_nan_is_not_hidden(rng):
    q, k, v = draw(rng)
    one, other = parts_of(q, k, v, (12,))
    bad = one[0].at[0, 1].set(jnp.nan), one[1].at[1, 2].set(jnp.nan)
    out, lse = merge_attention([bad, other])
    assert np.isnan(out[0, 1]).all() and np.isnan(out[1, 2]).all()
    assert np.isnan(lse[1, 2]).all()
    assert np.isfinite(out[0, [0, 2, 3, 4]]).all()


def test_sinks_belong_to_one_part(rng):
    q, k, v = draw(rng)
    sinks = jnp.asarray(rng.standard_normal(N), jnp.float32)
    attend = functools.partial(flash_attention, implementation="xla", return_lse=True)
    own = attend(q, k[:, :9], v[:, :9], sinks=sinks)
    out, lse = merge_attention([own, attend(q, k[:, 9:], v[:, 9:])])
    want, want_lse = attend(q, k, v, sinks=sinks)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients_are_those_of_the_whole(of, rng):
    q, k, v = draw(rng)
    weight = jnp.asarray(rng.standard_normal((B, T, N, D)), jnp.float32)

    def total(result: Any) -> jax.Array:
        out, lse = result
        some = {"out": (1, 0), "lse": (0, 1), "both": (1, 1)}[of]
        return some[0] * (out * weight).sum() + some[1] * jnp.sin(lse).sum()

    merged = jax.grad(
        lambda *x: total(merge_attention(parts_of(*x, (5, 11)))), (0, 1, 2)
    )
    whole = jax.grad(lambda *x: total(parts_of(*x, ())[0]), (0, 1, 2))
    for got, want in zip(merged(q, k, v), whole(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_gradients_of_rows_that_nobody_saw_are_zeros(rng):
    """Not NaN, which log(0) would leave behind."""
    out = jnp.asarray(rng.standard_normal((2, 3, N, D)), jnp.float32)
    lse = jnp.zeros((2, 3, N)).at[0].set(-jnp.inf)

    def total(out: Any, lse: Any) -> jax.Array:
        merged, joint = merge_attention([(out, lse), (2 * out, lse)])
        return merged.sum() + jnp.where(jnp.isneginf(joint), 0, joint).sum()

    for gradient in jax.grad(total, (0, 1))(out, lse):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[0], 0)


def test_under_vmap_and_jit(rng):
    q, k, v = draw(rng)
    parts = parts_of(q, k, v, (4,))
    want = merge_attention(parts)
    mapped = jax.jit(jax.vmap(lambda parts: merge_attention(parts)))(parts)
    for got, expected in zip(mapped, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("names", ["keys", ("keys",), ["keys"]], ids=repr)
def test_over_devices_that_share_out_the_keys(names, rng, four_cpus):
    """Each has 6 of 24 keys, in two parts: what travels is out and lse alone."""
    q, k, v = draw(rng)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("keys",))

    def local(q: Any, k: Any, v: Any) -> Any:
        attend = functools.partial(
            flash_attention, implementation="xla", return_lse=True
        )
        parts = [attend(q, k[:, :2], v[:, :2]), attend(q, k[:, 2:], v[:, 2:])]
        return merge_attention(parts, axis_name=names)

    cut = P(None, "keys")
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), cut, cut), out_specs=P())
    out, lse = jax.jit(run)(q, k, v)
    want, want_lse = truth(q, k, v)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=4e-6)
    text = jax.jit(run).lower(q, k, v).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text

    def total(k: Any) -> jax.Array:
        return run(q, k, v)[0].sum()

    whole = jax.grad(lambda k: parts_of(q, k, v, ())[0][0].sum())(k)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(k), whole, rtol=0, atol=1e-5)


def test_over_an_axis_of_vmap(rng):
    q, k, v = draw(rng)
    keys, values = (a.reshape(B, 4, 6, K, D).swapaxes(0, 1) for a in (k, v))

    def one(k: Any, v: Any) -> Any:
        part = flash_attention(q, k, v, implementation="xla", return_lse=True)
        return merge_attention([part], axis_name="parts")

    out, lse = jax.vmap(one, axis_name="parts")(keys, values)
    want, want_lse = truth(q, k, v)
    for i in range(4):
        np.testing.assert_allclose(out[i], want, rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[i], want_lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_under_strict_promotion(dtype, rng):
    parts = parts_of(*draw(rng, dtype), (4,))
    want = merge_attention(parts)
    with jax.numpy_dtype_promotion("strict"):
        got = merge_attention(parts)
    np.testing.assert_array_equal(got[1], want[1])


def test_numpy_arrays_and_lists_of_pairs(rng):
    q, k, v = draw(rng)
    parts = parts_of(q, k, v, (4,))
    want = merge_attention(parts)
    given = [[np.asarray(a) for a in part] for part in parts]
    for got, expected in zip(merge_attention(given), want, strict=True):
        np.testing.assert_array_equal(got, expected)


OUT, LSE = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
WRONG = {
    "nothing": ([], ValueError, r"a list of \(out, lse\) pairs, got none"),
    "an array": (OUT, ValueError, "got something else; flash_attention"),
    "a pair, not a list": ((OUT, LSE), TypeError, r"parts\[0\] must be a pair"),
    "out alone": ([(OUT,)], TypeError, r"parts\[0\] .*, got 1 array"),
    "three": ([(OUT, LSE, LSE)], TypeError, r"parts\[0\] .*, got 3 arrays"),
    "another shape": (
        [(OUT, LSE), (OUT[:1], LSE[:1])],
        ValueError,
        r"like that of parts\[0\], float32\[2, 3, 4, 8\], got float32\[1, 3, 4, 8\]",
    ),
    "another dtype": (
        [(OUT, LSE), (OUT.astype(np.float16), LSE)],
        ValueError,
        r"got float16\[2, 3, 4, 8\] in parts\[1\]",
    ),
    "heads first": (
        [(OUT, LSE.swapaxes(1, 2))],
        ValueError,
        r"parts\[0\]\[1\], lse, .* \[2, 3, 4\], got float32\[2, 4, 3\]; heads are its",
    ),
    "integers": (
        [(OUT.astype(np.int32), LSE)],
        TypeError,
        r"parts\[0\]\[0\], out, must",
    ),
    "integer lse": (
        [(OUT, LSE.astype(np.int32))],
        TypeError,
        r"parts\[0\]\[1\], lse, must be floats, got int32.*cast it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    parts, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        merge_attention(parts)
