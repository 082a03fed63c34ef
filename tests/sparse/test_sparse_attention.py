"""Attention to the tiles of selectors against float64, its gradients and transforms."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sparse_cases import TILES, draw, in_tiles, listed, pairs, spread, truth

import jax_kvblock
from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    BlockSparse,
    LearnedGate,
    LocalGlobal,
    Oracle,
    PooledThreshold,
    Random,
    ScoredSelector,
    Streaming,
    Strided,
    create_sparse_attention,
    init_gate,
    sparse_attention,
)

pytestmark = pytest.mark.usefixtures("exact_products")

BUDGET = {"sparsity_ratio": 0.6, **TILES}
SELECTORS = {
    "random": Random(**BUDGET),
    "block sparse": BlockSparse(run=2, **BUDGET),
    "strided": Strided(**BUDGET),
    "local global": LocalGlobal(num_global=1, **BUDGET),
    "streaming": Streaming(window=2, **TILES),
    "threshold": AntidiagonalThreshold(tau=0.7, stride=8, **TILES),
    "pooled": PooledThreshold(tau=0.7, piece=8, **TILES),
    "learned": LearnedGate(init_gate(4, 2, 16), **BUDGET),
    "learned, pieces": LearnedGate(init_gate(4, 2, 16), piece=8, **BUDGET),
    "oracle": Oracle(**BUDGET),
    "union": Streaming(window=1, **TILES) | Random(**BUDGET),
}
DOCUMENTS = np.repeat([[0, 1, 2], [0, 1, 1]], [40, 50, 38], axis=1).astype(np.int32)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "lengths": {"q_lens": np.int32([100, 128]), "kv_lens": np.int32([90, 33])},
    "documents": {"causal": True, "segment_ids": DOCUMENTS},
}


@pytest.fixture
def qkv(rng):
    return draw(rng)


def allowed_by(tiles, mask, q_len=128, kv_len=128, batch=2):
    """Pairs that the mask and the lists let attend."""
    kept = listed(tiles, -(-kv_len // tiles.block_kv))
    seen = pairs(batch, q_len, kv_len, **mask)[:, None]
    return seen & spread(kept, q_len, kv_len, tiles)


@pytest.mark.wide
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SELECTORS)
def test_each_selector_and_mask(qkv, name, mask):
    options, selector = MASKS[mask], SELECTORS[name]

    def run(selector, q, k, v, options):
        out = sparse_attention(
            q, k, v, selector, causal=mask in ("causal", "documents"), **options
        )
        return out, *selector.select(
            q, k, causal=mask in ("causal", "documents"), **options
        )

    operands = {n: x for n, x in options.items() if n != "causal"}
    out, tiles, report = jit(run)(selector, *qkv, operands)
    allowed = allowed_by(tiles, options)
    np.testing.assert_allclose(out, truth(*qkv, allowed), rtol=0, atol=3e-6)
    seen = in_tiles(pairs(2, 128, 128, **options), 16, 16).any((-2, -1))[:, None]
    kept = listed(tiles, 8)
    assert (kept <= seen).all(), "a tile that the mask does not visit"
    full = np.broadcast_to(seen, (2, 4, 8, 8))
    share = np.broadcast_to(kept, full.shape).sum() / full.sum()
    assert 0.1 < share < 1, "nothing was left out"
    np.testing.assert_allclose(report.share, share, rtol=1e-6)
    # A row that attends to something lists something.
    assert (kept.any(-1) == seen.any(-1)).all()


LEAST = {"sparsity_ratio": 0.95, **TILES}
SPARSEST = {
    "random": Random(**LEAST),
    "block sparse": BlockSparse(run=2, **LEAST),
    "strided": Strided(**LEAST),
    "local global": LocalGlobal(num_global=1, **LEAST),
    "streaming": Streaming(window=1, sinks=0, **TILES),
    "threshold": AntidiagonalThreshold(tau=0.01, stride=8, sinks=0, **TILES),
    "pooled": PooledThreshold(tau=None, capacity=1, piece=8, sinks=0, **TILES),
    "learned": LearnedGate(init_gate(4, 2, 16), sinks=0, **LEAST),
    "learned, pieces": LearnedGate(init_gate(4, 2, 16), piece=8, sinks=0, **LEAST),
    "oracle": Oracle(sinks=0, **LEAST),
    "union": Streaming(window=1, sinks=0, **TILES) | Random(**LEAST),
}
# Tiles of several documents; queries and keys of documents that lie elsewhere, fall, or
# have no keys; queries beyond the keys.
PACKED = {
    "documents": {"segment_ids": DOCUMENTS},
    "short documents": {"segment_ids": np.arange(128)[None] // np.array([[5], [7]])},
    "document ids that fall": {"segment_ids": 9 - DOCUMENTS},
    "cross attention": {
        "segment_ids": (DOCUMENTS, np.repeat([[0, 1], [1, 3]], [100, 28], axis=1))
    },
    "documents and lengths": {
        "segment_ids": DOCUMENTS,
        "kv_lens": np.int32([100, 64]),
    },
    "causal cross attention": {
        "causal": True,
        "segment_ids": (2 - DOCUMENTS, np.repeat([[1, 2, 0]] * 2, [9, 79, 40], axis=1)),
    },
    "window": {"window": (8, 8)},
    "window in documents": {"window": (8, 30), "segment_ids": DOCUMENTS},
    "causal window": {"causal": True, "window": (8, None), "q_offset": 20},
}


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, "documents") for name in SPARSEST]
    + [("random", label) for label in PACKED if label != "documents"],
)
def test_no_query_that_attends_is_left_with_nothing(qkv, name, label):
    """Also where a tile of queries straddles documents, and lists one tile or two."""
    mask = {n: _int32(x) for n, x in PACKED[label].items()}
    static = {n: x for n, x in mask.items() if n in ("causal", "window")}
    operands = {n: x for n, x in mask.items() if n not in static}
    select = jit(lambda q, k, o: SPARSEST[name](q, k, **static, **o))
    tiles = select(*qkv[:2], operands)
    seen = pairs(2, 128, 128, **mask).any(-1)[:, None]
    left = allowed_by(tiles, mask).any(-1)
    np.testing.assert_array_equal(left, np.broadcast_to(seen, left.shape))


def _int32(x):
    """Pairs of segments are operands of one dtype."""
    if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
        return tuple(np.asarray(a, np.int32) for a in x)
    return x.astype(np.int32) if isinstance(x, np.ndarray) else x


def test_packed_documents_without_a_causal_mask(rng):
    """The sizes of docs/sparse.md, an eighth of each: no row of zeros."""
    q, k, v = draw(rng, batch=1, q_len=256, kv_len=256)
    documents = np.repeat([[0, 1, 2]], [88, 43, 125], axis=1).astype(np.int32)
    options = {"segment_ids": documents}
    tiles = jit(lambda q, k: SPARSEST["pooled"](q, k, **options))(q, k)
    out = jit(lambda *qkv: sparse_attention(*qkv, tiles, **options))(q, k, v)
    assert (np.abs(out).max(-1) > 0).all()
    allowed = allowed_by(tiles, options, 256, 256, 1)
    np.testing.assert_allclose(out, truth(q, k, v, allowed), rtol=0, atol=3e-6)


def test_a_window(qkv):
    """Selectors choose among the tiles that it visits."""
    mask = {"window": (20, 9)}
    for selector in (Random(**BUDGET), SELECTORS["pooled"]):
        select = jit(lambda q, k, s=selector: tuple(s.select(q, k, **mask)))
        tiles, report = select(*qkv[:2])
        out = jit(lambda *qkv, s=selector: sparse_attention(*qkv, s, **mask))(*qkv)
        allowed = allowed_by(tiles, mask)
        np.testing.assert_allclose(out, truth(*qkv, allowed), rtol=0, atol=3e-6)
        seen = in_tiles(pairs(2, 128, 128, **mask), 16, 16).any((-2, -1))[:, None]
        assert (listed(tiles, 8) <= seen).all()
        np.testing.assert_array_equal(report.visible[0], seen.sum(-1)[0])


def test_odd_lengths_and_queries_at_the_end(rng):
    """Tiles of 16 x 32, the last ones cut; queries are the last 37 of 117 positions."""
    q, k, v = draw(rng, q_len=37, kv_len=117)
    tiles = {"block_q": 16, "block_kv": 32}
    for selector in (
        AntidiagonalThreshold(tau=0.6, stride=16, sinks=0, **tiles),
        LearnedGate(init_gate(4, 2, 16), capacity=3, **tiles),
        Random(sparsity_ratio=0.5, **tiles),
        Oracle(tau=0.6, **tiles),
    ):
        options = {"causal": True, "q_offset": 80}
        made = selector(q, k, **options)
        out = sparse_attention(q, k, v, selector, **options)
        allowed = allowed_by(made, options, 37, 117)
        assert not allowed.all()
        np.testing.assert_allclose(out, truth(q, k, v, allowed), rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["threshold", "learned", "random"])
def test_gradients_flow_through_listed_tiles_alone(qkv, name):
    selector = SELECTORS[name]
    tiles = jit(lambda q, k: selector(q, k, causal=True))(*qkv[:2])

    def loss(attend):
        return lambda *qkv: jnp.sum(jnp.sin(attend(*qkv)))

    got = jit(
        jax.grad(
            loss(lambda *x: sparse_attention(*x, selector, causal=True)), (0, 1, 2)
        )
    )(*qkv)
    # By autodiff of the definition, with the lists as a mask.
    allowed = jnp.asarray(allowed_by(tiles, {"causal": True}))

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") / 4
        p = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnd->btnd", p, v, precision="highest")

    want = jit(jax.grad(loss(plain), (0, 1, 2)))(*qkv)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
        assert np.abs(other).max() > 0.01


def test_the_selection_itself_has_no_gradient(qkv):
    """Also of a gate's parameters: these have a loss of their own."""
    gate = init_gate(4, 2, 16)

    def loss(gate):
        selector = LearnedGate(gate, **BUDGET)
        return jnp.sum(sparse_attention(*qkv, selector, causal=True) ** 2)

    slopes = jit(jax.grad(loss))(gate)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", ["random", "threshold", "learned"])
