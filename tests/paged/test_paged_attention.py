"""`paged_attention` against float64, row by row, whatever tables and lengths are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_model import Case, Drawn, pool_of

from jax_kvblock import (
    BlockSpec,
    KVPool,
    KVScales,
    append_kv,
    flash_attention,
    paged_attention,
)

CASES = {
    "mixed": Case(),
    "decode": Case(sequences=((1, 9), (1, 130), (1, 1), (1, 16), (1, 17))),
    "more than a step of keys": Case(sequences=((1, 1500), (2, 513), (1, 512))),
    "more than a tile of queries": Case(sequences=((150, 300), (1, 70), (65, 65))),
    "no keys, no queries": Case(sequences=((1, 0), (0, 40), (2, 2), (0, 0))),
    "fewer keys than queries": Case(sequences=((9, 4), (1, 5))),
    "not causal": Case(causal=False),
    "a window": Case(window=(5, None), sequences=((1, 700), (70, 90))),
    "both sides": Case(causal=False, window=(3, 4), sequences=((9, 40), (20, 20))),
    "endless windows": Case(causal=False, window=(2**31 - 1, 2**31 - 1)),
    "beyond int32": Case(window=(2**40, None), sequences=((1, 70), (9, 4))),
    "softcap": Case(softcap=2.5),
    "sinks": Case(sinks=True, sequences=((1, 0), (3, 30))),
    "scale": Case(scale=-0.3),
    "one key head": Case(heads=16, kv_heads=1),
    "groups of 7": Case(heads=14, kv_heads=2, dim=24, value_dim=24),
    "no groups": Case(heads=3, kv_heads=3),
    "another value dim": Case(value_dim=40),
    "blocks of 1": Case(block_size=1),
    "blocks of 5": Case(block_size=5, sequences=((1, 523), (4, 12))),
    "blocks of 48": Case(block_size=48, sequences=((1, 523), (4, 12))),
    "blocks of 256": Case(block_size=256, sequences=((1, 600), (4, 12))),
    "blocks longer than a step": Case(block_size=600, sequences=((1, 700), (4, 12))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, draw):
    drawn = draw(CASES[name])
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        drawn = Drawn(Case(dtype=dtype, sinks=True), rng)
        drawn.hold(*drawn.run())


# One array, or one for each layer, which a universal layout cannot be.
LAYOUTS = [("NHD", True), ("NHD", False), ("HND", True), ("HND", False)]
LAYOUTS += [("universal", True)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("layout", "contiguous"), LAYOUTS)
def test_pools(layout, contiguous, traced, draw):
    drawn = draw(Case())
    pool = pool_of(drawn, contiguous, layout)
    layer = jnp.int32(1) if traced else 1
    drawn.hold(*drawn.run(pages=pool, layer=layer))


def test_a_padded_batch(draw):
    """q [B, T, N, D]: the rows beyond q_lens are zeros and −inf."""
    drawn = draw(Case())
    lens = np.diff(drawn.starts)
    padded = np.full((len(lens), 7, *drawn.q.shape[1:]), np.nan, drawn.q.dtype)
    for b, n in enumerate(lens):
        padded[b, :n] = drawn.q[drawn.starts[b] : drawn.starts[b + 1]]
    out, lse = drawn.run(q=padded, query_start=None, q_lens=lens)
    assert out.shape == padded.shape and lse.shape == padded.shape[:3]
    inside = np.arange(7) < lens[:, None]
    drawn.hold(np.asarray(out)[inside], np.asarray(lse)[inside])
    np.testing.assert_array_equal(np.asarray(out)[~inside], 0)
    np.testing.assert_array_equal(np.asarray(lse)[~inside], -np.inf)


def test_all_queries_of_a_batch_count_unless_told(draw):
    drawn = draw(Case(sequences=((2, 9), (2, 33), (2, 2))))
    out, lse = drawn.run(q=drawn.q.reshape(3, 2, 4, 16), query_start=None)
    drawn.hold(out.reshape(-1, 4, 16), lse.reshape(-1, 4))


# ---- caches of 8 bits ----------------------------------------------------------------

NARROW = ["float8_e4m3fn", "float8_e5m2", "int8"]
SCALES = ["a number", "heads", "tokens", "all layers"]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("stored", NARROW)
def test_caches_of_8_bits(stored, scales, draw, rng):
    """What they hold, times its scale, is what float64 attends to."""
    drawn = draw(Case(sequences=((1, 37), (6, 20), (1, 0), (40, 90)), sinks=True))
    blocks, size, heads, _ = drawn.k.shape
    form = {"a number": (), "heads": (heads,), "tokens": (blocks, size, heads)}
    shape = form.get(scales, (3, blocks, size, heads))
    of_int = 30.0 if stored == "int8" else 1.0
    made = [
        (rng.uniform(0.5, 2.0, shape) / of_int).astype(np.float32) for _ in range(2)
    ]
    pools = []
    for array, parts, scale in (
        (drawn.k, drawn.keys, made[0]),
        (drawn.v, drawn.values, made[1]),
    ):
        own = scale[1] if scales == "all layers" else scale
        whole = np.broadcast_to(own, (blocks, size, heads))[..., None]
        numbers = np.nan_to_num(array.astype(np.float32)) / whole
        if stored == "int8":
            numbers = np.rint(numbers).clip(-127, 127)
        small = numbers.astype(jnp.dtype(stored))
        pools.append(small)
        real = small.astype(np.float64) * whole
        for b, length in enumerate(drawn.kv_lens):
            ids = drawn.tables[b, np.arange(length) // size]
            parts[b] = real[ids, np.arange(length) % size]
    given: dict[str, Any] = {"pages": tuple(pools)}
    if scales == "all layers":
        spec = BlockSpec(3, 2, size, heads, 16, stored)
        data = np.zeros((blocks, 3, 2, size, heads, 16), jnp.dtype(stored))
        data[:, 1, 0], data[:, 1, 1] = pools
        pool = KVPool(jnp.asarray(data), spec)
        given = {"pages": pool, "layer": jnp.int32(1)}
        static = drawn.run(pages=pool, layer=1, k_scale=made[0], v_scale=made[1])
        drawn.hold(*static)
    k_scale, v_scale = (float(a) if a.ndim == 0 else a for a in made)
    drawn.hold(*drawn.run(**given, k_scale=k_scale, v_scale=v_scale))


def test_keys_that_were_quantized_on_their_way_into_a_pool(rng):
    """`append_kv` and `paged_attention` mean the same by scales."""
    spec = BlockSpec(2, 2, 16, 2, 32, "int8")
    pool, scales = KVPool.zeros(spec, 6), KVScales.zeros(spec, 6)
    k, v = (rng.standard_normal((40, 2, 32)).astype(np.float32) for _ in range(2))
    pool, scales = append_kv(pool, 1, k, v, np.arange(40), scales=scales)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    out = paged_attention(
        q, pool, 1, [[0, 1, 2]], [40], query_start=[0, 3], k_scale=scales.k,
        v_scale=scales.v,
    )  # fmt: skip
    want = flash_attention(q[None], k[None], v[None], causal=True, q_offset=37)[0]
    np.testing.assert_allclose(out, want, rtol=0, atol=0.02)


# ---- data that is wrong --------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -(2**31), 10**6, 2**31 - 1])
def test_an_id_that_is_no_block_is_not_seen(bad, draw):
    """As if the sequence had no keys there; nothing is read in its place."""
    drawn = draw(Case(sequences=((1, 48), (3, 20))))
    drawn.tables[0, 1] = bad
    out, lse = drawn.run()
    without = [np.r_[0:16, 32:48], np.arange(20)]
    drawn.keys = [k[i] for k, i in zip(drawn.keys, without, strict=True)]
    drawn.values = [v[i] for v, i in zip(drawn.values, without, strict=True)]
    drawn.hold(out, lse)


def test_keys_in_front_of_all_windows_may_be_nan(draw):
    """They share a block, and a step, with keys that are seen."""
    drawn = draw(Case(window=(9, None), sequences=((1, 700), (3, 50))))
    for b, (queries, keys) in enumerate(drawn.case.sequences):
        for key in range(keys - queries - 9):
            block, slot = drawn.tables[b, key // 16], key % 16
            drawn.k[block, slot] = drawn.v[block, slot] = np.nan
    drawn.hold(*drawn.run())


def test_lengths_end_with_the_table(draw):
    drawn = draw(Case(sequences=((1, 64), (2, 64), (1, 64))))
    exact = drawn.run()
    huge = drawn.run(kv_lens=np.array([65, 2**31 - 1, 64], np.int32))
    for got, want in zip(huge, exact, strict=True):
        np.testing.assert_array_equal(got, want)
    out, lse = drawn.run(kv_lens=np.array([-1, -(2**31), 0], np.int32))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a_table_of_more_keys_than_an_int32(draw):
    """2**31 of them: lengths end with int32 then."""
    drawn = draw(Case(block_size=2**14, sequences=((1, 30),), heads=1, kv_heads=1))
    tables = np.full((1, 2**17), -1, np.int32)
    tables[0, 0] = drawn.tables[0, 0]
    drawn.hold(*drawn.run(block_tables=tables))


def test_rows_of_no_sequence_are_zeros(draw):
    """Before the first, after the last, and where query_start falls."""
    drawn = draw(Case(sequences=((4, 20), (4, 30), (4, 9))))
    q = np.concatenate([drawn.q, np.full_like(drawn.q[:3], np.nan)])
    out, lse = drawn.run(q=q)
    drawn.hold(out[:12], lse[:12])
    np.testing.assert_array_equal(out[12:], 0)
    # No sequence has rows where a start falls.
    for starts in ([1, 4, 3, 12], [0, 4, 9, 8], [5, -1, 8, 12]):
        out, lse = drawn.run(q=q[:12], query_start=np.array(starts, np.int32))
        assert np.isneginf(lse).all() and (np.asarray(out) == 0).all()
    # Beyond the tokens it is their end, and below 0 the first of them.
    wild = np.array([-(2**31), 4, 2**31 - 1, 10**9], np.int32)
    out, lse = drawn.run(q=q[:12], query_start=wild)
    want = drawn.run(q=q[:12], query_start=np.array([0, 4, 12, 12], np.int32))
    for got, exact in zip((out, lse), want, strict=True):
        np.testing.assert_array_equal(got, exact)


def test_starts_of_one_member_of_a_vmap_that_fall(draw):
    """The others have their rows."""
    drawn = draw(Case(sequences=((4, 20), (4, 30))))
    starts = jnp.array([[0, 4, 8], [0, 9, 3], [0, 4, 8]])
    out, lse = jax.vmap(lambda s: drawn.run(query_start=s))(starts)
    drawn.hold(out[0], lse[0])
    drawn.hold(out[2], lse[2])
    assert np.isneginf(lse[1]).all() and (np.asarray(out[1]) == 0).all()


def test_two_sequences_may_share_blocks(draw):
    drawn = draw(Case(sequences=((1, 40), (1, 40))))
    drawn.tables[1] = drawn.tables[0]
    drawn.keys[1], drawn.values[1] = drawn.keys[0], drawn.values[0]
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("layer", [3, -1, 2**31 - 1])
@pytest.mark.parametrize("contiguous", [True, False])
def test_of_a_layer_outside_the_pool_nobody_sees_a_key(contiguous, layer, draw):
    drawn = draw(Case())
    pool = pool_of(drawn, contiguous)
    out, lse = drawn.run(pages=pool, layer=jnp.int32(layer))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_nothing_at_all(draw):
    """No sequences, no tokens, or tables without columns."""
    drawn = draw(Case())
    none = np.zeros(0, np.int32)
    out, lse = drawn.run(block_tables=drawn.tables[:0], kv_lens=none, query_start=[0])
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()
    out, _ = drawn.run(q=drawn.q[:0])
    assert out.shape == (0, 4, 16)
    out, lse = drawn.run(block_tables=drawn.tables[:, :0])
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()
