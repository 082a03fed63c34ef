"""Blocks, lists of blocks and layers: sequences, properties, who is valid."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from managers import BLOCKS, HD, NH, NL, NO, NT, donate, make_manager

import jax_kvblock as kv


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


@jax.jit
def read_only(pool: kv.KVPool) -> jax.Array:
    return pool.data.sum()


# ---- sequences -----------------------------------------------------------------------


def test_allocates_distinct_blocks(manager: kv.BlockManager) -> None:
    first, second = manager.allocate_blocks(2), manager.allocate_blocks(3)
    assert (len(first), len(second), manager.num_free_blocks) == (2, 3, 1)
    ids = [block.id for block in [*first, *second]]
    assert len(set(ids)) == 5
    assert set(ids) <= set(range(BLOCKS))
    assert all(block.manager is manager for block in first)


def test_allocates_none_and_numpy_counts(manager: kv.BlockManager) -> None:
    empty = manager.allocate_blocks(0)
    assert len(empty) == 0 and list(empty) == [] and empty.ids.shape == (0,)
    blocks = manager.allocate_blocks(np.int64(2))
    assert len(blocks) == 2
    assert manager.num_free_blocks == BLOCKS - 2


def sequence_of(manager: kv.BlockManager, kind: str) -> tuple[Any, Any]:
    """A sequence, and what names its members."""
    blocks = manager.allocate_blocks(NL)
    if kind == "list":
        return blocks, operator.attrgetter("id")
    return blocks[1] if kind == "block" else blocks[1][2], operator.attrgetter("index")


@pytest.mark.parametrize("of", ["list", "block", "layer"])
def test_is_a_sequence(manager: kv.BlockManager, of: str) -> None:
    sequence, key = sequence_of(manager, of)
    assert isinstance(sequence, Sequence)
    whole = [key(x) for x in sequence]
    length = NO if of == "layer" else NL
    assert len(sequence) == len(whole) == length
    assert [key(x) for x in sequence.to_list()] == whole
    assert isinstance(sequence.to_list(), list)
    assert [key(sequence[i]) for i in range(length)] == whole
    assert [key(sequence[i]) for i in range(-length, 0)] == whole
    assert key(sequence[np.int32(-1)]) == whole[-1]
    assert [key(x) for x in sequence[1:]] == whole[1:]
    assert [key(x) for x in sequence[::-1]] == whole[::-1]
    assert [key(x) for x in reversed(sequence)] == whole[::-1]
    assert sequence.count(sequence[-1]) == 1 and sequence.count(None) == 0
    assert sequence[1] in sequence and sequence[0] not in sequence[1:]
    # Two iterations do not disturb each other.
    assert [(key(a), key(b)) for a in sequence for b in sequence] == [
        (a, b) for a in whole for b in whole
    ]


def test_parts_of_one_handle_are_equal(manager: kv.BlockManager) -> None:
    block, other = manager.allocate_blocks(2)
    assert block[1] == block[1] and hash(block[1]) == hash(block[-2])
    assert block[0].k == block[0][0] != block[0].v
    assert len({block[0], block[1], other[0], block.share()[0], block[0].k}) == 5
    assert block[0] != 0


def test_slices_of_a_block_and_a_layer_are_lists(manager: kv.BlockManager) -> None:
    block = manager.allocate_blocks(1)[0]
    assert [type(x) for x in block[1:3]] == [kv.Layer] * 2
    assert block[1:3] == [block[1], block[2]] and block[3:] == []
    assert block[0][:1] == [block[0].k] and isinstance(block[0][:1][0], kv.Piece)


def test_a_layer_has_keys_and_values(
    manager: kv.BlockManager, rng: np.random.Generator
) -> None:
    block = manager.allocate_blocks(2)[1]
    values = rng.normal(size=block.shape).astype(np.float32)
    block.copy_from(values)
    keys, held = block[2]
    assert keys == block[2].k and held == block[2].v and keys.shape == (NT, NH, HD)
    np.testing.assert_array_equal(np.asarray(block[2].k), values[2, 0])
    np.testing.assert_array_equal(np.asarray(block[2].v), values[2, 1])
    values[0, 1] = 7
    block[0].v.copy_from(values[0, 1])
    np.testing.assert_array_equal(np.asarray(block), values)
    capsule = block[1].v.__dlpack__()
    assert manager.live_exports == [f"block {block.id}, layer 1, outer 1"]
    del capsule
    assert manager.live_exports == []


def test_a_combined_cache_has_no_values_of_its_own() -> None:
    layer = make_manager(num_outer=1).allocate_blocks(1)[0][0]
    assert layer.k == layer[0] and len(layer) == 1
    with pytest.raises(AttributeError, match=r"Layer\.v: .*num_outer=1.*use layer\.k"):
        layer.v  # noqa: B018
    assert not hasattr(layer, "v")


@pytest.mark.parametrize("of", ["list", "block", "layer"])
@pytest.mark.parametrize("index", [NL, -NL - 1, 2**70])
def test_index_out_of_range(manager: kv.BlockManager, of: str, index: int) -> None:
    sequence, _ = sequence_of(manager, of)
    with pytest.raises(
        IndexError, match=rf"index {index} is out of range: it has {len(sequence)}"
    ):
        sequence[index]


@pytest.mark.parametrize("of", ["list", "block", "layer"])
@pytest.mark.parametrize("index", ["0", 1.0, None])
def test_index_of_a_wrong_type(manager: kv.BlockManager, of: str, index: Any) -> None:
    sequence, _ = sequence_of(manager, of)
    with pytest.raises(TypeError, match=f"integers, got {type(index).__name__}"):
        sequence[index]


def test_slices_share_the_blocks(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(4)
    part = blocks[1:3]
    assert isinstance(part, kv.BlockList)
    np.testing.assert_array_equal(part.ids, blocks.ids[1:3])
    assert [b.id for b in blocks[::-2]] == [blocks[3].id, blocks[1].id]
    part.free()
    assert [bool(b) for b in blocks] == [True, False, False, True]
    assert manager.num_free_blocks == BLOCKS - 2


def test_ids_are_a_page_table(
    manager: kv.BlockManager, rng: np.random.Generator
) -> None:
    blocks = manager.allocate_blocks(3)
    for block in blocks:
        block.copy_from(rng.normal(size=block.shape).astype(np.float32))
    assert blocks.ids.dtype == np.int32
    table = blocks.page_table(5)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, [*blocks.ids, -1, -1])
    read = np.asarray(kv.gather_blocks(manager.pool, table, "NHD"))
    np.testing.assert_array_equal(read[:3], [np.asarray(b) for b in blocks])
    assert not read[3:].any()
    with pytest.raises(ValueError, match="3 blocks do not fit max_blocks=2"):
        blocks.page_table(2)
    manager.free(blocks[1])
    with pytest.raises(ValueError, match=r"block \[1\].*freed"):
        _ = blocks.ids


# ---- a sequence of tokens that grows -------------------------------------------------


def test_a_list_grows(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(2)
    first = blocks.ids.tolist()
    more = manager.allocate_blocks(3)
    blocks.append(more[0])
    blocks.extend(block for block in more[1:2])
    assert blocks.ids.tolist() == first + more.ids.tolist()[:2]
    same = blocks
    blocks += more[2:]
    assert blocks is same and len(blocks) == 5
    whole = manager.allocate_blocks(1) + [block.share() for block in blocks[:2]]
    assert isinstance(whole, kv.BlockList) and len(whole) == 3 and len(blocks) == 5
    with whole, blocks:
        assert manager.num_free_blocks == 0
    assert manager.num_free_blocks == BLOCKS


NOT_ADDED: dict[str, tuple[type[Exception], str, Callable[[kv.BlockList], Any]]] = {
    "here already": (
        ValueError,
        r"block \d\) is in the list already; share\(\)",
        lambda blocks: blocks[1:],
    ),
    "twice": (ValueError, "in the list already", lambda blocks: [fresh(blocks)[0]] * 2),
    "of another manager": (
        ValueError,
        "belongs to another manager",
        lambda _: make_manager().allocate_blocks(1),
    ),
    "no block": (TypeError, "must be a Block, got int", lambda _: [3]),
    "no iterable": (TypeError, "blocks must be a BlockList.*got int", lambda _: 3),
}


def fresh(blocks: kv.BlockList) -> kv.BlockList:
    return blocks[0].manager.allocate_blocks(1)


@pytest.mark.parametrize("case", NOT_ADDED)
@pytest.mark.parametrize("how", ["extend", "+", "+="])
def test_what_a_list_does_not_take(
    manager: kv.BlockManager, case: str, how: str
) -> None:
    blocks = manager.allocate_blocks(3)
    error, message, wrong = NOT_ADDED[case]
    add = {"extend": kv.BlockList.extend, "+": operator.add, "+=": operator.iadd}[how]
    added = wrong(blocks)
    with pytest.raises(error, match=rf"BlockList.*{message}"):
        add(blocks, added)
    assert len(blocks) == 3


def test_append_takes_one_block(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(1)
    with pytest.raises(
        TypeError, match=r"BlockList\.append: .*must be a Block, got Bl"
    ):
        blocks.append(manager.allocate_blocks(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "count"), [(0, 3 * NT), (1, 2), (NT - 1, 2), (NT, 0), (3 * NT - 1, 1)]
)
def test_slots_say_where_tokens_lie(
    manager: kv.BlockManager, start: int, count: int
) -> None:
    blocks = manager.allocate_blocks(4)[::-1][:3]
    slots = blocks.slots(start, count)
    assert slots.dtype == np.int32 and slots.shape == (count,)
    ids = blocks.ids
    tokens = range(start, start + count)
    np.testing.assert_array_equal(slots, [ids[t // NT] * NT + t % NT for t in tokens])


def test_slots_take_appended_tokens(manager: kv.BlockManager) -> None:
    manager.allocate_blocks(1)
    blocks = manager.allocate_blocks(2)[::-1]
    k = jnp.arange(3 * NH * HD, dtype=jnp.float32).reshape(3, NH, HD)
    manager.pool = kv.append_kv(manager.pool, 1, k, k + 1, blocks.slots(NT - 1, 3))
    keys = np.concatenate([np.asarray(block[1].k) for block in blocks])
    np.testing.assert_array_equal(keys[NT - 1 : NT + 2], k)
    values = np.concatenate([np.asarray(block[1].v) for block in blocks])
    np.testing.assert_array_equal(values[NT - 1 : NT + 2], k + 1)
    assert not keys[: NT - 1].any() and not keys[NT + 2 :].any()


@pytest.mark.parametrize(
    ("start", "count", "error", "message"),
    [
        (0, 2 * NT + 1, IndexError, "tokens 0 to 8 do not fit 2 blocks of 4 tokens"),
        (2 * NT, 1, IndexError, "token 8 does not fit.*append blocks first"),
        (2 * NT + 1, 0, IndexError, "start=9 does not fit 2 blocks of 4 tokens"),
        (-1, 1, ValueError, "start must be at least 0, got -1"),
        (0, -1, ValueError, "count must be at least 0, got -1"),
        (0.0, 1, TypeError, r"start must be an integer, got 0\.0"),
        (0, "1", TypeError, "count must be an integer, got '1'"),
    ],
)
def test_slots_beyond_the_blocks(
    manager: kv.BlockManager,
    start: Any,
    count: Any,
    error: type[Exception],
    message: str,
) -> None:
    blocks = manager.allocate_blocks(2)
    with pytest.raises(error, match=rf"BlockList\.slots: {message}"):
        blocks.slots(start, count)


def test_slots_of_a_freed_block(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(3)
    manager.free(blocks[1])
    assert blocks.slots(2 * NT, 1) == [blocks[2].id * NT], (
        "its tokens are not asked for"
    )
    with pytest.raises(ValueError, match=r"BlockList\.slots: block \[1\].*freed"):
        blocks.slots(NT, 1)


# ---- what cannot be pickled ----------------------------------------------------------


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "kind", ["BlockManager", "BlockList", "Block", "Layer", "Piece"]
)
def test_what_stands_for_memory_is_not_copied(
    manager: kv.BlockManager, kind: str, how: Callable[[Any], Any]
) -> None:
    blocks = manager.allocate_blocks(1)
    block = blocks[0]
    whole = [manager, blocks, block, block[0], block[0].k]
    (x,) = (x for x in whole if type(x).__name__ == kind)
    message = rf"^{kind}: cannot be pickled or copied.*np\.asarray.*share\(\)"
    with pytest.raises(TypeError, match=message):
        how(x)
    assert block.ref_count == 1


# ---- properties ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (NL, NO, NT, NH, HD)),
        ({"layout": "HND"}, (NL, NO, NH, NT, HD)),
        ({"layout": "universal"}, (NL, NO, NT, NH, HD)),
        ({"layout": "operational"}, (NL, NO, NT, NH, HD)),
        ({"layout": kv.Layout("page first", "T L O H D")}, (NL, NO, NT, NH, HD)),
        ({"num_outer": 1, "dtype": jnp.bfloat16}, (NL, 1, NT, NH, HD)),
        ({"contiguous": False, "layout": "HND"}, (NL, NO, NH, NT, HD)),
        ({"memory_kind": "pinned_host"}, (NL, NO, NT, NH, HD)),
    ],
    ids=str,
)
def test_properties(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    block = make_manager(**changes).allocate_blocks(1)[0]
    layer = block[1]
    dtype = np.dtype(changes.get("dtype", jnp.float32))
    assert (block.shape, layer.shape) == (shape, shape[1:])
    assert (block.ndim, layer.ndim) == (5, 4)
    assert (block.size, layer.size) == (np.prod(shape), np.prod(shape[1:]))
    assert layer.nbytes == layer.size * dtype.itemsize == block.nbytes // NL
    assert block.dtype == layer.dtype == dtype
    assert block.device_id == layer.device_id == 0
    assert (len(block), len(layer)) == (NL, shape[1])
    assert layer.index == 1 and layer.block is block
    assert np.asarray(block).shape == shape and np.asarray(layer).shape == shape[1:]


def test_arrays_are_copies(manager: kv.BlockManager, rng: np.random.Generator) -> None:
    block = manager.allocate_blocks(2)[1]
    values = rng.normal(size=block.shape).astype(np.float32)
    block.copy_from(values)
    for taken in (np.asarray(block), np.array(block), np.array(block, copy=True)):
        np.testing.assert_array_equal(taken, values)
        taken[...] = 0
    np.testing.assert_array_equal(jnp.asarray(block), values)
    np.testing.assert_array_equal(jnp.asarray(block[2]), values[2])
    np.testing.assert_array_equal(np.asarray(block[2], dtype=np.float64), values[2])
    assert np.asarray(block, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match=r"np\.from_dlpack"):
        np.asarray(block, copy=False)


def test_repr_says_what_it_is(manager: kv.BlockManager) -> None:
    blocks = manager.allocate_blocks(2)
    block = blocks[0]
    assert f"BlockList([{block.id}, {blocks[1].id}])" == repr(blocks)
    assert f"id={block.id}" in repr(block) and "float32[3, 2, 4, 2, 5]" in repr(block)
    assert "layer 2" in repr(block[2]) and "4 of 6 blocks free" in repr(manager)
    assert "layer 2, outer 1, float32[4, 2, 5]" in repr(block[2].v)
    manager.free(block)
    for freed in (block, block[2], block[2].k):
        assert repr(freed).endswith(", freed)")
    held = blocks[1]
    manager.close()
    for closed in (held, held[0], held[0].v):
        assert repr(closed).endswith(", closed)")
    assert repr(manager).startswith("BlockManager(closed, 5 of 6 blocks free, Block")


# ---- which blocks are valid ----------------------------------------------------------


def test_valid_until_freed(manager: kv.BlockManager) -> None:
    block, other = manager.allocate_blocks(2)
    layer = block[0]
    assert block and layer
    manager.free(block)
    assert not block and not layer and other


def test_invalid_while_its_pool_is_donated_away(manager: kv.BlockManager) -> None:
    block = manager.allocate_blocks(1)[0]
    read_only(manager.pool)
    assert block, "a jit that does not donate leaves the pool"
    new = donate(manager.pool)
    assert not block and not block[0]
    manager.pool = new
    assert block and block[0]
    np.testing.assert_array_equal(block, np.ones(block.shape))


def test_invalid_once_the_manager_is_closed(manager: kv.BlockManager) -> None:
    block, other = manager.allocate_blocks(2)
    with manager as same:
        assert same is manager and block
    assert not block and not block[0]
    with pytest.raises(RuntimeError, match="allocate_blocks: the manager is closed"):
        manager.allocate_blocks(1)
    manager.free(other)  # blocks can still be given back


FREED = r"block \d+\b.*freed.*allocate a new one"
GONE = r"block \d+\b.*donated; put the new pool back with manager\.pool ="
CLOSED = r"block \d+\b.*its manager is closed; build a new manager and allocate there"
USES: dict[str, tuple[type[Exception], Callable[[kv.Block], Any]]] = {
    "read": (RuntimeError, np.asarray),
    "read a layer": (RuntimeError, lambda b: jnp.asarray(b[0])),
    "write": (ValueError, lambda b: b.copy_from(np.zeros(b.shape, np.float32))),
    "write a layer": (
        ValueError,
        lambda b: b[0].copy_from(np.zeros(b.shape[1:], np.float32)),
    ),
    "export": (BufferError, lambda b: b.__dlpack__()),
    "export a layer": (BufferError, lambda b: b[0].__dlpack__()),
    "ask for the device": (BufferError, lambda b: b.__dlpack_device__()),
    "share": (ValueError, lambda b: b.share()),
    "list its ids": (ValueError, lambda b: kv.BlockList(b.manager, [b]).ids),
    "read keys": (RuntimeError, lambda b: np.asarray(b[0].k)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("reason", [FREED, GONE, CLOSED])
def test_using_an_invalid_block(
    manager: kv.BlockManager, use: str, reason: str
) -> None:
    block = manager.allocate_blocks(1)[0]
    if reason == FREED:
        manager.free(block)
    elif reason == GONE:
        donate(manager.pool)
    else:
        manager.close()
    error, run = USES[use]
    with pytest.raises(error, match=reason) as raised:
        run(block)
    # What the setter of a closed manager refuses, nobody is told to try.
    assert ("manager.pool" in str(raised.value)) == (reason == GONE)
    assert manager.num_free_blocks == BLOCKS - (reason != FREED)


# ---- giving blocks back --------------------------------------------------------------


def test_exhaustion_allocates_nothing(manager: kv.BlockManager) -> None:
    held = manager.allocate_blocks(4)
    message = "3 blocks asked for, 2 of 6 free; free some, or build the manager"
    with pytest.raises(kv.PoolExhaustedError, match=message):
        manager.allocate_blocks(3)
    assert issubclass(kv.PoolExhaustedError, MemoryError)
    assert manager.num_free_blocks == 2
    rest = manager.allocate_blocks(2)
    assert sorted([*held.ids, *rest.ids]) == list(range(BLOCKS))
    with pytest.raises(MemoryError):
        manager.allocate_blocks(2**70)


@pytest.mark.parametrize(
    ("count", "error"),
    [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError)],
)
def test_count_must_be_a_number_of_blocks(
    manager: kv.BlockManager, count: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"allocate_blocks: count .*got {count!r}"):
        manager.allocate_blocks(count)
    assert manager.num_free_blocks == BLOCKS


def test_frees_a_block_a_list_or_any_iterable(manager: kv.BlockManager) -> None:
    a, b, c, d = manager.allocate_blocks(4)
    manager.free(a)
    manager.free(block for block in [b, c])
    assert manager.num_free_blocks == 5
    manager.free([])
    manager.free([d])
    manager.allocate_blocks(BLOCKS).free()
    assert manager.num_free_blocks == BLOCKS


def test_what_cannot_be_freed_changes_nothing(manager: kv.BlockManager) -> None:
    good, freed = manager.allocate_blocks(2)
    foreign = make_manager().allocate_blocks(1)[0]
    manager.free(freed)
    before = manager.num_free_blocks
    freed_already = r"blocks\[1\] \(block \d\) is freed already"
    mixed: list[tuple[type[Exception], str, list[Any]]] = [
        (ValueError, freed_already, [good, freed]),
        (ValueError, freed_already, [good, good]),
        (ValueError, r"blocks\[1\] .* belongs to another manager", [good, foreign]),
        (TypeError, r"blocks\[1\] must be a Block, got int", [good, 3]),
        (TypeError, r"blocks\[1\] must be a Block, got Layer", [good, good[0]]),
        (TypeError, r"blocks\[0\] must be a Block, got str", ["good", good]),
    ]
    for error, message, blocks in mixed:
        with pytest.raises(error, match=f"free: {message}"):
            manager.free(blocks)
        assert manager.num_free_blocks == before and good and foreign
        assert good.ref_count == foreign.ref_count == 1
    manager.free(good)


@pytest.mark.parametrize("value", [None, 3])
def test_freeing_what_is_no_block(manager: kv.BlockManager, value: Any) -> None:
    with pytest.raises(TypeError, match=f"free: .*got {type(value).__name__}"):
        manager.free(value)


def test_a_list_frees_itself_as_a_context(manager: kv.BlockManager) -> None:
    with manager.allocate_blocks(3) as blocks:
        assert manager.num_free_blocks == 3 and all(blocks)
        manager.free(blocks[0])  # what is freed inside is not freed again
    assert manager.num_free_blocks == BLOCKS and not any(blocks)
    with pytest.raises(KeyError), manager.allocate_blocks(3):
        raise KeyError
    assert manager.num_free_blocks == BLOCKS
