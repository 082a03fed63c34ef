"""What the demo's block moves look like in plain jnp: the peers in its table.

A pool is its bare array here: NHD is [blocks, layers, outer, tokens, heads, dim], HND
has heads before tokens, a universal block is [heads, layers, outer, tokens, dim].

jnp does not compute on an array in host memory, so `merge_heads` and `fetch_blocks`
take such a pool to the device first (`on_host`), and `merge_heads` brings it back.
"""

from functools import partial

import jax
import jax.numpy as jnp

NHD_TO_UNIVERSAL = (0, 4, 1, 2, 3, 5)
UNIVERSAL_TO_HND = (0, 2, 3, 1, 4, 5)


@partial(jax.jit, donate_argnums=0)
def store_prompt(
    data: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Write k and v [layers, T, heads, dim] to the NHD blocks of one sequence."""
    block_size = data.shape[3]
    position = jnp.arange(k.shape[1])
    block, offset = ids[position // block_size], position % block_size
    kv = jnp.stack([k, v], axis=2).swapaxes(0, 1).astype(data.dtype)
    return data.at[block, :, :, offset].set(kv)


@jax.jit
def to_universal(data: jax.Array, ids: jax.Array) -> jax.Array:
    """Gather NHD blocks as universal ones."""
    return jnp.take(data, ids, axis=0).transpose(NHD_TO_UNIVERSAL)


@jax.jit
def cut_heads(data: jax.Array, ids: jax.Array) -> list[jax.Array]:
    """Gather NHD blocks as one universal slice for each head."""
    heads = range(data.shape[4])
    blocks = [jnp.take(data[..., head : head + 1, :], ids, axis=0) for head in heads]
    return [block.transpose(NHD_TO_UNIVERSAL) for block in blocks]


@partial(jax.jit, donate_argnums=0, static_argnames="on_host")
def merge_heads(
    data: jax.Array, ids: jax.Array, slices: list[jax.Array], *, on_host: bool
) -> jax.Array:
    """Scatter one universal slice for each head to HND blocks."""
    if on_host:
        data = jax.device_put(data, jax.memory.Space.Device)
    for head, blocks in enumerate(slices):
        piece = blocks.transpose(UNIVERSAL_TO_HND)
        data = data.at[ids, :, :, head : head + 1].set(piece)
    return jax.device_put(data, jax.memory.Space.Host) if on_host else data


@partial(jax.jit, donate_argnums=0, static_argnames="on_host")
def fetch_blocks(
    data: jax.Array,
    ids: jax.Array,
    source: jax.Array,
    source_ids: jax.Array,
    *,
    on_host: bool,
) -> jax.Array:
    """Copy blocks of one HND pool to another's."""
    if on_host:
        source = jax.device_put(source, jax.memory.Space.Device)
    return data.at[ids].set(jnp.take(source, source_ids, axis=0))


@partial(jax.jit, donate_argnums=0)
def nhd_to_hnd(
    data: jax.Array, ids: jax.Array, source: jax.Array, source_ids: jax.Array
) -> jax.Array:
    """Copy blocks of an NHD pool to an HND pool."""
    return data.at[ids].set(jnp.take(source, source_ids, axis=0).swapaxes(3, 4))
