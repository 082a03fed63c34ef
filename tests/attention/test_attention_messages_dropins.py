"""Bad calls of the attention drop-ins are errors that say what, where and the fix.

The rows list words that a message must hold, as in test_attention_messages.py.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import BF16, F16
from flax import nnx
from messages import Table, check, check_row, f32, i32

from jax_kvblock import (
    FlashAttention,
    attention_fn,
    available_tiles,
    dot_product_attention,
    estimate_memory_usage,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    get_optimal_block_sizes,
    lm_to_lse,
    lse_to_lm,
)

ROWS = Table()
Q, K = f32(2, 5, 4, 8), f32(2, 7, 2, 8)
QKV = [Q, K, K]
COMPLEX = f32(5, 7, dtype=jnp.complex64)
BOOLS = f32(5, 7, dtype=jnp.bool)


def without(name, f, names):
    """A function of the other arrays, in order, and what `name` is."""
    others = [n for n in names if n != name]
    return lambda value: (
        lambda *x: f(**{name: value, **dict(zip(others, x, strict=True))})
    )


# ---- dot_product_attention -----------------------------------------------------------

W = "dot_product_attention"
dots = dot_product_attention
NAMES = ("query", "key", "value")
NO_ARRAYS = {
    "None": None,
    "a string": "q",
    "ragged": [[1.0], [1.0, 2.0]],
    "objects": np.array([1, None]),
}


def option(f, **options):
    return lambda *x: f(*x, **options)


def given(f, name, **options):
    """A function of q, k, v and one more array."""
    return lambda q, k, v, x: f(q, k, v, **{name: x}, **options)


for name, x in zip(NAMES, QKV, strict=True):
    others = [y for n, y in zip(NAMES, QKV, strict=True) if n != name]
    bad = without(name, dots, NAMES)
    for label, value in NO_ARRAYS.items():
        words = f"{name} must be an array|got |pass a JAX or NumPy array"
        ROWS.kind(W, f"{name} is {label}", bad(value), others, words)
    words = f"{name} must be an array|ShapeDtypeStruct|jax.eval_shape"
    ROWS.kind(W, f"{name} is a shape", bad(x), others, words)
for name in ("bias", "mask"):
    for label, value in NO_ARRAYS.items():
        if value is not None:
            words = f"{name} must be an array|got |pass a JAX or NumPy array"
            ROWS.kind(
                W, f"{name} is {label}", option(dots, **{name: value}), QKV, words
            )
    for shape in [(3, 5, 7), (2, 7), (5, 6), (1, 2, 4, 5, 7)]:
        dtype = jnp.bool if name == "mask" else jnp.float32
        shown = ", ".join(map(str, shape))
        words = (
            f"{name} must broadcast to [B, N, T, S], here [2, 4, 5, 7]|[{shown}]|1 or"
        )
        x = f32(*shape, dtype=dtype)
        ROWS.value(W, f"{name} {shape}", given(dots, name), [*QKV, x], words)
ROWS.kind(W, "bool bias", given(dots, "bias"), [*QKV, BOOLS],
          "bias must be floats|got bool[5, 7]|pass a boolean as mask")  # fmt: skip
ROWS.kind(W, "complex bias", given(dots, "bias"), [*QKV, COMPLEX],
          "bias must be floats|got complex64[5, 7]|real part")  # fmt: skip
ROWS.kind(W, "float mask", given(dots, "mask"), [*QKV, f32(5, 7)],
          "mask must be bool|got float32[5, 7]|astype(bool)|bias")  # fmt: skip
ROWS.kind(W, "integers", dots, [i32(*x.shape) for x in QKV],
          "query must be bfloat16, float16 or float32|got int32|cast it")  # fmt: skip
ROWS.kind(W, "mixed dtypes", dots, [f32(*Q.shape, dtype=BF16), K, K],
          "key must have query's dtype, bfloat16|got float32|cast it")  # fmt: skip
ROWS.value(W, "rank", dots, [f32(5, 8), K, K], "query|[T, N, H]|got float32[5, 8]|vmap")
ROWS.value(
    W, "ranks", dots, [f32(5, 4, 8), K, K], "key must have query's rank|batch axis"
)
ROWS.value(W, "heads", dots, [Q, f32(2, 7, 3, 8), f32(2, 7, 3, 8)], "multiple|4 and 3")
ROWS.value(
    W, "rank 5", dots, [f32(1, *Q.shape), K, K], "query|got float32[1, 2, 5|fold"
)
ROWS.value(
    W, "dims", dots, [f32(2, 5, 4, 16), K, K], "key must have query's|[2, 7, 2, 8]"
)
ROWS.value(
    W, "keys", dots, [Q, K, f32(2, 6, 2, 8)], "value must have key's|[2, 6, 2, 8]"
)
wide = [f32(*x.shape[:-1], 300) for x in QKV]
ROWS.value(W, "wide heads", dots, wide, "query|from 1 to 256|300|jax.nn")
for name in ("is_causal", "return_residual"):
    for value in (1, "yes", None):
        words = f"{name} must be True or False|got {value!r}|compiled in"
        ROWS.kind(W, f"{name}={value!r}", option(dots, **{name: value}), QKV, words)
    traced = jax.jit(given(dots, name))
    words = f"{name}|got a traced bool[]|compiled in"
    ROWS.kind(W, f"traced {name}", traced, [*QKV, f32(dtype=jnp.bool)], words)
for value in (1.5, True, "3", np.int32([1, 2]), (2, 3.0), [False, 1]):
    words = "local_window_size must be an integer|got |compiled in|q_offset"
    bad = option(dots, local_window_size=value)
    ROWS.kind(W, f"window {value!r}", bad, QKV, words)
for value in (-1, (2, -1), (np.int8(-1), 0)):
    words = "local_window_size must not be negative|got -1|q_offset|window=(None, ...)"
    ROWS.value(W, f"window {value}", option(dots, local_window_size=value), QKV, words)
for value in ((1, 2, 3), (), (3, None)):
    words = f"local_window_size must be|or a pair|got {value!r}|flash_attention"
    ROWS.value(W, f"window {value}", option(dots, local_window_size=value), QKV, words)
words = "local_window_size|got a traced int32[]|windows are compiled in|q_offset"
for label, f in [
    ("one", given(dots, "local_window_size")),
    ("pair", lambda q, k, v, x: dots(q, k, v, local_window_size=(2, x))),
]:
    ROWS.kind(W, f"traced window, {label}", jax.jit(f), [*QKV, i32()], words)
for name in ("query_seq_lengths", "key_value_seq_lengths"):
    at = given(dots, name)
    ROWS.value(
        W, f"{name} size", at, [*QKV, i32(3)], f"{name}|int32[2]|got int32[3]|full"
    )
    ROWS.kind(
        W, f"{name} floats", at, [*QKV, f32(2)], f"{name}|int32[2]|float32|astype"
    )
    bad = option(dots, **{name: [1.0, 2.0]})
    ROWS.kind(W, f"{name} list", bad, QKV, f"{name}|int32[2]|got float64[2]|astype")
for value, words in [("0.5", "a number|got '0.5'"), ([1.0], "a number|got [1.0]")]:
    ROWS.kind(
        W, f"scale={value}", option(dots, scale=value), QKV, f"scale|{words}|float"
    )
ROWS.value(W, "scale=nan", option(dots, scale=np.nan), QKV, "scale|finite|got nan|None")
ROWS.kind(W, "traced scale", jax.jit(given(dots, "scale")), [*QKV, f32()],
          "scale|got a traced float32[]|multiply q by it")  # fmt: skip
for value in ("flash", 1, ["xla"]):
    words = f"implementation must be one of None|'cuda_sm90'|'xla'|got {value!r}"
    ROWS.value(W, f"{value} runs it", option(dots, implementation=value), QKV, words)
ROWS.value(W, "cudnn in float32", option(dots, implementation="cudnn"), QKV,
           "='cudnn'|float32|bfloat16 and float16|'cuda' and 'xla' do")  # fmt: skip

# ---- attention_fn --------------------------------------------------------------------

W = "attention_fn"
SAME = [Q, Q, Q]
for name in NAMES:
    for label, value in NO_ARRAYS.items():
        words = f"{name} must be an array|got |pass a JAX or NumPy array"
        bad = without(name, attention_fn, NAMES)(value)
        ROWS.kind(W, f"{name} is {label}", bad, SAME[:2], words)
for name in ("bias", "mask"):
    bad = option(attention_fn, **{name: "x"})
    ROWS.kind(W, f"{name} is text", bad, SAME, f"{name} must be an array|got str|pass")
    words = f"{name}|batch [2]|got |[3, 1, 5, 5]|1 or that size"
    x = f32(3, 1, 5, 5)
    ROWS.value(W, f"{name} batch", given(attention_fn, name), [*SAME, x], words)
ROWS.value(
    W, "rank", attention_fn, [f32(5, 8)] * 3, "query, key and value|[5, 8]|x[None]"
)
ranks = [Q, f32(7, 2, 8), f32(7, 2, 8)]
ROWS.value(W, "ranks", attention_fn, ranks, "query, key and value|[7, 2, 8]|x[None]")
ROWS.value(W, "batch", attention_fn, [Q, f32(1, 7, 2, 8), f32(1, 7, 2, 8)],
           "same batch|[2, 5, 4, 8], float32[1, 7, 2, 8]|broadcast")  # fmt: skip
for value in ("much", [0.1], True):
    bad = option(attention_fn, dropout_rate=value)
    words = f"dropout_rate must be a number|got {value!r}|Python float"
    ROWS.kind(W, f"dropout {value}", bad, SAME, words)
ROWS.kind(W, "traced dropout", jax.jit(given(attention_fn, "dropout_rate")),
          [*SAME, f32()], "dropout_rate|got a traced float32[]|=0.0")  # fmt: skip
ROWS.kind(W, "deterministic", option(attention_fn, dropout_rate=0.1, deterministic=1),
          SAME, "deterministic must be True or False|got 1")  # fmt: skip
bad = option(attention_fn, dropout_rate=0.1, broadcast_dropout=None)
ROWS.kind(W, "broadcast", bad, SAME, "broadcast_dropout must be True or False|got None")
for value, words in (
    (1.0, "at least 0 and less than 1, got 1.0"),
    (-0.5, "at least 0 and less than 1, got -0.5"),
    (0.001, "round to 1/128 at least|127/128 at most, got 0.001"),
):
    bad = option(attention_fn, dropout_rate=value)
    ROWS.value(W, f"dropout {value}", bad, SAME, f"dropout_rate must|{words}")
ROWS.value(W, "no dropout_rng", option(attention_fn, dropout_rate=0.1), SAME,
           "dropout_rng|be given|got None|nnx.Rngs(0)|deterministic=True")  # fmt: skip
for label, value, got in (
    ("an integer", 3, "int"),
    ("integers", np.arange(2), "int64[2]"),
    ("keys", jax.random.split(jax.random.key(0), 2), "key<fry>[2]"),
    ("three words", np.zeros(3, np.uint32), "uint32[3]"),
    ("a stream", nnx.Rngs(0), "Rngs"),
):
    bad = option(attention_fn, dropout_rate=0.1, dropout_rng=value)
    words = f"dropout_rng must be a key of jax.random, got {got}|"
    words += "jax.random.key(seed)|rngs.dropout()"
    ROWS.kind(W, f"dropout_rng is {label}", bad, SAME, words)
ROWS.kind(W, "dtype", option(attention_fn, dtype="floaty"), SAME,
          "dtype must be a dtype|jnp.bfloat16|got 'floaty'")  # fmt: skip

# ---- on [B, H, N, D] -----------------------------------------------------------------

W = "flash_attention_forward"
X = f32(1, 2, 32, 16)
forward, backward = flash_attention_forward, flash_attention_backward
for name in "QKV":
    bad = without(name, forward, "QKV")
    ROWS.kind(
        W, f"{name} is a list", bad([[1.0]]), [X, X], f"{name}|an array|got list|jnp"
    )
    words = f"{name} must be [B, H, N, D]|got float32[2, 32, 16]|x[None]"
    ROWS.value(W, f"{name} rank", bad(np.zeros((2, 32, 16), np.float32)), [X, X], words)
    words = f"{name} must be bfloat16, float16 or float32|got int32|cast it"
    ROWS.kind(W, f"{name} of integers", bad(np.zeros(X.shape, np.int32)), [X, X], words)
ROWS.kind(W, "mixed", forward, [f32(*X.shape, dtype=F16), X, X], "K|Q's dtype|cast it")
ROWS.value(W, "heads", forward, [X, f32(1, 1, 32, 16), f32(1, 1, 32, 16)],
           "K and V|Q's B, H and D|[1, 1, 32, 16]|flash_attention serves")  # fmt: skip
ROWS.value(
    W, "no heads", forward, [f32(1, 0, 32, 16)] * 3, "H|at least 1|[1, 0, 32, 16]"
)
D_ROWS = ((0, "pad"), (12, "dot_product_attention"), (264, "jax.nn"))
for dim, fix in D_ROWS:
    words = f"head dim D must be a multiple of 8 up to 256, got {dim}|{fix}"
    ROWS.value(W, f"D={dim}", forward, [f32(1, 2, 32, dim)] * 3, words)
for name in ("Bc", "Br"):
    for value in (32.0, True, None, "32", np.int32([32])):
        bad = option(forward, **{name: value})
        words = f"{name} must be an integer|got {value!r}|get_optimal_block_sizes"
        ROWS.kind(W, f"{name}={value!r}", bad, [X] * 3, words)
    for value in (0, -32, 33, 1024):
        words = f"no tile (Bc, Br)|{value}|head dim 16|(128, 128)|[16, 32"
        ROWS.value(
            W, f"{name}={value}", option(forward, **{name: value}), [X] * 3, words
        )
    words = f"{name} must be an integer|got a traced int32[]|compiled in"
    ROWS.kind(
        W, f"traced {name}", jax.jit(given(forward, name)), [X, X, X, i32()], words
    )
for name in ("use_half", "return_residuals"):
    for value in (1, "yes", None):
        words = f"{name} must be True or False|got {value!r}|compiled in"
        ROWS.kind(
            W, f"{name}={value!r}", option(forward, **{name: value}), [X] * 3, words
        )

W = "flash_attention_backward"
SIX = ("Q", "K", "V", "O", "dO", "l", "m")
ROW = f32(1, 2, 32)
for name in SIX:
    shapes = [ROW if n in "lm" else X for n in SIX if n != name]
    bad = without(name, backward, SIX)
    ROWS.kind(
        W, f"{name} is None", bad(None), shapes, f"{name} must be an array|NoneType"
    )
    if name in SIX[3:]:
        words = f"{name} must be shaped like Q|got float32[2, 5]|return_residuals=True"
        bad = bad(np.zeros((2, 5), np.float32))
        ROWS.value(W, f"{name} shape", bad, shapes, words)
for name in ("O", "dO"):
    bad = without(name, backward, SIX)
    shapes = [X, X, X, X, ROW, ROW]
    for dtype in (np.int32, bool):
        words = f"{name} must be floats|got {np.dtype(dtype)}|.astype(Q.dtype)"
        ROWS.kind(W, f"{name} {dtype}", bad(np.zeros(X.shape, dtype)), shapes, words)

W = "FlashAttention"
for options, words in [
    ({"bc": 32.0}, "bc must be an integer|got 32.0|get_optimal_block_sizes"),
    ({"br": True}, "br must be an integer|got True|get_optimal_block_sizes"),
    ({"use_half": 1}, "use_half must be True or False|got 1"),
]:
    ROWS.kind(W, str(options), lambda o=options: FlashAttention(**o), [], words)

for dim, fix in D_ROWS[1:]:
    words = f"head dim D must be a multiple of 8 up to 256, got {dim}|{fix}"
    for W, f in (
        ("get_optimal_block_sizes", lambda d=dim: get_optimal_block_sizes(64, d)),
        ("estimate_memory_usage", lambda d=dim: estimate_memory_usage(1, 2, 32, d)),
    ):
        ROWS.value(W, f"D={dim}", f, [], words)
for value in (0, -1, 64.0, True, None):
    words = f"head_dim must be an integer of at least 1, got {value!r}"
    for W, f in (
        ("get_optimal_block_sizes", lambda d=value: get_optimal_block_sizes(64, d)),
        ("estimate_memory_usage", lambda d=value: estimate_memory_usage(1, 2, 32, d)),
    ):
        ROWS.value(W, f"D={value!r}", f, [], words)
W = "available_tiles"
for value in (64.0, "a", None):
    words = f"head_dim must be an integer|got {value!r}|last dim of Q"
    ROWS.kind(W, f"{value!r}", lambda d=value: available_tiles(d), [], words)
ROWS.kind(
    "lm_to_lse", "list", lambda: lm_to_lse([1.0], [2.0]), [], "l|an array|got list"
)
ROWS.kind(
    "lm_to_lse", "integers", lm_to_lse, [f32(3), i32(3)], "m|floats|int32[3]|cast"
)
ROWS.value(
    "lm_to_lse", "shapes", lm_to_lse, [f32(3), f32(4)], "m|like l, [3]|float32[4]"
)
ROWS.kind("lse_to_lm", "list", lambda: lse_to_lm([1.0]), [], "lse|an array|got list")
ROWS.kind("lse_to_lm", "integers", lse_to_lm, [i32(3)], "lse|floats|int32[3]|cast")
ROWS.value(
    "lse_to_lm", "shapes", lse_to_lm, [f32(3), f32(4)], "m|like lse, [3]|float32[4]"
)


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_calls_are_refused_while_tracing(bad):
    check_row(bad)


MISTAKES = {
    "integers": [i32(*x.shape) for x in QKV],
    "mixed dtypes": [Q, f32(*K.shape, dtype=BF16), K],
    "head dim of k": [Q, f32(2, 7, 2, 16), K],
    "keys of v": [Q, K, f32(2, 6, 2, 8)],
    "batch": [Q, f32(3, 7, 2, 8), f32(3, 7, 2, 8)],
    "heads": [Q, f32(2, 7, 3, 8), f32(2, 7, 3, 8)],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_same_mistake_is_told_in_the_same_words(mistake):
    def said(f):
        with pytest.raises((TypeError, ValueError)) as caught:
            jax.eval_shape(f, *MISTAKES[mistake])
        return str(caught.value)

    said_of_q = said(flash_attention).replace("flash_attention", "", 1)
    names = {"q": "query", "k": "key", "v": "value"}
    in_words = re.sub(r"\b[qkv]\b", lambda name: names[name[0]], said_of_q)
    assert said(dots) == f"dot_product_attention{in_words}"


def test_keys_of_random_numbers_are_no_arrays():
    key = jax.random.key(0)
    x = jnp.zeros(Q.shape)
    for where, f in (
        ("dot_product_attention", dots),
        ("attention_fn", attention_fn),
    ):
        words = "query must be an array|got key<fry>[]|numbers"
        check(where, TypeError, words, lambda f=f: f(key, x, x))
