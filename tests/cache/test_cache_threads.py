"""Threads that share a cache: what one finds is what another wrote."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from racing import run_in_threads

import jax_kvblock as kv
from jax_kvblock import _native
from jax_kvblock.cache import GroupedCache

SIZE = 2

pytestmark = pytest.mark.usefixtures("eager_switching")


def make_cache(num_blocks: int, policy: str = "lru") -> kv.PrefixCache:
    manager = kv.BlockManager(
        1, SIZE, num_kv_heads=1, head_dim=1, dtype=jnp.float32, num_blocks=num_blocks
    )
    manager._garbage._wasted = np.inf  # no collections: there are no cycles
    return kv.PrefixCache(manager, model="x", policy=policy)


def what_is_written(tokens: list[int]) -> Iterator[int]:
    """What the keys and values of each token depend on."""
    return (hash(tuple(tokens[: i + 1])) for i in range(len(tokens)))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_is_found_holds_what_its_key_says(policy: str) -> None:
    cache = make_cache(24, policy)
    contents = np.zeros((24, SIZE), np.int64)
    found = [0] * 4
    done = threading.Event()

    def sequence(draw: random.Random, index: int) -> None:
        tokens = [draw.randrange(2) for _ in range(draw.randint(1, 9))]
        wanted = np.array([*what_is_written(tokens)])
        with cache.open(tokens) as table:
            start = table.num_cached_tokens
            found[index] += start
            assert (contents[table.ids].reshape(-1) == wanted[:start]).all()
            table.reserve(len(tokens))
            slots = table.slots(start, len(tokens) - start)
            contents.reshape(-1)[slots] = wanted[start:]
            table.commit(len(tokens))
            assert (contents[table.ids].reshape(-1)[: len(tokens)] == wanted).all()

    def work(index: int) -> None:
        draw = random.Random(index)
        if index < 4:
            try:
                for _ in range(400):
                    with contextlib.suppress(kv.PoolExhaustedError):
                        sequence(draw, index)
            finally:
                done.set()
            return
        while not done.is_set():  # others take blocks, and forget what is in them
            with cache.manager.allocate_blocks(draw.randint(0, 3)) as blocks:
                contents[blocks.ids] = -1
            keys = [key for _, key in _native.victims(cache._free_list, 2)]
            hold, _ = _native.hold_keys(cache._free_list, keys)
            if draw.random() < 0.3:
                cache._free_list.forget(keys)
            hold.release()

    run_in_threads(5, work)
    cache.check()
    stats = cache.stats()
    assert stats["held"] == 0 and min(found) > 0
    assert stats["evicted"] > 100 and stats["duplicates"] + stats["hit_blocks"] > 100


def test_groups_agree_while_blocks_are_taken() -> None:
    """A group's block may go between the look and the hold: then they look again."""
    caches = {"full": make_cache(12), "near": make_cache(12)}
    groups = GroupedCache(caches, windows={"near": 3})
    done = threading.Event()

    def work(index: int) -> None:
        draw = random.Random(index)
        if index == 0:
            while not done.is_set():
                for cache in caches.values():
                    with contextlib.suppress(kv.PoolExhaustedError):
                        cache.manager.allocate_blocks(draw.randint(0, 6)).free()
            return
        try:
            for _ in range(300):
                tokens = [draw.randrange(2) for _ in range(draw.randint(1, 8))]
                try:
                    with groups.open(tokens) as table:
                        ends = {t.num_cached_tokens for t in table.tables.values()}
                        assert ends == {table.num_cached_tokens}
                        table.reserve(len(tokens))
                        table.commit(len(tokens))
                except kv.PoolExhaustedError:
                    pass
        finally:
            done.set()

    run_in_threads(3, work)
    for cache in caches.values():
        cache.check()
        assert cache.stats()["held"] == 0 and cache.stats()["hit_blocks"] > 50


def test_a_block_that_two_publish_at_once_is_one() -> None:
    cache = make_cache(8)
    for i in range(100):
        tables = [cache.open([i, i, i]) for _ in range(2)]

        def publish(index: int, tables: list[kv.BlockTable] = tables) -> None:
            tables[index].reserve(3)
            tables[index].commit(3)

        run_in_threads(2, publish)
        assert tables[0].ids[0] == tables[1].ids[0]
        assert tables[0].ids[1] != tables[1].ids[1]
        for table in tables:
            table.free()
    assert cache.stats()["duplicates"] == 100
    cache.check()
