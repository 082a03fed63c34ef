"""Bad input is refused while tracing, by a message that says what, where and the fix.

Every message opens with the function's name. The rows list words that it must hold: the
argument, what was expected, what came, and the fix where there is one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import LAYOUT_NAMES, SPEC, Bad, Table, check, check_row, f32, i32

import jax_kvblock as kv

BLOCK, UNIVERSAL, PACKED = f32(3, 2, 4, 5, 6), f32(5, 3, 2, 4, 6), f32(3, 2, 120)
PIECE = f32(4, 5, 6)
SIX = [PIECE] * 6
b2u, u2b = kv.block_to_universal, kv.universal_to_block
b2o, o2b = kv.block_to_operational, kv.operational_to_block
convert = kv.convert_blocks

# ---- one array -----------------------------------------------------------------------

FOUR = [
    ("block_to_universal", b2u, BLOCK, "blocks", "nl, no, nt, nh, hd"),
    ("universal_to_block", u2b, UNIVERSAL, "universal", "nh, nl, no, nt, hd"),
    ("block_to_operational", b2o, BLOCK, "blocks", "nl, no, nt, nh, hd"),
    (
        "operational_to_block",
        lambda x, layout="NHD", *, spec=SPEC, **how: o2b(x, layout, spec=spec, **how),
        PACKED,
        "operational",
        "nl, no, nt·nh·hd",
    ),
]
ROWS = Table()
for where, f, good, name, axes in FOUR:
    shown = f"got float32[{', '.join(map(str, good.shape))}]"
    wider, half = SPEC.replace(head_dim=7), SPEC.replace(dtype=jnp.bfloat16)
    at = f"{name} must have shape [..., {axes}]"
    four_rows = [
        ("rank", {}, f32(2, 3), ValueError, f"{at}|got float32[2, 3]"),
        ("spec", {"spec": wider}, good, ValueError, f"{at} = [..., |{shown}"),
        ("dtype", {"spec": half}, good, TypeError, f"{name}|bfloat16|{shown}|cast it"),
        ("not a spec", {"spec": (3, 2)}, good, TypeError, "BlockSpec|got tuple|build"),
        ("case", {"layout": "nhd"}, good, ValueError, "layout|'NHD', 'HND'|got 'nhd'"),
        ("layout", {"layout": "universal"}, good, ValueError, "'HND'|got 'universal'"),
        ("no layout", {"layout": None}, good, ValueError, "layout|'HND'|got None"),
    ]
    for label, how, x, error, words in four_rows:
        call = lambda x, f=f, how=how: f(x, **how)  # noqa: E731
        ROWS.append(Bad(where, label, call, (x,), error, words))
    for value in (3, None, "NHD", {1: 2}):
        call = lambda f=f, value=value: f(value)  # noqa: E731
        words = f"{name} must be an array|got {type(value).__name__}|jnp.asarray"
        ROWS.append(Bad(where, f"is {value}", call, (), TypeError, words))


W = "block_to_universal"
ROWS.value(W, "zero extent", b2u, [f32(3, 0, 4, 5, 6)], "blocks|at least 1|[3, 0, 4, 5")
ROWS.value(W, "three outer", b2u, [f32(3, 3, 4, 5, 6)], "blocks|no 1 or 2|no = 3")
ROWS.kind(W, "int4", b2u, [f32(*BLOCK.shape, dtype=jnp.int4)], "blocks|byte|int4|pack")
ROWS.value(
    W, "implementation", lambda x: b2u(x, implementation="cuda"), [BLOCK],
    "implementation|None, 'kernel', 'xla'|got 'cuda'",
)  # fmt: skip
ROWS.value(
    "universal_to_block", "implementation",
    lambda x: u2b(x, implementation="auto"), [UNIVERSAL],
    "implementation|None, 'kernel', 'xla'|got 'auto'",
)  # fmt: skip
for W, f, good in (
    ("block_to_operational", b2o, BLOCK),
    ("operational_to_block", FOUR[3][1], PACKED),
):
    for value in ("cuda", "xla", "Kernel"):
        ROWS.value(
            W, f"backend {value}", lambda x, f=f, b=value: f(x, backend=b), [good],
            f"backend|'auto', 'kernel', 'batch', 'async'|got {value!r}",
        )  # fmt: skip
    for value in ("cuda", "auto"):
        ROWS.value(
            W, f"implementation {value}",
            lambda x, f=f, name=value: f(x, implementation=name), [good],
            f"implementation|None, 'kernel', 'batch', 'async', 'xla'|got {value!r}",
        )  # fmt: skip
    ROWS.kind(
        W, "both names",
        lambda x, f=f: f(x, implementation="kernel", backend="batch"), [good],
        "implementation|once|'kernel'|backend='batch'|first name|leave backend out",
    )  # fmt: skip

W = "operational_to_block"
ROWS.value(W, "no spec", o2b, [PACKED], "spec=|num_kv_heads=|head_dim=")
ROWS.value(
    W, "half a spec", lambda x: o2b(x, num_kv_heads=5), [PACKED], "spec=|head_dim="
)
ROWS.value(
    W, "indivisible", lambda x: o2b(x, num_kv_heads=7, head_dim=6), [PACKED],
    "operational|inner = 120|multiple|7·6",
)  # fmt: skip
ROWS.value(
    W, "no heads", lambda x: o2b(x, num_kv_heads=0, head_dim=6), [PACKED],
    "num_kv_heads|at least 1|got 0",
)  # fmt: skip
ROWS.value(
    W, "flat", lambda x: o2b(x, num_kv_heads=5, head_dim=6), [f32(2, 120)],
    "operational|[..., nl, no, inner]|got float32[2, 120]",
)  # fmt: skip
ROWS.value(
    W, "three outer", lambda x: o2b(x, num_kv_heads=5, head_dim=6), [f32(3, 3, 120)],
    "operational|no|3",
)  # fmt: skip

W = "convert_blocks"
ROWS.kind(
    W, "no spec", lambda x: convert(x, "NHD", "HND", None), [BLOCK], "spec|got None"
)
ROWS.value(
    W, "src", lambda x: convert(x, "NHX", "HND", SPEC), [BLOCK],
    f"src|one of {LAYOUT_NAMES}|got 'NHX'",
)  # fmt: skip
ROWS.value(
    W, "dst", lambda x: convert(x, "NHD", None, SPEC), [BLOCK],
    f"dst|one of {LAYOUT_NAMES}|got None",
)  # fmt: skip
ROWS.value(
    W, "shape", lambda x: convert(x, "HND", "NHD", SPEC), [BLOCK],
    "x must have shape|nh, nt|3, 2, 5, 4, 6|HND of the spec|got float32[3, 2, 4, 5, 6]",
)  # fmt: skip
ROWS.kind(
    W, "dtype", lambda x: convert(x, "NHD", "HND", SPEC), [i32(*BLOCK.shape)],
    "x|dtype float32|got int32[3, 2, 4, 5, 6]|cast it",
)  # fmt: skip

# ---- lists ---------------------------------------------------------------------------

W = "block_to_universal"
ROWS.value(W, "ragged", b2u, [[SIX, SIX[:4]]], "blocks[0] has 6|blocks[1] has 4")
ROWS.value(W, "array in lists", b2u, [[SIX, PIECE]], "list|blocks[1]")
ROWS.value(W, "list in arrays", b2u, [[BLOCK, SIX]], "list of arrays|blocks[1]")
ROWS.kind(
    W, "mixed dtypes", b2u, [[SIX, [*SIX[:5], i32(4, 5, 6)]]],
    "one dtype|blocks[0][0] is float32|blocks[1][5] is int32[4, 5, 6]|cast",
)  # fmt: skip
ROWS.value(
    W, "mixed shapes", b2u, [[SIX, [*SIX[:5], f32(4, 6, 6)]]],
    "one shape|blocks[0][0] is float32[4, 5, 6]|blocks[1][5] is float32[4, 6, 6]",
)  # fmt: skip
ROWS.kind(
    W, "not a piece", lambda x: b2u([x, [*x[:5], 7]]), [SIX],
    "blocks[1][5] must be an array|got int|jnp.asarray",
)  # fmt: skip
ROWS.value(W, "no pieces", b2u, [[[], []]], "blocks|no arrays")
ROWS.value(W, "odd pieces", b2u, [[SIX[:5]]], "blocks|nl·no|5|num_outer=2")
ROWS.value(W, "three outer", lambda x: b2u(x, num_outer=3), [[SIX]], "num_outer|got 3")
ROWS.value(W, "no outer", lambda x: b2u(x, num_outer=0), [[SIX]], "num_outer|got 0")
ROWS.value(
    W, "pieces of the spec", lambda x: b2u(x, spec=SPEC), [[SIX[:4]]],
    "blocks|nl·no = 6|got 4",
)  # fmt: skip
ROWS.value(W, "piece rank", b2u, [[[f32(4, 5)] * 6]], "nt, nh, hd|got float32[4, 5]")
ROWS.value(
    W, "piece of the spec", lambda x: b2u(x, "HND", spec=SPEC), [[SIX]],
    "nh, nt, hd|[5, 4, 6]|got float32[4, 5, 6]",
)  # fmt: skip
ROWS.value(
    "universal_to_block", "mixed shapes", u2b, [[UNIVERSAL, f32(5, 3, 2, 4, 7)]],
    "universal[0] is float32[5, 3, 2, 4, 6]|universal[1] is float32[5, 3, 2, 4, 7]",
)  # fmt: skip
ROWS.value(
    "universal_to_block", "batched item", u2b, [[f32(1, 5, 3, 2, 4, 6)]],
    "universal|[nh, nl, no, nt, hd]|got float32[1, 5, 3, 2, 4, 6]",
)  # fmt: skip
ROWS.value(
    "universal_to_block", "lists", u2b, [[[UNIVERSAL]]], "universal[0] is a list"
)
ROWS.value("block_to_universal", "empty", lambda: b2u([], "X"), [], "layout|got 'X'")
ROWS.kind(
    "block_to_universal", "empty spec", lambda: b2u([], spec=3), [], "BlockSpec|int"
)


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_blocks_are_refused_while_tracing(bad):
    check_row(bad)


def test_pieces_on_different_devices():
    """Known only for arrays that exist, so this one waits for no trace."""
    here, there = jax.devices("cpu")[:2]
    pieces = [[jax.device_put(np.zeros((4, 5, 6)), here) for _ in range(6)]]
    pieces.append([*pieces[0][:5], jax.device_put(pieces[0][5], there)])
    words = f"same devices|blocks[0][0] is on {here}|blocks[1][5] on {there}|device_put"
    check("block_to_universal", ValueError, words, lambda: b2u(pieces))


def test_random_keys_are_not_blocks():
    keys = jax.random.split(jax.random.key(0), (1, 1, 1, 1, 1))
    words = "blocks|key|key_data"
    check("block_to_universal", TypeError, words, lambda: b2u(keys))


# ---- layouts and specs ---------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        "",
        "L O T H",
        "L L O T H D",
        "L O T H D X",
        "l o t h d",
        "L O, T H D",
        "L O (T H D",
        "L O T H D)",
        ")L O T H D(",
        "L O (T (H D))",
        "L O ((T H) D)",
        "L O () T H D",
    ],
)
def test_layout_axes(axes):
    words = f"axes|L, O, T, H and D once|'H L O T D'|got {axes!r}"
    check("Layout", ValueError, words, lambda: kv.Layout("mine", axes))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_layers": 0}, ValueError, "num_layers|at least 1|got 0"),
        ({"block_size": -4}, ValueError, "block_size|at least 1|got -4"),
        ({"num_kv_heads": 5.0}, ValueError, "num_kv_heads|integer|got 5.0"),
        ({"head_dim": True}, ValueError, "head_dim|integer|got True"),
        ({"num_outer": 3}, ValueError, "num_outer|2 (K and V)|1|got 3"),
        ({"dtype": jnp.int4}, TypeError, "dtype|smaller than a byte|int4|uint8"),
        ({"dtype": jnp.float4_e2m1fn}, TypeError, "dtype|smaller than a byte|float4"),
        ({"dtype": object}, TypeError, "dtype|1, 2, 4, 8 or 16 bytes|object"),
        ({"dtype": "float33"}, TypeError, "dtype|float33"),
        ({"dtype": None}, TypeError, "dtype|jnp.bfloat16|got None"),
        ({"layout": "NDH"}, ValueError, f"layout|one of {LAYOUT_NAMES}|got 'NDH'"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_block_spec(changes, error, words):
    check("BlockSpec", error, words, lambda: SPEC.replace(**changes))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: [x], lambda x: [[*x[0]]]])
def test_a_dtype_that_jax_would_cut(form):
    spec = SPEC.replace(num_layers=1, dtype=np.float64)
    blocks = form(np.zeros((1, 2, 4, 5, 6)))
    words = "x|float64|float32|jax_enable_x64"
    call = lambda: kv.convert_blocks(blocks, "NHD", "universal", spec)  # noqa: E731
    check("convert_blocks", TypeError, words, call)


def test_the_integers_of_a_spec_are_python_s():
    """Whose products do not wrap; a spec of arrays without dims is hashable."""
    many = np.int32(2**20)
    spec = SPEC.replace(num_layers=many, head_dim=many, block_size=np.array(4))
    assert spec.block_bytes == 2**40 * 2 * 4 * 5 * 4
    assert {type(size) for size in spec.sizes.values()} == {int}
    assert hash(spec) == hash(SPEC.replace(num_layers=2**20, head_dim=2**20))
