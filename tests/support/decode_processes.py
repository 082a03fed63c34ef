"""Decoding over devices that belong to several processes.

Each process runs this as a script, `RANK COUNT PORT`. The blocks of sequences are dealt
out to all devices, and then KV heads are cut over them: a prompt, and a step behind it.
They are four CPU devices together; with `gpu` at the end, a GPU for each process.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

if __name__ == "__main__":
    RANK, COUNT, ON = int(sys.argv[1]), int(sys.argv[2]), [*sys.argv, "cpu"][4]
    DEVICES = f"--xla_force_host_platform_device_count={4 // COUNT}"
    os.environ["XLA_FLAGS"] = f"{DEVICES} --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from context_processes import DTYPES, assert_same, placed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from paged_model import Case
from parallel_decode import Dealt, mesh_of, reductions

import jax_kvblock as kv
from jax_kvblock.parallel import kv_heads_partition, repeat_kv_heads, repeat_spec

HEADS, DIM, BLOCK = 8, 64, 16
PROMPT = 20
TABLES = np.int32([[3, 1, 7], [2, 6, -1]])


def hold_dealt(mesh: Mesh) -> None:
    """Row by row beside float64, on each device."""
    on = mesh.devices.flat[0].platform
    case = Case(
        sequences=((1, 37), (3, 90), (1, 4)), heads=HEADS, dim=DIM, value_dim=DIM,
        block_size=BLOCK, dtype=DTYPES[on].name,
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
    """Two steps, as one device takes them; fewer KV heads than devices are repeated."""
    rng = np.random.default_rng(3)
    dtype = DTYPES[mesh.devices.flat[0].platform]
    spec = kv.BlockSpec(2, 2, BLOCK, kv_heads, DIM, dtype)
    steps = [
        tuple(
            rng.standard_normal((2, tokens, heads, DIM)).astype(dtype)
            for heads in (HEADS, kv_heads, kv_heads)
        )
        for tokens in (PROMPT, 1)
    ]

    def step(
        spec: kv.BlockSpec, times: int, data: Any, qkv: Any, first: Any
    ) -> tuple[Any, Any]:
        q, k, v = qkv
        rows = jnp.arange(q.shape[1], dtype=jnp.int32) + first
        slots = jnp.asarray(TABLES)[:, rows // BLOCK] * BLOCK + rows % BLOCK
        k, v = (
            (repeat_kv_heads(a, times) if times > 1 else a).reshape(
                -1, spec.num_kv_heads, DIM
            )
            for a in (k, v)
        )
        pool = kv.append_kv(kv.KVPool(data, spec), 1, k, v, slots.reshape(-1))
        lens = jnp.full(2, q.shape[1], jnp.int32) + first
        return pool.data, kv.paged_attention(q, pool, 1, TABLES, lens)

    wide = repeat_spec(spec, mesh.size)
    data = jnp.zeros((9, *spec.block_shape), dtype)
    over = placed(
        np.zeros((9, *wide.block_shape), dtype),
        NamedSharding(mesh, kv_heads_partition(wide, "cp")),
    )
    for qkv, first in zip(steps, (0, PROMPT), strict=True):
        data, want = jax.jit(lambda *x: step(spec, 1, *x))(data, qkv, first)
        specs = (P(None, None, "cp"), P(), P())
        put = [
            placed(a, NamedSharding(mesh, s)) for a, s in zip(qkv, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            run = jax.jit(lambda *x: step(wide, mesh.size, *x), donate_argnums=0)
            compiled = run.lower(over, tuple(put), np.int32(first)).compile()
            assert reductions(compiled.as_text()) == []
            over, out = compiled(over, tuple(put), np.int32(first))
        assert_same(out, want)


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