def test_vmap_and_scan(rng, name):
    selector = SELECTORS[name]
    many = [jnp.stack(x) for x in zip(*(draw(rng) for _ in range(3)), strict=True)]

    def one(q, k, v):
        return sparse_attention(q, k, v, selector, causal=True)

    want = [jit(one)(*(x[i] for x in many)) for i in range(3)]
    np.testing.assert_allclose(jit(jax.vmap(one))(*many), want, rtol=0, atol=1e-6)
    scanned = jit(lambda xs: jax.lax.scan(lambda c, x: (c, one(*x)), 0, xs)[1])(many)
    np.testing.assert_allclose(scanned, want, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("name", ["random", "threshold", "learned"])
def test_shard_map_over_the_batch(rng, name):
    selector = SELECTORS[name]
    qkv = draw(rng, batch=4)
    want = sparse_attention(*qkv, selector, causal=True)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("b",))

    def one(*qkv):
        return sparse_attention(*qkv, selector, causal=True)

    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("b"), out_specs=P("b"))
    np.testing.assert_allclose(jit(mapped)(*qkv), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [{"causal": True}, MASKS["documents"]], ids=len)
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0)], ids=["members", "queries"])
def test_nothing_to_attend(name, shape, mask):
    batch, q_len = shape
    q, k = (jnp.ones((batch, t, n, 16)) for t, n in ((q_len, 4), (64, 2)))
    if "segment_ids" in mask:
        mask = {"segment_ids": tuple(np.zeros(x.shape[:2], np.int32) for x in (q, k))}
    out, report = sparse_attention(q, k, k, SELECTORS[name], return_report=True, **mask)
    assert out.shape == q.shape
    assert report.listed.shape == (batch, 4, q_len // 16)
    assert int(report.rows_short) == float(report.share) == 0


@pytest.mark.parametrize(
    "name", ["random", "strided", "streaming", "threshold", "learned"]
)
def test_modes_of_jax(qkv, name):
    """Without jit, in 64-bit mode, under strict promotion and a transfer guard."""
    selector = SELECTORS[name]
    lens = jnp.int32([128, 70])

    def run():
        return sparse_attention(*qkv, selector, causal=True, kv_lens=lens)

    want = run()
    modes = (
        jax.disable_jit(),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
    )
    for mode in modes:
        with mode:
            got = run()
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_half_precision(rng):
    q, k, v = draw(rng, dtype=jnp.bfloat16, size=2)
    selector = AntidiagonalThreshold(tau=0.7, stride=8, **TILES)
    tiles = selector(q, k, causal=True)
    out = sparse_attention(q, k, v, selector, causal=True)
    assert out.dtype == jnp.bfloat16
    want = truth(q, k, v, allowed_by(tiles, {"causal": True}))
    np.testing.assert_allclose(np.float32(out), want, rtol=0, atol=0.03)


def test_what_is_not_listed_is_never_read(qkv):
    q, k, v = qkv
    selector = SELECTORS["random"]
    shared = dataclasses.replace(selector, per_head=False)
    tiles = shared(q, k)
    want = sparse_attention(q, k, v, tiles)
    # A tile of keys that row 3 of tiles does not visit is NaN: row 3 is as before.
    (away, *_) = np.flatnonzero(~listed(tiles, 8)[0, 0, 3])
    hurt = np.array(v)
    hurt[:, 16 * away : 16 * away + 16] = np.nan
    got = sparse_attention(q, k, jnp.asarray(hurt), tiles)
    np.testing.assert_array_equal(got[:, 48:64], want[:, 48:64])
    assert np.isnan(got).any()


@pytest.mark.parametrize("hurt", ["k", "v"])
def test_what_no_head_lists_reaches_neither_output_nor_gradients(qkv, hurt):
    """NaN in a tile of keys or values: of heads in two groups, each with its list."""
    indices = np.array([[2, 5], [5, 0], [1, 3], [7, 2]], np.int32)  # heads 0, 1 | 2, 3
    indices = jnp.broadcast_to(indices[:, None], (1, 4, 8, 2))
    tiles = AttentionTiles(indices, jnp.full((1, 4, 8), 2, jnp.int32), 16, 16)

    def run(q, k, v):
        out = sparse_attention(q, k, v, tiles)
        return jnp.sum(jnp.sin(out)), out

    program = jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))

    def with_nan(group, *cols):
        arrays = dict(zip("qkv", map(np.array, qkv), strict=True))
        for col in cols:
            arrays[hurt][:, 16 * col : 16 * col + 16, group] = np.nan
        (_, out), slopes = program(*map(jnp.asarray, arrays.values()))
        return out, slopes

    (_, want), wanted = program(*qkv)
    # A group's keys are hurt where neither of its heads looks; the other's may.
    for group, cols in ((0, (1, 3, 4, 6, 7)), (1, (0, 4, 5, 6))):
        out, slopes = with_nan(group, *cols)
        np.testing.assert_array_equal(out, want)
        for got, other in zip(slopes, wanted, strict=True):
            np.testing.assert_array_equal(got, other)
    # What one head of a group lists is not the other's.
    out, (of_q, *_) = with_nan(0, 0)
    for got, other in ((out, want), (of_q, wanted[0])):
        np.testing.assert_array_equal(got[:, :, [0, 2, 3]], other[:, :, [0, 2, 3]])
        assert np.isnan(got[:, :, 1]).all()


