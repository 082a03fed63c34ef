"""Keys and values that are gathered: all of them on every device.

What rows see of their own device's keys is computed while the others' arrive. Where
the rest is one call without a mask (`others.py`), it is that; else a call or two on all
keys, in the order of the sequence.

Where copy engines send what is permuted, devices send to each other directly, and take
no multiprocessors from attention; else XLA gathers, and sums gradients over devices.
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
    come = _coming(here, found, (k, v))
    for call in found.own:
        merged.attend(call, k, v)
    keys = come.taken(merged.so_far() if found.own else None)
    for call in found.calls:
        merged.attend(call, *keys)
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

    come = _coming(here, found, (own[0], own[1]))
    keys = come.taken(None)
    d_keys = run(found.calls, keys, delta)
    home = come.home(d_keys)
    if not found.own:
        return sums.result(home)
    return sums.result(run(found.own, own, after(delta, d_keys), home))


class _Gathered:
    """Keys and values of all devices, by XLA's collectives.

    Rows of all devices lie one device behind the other.
    """

    def __init__(self, here: Here, order: Any, own: Arrays) -> None:
        self._plan, self._order = here.plan, order
        self._every = tuple(_gather(here.plan, a, -3) for a in own)

    def taken(self, done: Any) -> Arrays:
        """Those that calls want, in their order, not before `done`."""
        every, order = self._every, self._order
        if done is not None and order is None:
            every = after(every, done)
        elif done is not None:  # which is smaller
            order = after(order, done)
        return tuple(_taken(a, order, -3) for a in every)

    def home(self, d_taken: Arrays) -> Arrays:
        """Of gradients of what was taken, the sums of a device's own."""
        rows = self._every[0].shape[-3]
        return tuple(_scatter(self._plan, a, self._order, rows) for a in d_taken)


class _Sent:
    """Those of all devices but this one, which these send directly.

    order: int32 `[rows]`, which row each one that is taken is, of all devices' rows.
    """

    def __init__(self, here: Here, order: jax.Array, own: Arrays) -> None:
        self._here, self._own = here, own
        length = own[0].shape[-3]
        # Behind a device's own rows lie those of the device before it, and so on.
        behind = (here.place - order // length) % here.plan.size
        self._order = behind * length + order % length
        self._steps = range(1, here.plan.size)
        self._shards = [own, *(here.send(own, step) for step in self._steps)]

    def taken(self, done: Any) -> Arrays:
        order = self._order if done is None else after(self._order, done)
        every = (
            jnp.concatenate(parts, axis=-3) for parts in zip(*self._shards, strict=True)
        )
        return tuple(_taken(a, order, -3) for a in every)

    def home(self, d_taken: Arrays) -> Arrays:
        """Gradients go as the kernel gives them, and are summed in float32 at home."""
        size, length = self._here.plan.size, self._own[0].shape[-3]
        at = jnp.arange(self._order.shape[0], dtype=jnp.int32)
        # A row may be taken twice: it has a first place and a last one.
        first = jnp.full(size * length, at.shape[0], jnp.int32).at[self._order].min(at)
        last = jnp.full(size * length, -1, jnp.int32).at[self._order].max(at)
        sums: list[Any] = [None, None]
        for step in self._steps:
            rows = slice(step * length, (step + 1) * length)
            parts = tuple(_of_rows(a, first[rows], last[rows]) for a in d_taken)
            for i, part in enumerate(self._here.send(parts, -step % size)):
                part = part.astype(accumulator(part.dtype))
                sums[i] = part if sums[i] is None else sums[i] + part
        return tuple(sums)


def _coming(here: Here, found: _Gathering, own: Arrays) -> _Gathered | _Sent:
    if here.plan.direct and here.plan.size > 1:
        order = found.order
        if order is None:
            order = jnp.arange(here.plan.size * own[0].shape[-3], dtype=jnp.int32)
        return _Sent(here, order, own)
    return _Gathered(here, found.order, own)


def _of_rows(d_taken: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Of gradients of what was taken, those of rows that were taken there."""
    wide = accumulator(d_taken.dtype)
    shape = (-1, 1, 1)

    def part(at: jax.Array, there: jax.Array) -> jax.Array:
        found = jnp.take(d_taken, at, axis=-3, mode="clip").astype(wide)
        return jnp.where(there.reshape(shape), found, 0)

    both = part(first, last >= 0) + part(last, last > first)
    return both.astype(d_taken.dtype)


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
    return jnp.take(a, order, axis=axis, mode="clip")


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
