"""What an NVIDIA GPU would run for steps of the server's loop; compiled where none is.

Run as a script with a CUDA plugin of JAX on the path, it compiles a program of four
steps of a small model for an H100 and prints how many calls of the library's kernels it
has, and how many slices at a place that is known only as it runs.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver

import gpu_schedules
import jax
import jax.numpy as jnp
import llama_files  # noqa: F401  examples are on the path behind it
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from serve import config
from serve.batch import Shape
from serve.step import step

from jax_kvblock import BlockSpec, KVPool

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 2, 64, 4, 2, 16, 96, 257
KERNELS = ("append", "paged_attention")  # of which a layer has one each


def compile_for(device: Any, steps: int = 4) -> str:
    """The program's text, as XLA would run it."""
    placed = SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    layer = {
        "attn_norm": array(WIDTH, dtype=jnp.float32),
        "mlp_norm": array(WIDTH, dtype=jnp.float32),
        "qkv": array((HEADS + 2 * KV_HEADS) * DIM, WIDTH),
        "out": array(WIDTH, HEADS * DIM),
        "gate_up": array(2 * INNER, WIDTH),
        "down": array(WIDTH, INNER),
    }
    params = {
        "embedding": array(VOCABULARY, WIDTH),
        "final_norm": array(WIDTH, dtype=jnp.float32),
        "layers": [layer] * LAYERS,
    }
    model = config.Config(
        num_layers=LAYERS, width=WIDTH, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, vocab_size=VOCABULARY, norm_eps=1e-5,
        inv_freq=config.frequencies(10_000.0, DIM), interleaved=True, max_tokens=256,
    )  # fmt: skip
    shape = Shape(rows=8, places=8, width=4, drafts=0, greedy=True, steps=steps)
    spec = BlockSpec(LAYERS, 2, 16, KV_HEADS, DIM, jnp.bfloat16, layout="NHD")
    pool = jax.tree.map(
        lambda x: array(*x.shape, dtype=x.dtype),
        jax.eval_shape(functools.partial(KVPool.zeros, spec, 32)),
    )
    program = functools.partial(step, config=model, shape=shape, fuse_layers=False)
    last = array(shape.most_outputs, dtype=jnp.int32)
    buffer = array(shape.size, dtype=jnp.int32)
    lowered = jax.jit(program, donate_argnums=0).lower(pool, params, last, buffer)
    return lowered.compile().as_text()


def line_of(text: str) -> str:
    calls = re.findall(r'custom_call_target="kvblock_(\w+)"', text)
    slices = re.findall(r" dynamic-(?:update-)?slice\(", text)
    counts = [f"{name} {calls.count(name)}" for name in KERNELS]
    return ", ".join([*counts, f"slices {len(slices)}"])


WANTED = ", ".join([*(f"{name} {LAYERS}" for name in KERNELS), "slices 0"])


if __name__ == "__main__":
    gpu_schedules.register_stand_ins(KERNELS)
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=gpu_schedules.H100, topology="1x1x1"
    )
    print(line_of(compile_for(topology.devices[0])))
