"""What an NVIDIA GPU's program has behind its products; compiled where none is.

Run as a script with a CUDA plugin of JAX on the path, it compiles cases of `CASES` for
an H100 and prints for each its name, how many products of cuBLASLt's it has, and which
epilogues these have; and the temporaries of a step of eight layers. Triton's products
are left out: without a GPU nobody can say which are faster.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver

import gpu_products
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.layers.gelu import gelu

LIBRARY = {"xla_gpu_enable_triton_gemm": False}
UP = ((4, 1024, 512), (512, 2048), (2048,))


def behind(act: Any) -> Any:
    return lambda x, w, b: act(x @ w + b)


def both(f: Any) -> Any:
    def run(*args: Any) -> Any:
        out, pull = jax.vjp(f, *args)
        return out, pull(out)

    return run


def three(x: Any, q: Any, k: Any, v: Any) -> Any:
    return x @ q, x @ k, x @ v


def qkv(rows: int) -> tuple[tuple[int, ...], ...]:
    return (rows, 4096), (4096, 4096), (4096, 1024), (4096, 1024)


def exact(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


# By name: a function, its operands' shapes, its products, and their epilogues.
CASES: dict[str, tuple[Any, Any, int, str]] = {
    "gelu": (behind(jax.nn.gelu), UP, 1, "BIAS_GELU"),
    "kept_gelu": (behind(kept_gelu), UP, 1, "BIAS_GELU"),
    "FusedGELU": (behind(lambda x: gelu(x, True)), UP, 1, "BIAS"),
    "gelu by erf": (behind(exact), UP, 1, "BIAS"),
    "gelu and gradients": (both(behind(jax.nn.gelu)), UP, 3, "BIAS"),
    "kept_gelu and gradients": (both(behind(kept_gelu)), UP, 3, "BIAS_GELU_AUX"),
    # XLA joins products of one x, as long as what comes out is small.
    "q, k and v of 64 rows": (three, qkv(64), 1, ""),
    "q, k and v of 16384 rows": (three, qkv(16384), 2, ""),
}


# MiB of temporaries of a step of descent, as docs/fusion.md has them.
TEMPORARIES = {"gelu": (jax.nn.gelu, 432), "kept_gelu": (kept_gelu, 304)}


def compile_for(device: Any, name: str) -> Any:
    f, shapes, _, _ = CASES[name]
    return compiled_for(device, f, shapes)


def compiled_for(device: Any, f: Any, shapes: Any) -> Any:
    place = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in shapes]
    return jax.jit(f).lower(*args).compile(compiler_options=LIBRARY)


def step_of_eight(device: Any, act: Any) -> Any:
    """Of `x + act(x @ up) @ down`, 512 wide inside of 2,048, 4,096 rows."""

    def loss(weights: Any, x: Any) -> Any:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + act(x @ up) @ down
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(x: Any, *weights: Any) -> Any:
        grads = jax.grad(loss)(weights, x)
        return [
            w - (0.1 * g).astype(w.dtype) for w, g in zip(weights, grads, strict=True)
        ]

    return compiled_for(device, step, [(4096, 512), *8 * [(512, 2048), (2048, 512)]])


def memory_line(name: str, device: Any) -> str:
    act, want = TEMPORARIES[name]
    stats = step_of_eight(device, act).memory_analysis()
    found = stats.temp_size_in_bytes / 2**20
    near = abs(found - want) < 0.03 * want
    return f"{name}: {want if near else round(found)} MiB"


def line_of(name: str, compiled: Any) -> str:
    text = compiled.as_text()
    found = sorted(set(re.findall(r'"epilogue":"(\w+)"', text)) - {"DEFAULT"})
    count = len(re.findall(r'custom_call_target="__cublas\$lt\$matmul"', text))
    return f"{name}: {count} {' '.join(found)}"


def wanted(name: str) -> str:
    _, _, count, epilogue = CASES[name]
    return f"{name}: {count} {epilogue}"


if __name__ == "__main__":
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=gpu_products.WITH_VERSIONS, topology="1x1x1"
    )
    (h100,) = topology.devices
    for case in sys.argv[1:]:
        print(line_of(case, compile_for(h100, case)))
    for case in TEMPORARIES:
        print(memory_line(case, h100))
