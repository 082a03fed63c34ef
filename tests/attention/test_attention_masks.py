"""Masks: what is never read may hold anything, and empty rows give zeros and -inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact, assert_near
from attention_model import (
    BF16,
    F32,
    by_kernel,
    by_turns,
    cast,
    compute,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    served,
    truth,
)

from jax_kvblock import AttentionTiles

by_both = by_kernel(F32, BF16)
by_junk = pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf], ids=str)
i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
SINKS = cast([2, -1, 0.5, 4], F32)


def spoil(x, where, junk):
    """x with junk where the mask is true."""
    where = np.asarray(where)
    return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - where.ndim)), junk, x)


def beyond(lens, length):
    return np.arange(length) >= np.asarray(lens)[:, None]


def assert_untouched(got, places):
    """Gradients at these places are exactly zero."""
    for name, where in places.items():
        x = np.asarray(got[name], np.float32)
        assert (x[np.broadcast_to(where, x.shape[: where.ndim])] == 0).all(), name


# ---- what is never read --------------------------------------------------------------


@by_both
@by_junk
def test_junk_beyond_lens(rng, implementation, dtype, junk):
    """In q, k, v and the bias: neither the output nor any gradient sees it."""
    call = draw(rng, dtype, causal=True, q_offset=jnp.int32(60), sinks=SINKS)
    q_lens, kv_lens = i32(70, 33), i32(65, 0)
    rows, keys = beyond(q_lens, 70), beyond(kv_lens, 130)
    bias = draw_bias(rng, call, (False, False))
    dead = (rows[:, :, None] | keys[:, None, :])[:, None]
    dead = np.broadcast_to(dead, bias.shape)
    call = call.replace(
        q_lens=q_lens,
        kv_lens=kv_lens,
        q=spoil(call.arrays["q"], rows, junk),
        k=spoil(call.arrays["k"], keys, junk),
        v=spoil(call.arrays["v"], keys, junk),
        bias=spoil(bias, dead, junk),
    )
    got = assert_exact(call, implementation)
    places = {"out": rows, "d_q": rows, "d_k": keys, "d_v": keys, "d_bias": dead}
    assert_untouched(got, places)
    assert np.isneginf(np.asarray(got["lse"])[rows]).all()


@by_both
@by_junk
def test_junk_in_rows_of_no_sequence(rng, implementation, dtype, junk):
    """Before the first packed sequence and after the last."""
    call = draw(rng, dtype, packed=True, causal=True, sinks=SINKS)
    call = call.replace(cu_seqlens=(i32(2, 40, 40, 66), i32(5, 50, 61, 127)))
    rows, keys = (np.ones(n, bool) for n in (70, 130))
    rows[2:66], keys[5:127] = False, False
    call = call.replace(
        q=spoil(call.arrays["q"], rows, junk),
        k=spoil(call.arrays["k"], keys, junk),
        v=spoil(call.arrays["v"], keys, junk),
    )
    got = assert_exact(call, implementation)
    assert_untouched(got, {"out": rows, "d_q": rows, "d_k": keys, "d_v": keys})
    assert np.isneginf(np.asarray(got["lse"])[rows]).all()


@by_both
@by_junk
def test_junk_in_sequences_without_the_other_side(rng, implementation, dtype, junk):
    """Queries without keys, and keys without queries, between others."""
    call = draw(rng, dtype, packed=True, causal=True, sinks=SINKS)
    call = call.replace(cu_seqlens=(i32(0, 30, 40, 66, 66, 70),
                                    i32(0, 50, 50, 90, 110, 130)))  # fmt: skip
    rows, keys = (np.zeros(n, bool) for n in (70, 130))
    rows[30:40], keys[90:110] = True, True
    want = truth(call)
    call = call.replace(
        q=spoil(call.arrays["q"], rows, junk),
        k=spoil(call.arrays["k"], keys, junk),
        v=spoil(call.arrays["v"], keys, junk),
    )
    got = compute(call, implementation)
    assert_near(call, got, want)
    assert_untouched(got, {"out": rows, "d_q": rows, "d_k": keys, "d_v": keys})
    np.testing.assert_array_equal(got["lse"][30:40], np.broadcast_to(SINKS, (10, 4)))


def lists(rows, columns=4, **blocks):
    """Tile lists shared by batch and heads: a list a query tile."""
    indices = np.full((1, 1, len(rows), columns), -1, np.int32)
    counts = np.zeros((1, 1, len(rows)), np.int32)
    for i, row in enumerate(rows):
        indices[0, 0, i, : len(row)], counts[0, 0, i] = row, len(row)
    return AttentionTiles(jnp.asarray(indices), jnp.asarray(counts), **blocks)


@by_both
@by_junk
def test_junk_in_tiles_that_no_one_lists(rng, implementation, dtype, junk):
    """Key tile 1 of 3 is in no list; the second query tile has none at all."""
    call = draw(rng, dtype, batch=1, q_len=300, kv_len=300, sinks=SINKS)
    keys = np.zeros((1, 300), bool)
    keys[:, 128:256] = True
    bias = draw_bias(rng, call, (True, True))
    dead = np.zeros(bias.shape, bool)
    dead[:] = keys[:, None, None, :]
    dead[:, :, 128:256] = True
    call = call.replace(
        tiles=lists([[2, 0], [], [0]]),
        k=spoil(call.arrays["k"], keys, junk),
        v=spoil(call.arrays["v"], keys, junk),
        bias=spoil(bias, dead, junk),
    )
    got = assert_exact(call, implementation)
    assert_untouched(got, {"d_k": keys, "d_v": keys, "d_bias": dead})
    np.testing.assert_array_equal(
        np.asarray(got["lse"])[0, 128:256], np.broadcast_to(SINKS, (128, 4))
    )


@by_both
def test_junk_in_a_tile_reaches_those_who_list_it_alone(rng, implementation, dtype):
    """Per head, too: the queries of other tiles and heads stay clean."""
    call = draw(rng, dtype, batch=1, q_len=256, kv_len=256, heads=2, kv_heads=1)
    indices = np.zeros((1, 2, 2, 2), np.int32)
    indices[..., 1] = 1
    counts = np.int32([[[2, 1], [1, 1]]])  # head 0's first query tile alone visits it
    tiles = AttentionTiles(jnp.asarray(indices), jnp.asarray(counts))
    keys = np.zeros((1, 256), bool)
    keys[:, 128:] = True
    v = spoil(call.arrays["v"], keys, np.nan)
    got = compute(call.replace(tiles=tiles, v=v), implementation)
    want = truth(call.replace(tiles=tiles, v=v))
    assert np.isnan(want["out"]).mean() == 0.25
    assert_close(got["out"], want["out"])
    clean = np.ones((1, 256, 2), bool)
    clean[:, :128, 0] = False
    found = np.asarray(got["d_q"], np.float32)[clean]
    assert_close(found, want["d_q"][clean], dtype)


@by_both
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e38], ids=str)
def test_junk_in_masked_keys(rng, implementation, dtype, junk):
    """A masked key's score may be anything; its value is finite."""
    if dtype != F32 and junk == 1e38:
        junk = 3e38
    call = draw(rng, dtype, causal=True, sinks=SINKS)
    keys = np.broadcast_to(np.arange(130) >= 70, (2, 130))  # after the last query
    k = spoil(call.arrays["k"], keys, junk)
    call = call.replace(k=k)
    got = compute(call, implementation, gradients=np.isfinite(junk))
    assert_near(call, got, truth(call))


