"""Which stores a tiered cache takes, how they are asked, and what comes of one that
fails, loses blocks or answers wrongly."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tiers import SIZE, Setup, states
from tier_stores import MemoryStore

from jax_kvblock import BlockManager, BlockSpec, KVPool, PrefixCache
from jax_kvblock.cache import Namespace, TieredCache
from jax_kvblock.cache.disk import DiskTier


class Lacking:
    def has(self, keys: object) -> list[bool]:
        return []


def of_size(**told: object) -> object:
    store = MemoryStore()
    vars(store).update(told)
    return store


@pytest.mark.parametrize(
    ("store", "error", "words"),
    [
        ("/ssd/kv", TypeError, "store must have has, put, get, got str without has"),
        (Lacking(), TypeError, "got Lacking without put, get; pass a DiskTier or"),
        (of_size(block_bytes=96), ValueError, "blocks of 1536 bytes, got one of 96"),
        (
            of_size(namespace=Namespace("x", BlockSpec(3, 2, SIZE, 2, 8, "float32"))),
            ValueError,
            "store must be of the cache's namespace, 'small', got 'x'; open",
        ),
    ],
)
def test_what_is_no_store(store: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Setup(store=store)


def test_a_store_that_is_only_read_needs_no_put() -> None:
    class Read:
        takes = False

        def has(self, keys: object) -> list[bool]:
            return [False for _ in keys]  # type: ignore[attr-defined]

        def get(self, keys: object, out: object) -> None:
            raise AssertionError

    one = Setup(store=Read())
    one.only_below(range(13))
    assert one.tiers.lookup(range(13)) == {"device": 0, "host": 12, "store": 0}
    one.tiers.close()


# ---- what they say, and what comes of it ----


def test_a_store_is_asked_once_for_a_sequence() -> None:
    class Counting(MemoryStore):
        asked = 0

        def has(self, keys):
            self.asked += 1
            return super().has(keys)

    store = Counting()
    one = Setup(store=store)
    one.only_below(range(25))
    one.tiers.below.host.books.forget_idle()
    store.asked = 0
    assert one.tiers.lookup(range(25))["store"] == 24 and store.asked == 1
    table, ticket = one.tiers.open(range(25))
    ticket.wait()
    assert store.asked == 2 and table.match() == 24
    one.holds(table)
    one.tiers.close()


def test_a_store_that_fails_loses_nothing_of_the_host() -> None:
    store = MemoryStore()
    one = Setup(store=store)
    store.broken = OSError("disk full")
    table = one.computed(range(13))
    one.tiers.offload(table).wait()
    one.tiers.drain()
    assert one.tiers.stats()["store"]["failed"] == 3 and not store.blocks
    assert one.tiers.store_error is store.broken
    table.free()
    one.cache.clear()
    table, ticket = one.tiers.open(range(13))
    ticket.wait()
    assert table.match() == 12
    one.holds(table)
    one.tiers.close()


def test_what_a_store_cannot_read_is_a_miss() -> None:
    store = MemoryStore()
    one = Setup(store=store, host_blocks=4)
    one.only_below(range(13))
    one.tiers.below.host.books.forget_idle()
    store.broken = OSError("disk gone")
    table, ticket = one.tiers.open(range(13))
    ticket.wait()
    assert ticket.num_missing == 3 and ticket.exception is None
    assert table.match() == 0 and states(one) == (0, 0)
    assert one.tiers.store_error is store.broken
    stats = one.tiers.stats()["store"]
    assert stats["failed"] == stats["lost"] == 3 and stats["blocks_out"] == 0
    with pytest.raises(KeyError, match="3 of 3 blocks are not below any more"):
        one.tiers.onboard(table, by_layer=True).wait()
    store.broken = None
    ticket = one.tiers.onboard(table)
    ticket.wait()
    assert table.match() == 12
    one.holds(table)
    one.tiers.close()


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("place", [0, 1, 5, 8])
def test_a_block_that_was_lost_meanwhile_is_a_miss(by_layer: bool, place: int) -> None:
    """What lies before it comes; programs of layers count on all, and are told."""
    store = MemoryStore()
    one = Setup(store=store)
    one.only_below(range(37))
    one.tiers.below.host.books.forget_idle()
    store.gate.clear()
    table, ticket = one.tiers.open(range(37), by_layer=by_layer)
    store.blocks.pop(one.cache.namespace.keys(range(37))[place])
    store.gate.set()
    came = place
    if by_layer:
        with pytest.raises(KeyError, match=r"1 of . blocks? are not below any more"):
            ticket.wait()
        came = 0
    else:
        ticket.wait()
        assert ticket.num_missing == 9 - place and ticket.exception is None
        assert one.tiers.stats()["store"]["lost"] == 1
    assert table.match() == came * SIZE and states(one)[0] == came
    one.holds(table)
    one.tiers.below.up.submit(lambda: None).result()  # what was under way has ended
    assert one.tiers.stats()["host"]["held"] == 0 and ticket.done
    one.tiers.close()


class Odd(MemoryStore):
    """Answers too little."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def has(self, keys):
        return super().has(keys)[: -1 if self.what == "has" else None]

    def put(self, keys, rows):
        made = super().put(keys, rows)
        return None if self.what == "put" else made

    def get(self, keys, out):
        made = super().get(keys, out)
        made.result()
        short: Future[list[bool]] = Future()
        short.set_result([])
        return short if self.what == "get" else made


