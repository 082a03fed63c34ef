"""Blocks go down to host memory and a store, and come back bit for bit."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tiers import SIZE, Setup, states
from tier_stores import MemoryStore

from jax_kvblock import BlockTable, KVPool, PoolExhaustedError
from jax_kvblock.cache import GroupedCache, host
from jax_kvblock.cache.copy_lines import CopyError


@functools.partial(jax.jit, donate_argnums=0)
def decode(pool: KVPool) -> KVPool:
    """A step that takes the pool and gives it back."""
    return KVPool(pool.data * 1, pool.spec)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.tiers.close()
    made.tiers.check()


# ---- down and up ----


@pytest.mark.parametrize("layout", ["NHD", "HND", "universal", "operational"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_down_and_up(layout: str, by_layer: bool) -> None:
    one = Setup(layout=layout, dtype=jnp.bfloat16)
    one.only_below(range(41))
    assert states(one) == (0, 10)
    one.manager.pool = KVPool(jnp.ones_like(one.manager.pool.data), one.manager.spec)
    table, ticket = one.tiers.open(range(41), by_layer=by_layer)
    assert table.num_cached_tokens == 0 and ticket.num_blocks == 10
    ticket.wait()
    assert ticket.done and ticket.exception is None and table.match() == 40
    one.holds(table)
    stats = one.tiers.stats()["host"]
    assert stats["blocks_in"] == stats["blocks_out"] == 10
    assert stats["bytes_in"] == stats["bytes_out"] == 10 * one.size
    assert stats["pending"] == stats["held"] == 0
    one.tiers.close()


@pytest.mark.parametrize("by_layer", [False, True])
def test_keys_come_up_before_anybody_asks(by_layer: bool) -> None:
    setup = Setup(events=True)
    setup.only_below(range(41))
    keys = setup.cache.namespace.keys(range(41))
    setup.cache.drain_events()

    def onboard(first: int, end: int, **options: bytes) -> int:
        ticket = setup.tiers.onboard(keys[first:end], by_layer=by_layer, **options)
        ticket.wait()
        return ticket.num_blocks

    assert onboard(0, 3) == 3 and states(setup)[0] == 3
    assert onboard(5, 7, parent=keys[4]) == 2 and states(setup)[0] == 5
    assert onboard(0, 2) == 0  # they are there
    assert onboard(0, 10) == 7  # from the first that is not
    assert setup.tiers.onboard([]).num_blocks == 0
    table = setup.cache.open(range(41))
    assert table.num_cached_tokens == 40
    setup.holds(table)
    notes = setup.cache.drain_events()
    parents = {key: parent for what, key, parent, *_ in notes if what == "stored"}
    chain = [setup.cache.namespace.root(), *keys]
    assert parents == dict(zip(keys[:10], chain, strict=False))
    setup.tiers.close()


def test_keys_that_are_there_stay_while_others_come() -> None:
    """On a device that is full, what comes takes the place of others alone."""
    one = Setup(num_blocks=8)
    one.only_below(range(29))
    keys = one.cache.namespace.keys(range(29))
    one.tiers.onboard(keys[:3]).wait()
    one.computed([50, *range(3)]).free()
    held = one.computed([60, *range(7)])
    assert one.cache.num_free_blocks == 2
    with pytest.raises(PoolExhaustedError, match="onboard: 4 blocks to come, 3 of 8"):
        one.tiers.onboard(keys[:7])
    assert one.cache.open(range(29)).num_cached_tokens == 12
    one.tiers.onboard(keys[:6]).wait()
    assert one.cache.open(range(29)).num_cached_tokens == 24
    one.holds(held)
    one.tiers.close()


def test_what_is_no_key(setup: Setup) -> None:
    keys = setup.cache.namespace.keys(range(9))
    for bad in ([b"short"], ["text"], [keys[0], None]):
        with pytest.raises(TypeError, match="onboard: pass a table, or keys of 32"):
            setup.tiers.onboard(bad)
    grouped = GroupedCache({"a": setup.cache}).open(range(9))
    for call in (setup.tiers.onboard, setup.tiers.offload):
        with pytest.raises(TypeError, match=r"pass a table, or .*no tables of groups"):
            call(grouped)
    with pytest.raises(TypeError, match="onboard: parent must be 32 bytes"):
        setup.tiers.onboard(keys, parent=b"short")
    with pytest.raises(ValueError, match="parent is for keys"):
        setup.tiers.onboard(setup.cache.open(range(9)), parent=keys[0])


def test_under_steps_that_donate_the_pool(setup: Setup) -> None:
    tables = [setup.computed([i, *range(11)]) for i in range(4)]
    tickets = []
    for table in tables:
        tickets.append(setup.tiers.offload(table))
        with setup.manager.lock:
            setup.manager.pool = decode(setup.manager.pool)
        table.free()
    setup.cache.clear()
    taken = setup.manager.allocate_blocks(16)  # whose blocks are written at once
    for block in taken.ids.tolist():
        setup.put(block, np.ones(setup.manager.spec.block_shape, np.float32))
    taken.free()
    for ticket in tickets:
        ticket.wait()
    for i in range(4):
        table, up = setup.tiers.open([i, *range(11)])
        while not up.poll():
            with setup.manager.lock:
                setup.manager.pool = decode(setup.manager.pool)
        assert table.match() == 8
        setup.holds(table)


def test_layers_arrive_one_by_one(setup: Setup, monkeypatch) -> None:
    table = setup.computed(range(9))
    setup.tiers.offload(table).wait()
    keys, ids = table.keys, table.ids
    table.free()
    setup.cache.clear()
    below, gates = setup.tiers.below, [threading.Event() for _ in range(3)]
    bring, calls = below.bring, [0, 1, 2]
    monkeypatch.setattr(
        below, "bring", lambda *given: (gates[calls.pop(0)].wait(30), bring(*given))[1]
    )
    table, ticket = setup.tiers.open(range(9), by_layer=True)
    with pytest.raises(TimeoutError):
        ticket.wait(layer=0, timeout=0.05)
    for layer in range(3):
        assert not ticket.done and table.match() == 0
        gates[layer].set()
        ticket.wait(layer=layer)
        pool = np.asarray(setup.manager.pool.data)
        for block, key in zip(ids, keys, strict=False):
            wanted = setup.content(key)
            np.testing.assert_array_equal(pool[block, layer], wanted[layer])
    assert ticket.done and table.match() == 8
    setup.holds(table)


@functools.partial(jax.jit, static_argnames="layer")
def of_layer(pool: KVPool, ids: jax.Array, layer: int) -> jax.Array:
    """A program of one layer, which reads its keys and values."""
    return pool.data[ids, layer] * 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["host", "store"])
def test_a_layer_is_computed_while_the_next_one_is_held_back(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Setup(store=MemoryStore() if where == "store" else None)
    one.only_below(range(17))
    if where == "store":
        one.tiers.below.host.books.forget_idle()
    for block in range(one.manager.num_blocks):
        one.put(block, np.zeros(one.manager.spec.block_shape, np.float32))
    keys = one.cache.namespace.keys(range(17))
    wanted = np.stack([one.content(key) for key in keys])
    begun, gates = ([threading.Event() for _ in range(3)] for _ in range(2))
    copies = one.tiers.below._copies
    start_up = copies.start_up

    def held(host, slots, cut, *rest, **more):
        layer = cut.first // cut.width
        begun[layer].set()
        assert gates[layer].wait(60)
        return start_up(host, slots, cut, *rest, **more)

    monkeypatch.setattr(copies, "start_up", held)
    table, ticket = one.tiers.open(range(17), by_layer=True)
    with pytest.raises(TimeoutError):
        ticket.wait(layer=0, timeout=0.05)
    for layer in range(3):
        gates[layer].set()
        ticket.wait(layer=layer, timeout=60)
        if layer < 2:
            assert begun[layer + 1].wait(60)  # its copy is under way, and stands still
        with one.manager.lock:
            found = of_layer(one.manager.pool, ticket.ids, layer)
        np.testing.assert_array_equal(found, wanted[:, layer] * 2)
        assert ticket.done == (layer == 2)
        assert not np.asarray(one.manager.pool.data)[:, layer + 1 :].any()
    assert table.match() == 16 and table.ids.tolist() == ticket.ids.tolist()
    one.holds(table)
    one.tiers.close()


def test_without_layers_one_after_the_other_all_are_waited_for(setup: Setup) -> None:
    setup.only_below(range(17))
    table, ticket = setup.tiers.open(range(17))
    ticket.wait(layer=0)
    assert ticket.done and table.match() == 16
    setup.holds(table)


def test_programs_are_compiled_before(compiles: list[str]) -> None:
    one = Setup()
    one.computed(range(16)).free()
    one.tiers.compile()
    found = len(compiles)
    assert found
    for count in (1, 2, 3, 4):
        keys = one.cache.namespace.keys(range(16))[:count]
        one.tiers.offload(keys).wait()
        one.cache.clear()
        table, ticket = one.tiers.open(range(4 * count + 1))
        ticket.wait()
        assert table.match() == 4 * count
        one.holds(table)
        table.free()
        with one.computed(range(16)):
            pass
    assert len(compiles) == found
    one.tiers.close()


def test_what_is_below_is_not_sent_again(setup: Setup) -> None:
    table = setup.computed(range(13))
    first = setup.tiers.offload(table)
    second = setup.tiers.offload(table)
    assert len(first.keys) == 3 and second.keys == () and second.done
    first.wait()
    assert setup.tiers.offload([bytes(32)]).keys == ()
    assert setup.tiers.stats()["host"]["blocks_in"] == 3


def test_lookup_says_what_lies_where() -> None:
    store = MemoryStore()
    one = Setup(host_blocks=2, store=store)
    table = one.computed(range(25))
    for first in range(0, 6, 2):  # the host keeps the last two
        one.tiers.offload(table.keys[first : first + 2]).wait()
        one.tiers.drain()
    table.free()
    one.cache._free_list.forget(one.cache.namespace.keys(range(25))[2:])
    assert one.tiers.lookup(range(25)) == {"device": 8, "host": 0, "store": 16}
    one.tiers.offload(one.cache.namespace.keys(range(25))[:2]).wait()
    assert one.tiers.lookup(range(25)) == {"device": 8, "host": 0, "store": 16}
    one.cache.clear()
    assert one.tiers.lookup(range(25)) == {"device": 0, "host": 8, "store": 16}
    table, ticket = one.tiers.open(range(25))
    ticket.wait()
    assert table.match() == 24
    one.holds(table)
    assert one.tiers.stats()["store"]["blocks_out"] == 4
    one.tiers.close()


# ---- what goes wrong ----


def test_cancelled(setup: Setup) -> None:
    setup.only_below(range(13))
    table, ticket = setup.tiers.open(range(13))
    assert setup.cache.stats()["held"] == 3
    ticket.cancel()
    ticket.cancel()
    assert ticket.done and ticket.cancelled and states(setup)[0] == 0
    setup.tiers.below.up.submit(lambda: None).result()  # what was under way has ended
    assert setup.tiers.stats()["host"]["held"] == 0
    with pytest.raises(RuntimeError, match="it was cancelled"):
        ticket.wait()
    table, ticket = setup.tiers.open(range(13))
    ticket.wait()
    assert table.match() == 12
    ticket.cancel()  # it has ended
    assert not ticket.cancelled
    setup.holds(table)


def test_dropped_tickets_give_blocks_back(setup: Setup) -> None:
    setup.only_below(range(13))
    setup.tiers.open(range(13))  # neither is kept
    setup.tiers.below.up.submit(lambda: None).result()
    assert states(setup)[0] == 0


def test_a_copy_that_fails_is_counted_and_not_found(setup: Setup, monkeypatch) -> None:
    table = setup.computed(range(13))

    copies = setup.tiers.below._copies
    start_down = copies.start_down

    def broken(staged: jax.Array, rows: list[int], host: np.ndarray, slots: list[int]):
        start_down(staged, rows[:1], host, slots[:1]).wait()  # the first is copied
        raise CopyError("no copy")

    monkeypatch.setattr(copies, "start_down", broken)
    ticket = setup.tiers.offload(table)
    with pytest.raises(CopyError, match="no copy"):
        ticket.wait()
    setup.tiers.drain()
    monkeypatch.undo()
    stats = setup.tiers.stats()["host"]
    assert stats["failed"] == 3 and stats["held"] == stats["idle"] == 0
    assert setup.tiers.lookup(range(13))["device"] == 12


def test_two_on_the_way_collapse(setup: Setup) -> None:
    setup.only_below(range(13))
    one, up = setup.tiers.open(range(13))
    two, also = setup.tiers.open(range(13))
    up.wait()
    also.wait()
    assert one.match() == two.match() == 12 and one.ids.tolist() == two.ids.tolist()
    assert setup.cache.stats()["held"] == 3
    setup.holds(one)


# ---- all at once ----


def test_random_work_against_what_keys_say() -> None:
    random = np.random.default_rng(0)
    tables: list[BlockTable] = []
    store = MemoryStore()
    one = Setup(num_blocks=12, host_blocks=10, store=store, low=0.1, high=0.3)
    found = 0
    for _ in range(120):
        tokens = [int(random.integers(3)), *range(int(random.integers(3, 21)))]
        while one.manager.num_free_blocks < 5:
            tables.pop(0).free()
        table, ticket = one.tiers.open(tokens)
        if random.random() < 0.1:
            ticket.cancel()
        else:
            ticket.wait()
        found += table.match()
        wanted = -(-table.num_tokens // SIZE) - len(table)
        while wanted > one.manager.num_free_blocks:
            tables.pop(0).free()
        one.tiers.make_room(wanted)
        table.reserve(table.num_tokens)
        one.write(table)
        one.holds(table)
        tables.append(table)
        one.tiers.maintain()
        if random.random() < 0.3:
            one.tiers.offload(tables[int(random.integers(len(tables)))])
    for table in tables:
        one.holds(table)
        table.free()
    one.tiers.close()
    one.tiers.check()
    stats = one.tiers.stats()
    assert found > 400 and stats["host"]["blocks_out"] > 20
    assert stats["store"]["blocks_out"] > 5 and one.cache.stats()["held"] == 0


def test_threads_that_bring_from_a_store_at_the_same_time(monkeypatch) -> None:
    """What lands for one is on the device before another one's lands there."""
    one = Setup(num_blocks=32, store=MemoryStore())
    texts = [[first, *range(12)] for first in (100, 200)]
    for text in texts:
        one.only_below(text)
    submit = one.tiers.below.up.submit

    def slowly(*given):
        time.sleep(0.001)
        return submit(*given)

    monkeypatch.setattr(one.tiers.below.up, "submit", slowly)

    def bring(text: list[int]) -> None:
        for _ in range(8):
            one.tiers.below.host.books.forget_idle()
            table, ticket = one.tiers.open(text, by_layer=True)
            with table:
                ticket.wait()
                with one.manager.lock:
                    came.append(table.match())
                    one.holds(table)
            one.cache.clear()

    came: list[int] = []
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(bring, text) for text in texts]:
            done.result(60)
    assert came.count(12) > 8  # some were forgotten by the other one's clear
    one.tiers.close()


