"""Groups of layers, some with a window: what serves all, and what goes early."""

from __future__ import annotations

import pytest
from small_caches import small

from jax_kvblock import PoolExhaustedError, PrefixCache
from jax_kvblock.cache import GroupedCache

ONE = small()


def two(window: int = 6) -> GroupedCache:
    return GroupedCache({"full": small(), "near": small()}, windows={"near": window})


def computed(cache: GroupedCache, tokens: range, step: int = 1):
    table = cache.open(tokens)
    for end in range(step, len(tokens) + 1, step):
        table.reserve(end)
        table.commit(end)
    return table


def test_windows_give_blocks_back_as_tokens_come() -> None:
    cache = two()
    table = computed(cache, range(16))
    assert table.tables["full"].ids.tolist() == [0, 1, 2, 3]
    # The next token, 16, sees 11 to 16: blocks 2, 3 and the one it comes into.
    near = table.tables["near"]
    assert near.ids.tolist()[:2] == [-1, -1] and min(near.ids.tolist()[2:]) >= 0
    assert cache.caches["near"].stats()["held"] == 2


def test_a_prefix_needs_a_window_of_the_near_layers() -> None:
    cache = two()
    computed(cache, range(16)).free()
    again = cache.open(range(17))
    assert again.num_cached_tokens == 16 and again.num_tokens == 17
    assert again.tables["full"].ids.tolist() == [0, 1, 2, 3]
    assert again.tables["near"].ids.tolist()[:2] == [-1, -1]
    again.free()
    # Without the near block of tokens 8 to 11, which 16 sees, 12 tokens are left: the
    # next one then sees 7 to 12. These are blocks 1 and 2, and 2 is gone as well: 8.
    keys = cache.caches["near"].namespace.keys(range(16))
    cache.caches["near"]._free_list.forget([keys[2]])
    assert cache.open(range(17)).num_cached_tokens == 8
    # Without the first full block there is nothing.
    cache.caches["full"]._free_list.forget([keys[0]])
    assert cache.open(range(17)).num_cached_tokens == 0


def test_they_look_again_where_a_block_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may take it between the look and the hold."""
    cache = two()
    computed(cache, range(16)).free()
    near = cache.caches["near"]
    look, keys = GroupedCache._shared_blocks, near.namespace.keys(range(16))
    found = []

    def taken(self, *arguments):
        found.append(look(self, *arguments))
        near._free_list.forget([keys[found[0] - 1]])
        return found[-1]

    monkeypatch.setattr(GroupedCache, "_shared_blocks", taken)
    table = cache.open(range(17))
    assert found == [4, 3] and table.num_cached_tokens == 12
    table.free()
    for one in cache.caches.values():
        one.check()
        assert one.stats()["held"] == 0


def test_a_window_of_one_block_needs_no_other() -> None:
    cache = two(window=1)
    computed(cache, range(8)).free()
    cache.caches["near"].clear()
    assert cache.open(range(9)).num_cached_tokens == 8


def test_a_fork_has_its_own_end() -> None:
    """Copy on write and truncation go through all groups."""
    cache = two()
    table = computed(cache, range(10))
    other = table.fork()
    other.truncate(9)
    other.append([77])
    assert other.writable(9, 1) == 2  # one block in each group
    assert table.num_tokens == other.num_tokens == 10
    for name, mine in table.tables.items():
        theirs = other.tables[name]
        assert mine.ids[-1] != theirs.ids[-1] and mine.ids[-2] == theirs.ids[-2]
    other.free()
    table.free()
    for one in cache.caches.values():
        one.check()
        assert one.stats()["held"] == 0


def test_all_groups_or_none() -> None:
    cache = GroupedCache({"a": small(8), "b": small(2)})
    table = cache.open(range(16))
    table.reserve(8)
    with pytest.raises(PoolExhaustedError):
        table.reserve(16)
    assert [len(x) for x in table.tables.values()] == [2, 2]
    table.append(range(4))
    assert table.num_tokens == 20
    with table:
        pass
    for one in cache.caches.values():
        one.check()
        assert one.stats()["held"] == 0


@pytest.mark.parametrize(
    ("caches", "windows", "words"),
    [
        ({}, {}, "caches is empty"),
        ({"a": small()}, {"b": 3}, "windows of \\['b'\\], which are no groups"),
        ({"a": small()}, {"a": 0}, "windows must be at least 1"),
        (
            {"a": small(), "b": small(block_size=8)},
            {},
            "one block_size, got \\[4, 8\\]",
        ),
        (
            dict.fromkeys("ab", ONE),
            {},
            "'a' and 'b' have one pool, .* the same keys; .* such as model='.*/b'",
        ),
    ],
)
def test_what_are_no_groups(caches, windows, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GroupedCache(caches, windows=windows)


def test_groups_of_one_pool_are_renamed_together() -> None:
    a = small()
    b = PrefixCache(a.manager, model="b")
    cache = GroupedCache({"full": a, "near": b}, windows={"near": 6})
    computed(cache, range(16)).free()
    again = cache.open(range(16))
    assert again.num_cached_tokens == 12
    again.free()
    cache.set_model_name("tuned")
    assert [x.namespace.model for x in (a, b)] == ["tuned/full", "tuned/near"]
    table = computed(cache, range(16))
    ids = [one.ids.tolist() for one in table.tables.values()]
    assert not {*ids[0]} & {*ids[1]} - {-1}
    table.free()
    for one in (a, b):
        one.set_model_name("the same")
    with pytest.raises(ValueError, match="'full' and 'near' have one pool"):
        cache.open(range(16))


def test_what_are_no_caches_by_name() -> None:
    for bad in ([1], None, {"a": ONE.manager}, {"a": ONE, "b": None}):
        with pytest.raises(
            TypeError, match="must be a PrefixCache by each group's name"
        ):
            GroupedCache(bad)  # type: ignore[arg-type]
