"""Every pair of options in one call: exact where it is allowed, an error where not."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_exact
from attention_model import (
    BF16,
    F16,
    F32,
    ON_GPU,
    cast,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    served,
    truth,
    who_attends,
)
from messages import check

# ---- the options ---------------------------------------------------------------------

i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
SHAPE = {"q_len": 130, "kv_len": 150}  # beyond one tile, both of them


def sizes(call):
    return call.arrays["q"].shape[-3], call.arrays["k"].shape[-3]


def segments(rng, call):
    return {"segment_ids": jnp.asarray(draw_segments(rng, 2, sizes(call)[0]))}


def segment_pair(rng, call):
    t, s = sizes(call)
    return {"segment_ids": (draw_segments(rng, 2, t), draw_segments(rng, 2, s))}


OPTIONS = {
    "causal": lambda rng, call: {"causal": True},
    "window": lambda rng, call: {"window": (40, 30)},
    "left window": lambda rng, call: {"window": (50, None)},
    "segment_ids": segments,
    "pair of segment_ids": segment_pair,
    "q_lens": lambda rng, call: {"q_lens": i32(129, 77)},
    "kv_lens": lambda rng, call: {"kv_lens": i32(90, sizes(call)[1])},
    "cu_seqlens": lambda rng, call: {"cu_seqlens": (i32(3, 70, 128), i32(0, 66, 129))},
    "shared bias": lambda rng, call: {
        "bias": draw_bias(rng, call, (True, True), F32),
    },
    "bias of the inputs' dtype": lambda rng, call: {
        "bias": draw_bias(rng, call, (False, False), call.arrays["q"].dtype)
    },
    "softcap": lambda rng, call: {"softcap": 1.5},
    "sinks": lambda rng, call: {"sinks": cast([2, -1, 0.5, 4], F32)},
    "scale": lambda rng, call: {"scale": 0.7},
    "q_offset": lambda rng, call: {"q_offset": i32(9, -20)},
    "kv_offset": lambda rng, call: {"kv_offset": jnp.int32(-7)},
    "tiles": lambda rng, call: {"tiles": draw_tiles(rng, call, share=0.8)},
    "deterministic": lambda rng, call: {"deterministic": True},
    "no groups": lambda rng, call: {},
    "one key head": lambda rng, call: {},
    "value dim": lambda rng, call: {},
}
SHAPES = {
    "segment_ids": {"kv_len": 130},
    "cu_seqlens": {"packed": True},
    "no groups": {"kv_heads": 4},
    "one key head": {"kv_heads": 1},
    "value dim": {"value_dim": 24},
}
# Two values of one argument.
ALTERNATIVES = [
    {"window", "left window"},
    {"segment_ids", "pair of segment_ids"},
    {"shared bias", "bias of the inputs' dtype"},
    {"no groups", "one key head"},
]
ARGUMENT = {
    "segment_ids": "segment_ids",
    "pair of segment_ids": "segment_ids",
    "q_lens": "q_lens",
    "kv_lens": "kv_lens",
    "shared bias": "bias",
    "bias of the inputs' dtype": "bias",
    "tiles": "tiles",
}
FORBIDDEN = [("cu_seqlens", other) for other in ARGUMENT]
MASKLESS = {"q_offset", "kv_offset"}  # these shift masks, so there must be one

Pair = frozenset
PAIRS = {
    Pair(pair)
    for pair in itertools.combinations(OPTIONS, 2)
    if set(pair) not in ALTERNATIVES
    and Pair(pair) not in {Pair(forbidden) for forbidden in FORBIDDEN}
}


def allowed(row) -> bool:
    return all(Pair(pair) in PAIRS for pair in itertools.combinations(row, 2))


def cover(width: int) -> list[tuple[str, ...]]:
    """Rows of options that hold every allowed pair: greedy, the same every time."""
    left, rows = set(PAIRS), []
    while left:
        seed = next(p for p in itertools.combinations(OPTIONS, 2) if Pair(p) in left)
        row = list(seed)
        while len(row) < width:
            new = {
                name: sum(Pair((name, other)) in left for other in row)
                for name in OPTIONS
                if name not in row and allowed([*row, name])
            }
            if not new or not max(new.values()):
                break
            row.append(max(new, key=new.get))
        left -= {Pair(pair) for pair in itertools.combinations(row, 2)}
        rows.append(tuple(row))
    return rows


ROWS = cover(6)


def build(rng, dtype, names):
    shape = dict(SHAPE)
    for name in names:
        shape |= SHAPES.get(name, {})
    call = draw(rng, dtype, **shape)
    for name in OPTIONS:  # in one order, whatever the row's
        if name in names:
            call = call.replace(**OPTIONS[name](rng, call))
    if MASKLESS & set(names) and not {"causal", "window", "left window"} & set(names):
        call = call.replace(causal=True)
    return call


# ---- the table -----------------------------------------------------------------------


def test_every_allowed_pair_is_in_a_row():
    covered = {Pair(p) for row in ROWS for p in itertools.combinations(row, 2)}
    assert covered == PAIRS
    assert len(PAIRS) == 20 * 19 // 2 - len(ALTERNATIVES) - len(FORBIDDEN)


WITHOUT_EFFECT = {"deterministic", "no groups", "one key head", "value dim"}


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in WITHOUT_EFFECT])
def test_every_option_changes_the_truth(rng, name):
    """Or its rows would test nothing."""
    call = build(rng, F32, [name])
    if name == "cu_seqlens":
        assert not who_attends(call)[0].all()
        return
    added = {*call.operands, *call.static, *call.arrays} - {"q", "k", "v"}
    if name in MASKLESS:
        added -= {"causal"}
    without = call.replace(**dict.fromkeys(added))
    assert np.abs(truth(call)["out"] - truth(without)["out"]).max() > 1e-3


def dtypes_of(row):
    """All of them on a GPU; on the CPU float32, and every other row a half."""
    if ON_GPU:
        return F32, BF16, F16
    return (F32, (BF16, F16)[row // 2 % 2])[: 2 - row % 2]


@pytest.mark.wide
@pytest.mark.parametrize(
    "implementation, dtype, names",
    [
        pytest.param(*turn.values, row, id=f"{turn.id}-{', '.join(row)}")
        for i, row in enumerate(ROWS)
        for dtype in dtypes_of(i)
        for turn in served(dtype)
    ],
)
def test_pairs_of_options(rng, implementation, dtype, names):
    call = build(rng, dtype, names)
    mask, _ = who_attends(call)
    assert mask.any(-1).mean() > 0.2, "almost nothing attends: the row tests nothing"
    assert_exact(call, implementation)


@pytest.mark.parametrize("other", ARGUMENT)
def test_forbidden_pairs(rng, other):
    """Refused by arrays and by shapes alone."""
    call = build(rng, F32, ["cu_seqlens"])
    dense = build(rng, F32, [other])
    arrays = {ARGUMENT[other]: OPTIONS[other](rng, dense)[ARGUMENT[other]]}
    words = f"cu_seqlens|{ARGUMENT[other]}"
    check("flash_attention", ValueError, words, call.replace(**arrays).run)
    trace = lambda: jax.eval_shape(lambda x: call.replace(**x).run(), arrays)  # noqa: E731
    check("flash_attention", ValueError, words, trace)
