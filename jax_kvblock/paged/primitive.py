"""The primitive of `paged_attention`: what comes out, how it transforms, who computes.

As those of attention it is a pair: the outer one carries the transformation rules and
lowers to a partitioned call, the inner one is what each device runs. A batch of
`jax.vmap` folds into calls. Key heads may be cut over a mesh, or of a latent cache the
query heads; nothing else of a cache can be, since any sequence may have any block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jax_kvblock.attention.config import accumulator
from jax_kvblock.core.batching import batch_one_by_one
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.spmd import lower_local, vary_alike
from jax_kvblock.paged import blocked, cuda, dispatch, partition
from jax_kvblock.paged.call import (
    Paged,
    PagedConfig,
    cut_heads,
    page_shapes,
    value_dim_of,
)
from jax_kvblock.paged.heads import attend_heads
from jax_kvblock.paged.pages import Pages


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameter: config, and the tree whose leaves the operands are."""

    config: PagedConfig
    structure: Any

    def unpack(self, arrays: Sequence[Any]) -> Paged:
        return jax.tree.unflatten(self.structure, arrays)

    def cut(self, shards: int, query_heads: int | None = None) -> Call:
        """The call of a device that has one part of so many of the key heads.

        With query_heads, which the part serves, the call has q_first as one more leaf.
        """
        x: Any = self.unpack(range(self.structure.num_leaves))
        config = self.config
        if shards > 1:
            scales = None if x.scales is None else cut_heads(x.scales, shards)
            x = x._replace(pages=cut_heads(x.pages, shards), scales=scales)
        if query_heads is not None:
            x = x._replace(q_first=0)
            config = dataclasses.replace(config, query_heads=query_heads)
        return Call(config, jax.tree.structure(x))


def attend(config: PagedConfig, x: Paged) -> tuple[jax.Array, jax.Array]:
    """out `[C, R, N, Dv]` and lse `[C, R, N]`."""
    leaves, structure = jax.tree.flatten(x)
    out, lse = _outer.bind(*vary_alike(leaves), call=Call(config, structure))
    return out, lse


def _abstract_eval(*avals: Any, call: Call) -> list[Any]:
    x: Any = call.unpack(avals)
    dim = value_dim_of(call.config, x)
    shapes = (*x.q.shape[:-1], dim), x.q.shape[:-1]
    dtypes = x.q.dtype, accumulator(x.q.dtype)
    mesh = x.q.sharding.mesh
    specs = partition.result_specs(x)
    return [
        x.q.update(
            shape=shape,
            dtype=np.dtype(dtype),
            weak_type=False,
            sharding=NamedSharding(mesh, spec),
        )
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]


_outer, _local = make_primitives("kvblock_paged_attention", _abstract_eval)


# ---- one device ----------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, call: Call, platform: str | None) -> Any:
    x = call.unpack(ctx.avals_in)
    choice = dispatch.choose(call.config, x, platform)
    empty = 0 in (*x.q.shape, x.kv_lens.shape[0])  # nothing to launch a kernel for
    run: Callable[..., Any] = blocked.forward
    if choice == "cuda" and not empty:
        run = cuda.run

    def function(*arrays: Any) -> Any:
        return attend_heads(run, call.config, call.unpack(arrays))

    return lower_local(ctx, function, *operands)


for _platform in (None, "cpu", "cuda"):
    mlir.register_lowering(
        _local,
        functools.partial(_lower, platform=_platform),
        platform=_platform,
    )


# ---- a mesh --------------------------------------------------------------------------

_run = partition.partitioned(_local)
mlir.register_lowering(
    _outer,
    mlir.lower_fun(lambda *arrays, call: _run(call, *arrays), multiple_results=True),
)


# ---- transformations -----------------------------------------------------------------


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "paged_attention has no derivative; gather_kv and flash_attention have, and "
        "jax.lax.stop_gradient keeps others from asking for it"
    )


