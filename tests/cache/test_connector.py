"""Blocks put together from parts of other tensor-parallel sizes."""

from __future__ import annotations

import numpy as np
import pytest
from tier_parts import HEAD_BYTES, HEADS, MemoryPart, block, blocks, keys, namespace

from jax_kvblock.cache.connector import Connector, ConnectorError, check_rate

TWO = (range(0, 2), range(2, 4))


def read(connector: Connector, of: list[bytes], heads: range) -> np.ndarray:
    out = np.zeros((len(of), len(heads) * HEAD_BYTES), np.uint8)
    found = connector.get(of, out, heads=heads).result(10)
    assert found == connector.has(of, heads=heads) == [True] * len(of)
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_of_two_are_read_by_jobs_of_any_size(size: int) -> None:
    of = keys(3)
    parts = [MemoryPart(heads, of) for heads in TWO]
    each = HEADS // size
    for rank in range(size):
        heads = range(rank * each, (rank + 1) * each)
        connector = Connector(namespace(each), heads, parts)
        got = read(connector, of, heads)
        np.testing.assert_array_equal(got, blocks(of, heads))
    first = {1: (3, 0, 2), 2: (3, 0, 2), 4: (3, 0, 1)}[size]
    count, start, length = parts[0].reads[0]
    assert (count, start // HEAD_BYTES, length // HEAD_BYTES) == first


def test_a_block_is_there_when_all_of_its_heads_are() -> None:
    one, two, three = keys(3)
    left, right = MemoryPart(TWO[0], [one, two]), MemoryPart(TWO[1], [two, three])
    connector = Connector(namespace(), None, [left, right])
    assert connector.has([one, two, three]) == [False, True, False]
    assert connector.has([one, two, three], heads=TWO[0]) == [True, True, False]
    out = np.zeros((3, HEADS * HEAD_BYTES), np.uint8)
    assert connector.get([one, two, three], out).result(10) == [False, True, False]
    np.testing.assert_array_equal(out[1], block(two))
    assert not out[0].any() and not out[2].any()  # and nothing was read in vain
    assert [read[0] for read in left.reads + right.reads] == [1, 1]


def test_the_nearest_part_is_read_and_others_fill_the_gaps() -> None:
    one, two = keys(2)
    near = MemoryPart(range(1, 3), [one])
    far = MemoryPart(range(HEADS), [one, two])
    connector = Connector(namespace(), None, [near, far])
    np.testing.assert_array_equal(
        read(connector, [one, two], range(HEADS)), blocks([one, two])
    )
    size = HEAD_BYTES
    assert near.reads == [(1, 0, 2 * size)]
    assert sorted(far.reads) == [(1, 0, size), (1, 0, 4 * size), (1, 3 * size, size)]


def test_one_that_went_away_meanwhile_is_a_miss() -> None:
    one, two = keys(2)
    part = MemoryPart(range(HEADS), [one])
    part.lies = {two}
    connector = Connector(namespace(), None, [part])
    out = np.zeros((2, HEADS * HEAD_BYTES), np.uint8)
    assert connector.get([one, two], out).result(10) == [True, False]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_part_that_fails(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of = keys(2)
    parts = [MemoryPart(heads, of) for heads in TWO]
    parts[0].broken = OSError("the disk is gone")
    if at_once:

        def get(*_: object, **__: object) -> None:
            raise OSError("the disk is gone")

        monkeypatch.setattr(parts[0], "get", get)
    connector = Connector(namespace(), None, parts)
    out = np.zeros((2, HEADS * HEAD_BYTES), np.uint8)
    with pytest.raises(OSError, match="the disk is gone"):
        connector.get(of, out).result(10)


def test_nothing_to_read() -> None:
    connector = Connector(namespace(), None, [MemoryPart()])
    assert connector.has([]) == []
    empty = np.zeros((0, HEADS * HEAD_BYTES), np.uint8)
    assert connector.get([], empty).result(1) == []


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"Connector: heads must be the 2 of .* got 4"):
        Connector(namespace(2))
    with pytest.raises(
        ValueError, match=r"must be a range of the model's 4, got \[1\]"
    ):
        Connector(namespace(1), [1])  # type: ignore[arg-type]
    for heads in (range(3, 5), range(-1, 1), range(0, 4, 2)):
        with pytest.raises(
            ValueError, match="must be a range of the model's 4, got ra"
        ):
            Connector(namespace(2), heads)
    connector = Connector(namespace(2), TWO[1], [MemoryPart()])
    with pytest.raises(ValueError, match=r"must be a range of .* got range\(4, 6\)"):
        connector.has(keys(1), heads=range(4, 6))
    wide = np.zeros((1, 3 * HEAD_BYTES), np.uint8)
    with pytest.raises(
        ValueError, match=r"Connector.get: out must be uint8\[1, 1536\]"
    ):
        connector.get(keys(1), wide)
    with pytest.raises(ValueError, match=r"out must be uint8\[1, 1536\], .* got float"):
        connector.get(keys(1), np.zeros((1, 1536)))
    with pytest.raises(ConnectorError, match=r"Connector\.put: blocks are only read"):
        connector.put(keys(1), wide)


def test_a_rate_below_the_least_is_an_error_with_numbers() -> None:
    assert check_rate("here", 10**9, 0.5, 1e9) == 2e9
    said = r"here: 0.5 GB/s with 954 MiB, less than min_bandwidth, 1 GB/s; use a faster"
    with pytest.raises(ConnectorError, match=said):
        check_rate("here", 10**9, 2, 1e9)
