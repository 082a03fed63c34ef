"""Blocks, lists of blocks and layers: sequences, properties, who is valid."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvblock as kv

NL, NO, NT, NH, HD = 3, 2, 4, 2, 5
BLOCKS = 6


def make_manager(**changes: Any) -> kv.BlockManager:
    arguments = {
        "num_kv_heads": NH,
        "head_dim": HD,
        "dtype": jnp.float32,
        "num_blocks": BLOCKS,
        **changes,
    }
    return kv.BlockManager(NL, NT, **arguments)


@pytest.fixture
def manager() -> kv.BlockManager:
    return make_manager()


@jax.jit
def read_only(pool: kv.KVPool) -> jax.Array:
    return pool.data.sum()


def add_one(pool: kv.KVPool) -> kv.KVPool:
    return kv.KVPool(pool.data + 1, pool.spec)


donate = jax.jit(add_one, donate_argnums=0)


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


@pytest.mark.parametrize("of", ["list", "block"])
def test_is_a_sequence(manager: kv.BlockManager, of: str) -> None:
    blocks = manager.allocate_blocks(NL)
    sequence: Any = blocks if of == "list" else blocks[1]
    key = operator.attrgetter("id" if of == "list" else "index")
    whole = [key(x) for x in sequence]
    assert len(sequence) == len(whole) == NL
    assert [key(x) for x in sequence.to_list()] == whole
    assert isinstance(sequence.to_list(), list)
    assert [key(sequence[i]) for i in range(NL)] == whole
    assert [key(sequence[i]) for i in range(-NL, 0)] == whole
    assert key(sequence[np.int32(-1)]) == whole[-1]
    # Two iterations do not disturb each other.
    assert [(key(a), key(b)) for a in sequence for b in sequence] == [
        (a, b) for a in whole for b in whole
    ]


@pytest.mark.parametrize("of", ["list", "block"])
@pytest.mark.parametrize("index", [NL, -NL - 1, 2**70])
def test_index_out_of_range(manager: kv.BlockManager, of: str, index: int) -> None:
    blocks = manager.allocate_blocks(NL)
    sequence: Any = blocks if of == "list" else blocks[0]
    with pytest.raises(
        IndexError, match=rf"index {index} is out of range: it has {NL}"
    ):
        sequence[index]


@pytest.mark.parametrize("of", ["list", "block"])
@pytest.mark.parametrize("index", ["0", 1.0, None])
def test_index_of_a_wrong_type(manager: kv.BlockManager, of: str, index: Any) -> None:
    blocks = manager.allocate_blocks(1)
    sequence: Any = blocks if of == "list" else blocks[0]
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
    for copy in (np.asarray(block), np.array(block), np.array(block, copy=True)):
        np.testing.assert_array_equal(copy, values)
        copy[...] = 0
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
    manager.free(block)
    assert "freed" in repr(block)


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
GONE = r"block \d+\b.*donated or closed.*put the new pool back"
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
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("reason", ["freed", "gone"])
def test_using_an_invalid_block(
    manager: kv.BlockManager, use: str, reason: str
) -> None:
    block = manager.allocate_blocks(1)[0]
    if reason == "freed":
        manager.free(block)
    else:
        donate(manager.pool)
    error, run = USES[use]
    with pytest.raises(error, match=FREED if reason == "freed" else GONE):
        run(block)
    assert manager.num_free_blocks == BLOCKS - (reason == "gone")


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
