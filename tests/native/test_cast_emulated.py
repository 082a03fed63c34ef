"""The kernel of casts on a CPU, thread by thread: every code and every size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from append_launches import Guarded
from cast_launches import DTYPES, FORMATS, SHAPES, TILE, hold, launch


def draw(rng, shape, dtype, size=3.0):
    return (rng.standard_normal(shape) * size).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_orders(shape, form, dtype, emulated_cast, rng):
    x = draw(rng, shape, dtype)
    hold(launch(emulated_cast, x, 8.0, form, Guarded()), x, 8.0, form)


@pytest.mark.parametrize("orders", ["", "out", "transposed"])
def test_one_order_or_none(orders, emulated_cast, rng):
    x = draw(rng, (144, 272), "bfloat16")
    made = launch(emulated_cast, x, 8.0, "e4m3", Guarded(), orders)
    assert set(made) == {*orders.split(), "largest"}
    hold(made, x, 8.0, "e4m3")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-7, 1.0, 2.0**9, 2.0**60])
def test_every_bfloat16_number(scale, form, emulated_cast):
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES["bfloat16"]).reshape(256, 256)
    made = launch(emulated_cast, x, scale, form, Guarded())
    made.pop("largest")
    hold(made, x, scale, form)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_its_tiles_size(bad, emulated_cast, rng):
    """Wherever in a tile it is, also at its edges."""
    for row, column in itertools.product((0, 255, 256, 271), (0, 127, 128)):
        x = draw(rng, (272, 272), "float32")
        x[row, column] = bad
        made = launch(emulated_cast, x, 1.0, "e5m2", Guarded())
        hold(made, x, 1.0, "e5m2")
        hit = np.zeros(made["largest"].shape, bool)
        hit[row // TILE[0], column // TILE[1]] = True
        assert hit.shape == (2, 3)
        np.testing.assert_array_equal(np.isfinite(made["largest"]), ~hit)


def test_one_launch(emulated_cast, rng):
    emulated_cast.emulator_launches()
    launch(emulated_cast, draw(rng, (272, 272), "float16"), 1.0, "e4m3", Guarded())
    assert emulated_cast.emulator_launches() == 1


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)], ids=str)
def test_nothing_at_all(shape, emulated_cast):
    emulated_cast.emulator_launches()
    made = launch(emulated_cast, np.zeros(shape, np.float32), 1.0, "e4m3", Guarded())
    assert all(not x.size for x in made.values())
    assert emulated_cast.emulator_launches() == 0
