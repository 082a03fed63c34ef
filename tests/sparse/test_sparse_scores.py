"""Antidiagonal sums, the model's own map, and gates: by definition, in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_model import AS_USERS_DO, jit
from messages import check
from sparse_cases import draw, in_tiles, pairs, probabilities

from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    LearnedGate,
    Oracle,
    PooledThreshold,
    Random,
    evaluate_selector,
    gate_loss,
    init_gate,
    pieces,
    plain,
    tile_mass,
    train_gate,
)
from jax_kvblock.sparse.antidiagonal import antidiagonal_mass
from jax_kvblock.sparse.arguments import grid_of
from jax_kvblock.sparse.gate import DISTANCES, distance_class, gate_logits, pooled
from jax_kvblock.sparse.grid import Grid

pytestmark = pytest.mark.usefixtures("exact_products")

TILES = {"block_q": 16, "block_kv": 32}
Q_LEN, KV_LEN = 90, 150  # 6 x 5 tiles, the last ones cut
DOCUMENTS = (
    np.repeat([[0, 1]], [50, 40], axis=1).repeat(2, 0).astype(np.int32),
    np.repeat([[0, 1]], [70, 80], axis=1).repeat(2, 0).astype(np.int32),
)
MASKS = {
    "full": {},
    "causal": {"causal": True, "q_offset": KV_LEN - Q_LEN},
    "traced": {"causal": True, "q_offset": np.int32([60, 13])},
    "lengths": {
        "causal": True,
        "q_offset": 20,
        "q_lens": np.int32([77, 0]),
        "kv_lens": np.int32([60, 150]),
    },
    "segments": {"segment_ids": DOCUMENTS},
}


@pytest.fixture
def qkv(rng):
    return draw(rng, q_len=Q_LEN, kv_len=KV_LEN, size=2)


def grid(mask):
    return grid_of("test", (2, Q_LEN, KV_LEN), (16, 32), **mask)


# ---- antidiagonals -------------------------------------------------------------------


def antidiagonal(q, k, mask, stride):
    """Stride by stride, pair by pair, float64 `[B, N, R, C]`."""
    q_lens = np.broadcast_to(mask.get("q_lens", Q_LEN), 2)
    kv_lens = np.broadcast_to(mask.get("kv_lens", KV_LEN), 2)
    q, k = (np.array(x, np.float64) for x in (q, k))
    for b in range(2):
        q[b, q_lens[b] :], k[b, kv_lens[b] :] = 0, 0
    q, k = (
        np.pad(x, ((0, 0), (0, tiles * side - x.shape[1]), (0, 0), (0, 0)))
        for x, tiles, side in ((q, 6, 16), (k, 5, 32))
    )
    seen = pairs(2, Q_LEN, KV_LEN, **mask)
    seen = np.pad(seen, ((0, 0), (0, q.shape[1] - Q_LEN), (0, k.shape[1] - KV_LEN)))
    per_q, per_kv = q.shape[1] // stride, k.shape[1] // stride
    scores = np.full((2, 4, per_q, per_kv), -np.inf)
    for b, n, i, j in np.ndindex(scores.shape):
        at_q, at_kv = i * stride, j * stride
        if seen[b, at_q : at_q + stride, at_kv : at_kv + stride].any():
            rows = q[b, at_q : at_q + stride, n][::-1]
            keys = k[b, at_kv : at_kv + stride, n // 2]
            scores[b, n, i, j] = (rows * keys).sum() / np.sqrt(16) / stride
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    tiles = weights.reshape(2, 4, 6, 16 // stride, 5, 32 // stride)
    return tiles.sum(-1).mean(3)


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("name", MASKS)
def test_sums_along_antidiagonals(qkv, name, stride):
    q, k, _ = qkv
    mask = MASKS[name]
    got = jit(lambda q, k: antidiagonal_mass(q, k, grid(mask), 1 / 4, stride))(q, k)
    want = antidiagonal(q, k, mask, stride)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert want.max() > 1.5 * want[want > 0].mean()


@pytest.mark.parametrize("piece", [8, 16])
@pytest.mark.parametrize("name", MASKS)
def test_products_of_means(qkv, name, piece):
    q, k, _ = qkv
    mask = MASKS[name]
    made = PooledThreshold(piece=piece, **TILES)
    got = jit(lambda q, k: made.mass(q, k, grid(mask), 1 / 4))(q, k)
    seen = pairs(2, Q_LEN, KV_LEN, **mask)
    seen = in_tiles(np.asarray(seen, np.float64), piece, piece).any((-2, -1))
    means = []
    for x, name_ in ((q, "q_lens"), (k, "kv_lens")):
        x = np.array(x, np.float64)
        pieces_ = np.zeros((2, -(-x.shape[1] // piece), *x.shape[2:]))
        ends = np.broadcast_to(mask.get(name_, x.shape[1]), 2)
        for b, i in np.ndindex(pieces_.shape[:2]):
            rows = x[b, i * piece : min((i + 1) * piece, ends[b])]
            pieces_[b, i] = rows.mean(0) if len(rows) else 0
        means.append(pieces_)
    scores = np.einsum("btnd,bsnd->bnts", means[0], np.repeat(means[1], 2, 2)) / 4
    scores = np.where(seen[:, None], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    p = np.exp(scores - top)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    missing = (96 // piece - p.shape[2], 160 // piece - p.shape[3])
    p = np.pad(p, ((0, 0), (0, 0), *((0, n) for n in missing)))
    want = p.reshape(2, 4, 6, 16 // piece, 5, -1).sum(-1).mean(3)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert want.max() > 1.2 * want[want > 0].mean()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_tiles_in_parts_are_the_same(rng, monkeypatch, causal):
    """Groups with fewer keys, and a row of tiles or two at a time."""
    q, k, _ = draw(rng, batch=1, q_len=320, kv_len=320)
    selector = AntidiagonalThreshold(stride=8, block_q=16, block_kv=16)
    wide = Grid(320, 320, 16, 16, causal)
    whole = jit(lambda: selector.mass(q, k, wide, 0.25))()
    assert len(pieces._groups(wide)) == (2 if causal else 1)
    monkeypatch.setattr(pieces, "LEAST_ROWS", 3)
    monkeypatch.setattr(plain, "STEP_BYTES", 4 * 2 * 40 * 4 * 2)  # two rows of tiles
    assert len(pieces._groups(wide)) == (6 if causal else 1)
    parts = jit(lambda: selector.mass(q, k, wide, 0.25))()
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


def test_memory_of_the_scores_is_bounded():
    """Of 8 heads over 8192 positions: not the 268 MB of all scores by strides."""
    selector = AntidiagonalThreshold(stride=8)
    q, k = (jax.ShapeDtypeStruct((1, 8192, n, 64), jnp.float32) for n in (8, 2))
    compiled = jax.jit(selector.select).lower(q, k).compile(AS_USERS_DO)
    inputs = 8192 * 10 * 64 * 4
    most = inputs + 3 * plain.STEP_BYTES
    all_scores = 8 * 1024 * 1024 * 4
    spent = compiled.memory_analysis().temp_size_in_bytes
    assert spent < most
    assert most < 5 * all_scores


# ---- the model's own map -------------------------------------------------------------


@pytest.mark.parametrize("pool", ["sum", "max"])
@pytest.mark.parametrize("name", MASKS)
def test_the_map_of_tiles_is_attention_s(qkv, name, pool):
    q, k, _ = qkv
    mask = MASKS[name]
    got = jit(lambda q, k: tile_mass(q, k, pool=pool, **TILES, **mask))(q, k)
    p = probabilities(q, k, pairs(2, Q_LEN, KV_LEN, **mask)[:, None])
    tiles = in_tiles(p, 16, 32)
    want = tiles.sum((-2, -1)) if pool == "sum" else tiles.max((-2, -1))
    want = want / np.maximum(want.sum(-1, keepdims=True), 1e-300)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_the_map_takes_no_memory_of_t_by_s():
    q, k = (jax.ShapeDtypeStruct((1, 4096, n, 32), jnp.float32) for n in (4, 2))
    run = functools.partial(tile_mass, causal=True)
    compiled = jax.jit(run).lower(q, k).compile(AS_USERS_DO)
    spent = compiled.memory_analysis().temp_size_in_bytes
    assert spent < 4096 * 4096 * 4 / 2  # half of one head's scores


# ---- gates ---------------------------------------------------------------------------


def test_pooled_vectors(qkv):
    _, k, _ = qkv
    end = np.int32([60, 150]).reshape(2, 1, 1)
    hurt = np.array(k)
    hurt[0, 60:] = np.nan
    got = jit(lambda k: pooled(k, end, 32, 5))(hurt)
    for b, c in np.ndindex(2, 5):
        rows = np.asarray(k)[b, 32 * c : min(32 * c + 32, end[b, 0, 0])]
        want = np.zeros((3, 2, 16))
        if len(rows):
            want = np.stack([rows.mean(0), rows.max(0), rows.min(0)])
            want = want / np.sqrt(np.square(want).mean(-1, keepdims=True))
        parts = np.split(np.asarray(got[b, c]), 3, axis=-1)
        np.testing.assert_allclose(parts, want, atol=1e-5)


def test_classes_of_distance():
    made = np.asarray(distance_class(Grid(16 * 40, 16 * 40, 16, 16, True)))[0, 0]
    np.testing.assert_array_equal(
        made[39, ::-1][:17], [0, 1, 2, 3, 4, 4, 5, 5, *[6] * 4, *[7] * 4, 8]
    )
    assert (made == made.T).all() and made.max() < DISTANCES
    far = np.asarray(distance_class(Grid(1 << 24, 1 << 10, 1 << 10, 16, True)))
    assert far.max() < DISTANCES


def test_a_gate_is_its_definition(qkv):
    q, k, _ = qkv
    mask = MASKS["lengths"]
    gate, g = random_gate(np.random.default_rng(7)), grid(mask)
    got = np.asarray(
        jit(lambda gate, q, k: gate_logits(gate, q, k, g, 0.25))(gate, q, k)
    )
    queries = np.asarray(pooled(q, np.int32([77, 0]).reshape(2, 1, 1), 16, 6))
    pooled_k = np.asarray(pooled(k, np.int32([60, 150]).reshape(2, 1, 1), 32, 5))
    near = np.asarray(distance_class(g))
    visible = np.asarray(g.visible())
    for b, n, i, j in np.ndindex(got.shape):
        want = -np.inf
        if visible[b, 0, i, j]:
            one = np.append(queries[b, i, n], 1) @ np.asarray(gate.q)[n]
            other = np.append(pooled_k[b, j, n // 2], 1) @ np.asarray(gate.k)[n // 2]
            want = one @ other / 4 + gate.distance[n, near[b, 0, i, j]]
            want += gate.first[n] if j == 0 else 0
        np.testing.assert_allclose(got[b, n, i, j], want, rtol=1e-4, atol=1e-3)


def random_gate(rng):
    start = init_gate(4, 2, 16, gate_dim=8)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), start
    )


def test_gates_are_compared_by_their_numbers(rng):
    one = init_gate(4, 2, 16)
    alike = [LearnedGate(gate, capacity=3) for gate in (one, init_gate(4, 2, 16))]
    assert alike[0] == alike[1] and alike[0] == LearnedGate(one, capacity=3)
    assert alike[0] != LearnedGate(one, capacity=4)
    assert alike[0] != LearnedGate(random_gate(rng), capacity=3)
    assert one != init_gate(4, 2, 8) and one != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(alike[0])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("piece", [4, 16])
def test_a_gate_of_pieces_is_one_of_small_tiles_summed(rng, qkv, name, piece):
    q, k, _ = qkv
    gate, g = random_gate(rng), grid(MASKS[name])
    made = LearnedGate(gate, piece=piece, capacity=5, **TILES)
    got = jit(lambda gate, q, k: made.mass(q, k, g, 0.25))(gate, q, k)
    fine = grid_of("test", (2, Q_LEN, KV_LEN), (piece, piece), **MASKS[name])
    logits = np.asarray(gate_logits(gate, q, k, fine, 0.25), np.float64)
    p = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), -1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    rows, cols = 6 * 16 // piece, 5 * 32 // piece
    missing = ((0, rows - p.shape[2]), (0, cols - p.shape[3]))
    p = np.pad(p, ((0, 0), (0, 0), *missing))
    want = p.reshape(2, 4, 6, 16 // piece, 5, -1).sum(-1).mean(3)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert want.max() > 1.5 * want[want > 0].mean()


@pytest.mark.parametrize("name", MASKS)
def test_the_loss_of_a_gate(qkv, name):
    """KL(map ‖ gate), the mean over rows of tiles that see anything."""
    q, k, _ = qkv
    mask = MASKS[name]
    gate = init_gate(4, 2, 16)
    loss, slopes = jit(
        jax.value_and_grad(functools.partial(gate_loss, **TILES, **mask))
    )(gate, q, k)
    wanted = np.asarray(tile_mass(q, k, **TILES, **mask), np.float64)
    logits = np.asarray(gate_logits(gate, q, k, grid(mask), 0.25), np.float64)
    rows = np.isfinite(logits).any(-1)
    predicted = np.exp(logits[rows] - logits[rows].max(-1, keepdims=True))
    predicted /= predicted.sum(-1, keepdims=True)
    p = wanted[rows]
    p, predicted = np.where(p > 0, p, 1e-300), np.where(p > 0, predicted, 1e-300)
    apart = (p * np.log(p / predicted)).sum(-1)
    np.testing.assert_allclose(loss, apart.mean(), rtol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    assert max(np.abs(x).max() for x in jax.tree.leaves(slopes)) > 0
    again = gate_loss(
        gate, q, k, target=tile_mass(q, k, **TILES, **mask), **TILES, **mask
    )
    np.testing.assert_allclose(again, loss, rtol=1e-5)


def test_the_model_is_frozen(qkv):
    q, k, _ = qkv
    slopes = jit(jax.grad(lambda q, k: gate_loss(init_gate(4, 2, 16), q, k), (0, 1)))(
        q, k
    )
    assert all((np.asarray(x) == 0).all() for x in slopes)


# ---- learned above threshold above random --------------------------------------------

LENGTH, DIM, BLOCK = 512, 32, 16


def structured(seed):
    """Each tile of queries looks for one tile of keys, and single keys answer.

    A query's first half says what it looks for, and a marked key in each tile says what
    the tile has; the rest of the keys, and all second halves, are noise. Sums over a
    stride drown one key among sixteen; a gate can learn what a mark looks like.
    """
    rng = np.random.default_rng(seed)
    tiles, half = LENGTH // BLOCK, DIM // 2
    topics = rng.standard_normal((2, tiles, half)) / np.sqrt(half)
    q = rng.standard_normal((2, LENGTH, 2, DIM))
    k = rng.standard_normal((2, LENGTH, 1, DIM))
    wanted = np.stack([rng.permutation(tiles) for _ in range(2)])
    for b in range(2):
        q[b, :, :, :half] = 9 * np.repeat(topics[b, wanted[b]], BLOCK, 0)[:, None]
        k[b, :, 0, :half] *= 0.3
        k[b, BLOCK // 2 :: BLOCK, 0, :half] = 5 * topics[b]
    v = rng.standard_normal((2, LENGTH, 1, DIM))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


@pytest.fixture(scope="module")
def learned():
    """A gate of these queries and keys, trained on others of their kind."""
    tiles = {"block_q": BLOCK, "block_kv": BLOCK}
    batches = (structured(seed)[:2] for seed in range(100, 160))
    gate, losses = train_gate(init_gate(2, 1, DIM), batches, optax.adam(1e-2), **tiles)
    return gate, losses


def test_training_lowers_the_loss(learned):
    _, losses = learned
    assert losses.shape == (60,) and losses.dtype == np.float32
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()


def test_learned_above_threshold_above_random_at_equal_tiles(learned):
    q, k, v = structured(0)
    budget = {"sparsity_ratio": 0.9, "block_q": BLOCK, "block_kv": BLOCK}
    scored = {"tau": None, "sinks": 0, **budget}
    found = {
        "random": Random(**budget),
        "untrained": LearnedGate(init_gate(2, 1, DIM), **scored),
        "threshold": AntidiagonalThreshold(stride=16, **scored),
        "learned": LearnedGate(learned[0], **scored),
        "oracle": Oracle(**scored),
    }
    recall = {}
    for name, selector in found.items():
        quality = evaluate_selector(q, k, v, selector)
        assert quality.tiles_listed == 2 * 2 * 32 * 3
        recall[name] = quality.recall
    assert recall["random"] < 0.2
    assert recall["random"] + 0.1 < recall["threshold"]
    assert recall["threshold"] + 0.05 < recall["learned"] <= recall["oracle"] + 1e-4
    assert recall["untrained"] < recall["learned"]


def single_keys(seed):
    """All queries of a tile look for one key, which is like the others of its tile."""
    rng = np.random.default_rng(seed)
    tiles = LENGTH // BLOCK
    k = rng.standard_normal((2, LENGTH, 1, DIM))
    k *= np.sqrt(DIM) / np.linalg.norm(k, axis=-1, keepdims=True)
    first = BLOCK * np.stack([rng.permutation(tiles) for _ in range(2)])
    at = first + rng.integers(0, BLOCK, (2, tiles))
    wanted = np.take_along_axis(k[:, :, 0], at[..., None], 1)
    q = 1.5 * np.repeat(wanted, BLOCK, 1)[:, :, None]
    q = q + 0.3 * rng.standard_normal((2, LENGTH, 2, DIM))
    v = rng.standard_normal((2, LENGTH, 1, DIM))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


def test_single_keys_take_a_gate_of_pieces():
    """In a mean over 16 keys one drowns; untrained gates are products of means."""
    q, k, v = single_keys(0)
    sizes = {"block_q": BLOCK, "block_kv": BLOCK}
    scored = {"sparsity_ratio": 0.9, "sinks": 0, **sizes}
    gate = init_gate(2, 1, DIM)
    recall = {
        piece: evaluate_selector(
            q, k, v, LearnedGate(gate, piece=piece, **scored)
        ).recall
        for piece in (None, 8, 2)
    }
    oracle = evaluate_selector(q, k, v, Oracle(**scored)).recall
    assert recall[None] + 0.1 < recall[8] < recall[2] - 0.1
    assert oracle - 0.03 < recall[2] <= oracle + 1e-4


def test_a_map_that_is_given_is_the_one_that_would_be_made(qkv):
    q, k, _ = qkv
    target = tile_mass(q, k, **TILES)
    made, losses = train_gate(init_gate(4, 2, 16), [(q, k)] * 2, Plain(), **TILES)
    given = [(q, k, target), (q, k, target)]
    again, known = train_gate(init_gate(4, 2, 16), given, Plain(), **TILES)
    np.testing.assert_allclose(known, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    other = [(q, k, jnp.roll(target, 1, -1))] * 2
    assert train_gate(init_gate(4, 2, 16), other, Plain(), **TILES)[1][0] != losses[0]


class Plain:
    """An optimizer that is not optax's: a step of gradient descent."""

    def init(self, params):
        return ()

    def update(self, slopes, state, params=None):
        return jax.tree.map(lambda g: -0.05 * g, slopes), state


