"""Where keys of sequences that are dealt out to devices are: lengths, tables, slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from paged_model import Case
from parallel_decode import Dealt, mesh_of

from jax_kvblock.parallel import (
    interleaved_lens,
    interleaved_paged_attention,
    interleaved_slots,
    interleaved_tables,
)

pytestmark = pytest.mark.usefixtures("four_cpus")


def over(size: int, function: Any) -> Any:
    """What each device makes, one after the other."""
    mapped = jax.shard_map(
        lambda: function()[None], mesh=mesh_of(size), in_specs=(), out_specs=P("cp")
    )
    return jax.jit(mapped)()


@pytest.mark.parametrize(("size", "block"), [(1, 4), (2, 1), (3, 5), (4, 16)])
def test_lens(size, block):
    lens = np.r_[0 : 3 * size * block + 2, -1, -(2**31), 2**31 - 1].astype(np.int32)
    got = over(size, lambda: interleaved_lens(lens, block, "cp"))
    for i in range(size):
        for n, held in zip(lens.tolist(), got[i].tolist(), strict=True):
            rounds, rest = divmod(max(n, 0), size * block)
            assert held == rounds * block + min(max(rest - i * block, 0), block)
    assert (got.sum(0) == np.maximum(lens, 0)).all()


@pytest.mark.parametrize("width", [0, 1, 4, 7])
def test_tables(width):
    whole = np.arange(2 * width, dtype=np.int32).reshape(2, width)
    got = over(4, lambda: interleaved_tables(whole, "cp"))
    assert got.shape == (4, 2, -(-width // 4))
    for i in range(4):
        want = whole[:, i::4]
        assert (got[i, :, : want.shape[1]] == want).all()
        assert (got[i, :, want.shape[1] :] == -1).all()


def test_slots():
    """Every position goes into one slot of one device, its own; bad ones into none."""
    whole = np.array([[7, 3, 0, 9, 5], [1, 2, 8, -1, 4]], np.int32)
    positions = np.array([*range(-2, 22), 2**31 - 1], np.int32)

    def own(positions: Any, **more: Any) -> Any:
        tables = interleaved_tables(whole, "cp")
        return interleaved_slots(positions, tables, 3, "cp", **more)

    both = np.stack([positions] * 2)
    got = over(2, lambda: own(both))
    for b in range(2):
        for j, p in enumerate(positions.tolist()):
            block = p // 3
            want = np.full(2, -1)
            if 0 <= block < 5 and whole[b, block] >= 0:
                want[block % 2] = whole[b, block] * 3 + p % 3
            assert (got[:, b, j] == want).all(), (b, p)
    assert (over(2, lambda: own(both[:, 5])) == got[:, :, 5]).all()
    starts = np.array([1, 4, 9], np.int32)
    ragged = over(2, lambda: own(positions[:11], query_start=starts))
    owner = [-1, 0, 0, 0, 1, 1, 1, 1, 1, -1, -1]
    for j, b in enumerate(owner):
        want = got[:, b, j] if b >= 0 else -1
        assert (ragged[:, j] == want).all()
    fallen = over(2, lambda: own(positions[:11], query_start=[0, 9, 4]))
    assert (fallen == -1).all()
    empty = over(2, lambda: own(positions[:4], query_start=starts)[:0])
    assert empty.shape == (2, 0)


def test_ids_too_large_for_a_slot_write_nothing():
    for bad in (2**31 - 1, 2**30, 2**28):
        tables = [[bad, bad]] * 2
        got = over(
            1, lambda tables=tables: interleaved_slots([0, 17], tables, 16, "cp")
        )
        assert (got == -1).all()


# ---- messages ------------------------------------------------------------------------


def test_messages(rng):
    drawn = Dealt(Case(), rng, 2, "xla")
    with pytest.raises(ValueError, match="interleaved_paged_attention: axis_name must"):
        interleaved_paged_attention(
            drawn.q, drawn.pages, None, drawn.tables, drawn.kv_lens, axis_name="cp",
            query_start=drawn.starts,
        )  # fmt: skip
    with pytest.raises(ValueError, match="interleaved_lens: axis_name must be a mesh"):
        interleaved_lens([3], 4, "cp")
    with pytest.raises(ValueError, match="interleaved_paged_attention: q must be "):
        drawn.own_run(query_start=None)
    with pytest.raises(ValueError, match="interleaved_lens: block_size must be"):
        over(2, lambda: interleaved_lens([3], 0, "cp"))
    with pytest.raises(TypeError, match="interleaved_lens: kv_lens must be int32"):
        over(2, lambda: interleaved_lens([3.5], 4, "cp"))
    with pytest.raises(ValueError, match=r"interleaved_tables: block_tables must be"):
        over(2, lambda: interleaved_tables([3], "cp"))
    slots = functools.partial(interleaved_slots, block_size=4, axis_name="cp")
    with pytest.raises(ValueError, match=r"int32\[2\] or \[2, T\].*pass query_start"):
        over(2, lambda: slots([1, 2, 3], [[0], [1]]))
    with pytest.raises(ValueError, match=r"with query_start positions must be int32"):
        over(2, lambda: slots([[1]], [[0]], query_start=[0, 1]))
    with pytest.raises(ValueError, match=r"query_start must be int32\[2\]"):
        over(2, lambda: slots([1], [[0]], query_start=[0, 1, 1]))