@pytest.mark.parametrize("name", ["random", "pooled"])
def test_forward_and_second_derivatives(rng, name):
    """Of what attention gives with the lists as a mask."""
    q, k, v = draw(rng, batch=1, q_len=32, kv_len=32, heads=2, kv_heads=1)
    selector = dataclasses.replace(SELECTORS[name], block_q=16, block_kv=16)
    tiles = selector(q, k, causal=True)
    allowed = allowed_by(tiles, {"causal": True}, 32, 32, 1)
    bias = jnp.where(jnp.asarray(allowed), 0.0, -jnp.inf).astype(jnp.float32)
    move = draw(rng, batch=1, q_len=32, kv_len=32, heads=2, kv_heads=1)

    def sparse(q, k, v):
        return jnp.sum(jnp.sin(sparse_attention(q, k, v, selector, causal=True)))

    def dense(q, k, v):
        scores = jnp.einsum("btnd,bsd->bnts", q, k[:, :, 0], precision="highest")
        p = jax.nn.softmax(scores / 4 + bias)
        return jnp.sum(jnp.sin(jnp.einsum("bnts,bsd->btnd", p, v[:, :, 0])))

    def derivatives(f):
        first = jax.jvp(f, (q, k, v), move)[1]
        slopes = jax.grad(f, (0, 1, 2))
        return first, jax.jvp(slopes, (q, k, v), move)[1]  # the Hessian times a vector

    got, want = (jit(lambda f=f: derivatives(f))() for f in (sparse, dense))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_what_lies_beyond_the_lengths_may_be_anything(qkv):
    q, k, v = (np.array(x) for x in qkv)
    lens = {"q_lens": np.int32([100, 128]), "kv_lens": np.int32([90, 33])}
    hurt = [x.copy() for x in (q, k, v)]
    for b in range(2):
        hurt[0][b, lens["q_lens"][b] :] = np.nan
        for x in hurt[1:]:
            x[b, lens["kv_lens"][b] :] = np.nan
    for name in ("threshold", "learned", "oracle"):
        want = sparse_attention(*map(jnp.asarray, (q, k, v)), SELECTORS[name], **lens)
        got = sparse_attention(*map(jnp.asarray, hurt), SELECTORS[name], **lens)
        np.testing.assert_array_equal(got, want)


