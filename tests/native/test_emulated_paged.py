"""Paged attention's kernels on a CPU, thread by thread, against float64.

As test_emulated.py: the very sources that a GPU runs, launchers too. What lies beside
arrays, and what nobody may read, is NaN.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from paged_cases import (
    BAD,
    BAD_DECODE_ROWS,
    CASES,
    DECODE_ROWS,
    LEAVING,
    LONG,
    NOT_SHARED_OUT,
    SHARED_OUT,
    SPLIT,
)
from paged_problems import (
    Case,
    Problem,
    hold_alone,
    run_on_host,
    with_nan_in_front_of_windows,
)

pytestmark = pytest.mark.wide


@pytest.fixture(params=[3, 20])
def emulated(request, attention_library: Path):
    """The library, for a GPU of so many multiprocessors, of two CTAs each.

    Decode rows of few keys have no kernel of their own.
    """
    loaded = ctypes.CDLL(str(attention_library))
    loaded.emulator_set_multiprocessors(request.param)
    loaded.emulator_set_short(0)
    yield loaded
    loaded.emulator_set_multiprocessors(3)
    loaded.emulator_set_short(1)


@pytest.fixture
def short(attention_library: Path):
    """The library, for a GPU where these have one, if their units are up to 60."""
    loaded = ctypes.CDLL(str(attention_library))
    loaded.emulator_set_multiprocessors(20)
    yield loaded
    loaded.emulator_set_multiprocessors(3)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, emulated):
    run_on_host(emulated, Problem(CASES[name]))


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_safe(name, emulated):
    """Nothing is read or written outside of the arrays, and results are defined."""
    run_on_host(emulated, Problem(BAD[name]))


@pytest.mark.parametrize("name", DECODE_ROWS)
def test_decode_rows_of_few_keys(name, short):
    run_on_host(short, Problem(DECODE_ROWS[name]))


@pytest.mark.parametrize("name", BAD_DECODE_ROWS)
def test_bad_data_is_safe_where_few_keys_are_decoded(name, short):
    run_on_host(short, Problem(BAD_DECODE_ROWS[name]))


def test_calls_of_decode_rows_have_their_own_layers(short):
    run_on_host(short, with_layers(Case(calls=4, layers=3), [1, 2, 1, 7]))


def test_more_calls_than_one_have_their_own_layers(emulated):
    """A layer for each call, as vmap makes them."""
    run_on_host(emulated, with_layers(Case(calls=4, layers=3), [1, 2, 1, 7]))


def with_layers(case: Case, layers: list[int]) -> Problem:
    """A sequence for each layer: 1, 2, or 7, which there is not."""
    x = Problem(dataclasses.replace(case, layer=1))
    apart = Problem(dataclasses.replace(case, layer=2))
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
    return x


@pytest.mark.parametrize("name", LEAVING)
def test_sequences_with_many_rows_are_left_to_another_launch(name, emulated):
    """Nothing of theirs is written, and all other rows are right."""
    run_on_host(emulated, Problem(LEAVING[name]), few_rows=64)


@pytest.mark.parametrize("name", SPLIT)
def test_with_split_size_other_sequences_change_no_bit(name, attention_library):
    hold_alone(ctypes.CDLL(str(attention_library)), Problem(SPLIT[name]))


def test_without_split_size_they_do(attention_library):
    case = dataclasses.replace(SPLIT["split: mixed"], split_size=0)
    with pytest.raises(AssertionError):
        hold_alone(ctypes.CDLL(str(attention_library)), Problem(case))


def test_with_split_size_they_change_none_where_two_kernels_share_a_call(hopper):
    hold_alone(hopper, Problem(SPLIT["split: long among them"]))


@pytest.mark.parametrize("times", [4.0, 4000.0])
def test_with_split_size_scores_that_leap_change_none_of_others(times, hopper):
    """Sixteen rows of a warp are of two sequences. All grow; the others leap."""
    x = Problem(dataclasses.replace(SPLIT["split: long among them"], scale=1.0))
    _, first, _ = x.sequence_rows(1)
    x.q[0, first:] = (x.q[0, first:].astype(np.float32) * times).astype(x.q.dtype)
    hold_alone(hopper, x)


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


@pytest.mark.wide
@pytest.mark.parametrize("name", MANY_QUERIES)
def test_two_kernels_share_a_call(name, hopper):
    """Hopper's, with its roles, barriers and swizzled tiles, and the one for few."""
    run_on_host(hopper, Problem(MANY_QUERIES[name]), times=1)


