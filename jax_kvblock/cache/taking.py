"""Blocks that are taken from a pool, or an error that tells what to do without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jax_kvblock import _native
from jax_kvblock.objects.manager import BlockManager, PoolExhaustedError

T = TypeVar("T")


def attempt(manager: BlockManager, take: Callable[[], T]) -> T:
    """What `take` gives; for None or False, again if garbage had any blocks."""
    found = take()
    if found is not None and found is not False:
        return found
    return take() if manager._garbage.collect(manager._memory.free_list) else found


def take_hold(manager: BlockManager, count: int, told: str) -> _native.Hold:
    """So many blocks.

    Raises:
      PoolExhaustedError: when too few are free, with `told` before the numbers.
    """
    free_list = manager._memory.free_list
    hold = attempt(manager, lambda: _native.take_hold(free_list, count))
    if hold is None:
        raise exhausted(manager, told)
    return hold


def exhausted(manager: BlockManager, told: str) -> PoolExhaustedError:
    """Too few blocks are free for what `told` says."""
    return PoolExhaustedError(
        f"{told}, {manager.num_free_blocks} of {manager.num_blocks} free; end or park "
        "a sequence, or build the manager with a larger num_blocks"
    )
