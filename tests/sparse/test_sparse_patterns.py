"""Patterns: what each lists, its budget, and the same tiles on the host and traced."""

from __future__ import annotations

import numpy as np
import pytest
from attention_model import jit
from messages import check
from sparse_cases import TILES, draw, listed

from jax_kvblock.sparse import (
    BlockSparse,
    LocalGlobal,
    Random,
    Selector,
    Streaming,
    Strided,
    evaluate_selector,
)

BY_RATIO = (Random, BlockSparse, Strided, LocalGlobal)
LENGTH, ROWS = 320, 20


@pytest.fixture
def qkv(rng):
    return draw(rng, batch=1, q_len=LENGTH, kv_len=LENGTH)


def made(selector, qkv, **mask):
    """The map `[B|1, N|1, R, C]` that a selector lists."""
    return listed(selector(*qkv[:2], **mask), ROWS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [0, 0.3, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("kind", BY_RATIO)
def test_each_row_keeps_to_its_budget(qkv, kind, ratio, causal):
    got = made(kind(sparsity_ratio=ratio, **TILES), qkv, causal=causal)
    rows = np.arange(1, ROWS + 1) if causal else np.full(ROWS, ROWS)
    want = np.maximum(np.floor((1 - ratio) * rows + 0.5), 1)
    assert (got.sum(-1) == want).all()
    if causal:
        assert (got <= np.tri(ROWS, dtype=bool)).all()
        assert got[..., np.arange(ROWS), np.arange(ROWS)].all()
    # To within half a tile a row, and the few rows that list one tile at least.
    assert abs(got.sum(-1).mean() - (1 - ratio) * rows.mean()) < 0.5


def test_random_tiles_are_seeded_and_even(qkv):
    one = made(Random(sparsity_ratio=0.8, seed=1, **TILES), qkv)
    assert one.shape == (1, 4, ROWS, ROWS)
    again = made(Random(sparsity_ratio=0.8, seed=1, **TILES), qkv)
    np.testing.assert_array_equal(one, again)
    other = made(Random(sparsity_ratio=0.8, seed=2, **TILES), qkv)
    assert (one != other).any()
    assert (one[0, 0] != one[0, 1]).any()
    shared = made(Random(sparsity_ratio=0.8, seed=1, per_head=False, **TILES), qkv)
    assert shared.shape[1] == 1
    # 80 lists of 4 of 20: each tile is in about 16 of them.
    times = one.sum((0, 1, 2))
    assert times.min() > 5 and times.max() < 30


def test_squares_are_seeded(qkv):
    one, again, other = (
        made(BlockSparse(sparsity_ratio=0.6, run=4, seed=seed, **TILES), qkv)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_the_squares_of_block_sparse_are_whole(qkv):
    got = made(BlockSparse(sparsity_ratio=0.6, run=4, **TILES), qkv)[0]
    squares = got.reshape(4, 5, 4, 5, 4).sum((2, 4))
    assert (np.isin(squares, [0, 16])).all() and (squares.sum(-1) == 32).all()
    assert (got[0] != got[1]).any()
    cut = made(BlockSparse(sparsity_ratio=0.75, run=4, **TILES), qkv)[0]
    assert (cut.sum(-1) == 5).all()


def test_strided_tiles_are_near_and_at_even_distances(qkv):
    got = made(Strided(sparsity_ratio=0.6, **TILES), qkv, causal=True)[0, 0]
    last = np.flatnonzero(got[-1])  # 8 of 20: 4 evenly spread, and the nearest
    np.testing.assert_array_equal(last, [4, 9, 14, 15, 16, 17, 18, 19])
    odd = made(Strided(sparsity_ratio=0.65, **TILES), qkv, causal=True)[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(odd[-1]), [4, 9, 14, 16, 17, 18, 19])
    full = made(Strided(sparsity_ratio=0.6, **TILES), qkv)[0, 0]
    assert {4, 9, 14, 19} <= set(np.flatnonzero(full[7])) and full[7, 6:9].all()


def test_local_and_global_tiles(qkv):
    got = made(LocalGlobal(sparsity_ratio=0.7, num_global=2, **TILES), qkv, causal=True)
    np.testing.assert_array_equal(np.flatnonzero(got[0, 0, -1]), [0, 1, 16, 17, 18, 19])
    np.testing.assert_array_equal(np.flatnonzero(got[0, 0, 9]), [0, 1, 9])
    full = made(LocalGlobal(sparsity_ratio=0.7, num_global=1, **TILES), qkv)
    np.testing.assert_array_equal(np.flatnonzero(full[0, 0, 10]), [0, 8, 9, 10, 11, 12])


def test_sinks_and_a_window(qkv):
    selector = Streaming(sinks=2, window=3, **TILES)
    got = made(selector, qkv, causal=True)[0, 0]
    i, j = np.indices(got.shape)
    np.testing.assert_array_equal(got, (j <= i) & ((j < 2) | (j > i - 3)))
    assert selector(*qkv[:2], causal=True).indices.shape[-1] == 5
    full = made(selector, qkv)[0, 0]
    middle = np.clip(i, 1, ROWS - 2)  # at an end, the nearest three lie on one side
    np.testing.assert_array_equal(full, (abs(middle - j) < 2) | (j < 2))


@pytest.mark.parametrize("kind", [*BY_RATIO, Streaming], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_the_device_lists_what_the_host_lists(qkv, kind, causal):
    """Lengths that cut nothing off, as operands."""
    selector = kind(**TILES)
    want = made(selector, qkv, causal=causal)
    call = jit(lambda q, k, lens: selector(q, k, causal=causal, kv_lens=lens))
    got = listed(call(*qkv[:2], np.int32([LENGTH])), ROWS)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    offset = jit(lambda q, k, at: selector(q, k, causal=causal, q_offset=at))
    got = listed(offset(*qkv[:2], np.int32(0)), ROWS)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize("kind", [*BY_RATIO, Streaming], ids=lambda kind: kind.__name__)
def test_documents_keep_to_themselves(qkv, kind):
    """Each row's budget is counted in its own document."""
    ids = np.repeat([[5, 2, 9]], [7 * 16, 3 * 16, 10 * 16], axis=1)
    lengths = np.repeat([7, 3, 10], [7, 3, 10])
    begins = np.repeat([0, 7, 10], [7, 3, 10])
    # Of ids that fall the ranges still meet only where ids are alike.
    got = made(kind(**TILES), qkv, causal=True, segment_ids=ids)
    j, i = np.arange(ROWS), np.arange(ROWS)[:, None]
    inside = (j >= begins[:, None]) & (j < (begins + lengths)[:, None]) & (j <= i)
    assert (got <= inside).all()
    assert got[..., np.arange(ROWS), np.arange(ROWS)].all()
    if kind is Streaming:  # a document's own first tile
        assert got[..., np.arange(ROWS), begins].all()
    else:
        seen = np.arange(ROWS) - begins + 1
        want = np.maximum(np.floor(0.1 * seen + 0.5), 1)
        assert (got.sum(-1) == want).all()


def test_the_union_of_two(qkv):
    parts = Streaming(sinks=1, window=2, **TILES), Random(sparsity_ratio=0.8, **TILES)
    both = parts[0] | parts[1]
    assert isinstance(both, Selector)
    got = made(both, qkv, causal=True)
    one, two = (made(part, qkv, causal=True) for part in parts)
    np.testing.assert_array_equal(got, one | two)
    found = evaluate_selector(*qkv, both, causal=True)
    each = [evaluate_selector(*qkv, part, causal=True) for part in parts]
    assert found.recall > max(one.recall for one in each)
    three = both | Strided(sparsity_ratio=0.9, **TILES)
    assert (made(three, qkv, causal=True) >= got).all()


def test_a_pattern_is_made_once(qkv, monkeypatch):
    calls = []
    draw_priority = Random.priority

    def counted(self, *args):
        calls.append(self)
        return draw_priority(self, *args)

    monkeypatch.setattr(Random, "priority", counted)
    selector = Random(sparsity_ratio=0.8, seed=77, **TILES)
    for _ in range(3):
        selector(*qkv[:2], causal=True)
    assert len(calls) == 1


BAD = {
    "ratio above": (lambda: Random(sparsity_ratio=0.951), "Random", "0.95|got 0.951"),
    "ratio below": (lambda: Strided(sparsity_ratio=-0.01), "Strided", "0 to 0.95"),
    "block": (lambda: Random(block_q=100), "Random", "block_q|multiple of 16"),
    "seed": (lambda: Random(seed=-1), "Random", "seed|got -1"),
    "run": (lambda: BlockSparse(run=0), "BlockSparse", "run|at least 1"),
    "global": (lambda: LocalGlobal(num_global=0), "LocalGlobal", "num_global"),
    "window": (lambda: Streaming(window=0), "Streaming", "window|at least 1"),
    "sinks": (lambda: Streaming(sinks=-1), "Streaming", "sinks|got -1"),
    "sizes of a union": (
        lambda: Streaming() | Random(block_q=256),
        "Union",
        "one size|256 x 128|128 x 128",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_patterns_are_errors(name):
    call, where, words = BAD[name]
    check(where, ValueError, words, call)


@pytest.mark.parametrize("kind", [Random, BlockSparse])
def test_whether_heads_differ_is_a_bool(kind):
    words = "per_head must be True or False|got 'no'"
    check(kind.__name__, TypeError, words, lambda: kind(per_head="no"))
