"""What attention benchmarks compare results with: float64, of two heads of each shape.

Nobody's own results are the measure of the others'. The first and the last head of keys
are computed where the arrays lie, in blocks of queries, and compared row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 512  # queries at a time
# What a row may be off by, in parts of its norm and of that of its terms (root of the
# sum of squares), which may cancel.
ALLOWED = 0.02
NAMES = ("out", "dq", "dk", "dv")


def truth(case: Any, inputs: Sequence[jax.Array]) -> dict[tuple[int, int], Any]:
    """By (batch member, KV head): out, dq `[S, G, D]` and dk, dv `[S, D]`, float64,
    and, by the same names with " terms", the norms of the terms of their rows.

    inputs: q, k, v and an output gradient, `[B, S, N, D]`. A packed case has its batch
    members, or its lengths, for sequences.
    """
    lengths = case.lengths or (case.length,)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    back = case.length if case.window is None else case.window
    ahead = 0 if case.causal or case.window is not None else case.length
    group = case.num_heads // case.num_kv_heads
    found = {}
    for b, h in {(0, 0), (case.batch - 1, case.num_kv_heads - 1)}:
        heads = slice(h * group, (h + 1) * group)
        q, k, v, d_o = inputs
        with jax.enable_x64(True):
            arrays = (q[b, :, heads], k[b, :, h], v[b, :, h], d_o[b, :, heads])
            wide = [jnp.asarray(x, jnp.float64) for x in arrays]
            got = _one_head(*wide, jnp.asarray(owner, jnp.int32), back, ahead)
            found[b, h] = {name: np.asarray(x) for name, x in got.items()}
    return found


def truth_of_few(
    lengths: np.ndarray, causal: bool, inputs: Sequence[jax.Array]
) -> dict[tuple[int, int], Any]:
    """As `truth`, "out" alone, where the queries are the last ones of their keys.

    inputs: q `[B, T, N, D]`, k and v `[B, S, K, D]`; batch member b has `lengths[b]`
    keys.
    """
    q, k, v = inputs
    heads = k.shape[2]
    group, queries = q.shape[2] // heads, q.shape[1]
    found = {}
    for b, h in {(0, 0), (q.shape[0] - 1, heads - 1)}:
        n = int(lengths[b])
        rows = np.asarray(q[b, :, h * group : (h + 1) * group], np.float64)
        keys, values = (np.asarray(x[b, :n, h], np.float64) for x in (k, v))
        scores = np.einsum("tgd,sd->tgs", rows, keys) * q.shape[-1] ** -0.5
        if causal:
            last = n - queries + np.arange(queries)
            scores = np.where(np.arange(n) > last[:, None, None], -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        squares = np.einsum("tgs,s->tg", p * p, (values * values).sum(-1))
        found[b, h] = {
            "out": np.einsum("tgs,se->tge", p, values),
            "out terms": np.sqrt(squares),
        }
    return found


@jax.jit
def _one_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_o: jax.Array,
    owner: jax.Array,
    back: Any,
    ahead: Any,
) -> dict[str, jax.Array]:
    """What `truth` has, of query heads `[S, G, D]` that share keys `[S, D]`."""
    length, _, d = q.shape
    block = min(BLOCK, length)
    scale = d**-0.5
    high = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    keys = jnp.arange(length)

    def size(x: Any) -> Any:  # its squares
        return (x * x).sum(-1)

    def step(sums: Any, first: Any) -> Any:
        # The last block ends with the rows; what it has again counts once.
        at = jnp.minimum(first, length - block)
        rows = at + jnp.arange(block)
        q_i, d_i = (jax.lax.dynamic_slice_in_dim(x, at, block) for x in (q, d_o))
        apart = keys[None] - rows[:, None]
        mask = (apart <= ahead) & (apart >= -back)
        mask &= owner[rows][:, None] == owner[None]
        score = jnp.where(mask[:, None], scale * high("tgd,sd->tgs", q_i, k), -jnp.inf)
        p = jax.nn.softmax(score, axis=-1)
        out = high("tgs,se->tge", p, v)
        dp = high("tge,se->tgs", d_i, v)
        delta = (d_i * out).sum(-1, keepdims=True)
        ds, terms = p * (dp - delta), p * (abs(dp) + abs(delta))
        by_rows = {
            "out": out,
            "out terms": high("tgs,s->tg", p * p, size(v)),
            "dq": scale * high("tgs,sd->tgd", ds, k),
            "dq terms": scale**2 * high("tgs,s->tg", terms * terms, size(k)),
        }
        fresh = (rows >= first)[:, None, None]
        p, ds, terms = (jnp.where(fresh, x, 0) for x in (p, ds, terms))
        more = {
            "dk": scale * high("tgs,tgd->sd", ds, q_i),
            "dk terms": scale**2 * high("tgs,tg->s", terms * terms, size(q_i)),
            "dv": high("tgs,tge->se", p, d_i),
            "dv terms": high("tgs,tg->s", p * p, size(d_i)),
        }
        return {name: x + more[name] for name, x in sums.items()}, by_rows

    starts = jnp.arange(0, length, block)
    zeros = {"dk": jnp.zeros_like(k), "dv": jnp.zeros_like(v)}
    zeros |= {f"{name} terms": jnp.zeros(length) for name in ("dk", "dv")}
    by_keys, by_rows = jax.lax.scan(step, zeros, starts)

    def joined(blocks: Any) -> Any:
        whole = blocks[:-1].reshape(-1, *blocks.shape[2:])
        return jnp.concatenate([whole, blocks[-1][len(whole) - length :]])

    found = by_keys | {name: joined(x) for name, x in by_rows.items()}
    return {n: jnp.sqrt(x) if n.endswith("terms") else x for n, x in found.items()}


def check(
    results: Sequence[np.ndarray],
    known: dict[tuple[int, int], Any],
    sample: int = 1,
) -> float:
    """Raises where a row is off; returns the largest error in parts of what it may be.

    results: out, or out, dq, dk and dv, `[B, S, heads, D]`, of every `sample`-th row.
    """
    worst = 0.0
    for name, x in zip(NAMES, results, strict=False):
        if not np.isfinite(x).all():
            raise AssertionError(f"{name} is not finite")
        for (b, h), want in known.items():
            rows, terms = want[name][::sample], want[f"{name} terms"][::sample]
            group = rows.shape[1] if rows.ndim == 3 else 1
            got = np.asarray(x[b, :, h * group : (h + 1) * group], np.float64)
            rows, terms = rows.reshape(got.shape), terms.reshape(got.shape[:2])
            size = np.linalg.norm(rows, axis=-1)
            allowed = np.maximum(ALLOWED * (size + terms), np.finfo(np.float64).tiny)
            share = np.linalg.norm(got - rows, axis=-1) / allowed
            if not share.max() <= 1:
                row, head = np.unravel_index(np.argmax(share), share.shape)
                raise AssertionError(
                    f"{name}: {(share > 1).sum()} of {share.size} rows are wrong, that "
                    f"of batch member {b}, position {row * sample} and head "
                    f"{h * group + head} by {share.max():.3g} times what is allowed"
                )
            worst = max(worst, float(share.max()))
    return worst
