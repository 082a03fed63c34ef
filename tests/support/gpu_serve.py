"""What an NVIDIA GPU would run for steps of the server's loop; compiled where none is.

Run as a script with a CUDA plugin of JAX on the path, it compiles programs of four
steps for an H100 and prints how many calls of the library's kernels each has, and how
many slices at a place that is known only as it runs: of a small model, and in the shape
of SmolLM2 with one kernel between the attentions of two layers.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver

import gpu_schedules
import jax
import jax.numpy as jnp
import llama_files  # noqa: F401  examples are on the path behind it
import serve.step
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from serve import config
from serve.batch import Shape
from serve.between import between
from serve.step import step

from jax_kvblock import BlockSpec, KVPool

LAYERS = 2


class Sizes(NamedTuple):
    width: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    rows: int


SMALL = Sizes(width=64, heads=4, kv_heads=2, dim=16, inner=96, rows=8)
# As SmolLM2-135M; what lies between its attentions fits into one kernel.
SMOLLM2 = Sizes(width=576, heads=9, kv_heads=3, dim=64, inner=1536, rows=64)
KERNELS = ("append", "paged_attention", "kernel_call")
WANTED = {
    SMALL: "append 2, paged_attention 2, kernel_call 0, slices 0",
    SMOLLM2: "append 1, paged_attention 2, kernel_call 1, slices 0",
}


def compile_for(device: Any, sizes: Sizes, fused: bool) -> str:
    """The program's text, as XLA would run it."""
    placed = SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    width, heads, kv_heads, dim, inner, rows = sizes
    layer = {
        "attn_norm": array(width, dtype=jnp.float32),
        "mlp_norm": array(width, dtype=jnp.float32),
        "qkv": array((heads + 2 * kv_heads) * dim, width),
        "out": array(width, heads * dim),
        "gate_up": array(2 * inner, width),
        "down": array(width, inner),
    }
    params = {
        "embedding": array(257, width),
        "final_norm": array(width, dtype=jnp.float32),
        "layers": [layer] * LAYERS,
    }
    model = config.Config(
        num_layers=LAYERS, width=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, vocab_size=257, norm_eps=1e-5,
        inv_freq=config.frequencies(10_000.0, dim), interleaved=True, max_tokens=256,
    )  # fmt: skip
    shape = Shape(rows=rows, places=rows, width=4, drafts=0, greedy=True, steps=4)
    spec = BlockSpec(LAYERS, 2, 16, kv_heads, dim, jnp.bfloat16, layout="NHD")
    pool = jax.tree.map(
        lambda x: array(*x.shape, dtype=x.dtype),
        jax.eval_shape(functools.partial(KVPool.zeros, spec, 32)),
    )
    program = functools.partial(step, config=model, shape=shape, fuse_layers=fused)
    last = array(shape.most_outputs, dtype=jnp.int32)
    buffer = array(shape.size, dtype=jnp.int32)
    lowered = jax.jit(program, donate_argnums=0).lower(pool, params, last, buffer)
    return lowered.compile().as_text()


def line_of(text: str) -> str:
    calls = re.findall(r'custom_call_target="kvblock_(\w+)"', text)
    slices = re.findall(r" dynamic-(?:update-)?slice\(", text)
    counts = [f"{name} {calls.count(name)}" for name in KERNELS]
    return ", ".join([*counts, f"slices {len(slices)}"])


if __name__ == "__main__":
    gpu_schedules.register_stand_ins(KERNELS)
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=gpu_schedules.H100, topology="1x1x1"
    )
    serve.step.choose = lambda *_: between  # it asks what GPUs are here
    for sizes in WANTED:
        print(line_of(compile_for(topology.devices[0], sizes, sizes == SMOLLM2)))
