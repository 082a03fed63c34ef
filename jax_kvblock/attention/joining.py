"""Parts of rows' attention, each over keys of its own, put together in plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import accumulator

# Up to here, as in a step of decoding, what a collective costs is taken to be its
# start, and all members' parts travel in one sum. More travels once, in two and a
# maximum.
_AT_ONCE_BYTES = 2**20


def _of_all(
    out: jax.Array, lse: jax.Array, axis_name: Any
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """out and lse of all members of an axis, by one sum; all get the same."""
    size = jax.lax.axis_size(axis_name)
    own = jnp.concatenate([out, lse[..., None]], axis=-1)
    places = jnp.arange(size) == jax.lax.axis_index(axis_name)
    places = places.reshape(size, *[1] * own.ndim)
    both = jax.lax.psum(jnp.where(places, own, 0), axis_name)
    return tuple(both[..., :-1]), tuple(both[..., -1])


# One program, also outside of jit: no −inf of a step between is a result that
# jax_debug_infs looks at.
@functools.partial(jax.jit, static_argnames="axis_name", inline=True)
def merge_arrays(
    outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...], axis_name: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`merge_attention` of arrays that fit: outs `[..., Dv]`, lses without Dv."""
    dtype = accumulator(outs[0].dtype)
    lses = tuple(lse.astype(dtype) for lse in lses)
    if axis_name is not None:
        size = jax.lax.axis_size(axis_name)
        packed = lses[0].size * (outs[0].shape[-1] + 1) * dtype.itemsize
        if size * packed <= _AT_ONCE_BYTES:
            wide = tuple(out.astype(dtype) for out in outs)
            out, lse = merge_arrays(wide, lses)
            out, lse = merge_arrays(*_of_all(out, lse, axis_name))
            return out.astype(outs[0].dtype), lse
    # Any finite number serves in place of the largest lse: it has no derivative.
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    if axis_name is not None:
        top = jax.lax.pmax(top, axis_name)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp(lse - top) for lse in lses]

    def over_all(x: jax.Array) -> jax.Array:
        return x if axis_name is None else jax.lax.psum(x, axis_name)

    total = over_all(functools.reduce(jnp.add, weights))
    nothing = total == 0
    some = jnp.where(nothing, 1, total)
    # A part that saw nothing may hold anything.
    seen = (
        jnp.where(jnp.isneginf(lse)[..., None], 0, out.astype(dtype)) * w[..., None]
        for out, lse, w in zip(outs, lses, weights, strict=True)
    )
    out = over_all(functools.reduce(jnp.add, seen)) / some[..., None]
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(some))
    return out.astype(outs[0].dtype), lse


# ---- what kernels do in their last step ----------------------------------------------


def join(
    o: jax.Array, lse: jax.Array, own_o: jax.Array, own_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o `[..., T, N, E]` and lse `[..., N, T]` of both, o in its dtype.

    Rows that see no key of one's own keep o and lse, bit for bit: a merge would round.
    """
    wide = accumulator(o.dtype)
    outs = o.astype(wide), own_o.astype(wide)
    before, own = (jnp.swapaxes(a, -1, -2) for a in (lse, own_lse))
    merged_o, merged = merge_arrays(outs, (before, own))
    nothing = jnp.isneginf(own)
    made = jnp.where(nothing[..., None], o, merged_o.astype(o.dtype))
    return made, jnp.swapaxes(jnp.where(nothing, before, merged), -1, -2)


def added(dq: jax.Array, own: jax.Array) -> jax.Array:
    """The sum, in dq's dtype; it is rounded once."""
    wide = accumulator(dq.dtype)
    return (dq.astype(wide) + own.astype(wide)).astype(dq.dtype)
