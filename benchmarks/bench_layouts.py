"""Conversions, gathers and scatters in device memory, beside XLA and the copy rate.

Blocks of real models (tests/support/cases.py), some GB at a time, so that caches do not
count. TB/s are bytes read plus bytes written. "xla" is what jit makes of plain
jax.numpy for the same work; for pools both as one array and as one array per layer.
"""

from __future__ import annotations

import argparse
import gc
import time

import ceilings
import lists
from support import common, work
from support.blocks import Data
from support.common import GIB, MIB, RUNS_OF_8, Results, cases
from support.timing import measure

SHAPES = (*cases.SPEED, cases.SHORT_RUNS, RUNS_OF_8)


def bench(options: argparse.Namespace, results: Results) -> None:
    start = time.perf_counter()
    quick = options.quick or not common.on_gpu()
    ceilings.add_device_copy(results, options.quick, "before")
    for case in common.wanted(options, SHAPES):
        # 2 GiB read and as much written; L2 caches hold some 50 MB.
        data = Data(case, 2 * MIB if quick else 2 * GIB)
        groups = work.conversions(data)
        first = case is cases.LLAMA_8B_16
        names = ("kernel", "batch", "async") if first and common.on_gpu() else ()
        groups += work.operational(data, names or ("kernel",))
        for group in groups if common.on_gpu() else ():
            group.jobs.append(work.plain_copy(data))
        measure(groups, results, options)
        groups = work.gathers(data) + work.scatters(data)
        for group in groups if common.on_gpu() else ():
            group.jobs.append(work.plain_copy(data))
        measure(groups, results, options)
        if first:
            measure(work.scans(data), results, options)
        del data, groups
        gc.collect()
        results.save()
        print(f"-- {time.perf_counter() - start:.0f} s", flush=True)
    if common.wanted(options, [cases.LLAMA_8B_64]):
        lists.bench(options, results)
    ceilings.add_device_copy(results, options.quick, "after")


if __name__ == "__main__":
    common.main("layouts", bench, __doc__)
