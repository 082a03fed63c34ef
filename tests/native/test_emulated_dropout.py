"""Dropout in Hopper's forward kernel on a CPU, thread by thread, against float64.

As test_emulated.py, which has the generic kernels with it: the very sources that a GPU
runs, with the cases and the judge of the sweep there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import attention_sweep
import pytest
from attention_problems import Case, Gpu
from attention_sweep import Launcher, judged
from sweep_cases import CAUSAL

pytestmark = [pytest.mark.wide, pytest.mark.torch]


@pytest.fixture(params=[3, 40])
def launcher(
    request: pytest.FixtureRequest,
    dropout_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Launcher]:
    """For a GPU of so many multiprocessors: CTAs have several tiles, or one."""
    monkeypatch.setattr(attention_sweep, "TIMES", 1)
    made = Launcher(str(dropout_library), "sm90", Gpu("cpu"))
    made.library.emulator_set_multiprocessors(request.param)
    yield made
    made.library.emulator_set_multiprocessors(3)


ONE = Case("bfloat16", 64, 64, 2, 4, 2, 230, 300, 1, dropout=26)
CASES = {
    "full": ONE,
    "causal": dataclasses.replace(ONE, window=CAUSAL, shift=True, dropout=64),
    "few queries": dataclasses.replace(ONE, q_len=3),
    "most of them": dataclasses.replace(ONE, dropout=127, head_dim=40, value_dim=56),
    "hardly any": dataclasses.replace(ONE, dropout=1, sinks=2),
    "lengths": dataclasses.replace(ONE, lengths=True, batch=5, dropout=65),
    "packed": dataclasses.replace(ONE, packed=True, batch=5, window=CAUSAL),
    "segments": dataclasses.replace(ONE, segments="scattered", window=(90, 20)),
    "one place for Q": dataclasses.replace(
        ONE, dtype="float16", head_dim=256, value_dim=200, heads=2, window=CAUSAL
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_mask_is_right(name, launcher):
    found = judged(launcher, CASES[name], backward=False)
    assert "out" in found and "lse" in found, found
    assert [v.wrong for v in found.values() if v.wrong] == [], name
