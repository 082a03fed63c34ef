"""A small cache of prefixes, over a pool that takes next to nothing."""

from __future__ import annotations

import jax.numpy as jnp

from jax_kvblock import BlockManager, PrefixCache


def small(num_blocks: int = 16, block_size: int = 4, **options: object) -> PrefixCache:
    manager = BlockManager(
        1,
        block_size,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=num_blocks,
        dtype=jnp.float32,
    )
    return PrefixCache(manager, model="small", **options)  # type: ignore[arg-type]
