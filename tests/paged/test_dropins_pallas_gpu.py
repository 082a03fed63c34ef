"""The drop-in for Pallas's paged_attention on GPUs, against that kernel itself."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock.dropins.pallas_gpu import paged_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention as owner

    owner_function, owner_reference = (
        owner.paged_attention,
        owner.paged_attention_reference,
    )


def drawn(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[Any, ...]:
    """3 sequences of up to 32 keys in pages of 8, heads first."""
    q = jnp.asarray(rng.standard_normal((3, 6, 32)), jnp.float32)
    k, v = 20 * rng.standard_normal((2, 2, 9, 8, 32))
    if dtype != np.int8:
        k, v = k / 20, v / 20
    tables = jnp.asarray(rng.permutation(9)[:8].reshape(2, 4), jnp.int32)
    tables = jnp.concatenate([tables, tables[:1]])
    return q, jnp.asarray(k, dtype), jnp.asarray(v, dtype), tables


@pytest.mark.parametrize("lengths", [[5, 32, 9], None])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("scales", [False, True])
def test_the_kernel_itself(scales, cap, lengths, rng):
    """Interpreted, with a factor of each key and value for caches of 8 bits."""
    args: tuple[Any, ...] = drawn(rng, np.int8 if scales else np.float32)
    args += (None if lengths is None else jnp.asarray(lengths, jnp.int32),)
    if scales:
        factors = rng.random((2, 2, 9, 8)) / 20
        args += tuple(jnp.asarray(factors, jnp.float32))
    options = {"k_splits": 2, "pages_per_compute_block": 1, "interpret": True}
    with jax.default_matmul_precision("highest"):
        want = owner_function(*args, attn_logits_soft_cap=cap, **options)
        made = paged_attention(*args, attn_logits_soft_cap=cap, **options)
    np.testing.assert_allclose(made, want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_its_reference(dtype, rng):
    q, k, v, tables = (
        a if a.dtype == jnp.int32 else a.astype(dtype) for a in drawn(rng)
    )
    lengths = jnp.int32([5, 32, 9])
    dense = [jnp.moveaxis(a[:, tables], 0, 3).reshape(3, 32, 2, 32) for a in (k, v)]
    want = owner_reference(q, *dense, lengths)
    made = paged_attention(q, k, v, tables, lengths)
    assert made.dtype == want.dtype == dtype
    np.testing.assert_allclose(
        made.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=2e-2
    )


def test_factors_of_keys_or_of_values_alone(rng):
    args = (*drawn(rng), jnp.int32([5, 32, 9]))
    factors = jnp.asarray(1 + rng.random((2, 9, 8)), jnp.float32)
    q, k, v, *rest = args
    for scales, same in (
        ((factors, None), (q, k * factors[..., None], v)),
        ((None, factors), (q, k, v * factors[..., None])),
    ):
        want = paged_attention(*same, *rest)
        np.testing.assert_allclose(
            paged_attention(*args, *scales), want, rtol=0, atol=2e-6
        )


def test_a_page_that_is_none_is_not_seen(rng):
    """And what nobody may see may be NaN, also its factor."""
    q, k, v, tables = drawn(rng)
    used = np.asarray(tables[0, :2])
    unused = np.setdiff1d(np.arange(9), used)
    k, v = (a.at[:, unused].set(jnp.nan) for a in (k, v))
    factors = jnp.ones((2, 9, 8)).at[:, unused].set(jnp.nan)
    tables = jnp.stack([tables[0].at[2:].set(-1)] * 3)
    made = paged_attention(q, k, v, tables, None, factors, factors)
    want = paged_attention(q, k, v, tables[:, :2], None)
    assert np.isfinite(made).all()
    np.testing.assert_array_equal(made, want)


@pytest.mark.cpu  # plain JAX serves factors of each key
def test_nothing_of_the_cache_is_copied():
    pages = jax.ShapeDtypeStruct((8, 4096, 16, 64), jnp.int8)
    scales = jax.ShapeDtypeStruct((8, 4096, 16), jnp.float32)
    q = jax.ShapeDtypeStruct((4, 16, 64), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    lens = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(paged_attention).lower(
        q, pages, pages, tables, lens, scales, scales
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 8 * 4096 * 16 * 64 / 16


def test_the_signature():
    def told(function: Any) -> list[tuple[Any, ...]]:
        made = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in made]

    assert told(paged_attention) == told(owner_function)
