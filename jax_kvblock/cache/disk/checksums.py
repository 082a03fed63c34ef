"""Checksums of blocks, one for each part, so that a range is verified alone.

A block has at most 8 parts of whole pages. A part's checksum is XXH3-128, seeded by
what the index says of the block: its key, its generation and its slot. A slot that
holds another block, or an older one, does not match, though it was written whole.
"""

from __future__ import annotations

import struct
from typing import Any

from jax_kvblock.cache.disk.errors import needed

PAGE = 4096
SUM_BYTES = 16
_MAX_PARTS = 8
_LEAST_PART = 4 * PAGE
_MASK = (1 << 64) - 1


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Parts:
    """How blocks of a size are cut: `size` bytes to a part, `count` parts."""

    def __init__(self, block_bytes: int) -> None:
        least = round_up(-(-block_bytes // _MAX_PARTS), PAGE)
        self.block_bytes = block_bytes
        self.size = max(_LEAST_PART, least)
        self.count = -(-block_bytes // self.size)

    def around(self, start: int, count: int) -> tuple[int, int]:
        """The first part that has some of the range, and the one after its last."""
        return start // self.size, -(-(start + count) // self.size)

    def begin(self, part: int) -> int:
        """Where a part begins; of the one after the last, where the block ends."""
        return min(part * self.size, self.block_bytes)


class Checksums:
    """Takes and compares the checksums of blocks that are cut into `parts`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        xxhash = needed("xxhash")
        self._digest, self._seed = xxhash.xxh3_128_digest, xxhash.xxh3_64_intdigest

    def take(self, data: Any, key: bytes, generation: int, slot: int) -> bytes:
        """Of a whole block, 16 bytes for each part."""
        return self._sums(data, 0, self.parts.count, key, generation, slot)

    def hold(
        self, data: Any, first: int, sums: bytes, key: bytes, generation: int, slot: int
    ) -> bool:
        """Whether `data`, which are parts `first` and on, have the sums of these."""
        end = first + -(-len(data) // self.parts.size)
        found = self._sums(data, first, end, key, generation, slot)
        return found == sums[first * SUM_BYTES : end * SUM_BYTES]

    def _sums(
        self, data: Any, first: int, end: int, key: bytes, generation: int, slot: int
    ) -> bytes:
        seed = self._seed(key + struct.pack("<QQ", generation, slot))
        size, digest = self.parts.size, self._digest
        return b"".join(
            digest(data[i * size : (i + 1) * size], (seed + first + i) & _MASK)
            for i in range(end - first)
        )
