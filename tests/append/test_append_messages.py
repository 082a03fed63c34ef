"""Bad calls of `rope_append` and `append_kv` are refused while tracing, by messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvblock as kv

Q, K = np.zeros((5, 4, 16), np.float32), np.zeros((5, 2, 16), np.float32)
SPEC = kv.BlockSpec(3, 2, 8, 2, 16, "float32")


def stands_for(spec: kv.BlockSpec) -> kv.KVPool:
    """A pool of 9 blocks that is only traced."""
    return kv.KVPool(jax.ShapeDtypeStruct((9, *spec.block_shape), spec.dtype), spec)


POOL = stands_for(SPEC)
FP8 = stands_for(SPEC.replace(dtype="float8_e4m3fn"))
SCALES = kv.KVScales.zeros(SPEC, 9)
GIVEN: dict[str, Any] = {
    "q": Q,
    "k": K,
    "v": K,
    "pool": POOL,
    "layer": 0,
    "slots": range(5),
    "positions": range(5),
    "theta": 1e4,
}
COS_SIN, NO_THETA = np.zeros((20, 16), np.float32), {"theta": None}
ROPE = {
    "no pool": ({"pool": Q}, TypeError, "pool must be a KVPool, got ndarray"),
    "a combined pool": (
        {"pool": stands_for(SPEC.replace(num_outer=1))},
        ValueError,
        "num_outer=2, got num_outer=1; append_kv takes what is combined",
    ),
    "no layer": ({"layer": None}, TypeError, "layer must be an integer or an int32"),
    "layer 3": ({"layer": 3}, IndexError, "layer must be 0 to 2, got 3"),
    "k": ({"k": K[:, :1]}, ValueError, r"k must have shape \[5, 2, 16\], got float32"),
    "v": ({"v": None}, TypeError, "v must be an array, got NoneType"),
    "k of integers": ({"k": K.astype(int)}, TypeError, "k must be one of bfloat16, fl"),
    "k and v": ({"v": K.astype(np.float16)}, TypeError, "k and v must have one dtype"),
    "joined, and v": (
        {"k": None},
        TypeError,
        "without k, q holds queries.*v must be No",
    ),
    "joined, of 3 heads": (
        {"k": None, "v": None, "q": Q[:, :3]},
        ValueError,
        r"without k, q must be \[5, N \+ 4, 16\], N a multiple of the pool's 2 KV",
    ),
    "joined, of no queries": (
        {"k": None, "v": None},
        ValueError,
        r"q must be \[5, N \+ 4, 16\], N a multiple of .* got float32\[5, 4, 16\]",
    ),
    "joined, other tokens": (
        {"k": None, "v": None, "q": np.zeros((4, 8, 16), np.float32)},
        ValueError,
        r"q must be \[5, N \+ 4, 16\], queries, keys and values side by side, got",
    ),
    "joined, of integers": (
        {"k": None, "v": None, "q": np.zeros((5, 8, 16), int)},
        TypeError,
        "q must be one of bfloat16, float16, float32, got int",
    ),
    "joined, the pool's dtype": (
        {"k": None, "v": None, "q": np.zeros((5, 8, 16), np.float16)},
        TypeError,
        "q must have the pool's dtype float32, got float16",
    ),
    "q of rank 2": ({"q": Q[0]}, ValueError, r"q must be \[5, N, 16\] beside k, flo"),
    "heads": ({"q": Q[:, :3]}, ValueError, "a multiple of the pool's 2 KV heads, got"),
    "q's dtype": (
        {"q": Q.astype(np.float16)},
        TypeError,
        "q and k must have one dtype, got float16",
    ),
    "the pool's dtype": (
        {"pool": stands_for(SPEC.replace(dtype="bfloat16"))},
        TypeError,
        r"k must have the pool's dtype bfloat16, got float32.*\.astype\('bfloat16'\)",
    ),
    "no scale": (
        {"pool": FP8},
        TypeError,
        "the pool's dtype float8_e4m3fn.*or pass k_scale and v_scale",
    ),
    "one scale": (
        {"pool": FP8, "k_scale": 1.0},
        ValueError,
        "takes k_scale and v_scale, got k_scale alone",
    ),
    "scales of 32 bits": (
        {"k_scale": 1.0, "v_scale": 1.0},
        TypeError,
        "scales are for pools of float8_e4m3fn, .*leave k_scale and v_scale out",
    ),
    "both kinds of scales": (
        {"pool": FP8, "k_scale": 1.0, "scales": SCALES},
        ValueError,
        "scales holds scales that are computed, k_scale are given ones",
    ),
    "a scale of 0": (
        {"pool": FP8, "k_scale": 0, "v_scale": 1},
        ValueError,
        r"k_scale must be a number, .*positive and finite, got 0",
    ),
    "a scale for each token": (
        {"pool": FP8, "k_scale": np.ones((9, 8, 2), np.float32), "v_scale": 1},
        ValueError,
        r"float32\[2\], got float32\[9, 8, 2\]; for a scale of each token and head",
    ),
    "a scale of 16 bits": (
        {"pool": FP8, "k_scale": np.ones(2, np.float16), "v_scale": 1},
        TypeError,
        r"got float16\[2\]; cast it",
    ),
    "scales of no kind": (
        {"pool": FP8, "scales": np.ones(3)},
        TypeError,
        "scales must be KVScales, got ndarray; make them with KVScales.zeros",
    ),
    "scales of another pool": (
        {"pool": FP8, "scales": kv.KVScales.zeros(SPEC, 8)},
        ValueError,
        r"scales.k must be float32\[3, 9, 8, 2\], or float32\[9, 8, 2\] of one layer",
    ),
    "scales of k alone": (
        {"pool": FP8, "scales": kv.KVScales(SCALES.k)},
        ValueError,
        "scales must have k and v as the pool has, whose num_outer is 2, got v=None",
    ),
    "slots": (
        {"slots": np.zeros((5, 1), int)},
        ValueError,
        r"slots must be int32\[tok",
    ),
    "float slots": ({"slots": np.zeros(5)}, TypeError, r"slots must be int32\[tokens"),
    "positions": (
        {"positions": [1, 2]},
        ValueError,
        r"positions must be int32\[5\], o",
    ),
    "no positions": (
        {"positions": None},
        ValueError,
        "only cos_sin of 5 rows, one for each token, does without",
    ),
    "no positions, 20 rows": (
        {"positions": None, "theta": None, "cos_sin": COS_SIN},
        ValueError,
        "only cos_sin of 5 rows",
    ),
    "no angles": (NO_THETA, ValueError, "got none; rotary_dim=0 turns nothing"),
    "two of angles": (
        {"cos_sin": COS_SIN},
        ValueError,
        "one of theta, inv_freq and cos_sin .*, got theta and cos_sin",
    ),
    "no rows": (
        NO_THETA | {"cos_sin": COS_SIN[:0]},
        ValueError,
        "cos_sin must have rows",
    ),
    "a flat table": (
        NO_THETA | {"cos_sin": COS_SIN[0]},
        ValueError,
        r"cos_sin must be float32\[rows, rotary_dim\]",
    ),
    "a table of 16 bits": (
        NO_THETA | {"cos_sin": COS_SIN.astype(np.float16)},
        TypeError,
        r"cos_sin must be float32.*got float16\[20, 16\]; cast it",
    ),
    "frequencies": (
        NO_THETA | {"inv_freq": np.ones(9, np.float32)},
        ValueError,
        "rotary_dim of inv_freq must be even, above 0 and at most the head dim 16, "
        "got 18",
    ),
    "frequencies of another dim": (
        NO_THETA | {"inv_freq": np.ones(8, np.float32), "rotary_dim": 8},
        ValueError,
        "inv_freq is for 16 elements that turn, rotary_dim is 8",
    ),
    "theta": ({"theta": -1.0}, ValueError, "theta must be a positive number, got -1.0"),
    "a traced theta": (
        {"theta": jax.ShapeDtypeStruct((), jnp.float32)},
        ValueError,
        "theta must be a positive number, .*pass frequencies that are traced as inv_",
    ),
    "an odd rotary_dim": ({"rotary_dim": 7}, ValueError, "rotary_dim must be even"),
    "a wide rotary_dim": ({"rotary_dim": 18}, ValueError, "the head dim 16, got 18"),
    "a float rotary_dim": (
        {"rotary_dim": 8.0},
        TypeError,
        "rotary_dim must be an inte",
    ),
    "a norm": ({"q_norm": np.ones(8)}, ValueError, r"q_norm must be \[16\], a weight"),
    "a norm of integers": (
        {"k_norm": np.ones(16, int)},
        TypeError,
        "k_norm must be floats, got int64",
    ),
    "epsilon": ({"norm_eps": -1}, ValueError, "norm_eps must be at least 0, got -1"),
    "a word": ({"norm_eps": "1"}, TypeError, "norm_eps must be a number, got '1'"),
    "a flag": ({"interleaved": 1}, TypeError, "interleaved must be True or False"),
    "another flag": ({"zero_tail": None}, TypeError, "zero_tail must be True or False"),
    "implementation": (
        {"implementation": "kernel"},
        ValueError,
        "implementation must be one of None, 'cuda', 'xla', got 'kernel'",
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_append(name):
    changes, error, message = ROPE[name]
    with pytest.raises(error, match="^rope_append: .*" + message):
        jax.eval_shape(lambda: kv.rope_append(**GIVEN | changes))


KEPT = {
    "a scale too many": (
        {"pool": stands_for(FP8.spec.replace(num_outer=1)), "v": None}
        | {"k_scale": 1.0, "v_scale": 1.0},
        ValueError,
        "v_scale must be None for a pool with num_outer 1",
    ),
    "v of a combined pool": (
        {"pool": stands_for(FP8.spec.replace(num_outer=1)), "k_scale": 1.0},
        ValueError,
        "v must be None for a pool with num_outer 1",
    ),
    "all layers of one": (
        {"layer": None, "k_scale": 1.0, "v_scale": 1.0},
        ValueError,
        r"k must have shape \[3, 5, 2, 16\], got float32\[5, 2, 16\]",
    ),
    "one layer's scales": (
        {"layer": None, "k": np.stack([K] * 3), "v": np.stack([K] * 3)}
        | {"scales": kv.KVScales.zeros(SPEC, 9, all_layers=False)},
        ValueError,
        r"scales must be those of all layers where all are written, got float32\[9",
    ),
    "no scales": ({}, TypeError, "must have the pool's dtype float8_e4m3fn"),
    "implementation": (
        {"zero_tail": True, "implementation": "cuda"},
        ValueError,
        "implementation must be one of None, 'kernel', 'xla', got 'cuda'",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_append_kv(name):
    changes, error, message = KEPT[name]
    given = {n: GIVEN[n] for n in ("layer", "k", "v", "slots")} | {"pool": FP8}
    with pytest.raises(error, match="^append_kv: .*" + message):
        jax.eval_shape(lambda: kv.append_kv(**given | changes))


def test_a_pool_in_host_memory_takes_copies_alone():
    pool = kv.KVPool.zeros(SPEC, 2, memory_kind="pinned_host")
    with pytest.raises(ValueError, match="rope_append: the pool must be in device mem"):
        kv.rope_append(**GIVEN | {"pool": pool})
    with pytest.raises(ValueError, match=r"append_kv: .*move the blocks with transfer"):
        kv.append_kv(pool, 0, K, K, range(5), zero_tail=True)


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        (np.ones((3, 9, 8, 2)), None, TypeError, "k must be float32, got float64"),
        (np.ones((8, 2), np.float32), None, ValueError, "or one layer's without the"),
        (SCALES.k, SCALES.k[0], ValueError, "k and v must have one shape"),
    ],
)
def test_scales(k, v, error, message):
    with pytest.raises(error, match=f"^KVScales: .*{message}"):
        kv.KVScales(k, v)


def test_scales_are_a_tree_and_know_their_layers():
    assert jax.tree.map(lambda a: a + 1, SCALES).k.shape == (3, 9, 8, 2)
    assert SCALES.layer(1).v.shape == (9, 8, 2)
    assert jax.jit(lambda s, i: s.layer(i))(SCALES, jnp.int32(2)).k.shape == (9, 8, 2)
    assert repr(kv.KVScales(SCALES.k)) == "KVScales(k=float32[3, 9, 8, 2], v=None)"
    assert kv.KVScales.zeros(SPEC.replace(num_outer=1), 4).v is None


def written(append, **options):
    """A function of rows and slots, with a symbol for the tokens; and its arguments."""
    (tokens,) = jax.export.symbolic_shape("tokens")
    pool, turn = kv.KVPool.zeros(SPEC, 9), {"positions": range(5), "theta": 1e4}

    def of_kv(k, slots):
        return kv.append_kv(pool, 0, k, k, slots, **options).data

    def of_rope(k, slots):
        given = turn | {"positions": slots} | options
        return kv.rope_append(k, k, k, pool, 0, slots, **given)[1].data

    rows = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return jax.jit(of_kv if append is kv.append_kv else of_rope), rows, slots


def with_any_angles():
    """The same of five tokens, with a symbol for the positions that have angles."""
    (positions,) = jax.export.symbolic_shape("positions")
    pool = kv.KVPool.zeros(SPEC, 9)

    def of_angles(k, slots, cos_sin):
        given = {"positions": slots, "cos_sin": cos_sin}
        return kv.rope_append(k, k, k, pool, 0, slots, **given)[1].data

    rows = jax.ShapeDtypeStruct((5, 2, 16), jnp.float32)
    slots = jax.ShapeDtypeStruct((5,), jnp.int32)
    return jax.jit(of_angles), rows, slots, jax.ShapeDtypeStruct((positions, 16), "f4")


@pytest.mark.parametrize("append", [kv.append_kv, kv.rope_append])
def test_symbolic_tokens_are_for_plain_jax(append):
    with pytest.raises(NotImplementedError, match="symbolic 'tokens'; pass implement"):
        f, *symbolic = written(append)
        jax.export.export(f)(*symbolic)
    if append is kv.rope_append:  # append_kv is a block copy, which asks for a build
        with pytest.raises(NotImplementedError, match="rope_append: sizes"):
            jax.export.export(f, platforms=["cuda"])(*symbolic)
        f, *symbolic = with_any_angles()
        with pytest.raises(NotImplementedError, match="the symbolic 'positions'; pass"):
            jax.export.export(f, platforms=["cuda"])(*symbolic)
    f, *symbolic = written(append, implementation="xla")
    k, slots = jax.random.normal(jax.random.key(0), (5, 2, 16)), jnp.arange(3, 8)
    of_any = jax.export.export(f)(*symbolic).call(k, slots)
    np.testing.assert_array_equal(of_any, f(k, slots))
