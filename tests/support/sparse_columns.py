"""Columns of the table of transforms × ops for `jax_kvblock.sparse` and `.fp8`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from columns import DTYPE, LINEAR_NOWHERE, Column, exact_einsum, narrow, plain_attention

from jax_kvblock.sparse import PooledThreshold, sparse_attention

TILE, TILES, N, K, D = 16, 2, 4, 2, 8
LENGTH = TILES * TILE
# Of two tiles a row lists the one whose means have the larger product.
ONE = PooledThreshold(
    tau=None, capacity=1, sinks=0, piece=TILE, block_q=TILE, block_kv=TILE
)


def attend(q: Any, k: Any, v: Any) -> Any:
    return sparse_attention(*narrow(q, k, v), ONE)


def plain_attend(q: Any, k: Any, v: Any) -> Any:
    q, k, v = narrow(q, k, v)
    means = (
        x.reshape(-1, TILES, TILE, *x.shape[2:]).mean(2, dtype=jnp.float32)
        for x in (q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))
    )
    queries, keys = (x.astype(DTYPE).astype(jnp.float32) for x in means)
    best = exact_einsum("brnd,bcnd->bnrc", queries, keys).argmax(-1)
    seen = best[..., None] == jnp.arange(TILES)
    mask = jnp.repeat(jnp.repeat(seen, TILE, 2), TILE, 3)
    return plain_attention(q, k, v, mask)[0]


ELSEWHERE = {
    "sparse_attention": Column(
        "sparse_attention",
        attend,
        plain_attend,
        [(1, LENGTH, heads, D) for heads in (N, K, K)],
        heads=[2, 2, 2],
        out_heads=2,
        exact=False,
        missing=LINEAR_NOWHERE,
    )
}
_PLAIN = "plain jnp, but for what sparse_attention has; tests/sparse/"
NOT_ELSEWHERE = {
    "create_sparse_attention": "no arrays",
    "evaluate_selector": "for no transform",
    "fp8_attention": "first gradients of reverse mode alone; tests/fp8/",
    "gate_loss": _PLAIN,
    "init_gate": "no arrays",
    "quantize_qkv": "rounds; tests/fp8/test_quantize.py",
    "refresh_summary": _PLAIN,
    "select_pages": _PLAIN,
    "select_tiles": _PLAIN,
    "summarize_pages": _PLAIN,
    "tile_mass": _PLAIN,
    "train_gate": "for no transform",
}