@by_both
@by_junk
def test_junk_in_masked_bias(rng, implementation, dtype, junk):
    """By the diagonal, by segments and by a window, with gradients."""
    call = draw(rng, dtype, q_len=130, causal=True, window=(60, None))
    ids = draw_segments(rng, 2, 130)
    call = call.replace(segment_ids=jnp.asarray(ids), sinks=SINKS)
    bias = draw_bias(rng, call, (False, False))
    ahead = np.arange(130) - np.arange(130)[:, None]
    dead = (ids[:, :, None] != ids[:, None, :]) | (ahead > 0) | (ahead < -60)
    dead = np.broadcast_to(dead[:, None], bias.shape)
    got = assert_exact(call.replace(bias=spoil(bias, dead, junk)), implementation)
    assert_untouched(got, {"d_bias": dead})


# ---- rows that attend to nothing -----------------------------------------------------

EMPTY = {
    "causal": {"causal": True, "q_offset": i32(-30, -200)},
    "causal by kv_offset": {"causal": True, "kv_offset": i32(30, 200)},
    "window": {"window": (4, 4), "q_offset": i32(100, 300)},
    "segments": {"segment_ids": (i32([0] * 70, [7] * 70), i32([1] * 130, [7] * 130))},
    "kv_lens": {"kv_lens": i32(0, 130)},
    "q_lens": {"q_lens": i32(0, 69)},
    "tiles": {"tiles": lists([[]])},
    "tiles outside": {"tiles": lists([[-1, 9, 2**30]])},
}


