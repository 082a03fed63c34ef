"""The float32 attention kernels on a CPU, thread by thread, against float64.

As test_emulated.py, in both precisions. The emulator's tensor cores see TF32 and round
towards zero, as a GPU's do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_sweep
import numpy as np
import pytest
from attention_problems import Case, Gpu, Problem, truth
from attention_sweep import Launcher, judged
from sweep_cases import CAUSAL, OPTIONS

pytestmark = [pytest.mark.wide, pytest.mark.torch]

PRECISIONS = ("highest", "default")
BOTH = pytest.mark.parametrize("precision", PRECISIONS)
TWO_STAGES, ONE_STAGE = 227 << 10, 163 << 10  # bytes that a CTA can have


@pytest.fixture
def launcher(
    float32_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launcher]:
    monkeypatch.setattr(attention_sweep, "TIMES", 1)
    yield Launcher(str(float32_library), "generic", Gpu("cpu"))


def hold(launcher: Launcher, case: Case, backward: bool = True) -> None:
    found = judged(launcher, case, backward)
    assert "out, workspace" not in found  # there are no kernels for few queries
    assert [v.wrong for v in found.values() if v.wrong] == [], str(case)


DIMS = ((64, 64), (40, 56), (56, 24), (128, 128), (104, 72), (24, 96))


@pytest.mark.wide
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_right(name, launcher):
    """Each in one precision; the next test has both."""
    number = list(OPTIONS).index(name)
    heads, kv_heads = ((2, 1), (2, 2), (3, 1))[number % 3]
    sizes: dict[str, Any] = {"batch": 2, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"q_len": 70 + number, "kv_len": 140 - number} | OPTIONS[name]
    if "bias" in sizes:
        _, rows, own = sizes["bias"]
        sizes["bias"] = ("float32", rows or 2, own)
    if "tiles" in sizes:
        rows, own = sizes["tiles"]
        sizes["tiles"] = (rows or 2, own)
    dims, precision = DIMS[number % len(DIMS)], PRECISIONS[number // 2 % 2]
    case = Case("float32", *dims, **sizes, precision=precision, seed=number, name=name)
    hold(launcher, case)


ONE = Case("float32", 64, 64, 1, 2, 1, 150, 200, 1, window=CAUSAL)
LONGER = {
    "d64": ONE,
    "d128": dataclasses.replace(ONE, head_dim=128, value_dim=128),
    "d104, lengths": Case("float32", 104, 72, 2, 2, 1, 90, 150, 2, lengths=True),
    "d128, bias, partial tiles": dataclasses.replace(
        ONE, head_dim=128, value_dim=120, window=(-1, -1), tiles=(1, True), masks=4,
        bias=("float32", 1, False), seed=5,
    ),
    "packed": Case("float32", 64, 64, 4, 2, 2, 200, 210, 4, packed=True),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", LONGER)
def test_several_tiles_are_right(name, precision, launcher):
    hold(launcher, dataclasses.replace(LONGER[name], precision=precision))


@BOTH
@pytest.mark.parametrize("bytes_of_cta", [TWO_STAGES, ONE_STAGE])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_stage_is_as_good_as_two(dim, bytes_of_cta, precision, launcher):
    launcher.library.emulator_set_cta_bytes(bytes_of_cta)
    case = Case("float32", dim, dim, 1, 2, 1, 200, 70, 3, precision=precision)
    hold(launcher, case)
    launcher.library.emulator_set_cta_bytes(TWO_STAGES)


@BOTH
@pytest.mark.parametrize("dims", [(256, 256), (200, 136), (64, 256)])
def test_wide_heads_have_a_forward_pass(dims, precision, launcher):
    case = Case("float32", *dims, 1, 2, 1, 70, 90, 3, window=(30, 10))
    for options in ({}, {"tiles": (1, True), "masks": 3, "window": (-1, -1)}):
        options |= {"precision": precision}
        hold(launcher, dataclasses.replace(case, **options), backward=False)


@BOTH
def test_few_queries_are_as_any(precision, launcher):
    case = Case("float32", 64, 64, 3, 4, 2, 1, 300, 0, lengths=True)
    hold(launcher, dataclasses.replace(case, precision=precision))


def off(launcher: Launcher, precision: str, case: Case) -> dict[str, float]:
    """The error of each result, as a part of its size."""
    x = Problem(dataclasses.replace(case, precision=precision), launcher.place)
    known = truth(x)
    launcher.arena.clear()
    a = launcher.describe(x)
    got = launcher.forward(x, a) | launcher.backward(x, a, known)
    names = {name: name.split(",")[0] for name in got}
    norm = lambda y: float((y.double() ** 2).sum() ** 0.5)  # noqa: E731
    return {
        name: norm(got[name].double() - known.want[of]) / norm(known.want[of])
        for name, of in names.items()
    }


@pytest.mark.parametrize("dim", [64, 128])
def test_the_highest_precision_is_better(dim, launcher):
    """By far more than a product without its small terms could be.

    Rounding one operand alone, as one that is not split, is off by 2e-4 of a result.
    """
    case = Case("float32", dim, dim, 1, 2, 1, 120, 150, 3)
    exact, rounded = (off(launcher, p, case) for p in PRECISIONS)
    for name in exact:
        if name == "lse":  # a mean of many
            continue
        assert 1e-4 < rounded[name] < 7e-4, name  # to nearest
        assert exact[name] < 1.5e-6, name
        assert exact[name] < rounded[name] / 200, name


def test_sums_of_many_keys_keep_their_digits(launcher):
    """The tensor cores round towards zero, so errors of alike terms add up."""
    case = Case("float32", 64, 64, 1, 1, 1, 16, 9000, 3, scale=0.0)
    x = Problem(case, launcher.place)
    for values in (x.given["v"], x.exact["v"]):
        values[:] = 1.0
    known = truth(x, backward=False)
    launcher.arena.clear()
    got = launcher.forward(x, launcher.describe(x))["out"]
    np.testing.assert_allclose(got, known.want["out"], rtol=2e-6)
