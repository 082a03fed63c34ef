"""Bad calls of flash_attention are errors while tracing that say what, where, the fix.

The rows list words that a message must hold: the argument, what was expected, what
came, and the fix where there is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import BF16, F16, F32
from messages import Table, check, check_row, f32, i32

from jax_kvblock import AttentionTiles, flash_attention

W = "flash_attention"
Q, K = f32(2, 5, 4, 8), f32(2, 7, 2, 8)
PQ, PK = f32(12, 4, 8), f32(14, 2, 8)  # packed
CU = (i32(3), i32(3))
ROWS = Table()


def on_host(x):
    """A jax array whose values may be looked at, also where there is a GPU."""
    return jax.device_put(np.asarray(x, np.int32), jax.devices("cpu")[0])


def call(**static):
    """A function of q, k, v with these options."""
    return lambda q, k, v: flash_attention(q, k, v, **static)


def given(name, **static):
    """A function of q, k, v and one more operand."""
    return lambda q, k, v, x: flash_attention(q, k, v, **{name: x}, **static)


# ---- q, k, v -------------------------------------------------------------------------

plain = call()
ROWS.value(
    W, "q rank", plain, [f32(5, 4, 8), K, K], "q|[B, T, N, D]|got float32[5, 4, 8]"
)
ROWS.value(
    W, "k rank", plain, [Q, f32(7, 2, 8), K], "k|[B, S, K, D]|got float32[7, 2, 8]"
)
ROWS.value(W, "v rank", plain, [Q, K, f32(2, 7, 8)], "v|[B, S, K, Dv]|float32[2, 7, 8]")
ROWS.value(
    W, "batch", plain, [Q, f32(3, 7, 2, 8), f32(3, 7, 2, 8)], "k|batch|2|[3, 7, 2, 8]"
)
ROWS.value(W, "batch of v", plain, [Q, K, f32(3, 7, 2, 8)], "v|k|float32[3, 7, 2, 8]")
ROWS.value(W, "keys of v", plain, [Q, K, f32(2, 6, 2, 8)], "v|k|float32[2, 6, 2, 8]")
ROWS.value(W, "heads of v", plain, [Q, K, f32(2, 7, 4, 8)], "v|k|float32[2, 7, 4, 8]")
ROWS.value(
    W, "head dim of k", plain, [Q, f32(2, 7, 2, 16), K], "k|head dim|8|[2, 7, 2, 16]"
)
ROWS.value(
    W, "heads", plain, [Q, f32(2, 7, 3, 8), f32(2, 7, 3, 8)], "heads|multiple|4|3"
)
ROWS.value(W, "fewer heads", plain, [f32(2, 5, 2, 8), f32(2, 7, 4, 8), f32(2, 7, 4, 8)],
           "heads|multiple|2|4")  # fmt: skip
for dim in (4, 12, 257, 264, 512):
    wide = [f32(*x.shape[:-1], dim) for x in (Q, K, K)]
    ROWS.value(W, f"head dim {dim}", plain, wide, f"multiple of 8|256|{dim}")
    ROWS.value(
        W, f"value dim {dim}", plain, [Q, K, wide[2]], f"v|multiple of 8|256|{dim}"
    )
ROWS.kind(W, "dtype of k", plain, [Q, f32(*K.shape, dtype=BF16), K],
          "k|float32|got bfloat16[2, 7, 2, 8]|cast it|.astype")  # fmt: skip
ROWS.kind(W, "dtype of v", plain, [Q, K, f32(*K.shape, dtype=F16)],
          "v|float32|got float16[2, 7, 2, 8]|cast it|.astype")  # fmt: skip
ROWS.kind(W, "integers", plain, [i32(*Q.shape), i32(*K.shape), i32(*K.shape)],
          "q|bfloat16, float16 or float32|got int32[2, 5|cast it")  # fmt: skip
eighths = [f32(*x.shape, dtype=jnp.float8_e5m2) for x in (Q, K, K)]
ROWS.kind(W, "float8", plain, eighths,
          "q|bfloat16, float16 or float32|got float8_e5m2|cast it")  # fmt: skip
eighths = [f32(*x.shape, dtype=jnp.float8_e4m3fn) for x in (Q, K, K)]
ROWS.kind(W, "float8 alone", plain, eighths,
          "scales|AttentionScales(q, k, v)|got NoneType|quantize_qkv")  # fmt: skip
for name in "qkv":
    others = {n: x for n, x in zip("qkv", (Q, K, K), strict=True) if n != name}
    bad = lambda a, b, name=name, names=tuple(others): flash_attention(  # noqa: E731
        **{name: "x", **dict(zip(names, (a, b), strict=True))}
    )
    ROWS.kind(
        W,
        f"{name} is no array",
        bad,
        list(others.values()),
        f"{name} must be an array|got str",
    )

# ---- static options ------------------------------------------------------------------

for name in ("causal", "deterministic", "return_lse"):
    for value in (1, "yes", None, np.ones(2, bool)):
        words = f"{name}|True or False|got {value!r}"
        ROWS.kind(W, f"{name}={value!r}", call(**{name: value}), [Q, K, K], words)
for value, error, words in [
    (3, ValueError, "(left, right)|got 3"),
    ((3,), ValueError, "(left, right)|got (3,)"),
    ((1, 2, 3), ValueError, "(left, right)|got (1, 2, 3)"),
    (np.int32([1, 2]), ValueError, "(left, right)|got array([1, 2]"),
    ((-1, 2), ValueError, "window[0]|negative|got -1|None"),
    ((1, np.int8(-2)), ValueError, "window[1]|negative|got -2|None"),
    ((1.5, 2), TypeError, "window[0]|an integer|got 1.5|compiled in"),
    ((2, True), TypeError, "window[1]|an integer|got True|compiled in"),
    ((np.bool_(1), 2), TypeError, "window[0]|an integer|got np.True_|compiled in"),
    ((np.array([3]), 2), TypeError, "window[0]|an integer|got array([3])"),
    (("a", 2), TypeError, "window[0]|an integer|got 'a'|compiled in"),
]:
    row = ROWS.kind if error is TypeError else ROWS.value
    row(W, f"window={value}", call(window=value), [Q, K, K], f"window|{words}")
NO_NUMBERS = (
    "0.5",
    b"1",
    [0.5],
    np.array([0.5]),
    np.array(True),
    True,
    1j,
    np.complex64,
)
for name in ("softcap", "scale"):
    for value in NO_NUMBERS:
        words = f"{name}|must be a number|got {value!r}|pass a Python float"
        ROWS.kind(W, f"{name}={value!r}", call(**{name: value}), [Q, K, K], words)
    for value in (float("nan"), float("inf"), 1e300, 10**400):
        words = f"{name}|finite in float32|got {min(value, float('inf'))!r}|pass None"
        words = words.replace(repr(10**400), "inf")
        label = f"{name}={value!r}"[:20]
        ROWS.value(W, label, call(**{name: value}), [Q, K, K], words)
for value in (0, 0.0, -1.0, 1e-60):
    words = f"softcap|positive|got {value!r}|pass None"
    ROWS.value(W, f"softcap={value}", call(softcap=value), [Q, K, K], words)
for value in ("flash", "CUDA", 3, True, ["cuda"], np.array(["cuda", "xla"])):
    words = f"implementation|None, |'cuda'|'xla'|got {value!r}"
    ROWS.value(
        W, f"implementation={value!r}", call(implementation=value), [Q, K, K], words
    )
traced = lambda name: lambda q, k, v, x: flash_attention(q, k, v, **{name: x})  # noqa: E731
for name, fix in [
    ("softcap", "static argument"),
    ("scale", "multiply q by it and pass scale=1.0"),
    ("causal", "cannot be traced"),
    ("return_lse", "cannot be traced"),
    ("window", "q_offset and kv_offset"),
]:
    words = f"{name}|got a traced float32[]|compiled in|{fix}"
    f = traced(name)
    if name == "window":
        f = lambda q, k, v, x: flash_attention(q, k, v, window=(3, x))  # noqa: E731
    ROWS.kind(W, f"traced {name}", jax.jit(f), [Q, K, K, f32()], words)
ROWS.value(
    W, "traced pair", jax.jit(traced("window")), [Q, K, K, i32(2)],
    "window|pair|got a traced int32[2]|compiled in",
)  # fmt: skip

# ---- segments, lengths, offsets ------------------------------------------------------

S5 = f32(2, 5, 2, 8)
segments = given("segment_ids")
ROWS.value(W, "one segment_ids, T not S", segments, [Q, K, K, i32(2, 5)],
           "segment_ids|pair|T = 5|S = 7")  # fmt: skip
ROWS.value(
    W,
    "segment_ids shape",
    segments,
    [Q, S5, S5, i32(2, 6)],
    "segment_ids|[2, 5]|got int32[2, 6]",
)
ROWS.value(
    W,
    "segment_ids batch",
    segments,
    [Q, S5, S5, i32(1, 5)],
    "segment_ids|[2, 5]|got int32[1, 5]",
)
ROWS.kind(W, "segment_ids dtype", segments, [Q, S5, S5, f32(2, 5)],
          "segment_ids|int32|got float32[2, 5]|.astype(jnp.int32)")  # fmt: skip
ROWS.value(W, "segment_ids of q", segments, [Q, K, K, (i32(2, 4), i32(2, 7))],
           "segment_ids|[2, 5]|got int32[2, 4]")  # fmt: skip
ROWS.value(W, "segment_ids of keys", segments, [Q, K, K, (i32(2, 5), i32(2, 8))],
           "segment_ids|[2, 7]|got int32[2, 8]")  # fmt: skip
ROWS.value(
    W, "three segment_ids", segments, [Q, K, K, (i32(2, 5),) * 3], "segment_ids|pair|3"
)
ROWS.value(W, "swapped segment_ids", segments, [Q, K, K, (i32(2, 7), i32(2, 5))],
           "segment_ids|[2, 5]|got int32[2, 7]")  # fmt: skip
ROWS.value(W, "nested segment_ids", call(segment_ids=[[0] * 5] * 3), [Q, S5, S5],
           "segment_ids must be|[2, 5]|[B, T]|got int32[3, 5]")  # fmt: skip
ROWS.value(W, "large segment_ids", call(segment_ids=[[2**31] * 5] * 2), [Q, S5, S5],
           "segment_ids must fit in int32|2147483648")  # fmt: skip
ROWS.value(W, "nested segment_ids, T not S", call(segment_ids=[[0] * 5] * 2), [Q, K, K],
           "one segment_ids|pair|T = 5|S = 7")  # fmt: skip
ROWS.value(W, "pair of rows", call(segment_ids=([0] * 5, [0] * 5)), [Q, S5, S5],
           "segment_ids[0]|int32[B, T]|got int32[5]|reshape it to [B, T]")  # fmt: skip
ROWS.value(W, "large segment_ids of keys",
           call(segment_ids=[[[0] * 5] * 2, [[2**31] * 7] * 2]), [Q, K, K],
           "segment_ids[1] must fit in int32|2147483648")  # fmt: skip
half_pair = lambda q, k, v, x: flash_attention(q, k, v, segment_ids=(x, None))  # noqa: E731
ROWS.kind(W, "half a pair", half_pair, [Q, K, K, i32(2, 5)], "segment_ids|None")
for name in ("q_lens", "kv_lens"):
    at = given(name)
    ROWS.value(W, f"{name} size", at, [Q, K, K, i32(3)], f"{name}|[2]|got int32[3]")
    must = f"{name}|int32[2]|jnp.full|got"
    ROWS.value(W, f"{name} scalar", at, [Q, K, K, i32()], f"{must} int32[]")
    ROWS.value(W, f"{name} rank", at, [Q, K, K, i32(2, 1)], f"{must} int32[2, 1]")
    ROWS.kind(
        W, f"{name} dtype", at, [Q, K, K, f32(2)], f"{name}|int32|got float32[2]|astype"
    )
    for value, row, words in [
        ([1.5, 2], ROWS.kind, "got float64[2]|astype"),
        ([True, False], ROWS.kind, "got bool[2]|astype"),
        ([None, 3], ROWS.kind, "got [None, 3]|pass integers"),
        ([[1], [2]], ROWS.value, "got int32[2, 1]|.reshape(-1)"),
        ([[1], [2, 3]], ROWS.value, "differ in length|[[1], [2, 3]]"),
        ([1, 2**80], ROWS.value, "fit in int32|got [1, "),
        (5, ROWS.value, "got int|jnp.full(2, length)"),
    ]:
        must = f"{name}|int32|{words}"
        row(W, f"{name}={value}", call(**{name: value}), [Q, K, K], must)
for name in ("q_offset", "kv_offset"):
    at = given(name, causal=True)
    ROWS.value(
        W, f"{name} size", at, [Q, K, K, i32(3)], f"{name}|scalar|[2]|got int32[3]"
    )
    ROWS.value(W, f"{name} rank", at, [Q, K, K, i32(2, 1)], f"{name}|got int32[2, 1]")
    ROWS.kind(
        W, f"{name} dtype", at, [Q, K, K, f32()], f"{name}|int32|got float32[]|astype"
    )
    for value in (1.5, "x", True, {}):
        words = f"{name}|int32 scalar or int32[2]|got {value!r}|pass integers"
        bad = call(**{name: value}, causal=True)
        ROWS.kind(W, f"{name}={value!r}", bad, [Q, K, K], words)
    for value in (2**40, np.int64(-(2**40)), 2**31):
        words = f"{name}|fit in int32|got {value}|difference"
        ROWS.value(W, f"{name}={value}", call(**{name: value}), [Q, K, K], words)
    ragged = call(**{name: [[1], [2, 3]]})
    ROWS.value(W, f"{name} ragged", ragged, [Q, K, K], f"{name}|int32|[[1], [2, 3]]")

# ---- packed --------------------------------------------------------------------------

packed = given("cu_seqlens")
ROWS.value(
    W, "packed rank", packed, [Q, K, K, CU], "q|[total, N, D]|got float32[2, 5, 4, 8]"
)
ROWS.value(
    W, "one cu_seqlens", packed, [PQ, PK, PK, i32(3)], "cu_seqlens|pair|got int32[3]"
)
ROWS.value(
    W, "three cu_seqlens", packed, [PQ, PK, PK, (*CU, i32(3))], "cu_seqlens|pair|3"
)
ROWS.value(W, "unequal cu_seqlens", packed, [PQ, PK, PK, (i32(3), i32(4))],
           "cu_seqlens|int32[3]|int32[4]")  # fmt: skip
ROWS.value(W, "cu_seqlens rank", packed, [PQ, PK, PK, (i32(3, 1), i32(3, 1))],
           "cu_seqlens|[B + 1]|got int32[3, 1]")  # fmt: skip
ROWS.value(
    W, "no cu_seqlens", packed, [PQ, PK, PK, (i32(0), i32(0))], "cu_seqlens|int32[0]"
)
ROWS.kind(W, "cu_seqlens dtype", packed, [PQ, PK, PK, (f32(3), i32(3))],
          "cu_seqlens|int32|got float32[3]|astype")  # fmt: skip
ROWS.value(W, "packed v", packed, [PQ, PK, f32(13, 2, 8), CU], "v|k|float32[13, 2, 8]")
ROWS.value(W, "unpacked 3 dims", plain, [PQ, PK, PK], "q|[B, T, N, D]|cu_seqlens")
for name in ("q_offset", "kv_offset"):
    f = lambda q, k, v, cu, x, name=name: flash_attention(  # noqa: E731
        q, k, v, cu_seqlens=cu, **{name: x}
    )
    ROWS.value(
        W, f"packed {name}", f, [PQ, PK, PK, CU, i32(3)], f"{name}|[2]|got int32[3]"
    )

for label, cu, words in [
    ("fall", ([0, 7, 5, 12], [0, 1, 2, 14]), "[0]|at most 12, |got 7 at 1 and 5 at 2"),
    ("fall at k", ([0, 4, 5, 12], [0, 9, 9, 8]), "[1]|most 14, |got 9 at 2 and 8 at 3"),
    ("end beyond q", ([0, 13], [0, 14]), "[0]|at most 12, the rows of q|got 0 to 13"),
    ("end beyond k", ([0, 12], [0, 15]), "[1]|at most 14, the rows of k|got 0 to 15"),
    ("begin below 0", ([-1, 12], [0, 14]), "[0]|at least 0|got -1 to 12"),
]:
    for kind in (list, np.asarray, on_host):
        bad = call(cu_seqlens=tuple(map(kind, cu)))
        words_all = f"cu_seqlens{words}|the cumulative sum of the lengths"
        name = f"cu_seqlens {label}, {kind.__name__}"
        ROWS.value(W, name, bad, [PQ, PK, PK], words_all)

# ---- bias and sinks ------------------------------------------------------------------

bias = given("bias")
for shape in [
    (2, 4, 5, 6),
    (2, 4, 6, 7),
    (3, 4, 5, 7),
    (2, 2, 5, 7),
    (2, 4, 1, 7),
    (2, 4, 5, 1),
]:
    shown = f"got float32[{', '.join(map(str, shape))}]"
    ROWS.value(W, f"bias {shape}", bias, [Q, K, K, f32(*shape)], f"bias|5, 7]|{shown}")
ROWS.value(W, "bias rank", bias, [Q, K, K, f32(5, 7)], "bias|5, 7]|got float32[5, 7]")
ROWS.kind(W, "bias dtype", bias, [Q, K, K, f32(1, 1, 5, 7, dtype=BF16)],
          "bias|must be float32, got bfloat16[1, 1, 5, 7]|cast it")  # fmt: skip
ROWS.kind(
    W,
    "bias of ints",
    bias,
    [Q, K, K, i32(1, 1, 5, 7)],
    "bias|float32|got int32|cast it",
)
ROWS.kind(
    W,
    "bias of bools",
    bias,
    [Q, K, K, f32(1, 1, 5, 7, dtype=jnp.bool)],
    "bias|float32|got bool",
)
halves = [f32(*x.shape, dtype=BF16) for x in (Q, K, K)]
ROWS.kind(W, "bias of another half", bias, [*halves, f32(1, 1, 5, 7, dtype=F16)],
          "bias|bfloat16 or float32|got float16")  # fmt: skip
sinks = given("sinks")
ROWS.value(
    W, "sinks of key heads", sinks, [Q, K, K, f32(2)], "sinks|[4]|got float32[2]"
)
ROWS.value(W, "sinks rank", sinks, [Q, K, K, f32(1, 4)], "sinks|[4]|got float32[1, 4]")
ROWS.value(W, "scalar sink", sinks, [Q, K, K, f32()], "sinks|[4]|got float32[]")
ROWS.kind(W, "sinks dtype", sinks, [*halves, f32(4, dtype=BF16)],
          "sinks|float32|got bfloat16[4]|astype")  # fmt: skip

# ---- tiles ---------------------------------------------------------------------------


def tiles(label, indices, counts, words, error=ValueError, **blocks):
    f = lambda q, k, v, i, c: flash_attention(  # noqa: E731
        q, k, v, tiles=AttentionTiles(i, c, **blocks)
    )
    row = ROWS.kind if error is TypeError else ROWS.value
    row(W, f"tiles {label}", f, [Q, K, K, indices, counts], f"tiles|{words}")


I1, C1 = i32(1, 1, 1, 3), i32(1, 1, 1)
tiles("indices rank", i32(1, 1, 3), C1, "indices|entries]|got int32[1, 1, 3]|reshape")
tiles("counts rank", I1, i32(1, 1), "counts|got int32[1, 1]")
tiles("rows", i32(1, 1, 2, 3), i32(1, 1, 2), "indices|1|got int32[1, 1, 2, 3]")
tiles("batch", i32(3, 1, 1, 3), i32(3, 1, 1), "indices|2|got int32[3, 1, 1, 3]")
tiles("heads", i32(1, 2, 1, 3), i32(1, 2, 1), "indices|4|got int32[1, 2, 1, 3]")
tiles("counts apart", i32(2, 1, 1, 3), i32(2, 4, 1), "counts|got int32[2, 4, 1]")
tiles(
    "indices dtype", f32(1, 1, 1, 3), C1, "indices|int32|got float32|astype", TypeError
)
tiles("counts dtype", I1, f32(1, 1, 1), "counts|int32|got float32|astype", TypeError)
for name in ("block_q", "block_kv"):
    for value in (0, 8, 100, -128):
        words = f"{name}|multiple of 16|got {value}|pass 128"
        tiles(f"{name}={value}", I1, C1, words, **{name: value})
    for value in (128.0, True, "128", None):
        words = f"{name}|an integer|got {value!r}|multiples of 16"
        tiles(f"{name}={value!r}", I1, C1, words, TypeError, **{name: value})
for label, indices, counts, words in [
    ("twice", [[[[0, 0, -1]]]], [[[2]]], "tile 0 twice in indices[0, 0, 0]"),
    ("apart", [[[[0, 9, 0]]]], [[[3]]], "tile 0 twice in indices[0, 0, 0]"),
    ("in a member", [[[[0, 1]]], [[[0, 0]]]], [[[1]], [[9]]], "in indices[1, 0, 0]"),
]:
    for kind in (list, np.asarray, on_host):
        lists = AttentionTiles(kind(indices), kind(counts))
        words_all = f"tiles.indices|once|{words}|put -1 there"
        name = f"tiles {label}, {kind.__name__}"
        ROWS.value(W, name, call(tiles=lists), [Q, K, K], words_all)
given_tiles = lambda value: lambda q, k, v: flash_attention(q, k, v, tiles=value)  # noqa: E731
ROWS.kind(
    W,
    "tiles is a dict",
    given_tiles({"indices": 1}),
    [Q, K, K],
    "tiles|AttentionTiles|got dict",
)


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_calls_are_refused_while_tracing(bad):
    check_row(bad)


# ---- dropout -------------------------------------------------------------------------

SEEDED = {"dropout_rate": 0.1, "dropout_seed": 1}
for value, words in (
    (1, "at least 0 and less than 1, got 1.0|the share of the probabilities"),
    (-0.1, "at least 0 and less than 1, got -0.1"),
    (0.003, "round to 1/128 at least|got 0.003|whole numbers of 128 parts|0 is none"),
    (0.997, "to 127/128 at most, got 0.997"),
    (float("nan"), "dropout_rate|got nan"),
):
    bad = call(**SEEDED | {"dropout_rate": value})
    ROWS.value(W, f"dropout_rate={value}", bad, [Q, K, K], f"dropout_rate must|{words}")
for value in ("much", [0.1], True):
    bad = call(**SEEDED | {"dropout_rate": value})
    words = f"dropout_rate must be a number, got {value!r}|Python float"
    ROWS.kind(W, f"dropout_rate={value!r}", bad, [Q, K, K], words)
traced = jax.jit(given("dropout_rate", dropout_seed=1))
ROWS.kind(W, "traced dropout_rate", traced, [Q, K, K, f32()],
          "dropout_rate|traced float32[]|static argument|dropout_seed may")  # fmt: skip
ROWS.value(W, "no dropout_seed", call(dropout_rate=0.1), [Q, K, K],
           "dropout_seed must be given|got None|jax.random|for each step")  # fmt: skip
FORMS = "dropout_seed must be an integer|[2] or [2, 4]|jax.random"
seed = given("dropout_seed", dropout_rate=0.1)
for rate in (0.1, 0.0):  # also where nothing is dropped
    for label, value in {"text": "x", "float": 1.5, "bool": True}.items():
        bad = call(dropout_rate=rate, dropout_seed=value)
        ROWS.kind(W, f"seed is {label}, {rate}", bad, [Q, K, K],
                  f"{FORMS}|got {value!r}|one for each batch member")  # fmt: skip
ROWS.kind(W, "seeds of floats", seed, [Q, K, K, f32(2)], f"{FORMS}|got float32[2]")
for shape in ((3,), (4,), (1,), (2, 3), (2, 1), (2, 4, 1)):
    words = f"{FORMS}|got int32{list(shape)}|one for each head"
    ROWS.value(W, f"seeds {shape}", seed, [Q, K, K, i32(*shape)], words)
packed_seed = lambda q, k, v, cu, x: flash_attention(  # noqa: E731
    q, k, v, cu_seqlens=cu, dropout_rate=0.1, dropout_seed=x
)
ROWS.value(W, "packed seeds", packed_seed, [PQ, PK, PK, CU, i32(3)],
           "dropout_seed|[2] or [2, 4]|got int32[3]")  # fmt: skip
for shape in ((4,), (2, 4)):
    words = f"{FORMS}|got uint32{list(shape)}|uint32[2] is a key|.astype(jnp.int32)"
    x = jax.ShapeDtypeStruct(shape, jnp.uint32)
    ROWS.value(W, f"words {shape}", seed, [Q, K, K, x], words)
for value in (2**64, -(2**63) - 1):
    bad = call(dropout_rate=0.1, dropout_seed=value)
    ROWS.value(W, f"seed {value}", bad, [Q, K, K], f"{FORMS}|got {value}|fit in 64")
ROWS.value(W, "ragged seeds", call(dropout_rate=0.1, dropout_seed=[[1], [2, 3]]),
           [Q, K, K], f"{FORMS}|[[1], [2, 3]]")  # fmt: skip

# ---- conflicts and implementations ---------------------------------------------------

CONFLICTS = {
    "segment_ids": i32(12),
    "q_lens": i32(2),
    "kv_lens": i32(2),
    "bias": f32(1, 1, 12, 14),
    "tiles": (I1, C1),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_packed_calls_exclude(name):
    """The other option, and how to say it with packed inputs, or without."""

    def f(q, k, v, cu, x):
        x = AttentionTiles(*x) if name == "tiles" else x
        return flash_attention(q, k, v, cu_seqlens=cu, **{name: x})

    args = PQ, PK, PK, CU, CONFLICTS[name]
    words = f"cu_seqlens|{name}"
    check(W, ValueError, words, lambda: jax.eval_shape(f, *args))


def zeros(*shapes, dtype=F32):
    return [jnp.zeros(x.shape, dtype) for x in shapes]


@pytest.mark.parametrize("implementation", ["cuda", "cuda_sm90"])
def test_cuda_on_the_cpu(implementation):
    q, k, v = (
        jax.device_put(x, jax.devices("cpu")[0]) for x in zeros(Q, K, K, dtype=BF16)
    )
    words = f"implementation='{implementation}'|GPU|cpu|implementation='xla' or None"
    attend = call(implementation=implementation)
    with jax.default_device(jax.devices("cpu")[0]):
        check(W, ValueError, words, lambda: attend(q, k, v))
        check(W, ValueError, words, lambda: jax.jit(attend).lower(q, k, v))
        slopes = jax.grad(lambda q: attend(q, k, v).astype(F32).sum())
        check(W, ValueError, words, lambda: slopes(q))


ONE = jnp.zeros((1, 1, 1), jnp.int32)
WITH_DROPOUT = {
    "softcap": {"softcap": 2.0},
    "bias": {"bias": jnp.zeros((1, 1, 5, 7))},
    "tiles": {"tiles": AttentionTiles(ONE[..., None], ONE)},
    "scale=-1": {"scale": -1.0},
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_hopper_s_kernels_say_what_they_do_not_serve_with_dropout(name):
    options = WITH_DROPOUT[name]
    q, k, v = zeros(Q, K, K, dtype=BF16)

    def lower(**more):
        attend = jax.jit(call(implementation="cuda_sm90", **options, **more))
        return attend.trace(q, k, v).lower(lowering_platforms=("cuda",))

    words = f"implementation='cuda_sm90'|{name} with dropout_rate|'cuda' and 'xla' do"
    check(W, ValueError, words, lambda: lower(**SEEDED))


@pytest.mark.gpu
def test_hopper_s_kernels_serve_halves_alone():
    q, k, v = zeros(Q, K, K)
    words = "implementation='cuda_sm90'|float32|bfloat16 and float16|'cuda' and 'xla'"
    check(W, ValueError, words, lambda: call(implementation="cuda_sm90")(q, k, v))


@pytest.mark.gpu
def test_gradients_of_wide_float32_are_of_xla():
    q, k, v = (jnp.zeros(shape) for shape in ((2, 5, 4, 136), *[(2, 7, 4, 136)] * 2))
    attend = call(implementation="cuda")
    assert attend(q, k, v).shape == q.shape
    words = "implementation='cuda'|gradients of float32|136|up to 128|='xla' does"
    slope = jax.grad(lambda q: attend(q, k, v).sum())
    check(W, ValueError, words, lambda: slope(q))


SEGMENTS = jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 7), jnp.int32)


def test_there_are_no_third_derivatives():
    q, k, v = zeros(Q, K, K)
    slope = lambda f: jax.grad(lambda q: f(q).sum())  # noqa: E731
    thrice = lambda: slope(slope(slope(lambda q: plain(q, k, v))))(q)  # noqa: E731
    words = "first and second derivatives|third|jax.nn.dot_product_attention"
    check(W, NotImplementedError, words, thrice)


def test_attention_is_not_linear():
    (q,) = zeros(Q)
    transpose = lambda: jax.linear_transpose(lambda q: plain(q, q, q), q)(q)  # noqa: E731
    check(W, NotImplementedError, "not linear|jax.vjp", transpose)


LACKS = {
    "dropout_rate": (Q, K, {"dropout_rate": 0.1, "dropout_seed": 1}),
    "cu_seqlens": (PQ, PK, {"cu_seqlens": (jnp.int32([0, 12]), jnp.int32([0, 14]))}),
    "tiles": (Q, K, {"tiles": AttentionTiles(ONE[..., None], ONE)}),
    "segment_ids": (Q, K, {"segment_ids": SEGMENTS}),
    "softcap": (Q, K, {"softcap": 2.0}),
    "sinks": (Q, K, {"sinks": jnp.zeros(4)}),
    "offset": (Q, K, {"causal": True, "q_offset": 3}),
    "float32": (Q, K, {}),
}


@pytest.mark.parametrize("lack", LACKS)
def test_cudnn_says_what_it_lacks(lack):
    """Refused before it is looked for, so on machines without it too."""
    q, k, options = LACKS[lack]
    q, k, v = zeros(q, k, k, dtype=F32 if lack == "float32" else BF16)
    words = f"implementation='cudnn'|{lack}|'cuda' and 'xla' do"
    attend = call(implementation="cudnn", **options)
    check(W, ValueError, words, lambda: jax.eval_shape(attend, q, k, v))
