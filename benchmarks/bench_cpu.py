"""The same work on the CPU, beside XLA:CPU. The bars are for two cores.

On a larger machine: `taskset -c 0,1 python benchmarks/bench_cpu.py`. GB/s are bytes
read plus bytes written, of blocks that fit no cache.
"""

from __future__ import annotations

import argparse
import gc
import time

import ceilings
from support import common, work
from support.blocks import Data
from support.common import MIB, Results, cases
from support.timing import measure

SHAPES = (
    cases.LLAMA_8B_16,
    cases.LLAMA_8B_64,
    cases.LLAMA_70B_TP8_16,
    cases.HEAD_DIM_64,
    cases.SHORT_RUNS,
)


def bench(options: argparse.Namespace, results: Results) -> None:
    if common.on_gpu():
        raise RuntimeError("jax sees a GPU; run this one with JAX_PLATFORMS=cpu")
    start = time.perf_counter()
    ceilings.add_device_copy(results, options.quick, "before")
    for case in common.wanted(options, SHAPES):
        # 64 MiB of blocks, in a pool of 80: 128 MiB read and written.
        data = Data(case, (1 if options.quick else 64) * MIB)
        groups = work.conversions(data) + work.operational(data)
        groups += work.gathers(data) + work.scatters(data)
        measure(groups, results, options)
        del data, groups
        gc.collect()
        results.save()
        print(f"-- {time.perf_counter() - start:.0f} s", flush=True)
    ceilings.add_device_copy(results, options.quick, "after")


if __name__ == "__main__":
    common.main("cpu", bench, __doc__)
