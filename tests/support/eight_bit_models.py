"""A small flax.nnx model for 8 bits, and its task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kvblock.training import (
    FP8Config,
)

CURRENT = FP8Config(scaling="current")


class Block(nnx.Module):
    """Layers as models have them: by themselves, in lists and dicts, and shared."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.layers.append(self.layers[0])
        self.named = nnx.Dict({"up": nnx.Linear(16, 32, use_bias=False, rngs=rngs)})
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(self.drop(jax.nn.relu(self.named["up"](x))))


ATTENTION = [f"attention.{n}.dot_general" for n in ("key", "out", "query", "value")]
ALL = {*ATTENTION, "layers.0", "named.up", "head"}


def task(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(rng.standard_normal((4, 6, 16)), jnp.float32)
    return x, jnp.argmax(x[..., :8], -1)
