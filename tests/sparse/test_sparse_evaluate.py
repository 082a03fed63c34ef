"""What `evaluate_selector` says is what float64 says, pair by pair."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from messages import check
from run_benchmarks import imported
from run_examples import EXAMPLES
from sparse_cases import TILES, draw, listed, pairs, probabilities, spread, truth

from jax_kvblock import AttentionTiles
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    Oracle,
    Random,
    ScoredSelector,
    evaluate_selector,
)

pytestmark = pytest.mark.usefixtures("exact_products")

DOCUMENTS = np.repeat([[0, 1, 2], [0, 1, 1]], [40, 50, 38], axis=1).astype(np.int32)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "behind": {"causal": True, "kv_offset": 20},  # the first rows attend to nothing
    "lengths": {"q_lens": np.int32([100, 128]), "kv_lens": np.int32([90, 33])},
    "documents": {"causal": True, "segment_ids": DOCUMENTS},
    "window": {"window": (50, 9)},
}


@pytest.fixture
def qkv(rng):
    return draw(rng, size=2)


@pytest.mark.parametrize("name", MASKS)
def test_recall_error_and_tiles(qkv, name):
    mask = MASKS[name]
    selector = AntidiagonalThreshold(tau=0.5, stride=8, sinks=0, **TILES)
    found = evaluate_selector(*qkv, selector, **mask)
    tiles = selector(*qkv[:2], **mask)
    kept = np.broadcast_to(listed(tiles, 8), (2, 4, 8, 8))
    seen = pairs(2, 128, 128, **mask)[:, None]
    both = seen & spread(kept, 128, 128, tiles)

    p = probabilities(*qkv[:2], seen)
    recall = np.where(both, p, 0).sum(-1)
    rows = np.broadcast_to(seen.any(-1), recall.shape)
    assert rows.any() and recall[rows].min() < 0.5
    np.testing.assert_allclose(found.recall, recall[rows].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.worst, recall[rows].min(), rtol=1e-4)
    for n in range(4):
        one = recall[:, n][rows[:, n]]
        np.testing.assert_allclose(found.head_recall[n], one.mean(), rtol=1e-5)
        np.testing.assert_allclose(found.head_worst[n], one.min(), rtol=1e-4)

    want, got = truth(*qkv, seen), truth(*qkv, both)
    norm = np.linalg.norm
    np.testing.assert_allclose(found.error, norm(got - want) / norm(want), rtol=1e-4)
    for n in range(4):
        apart = norm((got - want)[:, :, n]) / norm(want[:, :, n])
        np.testing.assert_allclose(found.head_error[n], apart, rtol=1e-4)

    every = np.broadcast_to(_tiles_of(seen), kept.shape)
    assert found.tiles_listed == (kept & every).sum()
    assert found.tiles_visible == every.sum()
    assert found.share == found.tiles_listed / found.tiles_visible
    assert found.seconds is None and found.rows_short == 0


def _tiles_of(seen):
    return seen.reshape(2, 1, 8, 16, 8, 16).any((3, 5))


def test_all_tiles_are_dense_attention(qkv):
    found = evaluate_selector(*qkv, Random(sparsity_ratio=0, **TILES), causal=True)
    assert found.share == 1 and found.error < 1e-6
    assert found.recall > 1 - 1e-5 and found.worst > 1 - 1e-5


def test_tiles_in_place_of_a_selector(qkv):
    selector = Random(sparsity_ratio=0.7, **TILES)
    tiles = selector(*qkv[:2], causal=True)
    one = evaluate_selector(*qkv, selector, causal=True)
    other = evaluate_selector(*qkv, tiles, causal=True, repeats=1)
    assert (one.recall, one.error, one.share) == (
        other.recall,
        other.error,
        other.share,
    )
    assert other.seconds.selection == 0


def test_options_of_attention_count_too(qkv):
    """A sink of its own takes mass from all keys; a softcap evens scores out."""
    selector = AntidiagonalThreshold(tau=0.5, stride=8, sinks=0, **TILES)
    plain = evaluate_selector(*qkv, selector, causal=True)
    options = {"causal": True, "sinks": jnp.full(4, 3.0), "scale": 0.25, "softcap": 1.0}
    found = evaluate_selector(*qkv, selector, repeats=1, **options)
    assert found.share == plain.share and found.recall != plain.recall
    assert found.seconds.dense > 0


@pytest.mark.parametrize("sink", [-2.0, 3.0, 20.0])
def test_sinks_are_no_keys(qkv, sink):
    """Recall is of keys' probabilities; rows without keys do not count."""
    selector = AntidiagonalThreshold(tau=0.5, stride=8, sinks=0, **TILES)
    mask = MASKS["behind"]
    sinks = jnp.full(4, sink)
    found = evaluate_selector(*qkv, selector, sinks=sinks, **mask)
    kept = listed(selector(*qkv[:2], **mask), 8)
    seen = pairs(2, 128, 128, **mask)[:, None]
    both = seen & spread(kept, 128, 128, selector)
    p = probabilities(*qkv[:2], seen)
    recall = np.where(both, p, 0).sum(-1)
    rows = np.broadcast_to(seen.any(-1), recall.shape)
    np.testing.assert_allclose(found.recall, recall[rows].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.worst, recall[rows].min(), rtol=1e-4)
    # The error is of what attention gives, with the sink.
    plain = evaluate_selector(*qkv, selector, **mask)
    assert found.error != plain.error


