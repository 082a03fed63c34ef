"""Quantization's kernels on a CPU, thread by thread, against float64.

As in test_emulated.py: the very sources that a GPU runs, launcher too. What nothing is
done to but a division keeps every bit of plain arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
from append_launches import Guarded
from quantize_launches import CASES, DEFAULT, DTYPES, Case, Drawn, launch
from quantize_truth import E4M3, matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_code_is_right(name, dtype, emulated_quantize, rng):
    drawn, memory = Drawn(CASES[name], dtype, rng), Guarded()
    drawn.hold(launch(emulated_quantize, drawn, memory))


LAUNCHES = {
    "blocks of rows as they are": ([Case(300, 2, 32)], 1),
    "blocks that turn": ([Case(300, 2, 32, turned=True)], 1),
    "heads as they are": ([Case(300, 2, 32, "head")], 2),
    "the default": (DEFAULT, 2),
    "turned heads": (
        [Case(300, 2, 32, "head", turned=True), Case(300, 1, 32, "head")],
        2,
    ),
    "turned heads of centred rows": (
        [Case(300, 2, 32, "head", True, True), Case(300, 1, 32, "head")],
        3,
    ),
    "two dims": ([Case(300, 2, 32, "head"), Case(300, 2, 64, "head")], 3),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_as_many_launches_as_are_said(name, emulated_quantize, rng):
    cases, count = LAUNCHES[name]
    drawn = Drawn(cases, "bfloat16", rng)
    emulated_quantize.emulator_launches()
    drawn.hold(launch(emulated_quantize, drawn, Guarded()))
    assert emulated_quantize.emulator_launches() == count


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 112, 128])
def test_the_matrix_is_orthogonal(dim):
    m = matrix(dim)
    np.testing.assert_allclose(m @ m.T, np.eye(dim), atol=1e-12)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("integers", [False, True])
def test_bad_numbers_reach_what_shares_their_scale(
    integers, bad, turned, emulated_quantize, rng
):
    cases = [Case(300, 2, 64, turned=turned, integers=integers)]
    drawn = Drawn(cases, "bfloat16", rng)
    drawn.arrays[0][1, 140, 1, 5] = bad
    ((codes, scales, _),) = launch(emulated_quantize, drawn, Guarded())
    hit = np.zeros((2, 2, 3), bool)
    hit[1, 1, 1] = True
    assert (np.isfinite(scales) == ~hit).all()
    wide = codes.astype(np.float32)
    good = np.delete(wide.reshape(-1, 64), range((300 + 128) * 2, (300 + 256) * 2), 0)
    assert np.isfinite(good).all()
    block = wide[1, 128:256, 1]
    if integers:  # which have no NaN: the scale tells
        assert (np.isnan(scales[hit]) == np.isnan(bad)).all()
        assert (block == 0).all()
    elif np.isnan(bad):
        assert np.isnan(scales[hit]).all() and np.isnan(block).all()
    else:
        assert np.isinf(scales[hit]).all()
        row = np.isnan(block[12])
        assert row.all() if turned else row.tolist() == [i == 5 for i in range(64)]
        assert (np.delete(block, 12, 0) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-120, -70, -60, -20, 0, 14, 100, 127])
def test_numbers_of_every_size_are_divided_as_float32_is(
    power, dtype, emulated_quantize, rng
):
    if dtype == "float16" and not -24 <= power < 15:
        power = -24 if power < 0 else 14
    drawn = Drawn([Case(256, 1, 64, "block"), Case(256, 1, 64, "head")], dtype, rng)
    for x in drawn.arrays:
        numbers = rng.uniform(-2, 2, x.shape) * 2.0 ** rng.integers(-14, 1, x.shape)
        x[:] = np.clip(
            numbers * 2.0**power, -6e4 if dtype == "float16" else -3e38, 3e38
        )
        x[:, 5] = -0.0
    drawn.hold(launch(emulated_quantize, drawn, Guarded()))


def test_divisions_are_rounded_as_divisions_are(emulated_quantize, rng):
    """Quotients near ties of e4m3, and others."""
    largest = rng.integers(1 << 10, 1 << 11, 300).astype(np.float32)
    scales = largest * np.float32(1 / 448)
    for scale in scales:
        ties = (rng.integers(16, 32, 30) + 0.5).astype(np.float32) * scale
        near = np.nextafter(ties, rng.choice([-1e9, 1e9], 30).astype(np.float32))
        for x in np.r_[ties, near, rng.normal(size=10).astype(np.float32)]:
            got = np.float32(emulated_quantize.emulator_divide(x, scale))
            assert got == x / scale, (x, scale)


@pytest.mark.parametrize("shared", ["block", "head", "tensor"])
def test_zeros_have_the_scale_one(shared, emulated_quantize, rng):
    cases = [
        Case(130, 2, 32, shared, centred, turned)
        for centred in (False, True)
        for turned in (False, True)
    ]
    drawn = Drawn(cases, "bfloat16", rng)
    for x in drawn.arrays:
        x[:] = 0
    for codes, scales, _ in launch(emulated_quantize, drawn, Guarded()):
        assert (scales == 1).all() and (codes.view(np.uint8) == 0).all()


def test_what_is_centred_is_centred_to_nothing(emulated_quantize, rng):
    """Rows that are all the same: what is left is zeros, not NaN."""
    drawn = Drawn([Case(256, 1, 64, centred=True)], "bfloat16", rng)
    drawn.arrays[0][:] = 3
    ((codes, scales, mean),) = launch(emulated_quantize, drawn, Guarded())
    assert (mean == 3).all() and (scales == 1).all()
    assert (codes.astype(np.float32) == 0).all()


def test_the_same_bits_each_time(emulated_quantize, rng):
    drawn = Drawn(CASES["many parts"], "bfloat16", rng)
    one, other = (launch(emulated_quantize, drawn, Guarded()) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert all(
            x is y or x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
        )


def test_codes_are_those_of_the_dtype(emulated_quantize, rng):
    """A scale of one: a number is its own code."""
    drawn = Drawn([Case(128, 1, 128)], "bfloat16", rng)
    codes = rng.permutation(np.arange(128 * 128) % 256).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E  # no NaN
    x = codes.view(E4M3).astype(np.float32).reshape(1, 128, 1, 128)
    drawn.batch, drawn.arrays = 1, [x.astype(DTYPES["bfloat16"])]
    ((made, scales, _),) = launch(emulated_quantize, drawn, Guarded())
    assert np.abs(scales - 1).max() <= 2**-23
    assert made.tobytes() == codes.tobytes()
