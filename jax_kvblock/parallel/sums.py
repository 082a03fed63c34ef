"""What calls give, put together: parts of rows' attention, and of gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import accumulator
from jax_kvblock.attention.merge import merge_arrays
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.parallel.local import Arrays
from jax_kvblock.parallel.pieces import Side


class Merged:
    """Rows' attention from parts over different keys, in float32 as they come."""

    def __init__(self, q: jax.Array, v: jax.Array) -> None:
        self._q = q
        self._dtype = q.dtype
        self._wide = accumulator(q.dtype)
        lead, (tokens, heads) = q.shape[:-3], q.shape[-3:-1]
        self._out: Any = None
        self._lse: Any = None
        self._shapes = ((*lead, tokens, heads, v.shape[-1]), (*lead, heads, tokens))

    def add(self, out: jax.Array, lse: jax.Array) -> None:
        """A part: out `[B, T, N, Dv]`, lse `[B, N, T]`."""
        if self._lse is None:
            self._out, self._lse = out, lse
            return
        outs = tuple(a.astype(self._wide) for a in (self._out, out))
        lses = tuple(jnp.swapaxes(a, -1, -2) for a in (self._lse, lse))
        self._out, merged = merge_arrays(outs, lses)
        self._lse = jnp.swapaxes(merged, -1, -2)

    def so_far(self) -> Any:
        return self._lse

    def result(self, sinks: Any, rows: Side) -> tuple[jax.Array, jax.Array]:
        """out in the queries' dtype, and lse; a row's sink counts here, once."""
        if self._lse is None:  # nobody sees anything
            out, lse = self._shapes
            empty = (jnp.zeros(out, self._dtype), jnp.full(lse, -jnp.inf, self._wide))
            self._out, self._lse, _ = vary_alike([*empty, self._q])
        if sinks is not None:
            self._with_sinks(sinks, rows)
        return self._out.astype(self._dtype), self._lse

    def _with_sinks(self, sinks: jax.Array, rows: Side) -> None:
        sink = sinks.astype(self._wide)[0, :, None]
        there = are_there(rows, self._lse.ndim == 3)
        lse = jnp.where(there, jnp.logaddexp(self._lse, sink), self._lse)
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(self._lse - lse))
        wide = self._out.astype(self._wide)
        self._out = wide * jnp.swapaxes(share, -1, -2)[..., None]
        self._lse = lse


def are_there(rows: Side, batch: bool) -> Any:
    """Which rows are of a document and within its length, `[B, 1, T]` or `[1, T]`."""
    run = rows.whole
    if batch:
        row = jnp.arange(rows.length, dtype=jnp.int32)
        count = (run.last - run.first)[:, None, None]
        return row < count
    row = jnp.arange(rows.length, dtype=jnp.int32)
    document = jnp.searchsorted(rows.starts[1:], row, side="right")
    inside = document < run.last.shape[0]
    document = jnp.minimum(document, run.last.shape[0] - 1)
    found = inside & (row >= run.first[document]) & (row < run.last[document])
    return found[None]


class Gradients:
    """dq, dk and dv of this device's rows, added up in float32."""

    def __init__(self, x: Arrays) -> None:
        self._like = x
        self._wide = accumulator(x[0].dtype)
        self._dq: Any = None

    def add(self, found: list[Arrays], keys: Arrays, more: Arrays = ()) -> Arrays:
        """Adds what calls on the same keys give to dq; their dk and dv.

        more: dk and dv of these keys from elsewhere, which are added. One part alone
        stays as a kernel gives it.
        """
        for dq, _, _ in found:
            wide = dq.astype(self._wide)
            self._dq = wide if self._dq is None else self._dq + wide
        pairs = [tuple(pair) for _, *pair in found] + ([more] if more else [])
        if not pairs:
            return tuple(self._zeros(a) for a in keys)
        if len(pairs) == 1:
            return pairs[0]
        wides = [[a.astype(self._wide) for a in pair] for pair in pairs]
        return tuple(sum(parts[1:], parts[0]) for parts in zip(*wides, strict=True))

    def result(self, d_keys: Arrays) -> Arrays:
        dq = self._zeros(self._like[0]) if self._dq is None else self._dq
        made = (dq, *d_keys)
        return tuple(g.astype(a.dtype) for g, a in zip(made, self._like, strict=True))

    def _zeros(self, like: jax.Array) -> jax.Array:
        zeros, _ = vary_alike([jnp.zeros(like.shape, self._wide), like])
        return zeros
