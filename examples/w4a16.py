"""A product with weights in 4 bits, by a CUDA kernel of its own: a decode step's layer.

`quantize` turns weights [K, N] into 4 bits with a scale for each 128 rows of a column;
`product` multiplies up to 16 rows of bfloat16 with them. The kernel is `w4a16.cu`;
without a GPU the same is computed in JAX.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import kernels

SOURCE = Path(__file__).with_suffix(".cu")
GROUP = 128  # rows that share a scale
MAX_ROWS = 16
# Columns from which on CTAs of 64, which read x half as often, are enough for a GPU.
MANY_COLUMNS = 96 * 64
# Of the kernel; what it keeps of half a group of 128 rows is a stage.
WARPS, STAGES = 16, 3
# Where a word has number 2 pair + half of its 8, by pair and half.
BITS = 4 * np.arange(4, dtype=np.uint32)[:, None] + 16 * np.arange(2, dtype=np.uint32)


class Weights(NamedTuple):
    """[K, N] in 4 bits.

    words: uint32 `[K / 32, N / 32, 32, 4]`, 8 numbers each, as the kernel reads them.
    scales: float32 `[K / 128, N]`.
    """

    words: jax.Array
    scales: jax.Array


@jax.jit
def quantize(w: jax.Array) -> Weights:
    """Weights [K, N], K a multiple of 128 and N of 32, rounded to 4 bits.

    A number n of 0 to 15 stands for (n - 8) times its scale.
    """
    k, n = w.shape
    groups = w.astype(jnp.float32).reshape(k // GROUP, GROUP, n)
    scales = jnp.max(jnp.abs(groups), axis=1) / 7
    scales = jnp.where(scales == 0, 1, scales)
    numbers = jnp.round(groups / scales[:, None]) + 8
    numbers = jnp.clip(numbers, 0, 15).astype(jnp.uint32)
    # Row 32 b + 8 quad + 2 pair + half, column 32 c + 8 tile + at.
    split = numbers.reshape(k // 32, 4, 4, 2, n // 32, 4, 8)
    words = jnp.sum(split << BITS[..., None, None, None], axis=(2, 3), dtype=jnp.uint32)
    # [b, quad, c, tile, at] to [b, c, lane = 4 at + quad, tile]
    lanes = words.transpose(0, 2, 4, 1, 3).reshape(k // 32, n // 32, 32, 4)
    return Weights(lanes, scales)


def dequantize(weights: Weights) -> jax.Array:
    """float32 [K, N]: what the numbers stand for."""
    words, scales = weights
    bands, columns = words.shape[:2]
    lanes = words.reshape(bands, columns, 8, 4, 4).transpose(0, 3, 1, 4, 2)
    numbers = lanes[:, :, None, None] >> BITS[..., None, None, None] & 15
    whole = numbers.reshape(bands * 32, columns * 32).astype(jnp.float32) - 8
    return whole * jnp.repeat(scales, GROUP, axis=0)


def fallback(x: Any, words: Any, scales: Any, m: Any, k: Any, n: Any) -> jax.Array:
    """What the kernel computes, in JAX."""
    w = dequantize(Weights(words, scales))
    exact = partial(jnp.dot, precision="highest")
    return exact(x.astype(jnp.float32), w).astype(x.dtype)


def product(x: jax.Array, weights: Weights) -> jax.Array:
    """x [M, K] in bfloat16, M at most 16, times the weights: bfloat16 [M, N]."""
    (m, k), n = x.shape, weights.scales.shape[1]
    if m > MAX_ROWS or x.dtype != jnp.bfloat16 or weights.words.shape[0] * 32 != k:
        raise ValueError(
            f"product: x must be bfloat16 [M, {weights.words.shape[0] * 32}] with M at "
            f"most {MAX_ROWS}, got {x.dtype}{list(x.shape)}"
        )
    bands = 2 if n % 64 == 0 and n >= MANY_COLUMNS else 1
    eights = 1 if m <= 8 else 2  # of rows of x, which the tensor cores take at a time
    stage = eights * 8 * GROUP + bands * 32 * (GROUP // 4 + 4)  # bytes: x, w, scales
    sums = eights * 8 * (bands * 32 + 4) * 4  # of a warp, at the end
    return kernels.kernel_call(
        kernels.from_cuda(SOURCE, f"w4a16<{bands}, {eights}>"),
        x,
        weights.words,
        weights.scales,
        out=jax.ShapeDtypeStruct((m, n), x.dtype),
        scalars=(m, k, n),
        grid=n // 32 // bands,
        block=32 * WARPS,
        shared_memory=WARPS * max(STAGES * stage, sums),
        fallback=fallback,
    )


def in_a_row(
    multiply: Callable[..., jax.Array], x: jax.Array, layers: list[Any], rounds: int
) -> jax.Array:
    """x times one layer after the other, all of them so many times."""

    def once(_: Any, x: jax.Array) -> jax.Array:
        for w in layers:
            x = multiply(x, w)
        return x

    return jax.lax.fori_loop(0, rounds, once, x)


def seconds(
    multiply: Callable[..., jax.Array], x: jax.Array, layers: list[Any]
) -> float:
    """Seconds of a product, of many in a row, whose weights do not fit in L2."""
    rounds = 20
    run = jax.jit(lambda x, layers: in_a_row(multiply, x, layers, rounds))
    times = []
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(run(x, layers))
        times.append(time.perf_counter() - start)
    return median(times[2:]) / len(layers) / rounds


def main() -> None:
    has_gpu = jax.default_backend() == "gpu"
    k, n, count = (8192, 8192, 16) if has_gpu else (512, 256, 2)
    keys = jax.random.split(jax.random.key(0), count)
    # Products of about the size of x.
    plain = [jax.random.normal(key, (k, n), jnp.bfloat16) / k**0.5 for key in keys]
    layers = [quantize(w) for w in plain]
    bits = 8 * sum(x.nbytes for x in layers[0]) / plain[0].size
    print(f"weights [{k}, {n}] in {bits:.2f} bits a number")
    for m in (1, 4, 16):
        x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
        got = product(x, layers[0]).astype(jnp.float32)
        want = jnp.dot(
            x.astype(jnp.float32), dequantize(layers[0]), precision="highest"
        )
        wrong = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
        assert wrong < 2**-8, wrong  # half a unit in the last place of the largest
        line = f"{m:2d} rows: largest difference {wrong:.1e} of the largest result"
        if has_gpu:
            ours, theirs = seconds(product, x, layers), seconds(jnp.dot, x, plain)
            line += f"; {1e6 * ours:.1f} us, in bfloat16 {1e6 * theirs:.1f} us"
        print(line)
    if not has_gpu:
        print("no NVIDIA GPU here: JAX computed it, and nothing was timed")


if __name__ == "__main__":
    main()
