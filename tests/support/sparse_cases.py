"""Calls of sparse attention, and what is true of them, pair by pair in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import AttentionTiles

BLOCK = 16
TILES = {"block_q": BLOCK, "block_kv": BLOCK}


def draw(
    rng: np.random.Generator,
    *,
    batch: int = 2,
    q_len: int = 128,
    kv_len: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    size: float = 1.0,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random q, k and v; `size` scales the scores."""
    shapes = (
        (batch, q_len, heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, dim),
    )
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    return q * jnp.asarray(size, dtype), k, v


def pairs(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    q_offset: Any = 0,
    kv_offset: Any = 0,
    q_lens: Any = None,
    kv_lens: Any = None,
    segment_ids: Any = None,
) -> np.ndarray:
    """Who attends to whom: bool `[B, T, S]`."""
    i, j = np.arange(q_len)[None, :, None], np.arange(kv_len)[None, None, :]
    seen = np.ones((batch, q_len, kv_len), bool)
    left, right = window[0], 0 if causal else window[1]
    shift = np.asarray(q_offset) - np.asarray(kv_offset)
    at = i + np.reshape(shift, (-1, 1, 1))
    if right is not None:
        seen &= j <= at + right
    if left is not None:
        seen &= j >= at - left
    if q_lens is not None:
        seen &= i < np.reshape(q_lens, (-1, 1, 1))
    if kv_lens is not None:
        seen &= j < np.reshape(kv_lens, (-1, 1, 1))
    if segment_ids is not None:
        ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
        of_q, of_kv = (np.asarray(x) for x in ids)
        seen &= of_q[:, :, None] == of_kv[:, None, :]
    return seen


def in_tiles(a: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """`[..., T, S]` as `[..., R, C, block_q, block_kv]`, zeros beyond."""
    t, s = a.shape[-2:]
    widths = [(0, 0)] * (a.ndim - 2) + [(0, -t % block_q), (0, -s % block_kv)]
    a = np.pad(a, widths)
    t, s = a.shape[-2:]
    a = a.reshape(*a.shape[:-2], t // block_q, block_q, s // block_kv, block_kv)
    return np.moveaxis(a, -3, -2)


def listed(tiles: AttentionTiles, cols: int) -> np.ndarray:
    """Which tiles are listed, bool `[B|1, N|1, R, C]`; none of them twice."""
    indices, counts = np.asarray(tiles.indices), np.asarray(tiles.counts)
    made = np.zeros((*counts.shape, cols), int)
    for at in np.ndindex(counts.shape):
        row = indices[at][: counts[at]]
        assert len(row) == counts[at], "a list is longer than its room"
        assert ((row >= 0) & (row < cols)).all(), "a list is shorter than it says"
        np.add.at(made[at], row, 1)
    assert made.max(initial=0) <= 1, "a tile is listed twice"
    return made.astype(bool)


def spread(kept: np.ndarray, q_len: int, kv_len: int, tiles: Any) -> np.ndarray:
    """A map of tiles as one of pairs, `[B|1, N|1, T, S]`."""
    wide = np.repeat(np.repeat(kept, tiles.block_q, 2), tiles.block_kv, 3)
    return wide[:, :, :q_len, :kv_len]


def probabilities(q: Any, k: Any, allowed: np.ndarray) -> np.ndarray:
    """`[B, N, T, S]` in float64; rows that attend to nothing are zeros."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(allowed, scores, -np.inf)
    p = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def truth(q: Any, k: Any, v: Any, allowed: np.ndarray) -> np.ndarray:
    """Attention by its definition, float64 `[B, T, N, D]`."""
    p = probabilities(q, k, allowed)
    v = np.repeat(np.asarray(v, np.float64), p.shape[1] // v.shape[2], axis=2)
    return np.einsum("bnts,bsnd->btnd", p, v)
