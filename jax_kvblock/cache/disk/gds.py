"""Blocks from disk into GPU memory by GPUDirect storage, where kvikio is installed.

Tested with a stand-in for kvikio, over host memory: no machine with GPUDirect storage
was at hand. kvikio itself goes by host memory where the driver or the filesystem cannot
do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_kvblock.cache.disk import DiskTier
from jax_kvblock.cache.disk.errors import needed


def read_to_device(
    tier: DiskTier,
    keys: Sequence[bytes],
    buffers: Sequence[Any],
    to_host: Callable[[Any], np.ndarray] | None,
) -> np.ndarray:
    """Reads blocks into buffers of a GPU; bool[n], True for each that was there.

    buffers: what kvikio takes, of block_bytes each: CuPy's arrays, for example.
    to_host: gives a buffer's bytes as uint8[block_bytes] on the host, to be compared
        with the checksums; for example `cupy.asnumpy`. With None nothing is compared,
        and a disk that changed a byte is not noticed.

    Waits for the reads. Raises ImportError without kvikio.
    """
    kvikio = needed("kvikio", "kvikio-cu13 (or -cu12); DiskTier.get reads without it")
    hits = np.zeros(len(keys), bool)
    with tier.held(keys) as places:
        held = [(i, place) for i, place in enumerate(places) if place]
        if not held:
            return hits
        with kvikio.CuFile(held[0][1].path, "r") as file:
            reads = [
                file.pread(buffers[i], size=place.num_bytes, file_offset=place.offset)
                for i, place in held
            ]
            sizes = [read.get() for read in reads]
        for (i, place), size in zip(held, sizes, strict=True):
            whole = size == place.num_bytes
            hits[i] = whole and (to_host is None or place.matches(to_host(buffers[i])))
    return hits
