"""In what order NVIDIA GPUs would run programs; compiled where none is.

Run as a script with a CUDA plugin of JAX on the path, `STRATEGY DEVICES LENGTH WORK
OPTIONS`, it compiles attention over that many GPUs and prints a line for each call of a
kernel, each collective that is begun, waited for, or waited for at once, each copy, and
each join of keys and values; before them, how many bytes a GPU holds at the most.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.core import ffi
from jax_kvblock.parallel import (
    arguments,
    compiler_options,
    context_parallel_attention,
)

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
HEADS = (32, 8, 8, 32)  # of q, k, v and the gradient of out


OF_ATTENTION = ("attention_forward", "attention_backward_kv", "after")


def register_stand_ins(names: Iterable[str] = OF_ATTENTION) -> None:
    """A build without CUDA has no handlers for it; to compile, any are as good."""
    known = ffi._native.handlers()
    ffi.BUILD["cuda"] = True
    for name in (f"kvblock_{name}" for name in names):
        if name not in known["CUDA"]:
            handler = known["cpu"]["kvblock_copy"]
            jax.ffi.register_ffi_target(name, handler, platform="CUDA")


def compile_attention(
    strategy: str, count: int, length: int, work: str, how: str
) -> Any:
    """how: "plain", "tuned" with all options, or "without engines" with the others."""
    tuned, engines = how != "plain", how == "tuned"
    arguments.engines_can_send = lambda: engines
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=H100, topology=f"1x1x{count}"
    )
    mesh = Mesh(np.array(topology.devices), ("c",))
    rows = P(None, "c")
    attend = functools.partial(
        context_parallel_attention, axis_name="c", strategy=strategy, causal=True,
        implementation="cuda_sm90", compiler_options=tuned,
    )  # fmt: skip
    over = jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(over, q, k, v)
        return out, pull(d_out)

    args = [
        jax.ShapeDtypeStruct(
            (1, length, n, 128), jnp.bfloat16, sharding=NamedSharding(mesh, rows)
        )
        for n in HEADS
    ]
    f, given = (over, args[:3]) if work == "forward" else (both, args)
    options = {}
    if tuned:
        options = compiler_options(mesh.devices.flat, combine_gathers=True)
        assert len(options) == 5
    if not engines:
        options = {name: x for name, x in options.items() if "threshold" in name}
    return jax.jit(f).lower(*given).compile(compiler_options=options)


COLLECTIVES = "collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce"


def lines_of(text: str) -> list[str]:
    """What the entry computation does, in its order."""
    entry = text[text.index("\nENTRY") :]
    kernels = dict.fromkeys(
        (n, t)
        for n, body in re.findall(r"\n%?([\w.\-]+) \([^\n]*\{\n(.*?)\n\}", text, re.S)
        for t in re.findall(r'custom_call_target="kvblock_(\w+)"', body)
    )
    found = []
    for line in entry.splitlines():
        kernel = re.search(r'custom_call_target="kvblock_(\w+)"', line)
        kernel = kernel[1] if kernel else None
        for name, target in kernels:  # in a fusion with what it reads slices of
            if re.search(rf"calls=%?{re.escape(name)}\b", line):
                kernel = target
        moved = re.search(rf" ({COLLECTIVES})(-start|-done)?\(", line)
        if kernel:
            found.append(kernel)
        elif moved:
            found.append(f"{moved[1]} {(moved[2] or '-at-once')[1:]}")
        elif re.search(r" copy(-start)?\(", line):
            found.append("copy")
        elif re.search(r"concatenate_fusion\S* = bf16", line):
            found.append("join")
    return found


if __name__ == "__main__":
    register_stand_ins()
    strategy, count, length, work, how = sys.argv[1:]
    made = compile_attention(strategy, int(count), int(length), work, how)
    print(f"bytes: {made.memory_analysis().peak_memory_in_bytes}")
    print("\n".join(["schedule:", *lines_of(made.as_text())]))
