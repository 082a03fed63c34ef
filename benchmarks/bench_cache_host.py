"""What a cache of prefixes costs the host, in µs: a prompt from `open` to `free`.

Every number is the median of many single calls, the clock read around each; no program
runs, and the blocks of the pool hold next to nothing. A cold prompt finds nothing: its
keys are hashed, blocks are taken (by eviction: the pool is full of idle ones) and
published. A cached one is found but for its last block, whose copy collapses into the
one that is there. The parts of both are timed in a second pass, `page_table` with them.
The peer makes the same keys in Python, by the package blake3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results

from jax_kvblock import BlockManager, PrefixCache
from jax_kvblock.cache import append_tokens, commit_tokens, prepare_step

TOKENS, BLOCK, BLOCKS = 4096, 16, 4096
PEER = "peer blake3 in Python"
Clock = Callable[[str, Callable[[], Any]], Any]


def bench(options: argparse.Namespace, results: Results) -> None:
    tokens = 256 if options.quick else TOKENS
    count = 20 if options.quick else 2000
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50_000, (64, tokens)).astype(np.int32)
    manager = BlockManager(
        1, BLOCK, num_kv_heads=1, head_dim=1, dtype=jnp.bfloat16, num_blocks=BLOCKS
    )
    cache = PrefixCache(manager, model="a model")
    times: dict[tuple[str, str], list[float]] = {}

    def run(work: str, prompt: Any) -> None:
        def clock(part: str, call: Callable[[], Any]) -> Any:
            start = time.perf_counter_ns()
            result = call()
            took = (time.perf_counter_ns() - start) / 1e3
            times.setdefault((work, part), []).append(took)
            return result

        clock("", lambda: _whole(cache, prompt))
        if work == "cold prompt":
            prompt[0] += 1
        _parts(cache, prompt, clock)

    cached = prompts[0].copy()
    _whole(cache, cached)
    for i in range(count):
        prompt = prompts[i % len(prompts)]
        prompt[0] = 100_000 + 2 * i  # so that nobody has seen any of it
        run("cold prompt", prompt)
        run("cached prompt", cached)
        run("cached prompt, a list of ints", cached.tolist())
    for (work, part), taken in times.items():
        name = f"{OURS}, {part}" if part else OURS
        case = f"{tokens} tokens / {work}"
        median = statistics.median(taken[len(taken) // 10 :])
        results.add(case, name, "host time", median, "us")
    _decode(cache, prompts[0], count, results)
    _step(results, options.quick)
    _keys(cache, prompts[0], count, results)


def _whole(cache: PrefixCache, prompt: Any) -> None:
    table = cache.open(prompt)
    table.reserve(len(prompt))
    table.commit(len(prompt))
    table.free()


def _parts(cache: PrefixCache, prompt: Any, clock: Clock) -> None:
    table = clock("open", lambda: cache.open(prompt))
    clock("reserve", lambda: table.reserve(len(prompt)))
    clock("page_table", lambda: table.page_table(len(prompt) // BLOCK))
    clock("commit", lambda: table.commit(len(prompt)))
    clock("free", table.free)


def _decode(
    cache: PrefixCache, prompt: np.ndarray, count: int, results: Results
) -> None:
    """A sequence's part of a step of decoding."""
    times = []
    with cache.open(prompt) as table:
        for i in range(count):
            start = time.perf_counter_ns()
            table.append(i)
            length = table.num_tokens
            table.reserve(length)
            table.slots(length - 1, 1)
            table.commit(length)
            times.append((time.perf_counter_ns() - start) / 1e3)
    case = f"{len(prompt)} tokens / a step of decoding, a sequence"
    results.add(case, OURS, "host time", statistics.median(times), "us")


def _step(results: Results, quick: bool) -> None:
    """A step of decoding over 64 sequences of 1,000 tokens, by calls for all."""
    manager = BlockManager(
        1, BLOCK, num_kv_heads=1, head_dim=1, dtype=jnp.bfloat16, num_blocks=2**16
    )
    cache = PrefixCache(manager, model="a model")
    rng = np.random.default_rng(1)
    tables = [cache.open(rng.integers(0, 50_000, 1000)) for _ in range(64)]
    prepare_step(tables, 1000, max_blocks=256)
    commit_tokens(tables)
    times = []
    for _ in range(20 if quick else 2000):
        new = rng.integers(0, 50_000, len(tables)).astype(np.int32)
        start = time.perf_counter_ns()
        append_tokens(tables, new)
        prepare_step(tables, max_blocks=256)
        commit_tokens(tables)
        times.append((time.perf_counter_ns() - start) / 1e3)
    case = f"{len(tables)} sequences / a step of decoding, all of them"
    results.add(case, OURS, "host time", statistics.median(times), "us")


def _keys(cache: PrefixCache, prompt: np.ndarray, count: int, results: Results) -> None:
    namespace = cache.namespace
    ways: dict[str, Callable[[], list[bytes]]] = {OURS: lambda: namespace.keys(prompt)}
    try:
        from blake3 import blake3
    except ImportError:
        print(f"{PEER}: the package blake3 is not installed", flush=True)
    else:

        def in_python() -> list[bytes]:
            key, keys, data = namespace.root(), [], prompt.tobytes()
            for i in range(0, len(data) // (4 * BLOCK) * 4 * BLOCK, 4 * BLOCK):
                key = blake3(data[i : i + 4 * BLOCK], key=key).digest()
                keys.append(key)
            return keys

        ways[PEER] = in_python
        assert in_python() == namespace.keys(prompt)
    case = f"{len(prompt)} tokens / keys"
    for name, keys in ways.items():
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            keys()
            times.append((time.perf_counter_ns() - start) / 1e3)
        results.add(case, name, "host time", statistics.median(times), "us")


if __name__ == "__main__":
    common.main("cache-host", bench, __doc__)
