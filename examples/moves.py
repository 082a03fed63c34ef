"""The block moves of the demo, each one jitted call of the library.

Updated pools are donated, so they change in place; ids are operands, so other blocks do
not compile anything again.
"""

from functools import partial

import jax

from jax_kvblock import KVPool, gather_blocks, scatter_blocks, transfer_blocks


@jax.jit
def to_universal(pool: KVPool, ids: jax.Array) -> jax.Array:
    """Blocks [n, heads, layers, outer, tokens, dim]: heads first."""
    return gather_blocks(pool, ids, layout="universal")


@jax.jit
def cut_heads(pool: KVPool, ids: jax.Array) -> list[jax.Array]:
    """The same blocks, cut into one slice for each tensor-parallel rank."""
    ranks = range(pool.spec.num_kv_heads)
    return [gather_blocks(pool, ids, heads=(rank, rank + 1)) for rank in ranks]


@partial(jax.jit, donate_argnums=0)
def merge_heads(pool: KVPool, ids: jax.Array, slices: list[jax.Array]) -> KVPool:
    """Put the ranks' slices back together in the blocks of a pool."""
    for rank, blocks in enumerate(slices):
        pool = scatter_blocks(pool, ids, blocks, heads=(rank, rank + 1))
    return pool


@partial(jax.jit, donate_argnums=0)
def fetch_blocks(
    pool: KVPool, ids: jax.Array, source: KVPool, source_ids: jax.Array
) -> KVPool:
    """Copy blocks from a pool of any layout, in any memory."""
    return transfer_blocks(source, source_ids, pool, ids)
