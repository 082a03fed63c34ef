"""`rope_append` and `append_kv` into 8 bits against float64, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from append_cases import BASE, CASES, KEPT, MANY, MANY_KEPT, Drawn
from model import assert_same_bits, make_pool, random_bits, read_pool

from jax_kvblock import BlockSpec, KVPool, append_kv, rope_append


@pytest.mark.parametrize("name", [*CASES, *MANY])
def test_rope_append(name, rng):
    drawn = Drawn((CASES | MANY)[name], rng)
    q, pool, scales = drawn.rope_append()
    drawn.hold(q, pool, scales and (scales.k, scales.v))


@pytest.mark.parametrize("name", [*KEPT, *MANY_KEPT])
def test_append_kv(name, rng):
    drawn = Drawn((KEPT | MANY_KEPT)[name], rng)
    _, pool, scales = drawn.append_kv()
    drawn.hold(None, pool, scales and (scales.k, scales.v), turns=False)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int32", "uint8", "complex64"])
def test_zeros_behind_in_every_dtype(dtype, rng):
    """Where nothing is computed, any dtype is copied, bit for bit."""
    drawn = Drawn(BASE.replaced(zero_tail=True, tokens=12), rng)
    blocks = random_bits(rng, drawn.before.shape, dtype)
    k, v = (random_bits(rng, drawn.k.shape, dtype) for _ in range(2))
    pool = make_pool(blocks)
    made = append_kv(pool, 1, k, v, drawn.slots, zero_tail=True)
    places = drawn.places()
    blocks[[block for block, offset in places.values() if offset == 0], 1] = 0
    for token, (block, offset) in places.items():
        blocks[block, 1, 0, offset] = k[token]
        blocks[block, 1, 1, offset] = v[token]
    assert_same_bits(read_pool(made), blocks)


GRIDS = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.parametrize("dtype", GRIDS)
def test_every_tie_rounds_to_even(dtype):
    """Each number of a dtype, the middle of each pair, and what lies beside these."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    grid = np.unique(codes[np.isfinite(codes)])
    middles = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    x = np.concatenate([x, [np.nan, np.inf, -np.inf, 1e30, 0.0, -0.0]])
    x = np.resize(np.float32(x), (8, 1, 128))
    spec = BlockSpec(1, 1, 8, 1, 128, dtype)
    pool = KVPool.zeros(spec, 1)
    got = append_kv(pool, 0, x, None, range(8), k_scale=1.0)
    got = np.asarray(got.data).reshape(x.shape)
    if dtype == "int8":
        want = np.rint(np.clip(np.nan_to_num(x, posinf=127, neginf=-128), -128, 127))
    else:
        limit = float(jnp.finfo(dtype).max)
        want = np.clip(x, -limit, limit)
    want = want.astype(got.dtype)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], want.view(np.uint8)[~nan])


def test_angles_are_those_of_float64_at_any_position(rng):
    """cos and sin themselves: q is (1, 0), and turns to (cos, sin)."""
    positions = np.r_[0, 1, 2**20 - 1, 2**20, rng.integers(0, 2**31, 12)]
    positions = positions.astype(np.int32)
    half = 64
    inv_freq = np.float32(5e5 ** -(np.arange(half) / half))
    q = np.zeros((len(positions), 1, 2 * half), np.float32)
    q[..., :half] = 1
    pool = KVPool.zeros(BlockSpec(1, 2, 1, 1, 2 * half, "float32"), 1)
    none = np.full(len(positions), -1)
    got, _ = rope_append(q, q, q, pool, 0, none, positions, inv_freq=inv_freq)
    angle = positions[:, None] * inv_freq.astype(np.float64)
    want = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    near = positions <= 2**20
    error = np.abs(np.asarray(got)[:, 0] - want)
    assert error[near].max() < 3e-7
    assert error.max() < 2e-5  # to 2**31
    assert jax.config.jax_enable_x64 is False and got.dtype == np.float32
