"""Paged attention in 8 bits on a CPU, thread by thread, against float64.

As test_emulated_paged.py: sequences with many queries by Hopper's forward kernel in 8
bits, with queries rounded and V transposed in front of it, the others by the kernel for
few. The bars of the first are those of test_emulated_fp8.py.
"""

from __future__ import annotations

import ctypes
import dataclasses

import ml_dtypes
import numpy as np
import pytest
from paged_cases import E4M3, MIXED, NARROW_LONG, NARROW_SPLIT
from paged_problems import (
    Case,
    HostMemory,
    Problem,
    few_rows,
    hold_alone,
    run_on_host,
    with_nan_in_front_of_windows,
)

pytestmark = pytest.mark.wide

NARROW = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("name", NARROW_LONG)
def test_every_row_is_right(name, hopper):
    run_on_host(hopper, Problem(NARROW_LONG[name]), times=1)


def test_on_a_larger_gpu(hopper):
    hopper.emulator_set_multiprocessors(20)
    run_on_host(hopper, Problem(NARROW_LONG["8 bits: mixed"]), times=2)
    hopper.emulator_set_multiprocessors(3)


def test_with_split_size_other_sequences_change_no_bit(hopper):
    hold_alone(hopper, Problem(NARROW_SPLIT))


def test_calls_have_layers_of_their_own(hopper):
    case = Case(calls=3, layers=3, sequences=((70, 160), (66, 66), (90, 200)), **E4M3)
    x = Problem(dataclasses.replace(case, layer=1))
    apart = Problem(dataclasses.replace(case, layer=2))
    x.pages = x.pages.copy()
    x.pages[:, 2] = apart.pages[:, 2]
    x.keys[1], x.values[1] = apart.keys[1], apart.values[1]
    x.kv_lens[2] = 0  # of layer 7 there are no keys
    x.layers = [1, 2, 7]
    run_on_host(hopper, x, times=1)


def test_keys_in_front_of_all_windows_may_be_nan(hopper):
    case = Case(window=(70, 0), sequences=((150, 600), (1, 9), (90, 300)), **E4M3)
    run_on_host(hopper, with_nan_in_front_of_windows(case), times=1)


ONE = Case(sequences=((150, 400), (70, 290)), heads=8, **E4M3)


def rows_of(x: Problem) -> tuple[np.ndarray, np.ndarray]:
    assert x.got is not None
    return x.got[0].astype(np.float64)[0], x.got[1].astype(np.float64)[0]