def test_lse_and_report(qkv):
    selector = SELECTORS["threshold"]
    tiles, report = selector.select(*qkv[:2], causal=True)
    want, want_lse = flash_attention(*qkv, causal=True, tiles=tiles, return_lse=True)
    out, lse, said = sparse_attention(
        *qkv, selector, causal=True, return_lse=True, return_report=True
    )
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    np.testing.assert_array_equal(said.listed, report.listed)
    assert int(said.rows_short) == 0 and float(np.min(said.mass)) >= 0.7 - 1e-5
    out, said = sparse_attention(*qkv, tiles, causal=True, return_report=True)
    assert said is None
    np.testing.assert_array_equal(out, want)


def test_rows_short_of_tau_are_told_of(qkv):
    """By the report, or by one warning for each place in the caller's text."""
    q, k, v = qkv
    short = AntidiagonalThreshold(tau=0.99, capacity=2, stride=8, **TILES)
    layer = create_sparse_attention(64, 4, selector=short)
    x = jnp.reshape(q, (2, 128, 64))
    calls = {
        "sparse_attention": lambda: sparse_attention(q, k, v, short),
        "AntidiagonalThreshold": lambda: short(q, k),
        "DynamicSparseAttention": lambda: layer(x),
    }
    for where, call in calls.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            call()
            call()
        assert [str(w.message).startswith(f"{where}: ") for w in told] == [True]
        assert told[0].filename == __file__ and told[0].category is UserWarning
        assert "too small for tau" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_attention(q, k, v, short, return_report=True)
        layer.with_report(x)
        short.select(q, k)
        AntidiagonalThreshold(tau=0.99, stride=8, **TILES)(q, k)


