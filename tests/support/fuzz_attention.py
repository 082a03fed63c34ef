"""Attention structs for the fuzz: drawn mostly right and partly hostile, with a model.

`is_right` is what attention.h promises to serve, with unbounded integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attention_launches import (
    E4M3,
    F32,
    I8,
    Attention,
    Backward,
    BlockScales,
    Call,
    Forward,
)
from c_interface import BACKWARD_BIAS, BACKWARD_KV, FORWARD
from hypothesis import strategies as st

# Addresses where nothing lies: whoever reads an array crashes.
ARRAY, ODD = 4096, 4097
PAIRS = ("cu_q", "cu_kv"), ("q_lens", "kv_lens")
SEGMENTS = ("q_segments", "kv_segments", "q_segment_ranges", "kv_segment_ranges")
TILES = ("tile_indices", "tile_counts")
TRANSPOSED = ("tile_indices_t", "tile_counts_t")
MASKS = ("tile_map", "tile_masks")
SCALES = ("q_scales", "k_scales", "v_scales")  # here (address, batch, blocks)
NO_SCALES = (None, 0, 0)
EIGHT_BITS = (E4M3, I8)
WIDE = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv", "dq_accum", "workspace")
NARROW = (
    *("cu_q", "cu_kv", "q_lens", "kv_lens", "shift", "q_segments", "kv_segments"),
    *(*TILES, *TRANSPOSED, *MASKS, "sinks", "lse", "base", "delta"),
)
NUMBERS = (-(2**31), -1, 0, 1, 2, 3, 8, 63, 128, 256, 2**16, 2**30, 2**31 - 1)
LONGS = (*NUMBERS, 2**30 - 256, 2**30 - 255, 2**31, 2**62, 2**63 - 1, -(2**63))
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 1e30, 30.0, 1024.0)
INT64 = 2**63

Fields = dict[str, Any]


def kinds() -> dict[str, Any]:
    """Each field's hostile values."""
    hostile: dict[str, Any] = {}
    addresses = st.sampled_from((None, ARRAY, ODD, ARRAY + 2, ARRAY + 4, ARRAY + 8))
    numbers = st.sampled_from(NUMBERS)
    for name, kind in Attention._fields_:
        code = getattr(kind, "_type_", "P")
        hostile[name] = {
            "i": numbers,
            "l": st.sampled_from(LONGS),
            "f": st.sampled_from(FLOATS),
            "P": addresses,
        }[code]
    hostile |= dict.fromkeys(SCALES, st.tuples(addresses, numbers, numbers))
    return hostile


HOSTILE_FIELDS = kinds()
EVERY = sorted(HOSTILE_FIELDS)


@st.composite
def calls(draw: Any) -> tuple[Fields, int]:
    """A struct and its pass: right, and then perhaps up to three fields replaced."""
    which = draw(st.integers(0, 3))
    fields = draw(right(which))
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        given = sorted(name for name in fields if fields[name] == ARRAY)
        name = draw(st.sampled_from(draw(st.sampled_from((given, EVERY)))))
        fields[name] = draw(HOSTILE_FIELDS[name])
    return fields, which