def attend(library: ctypes.CDLL, x: Problem) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, which nobody judges."""
    x.hold = lambda *_: 0.0  # type: ignore[method-assign]
    run_on_host(library, x, times=1)
    return rows_of(x)


def slots(x: Problem, b: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block and slot of keys of a sequence."""
    size = x.case.block_size
    return x.tables[b, keys // size], keys % size


@pytest.mark.parametrize("dim", [64, 128])
def test_equal_scores_give_the_mean(dim, hopper, rng):
    """All probabilities are one number, exact in e4m3: no key is lost or twice."""
    case = dataclasses.replace(ONE, head_dim=dim, value_dim=dim, scales="none")
    x = Problem(case)
    x.q[:] = 0
    for b, values in enumerate(x.values):
        whole = rng.integers(-8, 9, values.shape)
        block, slot = slots(x, b, np.arange(len(whole)))
        x.pages[block, 0, 1, slot] = whole.astype(NARROW)
        x.values[b] = whole.astype(np.float32)
    out, lse = attend(hopper, x)
    truth = x.truth()
    mean, lse_is = truth["out"][0][0], truth["lse"][0][0, ..., 0]
    assert (np.abs(out - mean) <= 2.0**-8 * np.abs(mean) + 1e-5).all()
    assert np.abs(lse - lse_is).max() < 1e-4


@pytest.mark.parametrize("dim", [64, 128])
def test_each_query_finds_its_key(dim, hopper, rng):
    """One key's probability is 1, the others' vanish: no key is another's."""
    case = dataclasses.replace(
        ONE, head_dim=dim, value_dim=dim, window=(-1, -1), scales="none", scale=1.0
    )
    x = Problem(case)
    wanted = np.zeros((x.rows, case.heads, dim))
    for b, keys in enumerate(x.keys):
        call, first, end = x.sequence_rows(b)
        signs = rng.choice([-1.0, 1.0], (len(keys), dim))
        mine = rng.integers(0, len(keys), (end - first, case.heads))
        v = rng.normal(size=(len(keys), 2, dim)).astype(NARROW)
        block, slot = slots(x, b, np.arange(len(keys)))
        x.pages[block, 0, 0, slot] = signs[:, None].astype(NARROW)
        x.pages[block, 0, 1, slot] = v
        x.q[call, first:end] = (signs[mine] * 4).astype(x.dtype)
        wanted[first:end] = v.astype(np.float64)[mine, np.arange(case.heads) // 4]
    out, _ = attend(hopper, x)
    assert (out == wanted).all()


def hold_nan(out: np.ndarray, lse: np.ndarray, hit: np.ndarray) -> None:
    """All of these rows are NaN, and no other one has any."""
    assert (np.isnan(out).all(-1) == hit).all()
    assert (np.isnan(out).any(-1) == hit).all()
    assert (np.isnan(lse) == hit).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_in_a_query_makes_nan_of_its_row(number, hopper):
    x = Problem(ONE)
    x.q[0, 7, 3, 5] = number
    out, lse = attend(hopper, x)
    hit = np.zeros((x.rows, ONE.heads), bool)
    hit[7, 3] = True
    hold_nan(out, lse, hit)


@pytest.mark.parametrize("key", [7, 140])
def test_nan_in_a_key_stays(key, hopper):
    x = Problem(dataclasses.replace(ONE, sequences=((400, 400),)))
    block, slot = slots(x, 0, np.array([key]))
    x.pages[block, 0, 0, slot, 1, 5] = np.nan
    out, lse = attend(hopper, x)
    hit = np.zeros((400, 8), bool)
    hit[key:, 4:] = True
    hold_nan(out, lse, hit)


@pytest.mark.parametrize("key", [7, 140])
def test_nan_in_a_value_stays_in_its_column(key, hopper):
    x = Problem(dataclasses.replace(ONE, sequences=((400, 400),)))
    block, slot = slots(x, 0, np.array([key]))
    x.pages[block, 0, 1, slot, 1, 5] = np.nan
    out, _ = attend(hopper, x)
    assert np.isnan(out[key:, 4:, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=-1)).all()
    assert np.isfinite(out[:, :4]).all()
    assert np.isfinite(out[: key // 128 * 128]).all()  # earlier tiles' rows


@pytest.mark.parametrize("scale", [-1.0, np.nan])
@pytest.mark.parametrize("name", "kv")
def test_bad_scales(name, scale, hopper):
    """NaN of what they reach; v_scale is any number."""
    x = Problem(dataclasses.replace(ONE, scales="heads"))
    good, lse_good = attend(hopper, Problem(x.case))
    of = x.scales["kv".index(name)]
    factor = scale / of[..., 1]
    of[..., 1] = scale
    out, lse = attend(hopper, x)
    assert (out[:, :4] == good[:, :4]).all()
    if name == "k":
        assert np.isnan(out[:, 4:]).all()
        assert np.isnan(lse[:, 4:]).all()
    elif np.isnan(scale):
        assert np.isnan(out[:, 4:]).all()
    else:
        wanted = good[:, 4:] * factor
        assert (np.abs(out[:, 4:] - wanted) <= 2.0**-7 * np.abs(wanted)).all()
        assert (lse == lse_good).all()


def test_scales_of_zero(hopper):
    """Keys that stand for zeros: all scores are equal."""
    x = Problem(dataclasses.replace(ONE, scales="heads", window=(-1, -1)))
    x.scales[0][:] = 0
    for keys in x.keys:
        keys[:] = 0
    run_on_host(hopper, x, times=1)


def test_queries_share_a_scale_with_those_of_their_tile_alone(hopper):
    """A large query changes nothing of other tiles, other heads and sequences."""
    x, large = Problem(ONE), Problem(ONE)
    large.q[0, 40, 1] *= 100
    out, _ = attend(hopper, x)
    other, _ = attend(hopper, large)
    same = (out == other).all(-1)
    tile = slice(32, 64)  # of 32 queries of the four heads that share a KV head
    assert not same[tile, :4].any(-1).all()
    same[tile, :4] = True
    assert same.all()


def test_who_has_few_queries(hopper):
    """The rule is that of 16 bits: 64 packed rows, or 16 queries of larger groups."""
    for queries, long in ((16, False), (17, True)):
        x = Problem(dataclasses.replace(ONE, sequences=((queries, 90), (2, 30))))
        assert x.rows_of_long(few_rows(x)).any() == long
        hopper.emulator_hopper_ctas()
        run_on_host(hopper, x, times=1)
        assert (hopper.emulator_hopper_ctas() > 0) == long or not long


def test_without_hopper_it_is_an_error(attention_library):
    loaded, memory = ctypes.CDLL(str(attention_library)), HostMemory()
    a = Problem(ONE).describe(memory.give)
    a.o = a.lse = a.workspace = memory.empty(1 << 16).ctypes.data
    launch = loaded.kvblock_paged_attention_forward
    launch.restype = ctypes.c_char_p
    assert b"narrow_queries needs a Hopper GPU" in launch(ctypes.byref(a), None)


def test_the_workspace_is_for_what_may_be_long(attention_library):
    sized = ctypes.CDLL(str(attention_library)).kvblock_paged_attention_workspace
    sized.restype = ctypes.c_int64

    def room(case: Case) -> int:
        return sized(ctypes.byref(Problem(case).describe(HostMemory().give)))

    # 5 tables of 608 keys; 64 rows, of two heads, of a tile beyond the 245 of q
    values, queries = 5 * 640 * 2 * 64, (245 + 5 * 64) * 4 * 64
    scales = 245 * 2 * 4
    for case, more in (
        (Case(sequences=MIXED), values + queries + scales),
        (Case(sequences=((1, 90), (1, 40))), 0),
    ):
        case = dataclasses.replace(case, cache="e4m3")
        grown = room(dataclasses.replace(case, narrow=True)) - room(case)
        assert 0 <= grown - more < 256 or grown == more == 0
