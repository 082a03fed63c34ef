"""Modules of few bits whose layers are stacked by nnx.vmap."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_kvblock.fusion import TransformerBlock
from jax_kvblock.precision import (
    AllocationStrategy,
    PrecisionConfig,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)

CONFIG = PrecisionConfig(group_size=32, allocation_strategy=AllocationStrategy.UNIFORM)
MATRICES = {"query", "key", "value", "out", "up", "down"}


def stack(kind: Any) -> Any:
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return kind(32, 4, rngs=rngs)

    return make(nnx.Rngs(0))


class Stack(nnx.Module):
    def __init__(self) -> None:
        self.blocks = stack(TransformerBlock)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Any) -> jax.Array:
            return block(x)

        return run(x, self.blocks)


def test_norms_of_stacked_layers_are_no_weights():
    """They have two axes there, and stay in the base precision."""
    model = Stack()
    names = {f"blocks.{name}" for name in MATRICES}
    module = create_ultra_precision_module(model, CONFIG)
    assert {weight.name for weight in module.plan.weights} == names
    x = jax.random.normal(jax.random.key(0), (1, 3, 32))
    assert np.isfinite(module(x)).all()
    found = analyze_precision_opportunities(model, x, config=CONFIG)
    assert {weight.name for weight in found["plan"].weights} == names


class Own(TransformerBlock):
    def __init__(self, *sizes: int, rngs: nnx.Rngs) -> None:
        super().__init__(*sizes, rngs=rngs)
        self.more = nnx.Param(rngs.normal((8, 32)))
        self.gain = nnx.Param(rngs.normal((32,)))


@pytest.mark.parametrize("stacked", [False, True])
def test_matrices_that_a_class_adds_are_weights(stacked):
    """Beside those that it multiplies by; a vector is none."""
    model = stack(Own) if stacked else Own(32, 4, rngs=nnx.Rngs(0))
    module = create_ultra_precision_module(model, CONFIG)
    assert {w.name for w in module.plan.weights} == {*MATRICES, "more"}
