"""Attention with dropout of a tenth of the probabilities, beside the same without.

Forward, and forward and backward together, in bfloat16. The seed is an operand, as
where a step of training has its own, so that what makes keys of it counts too. TFLOP/s
as papers count: pairs that are dropped count as well. Both take turns on a hot chip, as
in bench_attention.py, in an order drawn anew each time. "over none" is the time with
dropout in parts of that without.

Before it is timed each call is compared with plain JAX in blocks, which drops the same
pairs, on few heads and rows: the norm of what a result is off by, in parts of the
result's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention import hot_times
from support import common
from support.common import OURS, Results, cases

from jax_kvblock import flash_attention

RATE = 0.1
DROPOUT = f"{OURS}, dropout"
RATES = {OURS: 0.0, DROPOUT: RATE}
MOST_OFF = 0.02  # of results in bfloat16 beside each other
NAMES = ("out", "dq", "dk", "dv")
CASES = (
    cases.AttentionCase(2, 16, 16, 8192, 128, causal=False),
    cases.AttentionCase(2, 16, 16, 8192, 128),
    cases.AttentionCase(1, 32, 8, 16384, 128),
    cases.AttentionCase(2, 32, 32, 8192, 64),
    cases.AttentionCase(2, 8, 8, 8192, 256),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    if not common.on_gpu():
        raise RuntimeError("jax sees no GPU, and the kernels are for one")
    for case in common.wanted(options, CASES):
        small = dataclasses.replace(case, length=256 if options.quick else 1024)
        small = dataclasses.replace(small, num_heads=4, num_kv_heads=2)
        try:
            _errors(small, results)
        except Exception as error:
            results.fail(case.name, DROPOUT, error)
            continue
        _compare(small if options.quick else case, results, options.quick)
        gc.collect()
        results.save()


def _attend(
    case: Any, rate: float, implementation: str | None = None
) -> Callable[..., Any]:
    return lambda q, k, v, seed: flash_attention(
        q,
        k,
        v,
        causal=case.causal,
        dropout_rate=rate,
        dropout_seed=seed,
        implementation=implementation,
    )


def _with_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    """out, dq, dk, dv."""

    def both(q: Any, k: Any, v: Any, seed: Any, d_o: Any) -> Any:
        out, vjp = jax.vjp(lambda *x: forward(*x, seed), q, k, v)
        return out, *vjp(d_o)

    return both


def _inputs(case: Any) -> tuple[list[jax.Array], jax.Array]:
    """q, k, v and a seed; and an output gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    q, k, v, d_o = (
        jax.random.normal(key, (case.batch, case.length, n, case.head_dim), case.dtype)
        for key, n in zip(keys, heads, strict=True)
    )
    return [q, k, v, jnp.int32(1)], d_o


def _errors(case: Any, results: Results) -> None:
    inputs, d_o = _inputs(case)
    got, want = (
        jax.jit(_with_gradients(_attend(case, RATE, implementation)))(*inputs, d_o)
        for implementation in (None, "xla")
    )
    for name, a, b in zip(NAMES, got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        off = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        results.add(f"{case.name} / {name}", DROPOUT, "error", off, "")
        if not off < MOST_OFF:
            raise AssertionError(f"{name} is off by {off:.3g} of plain JAX's")


def _compare(case: Any, results: Results, quick: bool) -> None:
    inputs, d_o = _inputs(case)
    running: dict[str, dict[str, Any]] = {}
    for who, rate in RATES.items():
        attend = _attend(case, rate)
        try:
            forward = jax.jit(attend).lower(*inputs).compile()
            both = jax.jit(_with_gradients(attend)).lower(*inputs, d_o).compile()
        except Exception as error:
            results.fail(case.name, who, error)
            continue
        running[who] = {
            "forward": lambda f=forward: f(*inputs),
            "both": lambda f=both: f(*inputs, d_o),
            "wait": jax.block_until_ready,
        }
    seconds = hot_times(running, quick)
    for what, work, flops in (
        ("forward", "forward", case.flops),
        ("both", "forward and backward", 3.5 * case.flops),
    ):
        name = f"{case.name} / {work}"
        for who, found in seconds.items():
            results.add(name, who, "time", found[what] * 1e3, "ms", show=False)
            results.add(name, who, "rate", flops / found[what] / 1e12, "TFLOP/s")
        if len(seconds) == len(RATES):
            over = seconds[DROPOUT][what] / seconds[OURS][what]
            results.add(name, DROPOUT, "over none", over, "")


if __name__ == "__main__":
    common.main("attention-dropout", bench, __doc__)
