"""`HostTier`: blocks in pinned host memory, found by their keys."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.cache.copy_lines import bytes_at

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of all pinned memory that XLA gives out


class HostTier:
    """Slots for blocks in pinned host memory, with the books of a pool.

    A slot holds a block in universal order, `[nh, nl, no, nt, hd]`.

    Args:
      spec: what a block is; its layout is no matter.
      max_bytes: how much memory the slots take, at most.
      device: whose host memory it is.
      num_landing: places behind the slots, beside `max_bytes`: what a store reads lies
        there until it is on the device.

    Attributes:
      spec: the same in universal layout.
      device: as above.
      rows: the slots, then the landing places, uint8 `[…, block_bytes]`.
      books: who holds which slot, and what is found.

    Raises:
      ValueError: when not one block fits `max_bytes`; or when XLA would not give out as
        much pinned memory, with the variable that decides it.
    """

    def __init__(
        self,
        spec: BlockSpec,
        max_bytes: int,
        device: jax.Device,
        num_landing: int = 0,
    ) -> None:
        self.spec, self.device = spec.replace(layout="universal"), device
        self.block_bytes = spec.block_bytes
        self.num_slots = max_bytes // self.block_bytes
        if self.num_slots < 1:
            raise ValueError(
                f"HostTier: max_bytes must hold a block of {self.block_bytes} bytes, "
                f"got {max_bytes}"
            )
        places = self.num_slots + num_landing
        size = places * self.block_bytes
        if device.platform == "gpu":
            check_limit(size, sum(tier.rows.nbytes for tier in _pinned))
        # It is never donated and no program reads it: its memory stays where it is.
        self._pool = KVPool.zeros(
            self.spec, places, memory_kind="pinned_host", device=device
        )
        jax.block_until_ready(self._pool.data)
        address = self._pool.arrays[0].unsafe_buffer_pointer()
        self.rows: np.ndarray = bytes_at(address, size).reshape(places, -1)
        self.books = _native.FreeList(self.num_slots)
        if device.platform == "gpu":
            _pinned.add(self)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether its block is here."""
        return [self.books.find(key) is not None for key in keys]

    def publish(self, slot: int, key: bytes) -> None:
        """Has a slot found that somebody holds, unless another one has the key."""
        self.books.publish(slot, key, bytes(32))


_pinned: weakref.WeakSet[HostTier] = weakref.WeakSet()


def check_limit(size: int, taken: int = 0) -> None:
    """Pinned memory comes from one pool of XLA's, whose size is set at the start.

    Raises:
      ValueError: when `size` bytes beside the `taken` ones are more than all of it.
    """
    said = os.environ.get(LIMIT, "64")
    try:
        limit = float(said) * 2**30
    except ValueError:
        raise ValueError(f"HostTier: {LIMIT} must be a number, got {said!r}") from None
    if size + taken > limit:
        beside = f" beside {taken / 2**30:.1f} GiB of other tiers" if taken else ""
        raise ValueError(
            f"HostTier: {size / 2**30:.1f} GiB of pinned memory{beside}, and XLA gives "
            f"out {said} GiB; set {LIMIT}={-(-(size + taken) // 2**30) + 1} before jax "
            "starts, or make host_bytes smaller"
        )