def test_lists_of_integers(qkv):
    selector = AntidiagonalThreshold(stride=8, **TILES)
    options = {"q_offset": [0, 3], "kv_lens": [128, 90], "dropout_seed": [1, 2]}
    options |= {"causal": True, "dropout_rate": 0.25, "window": [64, None]}
    found = evaluate_selector(*qkv, selector, **options)
    arrays = {n: jnp.int32(options[n]) for n in ("q_offset", "kv_lens", "dropout_seed")}
    same = evaluate_selector(
        *qkv, selector, **options | arrays | {"window": (64, None)}
    )
    assert (found.recall, found.error) == (same.recall, same.error)


def test_numbers_that_are_arrays(qkv):
    selector = AntidiagonalThreshold(stride=8, **TILES)
    found = evaluate_selector(*qkv, selector, scale=jnp.float32(0.5))
    same = evaluate_selector(*qkv, selector, scale=0.5)
    assert (found.recall, found.error) == (same.recall, same.error)


def test_entries_that_visit_nothing_do_not_count(qkv):
    """Beyond the causal reach, beyond the keys, and holes."""
    indices = jnp.broadcast_to(jnp.int32([[7, -1, 0, 99]]), (1, 1, 8, 4))
    tiles = AttentionTiles(indices, jnp.full((1, 1, 8), 4, jnp.int32), 16, 16)
    found = evaluate_selector(*qkv, tiles, causal=True)
    assert found.tiles_listed == 2 * 4 * (8 + 1)
    assert found.tiles_visible == 2 * 4 * 36


def test_rows_that_list_nothing_have_no_recall(qkv):
    counts = jnp.full((1, 1, 8), 8, jnp.int32).at[0, 0, 2].set(0)
    indices = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (1, 1, 8, 8))
    found = evaluate_selector(*qkv, AttentionTiles(indices, counts, 16, 16))
    np.testing.assert_allclose(found.recall, 7 / 8, rtol=1e-5)
    assert found.worst == 0


def test_rows_short_of_tau(qkv):
    selector = AntidiagonalThreshold(tau=0.9, capacity=2, stride=8, **TILES)
    found = evaluate_selector(*qkv, selector)
    assert found.rows_short == int(selector.select(*qkv[:2]).report.rows_short) > 0


def test_times_are_medians_of_calls_that_were_waited_for(qkv, monkeypatch):
    from jax_kvblock.sparse import evaluate

    ticks = iter(np.arange(1000.0) ** 2)
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: next(ticks))
    found = evaluate_selector(*qkv, Oracle(sparsity_ratio=0.5, **TILES), repeats=3)
    # Three calls a round, two ticks a call; the first round is not counted.
    ends = [[2 * (3 * turn + call) for turn in (1, 2, 3)] for call in range(3)]
    want = [np.median([(t + 1) ** 2 - t**2 for t in row]) for row in ends]
    assert list(found.seconds) == want
    assert found.seconds.speedup == want[2] / (want[0] + want[1])


BAD = {
    "repeats": (lambda q: {"repeats": -1}, ValueError, "repeats|got -1"),
    "window": (
        lambda q: {"window": np.array([20, 20])},
        ValueError,
        "window must be a pair|array",
    ),
    "tiles": (lambda q: {"tiles": [1]}, TypeError, "Selector or AttentionTiles|list"),
    "twice": (
        lambda q: {
            "tiles": AttentionTiles(
                jnp.zeros((1, 1, 8, 2), jnp.int32), jnp.full((1, 1, 8), 2), 16, 16
            )
        },
        ValueError,
        "list a tile once|tile 0 twice",
    ),
    "no pytree": (
        lambda q: {"tiles": Mine(capacity=3, **TILES)},
        TypeError,
        "Mine|jax.tree_util.register_dataclass",
    ),
    "no pytree in a union": (
        lambda q: {"tiles": Random(**TILES) | Mine(capacity=3, **TILES)},
        TypeError,
        "Mine|jax.tree_util.register_dataclass",
    ),
}


class Mine(ScoredSelector):
    """Neither a dataclass of its own nor registered."""

    def mass(self, q, k, grid, scale):
        return jnp.ones((q.shape[0], q.shape[2], grid.rows, grid.cols))


def test_not_for_jit(qkv):
    selector = Random(**TILES)
    check(
        "evaluate_selector",
        TypeError,
        "traced|outside of jit",
        lambda: jit(lambda *qkv: evaluate_selector(*qkv, selector).recall)(*qkv),
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(qkv, name):
    make, error, words = BAD[name]
    options = {"tiles": Random(**TILES), **make(qkv[0])}
    check("evaluate_selector", error, words, lambda: evaluate_selector(*qkv, **options))


@pytest.fixture
def retrieval(monkeypatch):
    yield from imported("sparse_retrieval", monkeypatch, EXAMPLES)


def test_the_example_of_retrieval_writes_a_record(tmp_path, retrieval):
    """Each seed's lines, in the form of the benchmarks' files."""
    line = retrieval.Line("random", 0.1, 0.25, 0.75, 0.5)
    lines = {0: [line], 7: [line, line]}
    path = retrieval.record(retrieval.QUICK, lines, tmp_path, "abc")
    assert path.parent.parent == tmp_path
    document = json.loads(path.read_text())
    assert document["commit"] == "abc" and document["versions"]["jax"]
    rows = document["rows"]
    assert len(rows) == 12
    assert [row["value"] for row in rows[:4]] == [0.1, 0.25, 0.75, 0.5]
    assert rows[0]["case"] == "512 tokens, tiles of 16, seed 0 / questions"
    assert rows[-1] == {
        "case": "512 tokens, tiles of 16, seed 7 / questions",
        "implementation": "jax_kvblock, random",
        "metric": "right answers",
        "value": 0.5,
        "unit": "",
    }
