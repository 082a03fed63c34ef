"""Blocks between the device and pinned host memory, by tiers, beside the link.

GB/s count bytes one way. `Copies` is the copy alone, from and to staging arrays;
`TieredCache` has the programs, the books and the threads around it. Both are judged by
the best large pinned `cudaMemcpyAsync` of the same run. The step beside which blocks
travel reads the whole pool: it is timed alone before, and then beside each transfer.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import ceilings
import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import MIB, OURS, Results, cases

from jax_kvblock import BlockManager, BlockTable, KVPool, PrefixCache
from jax_kvblock.cache import Offload, Onboard, TieredCache
from jax_kvblock.cache.copies import Copies, Cut
from jax_kvblock.cache.host import HostTier

CASE = cases.LLAMA_8B_16
ROUNDS = 7
PROMPTS = 4  # which together are twice the pool
Coming: TypeAlias = tuple[BlockTable, Onboard]


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
    rooms = [copies.room((count, heads, *rest), host.spec.dtype) for _ in range(layers)]

    def by_layer() -> None:  # all of them under way, as a ticket has them
        each = [
            copies.start_up(host.rows, slots, Cut.layer(host.spec, i), room)
            for i, room in enumerate(rooms)
        ]
        for copy in each:
            copy.wait()

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
    """Prompts that go down and come up again, alone or beside steps that read the pool.

    One follows the other, as requests do. Two are on their way up at a time, which is
    all that the pool holds.
    """
    cache = PrefixCache(manager, model="bench")
    prompt = np.arange(count * CASE.block_size + 1, dtype=np.int32)
    nbytes = PROMPTS * count * manager.spec.block_bytes
    step = Step(manager)
    alone = _median(step.run)
    if beside:
        results.add(
            "tiers / a step that reads the pool", OURS, "time", alone * 1e3, "ms"
        )
    times: dict[str, list[float]] = {"offload": [], "onboard": []}
    steps: dict[str, list[float]] = {"offload": [], "onboard": []}
    with TieredCache(cache, host_bytes=nbytes + (1 << 20)) as tiers:
        for round_ in range(ROUNDS):
            tiers.below.host.books.forget_idle()
            salts = [f"{round_} {i}" for i in range(PROMPTS)]
            began = time.perf_counter()
            tickets = [_offload(tiers, prompt, salt) for salt in salts]
            while beside and not all(ticket.done for ticket in tickets):
                steps["offload"].append(_timed(step.run))
            for ticket in tickets:
                ticket.wait()
            times["offload"].append(time.perf_counter() - began)

            began = time.perf_counter()
            waiting, coming = collections.deque(salts), collections.deque[Coming]()
            while waiting or coming:
                while waiting and len(coming) < 2:
                    coming.append(tiers.open(prompt, salt=waiting.popleft()))
                if beside:
                    steps["onboard"].append(_timed(step.run))
                else:
                    coming[0][1].wait()
                for table, ticket in list(coming):
                    if ticket.poll():  # taken at once, or who comes next may evict it
                        coming.remove((table, ticket))
                        if table.match() != count * CASE.block_size:
                            results.fail("tiers", OURS, "blocks were lost on the way")
                        table.free()
            jax.block_until_ready(manager.pool.data)
            times["onboard"].append(time.perf_counter() - began)
            cache.clear()
    for name, taken in times.items():
        case = f"tiers / {name}{', beside steps' if beside else ''}"
        rate = nbytes / statistics.median(taken[1:]) / 1e9
        results.add(case, OURS, "bandwidth", rate, "GB/s")
        if beside and steps[name]:
            slowed = statistics.median(steps[name]) / alone - 1
            results.add(case, OURS, "step slowed by", 100 * slowed, "%")


def _offload(tiers: TieredCache, prompt: np.ndarray, salt: str) -> Offload:
    """A prompt that was computed goes down, and leaves the device."""
    with tiers.cache.open(prompt, salt=salt) as table:
        table.reserve(len(prompt))
        table.commit(len(prompt))
        ticket = tiers.offload(table)
    tiers.cache.clear()
    return ticket


class Step:
    """A step that reads the whole pool and writes a block of it, as decoding does."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def run(self) -> None:
        jax.block_until_ready(self._manager.update(_read_all))


def _read_all(pool: KVPool) -> tuple[KVPool, jax.Array]:
    total = jnp.sum(pool.data, dtype=jnp.float32)
    return KVPool(pool.data.at[-1].multiply(1), pool.spec), total


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


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
