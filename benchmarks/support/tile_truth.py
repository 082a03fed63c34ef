"""What attention to listed tiles is compared with: float64, of one KV head.

As `attention_truth.truth`, where a mask is all that says who attends to whom.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import AttentionTiles


def truth(
    tiles: AttentionTiles,
    causal: bool,
    inputs: Sequence[jax.Array],
    head: int,
    grads: bool = True,
) -> dict[tuple[int, int], Any]:
    """Of the first batch member: out, dq `[S, G, D]` and dk, dv `[S, D]`, with terms.

    inputs: q, k, v and an output gradient, `[B, S, N, D]`, as many keys as queries, a
    multiple of the tiles' side. head: of the keys. grads: else out alone.
    """
    q, k, v, d_o = inputs
    group = q.shape[2] // k.shape[2]
    heads = slice(head * group, (head + 1) * group)
    lists = (tiles.indices[0, heads], tiles.counts[0, heads])
    if tiles.indices.shape[1] == 1:
        lists = tuple(
            jnp.broadcast_to(x[0], (group, *x.shape[2:]))
            for x in (tiles.indices, tiles.counts)
        )
    with jax.enable_x64(True):
        arrays = (q[0, :, heads], k[0, :, head], v[0, :, head], d_o[0, :, heads])
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        got = _one_head(*wide, *lists, causal, tiles.block_q, grads)
        return {(0, head): {name: np.asarray(x) for name, x in got.items()}}


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _one_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_o: jax.Array,
    indices: jax.Array,
    counts: jax.Array,
    causal: bool,
    side: int,
    grads: bool,
) -> dict[str, jax.Array]:
    """Of query heads `[S, G, D]` that share keys `[S, D]`; lists `[G, R, W]`."""
    length, group, d = q.shape
    scale = d**-0.5
    high = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    k_tiles, v_tiles = (x.reshape(-1, side, d) for x in (k, v))

    def size(x: Any) -> Any:  # its squares
        return (x * x).sum(-1)

    def step(sums: Any, row: Any) -> Any:
        at = row * side + jnp.arange(side)
        q_i, d_i = (jax.lax.dynamic_slice_in_dim(x, at[0], side) for x in (q, d_o))
        listed, count = indices[:, row], counts[:, row]  # [G, W], [G]
        real = (jnp.arange(listed.shape[1]) < count[:, None]) & (listed >= 0)
        listed = jnp.maximum(listed, 0)
        keys, values = (x[listed].reshape(group, -1, d) for x in (k_tiles, v_tiles))
        places = (listed[..., None] * side + jnp.arange(side)).reshape(group, -1)
        mask = jnp.repeat(real, side, axis=1)[:, None]
        if causal:
            mask = mask & (places[:, None] <= at[:, None])
        score = jnp.where(mask, scale * high("tgd,gsd->gts", q_i, keys), -jnp.inf)
        p = jax.nn.softmax(score, axis=-1)
        out = high("gts,gse->tge", p, values)
        of_out = {
            "out": out,
            "out terms": high("gts,gs->tg", p * p, size(values)),
        }
        if not grads:
            return sums, of_out
        dp = high("tge,gse->gts", d_i, values)
        delta = (d_i * out).sum(-1).T[..., None]
        ds, terms = p * (dp - delta), p * (abs(dp) + abs(delta))
        by_rows = {
            **of_out,
            "dq": scale * high("gts,gsd->tgd", ds, keys),
            "dq terms": scale**2 * high("gts,gs->tg", terms * terms, size(keys)),
        }
        more = {
            "dk": scale * high("gts,tgd->gsd", ds, q_i),
            "dk terms": scale**2 * high("gts,tg->gs", terms * terms, size(q_i)),
            "dv": high("gts,tge->gse", p, d_i),
            "dv terms": high("gts,tg->gs", p * p, size(d_i)),
        }
        places = jnp.where(mask.any(1), places, length)  # the rest is dropped
        return {
            name: x.at[places].add(more[name], mode="drop") for name, x in sums.items()
        }, by_rows

    zeros = {"dk": jnp.zeros_like(k), "dv": jnp.zeros_like(v)}
    zeros |= {f"{name} terms": jnp.zeros(length) for name in ("dk", "dv")}
    zeros = zeros if grads else {}
    by_keys, by_rows = jax.lax.scan(step, zeros, jnp.arange(length // side))
    by_rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in by_rows.items()}
    found = by_keys | by_rows
    return {n: jnp.sqrt(x) if n.endswith("terms") else x for n, x in found.items()}