def test_threads_send_and_bring(setup: Setup) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(15):
                tokens = [int(random.integers(4)), *range(10)]
                table, ticket = setup.tiers.open(tokens)
                ticket.wait()
                table.match()
                with setup.manager.lock:
                    setup.tiers.make_room(3)
                    table.reserve(len(tokens))
                    setup.write(table)
                setup.tiers.offload(table)
                table.free()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    setup.tiers.drain()
    for i in range(4):
        table, ticket = setup.tiers.open([i, *range(10), 3])
        ticket.wait()
        table.match()
        setup.holds(table)


# ---- wrong ----


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"host_blocks": 0}, ValueError, "must hold a block of 1536 bytes, got 0"),
        ({"low": 0.5, "high": 0.1}, ValueError, "low and high are parts"),
        ({"high": 1.5}, ValueError, "low and high are parts"),
        ({"low": "a"}, TypeError, "low must be a number, a part of the blocks, got 'a"),
        ({"high": True}, TypeError, "high must be a number"),
        ({"staging_bytes": "x"}, TypeError, "staging_bytes must be an integer"),
    ],
)
def test_what_are_no_tiers(options, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Setup(**options)


def test_nothing_of_the_weights_before_is_found() -> None:
    """Neither what runs, nor what is idle, nor what lies below."""
    one = Setup(store=MemoryStore())
    one.only_below(range(13))
    with one.computed(range(100, 113)) as runs:
        one.tiers.offload(runs).wait()
        one.cache.set_model_name("small, tuned")
        for tokens in (range(13), range(100, 113)):
            assert set(one.tiers.lookup(tokens).values()) == {0}
            table, ticket = one.tiers.open(tokens)
            ticket.wait()
            assert table.match() == 0
        runs.append([7, 8, 9])
        runs.reserve(16)
        one.write(runs)  # a block of the weights before
        longer = one.cache.open([*range(100, 113), 7, 8, 9, 10])
        assert longer.num_cached_tokens == 0
    one.only_below(range(13))
    assert one.tiers.lookup(range(13))["host"] == 12
    one.cache.set_model_name("small")
    table, ticket = one.tiers.open(range(13))
    ticket.wait()
    assert table.match() == 12
    one.holds(table)
    with pytest.raises(ValueError, match="model must not be empty"):
        one.cache.set_model_name("")
    one.tiers.close()


def test_after_closing() -> None:
    one = Setup()
    one.only_below(range(9))
    table = one.computed(range(20, 29))
    one.tiers.close()
    one.tiers.close()
    told = "the tiers are closed; make a new TieredCache"
    with pytest.raises(RuntimeError, match=f"TieredCache.offload: {told}"):
        one.tiers.offload(table)
    for call in (lambda: one.tiers.open(range(9)), lambda: one.tiers.onboard(table)):
        with pytest.raises(RuntimeError, match=f"TieredCache.onboard: {told}"):
            call()


def test_combined_caches_come_as_a_whole() -> None:
    one = Setup(num_outer=1)
    one.only_below(range(9))
    with pytest.raises(ValueError, match="by_layer needs blocks of keys and values"):
        one.tiers.open(range(9), by_layer=True)
    table, ticket = one.tiers.open(range(9))
    ticket.wait()
    assert table.match() == 8
    one.holds(table)
    one.tiers.close()


def test_the_cap_on_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host.LIMIT, raising=False)
    host.check_limit(64 << 30)
    with pytest.raises(ValueError, match=f"set {host.LIMIT}=66 before jax starts"):
        host.check_limit((64 << 30) + 1)
    host.check_limit(24 << 30, taken=40 << 30)
    words = f"beside 40.0 GiB of other tiers.*set {host.LIMIT}=81"
    with pytest.raises(ValueError, match=words):
        host.check_limit(40 << 30, taken=40 << 30)
    monkeypatch.setenv(host.LIMIT, "100")
    host.check_limit(100 << 30)
    monkeypatch.setenv(host.LIMIT, "many")
    with pytest.raises(ValueError, match="must be a number, got 'many'"):
        host.check_limit(1)