@by_turns("name, sinks", [(n, s) for s in (None, SINKS) for n in EMPTY], F32, BF16, F32)
def test_empty_rows(rng, implementation, dtype, name, sinks):
    options = EMPTY[name]
    call = draw(rng, dtype, **options, sinks=sinks)
    got = assert_exact(call, implementation)
    exists = np.ones((2, 70), bool)
    if "q_lens" in options:
        exists = ~beyond(options["q_lens"], 70)
    empty = np.isneginf(truth(call.replace(sinks=None))["lse"]).all(-1)
    assert empty.any(), "no row is empty"
    assert_untouched(got, {"out": empty, "d_q": empty})
    lse = np.asarray(got["lse"])
    assert np.isneginf(lse[~exists]).all()
    want = -np.inf if sinks is None else sinks
    np.testing.assert_array_equal(
        lse[empty & exists], np.broadcast_to(want, lse[empty & exists].shape)
    )


@by_both
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_minus_inf_bias(rng, implementation, dtype, sinks):
    """Single entries, keys, whole tiles, and whole rows of it."""
    call = draw(rng, dtype, kv_len=300, sinks=sinks)
    bias = np.array(draw_bias(rng, call, (False, True)))
    bias[:, :, 3], bias[0, :, 40:] = -np.inf, -np.inf
    bias[:, :, :, 128:256], bias[1, :, :, 7] = -np.inf, -np.inf
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    got = assert_exact(call.replace(bias=jnp.asarray(bias)), implementation)
    assert_untouched(got, {"d_bias": np.isneginf(bias)})
    assert (np.asarray(got["out"], np.float32)[:, 3] == 0).all()


@by_kernel(F32)
def test_minus_inf_sinks_are_no_sinks(rng, implementation, dtype):
    call = draw(rng, dtype, kv_lens=i32(0, 130))
    want = compute(call, implementation)
    got = compute(call.replace(sinks=jnp.full(4, -jnp.inf)), implementation)
    assert (np.asarray(got.pop("d_sinks")) == 0).all()
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], atol=1e-6, err_msg=name)


# ---- lengths, segments, windows, packed ----------------------------------------------


@by_both
def test_lens_beyond_the_sizes_are_the_sizes(rng, implementation, dtype):
    """`j < kv_lens[b]` holds for every key there is; below 0, for none."""
    call = draw(rng, dtype, q_lens=i32(71, 2**30), kv_lens=i32(2**31 - 1, -3))
    assert_exact(call, implementation)


@by_both
def test_any_segment_ids(rng, implementation, dtype):
    """Unsorted, negative and extreme ids are ids."""
    values = np.int32([-(2**31), -1, 0, 2**31 - 1])
    call = draw(rng, dtype, q_len=130, kv_len=290)
    ids = tuple(jnp.asarray(rng.choice(values, (2, n))) for n in (130, 290))
    assert_exact(call.replace(segment_ids=ids), implementation)


