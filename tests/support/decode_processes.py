"""Decoding over devices that belong to several processes.

Each process runs this as a script, `RANK COUNT PORT`. The blocks of sequences are dealt
out to all devices, and then KV heads are cut over them: a prompt, and a step behind it.
They are four CPU devices together; with `gpu` at the end, a GPU for each process.
"""

from __future__ import annotations

import os
import sys
import traceback

if __name__ == "__main__":
    RANK, COUNT, ON = int(sys.argv[1]), int(sys.argv[2]), [*sys.argv, "cpu"][4]
    DEVICES = f"--xla_force_host_platform_device_count={4 // COUNT}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"

import jax
import numpy as np
from context_processes import DTYPES, assert_same
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import placed
from paged_model import Case
from parallel_decode import Dealt, heads_over, mesh_of


def hold_dealt(mesh: Mesh) -> None:
    """Row by row beside float64, on each device."""
    on = mesh.devices.flat[0].platform
    case = Case(
        sequences=((1, 37), (3, 90), (1, 4)), heads=8, dim=64, value_dim=64,
        dtype=DTYPES[on].name,
    )  # fmt: skip
    drawn = Dealt(case, np.random.default_rng(2), mesh.size, None, on)
    function, (given,) = drawn.function()
    cut, whole = (NamedSharding(mesh, spec) for spec in (P("cp"), P()))
    put = {
        name: jax.tree.map(
            lambda a, to=cut if name in ("block_tables", "pages") else whole: placed(
                np.asarray(a), to
            ),
            value,
        )
        for name, value in given.items()
    }
    out, lse = jax.jit(function)(put)
    for own_out, own_lse in zip(
        out.addressable_shards, lse.addressable_shards, strict=True
    ):
        drawn.hold(np.asarray(own_out.data), np.asarray(own_lse.data))


def hold_heads(mesh: Mesh, kv_heads: int) -> None:
    dtype = DTYPES[mesh.devices.flat[0].platform]
    for got, want in heads_over(mesh, kv_heads, dtype, np.random.default_rng(3)):
        assert_same(got, want)


def main(rank: int, count: int, port: str, on: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=10,
        local_device_ids=[rank] if on == "gpu" else None,
    )  # fmt: skip
    size = 4 if on == "cpu" else count
    mesh = mesh_of(size, platform=on)
    assert len({device.process_index for device in mesh.devices.flat}) == count
    hold_dealt(mesh)
    for kv_heads in (1, 2, 8):
        hold_heads(mesh, kv_heads)
    print(f"{rank} of {count}: 4 are right", flush=True)


if __name__ == "__main__":
    try:
        main(RANK, COUNT, sys.argv[3], ON)
    except Exception:  # no waiting for the others at the end
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
