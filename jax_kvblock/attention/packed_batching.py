"""How packed calls are batched: members' rows lie one behind the other.

Members' sequences are sequences of one call. Between two members come two more, the
first over the rows of queries that no sequence has, the second over those of keys: a
sequence without the other sees nothing. With sinks it would see those, so that these
calls run member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.attention.ops import letters
from jax_kvblock.core.batching import batch_one_by_one

OF_SEQUENCES = ("shift", "dropout_keys")  # what has an entry for each of them


def batch_packed(
    bind: Callable[..., Sequence[Any]],
    names: Sequence[str],
    made: Sequence[str],
    arrays: Sequence[Any],
    dims: Sequence[Any],
) -> tuple[list[Any], list[int]]:
    """The batching rule of a packed call; `made` are the names of its results."""
    given = dict(zip(names, zip(arrays, dims, strict=True), strict=True))
    count = next(a.shape[d] for a, d in given.values() if d is not None)
    if count == 0 or "sinks" in given:
        return batch_one_by_one(bind, arrays, dims)
    every = {n: _members(a, d, count) for n, (a, d) in given.items()}
    rows = {"T": every["q"].shape[1], "S": every["k"].shape[1]}
    every["cu_q"], every["cu_kv"] = _joined(every["cu_q"], every["cu_kv"], rows)
    for name in OF_SEQUENCES:
        if name in every:
            a = every[name]
            a = jnp.pad(a, ((0, 0), (0, 2), *[(0, 0)] * (a.ndim - 2)))
            every[name] = a.reshape(-1, *a.shape[2:])
    for name in names:
        if name not in ("cu_q", "cu_kv", *OF_SEQUENCES):
            every[name] = _fold(every[name], _row_axis(name))
    results = bind(*every.values())
    unfolded, at = [], []
    for name, r in zip(made, results, strict=True):
        axis = _row_axis(name)
        shape = (*r.shape[:axis], count, -1, *r.shape[axis + 1 :])
        unfolded.append(r.reshape(shape))
        at.append(axis)
    return unfolded, at


def _members(a: Any, d: Any, count: int) -> Any:
    """With the batch in front."""
    if d is None:
        return jnp.broadcast_to(a, (count, *a.shape))
    return jnp.moveaxis(a, d, 0)


def _row_axis(name: str) -> int:
    """Which axis of an operand or result, without the batch, has the rows."""
    axes = letters(name, packed=True)
    return next(i for i, letter in enumerate(axes) if letter in "TS")


def _fold(a: jax.Array, axis: int) -> jax.Array:
    """The batch, in front, into `axis` of the rest."""
    a = jnp.moveaxis(a, 0, axis)
    return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])


def _joined(
    cu_q: jax.Array, cu_kv: jax.Array, rows: dict[str, int]
) -> tuple[jax.Array, jax.Array]:
    """The boundaries of all members, int32 `[V (sequences + 2) + 1]`."""
    first = jnp.arange(cu_q.shape[0], dtype=jnp.int32)[:, None]
    cu_q, cu_kv = (  # within the member's own rows, whatever they are
        first * rows[letter] + jnp.clip(cu, 0, rows[letter])
        for cu, letter in ((cu_q, "T"), (cu_kv, "S"))
    )
    behind = jnp.concatenate([cu_q[1:, :1], cu_q[-1:, -1:]])  # where the next begins
    cu_q = jnp.concatenate([cu_q, behind], axis=1)
    cu_kv = jnp.concatenate([cu_kv, cu_kv[:, -1:]], axis=1)
    ends = (jnp.concatenate([cu.reshape(-1), cu[-1:, -1]]) for cu in (cu_q, cu_kv))
    joined_q, joined_kv = ends
    return joined_q, joined_kv
