"""Sequences that make place for others: parked below, and brought back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_kvblock import _native
from jax_kvblock.cache import arriving
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.cache.tickets import Offload, Onboard
from jax_kvblock.cache.tiers import TieredCache


@dataclass(frozen=True)
class Parked:
    """A sequence without blocks on the device: what `resume` needs.

    Attributes:
      tokens: int32 `[n]`, all of them.
      num_written: how many of them had keys and values.
      adapter, salt: as the sequence was opened with.
      ticket: the copies that are under way.
    """

    tokens: np.ndarray
    num_written: int
    adapter: str | None
    salt: str | bytes
    ticket: Offload


def park(
    tiers: TieredCache,
    table: BlockTable,
    num_written: int,
    *,
    adapter: str | None = None,
    salt: str | bytes = b"",
) -> Parked:
    """Moves a sequence down and frees its table; `resume` brings it back.

    Args:
      table: the sequence's.
      num_written: how many of its tokens have keys and values; also those of the
        last block, which is not full.
      adapter, salt: as it was opened with.
    """
    size = table._native.block_size
    table.commit(num_written)
    rest = num_written % size
    with tiers.below.lock:
        ticket = tiers.offload(table)
        last = num_written // size
        if rest and last < len(table):
            key = _partial_key(table, num_written)
            if not tiers.below.on_host(key):
                block = int(table.ids[last])
                part = tiers._send([key], [block], published=False)
                futures = (*ticket._futures, *part._futures)
                skipped = ticket.num_skipped + part.num_skipped
                ticket = Offload((*ticket.keys, *part.keys), futures, skipped)
        tokens = table.tokens
        table.free()
    return Parked(tokens, num_written, adapter, salt, ticket)


def resume(tiers: TieredCache, parked: Parked) -> tuple[BlockTable, int]:
    """Brings a parked sequence back, and waits for it.

    Returns:
      Its table with blocks for all of its tokens, and how many of these are written,
      fewer than before where a tier had no room for some.

    Raises:
      PoolExhaustedError: when too few blocks are free; it stays parked.
    """
    size = tiers.below.host.spec.block_size
    table = tiers.cache.open(parked.tokens, adapter=parked.adapter, salt=parked.salt)
    try:
        table.match(parked.num_written)
        ticket = tiers.onboard(table)
        ticket.wait()
        written = table.match(parked.num_written)
        wanted = -(-table.num_tokens // size) - len(table)
        tiers.make_room(wanted)
        table.reserve(table.num_tokens)
        full = parked.num_written // size * size
        if written == full and parked.num_written > full:
            key = _partial_key(table, parked.num_written)
            if _restore(tiers, key, table.ids[full // size : full // size + 1]):
                written = parked.num_written
    except BaseException:
        table.free()
        raise
    return table, written


def _restore(tiers: TieredCache, key: bytes, ids: np.ndarray) -> bool:
    """Writes one block from below into a place of the pool."""
    if not tiers.below.has([key])[0]:
        return False
    part = arriving.whole_blocks(tiers.cache.manager, tiers.below, [key], ids)
    try:
        Onboard(1, [part], 1, lambda: 0, lambda: None).wait()
    except KeyError:
        return False
    return True


def _partial_key(table: BlockTable, num_tokens: int) -> bytes:
    """What the last block of so many tokens holds, which is not full."""
    size = table._native.block_size
    full = num_tokens // size
    parent = table.keys[full - 1] if full else table.root
    tail = table.tokens[full * size : num_tokens]
    return _native.blake3(tail.tobytes(), parent)
