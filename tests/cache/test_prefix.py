"""Tables of sequences: found, shared, written, published, given back."""

from __future__ import annotations

import gc
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from small_caches import small

from jax_kvblock import (
    BlockTable,
    PoolExhaustedError,
    PrefixCache,
    _native,
)

SIZE = 4  # tokens to a block


def computed(cache: PrefixCache, tokens: object) -> BlockTable:
    """A table whose tokens are all written."""
    table = cache.open(tokens)  # type: ignore[arg-type]
    table.reserve(table.num_tokens)
    table.commit(table.num_tokens)
    cache.check()
    return table


def states(cache: PrefixCache) -> tuple[int, int, int]:
    stats = cache.stats()
    return stats["free"], stats["idle"], stats["held"]


# ---- found ----


def test_a_prefix_is_found_while_it_is_held_and_after() -> None:
    cache = small()
    first = computed(cache, range(10))
    assert first.num_cached_tokens == 0 and first.ids.tolist() == [0, 1, 2]
    assert first.num_committed_tokens == 8 and states(cache) == (13, 0, 3)
    second = cache.open([*range(8), 77, 78])
    assert second.num_cached_tokens == 8 and second.ids.tolist() == [0, 1]
    first.free()
    assert states(cache) == (14, 0, 2)
    second.free()
    assert states(cache) == (14, 2, 0)
    assert cache.open(range(9)).ids.tolist() == [0, 1]
    cache.check()


def test_the_last_token_is_always_computed() -> None:
    cache = small()
    computed(cache, range(8)).free()
    assert cache.open(range(8)).num_cached_tokens == 4
    assert cache.open(range(8), max_cached_tokens=8).num_cached_tokens == 8
    assert cache.open(range(8), max_cached_tokens=7).num_cached_tokens == 4
    assert cache.open(range(9)).num_cached_tokens == 8
    assert cache.cached_tokens(range(8)) == 4 and cache.cached_tokens(range(9)) == 8


def test_a_block_is_not_found_without_those_before_it() -> None:
    cache = small()
    computed(cache, range(12)).free()
    other = [50, *range(1, 12)]
    assert cache.open(other).num_cached_tokens == 0
    assert cache.open(range(12), salt="other").num_cached_tokens == 0
    assert cache.open(range(12), adapter="other").num_cached_tokens == 0


def test_a_table_matches_what_came_later() -> None:
    cache = small()
    table = cache.open(range(9))
    computed(cache, range(5)).free()
    assert table.match() == 4 and table.num_cached_tokens == 4
    computed(cache, range(9)).free()
    assert table.match(4) == 4 and table.match() == 8
    table.reserve(9)
    with pytest.raises(ValueError, match="match before you reserve"):
        table.match()


def test_tokens_grow_and_keys_with_them() -> None:
    cache = small()
    table = cache.open()
    for token in range(9):
        table.append(token)
    table.append(np.arange(9, 20))
    table.append(np.int64(20))
    assert table.tokens.tolist() == list(range(21)) and table.num_tokens == 21
    assert table.keys == cache.namespace.keys(range(21)) and len(table.keys) == 5
    assert table.root == cache.namespace.root()


# ---- taken and given back ----


def test_free_blocks_come_first_then_the_idle_from_the_end_of_who_left_first() -> None:
    cache = small(6)
    computed(cache, range(8)).free()  # blocks 0 and 1
    computed(cache, range(100, 108)).free()  # 2 and 3
    assert states(cache) == (2, 4, 0)
    table = cache.open()
    table.reserve(3 * SIZE)
    assert table.ids.tolist() == [4, 5, 1]
    assert cache.cached_tokens(range(9)) == 4
    table.reserve(4 * SIZE)
    assert table.ids.tolist() == [4, 5, 1, 0] and cache.cached_tokens(range(9)) == 0
    assert cache.cached_tokens(range(100, 109)) == 8
    assert cache.stats()["evicted"] == 2
    cache.check()


def test_what_was_found_lately_stays() -> None:
    cache = small(4)
    computed(cache, range(8)).free()
    computed(cache, range(100, 108)).free()
    cache.open(range(9)).free()
    table = cache.open()
    table.reserve(2 * SIZE)
    assert cache.cached_tokens(range(9)) == 8
    assert cache.cached_tokens(range(100, 109)) == 0


