"""A transformer block fused as S2 has it: what ships here, why, and what it gives.

A row of the report says of each choice who computes it and for which reason. Then the
fused block is compared with the block that it was made from, forward and with
gradients, and timed beside it in two ways: op by op, as Python calls it, and as one
program of XLA's. Both ratios are printed, since what is gained depends on which of the
two one had. A GPU's kernels are counted; on a CPU they are not, and the text says so.

    python examples/fused_block.py            # sized for what there is to run on
    python examples/fused_block.py --quick    # small on a GPU, too

It needs flax (`pip install flax`).
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kvblock.fusion import (
    FusionConfig,
    TransformerBlock,
    benchmark_fusion_performance,
    create_unified_attention_fusion,
)

LEAST = 1.02  # times as fast as XLA's: what "balanced" asks of a measurement
# How far results may be apart, in parts of their norm: other sums, and other roundings.
APART = {jnp.float32: 1e-4, jnp.bfloat16: 0.03}
CHOICES = ["qkv", "attention", "gelu"]  # what this package has a way of its own for


def gradients(model: Any, x: jax.Array) -> Any:
    """Of a loss, by each parameter."""

    def loss(model: Any) -> jax.Array:
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    return nnx.jit(nnx.grad(loss))(model)


def apart(one: Any, other: Any) -> float:
    """The largest distance of two arrays of the same name, in parts of the norm."""

    def distance(a: Any, b: Any) -> float:
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return max(map(distance, jax.tree.leaves(one), jax.tree.leaves(other)))


def report_of(fused: Any) -> list[str]:
    """Prints the report; the choices that are ours."""
    for row in fused.report:
        print(f"  {row}")
    return [row.choice for row in fused.report if row.used == "ours"]


def compare(name: str, fused: Any, block: Any, x: jax.Array) -> None:
    """Results and gradients of the fused block beside those of the block."""
    of_results = apart(fused(x), nnx.jit(block)(x))
    of_gradients = apart(gradients(fused.model, x), gradients(block, x))
    print(f"{name}: results {of_results:.1e} apart, gradients {of_gradients:.1e}")
    bar = APART[x.dtype.type]
    if not max(of_results, of_gradients) <= bar:
        raise SystemExit(f"failed: the fused block must be within {bar} of the block")


def levels(block: Any, x: jax.Array) -> Any:
    """Each level: what it may ship, and what that gives; the last one is returned."""
    length = x.shape[1]
    fused = create_unified_attention_fusion(
        block, fusion_strategy="full_block", optimization_level="conservative"
    )
    if not np.array_equal(fused(x), nnx.jit(block)(x)):
        raise SystemExit("failed: conservative must keep the bits of the jitted block")
    print("conservative: the bits of the jitted block")

    config = FusionConfig("full_block", "balanced", target_sequence_length=length)
    fused = create_unified_attention_fusion(block, config=config)
    print(f"balanced, at {length} tokens in {x.dtype}:")
    ships = report_of(fused)
    for row in fused.report:
        measured = row.measured and (row.ratio or 0) >= LEAST
        if row.used == "ours" and not measured:
            raise SystemExit(f"failed: {row.choice} ships and was not measured to win")
    compare("balanced", fused, block, x)

    config = dataclasses.replace(
        config, optimization_level="aggressive", enable_mixed_precision=False
    )
    fused = create_unified_attention_fusion(block, config=config)
    print("aggressive:")
    if sorted(report_of(fused)) != sorted(CHOICES) or not set(ships) <= set(CHOICES):
        raise SystemExit(f"failed: aggressive must ship {', '.join(CHOICES)}")
    compare("aggressive", fused, block, x)
    return fused


def benchmark(block: Any, fused: Any, x: jax.Array, num_runs: int) -> None:
    """S2's `benchmark_fusion_performance`; both ratios, and both shares of kernels."""
    stats = benchmark_fusion_performance(block, fused, x, num_runs)
    for way, times in stats.times.items():
        print(f"{way:9} {times['p50']:9.3f} ms, {stats.launches[way]}")
    shares = (stats.launch_reduction, stats.launch_reduction_over_op_by_op)
    ratios = (stats.speedup, stats.speedup_over_op_by_op)
    for way, ratio, share in zip(("jitted", "op by op"), ratios, shares, strict=True):
        kernels = "not counted"
        if share is not None:
            kernels = f"{abs(share):.0%} {'fewer' if share >= 0 else 'more'}"
        print(f"over {way}: {ratio:.2f} x as fast, kernels {kernels}")
    if not stats.difference <= APART[x.dtype.type]:
        raise SystemExit("failed: the ways that are timed must give the same")
    if shares[1] is not None and shares[1] <= 0:
        raise SystemExit("failed: one program must have fewer kernels than op by op")


def main() -> None:
    """All of it; the exit code is 1 if something is not what it promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    small = options.quick or not on_gpu
    d_model, heads, kv_heads = (128, 4, 2) if small else (4096, 32, 8)
    batch, length, num_runs = (2, 128, 10) if small else (4, 4096, 50)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    block = TransformerBlock(
        d_model, heads, num_kv_heads=kv_heads, param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (batch, length, d_model), dtype)
    benchmark(block, levels(block, x), x, num_runs)


if __name__ == "__main__":
    main()
