"""Blocks of a `KVPool`, gathered and rounded to int8 by a CUDA kernel of one's own.

The library moves blocks; what else should happen on the way is yours: here they shrink
to half. The kernel is `quantize_blocks.cu`; without a GPU the same is computed in JAX.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_kvblock as kv
from jax_kvblock import kernels

SOURCE = Path(__file__).with_suffix(".cu")


def quantize_blocks(pool: kv.KVPool, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks `ids`, int32 [N], of a bfloat16 pool of one array in NHD or HND.

    Returns int8 rows `[N, *block]` and float32 scales, one for each row of head_dim:
    a number times its scale is what the block has, to half a scale. An id that is none
    gives zeros.
    """
    data = pool.data
    if not isinstance(data, jax.Array) or data.dtype != jnp.bfloat16:
        raise ValueError("quantize_blocks: the pool must be one array in bfloat16")
    dim = data.shape[-1]
    if dim not in (64, 128, 256):
        raise ValueError(f"quantize_blocks: head_dim must be 64, 128, 256, got {dim}")
    n, (blocks, *block, _) = ids.shape[0], data.shape
    of_block = data[0].size // dim
    rows, scales = kernels.kernel_call(
        kernels.from_cuda(SOURCE, "quantize_blocks", options=[f"-DDIM={dim}"]),
        data,
        ids,
        out=(
            jax.ShapeDtypeStruct((n, *block, dim), jnp.int8),
            jax.ShapeDtypeStruct((n, *block), jnp.float32),
        ),
        scalars=(blocks, of_block, n),
        grid=max(1, -(-n * of_block * dim // 8 // 256)),
        block=256,
        fallback=fallback,
    )
    return rows, scales


def fallback(data: Any, ids: Any, *sizes: Any) -> tuple[jax.Array, jax.Array]:
    """What the kernel computes, in JAX."""
    there = (ids >= 0) & (ids < data.shape[0])
    x = jnp.take(data, ids, axis=0, mode="clip").astype(jnp.float32)
    x = jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    largest = jnp.max(jnp.abs(x), axis=-1)
    inverse = jnp.where(largest > 0, 127 / largest, 0)
    rows = jnp.round(x * inverse[..., None]).astype(jnp.int8)
    return rows, largest / 127


def main() -> None:
    spec = kv.BlockSpec(4, 2, 16, 2, 128, jnp.bfloat16)
    noise = jax.random.normal(jax.random.key(0), (32, *spec.block_shape), spec.dtype)
    pool = kv.KVPool.wrap(noise, spec)
    ids = jnp.asarray([3, 31, 3, 8], jnp.int32)
    rows, scales = jax.jit(quantize_blocks)(pool, ids)
    blocks = pool.data[ids]
    back = rows.astype(jnp.float32) * scales[..., None]
    wrong = jnp.max(jnp.abs(back - blocks.astype(jnp.float32)) / scales[..., None])
    assert wrong <= 0.501, wrong
    sizes = rows.nbytes + scales.nbytes, blocks.nbytes
    print(f"{ids.size} blocks: {sizes[0]:,} bytes for {sizes[1]:,}")
    print(f"the largest difference is {float(wrong):.3f} of a row's scale")
    gpu = jax.default_backend() == "gpu"
    print("by the kernel" if gpu else "in JAX: no NVIDIA GPU is here")


if __name__ == "__main__":
    main()
