"""A training step whose memory is predicted, and then measured where it runs.

Run as a script, `peak BATCH` predicts and measures a batch of that size; `edge` finds
the largest batch for all of the memory that this process has, runs it, and tries the
next one. Each prints a line of JSON. A process of its own each time: the allocator's
peak cannot be set back.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import flash_attention
from jax_kvblock.hardware import HardwareAbstractionLayer

WIDTH, HEADS, LENGTH, LAYERS = 512, 8, 512, 4
MULTIPLE = 8
DONATED = (0, 1)
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
          "down": (4 * WIDTH, WIDTH)}  # fmt: skip


def arguments(batch_size: int) -> tuple[Any, ...]:
    """Weights and their momentum in float32, and a batch."""
    weights = [
        {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    x = jax.ShapeDtypeStruct((batch_size, LENGTH, WIDTH), jnp.bfloat16)
    return weights, weights, x


def step(weights: Any, momentum: Any, x: jax.Array) -> Any:
    """One step of descent, in bfloat16 inside."""

    def loss(weights: Any) -> jax.Array:
        h = x
        for layer in weights:
            w = {name: a.astype(h.dtype) for name, a in layer.items()}
            q, k, v = jnp.split((h @ w["qkv"]).reshape(*h.shape[:2], -1, 64), 3, axis=2)
            o = flash_attention(q, k, v, causal=True)
            h = h + o.reshape(h.shape) @ w["out"]
            h = h + jax.nn.gelu(h @ w["up"]) @ w["down"]
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slopes)
    weights = jax.tree.map(lambda w, m: w - 1e-3 * m, weights, momentum)
    return weights, momentum, value


def run(batch_size: int) -> float:
    """Runs a batch of zeros, that come from the host, and gives what came out."""
    given = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), arguments(batch_size))
    given = jax.block_until_ready(jax.device_put(given))
    trained = jax.jit(step, donate_argnums=DONATED)(*given)
    return float(jax.block_until_ready(trained)[2])


def peak(batch_size: int) -> dict[str, Any]:
    hal = HardwareAbstractionLayer()
    usage = hal.estimate_memory_usage(
        step, batch_size, arguments, donate_argnums=DONATED
    )
    run(batch_size)
    stats = jax.devices()[0].memory_stats()
    return {"predicted": usage.total, "peak": stats["peak_bytes_in_use"]}


def edge() -> dict[str, Any]:
    hal = HardwareAbstractionLayer()
    found = hal.find_batch_size(
        step, arguments, multiple_of=MULTIPLE, donate_argnums=DONATED
    )
    said = {"size": found.size, "next": found.next_size, "ran": False, "refused": ""}
    said["ran"] = run(found.size) == 0
    assert found.next_size is not None
    try:
        run(found.next_size)
    except jax.errors.JaxRuntimeError as error:
        said["refused"] = str(error)
    return said


if __name__ == "__main__":
    print(json.dumps(peak(int(sys.argv[2])) if sys.argv[1] == "peak" else edge()))