def test_any_optimizer_and_none(qkv):
    q, k, _ = qkv
    gate = init_gate(4, 2, 16)
    made, losses = train_gate(gate, [(q, k)] * 4, Plain(), **TILES)
    assert losses[-1] < losses[0]
    made, losses = train_gate(gate, [(q, k)] * 3, **TILES)
    assert losses[-1] < losses[0]
    assert jax.tree.structure(made) == jax.tree.structure(gate)


BAD = {
    "an option of attention": (
        lambda q, k: tile_mass(q, k, softcap=3.0),
        "tile_mass",
        TypeError,
        "options must be causal, window|got softcap",
    ),
    "a piece in small tiles": (
        lambda q, k: PooledThreshold(tau=0.9, piece=32, block_q=16, block_kv=32),
        "PooledThreshold",
        ValueError,
        "piece must divide block_q and block_kv, 16 and 32, got 32; 16 would do",
    ),
    "pool": (
        lambda q, k: tile_mass(q, k, pool="mean"),
        "tile_mass",
        ValueError,
        "pool|'sum', 'max'|'mean'",
    ),
    "target": (
        lambda q, k: gate_loss(
            init_gate(4, 2, 16), q, k, target=np.zeros((2, 4, 3, 3))
        ),
        "gate_loss",
        ValueError,
        "target must be float32[2, 4, 1, 2]|[2, 4, 3, 3]",
    ),
    "gate": (
        lambda q, k: gate_loss(init_gate(4, 2, 8), q, k),
        "gate_loss",
        ValueError,
        "4 heads on 2 of 16|of 8",
    ),
    "optimizer": (
        lambda q, k: train_gate(init_gate(4, 2, 16), [(q, k)], 3),
        "train_gate",
        TypeError,
        "optimizer must have init and update, got 3|optax.adam",
    ),
    "no pairs": (
        lambda q, k: train_gate(init_gate(4, 2, 16), [q]),
        "train_gate",
        TypeError,
        "batches[0] must be (q, k) or|float32[2, 90, 4, 16]",
    ),
    "a pair alone": (
        lambda q, k: train_gate(init_gate(4, 2, 16), (q, k)),
        "train_gate",
        TypeError,
        "batches[0] must be (q, k) or|one batch alone is [(q, k)]",
    ),
    "four": (
        lambda q, k: train_gate(init_gate(4, 2, 16), [(q, k, k, k)]),
        "train_gate",
        TypeError,
        "batches[0]|got 4 of them",
    ),
    "an array": (
        lambda q, k: train_gate(init_gate(4, 2, 16), q),
        "train_gate",
        TypeError,
        "batches must be an iterable of (q, k)",
    ),
    "heads": (
        lambda q, k: init_gate(4, 3, 16),
        "init_gate",
        ValueError,
        "num_kv_heads must divide num_heads, 4, got 3",
    ),
    "piece": (
        lambda q, k: LearnedGate(init_gate(4, 2, 16), piece=12, capacity=3),
        "LearnedGate",
        ValueError,
        "piece must divide block_q and block_kv, 128 and 128, got 12",
    ),
    "sides": (
        lambda q, k: tile_mass(q, k, block_q=0),
        "tile_mass",
        ValueError,
        "block_q|0",
    ),
    "sizes": (lambda q, k: init_gate(0, 1, 16), "init_gate", ValueError, "num_heads|0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(qkv, name):
    call, where, error, words = BAD[name]
    check(where, error, words, lambda: call(*qkv[:2]))
