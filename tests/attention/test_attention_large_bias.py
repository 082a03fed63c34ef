"""Rows whose every bias is large and negative, as padding masks are often written.

Beside −1e9 float32 has no digits for a score: a row of it has equal probabilities, here
as in jax.nn, and gradients that follow from them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_exact
from attention_model import (
    BF16,
    F16,
    F32,
    by_kernel,
    by_main_kernel,
    cast,
    compute,
    draw,
    f64,
    jit,
    truth,
)

import jax_kvblock as kv

LOWEST = float(jnp.finfo(F32).min)


def draw_padded(rng, dtype, large, kv_len=150, **options):
    """Half of the rows see nothing but `large`; others see it left, right or not."""
    call = draw(rng, dtype, q_len=20, kv_len=kv_len, **options)
    bias = rng.standard_normal((2, 1, 20, kv_len)).astype(np.float32)
    bias[:, :, ::2] = large
    bias[:, :, 1::6, : kv_len - 20] = large  # past the first tiles
    bias[:, :, 3::6, 20:] = large
    return call.replace(bias=jnp.asarray(bias))


@by_kernel(F32, BF16, F16)
@pytest.mark.parametrize("large", [-1e9, -1e30, LOWEST])
@pytest.mark.parametrize("options", ["", "sinks", "softcap", "causal"])
def test_rows_of_large_negative_bias(rng, implementation, dtype, large, options):
    """Without scores beside it, so that float64 knows no more than float32."""
    call = draw_padded(rng, dtype, large)
    call = call.replace(q=call.arrays["q"].at[:, ::2].set(0))
    if options == "sinks":  # below, above and at a row's scores
        call = call.replace(sinks=cast([LOWEST, -1e9, 0, 3], F32))
    elif options == "softcap":
        call = call.replace(softcap=5.0)
    elif options:
        call = call.replace(causal=True, q_offset=jnp.int32(130))
    got = assert_exact(call, implementation)
    assert all(np.isfinite(f64(x)).all() for x in got.values())


@by_kernel(BF16, F16)
def test_a_large_bias_of_the_inputs_dtype(rng, implementation, dtype):
    large = float(jnp.finfo(dtype).min)
    call = draw_padded(rng, dtype, large)
    call = call.replace(bias=call.arrays["bias"].astype(dtype))
    assert_exact(call.replace(q=call.arrays["q"].at[:, ::2].set(0)), implementation)


@by_kernel(F32, BF16)
def test_keys_of_two_large_biases(rng, implementation, dtype):
    """A mask that was added twice: the larger one's keys share the row."""
    call = draw_padded(rng, dtype, -1e9)
    bias = call.arrays["bias"].at[:, :, :, 5:90].add(-1e9)
    bias = bias.at[:, :, :, 95:100].set(LOWEST)
    call = call.replace(bias=bias, q=call.arrays["q"].at[:, ::2].set(0))
    assert_exact(call, implementation)


@by_main_kernel()
def test_scores_beside_a_large_bias_are_lost_as_in_jax_nn(rng, implementation, dtype):
    """Values and gradients of a loss, beside jax.nn's on the same numbers."""
    call = draw_padded(rng, dtype, -1e9)
    arrays = call.arrays

    def ours(x):
        return kv.flash_attention(**x, implementation=implementation)

    def theirs(x):
        wide = {n: a.astype(F32) for n, a in x.items()}
        q, k, v = (wide[n] for n in "qkv")
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(
                q, k, v, bias=wide["bias"], implementation="xla"
            )

    def results(attend):
        @jit
        def run(x):
            out, pull = jax.vjp(lambda x: attend(x).astype(F32), x)
            return out, pull(call.cotangents[0].astype(F32))[0]

        return run(arrays)

    (out, grads), (want, wanted) = results(ours), results(theirs)
    tolerance = 2e-5 if dtype == F32 else 2e-2
    np.testing.assert_allclose(f64(out), f64(want), atol=tolerance, rtol=tolerance)
    for name in ("q", "k", "v", "bias"):
        got, right = f64(grads[name]), f64(wanted[name])
        bound = tolerance * max(1.0, np.abs(right).max())
        np.testing.assert_allclose(got, right, atol=bound, err_msg=name)


@by_main_kernel()
def test_lse_beside_a_large_bias(rng, implementation, dtype):
    """It is the sum, in float32; its gradient is the probabilities."""
    call = draw_padded(rng, dtype, -1e9)
    call = call.replace(q=call.arrays["q"].at[:, ::2].set(0))
    call = call.__class__(
        call.arrays, call.operands, call.static,
        (0 * call.cotangents[0], call.cotangents[1]),
    )  # fmt: skip
    got, want = compute(call, implementation), truth(call)
    np.testing.assert_allclose(got["lse"], want["lse"], rtol=2e-6, atol=2e-5)
    tolerance = 1e-6 if dtype == F32 else 1e-2
    np.testing.assert_allclose(
        f64(got["d_bias"]), want["d_bias"], atol=tolerance, rtol=tolerance
    )
