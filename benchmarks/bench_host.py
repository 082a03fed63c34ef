"""Blocks between a device pool and a pool in pinned host memory, in one kernel.

GB/s count the bytes one way, as for a copy, and are judged by the best large pinned
`cudaMemcpyAsync` of the same run. The peers are jax's own ways: `jax.device_put` of
blocks that are gathered already, and a gather and `device_put` inside one jit.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import ceilings
import jax
import numpy as np
from support import common, xla
from support.blocks import Data
from support.common import MIB, OURS, Results, cases
from support.jobs import Group, HostJob, Job
from support.timing import Effort, measure

from jax_kvblock import BlockSpec, KVPool, gather_blocks, scatter_blocks
from jax_kvblock import transfer_blocks as transfer

SHAPES = (cases.LLAMA_8B_16, cases.LLAMA_70B_TP8_16)
LAYOUTS = ("NHD", "universal")


def bench(options: argparse.Namespace, results: Results) -> None:
    quick = options.quick
    ceilings.add_host_link(results, quick)
    size = 2 * MIB if quick else (2048 if common.on_gpu() else 64) * MIB
    effort = Effort.usual(quick)
    if common.on_gpu() and not quick:
        effort = Effort(rounds=5, seconds=0.05, min_calls=2, enough=2.0)
    for case in common.wanted(options, SHAPES):
        data = Data(case, size)
        pinned = {layout: _to_host(data.pools[layout]) for layout in LAYOUTS}
        groups = [_transfer(data, pinned, layout, True) for layout in LAYOUTS]
        groups += [_transfer(data, pinned, layout, False) for layout in LAYOUTS]
        groups += [_scatter(data, pinned, layout) for layout in LAYOUTS]
        groups += [_gather(data, pinned, layout) for layout in LAYOUTS]
        measure(groups, results, options, effort)


def _sharding(kind: str) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _to_host(x: jax.Array) -> jax.Array:
    """A copy in pinned memory, by way of NumPy: eager device_put is slow."""
    return jax.device_put(np.asarray(x), _sharding("pinned_host"))


def _group(data: Data, work_name: str, jobs: list[Job]) -> Group:
    return Group(f"{data.name} / {work_name}", data.moved // 2, jobs, unit="GB/s")


# ---- from pool to pool ---------------------------------------------------------------


def _transfer(data: Data, pinned: Any, layout: str, to_host: bool) -> Group:
    """An NHD pool on the device and a host pool, with the same ids on both sides."""
    device_spec, host_spec = data.spec, data.pool_spec(layout)
    jobs = []
    device = {"": data.pools["NHD"], ", layered pool": data.layers["NHD"]}
    for suffix, pool in device.items():
        if to_host:
            call = functools.partial(_move, device_spec, host_spec)
            job = Job(OURS + suffix, call, (pool, data.ids), pinned[layout], True)
        else:
            call = functools.partial(_move, host_spec, device_spec)
            job = Job(OURS + suffix, call, (pinned[layout], data.ids), pool, True)
        jobs.append(job)
    pools = ("NHD", layout) if to_host else (layout, "NHD")
    way = "to host" if to_host else "to device"
    return _group(data, f"{way}, {pools[0]} to {pools[1]} pool", jobs)


def _move(src: BlockSpec, dst: BlockSpec, target: Any, source: Any, ids: Any) -> Any:
    return transfer(KVPool(source, src), ids, KVPool(target, dst), ids).data


# ---- between a host pool and blocks on the device ------------------------------------


def _scatter(data: Data, pinned: Any, layout: str) -> Group:
    blocks, spec = data.blocks["universal"], data.pool_spec(layout)

    def ours(target: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
        return scatter_blocks(KVPool(target, spec), ids, blocks).data

    jobs = [Job(OURS, ours, (data.ids, blocks), pinned[layout], in_place=True)]
    if layout == "universal":
        host = _sharding("pinned_host")
        on_host = _to_host(blocks)

        def gathered(pool: jax.Array, ids: jax.Array) -> jax.Array:
            return jax.device_put(pool.at[ids].get(**xla.READ), host)

        args = (data.pools[layout], data.ids)
        jobs.append(Job("gather and device_put in jit", gathered, args, on_host,
                        fresh=True))  # fmt: skip
        put = functools.partial(jax.device_put, blocks, host)
        jobs.append(HostJob("jax.device_put", put, (), on_host))
    return _group(data, f"to host, scatter to {layout} pool", jobs)


def _gather(data: Data, pinned: Any, layout: str) -> Group:
    blocks, spec = data.blocks["universal"], data.pool_spec(layout)

    def ours(pool: jax.Array, ids: jax.Array) -> jax.Array:
        return gather_blocks(KVPool(pool, spec), ids)

    jobs = [Job(OURS, ours, (pinned[layout], data.ids), blocks)]
    if layout == "universal":
        device, on_host = _sharding("device"), _to_host(blocks)

        def put(x: jax.Array) -> jax.Array:
            return jax.device_put(x, device)

        jobs.append(Job("device_put in jit", put, (on_host,), blocks, fresh=True))
        eager = functools.partial(jax.device_put, on_host, device)
        jobs.append(HostJob("jax.device_put", eager, (), blocks))
    return _group(data, f"to device, gather from {layout} pool", jobs)


if __name__ == "__main__":
    common.main("host", bench, __doc__)