def test_what_is_found_often_stays_with_lfu() -> None:
    for policy, kept in (("lfu", 8), ("lru", 0)):
        cache = small(4, policy=policy)
        computed(cache, range(8)).free()
        for _ in range(3):
            cache.open(range(9)).free()
        computed(cache, range(100, 108)).free()
        cache.open(range(100, 109)).free()
        computed(cache, range(200, 208)).free()
        assert cache.cached_tokens(range(9)) == kept, policy
        cache.check()


def test_what_was_found_often_long_ago_goes_at_last() -> None:
    cache = small(4, policy="lfu")
    computed(cache, range(8)).free()
    for _ in range(20):
        cache.open(range(9)).free()
    for i in range(60):  # each is found once more
        computed(cache, range(1000 * i + 100, 1000 * i + 108)).free()
        cache.open(range(1000 * i + 100, 1000 * i + 109)).free()
        if not cache.cached_tokens(range(9)):
            break
    assert 4 < i < 59
    cache.check()


def test_all_or_nothing() -> None:
    cache = small(4)
    table = cache.open()
    table.reserve(2 * SIZE)
    for tokens, spare in ((5 * SIZE, 0), (4 * SIZE, 1)):
        with pytest.raises(PoolExhaustedError, match="2 of 4 free"):
            table.reserve(tokens, spare=spare)
    assert len(table) == 2 and states(cache) == (2, 0, 2)
    table.reserve(3 * SIZE, spare=1)
    assert cache.stats()["refused"] == 2


@pytest.mark.parametrize("far", [2**40, 2**63 - 1])
def test_there_are_never_so_many(far: int) -> None:
    cache = small(4)
    with cache.open(range(4)) as table:
        for refused in ({"num_tokens": far}, {"num_tokens": 4, "spare": far}):
            with pytest.raises(PoolExhaustedError, match="4 of 4 free"):
                table.reserve(**refused)
        for call in (table.slots, table.writable):
            with pytest.raises(IndexError, match="do not fit 0 blocks"):
                call(1, far)
        table.free_before(far)
        assert _native.take_hold(cache._free_list, far) is None
        with pytest.raises(ValueError, match="but the table has 4"):
            table.commit(far)
        with pytest.raises(ValueError, match="the table has 4 tokens"):
            table.truncate(far)
    assert states(cache) == (4, 0, 0)
    cache.check()


def test_what_was_reserved_goes_without_what_a_window_left() -> None:
    cache = small(4)
    table = cache.open(range(12))
    table.reserve(12)
    table.free_before(8)
    assert table.ids.tolist() == [-1, -1, 2]
    table._native.shrink(1)
    assert table.ids.tolist() == [-1] and states(cache) == (4, 0, 0)
    cache.check()


def test_a_table_that_asks_again_is_counted_once() -> None:
    cache = small()
    table = cache.open(range(13))
    computed(cache, range(9)).free()
    for _ in range(3):
        table.match()
    stats = cache.stats()
    assert stats["lookups"] == 2
    assert stats["queried_blocks"] == 3 + 2 and stats["hit_blocks"] == 2


def test_tables_in_cycles_give_their_blocks_back() -> None:
    cache = small(4)
    gc.collect()
    cycle: list[object] = [cache.open()]
    cycle.append(cycle)
    cycle[0].reserve(4 * SIZE)  # type: ignore[attr-defined]
    del cycle
    cache.open().reserve(4 * SIZE)


def test_collected_freed_and_left() -> None:
    cache = small()
    with computed(cache, range(8)) as table:
        assert not table.freed
    assert table.freed and repr(table) == "BlockTable(freed)"
    table.free()
    with pytest.raises(ValueError, match="it was freed; open another"):
        table.reserve(4)
    computed(cache, range(100, 108))  # collected at once
    assert states(cache) == (12, 4, 0)
    cache.check()


def test_blocks_and_tables_of_one_manager() -> None:
    cache = small(8)
    manager = cache.manager
    blocks = manager.allocate_blocks(3)
    computed(cache, range(16)).free()
    assert manager.num_free_blocks == 5 and cache.num_idle_blocks == 4
    assert cache.num_free_blocks == 1
    more = manager.allocate_blocks(4)
    assert cache.cached_tokens(range(17)) == 4
    del blocks, more
    assert states(cache) == (7, 1, 0)
    cache.clear()
    assert states(cache) == (8, 0, 0) and cache.cached_tokens(range(17)) == 0
    cache.check()


