"""Paged attention's kernels on a CPU, thread by thread, against float64.

As test_emulated.py: the very sources that a GPU runs, launchers too. What lies beside
arrays, and what nobody may read, is NaN.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
from paged_cases import BAD, CASES, LEAVING, LONG, SPLIT
from paged_problems import Case, Problem, run_on_host

pytestmark = pytest.mark.wide


@pytest.fixture(params=[3, 20])
def emulated(request, library: Path):
    """The library, for a GPU of so many multiprocessors, of two CTAs each."""
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_set_multiprocessors(request.param)
    yield loaded
    loaded.emulator_set_multiprocessors(3)


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, emulated):
    run_on_host(emulated, Problem(CASES[name]))


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_safe(name, emulated):
    """Nothing is read or written outside of the arrays, and results are defined."""
    run_on_host(emulated, Problem(BAD[name]))


def test_more_calls_than_one_have_their_own_layers(emulated):
    """A layer for each call, as vmap makes them."""
    x = Problem(Case(calls=4, layers=3, layer=1))
    apart = Problem(Case(calls=4, layers=3, layer=2))
    layers = [1, 2, 1, 7]
    pages = apart.pages.copy()
    pages[:, 1] = x.pages[:, 1]
    x.pages = pages
    for b, layer in enumerate(layers):
        if layer == 2:
            x.keys[b], x.values[b] = apart.keys[b], apart.values[b]
            assert (x.tables[b] == apart.tables[b]).all()
        elif layer == 7:
            x.kv_lens[b] = 0
    x.layers = layers
    run_on_host(emulated, x)


@pytest.mark.parametrize("name", LEAVING)
def test_sequences_with_many_rows_are_left_to_another_launch(name, emulated):
    """Nothing of theirs is written, and all other rows are right."""
    run_on_host(emulated, Problem(LEAVING[name]), most_rows=64)


@pytest.fixture(params=["boxes", "rows"])
def hopper(request, library: Path):
    """The library, where Hopper's kernel takes the sequences with many queries.

    It loads boxes of blocks, if these are multiples of 8, or always row by row.
    """
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_set_hopper(1)
    loaded.emulator_set_block_maps(request.param == "boxes")
    yield loaded
    loaded.emulator_set_hopper(0)


def hold_alone(library: ctypes.CDLL, whole: Problem) -> None:
    """The call, and each sequence alone on a smaller GPU: rows have the same bits."""
    library.emulator_set_multiprocessors(20)
    run_on_host(library, whole, times=1)
    library.emulator_set_multiprocessors(3)
    assert whole.got
    for b in range(len(whole.tables)):
        call, first, end = whole.sequence_rows(b)
        if first == end:
            continue
        alone = whole.alone(b)
        run_on_host(library, alone, times=1)
        assert alone.got
        for a, part in zip(whole.got, alone.got, strict=True):
            assert a[call, first:end].tobytes() == part[0].tobytes(), b


@pytest.mark.parametrize("name", SPLIT)
def test_with_split_size_other_sequences_change_no_bit(name, library):
    hold_alone(ctypes.CDLL(str(library)), Problem(SPLIT[name]))


def test_without_split_size_they_do(library):
    case = dataclasses.replace(SPLIT["split: mixed"], split_size=0)
    with pytest.raises(AssertionError):
        hold_alone(ctypes.CDLL(str(library)), Problem(case))


def test_with_split_size_they_change_none_where_two_kernels_share_a_call(hopper):
    hold_alone(hopper, Problem(SPLIT["split: long among them"]))


def is_emulated(case: Case) -> bool:
    """The instances that the emulator has: each takes a while to compile."""
    dim = max(case.head_dim, case.value_dim)
    wide = dim <= 128 if case.dtype == "bfloat16" else dim > 192
    return dim <= 64 or wide


MANY_QUERIES = {
    name: case
    for name, case in {**CASES, **BAD, **LEAVING, **LONG}.items()
    if is_emulated(case)
}


@pytest.mark.parametrize("name", MANY_QUERIES)
def test_two_kernels_share_a_call(name, hopper):
    """Hopper's, with its roles, barriers and swizzled tiles, and the one for few."""
    run_on_host(hopper, Problem(MANY_QUERIES[name]), times=1)


def test_keys_in_front_of_all_windows_may_be_nan(hopper):
    """Some of them lie in a tile, and in a block, with keys that are seen."""
    x = Problem(Case(window=(70, 0), sequences=((150, 600), (1, 9)), heads=8))
    axes = x.case.layout.split()
    view = x.pages.transpose([axes.index(a) for a in "BLOTHD"])
    for key in range(600 - 150 - 70):
        block, slot = x.tables[0, key // 16], key % 16
        view[block, 0, :, slot] = float("nan")
    run_on_host(hopper, x, times=1)
