"""Some of the query heads beside all key heads, as a device has them.

Where more devices share the query heads than there are key heads, or the cache is whole
on every device, a device finds its own key heads in a cache that has others beside
them. Which ones differs from device to device, so an operand says it; nothing of the
cache is cut out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes

Results = tuple[jax.Array, jax.Array]


class HeadPart(NamedTuple):
    """Key heads `[first, first + heads)` of a cache; `first` is int32 `[]`."""

    first: jax.Array
    heads: int

    def of(self, a: jax.Array, axis: int) -> jax.Array:
        """These heads of something small."""
        return jax.lax.dynamic_slice_in_dim(a, self.first, self.heads, axis)


def attend_heads(
    run: Callable[[PagedConfig, Paged, HeadPart | None], Results],
    config: PagedConfig,
    x: Paged,
) -> Results:
    """out and lse of a call that may have some of the query heads, by `run`.

    `run` gets query heads that are whole groups of the key heads in its part, or that
    have one key head together.
    """
    if x.q_first is None:
        return run(config, x, None)
    assert config.query_heads is not None
    heads = x.q.shape[2]
    group = config.query_heads // page_shapes(x.pages)[0][2]
    # Heads lie at a multiple of their number, so a part of a group stays inside of it.
    fits = group % heads == 0 or heads % group == 0
    each = heads if fits else math.gcd(heads, group)
    results = []
    for i in range(0, heads, each):
        own = slice(i, i + each)
        sinks = None if x.sinks is None else x.sinks[:, own]
        part = x._replace(q=x.q[:, :, own], sinks=sinks, q_first=None)
        first = (x.q_first[0] + i) // group
        results.append(run(config, part, HeadPart(first, max(1, each // group))))
    if len(results) == 1:
        return results[0]
    out, lse = (jnp.concatenate(parts, 2) for parts in zip(*results, strict=True))
    return out, lse


def attend_all_heads(
    run: Callable[[PagedConfig, Paged], Results],
    config: PagedConfig,
    x: Paged,
    part: HeadPart,
) -> Results:
    """The same by all key heads, with zeros for the query heads of others.

    It reads the keys of them all.
    """
    heads, kv_heads = x.q.shape[2], page_shapes(x.pages)[0][2]
    group = heads // part.heads
    first = part.first * group

    def among_all(a: Any, axis: int) -> Any:
        shape = list(a.shape)
        shape[axis] = kv_heads * group
        zeros = jnp.zeros(shape, a.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, a, first, axis)

    sinks = None if x.sinks is None else among_all(x.sinks, 1)
    out, lse = run(config, x._replace(q=among_all(x.q, 2), sinks=sinks))
    out, lse = (jax.lax.dynamic_slice_in_dim(a, first, heads, 2) for a in (out, lse))
    return out, lse