@pytest.mark.parametrize(
    "implementation, dtype, window",
    [
        pytest.param(*row.values, window, id=f"{row.id}-{window}")
        for i, window in enumerate(
            [(0, 0), (None, 5), (5, None), (0, None), (None, 0), (2**31 - 1, 2**31 - 1)]
        )
        for row in served((F32, BF16)[i % 2])
    ],
)
def test_windows(rng, implementation, dtype, window):
    call = draw(rng, dtype, q_len=140, kv_len=280, window=window)
    assert_exact(call.replace(q_offset=i32(0, 130)), implementation)


@by_kernel(F32)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (50, 3)}], ids=str)
def test_far_offsets(rng, implementation, dtype, options):
    """Positions far from 0, as in a long context: what counts is their difference."""
    call = draw(rng, dtype, **options)
    far = 2**31 - 200
    call = call.replace(q_offset=i32(far, -far), kv_offset=i32(far - 9, 40 - far))
    assert_exact(call, implementation, gradients=False)


@by_kernel(F32)
def test_offsets_far_apart(rng, implementation, dtype):
    """Every key is far behind, or far ahead."""
    call = draw(rng, dtype, causal=True, q_offset=i32(2**31 - 100, -(2**31) + 100))
    got = assert_exact(call, implementation, gradients=False)
    lse = np.asarray(got["lse"])
    assert np.isfinite(lse[0]).all()
    assert np.isneginf(lse[1]).all()


PACKED = {
    "one": ([0, 70], [0, 130]),
    "empty ones": ([0, 0, 30, 30, 70, 70], [0, 10, 10, 90, 130, 130]),
    "single rows": (range(71), [*range(70), 130]),
    "across tiles": ([0, 5, 68, 70], [0, 127, 129, 130]),
    "none": ([9, 9], [3, 3]),
}


@by_turns("name", PACKED, F32, BF16)
def test_packed_sequences(rng, implementation, dtype, name):
    cu = PACKED[name]
    cu = i32(*cu[0]), i32(*cu[1])
    offsets = jnp.asarray(rng.integers(0, 9, len(cu[0]) - 1), jnp.int32)
    call = draw(rng, dtype, packed=True, causal=True, cu_seqlens=cu, q_offset=offsets)
    assert_exact(call, implementation)


# ---- tile lists ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation, dtype, block_q, block_kv, shared",
    [
        pytest.param(*row.values, *blocks, shared, id=f"{row.id}-{blocks}-{shared}")
        for i, (blocks, shared) in enumerate(
            [
                ((128, 128), (False, False)),
                ((256, 128), (True, False)),
                ((128, 384), (False, True)),
                ((256, 256), (True, True)),
            ]
        )
        for row in served((BF16, F32)[i % 2])
    ],
)
def test_tile_lists(rng, implementation, dtype, block_q, block_kv, shared):
    """Any order, entries that are skipped, and junk beyond the counts."""
    call = draw(rng, dtype, q_len=300, kv_len=700, causal=True, q_offset=i32(400, 90))
    tiles = draw_tiles(rng, call, shared, block_q, block_kv, share=0.6)
    assert_exact(call.replace(tiles=tiles), implementation)


@by_kernel(F32)
def test_full_tile_lists_are_no_lists(rng, implementation, dtype):
    call = draw(rng, dtype, q_len=200, kv_len=300, causal=True)
    got = compute(call.replace(tiles=lists([[0, 1, 2], [2, 1, 0]])), implementation)
    want = compute(call, implementation)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], atol=2e-5, err_msg=name)


def test_tiles_are_a_pytree():
    tiles = lists([[0], [1]], block_kv=256)
    leaves, tree = jax.tree.flatten(tiles)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).block_kv == 256
    assert jax.jit(lambda x: x.counts + 1)(tiles).shape == (1, 1, 2)
