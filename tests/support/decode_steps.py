"""A small model's decode step over a pool, and the same by dense attention."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvblock as kv

LAYERS, WIDTH, HEADS, KV_HEADS, DIM = 3, 32, 4, 2, 16
BLOCK, BLOCKS, THETA = 4, 64, 1e4
SEQUENCES, MOST = 3, 4  # sequences, and blocks of each
TARGETS = ("kvblock_append", "kvblock_copy", "kvblock_paged_attention")
# As the kernels take it, and as precise as plain JAX is.
DTYPE = "bfloat16" if jax.default_backend() == "gpu" else "float32"
BAR = 0.12 if DTYPE == "bfloat16" else 2e-5


class Layers(NamedTuple):
    """The weights of all layers, each `[layers, in, out]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array


class Where(NamedTuple):
    """Of a step: int32 arrays of the device."""

    tables: jax.Array
    lens: jax.Array
    starts: jax.Array


def weights(rng: np.random.Generator) -> Layers:
    shapes = [(WIDTH, HEADS * DIM), *[(WIDTH, KV_HEADS * DIM)] * 2]
    shapes += [(HEADS * DIM, WIDTH)]
    return Layers(
        *(
            jnp.asarray(rng.standard_normal((LAYERS, *s)) / s[0] ** 0.5, DTYPE)
            for s in shapes
        )
    )


def empty_pool(contiguous: bool = True) -> kv.KVPool:
    spec = kv.BlockSpec(LAYERS, 2, BLOCK, KV_HEADS, DIM, DTYPE)
    return kv.KVPool.zeros(spec, BLOCKS, contiguous=contiguous)


def tables_of(rng: np.random.Generator) -> jax.Array:
    ids = rng.permutation(BLOCKS)[: SEQUENCES * MOST]
    return jnp.asarray(ids.reshape(SEQUENCES, MOST), jnp.int32)


def at(tables: Any, length: Any) -> Where:
    """Every sequence has `length` tokens, of which the last one is new."""
    return Where(
        tables,
        jnp.broadcast_to(jnp.asarray(length, jnp.int32), SEQUENCES),
        jnp.arange(SEQUENCES + 1, dtype=jnp.int32),
    )


def step(
    pool: kv.KVPool, layers: Layers, x: jax.Array, where: Where, append: str = "rope"
) -> tuple[kv.KVPool, jax.Array]:
    """The pool with a token of each sequence, x `[sequences, WIDTH]`, and the result.

    `append`: "rope" rotates and appends in one call, "kv" appends what came.
    """
    position = where.lens - 1
    block = jnp.take_along_axis(where.tables, position[:, None] // BLOCK, 1)[:, 0]
    slots = block * BLOCK + position % BLOCK

    def one(carry: Any, of: Any) -> Any:
        (pool, x), (layer, w) = carry, of
        q, k, v = ((x @ a).reshape(len(x), -1, DIM) for a in (w.q, w.k, w.v))
        if append == "rope":
            q, pool = kv.rope_append(q, k, v, pool, layer, slots, position, theta=THETA)
        else:
            pool = kv.append_kv(pool, layer, k, v, slots)
        seen = kv.paged_attention(
            q, pool, layer, where.tables, where.lens, query_start=where.starts
        )
        return (pool, x + seen.reshape(len(x), -1) @ w.out), None

    order = jnp.arange(LAYERS, dtype=jnp.int32)
    (pool, x), _ = jax.lax.scan(one, (pool, x), (order, layers))
    return pool, x


def dense(layers: Layers, x: Any, append: str = "rope") -> np.ndarray:
    """All tokens `[sequences, tokens, WIDTH]` at once, in float64."""
    x = np.asarray(x, np.float64)
    length = x.shape[1]
    half = DIM // 2
    angle = np.arange(length)[:, None] * THETA ** -(np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    hidden = np.triu(np.ones((length, length), bool), 1)

    def turned(y: np.ndarray) -> np.ndarray:
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for i in range(LAYERS):
        w = [np.asarray(a[i], np.float64) for a in layers]
        q, k, v = ((x @ a).reshape(*x.shape[:2], -1, DIM) for a in w[:3])
        if append == "rope":
            q, k = turned(q), turned(k)
        k, v = (np.repeat(a, HEADS // KV_HEADS, 2) for a in (k, v))
        scores = np.einsum("btnd,bsnd->bnts", q, k) / DIM**0.5
        scores = np.where(hidden, -np.inf, scores)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        seen = np.einsum("bnts,bsnd->btnd", weight, v)
        x = x + seen.reshape(*x.shape[:2], -1) @ w[3]
    return x


def pointers(pool: kv.KVPool) -> list[int]:
    return [a.unsafe_buffer_pointer() for a in pool.arrays]


def pool_copies(text: str, pool: kv.KVPool) -> list[str]:
    """The copies of a compiled program that are as large as an array of the pool."""
    sizes = {a.size for a in pool.arrays}
    kinds = "copy|copy-start|convert|bitcast-convert|dynamic-update-slice|concatenate"
    found = []
    for line in text.splitlines():
        made = re.search(rf"= \(?\w+\[([\d,]+)\]\S* ({kinds})\(", line)
        if made and np.prod([int(n) for n in made[1].split(",")]) in sizes:
            found.append(line.strip())
    return found
