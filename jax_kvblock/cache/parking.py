"""Sequences that make place for others: parked below, and brought back."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from jax_kvblock import _native
from jax_kvblock.cache import arriving
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.cache.taking import take_hold
from jax_kvblock.cache.tickets import Offload, Onboard
from jax_kvblock.cache.tiers import TieredCache
from jax_kvblock.core import checks


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

    Raises:
      ValueError: when it was opened with others, for another model, or has its blocks
        in another pool; then it is as before. `resume` would find somebody else's
        blocks.
    """
    tiers.check_own("park", table)
    if table.root != tiers.cache.namespace.root(adapter, salt):
        raise ValueError(
            "park: the table was opened with another adapter or salt than "
            f"adapter={adapter!r} and salt={salt!r}, by another model's cache, or "
            "before `set_model_name`; pass those that `open` was given, or free what "
            "is of the weights before and compute it again"
        )
    size = table._native.block_size
    table.commit(num_written)
    rest = num_written % size
    with tiers.cache.manager.lock, tiers.below.lock:
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
    """Brings a parked sequence back, and waits for it; `Resuming` does not.

    Returns:
      Its table with blocks for all of its tokens, and how many of these are written,
      fewer than before where a tier had no room for some.

    Raises:
      PoolExhaustedError: when too few blocks are free; it stays parked.
    """
    resuming = Resuming(tiers, parked)
    resuming.wait()
    return resuming.table, resuming.num_written


class Resuming:
    """A parked sequence on its way back, in steps that never wait.

    An engine calls `poll` between its steps, as it does with an `Onboard`.

    Args:
      tiers: where it was parked.
      parked: as `park` has returned it. It stays good until this is done.

    Attributes:
      table: the sequence's; when this is done, with blocks for all of its tokens.
      num_written: when it is done, how many tokens are written, fewer than before where
        a tier had no room for some.

    Raises:
      PoolExhaustedError: when too few blocks are free; also from `poll` and `wait`,
        where some were lost below. It stays parked, and the table is freed, as after
        anything else that `poll` and `wait` raise.

    Example:
      >>> coming = Resuming(tiers, parked)
      >>> while not coming.poll():
      ...     manager.update(decode, ...)      # the others go on
    """

    def __init__(self, tiers: TieredCache, parked: Parked) -> None:
        self._tiers, self._parked = tiers, parked
        self.num_written = 0
        cache = tiers.cache
        self.table = cache.open(parked.tokens, adapter=parked.adapter, salt=parked.salt)
        self._of_last = False  # whether the ticket is that of a block that is not full
        self._rest: _native.Hold | None = None  # for what does not come from below
        self._ticket: Onboard | None = None
        try:
            self.table.match(parked.num_written)
            self._ticket = tiers.onboard(self.table)
            self._take_rest(self._missing() - self._ticket.num_blocks)
        except BaseException:
            self.cancel()
            self._free()
            raise

    @property
    def done(self) -> bool:
        """Whether it has ended: all has come, or it failed or was cancelled."""
        return self._ticket is None

    def poll(self) -> bool:
        """Takes in what has arrived; returns `done`."""
        while self._ticket is not None and self._ticket.poll():
            self._go_on(self._ticket)
        return self.done

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done.

        Args:
          timeout: seconds, for each part that has to arrive.

        Raises:
          TimeoutError: when it has not arrived by then; wait again.
          Exception: what a transfer failed with.
        """
        while (ticket := self._ticket) is not None:
            try:
                ticket.wait(timeout=timeout)
            except Exception:  # `_go_on` tells of it
                if not ticket.done:
                    raise
            self._go_on(ticket)

    def cancel(self) -> None:
        """Gives all blocks back; it stays parked."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
            self._free()

    def _go_on(self, ended: Onboard) -> None:
        """What follows a ticket."""
        self._ticket = None
        try:
            if self._of_last:
                self._take_last(ended)
            else:
                self._take_whole(ended)
        except BaseException:
            self._free()
            raise

    def _free(self) -> None:
        self.table.free()
        if self._rest is not None:
            self._rest.release()

    def _take_whole(self, ended: Onboard) -> None:
        """Blocks that are full are there; the others get a place."""
        if ended.exception is not None:
            raise ended.exception
        tiers, table, before = self._tiers, self.table, self._parked.num_written
        size = tiers.below.host.spec.block_size
        self.num_written = table.match(before)
        if self._rest is not None:
            self._rest.release()
        tiers.make_room(self._missing())
        table.reserve(table.num_tokens)
        full = before // size
        if self.num_written < full * size or before == full * size:
            return
        key = _partial_key(table, before)
        if not tiers.below.has([key])[0]:
            return
        ids = table.ids[full : full + 1]
        place = functools.partial(tiers.below.place, [key])
        part = arriving.whole_blocks(tiers.cache.manager, tiers.below, place, ids)
        self._of_last = True
        rooms = tiers.below.rooms
        self._ticket = Onboard(ids, [part], rooms, lambda: 0, lambda: None)

    def _missing(self) -> int:
        """How many blocks the table has not."""
        size = self._tiers.below.host.spec.block_size
        return -(-self.table.num_tokens // size) - len(self.table)

    def _take_rest(self, count: int) -> None:
        """Keeps blocks for the end, so that nobody takes them meanwhile."""
        if count <= 0:
            return
        self._tiers.make_room(count)
        told = f"Resuming: {checks.plural(count, 'block')} more than what comes"
        self._rest = take_hold(self._tiers.cache.manager, count, told)

    def _take_last(self, ended: Onboard) -> None:
        """That which is not full is there, or is lost and computed again."""
        if ended.exception is None:
            self.num_written = self._parked.num_written
        elif not isinstance(ended.exception, KeyError):
            raise ended.exception


def _partial_key(table: BlockTable, num_tokens: int) -> bytes:
    """What the last block of so many tokens holds, which is not full."""
    size = table._native.block_size
    full = num_tokens // size
    parent = table.keys[full - 1] if full else table.root
    tail = table.tokens[full * size : num_tokens]
    return _native.blake3(tail.tobytes(), parent)
