"""What lies below a tiered cache, as a server reads it."""

from __future__ import annotations

import numpy as np
from small_tiers import Setup
from tier_stores import MemoryStore

from jax_kvblock.cache.connectors import TierStore


def test_what_is_there_and_what_is_not() -> None:
    one = Setup(store=MemoryStore())
    one.only_below(range(13))
    keys = [bytes(32), *one.cache.namespace.keys(range(12)), bytes([1]) * 32]
    store = TierStore(one.tiers)
    assert store.has(keys) == [False, True, True, True, False]
    assert store.has([]) == []
    start = one.size // 4
    out = np.full((5, one.size // 2), 7, np.uint8)
    assert store.get(keys, out, start=start).result() == [
        False,
        True,
        True,
        True,
        False,
    ]
    for key, row in zip(keys[1:4], out[1:4], strict=True):
        whole = np.ascontiguousarray(one.universal(key)).view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(row, whole[start : start + len(row)])
    assert (out[[0, 4]] == 7).all()
    one.tiers.close()


def test_one_that_went_away_meanwhile_is_a_miss_alone() -> None:
    memory = MemoryStore()
    one = Setup(store=memory)
    one.only_below(range(13))
    one.tiers.below.host.books.forget_idle()  # in the store alone

    class Lies(MemoryStore):
        def has(self, keys: object) -> list[bool]:
            return [True] * len(list(keys))  # type: ignore[call-overload]

    lies = Lies()
    lies.blocks = memory.blocks
    one.tiers.below.store = lies
    keys = one.cache.namespace.keys(range(12))
    memory.blocks.pop(keys[1])
    out = np.zeros((3, one.size), np.uint8)
    found = TierStore(one.tiers).get(keys, out, start=0).result()
    assert found == [True, False, True]
    assert out[0].any() and out[2].any()
    one.tiers.close()


def test_who_reads_waits_for_a_store_that_is_slow_to_tell() -> None:
    class Slow(MemoryStore):
        ask_seconds = 0.25
        timeouts: list[float | None] = []  # noqa: RUF012

        def has(self, keys, timeout=None):
            self.timeouts.append(timeout)
            return super().has(keys) if timeout is None else [False] * len(keys)

    slow = Slow()
    one = Setup(store=slow)
    one.only_below(range(13))
    one.tiers.below.host.books.forget_idle()  # in the store alone
    slow.timeouts.clear()
    keys = one.cache.namespace.keys(range(12))
    out = np.zeros((3, one.size), np.uint8)
    store = TierStore(one.tiers)
    assert store.has(keys) == [False] * 3 and slow.timeouts == [0.25]
    assert store.get(keys, out, start=0).result() == [True] * 3
    one.tiers.close()
