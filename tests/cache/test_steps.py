"""A step of many tables in one call is what each table does alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_caches import small

from jax_kvblock import BlockTable, PoolExhaustedError, PrefixCache
from jax_kvblock.cache import StepArrays, append_tokens, commit_tokens, prepare_step

SIZE, WIDTH = 4, 8


def opened(cache: PrefixCache, *prompts: Any) -> list[BlockTable]:
    return [cache.open(prompt) for prompt in prompts]


def alone(tables: list[BlockTable], starts: Any, counts: Any) -> StepArrays:
    """What single calls give."""
    parts = list(zip(tables, starts, counts, strict=True))
    for table, start, count in parts:
        table.reserve(start + count)
    slots = [table.slots(start, count) for table, start, count in parts]
    return StepArrays(
        np.concatenate(slots),
        np.stack([table.page_table(WIDTH) for table in tables]),
        np.add(starts, counts).astype(np.int32),
        np.cumsum([0, *counts]).astype(np.int32),
    )


def assert_same(got: StepArrays, want: StepArrays) -> None:
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert a.dtype == np.int32, name
        np.testing.assert_array_equal(a, b, name)


def test_prompts_and_decoding_as_one_and_as_many() -> None:
    """Prompts that are cached, in part or not; then tokens, until blocks are shared."""
    caches = small(64), small(64)
    worlds = []
    for cache in caches:
        first = cache.open(range(9))
        first.reserve(9)
        first.commit(9)
        worlds.append([first, *opened(cache, range(9), range(6), [7, 8, 9])])
    ours, others = worlds
    starts = [table.num_committed_tokens for table in ours]
    assert starts == [8, 8, 4, 0]
    counts = [
        table.num_tokens - start for table, start in zip(ours, starts, strict=True)
    ]
    got = prepare_step(ours, counts, starts=starts, max_blocks=WIDTH)
    assert_same(got, alone(others, starts, counts))
    assert commit_tokens(ours) == []
    for table in others:
        table.commit(table.num_tokens)
    # The same tokens twice: the second table's blocks become the first one's.
    changes = []
    for token in range(100, 112):
        append_tokens(ours, np.array([token, token, token + 50, token]))
        for table, new in zip(others, (token, token, token + 50, token), strict=True):
            table.append(new)
        got = prepare_step(ours, max_blocks=WIDTH)
        assert_same(got, alone(others, got.kv_lens - 1, [1] * 4))
        lens = got.kv_lens if token % 2 else None
        changed = [bool(table.commit(table.num_tokens)) for table in others]
        changes.append(commit_tokens(ours, lens))
        assert changes[-1] == np.flatnonzero(changed).tolist()
    assert [1] in changes
    for a, b in zip(ours, others, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.keys == b.keys
    assert caches[0].stats() == caches[1].stats()
    for cache in caches:
        cache.check()


COUNTS = {
    "one for all": 3,
    "list": [3, 0, 5],
    "tuple": (3, 0, 5),
    "numbers of NumPy": [3, np.int32(0), 5],
    "array": np.array([3, 0, 5]),
    "narrow array": np.array([3, 0, 5], np.uint8),
    "every second of an array": np.array([3, 9, 0, 9, 5, 9])[::2],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_several_tokens_of_each(counts: Any) -> None:
    ours, others = (opened(small(), range(5), range(20, 24), [7]) for _ in range(2))
    each = np.broadcast_to(counts, 3).tolist()
    new = np.arange(100, 100 + sum(each))
    append_tokens(ours, new, counts)
    for table, tokens in zip(others, np.split(new, np.cumsum(each)[:-1]), strict=True):
        table.append(tokens)
    assert [t.keys for t in ours] == [t.keys for t in others]
    assert [t.num_tokens for t in ours] == [t.num_tokens for t in others]


def test_no_tables_and_no_tokens() -> None:
    step = prepare_step([], max_blocks=WIDTH)
    assert [x.tolist() for x in step] == [[], [], [], [0]]
    assert step.block_tables.shape == (0, WIDTH)
    append_tokens([], [])
    assert commit_tokens([]) == []
    (table,) = opened(small(), range(5))
    step = prepare_step([table], 0, max_blocks=3)
    assert step.slots.tolist() == [] and step.kv_lens.tolist() == [5]
    assert step.block_tables.tolist() == [[0, 1, -1]]  # of what was appended before


def test_all_get_their_blocks_or_none() -> None:
    cache = small(num_blocks=4)
    tables = opened(cache, range(8), range(20, 29))
    before = cache.stats()
    with pytest.raises(PoolExhaustedError, match=r"of 2 sequences, 4 of 4 free"):
        prepare_step(tables, [8, 9], max_blocks=WIDTH)
    assert [len(table) for table in tables] == [0, 0]
    assert cache.stats() | {"refused": 0} == before | {"refused": 0}
    with pytest.raises(PoolExhaustedError, match="with 1 to spare, 4 of 4 free"):
        prepare_step(tables, starts=[0, 0], counts=[8, 8], max_blocks=WIDTH, spare=1)
    prepare_step(tables, starts=[0, 0], counts=[8, 8], max_blocks=WIDTH)
    # Without a block to take, none has to be spared.
    prepare_step(tables, starts=[0, 0], counts=[8, 8], max_blocks=WIDTH, spare=1)
    cache.check()


def test_what_is_shared_is_not_written() -> None:
    cache = small()
    (table,) = opened(cache, range(6))
    prepare_step([table], 6, max_blocks=WIDTH)
    other = table.fork()
    other.append(1)
    for starts in ([5, 5], [0, 6]):
        message = r"prepare_step: tables\[1\]: .*block \[1\] is shared; call writable"
        with pytest.raises(ValueError, match=message):
            prepare_step([cache.open([1]), other], starts=starts, max_blocks=WIDTH)
    assert other.writable(6, 1) == 1
    step = prepare_step([other], max_blocks=WIDTH)
    assert step.slots.tolist() == [other.ids[1] * SIZE + 2]


def test_what_is_behind_a_window_is_not_written() -> None:
    (table,) = opened(small(), range(9))
    prepare_step([table], 9, max_blocks=WIDTH)
    table.free_before(8)
    with pytest.raises(
        ValueError, match=r"tables\[0\]: .*was given back by free_before"
    ):
        prepare_step([table], starts=3, max_blocks=WIDTH)
    assert prepare_step([table], max_blocks=3).block_tables.tolist() == [[-1, -1, 2]]


Words = list[tuple[dict[str, Any], type[Exception], str]]
WRONG: Words = [
    ({"tables": None}, TypeError, "tables must be a list of BlockTables"),
    ({"tables": [1]}, TypeError, "tables must be a list of BlockTables"),
    ({"counts": 1.5}, TypeError, "counts must be whole numbers"),
    ({"counts": True}, TypeError, "counts must be whole numbers"),
    ({"counts": [1]}, ValueError, r"each of the 2 tables; counts is of length \(1,\)"),
    ({"counts": [1, -1]}, ValueError, "counts must be at least 0, got -1"),
    ({"counts": [1, 2**70]}, TypeError, "counts must be whole numbers"),
    ({"starts": [0, 1.0]}, TypeError, "starts must be whole numbers"),
    ({"starts": "here"}, TypeError, "starts must be whole numbers"),
    ({"starts": [[1, 1]]}, ValueError, r"starts is of length \(1, 2\)"),
    ({"starts": 2**40}, ValueError, r"tables\[0\]: .* fit 32 bits"),
    ({"starts": -1}, ValueError, "starts must be at least 0"),
    ({"counts": [1, 7]}, ValueError, r"tables\[1\]: .* start .* at least 0"),
    ({"max_blocks": 1}, ValueError, r"tables\[1\]: .*2 blocks do not fit max_blocks=1"),
    ({"max_blocks": 2**62}, ValueError, r"max_blocks must be below 2\^31, got 4611"),
    ({"max_blocks": "8"}, TypeError, "max_blocks must be an integer"),
    ({"spare": -1}, ValueError, "spare must be at least 0"),
]


@pytest.mark.parametrize("change, error, message", WRONG)
def test_what_is_wrong_is_said(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = small()
    given = {"tables": opened(cache, range(4), range(6)), "max_blocks": WIDTH}
    given |= change
    tables = given.pop("tables")
    with pytest.raises(error, match=f"^prepare_step: .*{message}"):
        prepare_step(tables, **given)
    assert cache.stats()["held"] == 0


def test_tables_that_do_not_go_together() -> None:
    cache = small()
    one, two = opened(cache, range(4), range(6))
    strange = small().open([1])
    freed = cache.open([1])
    freed.free()
    steps = {
        "prepare_step": lambda tables: prepare_step(tables, max_blocks=WIDTH),
        "append_tokens": lambda tables: append_tokens(tables, [1] * len(tables)),
        "commit_tokens": lambda tables: commit_tokens(tables, 0),
    }
    for name, step in steps.items():
        with pytest.raises(ValueError, match=rf"{name}: tables\[0\] is there twice"):
            step([one, two, one])
        with pytest.raises(
            ValueError, match=rf"{name}: tables\[1\]: .*another manager"
        ):
            step([one, strange])
        with pytest.raises(ValueError, match=rf"{name}: tables\[1\]: .*was freed"):
            step([one, freed])
    assert (one.num_tokens, two.num_tokens) == (4, 6) and cache.stats()["held"] == 0


def test_what_is_not_appended_is_not_committed() -> None:
    cache = small()
    tables = opened(cache, range(4), range(20, 26))
    prepare_step(tables, [4, 6], max_blocks=WIDTH)
    with pytest.raises(
        ValueError, match=r"commit_tokens: tables\[1\]: .*7 tokens, but"
    ):
        commit_tokens(tables, [4, 7])
    assert [table.num_committed_tokens for table in tables] == [0, 0]
    for tokens, counts in ([1], 1), ([1, 2, 3], [1, 1]), ([], [0, 1]):
        with pytest.raises(ValueError, match=r"append_tokens: .*tokens is of length"):
            append_tokens(tables, tokens, counts)
    with pytest.raises(ValueError, match=r"append_tokens: .*counts is of length"):
        append_tokens(tables, [1, 2, 3], [1, 1, 1])
    with pytest.raises(ValueError, match="append_tokens: counts must be at least 0"):
        append_tokens(tables, [1, 2], [3, -1])
    with pytest.raises(TypeError, match="append_tokens: tokens must be integers"):
        append_tokens(tables, "ab")
    assert [table.num_tokens for table in tables] == [4, 6]
    assert commit_tokens(tables, [4, 4]) == []
    assert [table.num_committed_tokens for table in tables] == [4, 4]
