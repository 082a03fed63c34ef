"""What rows see of all other devices' keys, gathered, in one call without a mask.

Where positions do not mask, that is all of them. Under a causal mask it is what lies
before a device's rows. In zigzag the first piece of the queries sees the first chunks
of earlier devices, the second piece the first chunks of all others and the second
chunks of later ones: always `2 n - 2` chunks together, wherever the device is. Laid one
behind the other they are two runs of keys, one for each piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import OPEN, AttentionConfig
from jax_kvblock.parallel.local import Here
from jax_kvblock.parallel.pieces import Box, Boxes, Piece, Side


class Others(NamedTuple):
    """The call's boxes, and their keys.

    order: int32 `[rows]`, which row of all devices' keys, one device behind the other,
    each of them is; None for these as they are. Keys that both pieces see come twice.
    """

    order: Any
    keys: Side
    found: Boxes


class _Chunks(NamedTuple):
    """The chunks that are taken, of each document: their devices, and which chunks.

    first: for each slot that a chunk may have, where in the document it lies.
    """

    device: jax.Array
    late: jax.Array
    first: jax.Array


def are_apart(
    config: AttentionConfig, *, alike: bool, zigzag: bool, segments: bool
) -> bool:
    """Whether others' keys are a call without a mask, beside one's own.

    Not where the mask between devices is one of positions, or of segments. Or dropout
    is, which goes by positions.
    """
    if segments or config.dropout or config.window_left != OPEN:
        return False
    if config.window_right == 0:  # causal
        return alike  # else rows have other positions than the device's keys
    return config.window_right == OPEN and zigzag


def others_of(here: Here) -> Others | None:
    """None where they are not apart."""
    plan = here.plan
    segments = here.mask.kv_segments is not None
    apart = are_apart(
        plan.config, alike=plan.alike, zigzag=plan.zigzag, segments=segments
    )
    if plan.size == 1 or not apart:
        return None
    return (
        _chunks(here, plan.config.window_right == 0) if plan.zigzag else _before(here)
    )


def _before(here: Here) -> Others:
    """Of contiguous rows: the keys of earlier devices."""
    every = here.all_keys()
    end = here.place * here.key_length
    first, last = every.starts[:-1], every.whole.last
    if here.plan.packed:
        first, last = jnp.minimum(first, end), jnp.minimum(last, end)
    else:
        last = jnp.minimum(last, first + end)
    run = Piece(first, last, jnp.zeros_like(first))
    return Others(None, every, (Box(here.q.whole, run, True, False, masked=False),))


def _chunks(here: Here, causal: bool) -> Others:
    n, place = here.plan.size, here.place
    # The order is that of one document; that of a batch's members is the same.
    own = here.keys(0).starts
    bounds = own if here.plan.packed else own[:2]
    slot = jnp.arange(2 * n - 2, dtype=jnp.int32)
    taken = _seen(slot, n, place) if causal else _all(slot, n, place)
    order = _rows(taken, bounds, n, here.key_length, place)
    starts = own * (n - 1)
    keys = Side(order.shape[0], starts, (), (), 0, here.mask.kv_lens is not None)
    chunk = (own[1:] - own[:-1]) // 2
    there = _lengths(here, taken, chunk)  # [documents, slots]
    nowhere = jnp.zeros_like(chunk)
    if not causal:
        run = Piece(starts[:-1], starts[:-1] + there.sum(1, dtype=jnp.int32), nowhere)
        return Others(order, keys, (Box(here.q.whole, run, True, False, masked=False),))
    low = jnp.where(slot < place, there, 0).sum(1, dtype=jnp.int32)
    middle = starts[:-1] + place * chunk
    high = jnp.where(slot < place, 0, there).sum(1, dtype=jnp.int32)
    runs = (
        Piece(starts[:-1], starts[:-1] + low, nowhere),
        Piece(middle, middle + high, nowhere),
    )
    lower, upper = (
        Box(
            rows, run, False, False, masked=False,
            rows_before=i > 0 and here.q.cut, keys_before=i > 0 and keys.cut,
            rows_after=here.q.cut, keys_after=keys.cut,
        )
        for i, (rows, run) in enumerate(zip(here.q.pieces, runs, strict=True))
    )  # fmt: skip
    return Others(order, keys, (lower, upper))


def _seen(slot: jax.Array, n: int, place: Any) -> _Chunks:
    """First those that the first piece sees, then those that the second one does."""
    low = slot < place
    again = slot - place  # all first chunks but one's own
    late = slot >= place + n - 1
    device = jnp.where(low, slot, again + (again >= place).astype(jnp.int32))
    device = jnp.where(late, n - 1 - (again - (n - 1)), device)
    return _Chunks(device, late, jnp.where(late, 2 * n - 1 - device, device))


def _all(slot: jax.Array, n: int, place: Any) -> _Chunks:
    """In the order of the sequence."""
    late = slot >= n - 1
    at = jnp.where(late, slot - (n - 1), slot)
    skipped = jnp.where(late, n - 1 - place, place)
    at = at + (at >= skipped).astype(jnp.int32)
    device = jnp.where(late, n - 1 - at, at)
    return _Chunks(device, late, jnp.where(late, 2 * n - 1 - device, device))


def _rows(taken: _Chunks, own: jax.Array, n: int, length: int, place: Any) -> jax.Array:
    """Where the rows of these chunks lie, of documents with these local boundaries.

    Nobody sees rows of no document. A device's own ones stand for them, so that no
    row of another device is taken more than twice.
    """
    count = (n - 1) * length
    row = jnp.arange(count, dtype=jnp.int32)
    document = jnp.searchsorted(own[1:] * (n - 1), row, side="right")
    inside = (row >= own[0] * (n - 1)) & (document < own.shape[0] - 1)
    document = jnp.minimum(document, own.shape[0] - 2)
    first = own[document]
    chunk = (own[document + 1] - first) // 2
    within = row - first * (n - 1)
    run = jnp.maximum(chunk, 1)
    slot = jnp.clip(within // run, 0, 2 * n - 3)
    at = taken.device[slot] * length + first + within % run
    at = at + jnp.where(taken.late[slot], chunk, 0)
    return jnp.where(inside, at, place * length + row % length)


def _lengths(here: Here, taken: _Chunks, chunk: jax.Array) -> jax.Array:
    """How many keys each slot's chunk has, of every document: `[documents, slots]`.

    Only behind those that are cut short come some without keys.
    """
    chunk = chunk[:, None]
    if here.mask.kv_lens is None:
        return jnp.broadcast_to(chunk, (chunk.shape[0], taken.device.shape[0]))
    lens = here.mask.kv_lens[:, None]
    return jnp.clip(lens - taken.first * chunk, 0, chunk)
