"""Blocks between the device and pinned host memory, by tiers, beside the link.

GB/s count bytes one way. `Copies` is the copy alone, from and to staging arrays;
`TieredCache` has the programs, the books and the threads around it. Both are judged by
the best large pinned `cudaMemcpyAsync` of the same run. The step beside which blocks
travel reads the whole pool: it is timed alone before, and then beside each transfer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ceilings
import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import MIB, OURS, Results, cases

from jax_kvblock import BlockManager, KVPool, PrefixCache
from jax_kvblock.cache import TieredCache
from jax_kvblock.cache.copies import Copies, Cut
from jax_kvblock.cache.host import HostTier

CASE = cases.LLAMA_8B_16
ROUNDS = 7


def bench(options: argparse.Namespace, results: Results) -> None:
    quick = options.quick
    ceilings.add_host_link(results, quick)
    size = (16 if quick else 2048 if common.on_gpu() else 64) * MIB
    manager = BlockManager(
        2 if quick else CASE.num_layers,
        CASE.block_size,
        num_kv_heads=CASE.num_kv_heads,
        head_dim=CASE.head_dim,
        num_blocks=2 * max(4, size // _block_bytes(quick)),
        dtype=jnp.bfloat16,
    )
    count = manager.num_blocks // 2
    _copies(manager, count, results)
    for beside in (False, True):
        _tiers(manager, count, results, beside)


def _block_bytes(quick: bool) -> int:
    layers = 2 if quick else CASE.num_layers
    return layers * 2 * CASE.block_size * CASE.num_kv_heads * CASE.head_dim * 2


# ---- the copy alone ------------------------------------------------------------------


def _copies(manager: BlockManager, count: int, results: Results) -> None:
    (device,) = manager._memory.devices
    host = HostTier(manager.spec, count * manager.spec.block_bytes, device)
    copies = Copies(device)
    shape = (count, *host.spec.block_shape)
    slots, whole = np.arange(count), Cut.whole(host.spec)
    array = copies.room(shape, host.spec.dtype)
    scattered = np.random.default_rng(0).permutation(count)
    heads, layers, *rest = host.spec.block_shape
    layer = copies.room((count, heads, *rest), host.spec.dtype)

    def by_layer() -> None:
        for i in range(layers):
            copies.up(host.rows, slots, Cut.layer(host.spec, i), layer)

    work: dict[str, Callable[[], Any]] = {
        "to host, slots in order": lambda: copies.down(array, slots, host.rows, slots),
        "to host, slots at random": lambda: copies.down(
            array, slots, host.rows, scattered
        ),
        "to device, slots in order": lambda: copies.up(host.rows, slots, whole, array),
        "to device, slots at random": lambda: copies.up(
            host.rows, scattered, whole, array
        ),
        "to device, layer by layer": by_layer,
    }
    for name, call in work.items():
        seconds = _median(call)
        rate = count * manager.spec.block_bytes / seconds / 1e9
        results.add(f"copies / {name}", OURS, "bandwidth", rate, "GB/s")


# ---- with everything around it -------------------------------------------------------


def _tiers(manager: BlockManager, count: int, results: Results, beside: bool) -> None:
    """Offload and onboard of some blocks, alone or beside steps that read the pool."""
    cache = PrefixCache(manager, model="bench")
    prompt = np.arange(count * CASE.block_size + 1, dtype=np.int32)
    nbytes = count * manager.spec.block_bytes
    step = Step(manager)
    alone = _median(step.run)
    times: dict[str, list[float]] = {"offload": [], "onboard": []}
    steps: dict[str, list[float]] = {"offload": [], "onboard": []}
    for round_ in range(ROUNDS):
        with (
            TieredCache(cache, host_bytes=nbytes + (1 << 20)) as tiers,
            cache.open(prompt, salt=str(round_)) as table,
        ):
            table.reserve(len(prompt))
            table.commit(len(prompt))
            began = time.perf_counter()
            down = tiers.offload(table)
            _until(lambda down=down: down.done, step, steps["offload"], beside)
            down.wait()
            times["offload"].append(time.perf_counter() - began)
            table.free()
            cache.clear()
            began = time.perf_counter()
            again, up = tiers.open(prompt, salt=str(round_))
            _until(up.poll, step, steps["onboard"], beside)
            up.wait()
            jax.block_until_ready(manager.pool.data)
            times["onboard"].append(time.perf_counter() - began)
            if again.match() != count * CASE.block_size:
                results.fail("tiers", OURS, "blocks were lost on the way")
            again.free()
        cache.clear()
    for name, taken in times.items():
        case = f"tiers / {name}{', beside steps' if beside else ''}"
        rate = nbytes / statistics.median(taken) / 1e9
        results.add(case, OURS, "bandwidth", rate, "GB/s")
        if beside and steps[name]:
            slowed = statistics.median(steps[name]) / alone - 1
            results.add(case, OURS, "step slowed by", 100 * slowed, "%")


class Step:
    """A step that reads the whole pool and writes a block of it, as decoding does."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def run(self) -> None:
        jax.block_until_ready(self._manager.update(_read_all))


def _read_all(pool: KVPool) -> tuple[KVPool, jax.Array]:
    total = jnp.sum(pool.data, dtype=jnp.float32)
    return KVPool(pool.data.at[-1].multiply(1), pool.spec), total


def _until(
    done: Callable[[], bool], step: Step, times: list[float], beside: bool
) -> None:
    """Runs steps until something is done, and notes what each took."""
    while beside and not done():
        began = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - began)


def _median(call: Callable[[], Any]) -> float:
    call()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    common.main("tiers", bench, __doc__)