@pytest.mark.parametrize("what", ["has", "put", "get"])
def test_a_store_that_answers_wrongly_fails_and_is_closed(what: str) -> None:
    good, odd = MemoryStore(), Odd(what)
    one = Setup(store=good if what == "get" else odd)
    one.only_below(range(13))
    odd.blocks = good.blocks
    if what == "get":
        one.tiers.below.host.books.forget_idle()  # in the store alone
        one.tiers.below.store = odd
        table, ticket = one.tiers.open(range(13))
        ticket.wait()
        assert table.match() == 0 and ticket.num_missing == 3
    else:
        assert one.tiers.lookup(range(13))["host"] == 12
    assert one.tiers.stats()["store"]["failed"] == 3
    words = (
        "put of a store must give a Future, got None"
        if what == "put"
        else (f"{what} of a store must tell of each of 3 keys")
    )
    assert words in str(one.tiers.store_error)
    one.tiers.check()
    one.tiers.close()


def of_rank(rank: int, folder: Path | None, namespace: bytes | None = None) -> Any:
    """One of a model's two KV heads, whose blocks hold the rank; over a disk tier."""
    manager = BlockManager(2, 4, num_kv_heads=1, head_dim=8, num_blocks=8)
    cache = PrefixCache(manager, model="m", num_kv_heads=2)
    own = cache.namespace.of_heads(range(rank, rank + 1))
    tier = folder and DiskTier(
        folder,
        namespace=own if namespace is None else cache.namespace.digest,
        block_bytes=manager.spec.block_bytes,
        max_bytes=4 << 20,
    )
    return manager, cache, tier


def test_ranks_of_one_model_share_a_folder_and_no_blocks(tmp_path: Path) -> None:
    """Their keys are the same, and their heads are not."""
    for rank in (0, 1, 0):
        manager, cache, disk = of_rank(rank, tmp_path)
        with disk, TieredCache(cache, host_bytes=1 << 16, store=disk) as tiers:
            table, ticket = tiers.open(range(9))
            ticket.wait()
            found, new = table.match(), not any(disk.keys())
            assert found == (0 if new else 8)
            if new:
                table.reserve(9)
                manager.update(_add, rank + 1)
                table.commit(9)
            held = np.asarray(manager.pool.data[table.ids[:2]])
            np.testing.assert_array_equal(held, rank + 1)
            tiers.offload(table).wait()
            tiers.drain()


def test_a_disk_of_another_model_is_refused(tmp_path: Path) -> None:
    """Also of this one under its name before."""
    for model in ("m", "another"):
        _, cache, disk = of_rank(0, tmp_path)
        cache.set_model_name(model)
        with disk:
            if model == "m":
                TieredCache(cache, host_bytes=1 << 16, store=disk).close()
                continue
            words = "store must be of the cache's namespace, 'another', got another one"
            with pytest.raises(ValueError, match=words):
                TieredCache(cache, host_bytes=1 << 16, store=disk)


@pytest.mark.parametrize("kind", ["of all heads", "of nobody knows which"])
def test_a_shards_store_tells_its_heads(tmp_path: Path, kind: str) -> None:
    _, cache, disk = of_rank(0, tmp_path if kind == "of all heads" else None, b"all")
    store = disk or MemoryStore()
    with pytest.raises(ValueError, match=r"which 1 of the model's 2 KV heads it holds"):
        TieredCache(cache, host_bytes=1 << 16, store=store)
    if disk:
        disk.close()
    else:
        store.heads = range(1)  # type: ignore[union-attr]
        TieredCache(cache, host_bytes=1 << 16, store=store).close()


def _add(pool: KVPool, number: int) -> KVPool:
    return KVPool(pool.data + number, pool.spec)
