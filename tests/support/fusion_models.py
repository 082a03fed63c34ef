"""Models of flax that are fused, and how results are compared."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kvblock.fusion import (
    FusionConfig,
    TransformerBlock,
)

# The kernels' float32 on GPUs is three products of TF32.
LEEWAY = 10 if jax.default_backend() == "gpu" else 1
ALL = FusionConfig(optimization_level="aggressive", enable_mixed_precision=False)
SHAPE = (2, 24, 64)


def attention(**options):
    options = {"decode": False, "rngs": nnx.Rngs(0)} | options
    return nnx.MultiHeadAttention(4, 64, **options)


class Layer(nnx.Module):
    """A block as one writes it: every kind of place, and a module that comes twice."""

    def __init__(self, dtype=None, **options):
        rngs = nnx.Rngs(0)
        self.norm = nnx.RMSNorm(64, dtype=dtype, rngs=rngs)
        self.attention = attention(dtype=dtype, **options)
        self.up = nnx.Linear(64, 96, dtype=dtype, rngs=rngs)
        self.act = nnx.gelu
        self.down = nnx.Linear(96, 64, dtype=dtype, rngs=rngs)
        exact = functools.partial(jax.nn.gelu, approximate=False)
        self.head = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), exact)

    def __call__(self, x, mask=None, is_causal=False):
        y = self.attention(self.norm(x), mask=mask, is_causal=is_causal)
        x = x + y
        x = x + self.down(self.act(self.up(x)))
        return self.head(x)


class TransformerModel(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(
            [TransformerBlock(64, 4, num_kv_heads=2, rngs=nnx.Rngs(i)) for i in (0, 1)]
        )

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def drawn(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def biased(model):
    """Parameters that are zeros or ones at first get values."""
    state = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    moved = [x + 0.1 * drawn(*x.shape, seed=i) for i, x in enumerate(leaves)]
    nnx.update(model, jax.tree.unflatten(tree, moved))
    return model


def compare(one, other, allowed):
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    assert one.shape == other.shape
    assert np.linalg.norm(one - other) <= LEEWAY * allowed * np.linalg.norm(other)


def used(fused):
    return {(row.path, row.choice): row.used for row in fused.report}
