"""The kernels that choose tiles on a CPU, thread by thread: every number."""

from __future__ import annotations

import numpy as np
import pytest
from append_launches import Guarded
from select_launches import (
    ALWAYS,
    DTYPES,
    FREE,
    HIDDEN,
    POOLS,
    SHAPES,
    TAUS,
    WEIGHED,
    WEIGHS,
    Rows,
    draw,
    draw_weighed,
    heads_of,
    hold_keep,
    hold_lists,
    hold_normed,
    hold_pool,
    hold_weighed,
    launch_keep_tiles,
    launch_list_tiles,
    launch_pool_pieces,
    launch_weigh_tiles,
    weighed_truth,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, side, pieces", POOLS, ids=str)
def test_pieces(shape, side, pieces, dtype, emulated_select, rng):
    x = (rng.standard_normal(shape) * 3).astype(DTYPES[dtype])
    ends = rng.integers(-3, shape[1] + 3, shape[0])
    for of_rows in (None, ends, np.zeros_like(ends)):
        for extremes in (True, False):
            made = launch_pool_pieces(
                emulated_select, x, of_rows, side, pieces, Guarded(), extremes
            )
            assert len(made) == (3 if extremes else 1)
            hold_pool(made, x, of_rows, side)
        made = launch_pool_pieces(
            emulated_select, x, of_rows, side, pieces, Guarded(), rounded=True
        )
        assert made[0].dtype == x.dtype and made[1].dtype == np.float32
        hold_pool(made, x, of_rows, side)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, side, pieces", POOLS, ids=str)
def test_pieces_that_are_normed(shape, side, pieces, dtype, emulated_select, rng):
    x = (rng.standard_normal(shape) * 3).astype(DTYPES[dtype])
    x[0, :, : 16 // x.itemsize] *= 1e-20 if dtype == "float32" else 0
    ends = rng.integers(-3, shape[1] + 3, shape[0])
    assert heads_of(x)
    for head in heads_of(x):
        for of_rows in (None, ends, np.zeros_like(ends)):
            (made,) = launch_pool_pieces(
                emulated_select,
                *(x, of_rows, side, pieces, Guarded()),
                extremes=False,
                normed=head,
            )
            assert made.shape == (shape[0], pieces, 3 * shape[2])
            hold_normed(made, x, of_rows, side, head)


def test_a_head_that_is_normed_is_nan_with_any_number(emulated_select):
    x = np.ones((1, 8, 16), np.float32)
    x[0, 3, 2] = np.nan
    (made,) = launch_pool_pieces(
        emulated_select, x, None, 8, 1, Guarded(), extremes=False, normed=8
    )
    assert np.isnan(made[0, 0, :24]).all()
    np.testing.assert_array_equal(made[0, 0, 24:], 1)


def test_pieces_of_what_is_not_finite(emulated_select):
    """It is its column's, of its piece alone; what does not count is not looked at."""
    x = np.ones((1, 16, 8), np.float32)
    x[0, 3, :3] = np.nan, np.inf, -np.inf
    x[0, 14:, 5] = np.nan
    made = launch_pool_pieces(emulated_select, x, np.int32([14]), 8, 2, Guarded())
    one, nan, inf = 1.0, np.nan, np.inf
    odds = [nan, inf, -inf], [nan, inf, 1], [nan, 1, -inf]
    for found, odd in zip(made, odds, strict=True):
        np.testing.assert_array_equal(found[0, 0], [*odd, *[one] * 5])
        np.testing.assert_array_equal(found[0, 1], [one] * 8)


@pytest.mark.parametrize("dtype", WEIGHED)
@pytest.mark.parametrize("case", WEIGHS, ids=str)
def test_shares_of_tiles(case, dtype, emulated_select, rng):
    given = draw_weighed(rng, case, dtype)
    made = launch_weigh_tiles(emulated_select, given, Guarded())
    hold_weighed(made, given)
    whole = weighed_truth(given).sum(-1)
    assert 0.4 < whole.max() < 1 + 1e-9
    assert given.bounds.shape[1] == 1 or whole.min() < 0.99


def test_shares_of_what_is_not_finite(emulated_select, rng):
    """A row of tiles with NaN is NaN, of its head alone; what nobody sees is not
    looked at, and a score far above the others is all there is."""
    given = draw_weighed(
        rng, ((1, 2, 1, 16), (3, 5), (2, 2), *[False] * 3, 2), "float16"
    )
    given.bounds[...] = 0, 8  # not the last tile of keys
    given.keys[:, 8:] = np.nan
    given.queries[0, 2, 1] = np.nan
    given.queries[0, 4:, 0], given.keys[0, :8] = 8, -8
    given.keys[0, 5] = 8
    made = launch_weigh_tiles(emulated_select, given, Guarded())
    assert np.isnan(made[0, 1, 1, :4]).all()
    np.testing.assert_allclose(made[0, 0, 2], [0, 0, 1, 0, 0], rtol=1e-4)
    made[0, 1, 1] = 0
    assert np.isfinite(made).all() and (made[..., 4] == 0).all()
    np.testing.assert_allclose(made[0, 0].sum(-1), 1, rtol=1e-4)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_keep_the_best(shape, tau, emulated_select, rng):
    for skew in (False, True):
        rows = draw(rng, shape)
        made = launch_keep_tiles(emulated_select, rows, tau, Guarded(skew))
        hold_keep(made, rows, tau)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("first", [0, 15, 16, 511, 512])
def test_one_tile_wherever_it_is(first, tau, emulated_select):
    """Between threads and warps, of two that are equal, beside one a little less."""
    scores = np.full((1, 600), -1.0, np.float32)
    scores[0, first : first + 2] = np.nextafter(np.float32(1), 2)
    scores[0, (first + 300) % 600] = 1.0
    rows = Rows(scores, np.full((1, 600), FREE, np.uint8), np.int32([1]))
    kept, masses = launch_keep_tiles(emulated_select, rows, tau, Guarded())
    assert np.flatnonzero(kept).tolist() == [first]
    if tau:
        np.testing.assert_allclose(masses[0], 1 / 3, rtol=1e-6)


def test_what_is_no_number(emulated_select):
    """NaN comes last, and an infinity first: it is all the mass there is."""
    scores = np.float32([[np.nan, 0, -np.inf, np.inf, -0.0, -np.nan, 1e-45, np.inf]])
    order = [3, 7, 6, 1, 4, 2, 0, 5]
    states = np.full(scores.shape, FREE, np.uint8)
    for count in range(scores.size + 1):
        rows = Rows(scores, states, np.int32([count]))
        kept, _ = launch_keep_tiles(emulated_select, rows, 0.0, Guarded())
        assert np.flatnonzero(kept).tolist() == sorted(order[:count])
        kept, masses = launch_keep_tiles(emulated_select, rows, 0.75, Guarded())
        assert np.flatnonzero(kept).tolist() == order[: min(count, 1)]
        assert masses[0] == min(count, 1)
    states[0, 7] = ALWAYS  # then nothing else is needed
    rows = Rows(scores, states, np.int32([5]))
    kept, masses = launch_keep_tiles(emulated_select, rows, 0.75, Guarded())
    assert np.flatnonzero(kept).tolist() == [7] and masses[0] == 1


def test_rows_that_hold_nothing(emulated_select):
    """Whose tiles are hidden, or without mass, or all of which have to be there."""
    scores = [[1, 2, 3], [-1, -2, -3], [1, 2, 1], [1, 2, 1], [5, 1, 1], [5, 1, 1]]
    states = np.full((6, 3), FREE, np.uint8)
    states[0], states[2], states[4:, 0] = HIDDEN, ALWAYS, ALWAYS
    limits = np.int32([3, 2, 0, 0, 3, np.iinfo(np.int32).min])
    made = launch_keep_tiles(
        emulated_select, Rows(np.float32(scores), states, limits), 0.5, Guarded()
    )
    kept = [[0, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert made[0].tolist() == kept
    np.testing.assert_array_equal(made[1], np.float32([1, 1, 1, 0, 5 / 7, 5 / 7]))
    made = launch_keep_tiles(
        emulated_select, Rows(np.float32(scores), states, limits), 0.0, Guarded()
    )
    kept[3:] = [[0, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert made[0].tolist() == kept


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_of_maps(shape, share, emulated_select, rng):
    kept = rng.random(shape) < share
    for width in {1, max(1, int(share * shape[1])), shape[1] + 3}:
        made = launch_list_tiles(emulated_select, kept, width, Guarded())
        hold_lists(made, kept, width)


def test_one_launch_each(emulated_select, rng):
    rows = draw(rng, (5, 300))
    emulated_select.emulator_launches()
    launch_keep_tiles(emulated_select, rows, 0.5, Guarded())
    launch_list_tiles(emulated_select, rows.states, 3, Guarded())
    launch_pool_pieces(
        emulated_select, np.ones((2, 9, 16), np.float32), None, 4, 3, Guarded()
    )
    assert emulated_select.emulator_launches() == 3


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_nothing_at_all(shape, emulated_select):
    emulated_select.emulator_launches()
    limits = np.zeros(shape[0], np.int32)
    rows = Rows(np.zeros(shape, np.float32), np.zeros(shape, np.uint8), limits)
    launch_keep_tiles(emulated_select, rows, 0.0, Guarded())
    assert emulated_select.emulator_launches() == 0
    made = launch_list_tiles(emulated_select, np.zeros(shape, bool), 2, Guarded())
    assert (made[0] == -1).all() and (made[1] == 0).all()
    assert emulated_select.emulator_launches() == int(shape[0] != 0)
