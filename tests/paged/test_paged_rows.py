"""`ranges` and `tree_mask`: what each row sees beside the band."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_model import BARS, Case, Drawn, packed

from jax_kvblock import (
    flash_attention,
)

CASES = {
    "ranges": Case(ranges=True, sequences=((6, 300), (1, 37), (9, 20), (1, 64))),
    "ranges, not causal": Case(
        ranges=True, causal=False, sinks=True, sequences=((70, 600), (9, 20))
    ),
    "8 drafts": Case(tree=1, sequences=((8, 300), (8, 8), (1, 64), (8, 41))),
    "70 drafts of two words": Case(tree=2, sequences=((70, 90), (33, 40), (1, 9))),
    "drafts, not causal": Case(tree=1, causal=False, sequences=((8, 300), (40, 41))),
    "drafts longer than keys": Case(tree=1, sequences=((9, 4), (40, 20), (3, 0))),
    "ranges, drafts, a window": Case(
        ranges=True,
        tree=1,
        block_size=5,
        window=(30, None),
        softcap=2.0,
        sequences=((8, 300), (20, 70)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, draw):
    drawn = draw(CASES[name])
    drawn.hold(*drawn.run())


BOTH = Case(ranges=True, tree=1, sequences=((4, 40), (4, 61), (4, 9)))


def test_a_batch_with_ranges_and_drafts(draw):
    drawn = draw(BOTH)
    given = {"q": drawn.q, "ranges": drawn.ranges, "tree_mask": packed(drawn.seen)}
    given = {name: a.reshape(3, 4, *a.shape[1:]) for name, a in given.items()}
    out, lse = drawn.run(**given, query_start=None)
    drawn.hold(out.reshape(-1, 4, 16), lse.reshape(-1, 4))


def test_bits_are_bits_whatever_their_dtype_is(draw):
    """int32 and uint32, of NumPy and JAX; and lists of integers."""
    drawn = draw(BOTH)
    drawn.seen[:, 31] = True  # below 0 as int32
    drawn.seen[:, 8:] = True
    words = packed(drawn.seen)
    assert words.max() > 2**31
    made = [words.view(np.int32), jnp.asarray(words), words.view(np.int32).tolist()]
    for tree_mask in [words, *made]:
        drawn.hold(*drawn.run(tree_mask=tree_mask))
    drawn.hold(*jax.jit(lambda bits: drawn.run(tree_mask=bits))(words))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        drawn.hold(*drawn.run(ranges=drawn.ranges.astype(np.int64)))


def test_without_bits_and_with_all_of_them_is_the_same(draw):
    drawn = draw(Case(sequences=((40, 90), (1, 37), (8, 20))))
    rows = len(drawn.q)
    _, lse = drawn.run()
    everything = np.tile(np.array([-(2**31), 2**31 - 1], np.int32), (rows, 1))
    for words in (0, 1, 2):
        again = drawn.run(
            tree_mask=np.full((rows, words), -1, np.int32), ranges=everything
        )
        drawn.hold(*again)
        np.testing.assert_allclose(again[1], lse, rtol=0, atol=1e-6)


def test_a_tree_of_drafts_is_its_branches(draw):
    """Each node sees what the sequence of its ancestors would see."""
    parents = [-1, 0, 0, 1, 1, 2, 5, 3]  # node 0 is the last token
    drawn = draw(Case(tree=1, sequences=((8, 50),)))
    drawn.seen[:] = False
    branches = []
    for node, parent in enumerate(parents):
        if parent >= 0:
            drawn.seen[node] = drawn.seen[parent]
        drawn.seen[node, node] = True
        branches.append(np.flatnonzero(drawn.seen[node]))
    out, lse = drawn.run()
    drawn.hold(out, lse)
    keys, values = drawn.keys[0], drawn.values[0]
    for node, branch in enumerate(branches):
        at = np.r_[0:42, 42 + branch]
        alone, _ = flash_attention(
            drawn.q[None, node : node + 1], keys[None, at], values[None, at],
            return_lse=True, implementation="xla",
        )  # fmt: skip
        bar = BARS[drawn.case.dtype]
        got = np.asarray(out[node], np.float32)
        np.testing.assert_allclose(
            got, np.asarray(alone[0, 0], np.float32), rtol=0, atol=bar
        )


def test_what_no_range_has_may_be_nan(rng):
    drawn = Drawn(Case(ranges=True, sequences=((2, 700), (1, 90))), rng)
    drawn.ranges = np.array([[300, 310], [290, 305], [20, 30]], np.int32)
    seen = [np.arange(290, 310), np.arange(20, 30)]
    for b, keys in enumerate(seen):
        gone = np.delete(np.arange(drawn.kv_lens[b]), keys)
        ids = drawn.tables[b, gone // 16]
        drawn.k[ids, gone % 16] = drawn.v[ids, gone % 16] = np.nan
    drawn.hold(*drawn.run())


@pytest.mark.parametrize("over", ["ranges", "tree_mask", "both", "everything"])
def test_vmap_over_ranges_and_drafts(over, draw):
    drawn = [draw(BOTH) for _ in range(3)]
    names = {
        "both": ["ranges", "tree_mask"],
        "everything": ["q", "ranges", "tree_mask"],
    }
    mapped = names.get(over, [over])
    for one in drawn[1:]:
        one.k, one.v, one.keys = drawn[0].k, drawn[0].v, drawn[0].keys
        one.values, one.tables = drawn[0].values, drawn[0].tables
        for name, held in {"q": "q", "ranges": "ranges", "tree_mask": "seen"}.items():
            if name not in mapped:
                setattr(one, held, getattr(drawn[0], held))

    def run(given: dict[str, Any]) -> Any:
        return drawn[0].run(**given)

    arrays = [{"q": x.q, **x.options} for x in drawn]
    stacked = {n: np.stack([a[n] for a in arrays]) for n in mapped}
    out, lse = jax.jit(jax.vmap(run))(stacked)
    for i, one in enumerate(drawn):
        one.hold(out[i], lse[i])


def test_new_ranges_and_drafts_do_not_compile_again(draw):
    drawn, other = draw(BOTH), draw(BOTH)
    traced = []

    @jax.jit
    def step(ranges: Any, bits: Any) -> Any:
        traced.append(1)
        return drawn.run(ranges=ranges, tree_mask=bits)

    for x in (drawn, other):
        drawn.ranges, drawn.seen = x.ranges, x.seen
        drawn.hold(*step(x.ranges, packed(x.seen)))
    assert len(traced) == 1


def test_ranges_and_drafts_in_a_scan_and_exported(rng):
    drawn = Drawn(BOTH, rng)

    @jax.jit
    def steps(ranges: Any, bits: Any) -> Any:
        def one(carry: None, given: Any) -> Any:
            return carry, drawn.run(ranges=given[0], tree_mask=given[1])

        return jax.lax.scan(one, None, (ranges, bits))[1]

    given = drawn.ranges[None].repeat(2, 0), packed(drawn.seen)[None].repeat(2, 0)
    out, lse = jax.export.export(steps)(*given).call(*given)
    drawn.hold(out[1], lse[1])


def test_no_array_of_queries_and_keys_is_made(rng):
    drawn = Drawn(Case(ranges=True, tree=1, sequences=((64, 4096),)), rng)
    run = jax.jit(lambda q: drawn.run(q=q))
    memory = run.lower(drawn.q).compile().memory_analysis()
    plain = jax.jit(lambda q: drawn.run(q=q, ranges=None, tree_mask=None))
    without = plain.lower(drawn.q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < without.temp_size_in_bytes + 64 * 4096
