"""What the objects cost the host, in µs: exports, indexing, iterating, allocating.

Every number is the median of many single calls, the clock read around each.

Does iterating beat indexing, as engines' documentation says? A `Block` makes its
`Layer` objects when asked, either way, so we time both whole loops and report µs a
layer; a caller that needs layers twice keeps `block.to_list()`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results, cases

from jax_kvblock import BlockManager

CASE = cases.LLAMA_8B_16


def median_us(call: Callable[[], Any], count: int) -> float:
    """Median µs of `call`; what it returns is dropped outside the clock."""
    times = []
    for _ in range(count + count // 10):
        start = time.perf_counter_ns()
        result = call()
        times.append(time.perf_counter_ns() - start)
        del result
    return statistics.median(times[count // 10 :]) / 1e3


def bench(options: argparse.Namespace, results: Results) -> None:
    count = 50 if options.quick else 3000
    manager = BlockManager(
        CASE.num_layers, CASE.block_size, num_kv_heads=CASE.num_kv_heads,
        head_dim=CASE.head_dim, dtype=jnp.bfloat16, num_blocks=64,
    )  # fmt: skip

    def add(work: str, name: str, call: Callable[[], Any], per: int = 1) -> None:
        try:
            microseconds = median_us(call, count) / per
        except Exception as error:
            results.fail(f"{CASE.name} / {work}", name, error)
            return
        case = f"{CASE.name} / {work}"
        results.add(case, name, "host time", microseconds, "us")

    with manager.allocate_blocks(2) as blocks:
        jax.block_until_ready(manager.pool)
        block, layer = blocks[0], blocks[0][0]
        _exports(add, block, layer)
        layers = len(block)
        add("a layer by iterating", OURS, lambda: _iterate(block), layers)
        add("a layer by indexing", OURS, lambda: _index(block), layers)
        add("a layer by to_list", OURS, block.to_list, layers)
        add("layer.shape", OURS, lambda: layer.shape)
        add("blocks.ids", OURS, lambda: blocks.ids)

    def allocate_and_free() -> None:
        manager.free(manager.allocate_blocks(8))

    def allocate_and_free_one() -> None:
        manager.free(manager.allocate_blocks(1))

    add("allocate and free, each of 8", OURS, allocate_and_free, 8)
    add("allocate and free, one", OURS, allocate_and_free_one)
    if not common.on_gpu():
        # NumPy takes no bfloat16 through DLPack, so this one is float32.
        plain = _layer_of(jnp.float32)
        add("layer to numpy, no copy", OURS, lambda: np.from_dlpack(plain))
        add("layer to numpy, copied", OURS, lambda: np.asarray(plain))
    _first_calls(results)


def _exports(add: Callable[..., None], block: Any, layer: Any) -> None:
    try:
        import torch
    except ImportError:
        print("torch is not installed: its rows are left out")
    else:
        torch.from_dlpack(layer)
        pool = block.manager.pool.arrays[0]
        add("layer to torch", OURS, lambda: torch.from_dlpack(layer))
        add("block to torch", OURS, lambda: torch.from_dlpack(block))
        # What DLPack costs without us: the whole pool, by jax itself.
        add("layer to torch", "jax, the whole pool", lambda: torch.from_dlpack(pool))
    add("layer to a capsule", OURS, lambda: layer.__dlpack__(max_version=(1, 0)))
    if common.on_gpu():
        try:
            import cupy
        except ImportError:
            return
        half = _layer_of(jnp.float16)
        add("layer to cupy", OURS, lambda: cupy.from_dlpack(half))


def _layer_of(dtype: Any) -> Any:
    """The first layer of a small manager's block; it keeps both alive."""
    manager = BlockManager(
        4, CASE.block_size, num_kv_heads=CASE.num_kv_heads, head_dim=CASE.head_dim,
        dtype=dtype, num_blocks=2,
    )  # fmt: skip
    return manager.allocate_blocks(1)[0][0]


def _iterate(block: Any) -> None:
    for _ in block:
        pass


def _index(block: Any) -> None:
    for i in range(len(block)):
        block[i]


# ---- the first call of a process -----------------------------------------------------


def _first_calls(results: Results) -> None:
    """In a process of its own, since here everything is loaded already."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, str(common.ROOT / "benchmarks/support/first_calls.py")],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        results.fail("first calls", OURS, done.stderr[-300:])
        return
    for work, seconds in json.loads(done.stdout.splitlines()[-1]).items():
        case = f"{CASE.name} / {work}"
        results.add(case, OURS, "host time", seconds * 1e6, "us")


if __name__ == "__main__":
    common.main("objects", bench, __doc__)
