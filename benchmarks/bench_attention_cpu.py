"""Attention on the CPU, beside `jax.nn.dot_product_attention(implementation="xla")`.

GFLOP/s as papers count: 4 B N S² D forward, half of it when causal, 2.5 times as much
for the gradients. A few queries over many keys, as in a step of decoding, count bytes:
GB/s of the keys and values that the lengths leave. Both take turns, call by call; the
median counts, and so does the temporary memory that XLA reports for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import attention_truth, common
from support.common import OURS, Results, cases
from support.few_queries import FewQueries

from jax_kvblock import flash_attention

THEIRS = "jax.nn"
CASES = tuple(
    cases.AttentionCase(1, 8, 8, length, 64, causal=causal)
    for length in (1024, 2048, 4096)
    for causal in (False, True)
)
DTYPES = ("float32", "bfloat16")


FEW = tuple(
    FewQueries(batch, queries, *heads, keys, head_dim, mask)
    for heads, head_dim in (((8, 8), 64), ((32, 8), 128))
    for batch in (1, 4, 8)
    for keys in (512, 4096, 32768)
    for queries in (1, 4, 16)
    for mask in ("full", "causal", "ragged")
    # 128 MiB of keys in float32; "ragged" is of several.
    if batch * keys * heads[1] * head_dim <= 2**25 and (batch > 1 or mask != "ragged")
)


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
    for few in common.wanted(options, FEW):
        if options.quick:
            few = dataclasses.replace(few, keys=min(few.keys, 256), batch=1)
        for dtype in DTYPES:
            _compare_few(few, dtype, results, 2 if options.quick else 9)
        results.save()


def _compare_few(case: FewQueries, dtype: str, results: Results, rounds: int) -> None:
    shape = (case.batch, case.keys, case.num_kv_heads, case.head_dim)
    k, v = jax.random.normal(jax.random.key(0), (2, *shape), dtype)
    shape = (case.batch, case.queries, case.num_heads, case.head_dim)
    q = jax.random.normal(jax.random.key(1), shape, dtype)
    lengths = jnp.asarray(case.lengths)
    masked = case.mask != "full"
    back = jnp.arange(case.queries - 1, -1, -1)

    def ours(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        if not masked:
            return flash_attention(q, k, v)
        offset = lengths - case.queries
        return flash_attention(q, k, v, causal=True, q_offset=offset, kv_lens=lengths)

    def theirs(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        mask = None
        if masked:
            last = lengths[:, None] - 1 - back
            mask = (jnp.arange(case.keys) <= last[..., None])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    compiled = {
        who: jax.jit(attend).lower(q, k, v, lengths).compile()
        for who, attend in ((OURS, ours), (THEIRS, theirs))
    }
    known = attention_truth.truth_of_few(case.lengths, masked, (q, k, v))
    args = (q, k, v, lengths)
    read = 2 * int(case.lengths.sum()) * case.num_kv_heads * case.head_dim
    for run in compiled.values():
        attention_truth.check([np.asarray(run(*args), np.float32)], known)
    seconds = take_turns(compiled, args, rounds)
    name = f"{case.name} {dtype} / few queries"
    for who, run in compiled.items():
        rate = read * k.dtype.itemsize / seconds[who] / 1e9
        temporaries = run.memory_analysis().temp_size_in_bytes
        results.add(name, who, "rate", rate, "GB/s")
        results.add(name, who, "time", seconds[who] * 1e3, "ms", show=False)
        results.add(name, who, "temporaries", temporaries, "B", show=False)


def take_turns(compiled: dict[str, Any], args: Any, rounds: int) -> dict[str, float]:
    """The median of each one's seconds."""
    times: dict[str, list[float]] = {who: [] for who in compiled}
    for _ in range(rounds):
        for who, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times[who].append(time.perf_counter() - start)
    return {who: statistics.median(found) for who, found in times.items()}


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
        seconds = take_turns(compiled, (q, k, v), rounds)
        temporaries = {
            who: run.memory_analysis().temp_size_in_bytes
            for who, run in compiled.items()
        }
        for who in compiled:
            rate = flops / seconds[who] / 1e9
            results.add(name, who, "rate", rate, "GFLOP/s")
            results.add(name, who, "time", seconds[who] * 1e3, "ms", show=False)
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
