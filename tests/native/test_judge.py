"""The judge of results sees a few wrong rows among many right ones."""

from __future__ import annotations

import judge
import numpy as np
import pytest

ROWS = (2, 128, 3, 16)  # [B, T, N, D]
LAST = slice(60, 64)  # the last rows of a tile of 64 queries


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


@pytest.fixture
def rows(rng):
    """The truth, what plain code makes of it, and what is judged."""
    want = rng.standard_normal(ROWS) / np.sqrt(np.arange(1, 129))[:, None, None]
    plain = rounded(want * (1 + 2e-4 * rng.standard_normal(ROWS)))
    return want, plain, rounded(want * (1 + 1e-4 * rng.standard_normal(ROWS)))


@pytest.mark.parametrize("name", ["out", "d_q"])
def test_rows_that_are_rounded_are_right(rows, name):
    want, plain, got = rows
    assert 0 < judge.assert_rows_near(name, got, want, plain, np.float16) <= 1


@pytest.mark.parametrize("name", ["out", "d_q"])
def test_the_last_four_rows_of_a_tile_must_not_be_zero(rows, name):
    want, plain, got = rows
    got[1, LAST, 2] = 0
    # A norm over everything, as tests used to have it, does not see them: 1 % is off.
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
    with pytest.raises(AssertionError, match=r"4 rows of 768 are wrong, \[1, 60, 2\]"):
        judge.assert_rows_near(name, got, want, plain, np.float16)


def test_a_row_is_held_to_its_own_size_not_to_the_largest(rows):
    """Off by 0.05, a row of 0.1 is wrong, and one of 100 is right."""
    want, plain, got = rows
    small, large = (0, 120, 0), (0, 1, 0)
    for x in (want, plain, got):
        x[large] *= 100
    got[large] += 0.05
    judge.assert_rows_near("out", got, want, plain, np.float16)
    got[small] += 0.05
    with pytest.raises(AssertionError, match=r"1 rows of 768 are wrong, \[0, 120, 0\]"):
        judge.assert_rows_near("out", got, want, plain, np.float16)


def test_what_cancels_is_held_to_what_was_taken_away(rows):
    """A row of 0 is off by half a unit of the 8 that its sum and its product were."""
    want, plain, got = rows
    (row, other), off = ((0, 5, 1), (0, 6, 1)), 4 * 2.0**-10
    for x in (want, plain, got):
        x[row] = x[other] = 0
    got[row] = off
    with pytest.raises(AssertionError, match=r"1 rows of 768 are wrong, \[0, 5, 1\]"):
        judge.assert_rows_near("out", got, want, plain, np.float16)
    taken = np.zeros(ROWS[:-1])
    taken[row] = 8
    judge.assert_rows_near("out", got, want, plain, np.float16, taken)
    got[other] = off  # nothing was taken away there
    with pytest.raises(AssertionError, match=r"1 rows of 768 are wrong, \[0, 6, 1\]"):
        judge.assert_rows_near("out", got, want, plain, np.float16, taken)
    got[other], got[row] = 0, 3 * off
    with pytest.raises(AssertionError, match=r"1 rows of 768 are wrong, \[0, 5, 1\]"):
        judge.assert_rows_near("out", got, want, plain, np.float16, taken)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_its_places(rows, bad):
    want, plain, got = rows
    got[1, 2, 0, 3] = bad
    with pytest.raises(AssertionError, match=r"1 places of 12288.*\[1, 2, 0, 3\]"):
        judge.assert_rows_near("out", got, want, plain, np.float16)
    want[1, 2, 0, 3] = bad
    judge.assert_rows_near("out", got, want, plain, np.float16)


def test_a_log_sum_exp_is_right_to_float32(rng):
    want = rng.standard_normal((2, 3, 128)) * 5
    want[0, 0, 7] = -np.inf
    got = want.astype(np.float32)
    judge.assert_lse_near(got, want)
    got[0, 0, 9] += 1e-3  # nothing at the accuracy of 16 bits
    with pytest.raises(AssertionError, match=r"lse: 1 rows of 768 .* \[0, 0, 9\]"):
        judge.assert_lse_near(got, want)


def test_an_exact_result_may_have_a_bar_of_nothing():
    zeros = np.zeros((3, 4))
    assert judge.judge("dk", zeros, zeros, zeros).worst == 0
    assert judge.judge("dk", zeros + 1e-9, zeros, zeros).wrong


@pytest.mark.torch
def test_torch_tensors_are_judged_like_arrays(rows):
    import torch

    want, _, got = rows
    got[1, LAST, 2] = 0
    bar = judge.bar_of_terms(want, abs(want), 1e-6, "float16")
    given = (torch.from_numpy(x) for x in (got, want, bar))
    assert judge.judge("dq", *given) == judge.judge("dq", got, want, bar)