def test_calls_with_layers_of_their_own_where_chunks_are_long(hopper):
    """What a loader keeps of an item ends with it."""
    case = Case(calls=4, layers=3, sequences=((70, 160), (66, 66), (90, 200), (80, 80)))
    run_on_host(hopper, with_layers(case, [1, 2, 7, 1]), times=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_wide_cta_for_each_multiprocessor(head_dim, attention_library):
    """Where there are about as many units: no second CTA beside it, and more warps."""
    loaded = ctypes.CDLL(str(attention_library))
    loaded.emulator_set_multiprocessors(10)
    loaded.emulator_grids()
    lengths = ((1, 700), (1, 9), (1, 300), (2, 513), (1, 0))
    run_on_host(loaded, Problem(Case(sequences=lengths, heads=4, head_dim=head_dim)))
    assert loaded.emulator_grids() >> 10 & 1
    loaded.emulator_set_multiprocessors(3)


DECODING = {
    "decode rows": Case(sequences=((1, 90), (1, 9), (1, 0))),
    "a row of each call": Case(sequences=((1, 90), (1, 9), (1, 40)), calls=3),
    "drafts of one": Case(sequences=((3, 90), (0, 9), (0, 5))),
    # What another kernel has.
    "more rows": Case(sequences=((2, 90), (1, 9))),
    "a tree": Case(sequences=((2, 90), (0, 9)), tree=1),
    "a split": Case(sequences=((1, 90), (1, 9)), split_size=256),
    "many keys": Case(sequences=((1, 2600), (1, 9), (1, 0))),
    "many sequences": Case(sequences=((1, 90),) * 31),
}
SHORT = tuple(DECODING)[:3]


@pytest.mark.parametrize("name", DECODING)
def test_which_decode_rows_have_a_kernel_of_their_own(name, short):
    """One launch of a CTA for each row and key head."""
    x = Problem(DECODING[name])
    grids = {}
    for takes in (False, True):
        short.emulator_set_short(takes)
        short.emulator_launches(), short.emulator_grids()
        run_on_host(short, x, times=1)
        grids[takes] = short.emulator_launches(), short.emulator_grids()
    assert grids[False] != (1, 1 << x.case.kv_heads)
    assert (grids[True] == (1, 1 << x.case.kv_heads)) == (name in SHORT)


DECODES = ((1, 900),) * 12
BESIDE = Case(sequences=(*DECODES, (150, 300)), heads=8, kv_heads=2, block_size=16)


@pytest.fixture
def twenty(hopper):
    """On a GPU of 20 multiprocessors, which 40 narrow CTAs have room on."""
    hopper.emulator_set_multiprocessors(20)
    hopper.emulator_hopper_ctas()
    yield hopper
    hopper.emulator_set_multiprocessors(3)


def test_what_reads_leaves_multiprocessors_to_what_computes(twenty):
    x = Problem(BESIDE)
    run_on_host(twenty, x, times=1)
    shares = 2 * x.counters["ctas"]  # of two lines
    assert 10 < shares < 40
    gone = x.counters["gone"]
    assert 0 < gone < 40 - shares // 2
    assert x.counters["taken"] == shares + 40 - gone  # each once; who finds none stops
    assert twenty.emulator_hopper_ctas() > 0


def test_more_work_for_what_computes_leaves_it_more(twenty):
    few, many = (
        Problem(BESIDE),
        Problem(dataclasses.replace(BESIDE, sequences=(*DECODES, (450, 700)))),
    )
    for x in (few, many):
        run_on_host(twenty, x, times=1)
    assert 1 <= many.counters["ctas"] < few.counters["ctas"]


def test_it_leaves_none_where_there_is_nothing_to_compute(twenty):
    x = Problem(dataclasses.replace(BESIDE, sequences=(*DECODES, (9, 90))))
    run_on_host(twenty, x, times=1)
    assert x.counters["ctas"] == 20
    assert x.counters["taken"] == x.counters["gone"] == 0


def test_the_last_cta_reads_where_none_is_on_a_multiprocessor_for_it(twenty):
    """As where other programs leave room on one multiprocessor alone."""
    x = Problem(BESIDE)
    twenty.emulator_set_on_one(1)
    run_on_host(twenty, x, times=1)
    twenty.emulator_set_on_one(0)
    assert x.counters["gone"] == 40
    assert x.counters["taken"] == 2 * x.counters["ctas"] + 1


def test_as_many_queries_as_sequences_are_one_launch(twenty):
    """Whoever has them: one of these sequences has more than few."""
    for queries in ((1,) * 80, (80,) + (0,) * 79):
        x = Problem(Case(sequences=tuple((n, 100) for n in queries), head_dim=64))
        run_on_host(twenty, x, times=1)
        assert twenty.emulator_hopper_ctas() == 0
    x = Problem(Case(sequences=((80, 100), (1, 9)), head_dim=64))
    run_on_host(twenty, x, times=1)
    assert twenty.emulator_hopper_ctas() > 0


@pytest.mark.parametrize("name", SHARED_OUT)
def test_keys_of_few_tiles_are_shared_out(name, twenty):
    """Each of a tile's pieces is left once, by both consumers."""
    case, pieces = SHARED_OUT[name]
    x = Problem(case)
    run_on_host(twenty, x, times=2)
    first, second = x.counters["arrived"].reshape(-1, 2).T
    assert (first == second).all()
    assert tuple(sorted(first[first > 0].tolist())) == pieces


@pytest.mark.parametrize("name", NOT_SHARED_OUT)
def test_others_are_not(name, twenty):
    x = Problem(NOT_SHARED_OUT[name])
    run_on_host(twenty, x, times=1)
    assert twenty.emulator_hopper_ctas() > 0
    assert (x.counters["arrived"] == 0).all()


def test_keys_in_front_of_all_windows_may_be_nan(hopper):
    case = Case(window=(70, 0), sequences=((150, 600), (1, 9), (1, 300)), heads=8)
    run_on_host(hopper, with_nan_in_front_of_windows(case), times=1)


def test_for_few_queries_they_may_be_nan_too(emulated):
    case = Case(window=(70, 0), sequences=((1, 600), (5, 333), (1, 9)), heads=8)
    run_on_host(emulated, with_nan_in_front_of_windows(case), times=1)
