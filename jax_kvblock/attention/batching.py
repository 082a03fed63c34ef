"""How the primitives of attention are batched.

A batch folds into B; that of packed calls into their rows (`packed_batching.py`). What
the members share (a bias, sinks, tiles) keeps one row for all, or one for each member:
row b // (B / rows) of it belongs to batch member b.

The new axis V comes before B, so that an operand with one row for each member folds
without a copy. On an explicit mesh that cuts B it comes behind it: a dimension whose
minor part is cut has no sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.attention.config import members_of_a_row, row_of_each
from jax_kvblock.attention.ops import Call, Op, letters
from jax_kvblock.attention.packed_batching import batch_packed

LISTS = ("tile_indices", "tile_counts", "tile_partial")


def batch(
    outer: core.Primitive,
    op: Op,
    arrays: Sequence[Any],
    dims: Sequence[Any],
    *,
    call: Call,
) -> tuple[list[Any], list[int]]:
    """The batching rule of the primitive `outer`."""
    names = op.operand_names(call)
    if call.config.packed:
        return batch_packed(functools.partial(outer.bind, call=call), names,
                            op.result_names(call), arrays, dims)  # fmt: skip
    arrays, dims = _fold_masks(names, arrays, dims)
    batched = {n: d is not None for n, d in zip(names, dims, strict=True)}
    count = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    # q comes first, and always has a batch.
    batch_axis = int(dims[0] == 0)
    size, cut = arrays[0].shape[batch_axis], _is_cut(arrays[0], batch_axis)
    fold = functools.partial(_fold, count=count, size=size, behind=cut)
    made = op.result_names(call)
    folded = []
    rows = 1
    for name, a, d in zip(names, arrays, dims, strict=True):
        if name == "tile_masks":  # all members' are in it
            folded.append(a)
            continue
        own = any(batched[n] for n in _alike(name, names)) or (
            # The gradient of a bias that the members share is asked for each of them.
            name.rstrip("'") == "bias" and "bias" in made
        )
        if name == "bias":
            rows = a.shape[int(d == 0)]
        folded.append(fold(a, d, shared=letters(name)[0] == "b", own=own))
    results = outer.bind(*folded, call=call)
    unfolded = [
        _unfold(r, count, size, rows if name == "bias" else size, cut)
        for name, r in zip(made, results, strict=True)
    ]
    return unfolded, [int(cut)] * len(unfolded)


def _alike(name: str, names: Sequence[str]) -> list[str]:
    """The other operands that have as many rows as this one, shared or not.

    Lists of tiles and what belongs to them; what moves and how it moves.
    """
    if name in LISTS:
        return [n for n in names if n in LISTS and n != name]
    of = name.rstrip("'")
    return [n for n in names if n.rstrip("'") == of and n != name]


def _fold_masks(
    names: Sequence[str], arrays: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Masks of tiles that members have for themselves, as one array for all of them.

    Member i's are P rows from i P on. Entries beyond its own stay beyond all.
    """
    given = dict(zip(names, zip(arrays, dims, strict=True), strict=True))
    masks, axis = given.get("tile_masks", (None, None))
    if axis is not None:
        masks = jnp.moveaxis(masks, axis, 0)
        count, rows = masks.shape[:2]
        partial, axis = given["tile_partial"]
        if axis is None:
            partial = jnp.broadcast_to(partial, (count, *partial.shape))
        else:
            partial = jnp.moveaxis(partial, axis, 0)
        first = jnp.arange(count, dtype=jnp.int32) * rows
        moved = partial + first.reshape(count, 1, 1, 1, 1)
        moved = jnp.where(partial < rows, moved, 2**31 - 1)
        partial = jnp.where(partial < 0, partial, moved)
        given |= {"tile_partial": (partial, 0), "tile_masks": (_merge(masks), None)}
    arrays, dims = zip(*given.values(), strict=True)
    return list(arrays), list(dims)


def _is_cut(a: Any, axis: int) -> bool:
    """Whether an explicit mesh cuts this axis."""
    sharding = jax.typeof(a).sharding
    return not sharding.mesh.empty and sharding.spec[axis] is not None


def _fold(
    a: Any, d: Any, *, count: int, size: int, behind: bool, shared: bool, own: bool
) -> Any:
    """An operand with V in its first dimension, B's."""
    if d is None:
        if shared and not own and (behind or a.shape[0] == 1):
            return a  # one row for all, of all members
        if not behind:
            return _merge(jnp.broadcast_to(a, (count, *a.shape)))
        a = jnp.broadcast_to(a[:, None], (a.shape[0], count, *a.shape[1:]))
    else:
        a = jnp.moveaxis(a, d, int(behind))
    if not behind:
        return _merge(a)
    if a.shape[0] != size:  # rows that several of B share
        a = row_of_each(a, size)
    return _merge(a)


def _merge(a: Any) -> Any:
    """The first two dimensions as one, cut as the first was."""
    shape = (a.shape[0] * a.shape[1], *a.shape[2:])
    return _reshape(a, shape, (0, *range(2, a.ndim)))


def _unfold(r: Any, count: int, size: int, members: int, behind: bool) -> Any:
    """A result with V as a dimension of its own, the first, or behind B the second."""
    if not behind:
        rest = (None, None, *range(1, r.ndim))
        return _reshape(r, (count, members, *r.shape[1:]), rest)
    kept: tuple[int | None, ...] = (0, None, *range(1, r.ndim))
    r = _reshape(r, (size, count, *r.shape[1:]), kept)
    if members == size:
        return r
    shared = members_of_a_row(size, members)
    return r.reshape(members, shared, *r.shape[1:]).sum(1)


def _reshape(a: Any, shape: tuple[int, ...], kept: tuple[int | None, ...]) -> Any:
    """Reshapes; on an explicit mesh dimension i is cut as dimension kept[i] was."""
    sharding = jax.typeof(a).sharding
    if sharding.mesh.empty:
        return a.reshape(shape)
    spec = PartitionSpec(*(None if k is None else sharding.spec[k] for k in kept))
    return jax.lax.reshape(a, shape, out_sharding=NamedSharding(sharding.mesh, spec))
