"""The kernel of norms in 8 bits on a CPU, thread by thread: every number."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from append_launches import Guarded
from norm_cast_launches import cases, draw, hold, launch, part_of, truth


def run(library, drawn, scale=8.0, form="e4m3", outputs=None):
    given = () if outputs is None else (outputs,)
    made = launch(library, drawn, scale, form, Guarded(), *given)
    hold(made, drawn, scale, form)
    return made


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "dtype", "form", "residual", "gamma_dtype"), list(cases()), ids=str
)
def test_every_number(shape, dtype, form, residual, gamma_dtype, emulated_cast, rng):
    made = run(emulated_cast, draw(rng, shape, dtype, residual, gamma_dtype), form=form)
    assert ("sum" in made) == residual


# A row in one part of columns and in two, a whole part and what is left, sixteen parts
# and the first width whose parts are larger; rows that are no whole tile.
@pytest.mark.parametrize("columns", [496, 528, 1024, 2064, 4096, 8176, 8192, 8208])
def test_parts_of_columns(columns, emulated_cast, rng):
    emulated_cast.emulator_clustered_ctas()
    run(emulated_cast, draw(rng, (48, columns), "bfloat16"))
    parts = -(-columns // part_of(columns))
    together = emulated_cast.emulator_clustered_ctas()
    assert together == (2 * parts if parts > 1 else 0)


@pytest.mark.parametrize(
    "outputs", ["", "out", "transposed", "inverse_rms", "out transposed"]
)
@pytest.mark.parametrize("residual", [False, True])
def test_what_is_left_out(outputs, residual, emulated_cast, rng):
    drawn = draw(rng, (48, 1040), "bfloat16", residual)
    made = run(emulated_cast, drawn, outputs=outputs)
    assert set(made) - {"sum"} == {*outputs.split(), "largest"}


@pytest.mark.parametrize("name", ["x", "residual", "gamma"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(bad, name, emulated_cast, rng):
    """In its row, or its column, and in the sizes of these tiles; nowhere else."""
    for row, column in itertools.product((0, 47), (0, 511, 512, 1039)):
        drawn = draw(rng, (48, 1040), "float32")
        array = drawn[("x", "residual", "gamma").index(name)]
        array[column if name == "gamma" else (row, column)] = bad
        made = run(emulated_cast, drawn, form="e5m2")
        codes = made["out"].astype(np.float32)
        hurt = np.argwhere(~(np.isfinite(codes) & (np.abs(codes) < 57344)))
        if name == "gamma":
            assert set(hurt[:, 1]) == {column} and len(hurt) == 48
        elif np.isnan(bad):
            assert set(hurt[:, 0]) == {row} and len(hurt) == 1040
        else:  # its root is infinite: what it divides is 0, and itself NaN
            assert (
                hurt.tolist() == [[row, column]]
                and not np.delete(codes[row], column).any()
            )


def test_what_a_sum_is_rounded_to_is_normed(emulated_cast, rng):
    """Numbers that vanish beside others leave no trace in codes."""
    drawn = draw(rng, (16, 512), "bfloat16")
    drawn[1] = (drawn[0].astype(np.float32) * 2.0**-9).astype(drawn[1].dtype)
    made = run(emulated_cast, drawn)
    alone = run(emulated_cast, [made["sum"], None, drawn[2]])
    for other in ("out", "transposed", "inverse_rms", "largest"):
        np.testing.assert_array_equal(made[other], alone[other])


@pytest.mark.parametrize("size", [0.0, 2.0**-70])
def test_rows_of_almost_nothing(size, emulated_cast, rng):
    """eps is all that there is to divide by."""
    drawn = draw(rng, (16, 48), "float32", residual=False)
    drawn[0] *= np.float32(size)
    made = run(emulated_cast, drawn, scale=2.0**60)
    np.testing.assert_allclose(made["inverse_rms"], truth(drawn)[1], rtol=2.0**-19)
    assert size == 0 or made["out"].astype(np.float32).any()


def test_rows_that_are_not_there_have_no_size(emulated_cast, rng):
    """Of 48 the second tile lacks 16; without eps their roots are infinite."""
    drawn = draw(rng, (48, 528), "bfloat16")
    made = launch(emulated_cast, drawn, 8.0, "e4m3", Guarded(), eps=0.0)
    hold(made, drawn, 8.0, "e4m3")


def test_numbers_too_large_become_the_largest(emulated_cast, rng):
    made = run(emulated_cast, draw(rng, (16, 48), "bfloat16"), scale=1e3)
    assert np.abs(made["out"].astype(np.float32)).max() == 448


def test_the_same_bits_every_time(emulated_cast, rng):
    drawn = draw(rng, (48, 2064), "float32")
    first, second = (run(emulated_cast, drawn) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array.view(np.uint8), second[name].view(np.uint8))


def test_one_launch(emulated_cast, rng):
    emulated_cast.emulator_launches()
    run(emulated_cast, draw(rng, (48, 1040), "float16"))
    assert emulated_cast.emulator_launches() == 1


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)], ids=str)
def test_nothing_at_all(shape, emulated_cast, rng):
    emulated_cast.emulator_launches()
    made = launch(
        emulated_cast, draw(rng, shape, "float32"), 1.0, "e4m3", Guarded(),
        "out transposed",
    )  # fmt: skip
    assert all(not x.size for x in made.values())
    assert emulated_cast.emulator_launches() == 0


def test_other_gpus(emulated_cast, rng):
    emulated_cast.emulator_set_hopper(0)
    try:
        words = re.escape("compute capability 9.0, this one has 8.0; use")
        with pytest.raises(AssertionError, match=words):
            run(emulated_cast, draw(rng, (16, 16), "float32"))
    finally:
        emulated_cast.emulator_set_hopper(1)


# Each library of the emulator has a GPU of its own, however many a process loads.
def test_another_librarys_gpu(hopper, emulated_cast, rng):
    hopper.emulator_set_hopper(0)
    run(emulated_cast, draw(rng, (16, 16), "float32"))