def test_a_copy_in_flight_keeps_its_blocks() -> None:
    cache = small(4)
    table = computed(cache, range(8))
    with table._native.hold([0, 1]) as hold:
        assert hold.ids.tolist() == [0, 1] and len(hold) == 2
        table.free()
        assert states(cache) == (2, 0, 2)
        with pytest.raises(PoolExhaustedError):
            cache.open().reserve(3 * SIZE)
    assert states(cache) == (2, 2, 0) and len(hold) == 0
    cache.check()


def test_victims_are_who_goes_next() -> None:
    cache = small(4)
    computed(cache, range(8)).free()
    computed(cache, range(100, 108)).free()
    victims = _native.victims(cache._free_list, 3)
    assert [block for block, _ in victims] == [1, 0, 3]
    keys = [key for _, key in victims]
    assert keys[:2] == cache.namespace.keys(range(8))[::-1]
    assert cache._free_list.forget(keys) == 3 and cache._free_list.forget(keys) == 0
    assert states(cache) == (3, 1, 0)
    cache.check()


def test_keys_are_held_where_they_are_found() -> None:
    cache = small(4)
    computed(cache, range(8)).free()
    one, two = cache.namespace.keys(range(8))
    hold, places = _native.hold_keys(cache._free_list, [two, bytes(32), one])
    assert hold.ids.tolist() == [1, 0] and places == [0, 2]
    assert states(cache) == (2, 0, 2)
    hold.release()
    some = [two, bytes(32), one]
    hold, places = _native.hold_keys(cache._free_list, some, beginning=True)
    assert hold.ids.tolist() == [1] and places == [0]
    hold.release()
    with pytest.raises(ValueError, match="key must be of 32 bytes, got 3"):
        _native.hold_keys(cache._free_list, [one, b"abc"])
    assert states(cache) == (2, 2, 0)


def test_blocks_published_without_a_table() -> None:
    cache = small(4)
    free_list, keys = cache._free_list, cache.namespace.keys(range(8))
    parents = [cache.namespace.root(), keys[0]]
    with _native.take_hold(free_list, 2) as hold:
        for block, key, parent in zip(hold.ids, keys, parents, strict=True):
            assert free_list.publish(int(block), key, parent) == block
        with pytest.raises(ValueError, match="published already"):
            free_list.publish(int(hold.ids[0]), keys[0], parents[0])
        assert free_list.are_published([keys[1], bytes(32), keys[0]]) == [1, 0, 1]
    assert free_list.are_published([]) == []
    assert cache.open(range(9)).num_cached_tokens == 8
    assert _native.take_hold(free_list, 5) is None
    with pytest.raises(ValueError, match="nobody does"):
        free_list.publish(3, keys[0], parents[0])
    with pytest.raises(ValueError, match="a block is free"):
        _native.hold(free_list, np.array([3], np.int32))
    with pytest.raises(IndexError, match="no such block"):
        _native.hold(free_list, np.array([4], np.int32))
    cache.check()


def test_many_blocks_published_at_once() -> None:
    cache = small(5)
    free_list, keys = cache._free_list, cache.namespace.keys(range(12))
    parents = [cache.namespace.root(), *keys[:2]]
    with _native.take_hold(free_list, 4) as hold:
        ids = hold.ids.tolist()
        free_list.publish_each(ids[:2], keys[:2], parents[:2])
        with pytest.raises(ValueError, match="each block has a key and a parent"):
            free_list.publish_each(ids[2:], keys[2:], parents[2:])
        with pytest.raises(ValueError, match="key must be of 32 bytes, got 3"):
            free_list.publish_each(ids[2:3], [b"abc"], parents[2:])
        # Up to the first that cannot be: it is published already.
        with pytest.raises(ValueError, match="published already"):
            free_list.publish_each(
                [ids[2], ids[0]], [keys[2], bytes(32)], [keys[1]] * 2
            )
        with pytest.raises(IndexError, match="no such block"):
            free_list.publish_each([5], [bytes(32)], [keys[1]])
    assert cache.open(range(13)).num_cached_tokens == 12
    with pytest.raises(ValueError, match="nobody does"):
        free_list.publish_each([ids[3]], [bytes(32)], [keys[1]])
    cache.check()


