"""Decoding over the pages that a step chooses: against float64, page by page."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from messages import check

from jax_kvblock import BlockSpec, KVPool, append_kv, gather_kv, paged_attention
from jax_kvblock.sparse import (
    PageSummary,
    refresh_summary,
    select_pages,
    summarize_pages,
)

pytestmark = pytest.mark.usefixtures("exact_products")

PAGES, SIZE, KV_HEADS, HEADS, DIM, WIDTH = 40, 8, 2, 4, 16, 12


@pytest.fixture
def cache(rng):
    """Pages of one layer, tables and lengths of three sequences."""
    k, v = rng.standard_normal((2, PAGES, SIZE, KV_HEADS, DIM)).astype(np.float32)
    tables = rng.permutation(PAGES)[: 3 * WIDTH].reshape(3, WIDTH).astype(np.int32)
    lens = np.int32([90, 45, 7])
    for b in range(3):
        tables[b, -(-lens[b] // SIZE) :] = -1
    return k, v, tables, lens


def queries(rng, steps=1):
    return jnp.asarray(3 * rng.standard_normal((3, steps, HEADS, DIM)), jnp.float32)


def by_definition(q, k, v, tables, lens, kept, size=SIZE):
    """Attention of the last positions to the kept pages of each table, float64."""
    steps, dim = q.shape[1], q.shape[-1]
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        at = lens[b] - steps + t
        seen = [p for p in range(at + 1) if kept[b, p // size]]
        if at < 0 or not seen:
            continue
        rows = [(tables[b, p // size], p % size, n // 2) for p in seen]
        keys = np.float64([k[row] for row in rows])
        scores = keys @ np.float64(q[b, t, n]) / np.sqrt(dim)
        p = np.exp(scores - scores.max())
        out[b, t, n] = p @ np.float64([v[row] for row in rows]) / p.sum()
    return out


def kept_pages(chosen, tables, lens):
    """Which places of the whole tables were chosen, in their order."""
    made = np.zeros(tables.shape, bool)
    for b, row in enumerate(np.asarray(chosen.block_tables)):
        ids = row[row >= 0]
        at = [int(np.flatnonzero(tables[b] == i)[0]) for i in ids]
        assert at == sorted(set(at))
        made[b, at] = True
    return made


@pytest.mark.parametrize("steps", [1, 5])
def test_attention_over_chosen_pages(rng, cache, steps):
    k, v, tables, lens = cache
    q = queries(rng, steps)

    def run(q, k, v, tables, lens):
        chosen = select_pages(
            q, summarize_pages(k), tables, lens, num_pages=5, block_size=SIZE
        )
        out = paged_attention(q, (k, v), None, chosen.block_tables, chosen.kv_lens)
        return chosen, out

    chosen, out = jit(run)(q, k, v, tables, lens)
    assert chosen.block_tables.shape == (3, 5)
    kept = kept_pages(chosen, tables, lens)
    assert list(kept.sum(1)) == [5, 5, 1]  # the last sequence has one page alone
    assert kept[:, 0].all()  # the sink
    for b in range(3):  # those of the step's own positions
        assert kept[b, max(lens[b] - steps, 0) // SIZE : -(-lens[b] // SIZE)].all()
    np.testing.assert_array_equal(chosen.kv_lens, [34, 37, 7])
    want = by_definition(q, k, v, tables, lens, kept)
    np.testing.assert_allclose(out, want, rtol=0, atol=3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 5])
def test_attention_over_chosen_pages_by_kernels(rng, steps):
    """In bfloat16, heads of 128: pages are chosen and attended to on a GPU."""
    spec = BlockSpec(1, 2, 16, 2, 128, jnp.bfloat16)
    tables, lens = rng.permutation(PAGES)[:36].reshape(3, 12), np.int32([180, 90, 14])
    tables = tables.astype(np.int32)
    for b in range(3):
        tables[b, -(-lens[b] // 16) :] = -1
    values = jnp.asarray(rng.standard_normal((PAGES, *spec.block_shape)), jnp.bfloat16)
    pool = KVPool.wrap(values, spec)
    k, v = (np.float64(values[:, 0, i]) for i in range(2))
    q = jnp.asarray(3 * rng.standard_normal((3, steps, 4, 128)), jnp.bfloat16)

    def run(q, pool, k, tables, lens):
        summary = summarize_pages(k)
        how = {"num_pages": 5, "block_size": 16}
        chosen = select_pages(q, summary, tables, lens, **how)
        return chosen, paged_attention(
            q, pool, 0, chosen.block_tables, chosen.kv_lens, implementation="cuda"
        )

    chosen, out = jit(run)(q, pool, values[:, 0, 0], tables, lens)
    kept = kept_pages(chosen, tables, lens)
    assert list(kept.sum(1)) == [5, 5, 1] and kept[:, 0].all()
    want = by_definition(np.float64(q), k, v, tables, lens, kept, size=16)
    np.testing.assert_allclose(np.float64(out), want, rtol=0, atol=3e-2)


def test_the_pages_with_most_votes(rng, cache):
    """By definition: the bound of each head and query, a softmax, the mean."""
    k, _, tables, lens = cache
    q = queries(rng, 2)
    chosen = select_pages(
        q, summarize_pages(k), tables, lens, num_pages=6, block_size=SIZE, sinks=1
    )
    kept = kept_pages(chosen, tables, lens)
    for b in range(2):
        count = -(-lens[b] // SIZE)
        last = range((lens[b] - 2) // SIZE, count)
        free = [w for w in range(count) if w not in last]
        bounds = np.zeros((2, HEADS, len(free)))
        for t, n, i in np.ndindex(bounds.shape):
            page = np.float64(k[tables[b, free[i]], :, n // 2])
            ends = np.stack([page.min(0), page.max(0)]) * np.float64(q[b, t, n])
            bounds[t, n, i] = ends.max(0).sum() / 4
        weights = np.exp(bounds - bounds.max(-1, keepdims=True))
        votes = (weights / weights.sum(-1, keepdims=True)).mean((0, 1))
        best = sorted(free[1:], key=lambda w: -votes[free.index(w)])
        want = {free[0], *last, *best[: 6 - 1 - len(last)]}
        assert set(np.flatnonzero(kept[b])) == want
        held = sum(votes[free.index(w)] for w in want if w in free)
        np.testing.assert_allclose(chosen.mass[b], held, rtol=1e-4)


def test_a_scale_below_0_asks_for_the_smallest_products(rng, cache):
    k, _, tables, lens = cache
    q, summary = queries(rng, 2), summarize_pages(k)
    options = {"num_pages": 5, "block_size": SIZE}
    want = select_pages(-q, summary, tables, lens, scale=0.25, **options)
    got = select_pages(q, summary, tables, lens, scale=-0.25, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_needle_is_found(rng, cache):
    k, _, tables, lens = (np.array(x) for x in cache)
    q = queries(rng)
    k[tables[0, 6], 3] = 4 * np.asarray(q)[0, 0, ::2]  # of both key heads
    chosen = select_pages(
        q, summarize_pages(k), tables, lens, num_pages=3, block_size=SIZE
    )
    assert set(np.flatnonzero(kept_pages(chosen, tables, lens)[0])) == {0, 6, 11}


def test_room_for_all_pages_changes_nothing(rng, cache):
    k, _, tables, lens = cache
    q = queries(rng, 3)
    chosen = select_pages(
        q, summarize_pages(k), tables, lens, num_pages=WIDTH, block_size=SIZE
    )
    np.testing.assert_array_equal(chosen.block_tables, tables)
    np.testing.assert_array_equal(chosen.kv_lens, lens)


def test_what_is_not_written_yet_may_be_anything(rng, cache):
    """The rest of the last page, pages that no table names, and empty sequences."""
    k, _, tables, lens = cache
    q = queries(rng)
    hurt = np.full_like(k, np.nan)
    for b in range(3):
        for p in range(lens[b]):
            hurt[tables[b, p // SIZE], p % SIZE] = k[tables[b, p // SIZE], p % SIZE]
    options = {"num_pages": 4, "block_size": SIZE}
    want = select_pages(q, summarize_pages(k), tables, lens, **options)
    got = select_pages(q, summarize_pages(hurt), tables, lens, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    none = select_pages(q, summarize_pages(hurt), tables, lens * 0, **options)
    assert (np.asarray(none.kv_lens) == 0).all()
    assert (np.asarray(none.block_tables) == -1).all()


def test_holes_of_a_table_are_not_chosen(rng, cache):
    k, _, tables, lens = (np.array(x) for x in cache)
    tables[0, 2:9] = [-1, PAGES, -5, -1, -1, 4000, -1]
    chosen = select_pages(
        queries(rng), summarize_pages(k), tables, lens, num_pages=8, block_size=SIZE
    )
    want = np.append(tables[0, [0, 1, 9, 10, 11]], [-1, -1, -1])
    np.testing.assert_array_equal(chosen.block_tables[0], want)
    assert chosen.kv_lens[0] == 4 * SIZE + 2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_summaries_of_a_pool_keep_up(rng, layout):
    """Refreshed after each append, they are those of the whole layer."""
    spec = BlockSpec(2, 2, SIZE, KV_HEADS, DIM, jnp.float32, layout)
    pool = KVPool.zeros(spec, 6)
    summary = summarize_pages(pool, 1)
    assert summary.low.shape == (6, KV_HEADS, DIM)

    @jit
    def step(pool, summary, k, slots):
        pool = append_kv(pool, 1, k, k, slots)
        return pool, refresh_summary(summary, pool, slots // SIZE, 1)

    for slots in ([8, 9, 40], [10, 41, -1], [47, 47 - 8, 0]):
        k = jnp.asarray(rng.standard_normal((3, KV_HEADS, DIM)), jnp.float32)
        pool, summary = step(pool, summary, k, jnp.int32(slots))
    want = summarize_pages(pool, jnp.int32(1))
    jax.tree.map(np.testing.assert_array_equal, summary, want)
    assert np.abs(want.low).max() > 0
    for keys, layer in ((pool, 1), (gather_kv(pool, 1, range(6))[0], None)):
        if layer is None:
            keys = keys.reshape(6, SIZE, KV_HEADS, DIM)
        some = summarize_pages(keys, layer, ids=[5, 99, -1, 1])
        np.testing.assert_array_equal(some.high[::3], want.high[jnp.int32([5, 1])])
        assert not np.any(some.low[1:3]) and not np.any(some.high[1:3])


def test_what_is_chosen_has_no_gradient(rng, cache):
    k, _, tables, lens = cache
    q, how = queries(rng), {"num_pages": 4, "block_size": SIZE}

    def held(q, k):
        return select_pages(q, summarize_pages(k), tables, lens, **how).mass.sum()

    assert held(q, k) > 0
    for slopes in jit(jax.grad(held, (0, 1)))(q, k):
        assert not np.any(slopes)


def test_vmap(rng, cache):
    k, _, tables, lens = cache
    q = jnp.stack([queries(rng) for _ in range(2)])
    summary = summarize_pages(k)

    def one(q):
        return select_pages(q, summary, tables, lens, num_pages=4, block_size=SIZE)

    got = jit(jax.vmap(one))(q)
    for i in range(2):
        np.testing.assert_array_equal(got.block_tables[i], one(q[i]).block_tables)


def some(q_shape=(3, 1, HEADS, DIM), heads=KV_HEADS, **changes):
    bounds = jnp.zeros((PAGES, heads, DIM))
    options = {
        "block_tables": jnp.zeros((3, WIDTH), jnp.int32),
        "kv_lens": jnp.zeros(3, jnp.int32),
        "num_pages": 4,
        "block_size": SIZE,
        "summary": PageSummary(bounds, bounds),
    }
    return lambda: select_pages(jnp.zeros(q_shape), **options | changes)


BAD = {
    "rank": (some((3, HEADS, DIM)), ValueError, "[B, T, N, D]|q[:, None]"),
    "empty": (some((3, 0, HEADS, DIM)), ValueError, "q must not be empty|leave"),
    "summary": (some(summary=3), TypeError, "PageSummary|int"),
    "heads": (some(heads=3), ValueError, "divides 4"),
    "dim": (some((3, 1, HEADS, 8)), ValueError, "head dim of 8"),
    "lens": (some(kv_lens=[1, 2]), ValueError, "block_tables and kv_lens"),
    "pages": (some(num_pages=1), ValueError, "num_pages must be at least 2|got 1"),
    "steps": (
        some((3, 20, HEADS, DIM)),
        ValueError,
        "num_pages must be at least 5|20 new positions",
    ),
    "another size": (
        some(summary=PageSummary(*[jnp.zeros((PAGES, KV_HEADS, DIM))] * 2, 2 * SIZE)),
        ValueError,
        f"summary must be of pages of {SIZE} tokens, got one of pages of {2 * SIZE}",
    ),
    "sinks": (some(sinks=-2), ValueError, "sinks|got -2"),
    "size": (some(block_size=0), ValueError, "block_size|at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(name):
    call, error, words = BAD[name]
    check("select_pages", error, words, call)


def test_bad_summaries_are_errors():
    spec = BlockSpec(2, 2, SIZE, KV_HEADS, DIM, jnp.float32)
    pool = KVPool.zeros(spec, 3)
    check("summarize_pages", TypeError, "layer|None", lambda: summarize_pages(pool))
    check(
        "summarize_pages",
        ValueError,
        "[P, T, K, D]|float32[3, 4]",
        lambda: summarize_pages(jnp.zeros((3, 4))),
    )
    pages = jnp.zeros((3, SIZE, KV_HEADS, DIM))
    check(
        "summarize_pages",
        ValueError,
        "layer must be None|got 0",
        lambda: summarize_pages(pages, 0),
    )
    summary = summarize_pages(pages)
    narrow = PageSummary(summary.low[:, :1], summary.high[:, :1])
    for error, words, call in (
        (TypeError, "PageSummary|got int", lambda: refresh_summary(3, pages, [0])),
        (TypeError, "layer|None", lambda: refresh_summary(summary, pool, [0])),
        (
            ValueError,
            "summary must be of pages of [2, |got float32[3, 1",
            lambda: refresh_summary(narrow, pages, [0]),
        ),
        (
            ValueError,
            f"pages of {SIZE // 2} tokens, got one of pages of {SIZE}",
            lambda: refresh_summary(summary, pages[:, ::2], [0]),
        ),
    ):
        check("refresh_summary", error, words, call)
