"""From scores to lists: as sorting has it, within every bound, and what is told."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from messages import check
from sparse_cases import BLOCK, TILES, draw, in_tiles, listed, pairs

import jax_kvblock
from jax_kvblock.sparse import AntidiagonalThreshold, Streaming, select_tiles
from jax_kvblock.sparse.grid import Grid, running_count
from jax_kvblock.sparse.plain import sorted_bits
from jax_kvblock.sparse.select import lists_of, map_of

pytestmark = pytest.mark.usefixtures("exact_products")

BATCH, HEADS, T, S = 2, 3, 96, 160  # 6 x 10 tiles
ROWS, COLS = T // BLOCK, S // BLOCK
SIZES = {"q_len": T, "kv_len": S, **TILES}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "last queries": {"causal": True, "q_offset": S - T},
    "offset": {"causal": True, "q_offset": 37, "kv_offset": 5},
    "behind": {"causal": True, "kv_offset": 40},
    "traced offsets": {"causal": True, "q_offset": np.int32([64, 3])},
    "lengths": {"q_lens": np.int32([70, 0]), "kv_lens": np.int32([33, 160])},
    "causal lengths": {
        "causal": True,
        "q_offset": np.int32([64, 50]),
        "q_lens": np.int32([60, 96]),
        "kv_lens": np.int32([124, 146]),
    },
    "segments": {
        "segment_ids": (
            np.repeat([[0, 1, 2]], [30, 40, 26], axis=1).repeat(2, 0).astype(np.int32),
            np.repeat([[0, 1, 2]], [50, 70, 40], axis=1).repeat(2, 0).astype(np.int32),
        )
    },
    "causal segments": {
        "causal": True,
        "q_offset": S - T,
        "segment_ids": (
            np.repeat([[4, 1, 2]], [30, 40, 26], axis=1).repeat(2, 0).astype(np.int32),
            np.repeat([[4, 1, 2]], [80, 58, 22], axis=1).repeat(2, 0).astype(np.int32),
        ),
        "kv_lens": np.int32([130, 160]),
    },
    "window": {"window": (20, 9)},
    "causal window": {"causal": True, "window": (33, None), "q_offset": 90},
    "traced window": {
        "window": (40, 0),
        "q_offset": np.int32([150, -10]),
        "kv_lens": np.int32([140, 160]),
    },
}


def visible_of(mask):
    """The tiles in which some pair attends, by looking at every pair."""
    return in_tiles(pairs(BATCH, T, S, **mask), BLOCK, BLOCK).any((-2, -1))[:, None]


def own_of(mask):
    """The tiles that a row needs: by positions its own, by segments the nearest.

    Own are, under a causal mask, the tiles that hold positions of the row's real
    queries. In a window and with segments it is the tile of the key that is a query's
    own, or else the last that it sees before, or the first behind.
    """
    made = np.zeros((BATCH, 1, ROWS, COLS), bool)
    nearest = bool({"window", "segment_ids"} & set(mask))
    if not mask.get("causal") and not nearest:
        return made
    seen = pairs(BATCH, T, S, **mask)
    lens = np.broadcast_to(mask.get("q_lens", T), BATCH)
    shift = np.asarray(mask.get("q_offset", 0)) - mask.get("kv_offset", 0)
    shift = np.broadcast_to(shift, BATCH)
    for b, i in np.ndindex(BATCH, T):
        at = i + shift[b]
        if mask.get("causal") and i < lens[b] and 0 <= at < S:
            made[b, 0, i // BLOCK, at // BLOCK] = True
        keys = np.flatnonzero(seen[b, i])
        if nearest and len(keys):
            key = at if at in keys else max(keys[keys < at], default=keys[0])
            made[b, 0, i // BLOCK, key // BLOCK] = True
    return made & visible_of(mask)


def draw_scores(rng):
    return rng.standard_normal((BATCH, HEADS, ROWS, COLS)).astype(np.float32)


def run(scores, **options):
    """A selection under jit, whose masks and offsets are operands."""
    operands = {n: x for n, x in options.items() if not isinstance(x, (bool, int))}
    fixed = {n: x for n, x in operands.items() if isinstance(x, float) or n == "window"}
    operands = {n: x for n, x in operands.items() if n not in fixed}
    static = {n: x for n, x in options.items() if n not in operands}
    return jit(lambda scores, o: tuple(select_tiles(scores, **SIZES, **static, **o)))(
        scores, operands
    )


@pytest.mark.parametrize("name", MASKS)
def test_visible_and_own_tiles_are_those_of_the_pairs(name):
    mask = MASKS[name]
    tiles, report = run(
        np.ones((BATCH, 1, ROWS, COLS), np.float32), capacity=10, **mask
    )
    want = visible_of(mask)
    shape = (BATCH, 1, ROWS, COLS)
    np.testing.assert_array_equal(
        np.broadcast_to(listed(tiles, COLS), shape), np.broadcast_to(want, shape)
    )
    got = np.broadcast_to(np.asarray(report.visible), shape[:-1])
    np.testing.assert_array_equal(got, np.broadcast_to(want.sum(-1), shape[:-1]))
    # With room for one tile more than is always listed, own tiles are there.
    least = np.full((BATCH, 1, ROWS, COLS), 0, np.float32)
    tiles, _ = run(least, sparsity_ratio=0.95, sinks=0, **mask)
    assert (listed(tiles, COLS) >= own_of(mask)).all()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sinks", [0, 2])
def test_the_best_tiles_of_each_row(rng, name, sinks):
    """As sorting has it: the always listed ones first, then by score."""
    mask, scores = MASKS[name], draw_scores(rng)
    tiles, report = run(scores, sparsity_ratio=0.6, sinks=sinks, **mask)
    got = listed(tiles, COLS)
    visible, own = (np.broadcast_to(x(mask), got.shape) for x in (visible_of, own_of))
    for at in np.ndindex(got.shape[:-1]):
        seen = np.flatnonzero(visible[at])
        always = set(np.flatnonzero(own[at])) | set(seen[:sinks])
        count = int(np.floor(0.4 * len(seen) + 0.5))
        count = max(count, min(1, len(seen)), len(always))
        rest = sorted(set(seen) - always, key=lambda j: -scores[at][j])
        want = always | set(rest[: count - len(always)])
        assert set(np.flatnonzero(got[at])) == want
    assert report.short is None and report.mass is None
    assert int(report.rows_short) == 0
    np.testing.assert_array_equal(report.listed, got.sum(-1))
    every = max(visible.sum(), 1)
    np.testing.assert_allclose(report.share, got.sum() / every, rtol=1e-6)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("name", ["full", "causal", "causal lengths"])
def test_the_smallest_set_that_reaches_tau(rng, name, tau):
    mask = MASKS[name]
    mass = np.exp(3 * draw_scores(rng))
    tiles, report = run(mass, tau=tau, sinks=1, **mask)
    got = listed(tiles, COLS)
    visible, own = (np.broadcast_to(x(mask), got.shape) for x in (visible_of, own_of))
    for at in np.ndindex(got.shape[:-1]):
        seen = np.flatnonzero(visible[at])
        always = set(np.flatnonzero(own[at])) | set(seen[:1])
        total = mass[at][seen].sum(dtype=np.float64)
        kept = np.flatnonzero(got[at])
        assert set(kept) <= set(seen) and always <= set(kept)
        if not len(seen):
            continue
        held = mass[at][kept].sum(dtype=np.float64) / total
        assert held >= tau - 2e-6
        np.testing.assert_allclose(report.mass[at], held, rtol=1e-5)
        free = [j for j in kept if j not in always]
        if free:  # without the least of them it would be too little, and it is the best
            least = min(mass[at][j] for j in free)
            assert held - least / total < tau + 2e-6
            left = set(seen) - set(kept)
            assert all(mass[at][j] <= least for j in left)
    assert not np.asarray(report.short).any()


def test_equal_tiles_are_kept_from_the_left_and_no_more_than_needed():
    mass = np.ones((1, 1, ROWS, COLS), np.float32)
    tiles, report = run(mass, tau=0.45, sinks=0)
    assert (listed(tiles, COLS) == (np.arange(COLS) < 5)).all()
    np.testing.assert_allclose(report.mass, 0.5)
    tiles, _ = run(mass, capacity=3, sinks=0)
    assert (listed(tiles, COLS) == (np.arange(COLS) < 3)).all()


@pytest.mark.parametrize("name", ["full", "causal", "causal lengths"])
def test_capacities_that_are_too_small_are_counted(rng, name):
    mask = MASKS[name]
    mass = np.exp(2 * draw_scores(rng))
    tiles, report = run(mass, tau=0.8, capacity=3, sinks=1, **mask)
    got = listed(tiles, COLS)
    assert got.sum(-1).max() <= 3
    assert tiles.indices.shape[-1] == 3
    visible = np.broadcast_to(visible_of(mask), got.shape)
    masses = np.where(visible, mass, 0).astype(np.float64)
    held = (masses * got).sum(-1) / np.maximum(masses.sum(-1), 1e-30)
    want = visible.any(-1) & (held < 0.8)
    assert want.any() and not want.all()
    np.testing.assert_array_equal(report.short, want)
    assert int(report.rows_short) == want.sum()


@pytest.mark.usefixtures("forgotten")
def test_debug_checks_make_an_error_of_a_capacity_that_is_too_small(rng):
    mass = np.exp(draw_scores(rng))
    with jax_kvblock.debug_checks():
        select_tiles(mass, tau=0.8, **SIZES)
        with pytest.raises(
            ValueError, match=r"select_tiles: capacity is too small .*in"
        ):
            select_tiles(mass, tau=0.8, capacity=2, **SIZES)
        with pytest.raises(jax.errors.JaxRuntimeError, match="capacity is too small"):
            jax.block_until_ready(run(mass, tau=0.8, capacity=2))


def test_debug_checks_of_a_union_whose_part_is_short(rng):
    """It has no mass to tell of, and rows that list everything are not short."""
    q, k, _ = draw(rng)
    part = AntidiagonalThreshold(tau=0.99, capacity=3, stride=8, **TILES)
    short = Streaming(window=1, **TILES) | part
    whole = Streaming(window=8, **TILES) | part
    report = short.select(q, k, causal=True).report
    rows = np.asarray(report.short)
    assert rows.any() and not rows[..., :3].any()
    # Rows that list all that they see.
    full = np.asarray(report.listed == report.visible)
    assert full.any() and not (rows & full).any()
    with jax_kvblock.debug_checks():
        check(
            "Union",
            ValueError,
            "capacity is too small for tau|short[0, |list more tiles",
            lambda: short.select(q, k, causal=True),
        )
        report = whole.select(q, k, causal=True).report
    assert int(report.rows_short) == 0 and float(report.share) == 1
    assert int(part.select(q, k, causal=True).report.rows_short) > 0


def test_rows_of_which_nothing_is_known_take_what_they_may():
    mass = np.zeros((1, 1, ROWS, COLS), np.float32)
    mass[0, 0, 1] = np.nan
    tiles, report = run(mass, tau=0.5, capacity=4)
    assert (np.asarray(tiles.counts) == 4).all()
    assert not np.asarray(report.short).any()
    assert (np.asarray(report.mass) == 1).all()


@pytest.mark.usefixtures("forgotten")
def test_debug_checks_of_a_row_of_which_nothing_is_known(rng):
    q, k, _ = draw(rng)
    k = k.at[0, 40].set(jnp.nan)  # in tile 2, which the first rows do not see
    selector = AntidiagonalThreshold(tau=0.9, capacity=3, stride=8, **TILES)
    assert float(selector.select(q, k, causal=True).report.mass[0, 0, 7]) == 1
    must = "the share of a tile must be a number with tau, got NaN at [0, 0, 2, 0]"
    with jax_kvblock.debug_checks():
        for some in (selector, Streaming(**TILES) | selector):
            ask = functools.partial(some.select, q, k, causal=True)
            check(some.name, ValueError, must, ask)
        with pytest.raises(jax.errors.JaxRuntimeError, match="got NaN at"):
            jax.block_until_ready(jit(selector.select)(q, k))


def test_scores_of_every_kind_are_ordered_as_floats_are():
    x = np.float32(
        [-np.inf, -3e38, -1.5, -1e-38, -0.0, 0.0, 1e-38, 1e-3, 1.5, 3e38, np.inf]
    )
    bits = np.asarray(sorted_bits(jnp.asarray(x)))
    assert (np.diff(bits.astype(np.int64)) > 0).all()
    assert bits.min() > 1 and bits.max() < 2**32 - 1
    assert np.asarray(sorted_bits(jnp.float32([np.nan])))[0] == 1


def test_infinite_scores(rng):
    scores = draw_scores(rng)
    scores[..., 4], scores[..., 7], scores[..., 2] = np.inf, -np.inf, np.nan
    tiles, _ = run(scores, capacity=COLS - 1, sinks=0)
    got = listed(tiles, COLS)
    assert got[..., 4].all() and not got[..., 2].any()
    tiles, _ = run(scores, capacity=COLS - 2, sinks=0)
    got = listed(tiles, COLS)
    assert got[..., 4].all() and not got[..., [2, 7]].any()


@pytest.mark.parametrize("length", [1, 5, 128, 129, 700])
def test_running_counts(rng, length):
    kept = rng.random((3, 2, length)) < 0.4
    want = np.cumsum(kept, -1)
    np.testing.assert_array_equal(running_count(kept), want)
    np.testing.assert_array_equal(jit(running_count)(kept), want)
    # Whatever products are rounded to.
    with jax.default_matmul_precision("bfloat16"):
        np.testing.assert_array_equal(jit(running_count)(jnp.asarray(kept)), want)


@pytest.mark.parametrize("device", [False, True])
def test_lists_of_a_map_and_back(rng, device):
    kept = rng.random((2, 3, 5, 11)) < 0.3
    kept[0, 0, 0], kept[1, 2, 4] = False, True
    kept[1, 2, 4, 8:] = False
    width = int(kept.sum(-1).max()) + 2
    make = jit(lists_of, static_argnums=1) if device else lists_of
    indices, counts = make(jnp.asarray(kept) if device else kept, width)
    tiles = jax_kvblock.AttentionTiles(
        jnp.asarray(indices), jnp.asarray(counts), 16, 16
    )
    np.testing.assert_array_equal(listed(tiles, 11), kept)
    np.testing.assert_array_equal(map_of(tiles, 11), kept)
    assert (
        np.asarray(indices)[np.arange(width) >= np.asarray(counts)[..., None]] == -1
    ).all()


def test_tile_sides_that_differ():
    """Own positions may lie in several tiles of keys, all of which are listed."""
    grid = Grid(128, 128, 64, 16, causal=True, shift=0)
    assert grid.most_own == 4
    assert Grid(128, 128, 64, 16, causal=True, shift=3).most_own == 5
    assert Grid(128, 128, 16, 64, causal=True, shift=8).most_own == 2
    scores = np.zeros((1, 1, 2, 8), np.float32)
    options = {"q_len": 128, "kv_len": 128, "block_q": 64, "block_kv": 16}
    tiles, _ = select_tiles(
        scores, sparsity_ratio=0.95, sinks=0, causal=True, **options
    )
    got = listed(tiles, 8)
    assert (got[0, 0] == (np.arange(8) // 4 == np.arange(2)[:, None])).all()
    check(
        "select_tiles",
        ValueError,
        "capacity must be at least 5|got 4|64 queries",
        lambda: select_tiles(scores, capacity=4, sinks=1, causal=True, **options),
    )


def test_vmap_and_traced_values(rng, compiles):
    scores = np.stack([draw_scores(rng) for _ in range(3)])
    lens = np.int32([[160, 20], [7, 90], [150, 160]])

    def one(scores, lens):
        return tuple(select_tiles(scores, capacity=4, kv_lens=lens, **SIZES))

    tiles, _ = jit(jax.vmap(one))(scores, lens)
    for i in range(3):
        want, _ = run(scores[i], capacity=4, kv_lens=lens[i])
        np.testing.assert_array_equal(tiles.indices[i], want.indices)
        np.testing.assert_array_equal(tiles.counts[i], want.counts)
    made = jit(one)
    jax.block_until_ready(made(scores[0], lens[0]))
    before = len(compiles)
    jax.block_until_ready(made(scores[1], lens[1]))
    assert len(compiles) == before


BAD = {
    "ratio below": ({"sparsity_ratio": -0.1}, ValueError, "from 0 to 0.95|got -0.1"),
    "ratio above": ({"sparsity_ratio": 0.96}, ValueError, "from 0 to 0.95|got 0.96"),
    "ratio nan": ({"sparsity_ratio": float("nan")}, ValueError, "got nan"),
    "ratio text": ({"sparsity_ratio": "0.5"}, TypeError, "sparsity_ratio|'0.5'"),
    "ratio bool": ({"sparsity_ratio": True}, TypeError, "sparsity_ratio|True"),
    "tau zero": ({"tau": 0}, ValueError, "tau must be above 0|got 0.0"),
    "tau tiny": ({"tau": 1e-50}, ValueError, "tau must be above 0 in float32|1e-50"),
    "tau above": ({"tau": 1.1}, ValueError, "tau must be a number from 0 to 1"),
    "nothing": ({}, ValueError, "tau, sparsity_ratio or capacity|None"),
    "capacity zero": ({"capacity": 0}, ValueError, "capacity|at least 1|got 0"),
    "capacity float": ({"capacity": 2.5}, ValueError, "capacity|2.5"),
    "capacity short": (
        {"capacity": 1, "causal": True},
        ValueError,
        "capacity must be at least 2|got 1",
    ),
    "sinks": ({"capacity": 3, "sinks": -1}, ValueError, "sinks|got -1"),
    "block": ({"capacity": 3, "block_q": 20}, ValueError, "block_q|multiple of 16"),
    "lens": ({"capacity": 3, "kv_lens": [1, 2, 3]}, ValueError, "kv_lens|int32[2]"),
    "segments": (
        {"capacity": 3, "segment_ids": np.zeros((2, 5), np.int32)},
        ValueError,
        "segment_ids must be int32[2, 96]|pair",
    ),
    "causal": ({"capacity": 3, "causal": 1}, TypeError, "causal"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error(name):
    options, error, words = BAD[name]
    scores = jnp.zeros((BATCH, HEADS, ROWS, COLS))
    check("select_tiles", error, words, lambda: select_tiles(scores, **SIZES | options))


@pytest.mark.parametrize(
    ("scores", "error", "words"),
    [
        (
            np.zeros((2, 3, ROWS, COLS), np.int32),
            TypeError,
            "floats|int32[2, 3, 6, 10]",
        ),
        (np.zeros((2, 3, ROWS, 9)), ValueError, "[B, N, 6, 10]|[2, 3, 6, 9]"),
        (np.zeros((ROWS, COLS)), ValueError, "[B, N, 6, 10]"),
        (np.zeros((2, 0, ROWS, COLS)), ValueError, "not be empty|[2, 0, 6, 10]|leave"),
        (None, TypeError, "scores must be an array"),
    ],
)
def test_bad_scores(scores, error, words):
    if isinstance(scores, np.ndarray) and scores.dtype == np.float64:
        scores = scores.astype(np.float32)
    check(
        "select_tiles", error, words, lambda: select_tiles(scores, capacity=3, **SIZES)
    )