# ---- shared ----


def test_equal_blocks_collapse() -> None:
    cache = small()
    one, two = cache.open(range(9)), cache.open(range(9))
    for table in (one, two):
        table.reserve(9)
    assert one.commit(9) == [] and two.commit(9) == [0, 1]
    assert two.ids[:2].tolist() == one.ids[:2].tolist() and two.ids[2] != one.ids[2]
    assert states(cache) == (12, 0, 4) and cache.stats()["duplicates"] == 2
    cache.check()


def test_copy_on_write() -> None:
    cache = small()
    table = computed(cache, range(10))
    manager = cache.manager
    values = jnp.arange(manager.pool.data.size, dtype=jnp.float32)
    manager.update(lambda pool: type(pool)(values.reshape(pool.data.shape), pool.spec))
    other = table.fork()
    assert other.ids.tolist() == table.ids.tolist() and other.tokens.tolist()[9] == 9
    with pytest.raises(ValueError, match=r"block \[2\] is shared; call writable"):
        table.slots(10, 1)
    assert table.writable(10, 1) == 1 and table.writable(10, 1) == 0
    copied, kept = int(table.ids[2]), int(other.ids[2])
    assert copied != kept and table.ids[:2].tolist() == other.ids[:2].tolist()
    pool = np.asarray(manager.pool.data)
    np.testing.assert_array_equal(pool[copied], values.reshape(pool.shape)[kept])
    assert table.slots(10, 2).tolist() == [copied * SIZE + 2, copied * SIZE + 3]
    assert other.slots(10, 2).tolist() == [kept * SIZE + 2, kept * SIZE + 3]
    assert cache.stats()["copied_on_write"] == 1
    cache.check()


def test_published_blocks_are_not_written() -> None:
    cache = small()
    table = computed(cache, range(8))
    with pytest.raises(ValueError, match=r"block \[1\] is shared"):
        table.slots(6, 1)
    table.truncate(6)
    table.append([60, 70])
    assert table.writable(6, 2) == 1 and table.commit(8) == []
    assert cache.cached_tokens(range(9)) == 8  # its old block is there as it was
    assert cache.cached_tokens([*range(6), 60, 70, 1]) == 8
    cache.check()


def test_writable_needs_blocks() -> None:
    cache = small(3)
    table = computed(cache, range(12))
    other = table.fork()
    with pytest.raises(PoolExhaustedError, match="3 blocks to copy to, 0 of 3 free"):
        other.writable(0, 12)
    assert other.ids.tolist() == table.ids.tolist()
    cache.check()


def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small()
    table = computed(cache, range(10))
    other = table.fork()

    def broken(*_: object) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(type(cache.manager), "update", broken)
    with pytest.raises(RuntimeError, match="no copy"):
        other.writable(9, 1)
    assert other.ids.tolist() == table.ids.tolist() and states(cache) == (13, 0, 3)
    cache.check()


# ---- windows and drafts ----


def test_blocks_behind_a_window_go() -> None:
    cache = small()
    table = computed(cache, range(14))
    table.free_before(7)
    assert table.ids.tolist() == [-1, 1, 2, 3] and states(cache) == (12, 1, 3)
    table.free_before(12)
    assert table.ids.tolist() == [-1, -1, -1, 3]
    assert table.page_table(6).tolist() == [-1, -1, -1, 3, -1, -1]
    with pytest.raises(ValueError, match="given back by free_before"):
        table.slots(8, 1)
    table.append(range(14, 20))
    table.reserve(20)
    table.commit(20)
    assert table.num_committed_tokens == 20
    table.fork().free()
    table.free()
    cache.check()
    assert cache.cached_tokens(range(21)) == 20


def test_drafts_that_were_refused_go() -> None:
    cache = small()
    table = computed(cache, range(6))
    table.append([90, 91, 92, 93, 94])
    table.reserve(11)
    assert len(table) == 3
    table.truncate(8)
    assert len(table) == 2 and table.tokens.tolist() == [*range(6), 90, 91]
    assert table.keys == cache.namespace.keys([*range(6), 90, 91])
    table.commit(8)
    table.truncate(2)
    assert table.num_committed_tokens == 0 and len(table) == 1
    assert states(cache) == (14, 1, 1)
    with pytest.raises(ValueError, match="has 2 tokens, got num_tokens=3"):
        table.truncate(3)
    cache.check()


