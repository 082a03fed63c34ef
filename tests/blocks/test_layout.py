"""A spec counts exactly, fills in what is usual, and knows a layout by its order."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvblock as kv

DIMS = (3, 2, 4, 5, 6)


def test_sizes_are_exact_however_large():
    # 2**60 bytes, 2**64 and 2**65: the last two are 0 in 64 bits.
    for layers in (2**10, 2**14, 2**15):
        spec = kv.BlockSpec(layers, 2, 2**10, 2**20, 2**18, jnp.int16)
        assert spec.block_bytes == layers * 2**50
        operational = spec.replace(layout="operational")
        assert math.prod(operational.block_shape) == layers * 2**49
        assert operational.block_shape[2] == 2**48
    merged = kv.Layout("merged", "(L T H D O)")
    huge = kv.BlockSpec(2**20, 2, 2**20, 2**20, 2**20, jnp.int8, merged)
    assert huge.block_shape == (2**81,)


def test_two_outer_pieces_are_the_default():
    spec = kv.BlockSpec(
        num_layers=3, block_size=4, num_kv_heads=5, head_dim=6, dtype="bfloat16"
    )
    assert spec == kv.BlockSpec(*DIMS, jnp.bfloat16)


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_dim", "dtype"])
def test_the_rest_must_be_given(name):
    fields = dict(block_size=4, num_kv_heads=5, head_dim=6, dtype="bfloat16")
    del fields[name]
    with pytest.raises(TypeError, match=f"BlockSpec: {name} is missing; pass {name}="):
        kv.BlockSpec(num_layers=3, **fields)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("NHD", "L O T H D"),
        ("HND", "LOHTD"),
        ("universal", "H  L O T D"),
        ("operational", "L O (THD)"),
    ],
)
def test_a_layout_in_the_order_of_a_known_one_is_that_one(name, axes):
    known = kv.BlockSpec(*DIMS, jnp.bfloat16, name)
    for called in (name, "mine"):
        spec = known.replace(layout=kv.Layout(called, axes))
        assert spec == known
        assert hash(spec) == hash(known)
        assert (spec.layout, spec.inner) == (name, known.inner)
        assert spec.block_shape == known.block_shape


@pytest.mark.parametrize(
    ("name", "axes"),
    [("NHD", "L O T H D"), ("HND", "LOHTD"), ("universal", "H  L O T D")],
)
def test_a_layout_equals_the_name_of_its_order(name, axes):
    mine, same = kv.Layout("mine", axes), kv.Layout(name, axes)
    assert mine == name and name == mine and mine == same
    assert hash(mine) == hash(name) == hash(same)
    assert {name: 1}[mine] == 1 and mine in (name,)
    others = {"NHD", "HND", "universal", "operational", "mine"} - {name}
    assert all(mine != other and other != mine for other in others)
    assert not any(mine != known for known in (name, same))


def test_a_layout_of_another_order_equals_no_name():
    for layout in (
        kv.Layout("NHD", "T L O H D"),
        kv.Layout("operational", "L O (T H D)"),
        kv.Layout("operational", "L O (H T D)"),
    ):
        assert layout != layout.name
        assert layout == kv.Layout(layout.name, layout.axes)
        assert layout != kv.Layout("mine", layout.axes)
    assert kv.Layout("NHD", "T L O H D") != kv.Layout("NHD", "L O T H D")
    assert kv.Layout("NHD", "L O T H D") != 3


def test_other_layouts_stay_what_they_are():
    for layout in (
        kv.Layout("NHD", "T L O H D"),
        kv.Layout("operational", "L O (H T D)"),
    ):
        spec = kv.BlockSpec(*DIMS, np.float16, layout)
        assert spec.layout == layout
        assert spec.block_layout == layout


def test_lists_of_pieces_know_a_layout_by_its_order():
    spec = kv.BlockSpec(*DIMS, jnp.float32)
    pieces = [[jnp.full(DIMS[2:], i, jnp.float32) for i in range(6)]]
    mine = kv.Layout("mine", "L O T H D")
    (got,) = kv.convert_blocks(pieces, mine, "universal", spec)
    (want,) = kv.block_to_universal(pieces)
    np.testing.assert_array_equal(got, want)
