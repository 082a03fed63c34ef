"""Paged attention on the CPU, beside a gather of all pages and jax.nn's attention.

Both read lengths that lie on the device. GB/s count the keys and values that the
lengths leave. Both take turns, call by call; the median counts, and so does the
temporary memory that XLA reports for each.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention_cpu import DTYPES, take_turns
from support import attention_truth, common
from support.common import OURS, Results
from support.few_queries import FewQueries

from jax_kvblock import paged_attention

THEIRS = "gather and jax.nn"
BLOCK = 16
CASES = (
    FewQueries(16, 1, 32, 8, 2048, 128, "ragged"),
    FewQueries(16, 1, 32, 8, 2048, 128, "causal"),
    FewQueries(64, 1, 16, 2, 512, 64, "ragged"),
    FewQueries(4, 128, 32, 8, 1024, 128, "ragged"),
    FewQueries(1, 512, 32, 8, 4096, 128, "causal"),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    if common.on_gpu():
        raise RuntimeError("jax sees a GPU; run this one with JAX_PLATFORMS=cpu")
    for case in common.wanted(options, CASES):
        if options.quick:
            queries = min(case.queries, 4)
            case = dataclasses.replace(case, keys=256, batch=2, queries=queries)
        for dtype in DTYPES:
            _compare(case, dtype, results, 2 if options.quick else 7)
        results.save()


def _compare(case: FewQueries, dtype: str, results: Results, rounds: int) -> None:
    width = case.keys // BLOCK
    blocks = case.batch * width
    shape = (blocks, BLOCK, case.num_kv_heads, case.head_dim)
    pages = tuple(jax.random.normal(jax.random.key(0), (2, *shape), dtype))
    tables = jax.random.permutation(jax.random.key(1), blocks).reshape(-1, width)
    shape = (case.batch, case.queries, case.num_heads, case.head_dim)
    q = jax.random.normal(jax.random.key(2), shape, dtype)
    lengths = jnp.asarray(case.lengths)

    def gathered(pages: Any, tables: Any) -> Any:
        return [a[tables].reshape(case.batch, case.keys, *a.shape[2:]) for a in pages]

    def ours(q: Any, pages: Any, tables: Any, lengths: Any) -> Any:
        return paged_attention(q, pages, None, tables, lengths)

    def theirs(q: Any, pages: Any, tables: Any, lengths: Any) -> Any:
        k, v = gathered(pages, tables)
        last = lengths[:, None] - case.queries + jnp.arange(case.queries)
        mask = (jnp.arange(case.keys) <= last[..., None])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    args = (q, pages, tables, lengths)
    compiled = {
        who: jax.jit(attend).lower(*args).compile()
        for who, attend in ((OURS, ours), (THEIRS, theirs))
    }
    known = attention_truth.truth_of_few(
        case.lengths, True, (q, *gathered(pages, tables))
    )
    for run in compiled.values():
        attention_truth.check([np.asarray(run(*args), np.float32)], known)
    seconds = take_turns(compiled, args, rounds)
    name = f"{case.name} {dtype} / paged"
    read = 2 * int(case.lengths.sum()) * case.num_kv_heads * case.head_dim
    took = {w: r.memory_analysis().temp_size_in_bytes for w, r in compiled.items()}
    for who in compiled:
        rate = read * q.dtype.itemsize / seconds[who] / 1e9
        results.add(name, who, "rate", rate, "GB/s")
        results.add(name, who, "time", seconds[who] * 1e3, "ms", show=False)
        results.add(name, who, "temporaries", took[who], "B", show=False)
    over = took[OURS] / took[THEIRS]
    results.add(name, OURS, "temporaries over the gather's", over, "")


if __name__ == "__main__":
    common.main("paged-cpu", bench, __doc__)
