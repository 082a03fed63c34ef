"""Checksums of parts: bound to the bytes, and to what the index says of them."""

from __future__ import annotations

import numpy as np
import pytest
from disk_tiers import content, key

from jax_kvblock.cache.disk.checksums import PAGE, SUM_BYTES, Checksums, Parts


@pytest.mark.parametrize(
    ("block_bytes", "size", "count"),
    [
        (1, 4 * PAGE, 1),
        (4 * PAGE, 4 * PAGE, 1),
        (4 * PAGE + 1, 4 * PAGE, 2),
        (1 << 20, 1 << 17, 8),
        (5_242_880, 655_360, 8),
        (1_000_000, 31 * PAGE, 8),
    ],
)
def test_parts(block_bytes: int, size: int, count: int) -> None:
    parts = Parts(block_bytes)
    assert (parts.size, parts.count) == (size, count)
    ends = [parts.begin(part) for part in range(count + 1)]
    assert ends[0] == 0 and ends[-1] == block_bytes and ends == sorted(set(ends))
    assert parts.around(0, block_bytes) == (0, count)
    assert parts.around(block_bytes - 1, 1) == (count - 1, count)
    assert parts.around(0, 1) == (0, 1)


def test_another_block_does_not_match() -> None:
    sums = Checksums(Parts(9 * PAGE))
    data = content(key(1), 9 * PAGE)
    kept = sums.take(data, key(1), 7, 3)
    assert len(kept) == 3 * SUM_BYTES

    def holds(data: np.ndarray, of: bytes, generation: int, slot: int) -> bool:
        return sums.hold(data, 0, kept, of, generation, slot)

    assert holds(data, key(1), 7, 3)
    assert not holds(data, key(2), 7, 3)
    assert not holds(data, key(1), 8, 3)
    assert not holds(data, key(1), 7, 4)
    for at in (0, 4 * PAGE, 9 * PAGE - 1):
        changed = data.copy()
        changed[at] ^= 1
        assert not holds(changed, key(1), 7, 3)


def test_a_part_matches_in_its_place_alone() -> None:
    sums = Checksums(Parts(12 * PAGE))
    data = np.tile(content(key(1), 4 * PAGE), 3)  # parts of the same bytes
    kept = sums.take(data, key(1), 7, 3)
    assert len({kept[i : i + SUM_BYTES] for i in range(0, len(kept), SUM_BYTES)}) == 3
    part = data[: 4 * PAGE]
    assert all(sums.hold(part, i, kept, key(1), 7, 3) for i in range(3))
    moved = kept[SUM_BYTES:] + kept[:SUM_BYTES]
    assert not any(sums.hold(part, i, moved, key(1), 7, 3) for i in range(3))
