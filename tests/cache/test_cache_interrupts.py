"""Interrupts: whatever stops Python, tables and holds lose no block."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import Alarm, interrupt_everywhere

import jax_kvblock as kv
from jax_kvblock import _native
from jax_kvblock.cache import GroupedCache

BLOCKS, SIZE = 8, 2


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell may start a program with SIGINT ignored; Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def make_cache() -> kv.PrefixCache:
    manager = kv.BlockManager(
        1, SIZE, num_kv_heads=1, head_dim=2, dtype=jnp.float32, num_blocks=BLOCKS
    )
    return kv.PrefixCache(manager, model="x", events=True)


@pytest.fixture
def cache() -> kv.PrefixCache:
    return make_cache()


def a_prompt(cache: kv.PrefixCache) -> None:
    with cache.open(range(7)) as table:
        table.reserve(8)
        start = table.num_cached_tokens
        table.slots(start, 7 - start)
        table.commit(7)
        table.append(7)
        table.page_table(4)
        table.commit(8)
        table.free_before(4)
    cache.drain_events()


def forked(cache: kv.PrefixCache) -> None:
    table = cache.open(range(3), salt="forked")
    table.reserve(3)
    table.commit(3)
    other = table.fork()
    other.writable(0, 3)
    other.truncate(1)
    del table


def held(cache: kv.PrefixCache) -> None:
    a_prompt(cache)
    keys = [key for _, key in _native.victims(cache._free_list, 2)]
    hold, _ = _native.hold_keys(cache._free_list, keys)
    copies = _native.hold(cache._free_list, hold.ids)
    with cache.manager.allocate_blocks(3), copies:
        hold.release()


USES: dict[str, Callable[[kv.PrefixCache], None]] = {
    "a prompt": a_prompt,
    "forked": forked,
    "held": held,
}


@pytest.mark.parametrize("use", USES)
def test_no_block_is_lost_wherever_an_interrupt_comes(
    cache: kv.PrefixCache, use: str
) -> None:
    USES[use](cache)  # compiled, where it copies
    cache.clear()

    def all_are_back() -> None:
        cache.check()
        assert cache.stats()["held"] == 0
        cache.clear()  # so that the next round does the same
        assert cache.num_free_blocks == BLOCKS

    assert interrupt_everywhere(lambda: USES[use](cache), all_are_back) > 15


def test_groups_lose_no_block_either() -> None:
    caches = {"full": make_cache(), "near": make_cache()}
    groups = GroupedCache(caches, windows={"near": 3})

    def work() -> None:
        with groups.open(range(7)) as table:
            table.reserve(7)
            table.commit(7)

    def all_are_back() -> None:
        for cache in caches.values():
            cache.check()
            assert cache.stats()["held"] == 0

    assert interrupt_everywhere(work, all_are_back) > 30
    assert groups.open(range(7)).num_cached_tokens == 6


def test_no_block_is_lost_in_a_storm_of_signals(cache: kv.PrefixCache) -> None:
    forked(cache)
    work = [a_prompt, forked, held]

    def one() -> None:
        work[np.random.default_rng().integers(3)](cache)

    with Alarm() as alarm:
        assert alarm.storm(one, lambda: None, 0.7) > 5
    gc.collect()
    cache.check()
    assert cache.stats()["held"] == 0