ad.primitive_jvps[_outer] = _no_derivative


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[int]]:
    """The members' calls become calls."""
    x: Any = call.unpack([_Member(a, d) for a, d in zip(arrays, dims, strict=True)])
    count = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    calls = x.q.size(0)
    pages, blocks = _fold_pages(x.pages, count)
    # Factors of tokens follow their keys.
    scales = (x.scales, x.k_scale, x.v_scale)
    of_tokens = any(
        len(a.shape) > 1 for a in jax.tree.leaves(scales, is_leaf=_is_member)
    )
    apart = _is_batched((scales, x.q_first))
    apart |= of_tokens and pages is not x.pages
    if apart or blocks > 2**31 - 1:
        bind = functools.partial(_outer.bind, call=call)
        return batch_one_by_one(bind, arrays, dims)
    tables = x.tables.fold(count)
    member = jnp.arange(count, dtype=jnp.int32)
    if pages is not x.pages:  # each member has blocks of its own
        own = blocks // count
        first = jnp.repeat(member * own, tables.shape[0] // count)
        first = first.reshape(-1, *[1] * (tables.ndim - 1))
        there = (tables >= 0) & (tables < own)
        tables = jnp.where(there, tables + first, -1)
    table_first = x.table_first
    if table_first is not None:
        begins = jnp.repeat(member * x.tables.size(0), x.kv_lens.size(0))
        table_first = table_first.fold(count) + begins
    layer = x.layer
    if layer is not None and (layer.dim is not None or layer.size(0) > 1):
        each = layer.fold(count)
        layer = jnp.repeat(each, calls * count // each.shape[0])
    elif layer is not None:
        layer = layer.array
    sinks = x.sinks
    if sinks is not None:
        alone = sinks.dim is None and sinks.size(0) == 1
        sinks = sinks.array if alone else sinks.fold(count)
    folded = Paged(
        q=x.q.fold(count),
        pages=_arrays(pages),
        layer=layer,
        tables=tables,
        kv_lens=x.kv_lens.fold(count),
        query_start=None if x.query_start is None else _starts(x, count),
        q_lens=None if x.q_lens is None else x.q_lens.fold(count),
        sinks=sinks,
        table_first=table_first,
        scales=_arrays(x.scales),
        ranges=None if x.ranges is None else x.ranges.fold(count),
        tree_mask=None if x.tree_mask is None else x.tree_mask.fold(count),
        k_scale=_arrays(x.k_scale),
        v_scale=_arrays(x.v_scale),
        q_first=_arrays(x.q_first),
    )
    leaves, structure = jax.tree.flatten(folded)
    results = _outer.bind(*leaves, call=Call(call.config, structure))
    return [r.reshape(count, calls, *r.shape[1:]) for r in results], [0, 0]


def _starts(x: Any, count: int) -> jax.Array:
    """Of all calls. Where those of one fall, it alone has no rows, not all of them."""
    starts = x.query_start.fold(count)
    inside = jnp.clip(starts, 0, x.q.size(1))
    falls = (inside[:, 1:] < inside[:, :-1]).any(1, keepdims=True)
    return jnp.where(falls, 0, starts)


class _Member:
    """An operand of a batch: an array, and the axis of the members, or None."""

    def __init__(self, array: Any, dim: Any) -> None:
        self.array, self.dim = array, dim

    def size(self, axis: int) -> int:
        """Of a member."""
        shape = list(self.array.shape)
        if self.dim is not None:
            shape.pop(self.dim)
        return shape[axis]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(self.array.shape) if axis != self.dim)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def fold(self, count: int, at: int = 0) -> Any:
        """The members one after the other along an axis of theirs."""
        a = self.array
        if self.dim is None:
            a = jnp.broadcast_to(
                jnp.expand_dims(a, at), (*a.shape[:at], count, *a.shape[at:])
            )
        else:
            a = jnp.moveaxis(a, self.dim, at)
        return a.reshape(*a.shape[:at], count * a.shape[at + 1], *a.shape[at + 2 :])


def _is_member(a: Any) -> bool:
    return isinstance(a, _Member)


def _is_batched(tree: Any) -> bool:
    members = jax.tree.leaves(tree, is_leaf=_is_member)
    return any(a.dim is not None for a in members)


def _arrays(tree: Any) -> Any:
    """What all members share, as it is."""
    return jax.tree.map(lambda a: getattr(a, "array", a), tree, is_leaf=_is_member)


def _fold_pages(pages: Any, count: int) -> tuple[Any, int]:
    """The blocks of all members as those of one cache; the same if they share it."""
    blocks = page_shapes(pages)[0][0]
    if not _is_batched(pages):
        return pages, blocks
    at = 0
    if isinstance(pages, Pages):
        at = next(i for i, g in enumerate(pages.layout.groups) if g[0] == "P")
    folded = jax.tree.map(lambda a: a.fold(count, at), pages, is_leaf=_is_member)
    return folded, blocks * count


batching.primitive_batchers[_outer] = _batch
