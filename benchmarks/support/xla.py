"""The same work in plain jax.numpy, for XLA to compile: the peer of every run.

There are several ways to say the same to XLA, and its best is what counts: pools as one
array or one per layer, and as integers, because on the CPU a scatter of bfloat16 goes
by way of float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Reads and writes by ids that are known to be good: the fastest that jnp offers.
READ: dict[str, Any] = {"mode": "promise_in_bounds"}
WRITE: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


def gather(order: tuple[int, ...], pool: Any, ids: jax.Array) -> jax.Array:
    if isinstance(pool, tuple):
        blocks = jnp.stack([layer.at[ids].get(**READ) for layer in pool], 1)
    else:
        blocks = pool.at[ids].get(**READ)
    return blocks.transpose(order)


def scatter(
    order: tuple[int, ...], pool: Any, ids: jax.Array, blocks: jax.Array
) -> Any:
    blocks = blocks.transpose(order)
    if isinstance(pool, tuple):
        return tuple(
            layer.at[ids].set(blocks[:, i], **WRITE) for i, layer in enumerate(pool)
        )
    return pool.at[ids].set(blocks, **WRITE)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def gather_bits(order: tuple[int, ...], pool: jax.Array, ids: jax.Array) -> jax.Array:
    found = gather(order, _bits(pool), ids)
    return jax.lax.bitcast_convert_type(found, pool.dtype)


def scatter_bits(
    order: tuple[int, ...], pool: jax.Array, ids: jax.Array, blocks: jax.Array
) -> jax.Array:
    new = scatter(order, _bits(pool), ids, _bits(blocks))
    return jax.lax.bitcast_convert_type(new, pool.dtype)


def loop_gather(order: tuple[int, ...], pool: jax.Array, ids: jax.Array) -> jax.Array:
    def one(i: Any, out: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_index_in_dim(pool, ids[i]).transpose(order)
        return jax.lax.dynamic_update_index_in_dim(out, block, i, 0)

    shape = jax.eval_shape(lambda x: x[: len(ids)].transpose(order), pool)
    return jax.lax.fori_loop(0, len(ids), one, jnp.zeros(shape.shape, shape.dtype))


def loop_scatter(
    order: tuple[int, ...], pool: jax.Array, ids: jax.Array, blocks: jax.Array
) -> jax.Array:
    def one(i: Any, pool: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_index_in_dim(blocks, i).transpose(order)
        return jax.lax.dynamic_update_index_in_dim(pool, block, ids[i], 0)

    return jax.lax.fori_loop(0, len(ids), one, pool)
