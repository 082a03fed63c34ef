"""Selectors, gates and what is said of them over a mesh with explicit axes, and where
heads are cut by a shard_map."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from attention_model import jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, put
from messages import check
from sparse_cases import TILES, draw

from jax_kvblock.sparse import (
    LearnedGate,
    Oracle,
    PooledThreshold,
    Random,
    evaluate_selector,
    gate_loss,
    init_gate,
    sparse_attention,
    tile_mass,
    train_gate,
)

pytestmark = pytest.mark.usefixtures("exact_products", "four_cpus")

CUTS = {"batch": ("b",), "heads": (None, None, "h"), "both": ("b", None, "h")}
HALF = {"sparsity_ratio": 0.5, **TILES}
DOCUMENTS = np.repeat([[0, 1], [0, 2]], [50, 78], axis=1).astype(np.int32)
by_cut = pytest.mark.parametrize("cut", CUTS)


def placed(qkv, cut):
    mesh = mesh_of(AxisType.Explicit)
    return mesh, [put(x, mesh, *CUTS[cut]) for x in qkv]


@by_cut
def test_the_map_and_gates(rng, cut):
    qkv = draw(rng, size=2)
    gate = init_gate(4, 2, 16)
    mask = {"causal": True, "segment_ids": DOCUMENTS, **TILES}

    def run(q, k, ids):
        of_mask = mask | {"segment_ids": ids}
        slopes = jax.grad(gate_loss)(gate, q, k, **of_mask)
        return tile_mass(q, k, **of_mask), slopes

    mesh, cut_qkv = placed(qkv, cut)
    with jax.set_mesh(mesh):
        got = jit(run)(*cut_qkv[:2], put(DOCUMENTS, mesh, CUTS[cut][0]))
        _, losses = train_gate(gate, [cut_qkv[:2]], **mask)
    b, _, h = (*CUTS[cut], None, None)[:3]
    assert got[0].sharding.spec == P(b, h, None, None)
    want = jit(run)(*qkv[:2], DOCUMENTS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    np.testing.assert_allclose(losses, gate_loss(gate, *qkv[:2], **mask), rtol=1e-5)


@by_cut
def test_attention_and_how_good_it_is(rng, cut):
    qkv = draw(rng, size=2)
    selector = Oracle(**HALF)
    run = functools.partial(sparse_attention, selector=selector, causal=True)
    mesh, cut_qkv = placed(qkv, cut)
    with jax.set_mesh(mesh):
        got = jit(run)(*cut_qkv)
        found = evaluate_selector(*cut_qkv, selector, causal=True)
        tiles = PooledThreshold(tau=0.5, piece=8, **TILES)(*cut_qkv[:2])
        of_tiles = evaluate_selector(*cut_qkv, tiles)
    assert got.sharding.is_equivalent_to(cut_qkv[0].sharding, 4)
    np.testing.assert_allclose(got, run(*qkv), rtol=0, atol=1e-6)
    same = evaluate_selector(*qkv, selector, causal=True)
    assert found.tiles_listed == same.tiles_listed
    np.testing.assert_allclose(found.recall, same.recall, rtol=1e-5)
    same = evaluate_selector(*qkv, PooledThreshold(tau=0.5, piece=8, **TILES))
    assert of_tiles.tiles_listed == same.tiles_listed


@by_cut
def test_tiles_of_the_nearest_keys(rng, cut):
    """Of documents that do not lie where their queries do, cut by members."""
    qkv = draw(rng, size=2)
    selector = Random(**HALF)

    def run(q, k, v, ids, of_keys, lens):
        mask = {"segment_ids": (ids, of_keys), "kv_lens": lens, "kv_offset": lens // 16}
        return selector(q, k, causal=True, **mask).indices

    given = (*qkv, DOCUMENTS, DOCUMENTS[::-1].copy(), np.int32([128, 90]))
    mesh, cut_qkv = placed(qkv, cut)
    with jax.set_mesh(mesh):
        rows = [put(x, mesh, CUTS[cut][0]) for x in given[3:]]
        got = jit(run)(*cut_qkv, *rows)
    np.testing.assert_array_equal(got, jit(run)(*given))


def over_heads(function, *specs):
    of_heads = P(None, None, "h")
    return jax.shard_map(
        function,
        mesh=mesh_of(),
        in_specs=(of_heads, of_heads, of_heads, *specs),
        out_specs=of_heads,
    )


def test_lists_of_tiles_go_into_a_shard_map_over_heads(rng):
    """In which heads count from 0 on each device."""
    qkv = draw(rng, size=2)
    tiles = Random(**HALF)(*qkv[:2])
    cut = over_heads(sparse_attention, P(None, "h"))
    want = sparse_attention(*qkv, tiles)
    np.testing.assert_allclose(jit(cut)(*qkv, tiles), want, rtol=0, atol=1e-6)


def test_gates_go_into_a_shard_map_over_heads(rng):
    qkv = draw(rng, size=2)
    gate = jax.tree.map(
        lambda x: x + rng.normal(size=x.shape).astype(np.float32),
        init_gate(4, 2, 16),
    )

    def attend(q, k, v, gate):
        return sparse_attention(q, k, v, LearnedGate(gate, **HALF))

    want = attend(*qkv, gate)
    got = jit(over_heads(attend, P("h")))(*qkv, gate)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    check(
        "LearnedGate",
        ValueError,
        "2 heads on 1 of 16|for 4 on 2 of 16|with its arrays cut as the heads are",
        lambda: over_heads(lambda q, k, v: attend(q, k, v, gate))(*qkv),
    )
