"""Paged attention in a jit on a GPU, beside what else reads pages in jax.

One query a sequence, pages at random places of a pool, K + V bytes over time, TB/s.
FlashAttention-3 is flash-attn3-jax, with one split and with eight; ejkernel its Triton
kernel. Where they are not installed or fail, that is said. Everybody takes turns on a
hot chip, as in bench_attention.py, and is held to float64 first. FlashInfer has no jax:
paged_kernels.py has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import bench_attention
import jax
import jax.numpy as jnp
import numpy as np
from support import attention_truth, common
from support.common import OURS, Results
from support.few_queries import FewQueries

from jax_kvblock import paged_attention

DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Case:
    queries: FewQueries
    page: int

    @property
    def name(self) -> str:
        q = self.queries
        heads = f"H{q.num_heads}/{q.num_kv_heads}"
        return f"B{q.batch} {heads} S{q.keys} page {self.page}"


CASES = (
    Case(FewQueries(64, 1, 32, 8, 8192, 128), 16),
    Case(FewQueries(64, 1, 32, 8, 8192, 128), 64),
    Case(FewQueries(8, 1, 32, 8, 32768, 128), 64),
    Case(FewQueries(1, 1, 32, 8, 131072, 128), 64),
    Case(FewQueries(128, 1, 16, 1, 4096, 128), 64),
    Case(FewQueries(256, 1, 32, 8, 512, 128), 16),
    Case(FewQueries(16, 1, 32, 8, 1024, 128), 16),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    for case in common.wanted(options, CASES):
        if options.quick:
            few = dataclasses.replace(case.queries, batch=2, keys=128)
            case = dataclasses.replace(case, queries=few)
        _speed(case, results, options.quick)
        gc.collect()
        results.save()


# Of q [B, N, D], pages of K and of V [pages, page, K, D], tables and lengths.
Attend = Callable[..., Any]


def _ours(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
    return paged_attention(q[:, None], (k, v), None, tables, lengths)


def _flash_attention_3() -> Iterator[tuple[str, Attend]]:
    from flash_attn3_jax.kvcache import flash_mha_with_kvcache

    def attend(q: Any, k: Any, v: Any, tables: Any, lengths: Any, splits: int) -> Any:
        return flash_mha_with_kvcache(
            *(q[:, None], k, v),
            cache_seqlens=lengths,
            page_table=tables,
            num_splits=splits,
        )

    for splits in (1, 8):
        name = f"flash-attn3-jax, {splits} splits"
        yield name, functools.partial(attend, splits=splits)


def _ejkernel() -> Iterator[tuple[str, Attend]]:
    from ejkernel.kernels._triton.unified_attention import unified_attention

    def attend(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
        start = jnp.arange(len(q) + 1, dtype=jnp.int32)
        return unified_attention(q, k, v, lengths, tables, start)

    yield "ejkernel", attend


def _functions(case: Case, results: Results) -> dict[str, Attend]:
    functions = {OURS: _ours}
    if common.on_gpu():
        for name, peer in (
            ("flash-attn3-jax", _flash_attention_3),
            ("ejkernel", _ejkernel),
        ):
            try:
                functions.update(peer())
            except Exception as error:
                results.fail(case.name, name, error)
    return functions


def _speed(case: Case, results: Results, quick: bool) -> None:
    few = case.queries
    pages = few.batch * few.keys // case.page
    key = jax.random.key(0)
    shape = (pages, case.page, few.num_kv_heads, few.head_dim)
    k, v = (jax.random.normal(jax.random.fold_in(key, i), shape, DTYPE) for i in (0, 1))
    q = jax.random.normal(
        jax.random.fold_in(key, 2), (few.batch, few.num_heads, few.head_dim), DTYPE
    )
    tables = np.random.default_rng(0).permutation(pages).astype(np.int32)
    tables = tables.reshape(few.batch, -1)
    lengths = jnp.asarray(few.lengths)
    known = _truth(few, q, k, v, tables)
    operands = (q, k, v, jnp.asarray(tables), lengths)
    running: dict[str, dict[str, Any]] = {}
    for name, function in _functions(case, results).items():
        try:
            compiled = jax.jit(function).lower(*operands).compile()
            out = np.asarray(compiled(*operands), np.float32)
            shape = (few.batch, 1, few.num_heads, few.head_dim)
            attention_truth.check([out.reshape(shape)], known)
            running[name] = {
                "forward": functools.partial(compiled, *operands),
                "wait": jax.block_until_ready,
            }
        except Exception as error:
            results.fail(case.name, name, error)
    read = k.nbytes + v.nbytes
    for name, seconds in bench_attention.hot_times(running, quick).items():
        rate = read / seconds["forward"] / 1e12
        results.add(f"{case.name} / paged", name, "bandwidth", rate, "TB/s")
        results.add(
            f"{case.name} / paged", name, "time", seconds["forward"] * 1e6, "us"
        )


def _truth(few: FewQueries, q: Any, k: Any, v: Any, tables: np.ndarray) -> Any:
    """Of the first and the last sequence, whose pages are put in order."""
    ends = dataclasses.replace(few, batch=2)
    members = jnp.asarray([0, few.batch - 1])
    shape = (2, few.keys, few.num_kv_heads, few.head_dim)
    keys, values = (x[tables[members]].reshape(shape) for x in (k, v))
    of_two = attention_truth.truth_of_few(
        ends.lengths, False, (q[members][:, None], keys, values)
    )
    return {(b * (few.batch - 1), h): found for (b, h), found in of_two.items()}


if __name__ == "__main__":
    common.main("paged", bench, __doc__)
