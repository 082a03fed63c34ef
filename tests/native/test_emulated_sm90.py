"""Hopper's attention kernels on a CPU, forward and backward, against float64.

As test_emulated.py, which has the generic kernels: the very sources that a GPU runs,
launchers too, with the cases and the judge of the sweep there. Products of warpgroups,
tensor maps, bulk copies and additions, barriers, clusters and turns are emulated. One
instance of each way in which kernels share their work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_sweep
import pytest
from attention_problems import Case, Gpu, Problem
from attention_sweep import Launcher, judged
from sweep_cases import CAUSAL, OPTIONS, small

pytestmark = [pytest.mark.wide, pytest.mark.torch]

# Padded head dims, and others that are padded to them, by how warpgroups share a tile
# of the backward pass (hopper/backward/kernel.cuh). Wide ones have one place for Q
# forward; those of 256 have clusters backward.
DIMS = {
    "64": ("bfloat16", (64, 64), (40, 56)),
    "128": ("bfloat16", (128, 128), (104, 72)),
    "192 with 128": ("float16", (192, 128), (136, 64)),
    "192": ("float16", (192, 192), (152, 184)),
    "256": ("float16", (256, 256), (200, 248)),
}


@pytest.fixture
def launcher(sm90_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Everything once: nothing here differs from time to time."""
    monkeypatch.setattr(attention_sweep, "TIMES", 1)
    made = Launcher(str(sm90_library), "sm90", Gpu("cpu"))
    made.library.emulator_set_multiprocessors(3)
    yield made
    made.library.emulator_set_multiprocessors(3)


def option(name: str, dims: str, **changes: Any) -> Case:
    """A call with this option, a tile or two along each side."""
    dtype, *pairs = DIMS[dims]
    head_dim, value_dim = pairs[list(OPTIONS).index(name) % 2]
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    return small(name, dtype, (120, 190), **sizes | changes)


def hold(launcher: Launcher, case: Case) -> None:
    launcher.library.emulator_hopper_ctas()
    found = judged(launcher, case)
    assert [v.wrong for v in found.values() if v.wrong] == [], str(case)
    assert {"out", "lse", "dq", "dk", "dv", "added"} <= {*found}, found
    assert launcher.library.emulator_hopper_ctas() > 0


def names_with(*options: str, without: tuple[str, ...] = ()) -> list[str]:
    """Calls with one of them (or with anything) which Hopper's kernels serve."""
    return [
        name
        for name, given in OPTIONS.items()
        if (not options or not {*given}.isdisjoint(options))
        and {*given}.isdisjoint(without)
        and option(name, "64").hopper_serves
    ]


def options_with(*options: str, without: tuple[str, ...] = ()) -> Any:
    calls = [
        (name, dims) for name in names_with(*options, without=without) for dims in DIMS
    ]
    return pytest.mark.parametrize(("name", "dims"), calls)


SEQUENCES = ("lengths", "packed", "segments")
OTHERS = ("softcap", "bias", "tiles", "dropout")


@options_with(without=SEQUENCES + OTHERS)
def test_bands_and_scales_are_right(name, dims, launcher):
    hold(launcher, option(name, dims))


@options_with(*SEQUENCES, without=OTHERS)
def test_sequences_are_right(name, dims, launcher):
    hold(launcher, option(name, dims))


@options_with("softcap")
def test_softcaps_are_right(name, dims, launcher):
    hold(launcher, option(name, dims))


@options_with("bias")
def test_biases_are_right(name, dims, launcher):
    hold(launcher, option(name, dims))


@options_with("tiles")
def test_tile_lists_are_right(name, dims, launcher):
    hold(launcher, option(name, dims, q_len=300, kv_len=500))


@options_with("dropout")
def test_dropout_is_right(name, dims, launcher):
    hold(launcher, option(name, dims))


@pytest.mark.parametrize("dims", DIMS)
def test_references_that_move_are_right(dims, launcher):
    """Rows have keys in a later tile whose scores are far above those before."""
    hold(launcher, option("large scores, causal", dims, window=(-1, -1)))


@pytest.mark.parametrize("scale", [3.0, 30.0])
@pytest.mark.parametrize("dims", DIMS)
def test_references_that_leap_are_right(dims, scale, launcher):
    """The exponential of what a score is above its reference is not finite."""
    leaps = option("large scores, causal", dims, window=(-1, -1))
    hold(launcher, dataclasses.replace(leaps, scale=scale))