@st.composite
def right(draw: Any, which: int) -> Fields:
    size = st.integers(0, 300)
    group, kv_heads, batch = draw(st.tuples(*[st.integers(1, 3)] * 3))
    heads = group * kv_heads
    a: Fields = {}
    for name, kind in Attention._fields_:
        a[name] = 0 if getattr(kind, "_type_", "P") != "P" else None
    a |= {"batch": batch, "num_heads": heads, "num_kv_heads": kv_heads}
    dtypes = st.sampled_from((0, 1, F32, *(EIGHT_BITS if which == FORWARD else ())))
    a |= {"q_len": draw(size), "kv_len": draw(size), "dtype": draw(dtypes)}
    narrow = a["dtype"] in EIGHT_BITS
    most = 16 if a["dtype"] == F32 and which != FORWARD else 32
    step, most = (16, 8) if narrow else (8, most)
    a |= {"head_dim": step * draw(st.integers(1, most)), "scale": 0.125}
    a |= {"value_dim": step * draw(st.integers(1, most))}
    a["kernels"] = 0 if a["dtype"] == F32 else narrow or draw(st.integers(0, 1))
    a |= dict.fromkeys(SCALES, NO_SCALES)
    a["precision"] = draw(st.integers(0, 1))
    a |= {"window_left": draw(st.integers(-1, 9)), "window_right": -1}
    a["softcap"] = 0.0 if narrow else draw(st.sampled_from((0.0, 30.0, 2000.0)))
    given = ["q", "k", "v", "o", "lse", "d_o", "delta", "dk", "dv", "dbias", "dq"]
    if which == BACKWARD_KV:  # with or without dq
        if a["kernels"] and draw(st.booleans()):
            given.remove("dq")
        elif not a["kernels"] and draw(st.booleans()):
            given.append("dq_accum")
    options = draw(st.sets(st.sampled_from(("segments", "lens", "tiles", "sinks"))))
    packed = not narrow and which != BACKWARD_BIAS and draw(st.integers(0, 3)) == 0
    if packed:
        given += PAIRS[0]
        options &= {"sinks"}
    shared = st.sampled_from((1, batch)), st.sampled_from((1, heads))
    if narrow:
        options -= {"tiles"}
        for name, rows in zip(SCALES, (a["q_len"], a["kv_len"], 0), strict=True):
            blocks = draw(st.sampled_from((1, max(-(-rows // 128), 1))))
            a[name] = (ARRAY, draw(shared[0]), blocks)
    elif which == BACKWARD_BIAS or (not packed and draw(st.booleans())):
        a |= {"bias": ARRAY, "bias_dtype": draw(st.sampled_from((a["dtype"], 2)))}
        a["bias_batch"], a["bias_heads"] = map(draw, shared)
        a["base"] = draw(st.sampled_from((None, ARRAY)))
    if "segments" in options:
        given += SEGMENTS
    if "lens" in options:
        given += PAIRS[1]
    if "sinks" in options:
        given += ["sinks", "shift"]
        a["sink_batch"] = draw(shared[0])
    if "tiles" in options:
        given += (*TILES, *TRANSPOSED)
        a["tile_batch"], a["tile_heads"] = map(draw, shared)
        a |= {"tile_q": 128, "tile_kv": 256, "max_tiles": 3, "max_tiles_t": 4}
        if draw(st.booleans()):
            given += MASKS
            a["num_tile_masks"] = 2
    needed = (which == BACKWARD_KV and a["kernels"] and "dq" in given) or narrow
    a["workspace"] = ARRAY if needed else draw(st.sampled_from((None, ARRAY)))
    a |= dict.fromkeys(given, ARRAY)
    if not narrow and draw(st.booleans()) and _joins(a, which):
        a["joins"] = draw(st.sampled_from((1, -1)))
    elif draw(st.booleans()):
        dropping = a | {"dropout": draw(st.integers(1, 127)), "dropout_keys": ARRAY}
        if _dropout(dropping):
            return dropping
    return a


def struct(fields: Fields) -> Attention:
    scales = {name: BlockScales(*fields[name]) for name in SCALES}
    return Attention(**{**fields, **scales})


def is_right(a: Fields, which: int) -> bool:
    """Whether the launcher of this pass serves the struct."""
    return (
        _sizes(a, which)
        and _scores(a, which)
        and _options(a, which)
        and _arrays(a, which)
        and _aligned(a, which)
        and _eight_bits(a, which)
        and _dropout(a)
        and (not a["joins"] or _joins(a, which))
    )


def _joins(a: Fields, which: int) -> bool:
    """Whether this call can be joined with what its results hold."""
    sm90 = a["kernels"] == 1
    if which == BACKWARD_KV:
        return sm90 and a["dq"] is not None
    plain = a["softcap"] == 0 and a["scale"] > 0
    absent = all(a[name] is None for name in ("bias", "sinks", TILES[0]))
    plain = plain and a["dropout"] == 0
    narrow = max(a["head_dim"], a["value_dim"]) <= 128
    queries = a["q_len"] > 0 and (a["batch"] > 0 or a["cu_q"] is not None)
    lse = a["lse"] is not None or not queries
    return which == FORWARD and sm90 and plain and absent and narrow and lse


def _dropout(a: Fields) -> bool:
    """A number and its keys, or neither, and nothing that does not go with it."""
    if a["dropout"] == 0:
        return a["dropout_keys"] is None
    keys = a["dropout_keys"] is not None or a["batch"] == 0
    if not (0 < a["dropout"] < 128 and keys and a["dtype"] not in EIGHT_BITS):
        return False
    absent = a["bias"] is None and a[TILES[0]] is None
    return a["kernels"] == 0 or (absent and a["softcap"] == 0 and a["scale"] > 0)


def _eight_bits(a: Fields, which: int) -> bool:
    """Scales there and fitting, and nothing that 8 bits do not have."""
    scales = [a[name] for name in SCALES]
    if a["dtype"] not in EIGHT_BITS:
        return which != FORWARD or not any(address for address, _, _ in scales)
    dims = all(a[d] % 16 == 0 and a[d] <= 128 for d in ("head_dim", "value_dim"))
    absent = all(a[name] is None for name in ("cu_q", "bias", TILES[0]))
    plain = a["softcap"] == 0 and a["scale"] > 0 and not a["joins"]
    if not (which == FORWARD and a["kernels"] == 1 and dims and absent and plain):
        return False
    if a["batch"] == 0:
        return True
    room = a["workspace"] is not None or a["kv_len"] == 0
    return room and all(
        address is not None
        and address % 4 == 0
        and batch >= 1
        and a["batch"] % batch == 0
        and blocks in (1, -(-rows // 128) or 1)
        for (address, batch, blocks), rows in zip(
            scales, (a["q_len"], a["kv_len"], 0), strict=True
        )
    )


def _sizes(a: Fields, which: int) -> bool:
    lengths = a["q_len"], a["kv_len"]
    wide = max(a["head_dim"], a["value_dim"]) > 128
    if a["dtype"] == F32 and (a["kernels"] != 0 or (wide and which != FORWARD)):
        return False
    pairs = a["batch"] * a["num_heads"]
    return (
        a["kernels"] in (0, 1)
        and (
            a["dtype"] in (0, 1, F32) or (a["dtype"] in EIGHT_BITS and which == FORWARD)
        )
        and a["precision"] in (0, 1)
        and a["batch"] >= 0
        and a["num_heads"] >= 1
        and a["num_kv_heads"] >= 1
        and a["num_heads"] % a["num_kv_heads"] == 0
        and all(0 <= n <= 2**30 - 256 for n in lengths)
        and all(8 <= a[d] <= 256 and a[d] % 8 == 0 for d in ("head_dim", "value_dim"))
        and pairs < 2**31
        and pairs * max(lengths) * 256 * 4 < INT64
        and min(a["window_left"], a["window_right"]) >= -1
    )


def _scores(a: Fields, which: int) -> bool:
    scale, softcap = a["scale"], a["softcap"]
    if not (math.isfinite(scale) and math.isfinite(softcap) and softcap >= 0):
        return False
    if which != FORWARD or 0 in (scale, softcap) or softcap >= 1024:
        return True
    with np.errstate(all="ignore"):
        factor = np.abs(np.float32(scale)) / np.float32(softcap)
    return bool(np.float32(1e-6) <= factor <= np.float32(1e5))


def _options(a: Fields, which: int) -> bool:
    lists = TRANSPOSED if which == BACKWARD_KV else TILES
    groups = [PAIRS[0], SEGMENTS, lists, MASKS]
    groups += [(TILES[0], TRANSPOSED[0])] if which == BACKWARD_KV else []
    if any(len({a[name] is None for name in group}) > 1 for group in groups):
        return False
    packed, tiles = a["cu_q"] is not None, a[lists[0]] is not None
    apart = ("bias", "q_segments", "q_lens", "kv_lens", lists[0])
    if packed and any(a[name] is not None for name in apart):
        return False
    if a["base"] is not None and a["bias"] is None:
        return False
    masks = a["tile_masks"] is not None
    if masks and (not tiles or a["num_tile_masks"] < 1):
        return False
    if a["batch"] == 0:
        return True
    wrong = a["bias"] is not None and not (
        a["bias_dtype"] in (a["dtype"], 2)
        and _shared(a, "bias", "bias_heads", a["q_len"] * a["kv_len"])
    )
    wrong |= a["sinks"] is not None and not _shared(a, "sink", None, 1)
    if tiles:
        most = a["max_tiles_t" if which == BACKWARD_KV else "max_tiles"]
        sizes = a["tile_q"], a["tile_kv"]
        if not all(128 <= n <= 2**30 and n % 128 == 0 for n in sizes) or most < 0:
            return False
        by_keys = which == BACKWARD_KV
        length, size = (a["kv_len"], sizes[1]) if by_keys else (a["q_len"], sizes[0])
        wrong |= not _shared(a, "tile", "tile_heads", (length // size + 1) * most)
        if masks:
            count = a["num_tile_masks"] * sizes[0] * (sizes[1] // 32)
            wrong |= max(sizes) > 1024 or count * 4 >= INT64
    return not wrong


def _shared(a: Fields, name: str, heads: str | None, elements: int) -> bool:
    batch = a[f"{name}_batch"]
    if batch < 1 or a["batch"] % batch:
        return False
    head_count = a[heads] if heads else 1
    known = head_count in (1, a["num_heads"])
    return known and batch * head_count * elements * 4 < INT64


def _arrays(a: Fields, which: int) -> bool:
    members = a["batch"] > 0 or a["cu_q"] is not None
    queries, keys = members and a["q_len"] > 0, members and a["kv_len"] > 0
    needs = {"q": queries, "k": keys, "v": keys}
    if which == FORWARD:
        needs["o"] = queries
    else:
        needs |= dict.fromkeys(("lse", "d_o", "delta"), queries)
    has = {name for name in a if a[name] is not None}
    if which == BACKWARD_KV:
        needs |= {"dk": keys, "dv": keys}
        if a["kernels"] == 1:
            needs["workspace"] = queries and "dq" in has and a["batch"] > 0
            uneven = has & {"q_segments", "tile_indices"}
            if "dq_accum" in has or (a["deterministic"] and uneven):
                return False
        elif a["deterministic"]:
            return False
    elif which == BACKWARD_BIAS:
        needs |= {"bias": True, "dbias": queries and keys}
    elif which != FORWARD:
        needs["dq"] = queries
    return all(name in has for name, needed in needs.items() if needed)


def _aligned(a: Fields, which: int) -> bool:
    struct = Forward if which == FORWARD else Backward
    has = {name for name, _ in (*Call._fields_, *struct._fields_)}
    steps = dict.fromkeys(WIDE, 16) | dict.fromkeys(NARROW, 4)
    pairs = ("q_segment_ranges", "kv_segment_ranges", "dropout_keys")
    steps |= dict.fromkeys(pairs, 8)
    steps |= dict.fromkeys(("bias", "dbias"), 4 if a["bias_dtype"] == 2 else 2)
    return all((a[n] or 0) % step == 0 for n, step in steps.items() if n in has)
