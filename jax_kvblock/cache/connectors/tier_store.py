"""`TierStore`: the blocks below a `TieredCache`, for a `BlockServer`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jax_kvblock.cache.tiers import TieredCache


class TierStore:
    """What lies in host memory and the store of a `TieredCache`, to be read by others.

    Blocks on the device are not found: offload what others are to have, as
    `write_through` does by itself.

    Args:
      tiers: whose blocks these are.

    Example:
      >>> server = BlockServer(TierStore(tiers), namespace=cache.namespace, ...)
    """

    def __init__(self, tiers: TieredCache) -> None:
        self._below = tiers.below

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._below.has(keys)

    def get(
        self, keys: Sequence[bytes], out: np.ndarray, *, start: int
    ) -> Future[list[bool]]:
        """Reads in the calling thread, which is a connection's own."""
        read: Future[list[bool]] = Future()
        found = self._below.has(keys, waits=True)
        here = [i for i, there in enumerate(found) if there]
        try:
            self._read([keys[i] for i in here], out, here, start)
        except KeyError:  # some went away meanwhile: one by one
            for i in here:
                try:
                    self._read([keys[i]], out, [i], start)
                except KeyError:
                    found[i] = False
        read.set_result(found)
        return read

    def _read(
        self, keys: Sequence[bytes], out: np.ndarray, places: list[int], start: int
    ) -> None:
        if keys:
            end = start + out.shape[1]
            out[places] = self._below.read(keys)[:, start:end]
