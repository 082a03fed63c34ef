"""Layers of flax as S2 has them: a block of a transformer, held to float64 and timed.

The validator compares each layer's output and gradients with plain jnp in float64, and
is shown a layer with a mistake, too. The benchmark says which kernels a layer's program
calls: what S2 asks for by the name FlashAttention3.

    python examples/layers.py            # sized for what there is to run on
    python examples/layers.py --quick    # small on a GPU, too

It needs flax (`pip install flax`).
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_kvblock.layers import (
    AttentionLayer,
    ComponentValidator,
    FusedGELU,
    OptimizedLinear,
    benchmark_attention_performance,
)


class Block(nnx.Module):
    """Attention and two products, each added to what came in."""

    def __init__(self, d_model: int, num_heads: int, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.attention = AttentionLayer(
            d_model, num_heads, dropout=0.1, bias=True, dtype=dtype, rngs=rngs
        )
        self.up = OptimizedLinear(d_model, 4 * d_model, rngs=rngs)
        self.down = OptimizedLinear(
            4 * d_model, d_model, optimization_level="fast", rngs=rngs
        )
        self.gelu = FusedGELU()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return x + self.down(self.gelu(self.up(x)))


class ReadsTwice(AttentionLayer):
    """A mistake to find: it attends to twice what it is given."""

    def __call__(self, hidden_states: Any, *masks: Any, **options: Any) -> Any:
        return super().__call__(2 * hidden_states, *masks, **options)


def main() -> None:
    """All of it; the exit code is 1 if a layer is wrong, or a mistake is not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    small = options.quick or not on_gpu
    d_model, num_heads = (64, 4) if small else (1024, 16)
    batch_size, seq_len, num_trials = (2, 128, 20) if small else (4, 4096, 100)
    block = Block(d_model, num_heads, jnp.bfloat16 if on_gpu else jnp.float32)

    x = jax.random.normal(jax.random.key(1), (batch_size, seq_len, d_model))
    dropped, again = block(x), block(x)
    block.eval()
    kept = block(x)
    print(f"block: {x.shape} in, {kept.shape} out")
    if (dropped == again).all() or (dropped == kept).all():
        raise SystemExit("failed: dropout drops the same in each call, or nothing")

    validator = ComponentValidator(device=jax.devices()[0], seed=0)
    validated = [
        validator.validate_attention_component(block.attention, d_model, num_heads),
        validator.validate_linear_component(block.up, d_model, 4 * d_model),
        validator.validate_linear_component(block.down, 4 * d_model, d_model),
    ]
    for result in validated:
        count = len(result.comparisons)
        print(
            f"{result.component}: {count} arrays, {result.worst:.2f} of the tolerance"
        )
        if not result:
            raise SystemExit(f"failed: {result}")
    wrong = ReadsTwice(d_model, num_heads, rngs=nnx.Rngs(0))
    result = validator.validate_attention_component(wrong, d_model, num_heads)
    print(f"a layer with a mistake: {len(result.failures)} arrays are wrong")
    if result:
        raise SystemExit("failed: the validator has not seen a mistake")

    results = benchmark_attention_performance(
        model=block.attention,
        input_shape=(batch_size, seq_len, d_model),
        num_trials=num_trials,
    )
    by = results["implementation"]
    print(f"Average latency: {results['avg_latency']:.2f}ms by {by}")
    if by.startswith("cuda") != on_gpu:
        raise SystemExit("failed: attention is not computed by this device's kernels")


if __name__ == "__main__":
    main()