# ---- events ----


def test_events_tell_what_is_there() -> None:
    cache = small(2, events=True)
    tokens = list(range(8))
    keys, root = cache.namespace.keys(tokens), cache.namespace.root()
    computed(cache, tokens).free()
    assert cache.drain_events() == [
        ("stored", keys[0], root, tokens[:4], 0),
        ("stored", keys[1], keys[0], tokens[4:], 1),
    ]
    computed(cache, [9, 9, 9, 9]).free()
    kinds = [(kind, key) for kind, key, *_ in cache.drain_events()]
    assert kinds[0] == ("removed", keys[1]) and kinds[1][0] == "stored"
    cache.clear()
    assert [event[0] for event in cache.drain_events()] == ["removed", "removed"]
    assert cache.drain_events() == [] and small().drain_events() == []


def test_another_cache_of_the_manager_leaves_the_events() -> None:
    cache = small(events=True)
    computed(cache, range(4)).free()
    other = PrefixCache(cache.manager, model="another")
    assert other.cached_tokens(range(5)) == 0 and cache.cached_tokens(range(5)) == 4
    assert [event[0] for event in cache.drain_events()] == ["stored"]


# ---- wrong ----


def test_what_is_no_cache() -> None:
    with pytest.raises(TypeError, match="manager must be a BlockManager, got 3"):
        PrefixCache(3, model="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy must be one of lru, lfu, got 'fifo'"):
        small(policy="fifo")
    for reserve in ("x", None, True):
        with pytest.raises(TypeError, match="reserve must be a number"):
            small(reserve=reserve)
    for reserve in (-0.1, 1.0, 5):
        with pytest.raises(ValueError, match="reserve is a part of the blocks"):
            small(reserve=reserve)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: t.reserve(-1), ValueError, "num_tokens must be at least 0"),
        (lambda t: t.reserve(2**63), ValueError, r"num_tokens must be below 2\^63"),
        (lambda t: t.slots(0, 2**70), ValueError, r"count must be below 2\^63, got"),
        (lambda t: t.free_before(2**63), ValueError, r"token must be below 2\^63"),
        (lambda t: t.reserve(1.5), TypeError, "num_tokens must be an integer"),
        (lambda t: t.commit(9), ValueError, "9 tokens, but the table has 8"),
        (lambda t: t.slots(7, 2), IndexError, "2 tokens from 7 on do not fit 2"),
        (lambda t: t.slots(-1, 2), ValueError, "start must be at least 0"),
        (lambda t: t.writable(7, 2), IndexError, "writable: 2 tokens from 7 on do"),
        (lambda t: t.page_table(1), ValueError, "2 blocks do not fit max_blocks=1"),
        (lambda t: t.page_table(2**31), ValueError, r"max_blocks must be below 2\^31"),
        (lambda t: t.append("x"), TypeError, "BlockTable.append: tokens must be"),
        (lambda t: t.match("x"), TypeError, "max_tokens must be an integer"),
        (lambda t: t.free_before(-1), ValueError, "token must be at least 0"),
        (lambda t: t._native.hold([2]), IndexError, "no block is in this place"),
    ],
)
def test_what_tables_refuse(call, error: type, words: str) -> None:
    table = computed(small(), range(8))
    with pytest.raises(error, match=words):
        call(table)


def test_commit_wants_blocks() -> None:
    table = small().open(range(8))
    with pytest.raises(ValueError, match="has 8 and blocks for 0"):
        table.commit(4)


def test_admission_leaves_a_reserve() -> None:
    cache = small(10, reserve=0.2)
    assert cache.can_admit(8) and not cache.can_admit(9)
    computed(cache, range(8)).free()  # idle blocks are as good as free ones
    assert cache.can_admit(8)


def test_a_closed_manager() -> None:
    cache = small()
    cache.manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.open([1])


# ---- threads ----


def test_threads_share_a_cache() -> None:
    cache, errors = small(64), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(300):
                tokens = random.integers(0, 2, random.integers(1, 24))
                with cache.open(tokens) as table:
                    table.reserve(len(tokens))
                    other = table.fork()
                    table.commit(len(tokens))
                    del other
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    cache.check()
    assert states(cache)[2] == 0
