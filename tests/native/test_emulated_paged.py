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
from paged_problems import (
    Case,
    Problem,
    hold_alone,
    run_on_host,
    with_nan_in_front_of_windows,
)

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
    case = Case(window=(70, 0), sequences=((150, 600), (1, 9), (1, 300)), heads=8)
    run_on_host(hopper, with_nan_in_front_of_windows(case), times=1)


def test_for_few_queries_they_may_be_nan_too(emulated):
    case = Case(window=(70, 0), sequences=((1, 600), (5, 333), (1, 9)), heads=8)
    run_on_host(emulated, with_nan_in_front_of_windows(case), times=1)
