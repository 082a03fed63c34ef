"""Bad calls of attention over devices, and of layouts, say what is wrong and what fits.

They are refused while tracing. The rows list words that a message must hold: the
argument, what was expected, what came, and the fix where there is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import BF16, F16
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import Table, check, check_row, f32, i32

from jax_kvblock.parallel import (
    context_parallel_attention,
    from_zigzag,
    pad_documents,
    pad_sequence,
    shard_positions,
    to_zigzag,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

W = "context_parallel_attention"
# What one of four devices has.
Q, K = f32(2, 8, 4, 8), f32(2, 6, 2, 8)
PQ, PK = f32(8, 4, 8), f32(16, 2, 8)  # packed
ROWS = Table()


def inside(f):
    """`f` on each of four devices, with all of its arguments."""
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), ("c",), (AxisType.Auto,), devices=devices)
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("c"), check_vma=False)
    )


def attend(q, k, v, **options):
    options = {"axis_name": "c"} | options
    f = lambda q, k, v: context_parallel_attention(q, k, v, **options)  # noqa: E731
    return inside(f)(q, k, v)


def call(**static):
    """A function of q, k, v with these options."""
    return lambda q, k, v: attend(q, k, v, **static)


def given(name, **static):
    """A function of q, k, v and one more operand."""

    def f(q, k, v, x):
        return context_parallel_attention(q, k, v, axis_name="c", **{name: x}, **static)

    return lambda *args: inside(f)(*args)


def on_host(x):
    """A jax array whose values may be looked at, also where there is a GPU."""
    return jax.device_put(np.asarray(x, np.int32), jax.devices("cpu")[0])


def test_the_calls_are_good_without_what_is_wrong():
    """So that rows fail for the reason that they name."""
    for kind in ("zigzag", "contiguous"):
        f = call(layout=kind, segment_ids=([[0] * 8] * 2, [[0] * 6] * 2))
        assert jax.eval_shape(f, Q, K, K).shape == (8, 8, 4, 8)
        f = call(layout=kind, cu_seqlens=([0, 16, 32], [0, 16, 64]))
        assert jax.eval_shape(f, PQ, PK, PK).shape == (32, 4, 8)


# ---- the axis ------------------------------------------------------------------------

AXIS = "axis_name must be a mesh axis|the jax.shard_map around|got {!r}|call it inside"
for name in ("d", None, ("c", "d"), ("d",)):
    ROWS.value(W, f"axis {name}", call(axis_name=name), [Q, K, K], AXIS.format(name))
ROWS.value(W, "a list of axes", call(axis_name=["c", "d"]), [Q, K, K],
           AXIS.format(("c", "d")))  # fmt: skip
ROWS.value(
    W, "outside of shard_map",
    lambda q, k, v: context_parallel_attention(q, k, v, axis_name="c"), [Q, K, K],
    AXIS.format("c") + "|in_specs=|out_specs=",
)  # fmt: skip
for name in (["c", "c"], ("c", "c")):
    ROWS.value(W, f"axis {name}", call(axis_name=name), [Q, K, K],
               "axis_name must have each mesh axis once|got ('c', 'c')")  # fmt: skip
ROWS.value(W, "axis 3", call(axis_name=3), [Q, K, K], AXIS.format(3))

# ---- q, k, v -------------------------------------------------------------------------

plain = call()
packed = call(cu_seqlens=([0, 16, 32], [0, 16, 64]))
for label, shapes, words in [
    ("q rank", [f32(8, 4, 8), K, K], "q must be [B, T, N, D]|got float32[8, 4, 8]"),
    ("k rank", [Q, f32(6, 2, 8), K], "k must be [B, S, K, D]|got float32[6, 2, 8]"),
    ("v rank", [Q, K, f32(2, 6, 8)], "v must be [B, S, K, Dv]|got float32[2, 6, 8]"),
    ("batch", [Q, f32(3, 6, 2, 8), f32(3, 6, 2, 8)], "k and v|batch, 2|[3, 6, 2, 8]"),
    ("keys of v", [Q, K, f32(2, 4, 2, 8)], "v|k's shape|float32[2, 4, 2, 8]"),
    ("heads of v", [Q, K, f32(2, 6, 4, 8)], "v|k's shape|float32[2, 6, 4, 8]"),
    ("head dims", [Q, f32(2, 6, 2, 16), K], "k|head dim, 8|float32[2, 6, 2, 16]"),
    ("heads", [Q, f32(2, 6, 3, 8), f32(2, 6, 3, 8)], "heads|multiple|got 4 and 3"),
    ("no heads", [Q, f32(2, 6, 0, 8), f32(2, 6, 0, 8)], "heads|positive|got 4 and 0"),
    ("dim 12", [f32(2, 8, 4, 12), f32(2, 6, 2, 12), K], "head dim of q and k|8|got 12"),
    ("dim 264", [Q, K, f32(2, 6, 2, 264)], "head dim of v|8 to 256|got 264"),
]:
    ROWS.value(W, label, plain, shapes, words)
ROWS.value(W, "packed q", packed, [Q, PK, PK],
           "q must be [total, N, D]|got float32[2, 8, 4, 8]|flatten")  # fmt: skip
ROWS.value(W, "packed v", packed, [PQ, PK, f32(8, 2, 8)], "v|k's shape|[8, 2, 8]")
ROWS.value(W, "not said to be packed", plain, [PQ, PK, PK], "q|[B, T, N, D]|cu_seqlens")
ROWS.kind(W, "dtype of k", plain, [Q, f32(*K.shape, dtype=BF16), K],
          "k|q's dtype, float32|got bfloat16[2, 6, 2, 8]|.astype(q.dtype)")  # fmt: skip
ROWS.kind(W, "dtype of v", plain, [Q, K, f32(*K.shape, dtype=F16)],
          "v|q's dtype, float32|got float16[2, 6, 2, 8]|.astype(q.dtype)")  # fmt: skip
ROWS.kind(W, "integers", plain, [i32(*Q.shape), i32(*K.shape), i32(*K.shape)],
          "q|bfloat16, float16 or float32|got int32[2, 8, 4, 8]|cast it")  # fmt: skip
text = lambda q, k: context_parallel_attention(q, k, "x", axis_name="c")  # noqa: E731
ROWS.kind(W, "v is a string", lambda q, k: inside(text)(q, k), [Q, K],
          "v must be an array|got str")  # fmt: skip

# ---- options -------------------------------------------------------------------------

CHOICES = {
    "strategy": "'auto', 'all_gather', 'ring', 'ulysses', 'ulysses_ring'",
    "layout": "'zigzag', 'contiguous'",
    "implementation": "None, 'cuda_sm90', 'cuda', 'xla'",
}
for name, choices in CHOICES.items():
    for value in ("rings", 3, ["ring"], "cudnn", "Zigzag"):
        words = f"{name} must be one of {choices}, got {value!r}"
        ROWS.value(W, f"{name}={value!r}", call(**{name: value}), [Q, K, K], words)
for name in ("strategy", "layout"):
    words = f"{name} must be one of {CHOICES[name]}, got None"
    ROWS.value(W, f"{name}=None", call(**{name: None}), [Q, K, K], words)
for name in ("causal", "deterministic", "return_lse", "compiler_options"):
    for value in (1, None, "yes"):
        words = f"{name} must be True or False|got {value!r}"
        ROWS.kind(W, f"{name}={value!r}", call(**{name: value}), [Q, K, K], words)
    words = f"{name} must be True or False|got a traced bool[]|cannot be traced"
    shapes = [Q, K, K, f32(dtype=jnp.bool)]
    ROWS.kind(W, f"traced {name}", given(name), shapes, words)
for value, row, words in [
    (3, ROWS.value, "(left, right)|got 3|(1023, 0)"),
    ((1, 2, 3), ROWS.value, "(left, right)|got (1, 2, 3)"),
    ((-1, 2), ROWS.value, "window[0]|negative|got -1|None"),
    ((1, 2.5), ROWS.kind, "window[1]|an integer|got 2.5|compiled in"),
]:
    row(W, f"window={value}", call(window=value), [Q, K, K], f"window|{words}")
for name in ("softcap", "scale"):
    numbers = f"{name} must be a number|got '1'|pass a Python float"
    ROWS.kind(W, f"{name} is text", call(**{name: "1"}), [Q, K, K], numbers)
    ROWS.value(W, f"{name} is nan", call(**{name: float("nan")}), [Q, K, K],
               f"{name} must be finite in float32, got nan|pass None")  # fmt: skip
    ROWS.kind(W, f"traced {name}", given(name), [Q, K, K, f32()],
              f"{name} must be a Python number|got a traced float32[]")  # fmt: skip
ROWS.value(W, "softcap=0", call(softcap=0.0), [Q, K, K], "softcap|positive, got 0.0")
sinks = given("sinks")
ROWS.value(W, "sinks", sinks, [Q, K, K, f32(2)], "sinks|float32[4]|got float32[2]")
ROWS.kind(W, "sinks dtype", sinks, [Q, K, K, i32(4)], "sinks|float32|got int32|.astype")

# ---- lengths that divide, heads that divide ------------------------------------------

odd = "{}, a device's rows in zigzag, must be a multiple of 2, got {}|pad_sequence"
q7, k5 = f32(2, 7, 4, 8), f32(2, 5, 2, 8)
ROWS.value(W, "odd T", plain, [q7, K, K], odd.format("T", 7) + "|kv_lens")
ROWS.value(W, "odd S", plain, [Q, k5, k5], odd.format("S", 5) + "|kv_lens")
ROWS.value(W, "odd packed T", packed, [f32(7, 4, 8), PK, PK], odd.format("T", 7))

ulysses = call(strategy="ulysses")
for heads, kv_heads in [(6, 2), (6, 6), (2, 2), (12, 3), (12, 6)]:
    shapes = [f32(2, 8, heads, 8), *[f32(2, 6, kv_heads, 8)] * 2]
    words = (
        "strategy='ulysses' needs|query heads that are a multiple of the 4 devices"
        f"|KV heads that are one or divide|got {heads} and {kv_heads}"
        "|'ulysses_ring'|'ring'"
    )
    ROWS.value(W, f"ulysses, {heads} and {kv_heads} heads", ulysses, shapes, words)

# ---- segments and lengths ------------------------------------------------------------

segments = given("segment_ids")
ROWS.value(W, "one segment_ids, T not S", segments, [Q, K, K, i32(2, 8)],
           "segment_ids|pair|T = 8|S = 6")  # fmt: skip
ROWS.value(W, "segment_ids of all devices' rows", segments, [Q, Q, Q, i32(2, 32)],
           "segment_ids|int32[2, 8]|got int32[2, 32]")  # fmt: skip
ROWS.value(W, "segment_ids of keys", segments, [Q, K, K, (i32(2, 8), i32(2, 8))],
           "segment_ids[1]|int32[2, 6]|got int32[2, 8]")  # fmt: skip
ROWS.value(W, "three segment_ids", segments, [Q, K, K, (i32(2, 8),) * 3],
           "segment_ids|pair|got 3 arrays")  # fmt: skip
ROWS.kind(W, "segment_ids dtype", segments, [Q, Q, Q, f32(2, 8)],
          "segment_ids|int32|got float32[2, 8]|.astype(jnp.int32)")  # fmt: skip
for kind in (on_host, np.asarray, list):  # values are known in any of these
    for value in (-(2**31), -(2**31) + 1):
        ids = kind([[0] * 7 + [value]] * 2)
        words = f"segment_ids must be above {-(2**31) + 1}, got {value}|two smallest"
        label = f"segment_ids of {value}, {kind.__name__}"
        ROWS.value(W, label, call(segment_ids=ids), [Q, Q, Q], words)
        label = f"segment_ids[1] of {value}, {kind.__name__}"
        pair = (on_host([[0] * 8] * 2), ids)
        ROWS.value(W, label, call(segment_ids=pair), [Q, Q, Q], words)
for name in ("q_lens", "kv_lens"):
    at = given(name)
    ROWS.value(W, f"{name} size", at, [Q, K, K, i32(3)], f"{name}|[2]|got int32[3]")
    ROWS.value(W, f"{name} scalar", at, [Q, K, K, i32()],
               f"{name}|int32[2]|got int32[]|jnp.full")  # fmt: skip
    ROWS.kind(W, f"{name} dtype", at, [Q, K, K, f32(2)],
              f"{name}|int32|got float32[2]|astype")  # fmt: skip
    documents = given(name, cu_seqlens=[0, 16, 32])
    ROWS.value(W, f"{name} of documents", documents, [PQ, PQ, PQ, i32(4)],
               f"{name}|[2]|got int32[4]")  # fmt: skip

# ---- packed documents ----------------------------------------------------------------

both = given("segment_ids", cu_seqlens=([0, 16, 32], [0, 16, 64]))
ROWS.value(W, "segments of documents", both, [PQ, PK, PK, i32(1, 8)],
           "segment_ids cannot be combined with cu_seqlens|to itself")  # fmt: skip
for count in (0, 3):
    cu = ([0, 32],) * count
    ROWS.value(W, f"{count} cu_seqlens", call(cu_seqlens=cu), [PQ, PQ, PQ],
               f"cu_seqlens|pair|got a tuple of {count}")  # fmt: skip
ROWS.value(
    W, "traced cu_seqlens apart", given("cu_seqlens"), [PQ, PK, PK, (i32(3), i32(4))],
    "cu_seqlens|as many documents of queries as of keys|got int32[3] and int32[4]",
)  # fmt: skip
ROWS.value(W, "one cu_seqlens, T not S", given("cu_seqlens"), [PQ, PK, PK, i32(3)],
           "one cu_seqlens|got 8 and 16|a pair (cu_q, cu_kv)")  # fmt: skip
for label, cu, words in [
    ("of q", ([0, 15, 32], [0, 16, 64]), "cu_seqlens[0]|multiples of 8|got 15 at 1"),
    ("of k", ([0, 16, 32], [0, 16, 60]), "cu_seqlens[1]|multiples of 8|got 60 at 2"),
]:
    ROWS.value(W, f"cut cu_seqlens {label}", call(cu_seqlens=cu), [PQ, PK, PK],
               f"{words}|pad_documents")  # fmt: skip

# What several functions say of boundaries of 32 rows: the layouts have them whole, the
# calls inside of shard_map 8 each.
CUTS = {
    W: (call, [PQ, PQ, PQ]),
    "to_zigzag": (lambda **o: lambda x: to_zigzag(x, 4, axis=0, **o), [f32(32)]),
    "from_zigzag": (lambda **o: lambda x: from_zigzag(x, 4, axis=0, **o), [f32(32)]),
    "shard_positions": (
        lambda **o: lambda: inside(lambda: shard_positions(8, axis_name="c", **o))(),
        [],
    ),
    "pad_documents": (lambda cu_seqlens: lambda x: pad_documents(x, cu_seqlens, 4)[0],
                      [f32(32)]),
}  # fmt: skip
RISE = "must rise from at least 0 to at most 32|cumulative sum of the documents'|got "
for label, cu, words in [
    ("falls", [0, 24, 16, 32], RISE + "[0, 24, 16, 32]"),
    ("begins below 0", [-8, 32], RISE + "[-8, 32]"),
    ("ends beyond", [0, 40], RISE + "[0, 40]"),
    ("one boundary", [0], "int32[documents + 1]|at least one document|got int32[1]"),
    ("none", [], "int32[documents + 1]|at least one document|got int32[0]"),
    ("rank", [[0, 32]], "int32[documents + 1]|got int32[1, 2]|.reshape(-1)"),
    ("wide", [0, 2**40], "fit in int32|1099511627776"),
    ("ragged", [[0], [1, 2]], "int32[documents + 1]|differ in length|[[0], [1, 2]]"),
    ("floats", [0, 16.5, 32], "int32[documents + 1]|got float64[3]|.astype(jnp.int32)"),
    ("None", [None, 32], "int32[documents + 1]|got [None, 32]|pass integers"),
    ("a number", 5, "an array|got int"),
]:
    row = ROWS.kind if label in ("floats", "None", "a number") else ROWS.value
    for where, (make, shapes) in CUTS.items():
        bad = make(cu_seqlens=cu)
        row(where, f"cu_seqlens: {label}", bad, shapes, f"cu_seqlens|{words}")
for kind in (list, np.asarray, on_host):
    for where, (make, shapes) in CUTS.items():
        if where != "pad_documents":
            bad = make(cu_seqlens=kind([0, 8, 20, 32]))
            words = "cu_seqlens must be multiples of 8|got 20 at 2|pad_documents"
            label = f"cu_seqlens that do not divide, {kind.__name__}"
            ROWS.value(where, label, bad, shapes, words)

# ---- layouts -------------------------------------------------------------------------

X = f32(2, 16)
for where, f in (("to_zigzag", to_zigzag), ("from_zigzag", from_zigzag)):
    of = lambda f=f, **o: lambda x: f(x, 4, **o)  # noqa: E731
    words = "dim 1 of x must be a multiple of 8, got 12|pad_sequence"
    ROWS.value(where, "length", of(), [f32(2, 12)], words)
    words = "dim -2 of x must be a multiple of 8, got 2|pad_sequence"
    ROWS.value(where, "length of axis -2", of(axis=-2), [X], words)
    cu = of(cu_seqlens=[0, 8], axis=0)
    words = "dim 0 of x must be a multiple of 8, got 12"
    ROWS.value(where, "length of documents", cu, [f32(12)], words)
AXES = {
    "to_zigzag": lambda x, axis: to_zigzag(x, 4, axis=axis),
    "from_zigzag": lambda x, axis: from_zigzag(x, 4, axis=axis),
    "pad_sequence": lambda x, axis: pad_sequence(x, 4, axis=axis),
    "pad_documents": lambda x, axis: pad_documents(x, [0, 2], 4, axis=axis)[0],
}
for where, f in AXES.items():
    for axis in (2, -3):
        words = f"axis must be a dim of x, from -2 to 1, got {axis}|float32[2, 16]"
        bad = lambda x, f=f, axis=axis: f(x, axis)  # noqa: E731
        ROWS.value(where, f"axis={axis}", bad, [X], words)
    for axis in (1.0, None, "a"):
        words = f"axis must be an integer, got {axis!r}"
        bad = lambda x, f=f, axis=axis: f(x, axis)  # noqa: E731
        ROWS.kind(where, f"axis={axis}", bad, [X], words)
SIZES = {
    "to_zigzag": lambda x, size: to_zigzag(x, size),
    "from_zigzag": lambda x, size: from_zigzag(x, size),
    "pad_sequence": lambda x, size: pad_sequence(x, size),
    "pad_documents": lambda x, size: pad_documents(x, [0, 2], size)[0],
}
for where, f in SIZES.items():
    for size in (0, -4, 2.0, None, True):
        words = f"size must be an integer of at least 1, got {size!r}"
        bad = lambda x, f=f, size=size: f(x, size)  # noqa: E731
        ROWS.value(where, f"size={size}", bad, [X], words)
    ROWS.kind(where, "x is a string", lambda f=f: f("x", 4), [],
              "x must be an array|got str|JAX or NumPy")  # fmt: skip
padding = lambda x: pad_sequence(x, 4, layout="rows")  # noqa: E731
ROWS.value("pad_sequence", "layout", padding, [X], "layout|'zigzag', 'contiguous'|rows")

# ---- positions -----------------------------------------------------------------------


def own(length=8, **options):
    options = {"axis_name": "c"} | options
    return lambda: inside(lambda: shard_positions(length, **options))()


S = "shard_positions"
ROWS.value(S, "layout", own(layout="rows"), [], "layout|'zigzag', 'contiguous'|'rows'")
for value in (0, -8, 2.5, None):
    words = f"length must be an integer of at least 1, got {value!r}"
    ROWS.value(S, f"length={value}", own(value), [], words)
for name in ("d", ("c", "d")):
    ROWS.value(S, f"axis {name}", own(axis_name=name), [], AXIS.format(name))
ROWS.value(S, "an axis twice", own(axis_name=("c", "c")), [],
           "axis_name must have each mesh axis once|got ('c', 'c')")  # fmt: skip
ROWS.value(S, "outside", lambda: shard_positions(8, axis_name="c"), [],
           AXIS.format("c"))  # fmt: skip
# What was passed is 7, not the 28 rows of all devices.
ROWS.value(S, "odd length", own(7), [], "length|7|pad_sequence")


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_calls_are_refused_while_tracing(bad):
    check_row(bad)


def test_traced_boundaries_of_padding():
    """They would decide a size."""
    words = "cu_seqlens|integers on the host|traced|the size of the result"
    f = jax.jit(lambda x, cu: pad_documents(x, cu, 4)[0])
    check("pad_documents", TypeError, words, lambda: jax.eval_shape(f, X, i32(2)))
    late = lambda: pad_documents(jnp.ones((12, 2)), [3, 10], 2)  # noqa: E731
    check("pad_documents", ValueError, "must begin with 0, got 3|belong to none", late)
    part = jax.jit(lambda x, end: pad_documents(x, [0, end], 4)[0])
    check("pad_documents", TypeError, words, lambda: jax.eval_shape(part, X, i32()))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("implementation", ["cuda", "cuda_sm90"])
def test_cuda_on_the_cpu(implementation, strategy):
    """Known where a call is lowered, as in flash_attention."""
    f = call(implementation=implementation, strategy=strategy)
    x = f32(2, 8, 4, 8, dtype=BF16)
    words = f"implementation='{implementation}'|GPU|cpu|implementation='xla' or None"
    check(W, ValueError, words, lambda: jax.jit(f).lower(x, x, x))


def test_ulysses_serves_what_its_message_says():
    """KV heads that are one or divide the devices' number, or are a multiple of it."""
    for heads, kv_heads in [(4, 1), (4, 2), (8, 4), (8, 8), (12, 1)]:
        q, k = f32(2, 8, heads, 8), f32(2, 6, kv_heads, 8)
        got = jax.eval_shape(ulysses, q, k, k)
        assert got.shape == (8, 8, heads, 8)