MASKS = (
    "causal, shift",
    "window",
    "window ahead",
    "scattered segments",
    "packed, window",
    "own tiles, causal",
    "own partial tiles, causal",
    "dropout, causal",
)


@pytest.mark.parametrize("scale", [3.0, 30.0])
@pytest.mark.parametrize("dims", ["64", "128", "256"])
@pytest.mark.parametrize("name", MASKS)
def test_references_that_leap_under_masks_are_right(name, dims, scale, launcher):
    """Some rows have no reference yet where others leap."""
    hold(launcher, option(name, dims, kv_len=410, scale=scale))


@pytest.mark.parametrize("scale", [None, 3.0, 30.0])
@pytest.mark.parametrize("dims", ["64", "128"])
@pytest.mark.parametrize("name", names_with("dropout"))
def test_dropout_over_many_tiles_is_right(name, dims, scale, launcher):
    """Whether rows leap in one of them or not."""
    hold(launcher, option(name, dims, kv_len=700, **{"scale": scale} if scale else {}))


class OneLeap(Problem):
    """Scores of one row leap in the third tile of keys, and again in the fourth."""

    def __init__(self, case: Case, place: Any) -> None:
        super().__init__(case, place)
        for name, at, size in (("q", 40, 6.0), ("k", 300, 3.0), ("k", 450, 4.5)):
            self.given[name][:, at] = size
            self.exact[name][:, at] = size


@pytest.mark.parametrize("dims", ["64", "128"])
def test_dropout_where_one_row_leaps_is_right(dims, launcher, monkeypatch):
    """One warp of a warpgroup looks at maxima in steps in which the others do not.

    All issue their products from the same place of the program nevertheless, or the
    emulator ends.
    """
    monkeypatch.setattr(attention_sweep, "Problem", OneLeap)
    hold(launcher, option("dropout", dims, kv_len=700))


RATE = Case("bfloat16", 64, 64, 2, 4, 2, 230, 300, 1, dropout=26)
RATES = {
    "few queries": dataclasses.replace(RATE, q_len=3),
    "most of them": dataclasses.replace(RATE, dropout=127, head_dim=40, value_dim=56),
    # Slopes of what is dropped are tiny in float16, and 128 times as large after.
    "most of them, float16": Case("float16", 184, 8, 1, 3, 3, 141, 159, 5, dropout=127),
    "hardly any": dataclasses.replace(RATE, dropout=1, sinks=2),
    "packed, more sequences": dataclasses.replace(
        RATE, packed=True, batch=5, window=CAUSAL
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_any_rate_of_dropout_is_right(name, launcher):
    hold(launcher, RATES[name])


@options_with("window", without=OTHERS)
def test_ctas_with_a_tile_each_are_right(name, dims, launcher):
    """Where those before had several: the GPU is larger."""
    launcher.library.emulator_set_multiprocessors(60)
    hold(launcher, option(name, dims))


ONE = Case("bfloat16", 128, 128, 1, 1, 1, 2100, 150, 3)
TALL = {
    "full": ONE,
    "groups, lengths": dataclasses.replace(
        ONE, heads=2, batch=2, lengths=True, q_len=2048, kv_len=70
    ),
    "causal": dataclasses.replace(ONE, q_len=4130, kv_len=300, window=CAUSAL),
    "packed": dataclasses.replace(ONE, packed=True, batch=1, q_len=2500),
}


@pytest.mark.parametrize("name", TALL)
def test_tall_tiles_are_right(name, launcher):
    """80 queries of head dim 128 a step, where there are many."""
    hold(launcher, TALL[name])


LANES = {
    "each head alone": dataclasses.replace(ONE, q_len=150, heads=3, kv_heads=3),
    "an odd number of rounds": dataclasses.replace(
        ONE, q_len=100, batch=2, heads=10, kv_heads=5, window=CAUSAL
    ),
    "packed": dataclasses.replace(
        ONE, q_len=300, batch=3, heads=4, kv_heads=4, packed=True
    ),
    "head dim 256": dataclasses.replace(
        ONE, dtype="float16", head_dim=256, q_len=130, heads=3, kv_heads=3
    ),
    "tile lists": dataclasses.replace(
        ONE, q_len=250, heads=5, kv_heads=5, tiles=(1, True)
    ),
    "tile lists, groups": dataclasses.replace(
        ONE, q_len=130, batch=2, heads=8, kv_heads=4, window=CAUSAL, tiles=(2, False)
    ),
}


@pytest.mark.parametrize("name", LANES)
def test_sums_of_some_heads_at_a_time_are_right(name, launcher):
    hold(launcher, LANES[name])
