"""What calls give, put together: parts of rows' attention, and of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import accumulator
from jax_kvblock.attention.joining import merge_arrays
from jax_kvblock.core.spmd import vary_alike
from jax_kvblock.parallel.local import (
    Arrays,
    backward_call,
    forward_call,
    joined_call,
)
from jax_kvblock.parallel.pieces import Call, Side
from jax_kvblock.parallel.strategy import MOST_ROUNDED


class Merged:
    """Rows' attention from parts over different keys, added up as they come.

    parts: how many there will be.
    """

    def __init__(self, q: jax.Array, v: jax.Array, parts: int) -> None:
        self._q = q
        self._rounded = parts <= MOST_ROUNDED
        self._dtype = q.dtype
        self._wide = accumulator(q.dtype)
        lead, (tokens, heads) = q.shape[:-3], q.shape[-3:-1]
        self._out: Any = None
        self._lse: Any = None
        self._shapes = ((*lead, tokens, heads, v.shape[-1]), (*lead, heads, tokens))

    def attend(self, call: Call, k: jax.Array, v: jax.Array) -> None:
        """Runs a call, and adds what it gives."""
        if self._lse is None:
            self._out, self._lse = forward_call(call, self._q, k, v)
        elif self._rounded:
            x = (self._q, k, v)
            self._out, self._lse = joined_call(call, x, self._out, self._lse)
        else:
            self._add(*forward_call(call, self._q, k, v))

    def _add(self, out: jax.Array, lse: jax.Array) -> None:
        """A part: out `[B, T, N, Dv]`, lse `[B, N, T]`."""
        outs = tuple(a.astype(self._wide) for a in (self._out, out))
        lses = tuple(jnp.swapaxes(a, -1, -2) for a in (self._lse, lse))
        self._out, merged = merge_arrays(outs, lses)
        self._lse = jnp.swapaxes(merged, -1, -2)

    def so_far(self) -> Any:
        """What there is when all calls up to now are done.

        The next call writes over it. Who waits for it has to come before that call, or
        XLA makes a copy.
        """
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
    """dq, dk and dv of this device's rows: dq as the calls come, dk and dv in float32.

    parts: how many calls there will be.
    """

    def __init__(self, x: Arrays, parts: int) -> None:
        self._like = x
        self._wide = accumulator(x[0].dtype)
        self._rounded = parts <= MOST_ROUNDED
        self._dq: Any = None

    def run(self, call: Call, keys: Arrays, lse: Any, delta: Any, d_o: Any) -> Arrays:
        """Runs a call, adds its dq, and gives its dk and dv."""
        x = (self._like[0], *keys)
        before = self._dq if self._rounded else None
        dq, dk, dv = backward_call(call, x, lse, delta, d_o, before)
        if self._rounded:
            self._dq = dq
            return dk, dv
        wide = dq.astype(self._wide)
        self._dq = wide if self._dq is None else self._dq + wide
        return dk, dv

    def so_far(self) -> Any:
        """What there is when all calls up to now are done; see `Merged.so_far`."""
        return self._dq

    def of_keys(
        self, found: Sequence[Arrays], keys: Arrays, more: Arrays = ()
    ) -> Arrays:
        """dk and dv of the same keys, added up.

        found: those of calls. more: those from elsewhere. One part alone stays as a
        kernel gives it.
        """
        pairs = [*found, *([more] if more else [])]
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
