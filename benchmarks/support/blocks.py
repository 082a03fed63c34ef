"""Random blocks in every layout, and pools that hold them: what benchmarks move."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import BlockSpec
from support import xla

AXES = {"NHD": "LOTHD", "HND": "LOHTD", "universal": "HLOTD"}


def axis_order(src: str, dst: str) -> tuple[int, ...]:
    """The transpose that takes `[n, *src]` to `[n, *dst]`."""
    return (0, *(1 + AXES[src].index(axis) for axis in AXES[dst]))


def run_bytes(spec: BlockSpec, src: str, dst: str) -> int:
    """The bytes that lie together in both layouts."""
    run = spec.dtype.itemsize
    orders = ([a for a in AXES[x] if spec.sizes[a] > 1] for x in (src, dst))
    for a, b in zip(*(reversed(order) for order in orders), strict=True):
        if a != b:
            break
        run *= spec.sizes[a]
    return run


class Data:
    """Random blocks of one shape in every layout, and pools that hold them.

    A pool is a quarter larger than its blocks, which lie in it in random order. The
    other layouts are made by XLA, and samples of them checked against NumPy, so that
    nothing is compared with itself.
    """

    def __init__(self, case: Any, nbytes: int, seed: int = 0) -> None:
        nl, no, nt, nh, hd = case.dims
        self.name = case.name
        self.spec = BlockSpec(nl, no, nt, nh, hd, case.dtype)
        self.n = max(4, nbytes // self.spec.block_bytes)
        self.num_blocks = self.n + max(1, self.n // 4)
        rng = np.random.default_rng(seed)
        self.host_ids = rng.permutation(self.num_blocks)[: self.n].astype(np.int32)
        self.ids = jnp.asarray(self.host_ids)
        self.moved = 2 * self.n * self.spec.block_bytes  # read and written
        universal = random_blocks(
            (self.n, nh, nl, no, nt, hd), self.spec.dtype.name, seed
        )
        self.blocks = {"universal": universal}
        for layout in ("NHD", "HND"):
            self.blocks[layout] = _transpose(universal, axis_order("universal", layout))
        self.pools = {
            layout: place(self.blocks[layout], self.ids, self.num_blocks)
            for layout in AXES
        }
        self._check_samples()

    @functools.cached_property
    def layers(self) -> dict[str, tuple[jax.Array, ...]]:
        """The NHD and HND pools as one array per layer."""
        count = self.spec.num_layers
        return {
            layout: tuple(_layer(self.pools[layout], i) for i in range(count))
            for layout in ("NHD", "HND")
        }

    def pool_spec(self, layout: str) -> BlockSpec:
        return self.spec.replace(layout=layout)

    def _check_samples(self) -> None:
        for i in (0, self.n - 1):
            universal = np.asarray(self.blocks["universal"][i])
            for layout, pool in self.pools.items():
                order = [AXES["universal"].index(axis) for axis in AXES[layout]]
                block = universal.transpose(order)
                for found in (self.blocks[layout][i], pool[int(self.host_ids[i])]):
                    if np.asarray(found).tobytes() != block.tobytes():
                        raise AssertionError(f"{self.name}: XLA made wrong {layout}")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_blocks(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Random bits that are finite, normal numbers, so that every path keeps them.

    An integer hash of each element's number (lowbias32, by Chris Wellons), which
    XLA fuses into one write; jax.random would take several times the memory.
    """
    if dtype != "bfloat16":
        raise NotImplementedError(f"benchmarks use bfloat16, got {dtype}")
    x = jax.lax.iota(jnp.uint32, math.prod(shape)) ^ np.uint32(seed * 0x9E3779B1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    x = ((x ^ (x >> 16)) & 0xBFFF) | 0x2000
    bits = x.astype(jnp.uint16).reshape(shape)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


_transpose = jax.jit(jnp.transpose, static_argnums=1)


@functools.partial(jax.jit, static_argnums=2)
def place(blocks: jax.Array, ids: jax.Array, num_blocks: int) -> jax.Array:
    empty = jnp.zeros((num_blocks, *blocks.shape[1:]), blocks.dtype)
    return empty.at[ids].set(blocks, **xla.WRITE)


@jax.jit
def _layer(pool: jax.Array, layer: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(pool, layer, 1, keepdims=False)