BOUNDS = {
    "a capacity": ({"capacity": 7}, True),
    "a ratio": ({"sparsity_ratio": 0.3}, True),
    "no bound": ({}, False),
    "a capacity for all tiles": ({"capacity": 8}, False),
    "a ratio that leaves none out": ({"sparsity_ratio": 0.05}, False),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", BOUNDS)
def test_under_jit_it_is_said_that_nobody_will_know(qkv, name):
    """Once a program is traced, where a row may be short and no report comes back."""
    bound, may_be_short = BOUNDS[name]
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv)
    selector = AntidiagonalThreshold(tau=0.9, stride=8, **bound, **TILES)
    layer = create_sparse_attention(64, 4, selector=selector)
    x = jax.ShapeDtypeStruct((2, 128, 64), jnp.float32)
    calls = {
        "sparse_attention": lambda s=selector: jax.eval_shape(
            lambda *qkv: sparse_attention(*qkv, s), q, k, v
        ),
        "AntidiagonalThreshold": lambda: jax.eval_shape(
            lambda q, k: selector(q, k), q, k
        ),
        "DynamicSparseAttention": lambda: jax.eval_shape(lambda x: layer(x), x),
        "Union": lambda: jax.eval_shape(
            lambda q, k: (selector | SELECTORS["random"])(q, k), q, k
        ),
    }
    for where, call in calls.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            call()
            call()
        found = [str(w.message).startswith(f"{where}: ") for w in told]
        assert found == [True] * may_be_short
        for said in told:
            assert said.filename == __file__ and said.category is UserWarning
            for words in ("may be too small for tau", "report.rows_short"):
                assert words in str(said.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda q, k: selector.select(q, k).report, q, k)
        jax.eval_shape(lambda x: layer.with_report(x), x)
        with jax_kvblock.debug_checks():  # the program looks
            jax.eval_shape(lambda q, k: selector(q, k), q, k)


def test_options_of_flash_attention(qkv):
    selector = SELECTORS["streaming"]
    tiles = selector(*qkv[:2], causal=True)
    options = {"causal": True, "softcap": 2.0, "scale": 0.3, "sinks": jnp.ones(4)}
    got = sparse_attention(*qkv, selector, **options)
    want = flash_attention(*qkv, tiles=tiles, **options)
    np.testing.assert_array_equal(got, want)
    # The scale reaches the scores of a selector, too.
    threshold = AntidiagonalThreshold(stride=8, **TILES)
    wide = [threshold(*qkv[:2], scale=scale) for scale in (9, 0.01)]
    assert wide[0].counts.sum() < 0.7 * wide[1].counts.sum()
    got = sparse_attention(*qkv, threshold, scale=9.0)
    want = flash_attention(*qkv, scale=9.0, tiles=wide[0])
    np.testing.assert_array_equal(got, want)


def test_a_selector_of_ones_own(qkv):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Third(ScoredSelector):
        def mass(self, q, k, grid, scale):
            shape = (q.shape[0], q.shape[2], grid.rows, grid.cols)
            return jnp.zeros(shape).at[..., 3].set(1.0)

    tiles = Third(capacity=2, sinks=0, **TILES)(*qkv[:2])
    assert listed(tiles, 8)[..., 3].all() and listed(tiles, 8)[..., 0].all()
