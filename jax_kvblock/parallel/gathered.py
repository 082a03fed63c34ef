"""Keys and values that are gathered: all of them on every device.

What rows see of their own device's keys is computed while the others' arrive. Where
the rest is one call without a mask (`others.py`), it is that; else a call or two on all
keys, in the order of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import OPEN, accumulator
from jax_kvblock.parallel import axes
from jax_kvblock.parallel.local import Arrays, Here, Plan
from jax_kvblock.parallel.order import after
from jax_kvblock.parallel.others import others_of
from jax_kvblock.parallel.pieces import Call
from jax_kvblock.parallel.sequence import zigzag_rows
from jax_kvblock.parallel.sums import Gradients, Merged


class _Gathering(NamedTuple):
    """own: calls on own keys. calls: on gathered ones, in an order.

    order: which rows of all devices' keys these are; None for all as they are.
    """

    own: Sequence[Call]
    calls: Sequence[Call]
    order: Any

    @property
    def parts(self) -> int:
        return len(self.own) + len(self.calls)


def _gathering(here: Here) -> _Gathering:
    others = others_of(here)
    if others is not None:
        call = here.call(others.keys, others.found, None)
        return _Gathering(here.own_calls(), [call], others.order)
    order = _sequence_order(here)
    ids = _gather(here.plan, here.mask.kv_segments, -1)
    calls = here.calls(here.all_keys(), 0, _taken(ids, order, -1))
    return _Gathering([], calls, order)


def forward(here: Here, q: Any, k: Any, v: Any) -> Merged:
    """What rows see of all keys; own ones first, others arrive under them."""
    found = _gathering(here)
    merged = Merged(q, v, found.parts)
    every = tuple(_gather(here.plan, a, -3) for a in (k, v))
    for call in found.own:
        merged.attend(call, k, v)
    order = found.order
    if found.own and order is None:
        every = after(every, merged.so_far())
    elif found.own:  # which is smaller
        order = after(order, merged.so_far())
    k_all, v_all = (_taken(a, order, -3) for a in every)
    for call in found.calls:
        merged.attend(call, k_all, v_all)
    return merged


def backward(here: Here, x: Arrays, lse: Any, delta: Any, d_o: Any) -> Arrays:
    """dq, dk, dv; those of keys and values are summed over the devices in float32.

    Own keys come last: the gradients of others' travel under them.
    """
    _, *own = x
    found = _gathering(here)
    sums = Gradients(x, found.parts)

    def run(
        calls: Sequence[Call], keys: Sequence[Any], delta: Any, more: Arrays = ()
    ) -> Arrays:
        parts = [sums.run(call, tuple(keys), lse, delta, d_o) for call in calls]
        return sums.of_keys(parts, tuple(keys), more)

    every = tuple(_gather(here.plan, a, -3) for a in own)
    rows = every[0].shape[-3]
    taken = [_taken(a, found.order, -3) for a in every]
    d_every = run(found.calls, taken, delta)
    made = tuple(_scatter(here.plan, a, found.order, rows) for a in d_every)
    if found.own:
        made = run(found.own, own, after(delta, d_every), made)
    return sums.result(made)


def _sequence_order(here: Here) -> Any:
    """From the order of the devices to that of the sequence.

    None where it is the same, or nobody asks.
    """
    plan, mask = here.plan, here.mask
    config = plan.config
    unmasked = config.window_left == OPEN and config.window_right == OPEN
    nobody = unmasked and not plan.packed and mask.kv_lens is None
    nobody = nobody and not config.dropout
    if not plan.zigzag or plan.size == 1 or nobody:
        return None
    back = zigzag_rows(here.all_keys().length, plan.size, mask.cu_kv)
    rows = jnp.arange(back.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(back).at[back].set(rows, unique_indices=True)


def _gather(plan: Plan, a: Any, axis: int) -> Any:
    """`axis` of all devices, one behind the other."""
    return None if a is None else axes.gather(a, plan.axis_name, None, axis % a.ndim)


def _taken(a: Any, order: Any, axis: int) -> Any:
    if a is None or order is None:
        return a
    return jnp.take(a, order, axis=axis)


def _scatter(plan: Plan, a: jax.Array, order: Any, rows: int) -> jax.Array:
    """The sum over the devices of the rows that were taken, each device its own.

    A row that was taken twice has two parts.
    """
    axis = a.ndim - 3
    a = a.astype(accumulator(a.dtype))
    if order is not None:
        at = (slice(None),) * axis
        everywhere = jnp.zeros((*a.shape[:axis], rows, *a.shape[axis + 1 :]), a.dtype)
        a = everywhere.at[(*at, order)].add(a)
    return axes.scatter_sum(a, plan.axis_name, axis)
