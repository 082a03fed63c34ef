"""float32 attention on a GPU, in both precisions: kernels beside plain JAX in blocks.

"default" multiplies in TF32 on both sides, "highest" near float32: the kernels by three
products of TF32, XLA in float32. TFLOP/s as papers count, so that three products are
one. Both take turns on a hot chip, as in bench_attention.py, in an order drawn anew
each time; the backward pass is forward and backward together minus forward, and
"forward and backward" is both.

Errors are those of a small call, beside float64: the norm of what a result is off by,
in parts of the result's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from bench_attention import hot_times, jax_calls
from support import attention_truth, common
from support.common import OURS, Results, cases

from jax_kvblock import flash_attention

XLA = "xla"
IMPLEMENTATIONS = {OURS: "cuda", XLA: "xla"}
CASES = tuple(
    cases.AttentionCase(
        1, 16, 16, 8192, dim, causal=causal, dtype="float32", option=precision
    )
    for dim in (64, 128)
    for causal in (False, True)
    for precision in ("default", "highest")
)


def bench(options: argparse.Namespace, results: Results) -> None:
    if not common.on_gpu():
        raise RuntimeError("jax sees no GPU, and the kernels are for one")
    for case in common.wanted(options, CASES):
        small = dataclasses.replace(case, length=256 if options.quick else 1024)
        small = dataclasses.replace(small, num_heads=2, num_kv_heads=2)
        _errors(small, results)
        _compare(small if options.quick else case, results, options.quick)
        gc.collect()
        results.save()


def _attend(case: Any, implementation: str) -> Callable[..., Any]:
    return lambda q, k, v: flash_attention(
        q,
        k,
        v,
        causal=case.causal,
        precision=case.option,
        implementation=implementation,
    )


def _inputs(case: Any) -> list[jax.Array]:
    """q, k, v and an output gradient."""
    shape = (case.batch, case.length, case.num_heads, case.head_dim)
    return list(jax.random.normal(jax.random.key(0), (4, *shape), case.dtype))


def _both(case: Any, implementation: str, inputs: list[jax.Array]) -> list[np.ndarray]:
    """out, dq, dk, dv."""

    @jax.jit
    def call(q: Any, k: Any, v: Any, d_o: Any) -> Any:
        out, vjp = jax.vjp(_attend(case, implementation), q, k, v)
        return out, *vjp(d_o)

    return [np.asarray(x, np.float64) for x in call(*inputs)]


def _errors(case: Any, results: Results) -> None:
    inputs = _inputs(case)
    known = attention_truth.truth(case, inputs)
    for who, implementation in IMPLEMENTATIONS.items():
        found = _both(case, implementation, inputs)
        attention_truth.check(found, known)
        for name, got in zip(attention_truth.NAMES, found, strict=True):
            off = [
                np.linalg.norm(got[b, :, h].ravel() - want[name].ravel())
                / np.linalg.norm(want[name])
                for (b, h), want in known.items()
            ]
            results.add(f"{case.name} / {name}", who, "error", max(off), "")


def _compare(case: Any, results: Results, quick: bool) -> None:
    inputs = _inputs(case)
    running = {}
    for who, implementation in IMPLEMENTATIONS.items():
        try:
            running[who] = jax_calls(_attend(case, implementation), inputs)
        except Exception as error:
            results.fail(case.name, who, error)
    rates: dict[str, dict[str, float]] = {}
    for who, seconds in hot_times(running, quick).items():
        forward, both = seconds["forward"], seconds["both"]
        for work, flops, value in (
            ("forward", case.flops, forward),
            ("backward", 2.5 * case.flops, both - forward),
            ("forward and backward", 3.5 * case.flops, both),
        ):
            name = f"{case.name} / {work}"
            results.add(name, who, "time", value * 1e3, "ms", show=False)
            results.add(name, who, "rate", flops / value / 1e12, "TFLOP/s")
            rates.setdefault(name, {})[who] = flops / value
    for name, rate in rates.items():
        if len(rate) == len(IMPLEMENTATIONS):
            results.add(name, OURS, "over xla", rate[OURS] / rate[XLA], "")


if __name__ == "__main__":
    common.main("attention-float32", bench, __doc__)
