"""Benchmarks compare everybody's attention with float64, row by row."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import AttentionCase

from jax_kvblock import flash_attention

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from support import attention_truth


def test_a_few_wrong_rows_are_seen():
    case = AttentionCase(2, 4, 2, 40, 16, window=9, value_dim=8, dtype="float32")
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (4, 16), (2, 16), (2, 8), (4, 8)
    inputs = [
        jax.random.normal(key, (2, 40, *size))
        for key, size in zip(keys, sizes, strict=True)
    ]

    @jax.jit
    def both(q, k, v, d_o):
        call = lambda *x: flash_attention(*x, window=(9, 0), implementation="xla")  # noqa: E731
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_o)

    results = [np.array(x) for x in both(*inputs)]
    known = attention_truth.truth(case, inputs)
    assert attention_truth.check(results, known) < 0.01
    assert attention_truth.check([x[:, ::3] for x in results], known, 3) < 0.01
    for name, x in zip(attention_truth.NAMES, results, strict=True):
        right = x[1, -2:, -1].copy()
        x[1, -2:, -1] = 0
        with pytest.raises(AssertionError, match=rf"{name}: 2 of \d+ rows are wrong"):
            attention_truth.check(results, known)
        x[1, -2:, -1] = right
