"""Attention on the CPU, beside `jax.nn.dot_product_attention(implementation="xla")`.

GFLOP/s as papers count: 4 B N S² D forward, half of it when causal, 2.5 times as much
for the gradients. Both take turns, call by call; the median counts, and so does the
temporary memory that XLA reports for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from support import attention_truth, common
from support.common import OURS, Results, cases

from jax_kvblock import flash_attention

THEIRS = "jax.nn"
CASES = tuple(
    cases.AttentionCase(1, 8, 8, length, 64, causal=causal)
    for length in (1024, 2048, 4096)
    for causal in (False, True)
)
DTYPES = ("float32", "bfloat16")


def bench(options: argparse.Namespace, results: Results) -> None:
    if common.on_gpu():
        raise RuntimeError("jax sees a GPU; run this one with JAX_PLATFORMS=cpu")
    for case in common.wanted(options, CASES):
        if options.quick:
            case = dataclasses.replace(case, length=256)
        for dtype in DTYPES:
            _compare(
                case,
                dtype,
                results,
                2 if options.quick else 9 if case.length < 4096 else 5,
            )
        results.save()


def _compare(case: Any, dtype: str, results: Results, rounds: int) -> None:
    shape = (case.batch, case.length, case.num_heads, case.head_dim)
    q, k, v, d_o = jax.random.normal(jax.random.key(0), (4, *shape), dtype)
    known = attention_truth.truth(case, (q, k, v, d_o))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, causal=case.causal)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation="xla"
        )

    for work, flops in (
        ("forward", case.flops),
        ("forward and backward", 3.5 * case.flops),
    ):
        name = f"{case.name} {dtype} / {work}"
        compiled = {}
        for who, attend in ((OURS, ours), (THEIRS, theirs)):
            call = attend if work == "forward" else _both(attend, d_o)
            compiled[who] = jax.jit(call).lower(q, k, v).compile()
        for run in compiled.values():
            found = jax.tree.leaves(run(q, k, v))
            attention_truth.check([np.asarray(x, np.float32) for x in found], known)
        times: dict[str, list[float]] = {who: [] for who in compiled}
        for _ in range(rounds):
            for who, run in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(run(q, k, v))
                times[who].append(time.perf_counter() - start)
        temporaries = {
            who: run.memory_analysis().temp_size_in_bytes
            for who, run in compiled.items()
        }
        for who in compiled:
            seconds = statistics.median(times[who])
            results.add(name, who, "rate", flops / seconds / 1e9, "GFLOP/s")
            results.add(name, who, "time", seconds * 1e3, "ms", show=False)
            results.add(name, who, "temporaries", temporaries[who], "B", show=False)
        over = temporaries[OURS] / temporaries[THEIRS]
        results.add(name, OURS, "temporaries over jax.nn", over, "")


def _both(attend: Any, d_o: jax.Array) -> Any:
    """The output, and the gradients of q, k and v."""

    def call(*args: Any) -> Any:
        out, vjp = jax.vjp(attend, *args)
        return out, vjp(d_o)

    return call


if __name__ == "__main__":
    common.main("attention-cpu", bench, __doc__)
