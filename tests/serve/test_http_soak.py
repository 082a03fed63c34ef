"""A short soak holds; one of an engine that loses things says which."""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
from http_process import SEED
from serve.dense import logits_at
from serve.models import random_model
from soak import soak
from soak_client import LENGTHS, QUESTIONS, SYSTEM, question

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and files by /proc"),
]


def test_nothing_is_lost_in_a_short_soak() -> None:
    report = soak(4, processes=2, threads=2, kill_every=1.5)
    assert not report.wrong, str(report)
    assert report.numbers["client processes killed"] >= 1
    assert report.numbers["requests cancelled"] >= 1
    assert report.numbers["requests taken"] > 3


def test_a_disk_that_is_full_slow_and_fails_costs_time_alone() -> None:
    pytest.importorskip("lmdb")
    report = soak(6, engine="disk", processes=1, threads=3, kill_every=3, patience=90)
    assert not report.wrong, str(report)
    assert report.numbers["requests taken"] > 3
    # It went on until the disk had done all three, no longer.
    assert report.numbers["time, s"] < 90
    for blocks in ("to the store", "from the store", "that the store failed with"):
        assert report.numbers[f"blocks {blocks}"] > 0
    assert report.numbers["requests that made way"] > 0


@pytest.mark.slow
def test_no_answer_hangs_on_a_rounding() -> None:
    """Tokens of the soak's model are likelier than the next ones by more than that."""
    model = random_model(SEED)
    prompts = [model.tokenizer.encode(SYSTEM + question(i)) for i in range(QUESTIONS)]
    rows, length = np.arange(QUESTIONS), 256
    tokens = np.zeros((QUESTIONS, length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    ends = np.array([len(prompt) for prompt in prompts])
    of = functools.partial(logits_at, model.config, model.params)
    logits = jax.jit(jax.vmap(lambda row, end: of(row, end[None])[0]))
    least = np.inf
    for _ in range(max(LENGTHS)):
        behind = np.asarray(logits(tokens, ends - 1))
        second, first = np.sort(behind, -1)[:, -2:].T
        least = min(least, (first - second).min())
        tokens[rows, ends] = behind.argmax(-1)
        ends += 1
    assert least > 1e-4, least  # sums of float32 differ by 1e-6


def test_what_is_lost_is_noticed() -> None:
    wrong = soak(3, engine="broken", processes=1, threads=4, patience=0.5).wrong
    for said in (
        *("blocks are held by nobody", "memory grew", "gave 'You answer"),
        "that the disk took, gave, and failed with: {'blocks_in': 0, 'blocks_out': 0",
    ):
        assert any(said in text for text in wrong), wrong
