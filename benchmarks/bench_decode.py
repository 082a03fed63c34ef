"""Few queries over many keys on a GPU, as in a step of decoding, beside cuDNN.

TB/s of the keys and values that the lengths leave: nearly all that is read. Everybody
takes turns on a hot chip, as in bench_attention.py. cuDNN, through jax.nn, has neither
the lengths nor the offset that put a causal mask at the end of the keys: where there is
more than one query it attends to all keys, which is hardly more work.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import bench_attention
import jax
import jax.numpy as jnp
import numpy as np
from support import attention_truth, common
from support.common import OURS, Results
from support.few_queries import FewQueries

from jax_kvblock import flash_attention

DTYPE = "bfloat16"
CASES = (
    FewQueries(64, 1, 32, 8, 8192, 128),
    FewQueries(8, 1, 32, 8, 32768, 128),
    FewQueries(1, 1, 32, 8, 131072, 128),
    FewQueries(128, 1, 16, 1, 4096, 128),
    FewQueries(64, 4, 32, 8, 8192, 128, "causal"),
    FewQueries(64, 16, 32, 8, 8192, 128, "causal"),
    FewQueries(128, 4, 16, 1, 4096, 128, "causal"),
    FewQueries(128, 16, 16, 1, 4096, 128, "causal"),
    FewQueries(64, 1, 32, 8, 16384, 128, "ragged"),
    FewQueries(64, 1, 32, 8, 8192, 64),
    FewQueries(32, 1, 32, 8, 8192, 256),
    FewQueries(16, 1, 32, 8, 1024, 128),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    for case in common.wanted(options, CASES):
        if options.quick:
            case = dataclasses.replace(case, batch=2, keys=min(case.keys, 300))
        _speed(case, results, options.quick)
        gc.collect()
        results.save()


def _functions(case: FewQueries) -> dict[str, Callable[..., Any]]:
    """Of q, k, v and lengths, by name."""
    masked = case.mask != "full"

    def ours(implementation: str | None) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
            options: dict[str, Any] = {"implementation": implementation}
            if masked:
                offset = lengths - case.queries
                options |= {"causal": True, "q_offset": offset, "kv_lens": lengths}
            return flash_attention(q, k, v, **options)

        return attend

    def cudnn(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    if not common.on_gpu():
        return {OURS: ours(None)}
    return {OURS: ours(None), "cudnn in jax": cudnn}


def _speed(case: FewQueries, results: Results, quick: bool) -> None:
    shape = (case.batch, case.keys, case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, DTYPE) for i in range(2))
    shape = (case.batch, case.queries, case.num_heads, case.head_dim)
    q = jax.random.normal(jax.random.key(2), shape, DTYPE)
    lengths = jnp.asarray(case.lengths)
    masked = case.mask != "full"
    known = attention_truth.truth_of_few(case.lengths, masked, (q, k, v))
    running: dict[str, dict[str, Any]] = {}
    for name, function in _functions(case).items():
        try:
            compiled = jax.jit(function).lower(q, k, v, lengths).compile()
            out = np.asarray(compiled(q, k, v, lengths), np.float32)
            if name == OURS or not masked:
                attention_truth.check([out], known)
            running[name] = {
                "forward": lambda compiled=compiled: compiled(q, k, v, lengths),
                "wait": jax.block_until_ready,
            }
        except Exception as error:
            results.fail(case.name, name, error)
    read = 2 * int(case.lengths.sum()) * case.num_kv_heads * case.head_dim
    for name, seconds in bench_attention.hot_times(running, quick).items():
        work = f"{case.name} {DTYPE} / decode"
        rate = read * k.dtype.itemsize / seconds["forward"] / 1e12
        results.add(work, name, "bandwidth", rate, "TB/s")
        results.add(work, name, "time", seconds["forward"] * 1e3, "ms")


if __name__ == "__main__":
    common.main("decode", bench, __doc__)
