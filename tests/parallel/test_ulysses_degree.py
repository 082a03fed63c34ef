"""How many devices exchange heads in a ring of groups, where the caller says it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from context_calls import Cut, assert_right, compute, everything
from test_strategy import trace

from jax_kvblock.parallel import (
    AttentionConfig,
    AttentionPatterns,
    create_attention,
    create_context_parallel_attention,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

DIMS = 1, 64, 64, 8, 2, 16, 24  # B, T and S of a device, N, K, D, Dv
RING_OF_GROUPS = "ulysses_ring"


def test_what_each_degree_sends():
    """1 is a ring and 4 is Ulysses, also where KV heads are repeated for it."""
    found = {
        degree: trace(RING_OF_GROUPS, DIMS, ulysses_degree=degree)
        for degree in (1, 2, 4)
    }
    assert found[1] == trace("ring", DIMS)
    assert found[4] == trace("ulysses", DIMS)
    assert found[2] == trace(RING_OF_GROUPS, DIMS)  # 2 KV heads, as it is unless given
    assert found[1] != found[2] != found[4]
    one_head = (*DIMS[:4], 1, *DIMS[5:])
    repeated = trace(RING_OF_GROUPS, one_head, ulysses_degree=2)
    among_pairs = {among for name, among, _ in repeated if name == "all_to_all"}
    assert among_pairs == {2}
    assert trace(RING_OF_GROUPS, one_head) == trace("ring", one_head)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("layout", "degree"),
    [("zigzag", 2), ("contiguous", 4), ("contiguous", 2), ("zigzag", 4), ("zigzag", 1)],
)
def test_each_degree_is_right(rng, layout, degree):
    """With one KV head, which is repeated."""
    call = everything(rng, kv_heads=1)
    got = compute(call, Cut(RING_OF_GROUPS, layout), ulysses_degree=degree)
    assert_right(call, got)


def attend(strategy, heads=8, kv_heads=2, **options):
    return trace(strategy, (1, 8, 8, heads, kv_heads, 16, 16), **options)


@pytest.mark.parametrize("strategy", ["auto", "ring", "all_gather", "ulysses"])
def test_other_strategies_have_none(strategy):
    words = f"ulysses_degree is of strategy='ulysses_ring', got it with '{strategy}'"
    with pytest.raises(ValueError, match=words):
        attend(strategy, ulysses_degree=2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "served"),
    [(8, 2, 3, "1, 2, 4"), (8, 2, 8, "1, 2, 4"), (6, 3, 2, "1"), (6, 6, 4, "1, 2")],
)
def test_a_degree_that_does_not_divide(heads, kv_heads, degree, served):
    words = (
        rf"ulysses_degree must divide the 4 devices and the {heads} query heads, and "
        rf"divide the {kv_heads} KV heads or be a multiple of them: one of "
        rf"\[{served}\], got {degree}"
    )
    with pytest.raises(ValueError, match=words):
        attend(RING_OF_GROUPS, heads, kv_heads, ulysses_degree=degree)


@pytest.mark.parametrize("degree", [0, -2, 2.0, "two"])
def test_what_is_no_number_of_devices(degree):
    words = "ulysses_degree must be an integer of at least 1, got"
    with pytest.raises(ValueError, match=words):
        attend(RING_OF_GROUPS, ulysses_degree=degree)


def test_layers_have_it(rng):
    """The layer exchanges among as many devices as its config says."""
    devices = jax.devices("cpu")[:4]
    layer = create_context_parallel_attention(
        64, 8, 4, devices, strategy=RING_OF_GROUPS, ulysses_degree=2, causal=True
    )
    other = dataclasses.replace(layer.config, ulysses_degree=4)
    x = jnp.asarray(rng.standard_normal((1, 32, 64)), jnp.float32)
    text = jax.jit(lambda x: layer(x)).lower(x).as_text()
    assert "collective_permute" in text and "all_to_all" in text
    whole = create_context_parallel_attention(other, 4, devices)
    text = jax.jit(lambda x: whole(x)).lower(x).as_text()
    assert "collective_permute" not in text and "all_to_all" in text


def test_layers_of_one_device_have_none():
    config = AttentionConfig(64, 8, pattern=AttentionPatterns.CAUSAL, ulysses_degree=2)
    with pytest.raises(ValueError, match="ulysses_degree must be left out with"):
        create_attention(config)
