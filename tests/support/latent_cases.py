"""Calls of latent caches that are held to float64, as those of paged_cases.py.

LATENT have few rows, LATENT_MANY and LATENT_PAIRS many; LATENT_TYPES, which a GPU alone
computes, too.
"""

from __future__ import annotations

import dataclasses

from paged_problems import Case

# Latent caches: one key head, and values are columns of the keys.
WIDE_LATENT = {
    "latent": True,
    "kv_heads": 1,
    "head_dim": 576,
    "value_dim": 512,
    "heads": 16,
    "scale": 192**-0.5,
}
NARROW_LATENT = {
    **WIDE_LATENT,
    "head_dim": 192,
    "value_dim": 128,
    "dtype": "float16",
    "scale": None,
}
FEW_ROWS = ((1, 70), (1, 5), (1, 130), (1, 64), (1, 1))
LATENT = {
    "latent: decode": Case(sequences=FEW_ROWS, **WIDE_LATENT),
    "latent: shares that cut units": Case(sequences=((1, 900), (1, 40)), **WIDE_LATENT),
    "latent: one head": Case(sequences=FEW_ROWS, **{**WIDE_LATENT, "heads": 1}),
    "latent: 20 heads, blocks of 5": Case(
        sequences=((1, 150), (2, 9)), block_size=5, **{**WIDE_LATENT, "heads": 20}
    ),
    "latent: 32 heads, blocks of 64": Case(
        sequences=((1, 200), (1, 63)), block_size=64, **{**WIDE_LATENT, "heads": 32}
    ),
    "latent: 128 heads, blocks of 1": Case(
        sequences=((1, 200), (1, 33)), block_size=1, **{**WIDE_LATENT, "heads": 128}
    ),
    "latent: chunks beside decode rows": Case(
        sequences=((1, 100), (7, 40), (0, 30), (3, 0), (9, 4)),
        more_rows=2,
        **WIDE_LATENT,
    ),
    "latent: no keys, sinks": Case(
        sequences=((1, 0), (1, 40), (2, 2), (0, 0)), sinks=1, **WIDE_LATENT
    ),
    "latent: ids of no block": Case(
        sequences=((1, 48), (3, 20), (1, 150)),
        bad_ids=((0, 1, -1), (1, 0, 10**6), (2, 3, -(2**31)), (2, 9, 2**31 - 1)),
        **WIDE_LATENT,
    ),
    "latent: a window, a softcap, sinks": Case(
        sequences=((1, 150), (6, 90)),
        window=(40, 0),
        softcap=2.5,
        sinks=1,
        **{**WIDE_LATENT, "heads": 20},
    ),
    "latent: both sides of a window": Case(
        sequences=((5, 100), (20, 20)), window=(3, 4), **{**WIDE_LATENT, "heads": 4}
    ),
    "latent: a scale below 0": Case(
        sequences=((1, 70), (2, 9)), **{**WIDE_LATENT, "scale": -0.05}
    ),
    "latent: heads first, the second layer": Case(
        sequences=FEW_ROWS[:2], layout="B L O H T D", layers=3, layer=1, **WIDE_LATENT
    ),
    "latent: an array for each layer": Case(
        sequences=FEW_ROWS[:2], layout="L B O T H D", layers=3, layer=2, **WIDE_LATENT
    ),
    "latent: no such layer": Case(
        sequences=FEW_ROWS[:2], layout="L B O T H D", layers=3, layer=3, **WIDE_LATENT
    ),
    "latent: a batch with padding": Case(
        padded=3, calls=3, sequences=((3, 30), (1, 70), (0, 9)), **WIDE_LATENT
    ),
    "latent: several calls": Case(
        calls=2,
        layers=2,
        layer=1,
        sequences=((1, 30), (2, 20), (1, 9), (1, 40)),
        sinks=2,
        more_rows=1,
        **WIDE_LATENT,
    ),
    "latent: a start that falls": Case(
        starts=(1, 4, 3, 10**9), sequences=((3, 20), (0, 30), (8, 29)), **WIDE_LATENT
    ),
    "latent: lengths beyond the table": Case(
        sequences=((1, 64), (2, 64), (1, 48)),
        kv_lens=(65, 2**31 - 1, -3),
        **WIDE_LATENT,
    ),
    "latent: ranges and drafts": Case(
        sequences=((1, 70), (6, 90), (4, 4)),
        ranges=((0, 60), (3, 200), (50, 40)),
        tree=1,
        **{**WIDE_LATENT, "heads": 20},
    ),
    "latent: a split": Case(
        split_size=256, sequences=((1, 600), (2, 20), (1, 256)), sinks=1, **WIDE_LATENT
    ),
    "latent: tables one after the other": Case(
        sequences=((1, 70), (2, 20)), flat=True, **WIDE_LATENT
    ),
    "latent: d192, drafts, a split": Case(
        split_size=256,
        sequences=((9, 900), (40, 41)),
        tree=2,
        **{**NARROW_LATENT, "heads": 16},
    ),
    "latent: d192": Case(sequences=FEW_ROWS, **NARROW_LATENT),
    "latent: d192, 20 heads": Case(
        sequences=((1, 150), (2, 9)), block_size=5, **{**NARROW_LATENT, "heads": 20}
    ),
    "latent: d192, a prefill": Case(
        sequences=((40, 150), (1, 500), (70, 70)), sinks=1, **NARROW_LATENT
    ),
    "latent: d192, many sequences": Case(
        sequences=tuple((1, 5 + i % 90) for i in range(300)),
        **{**NARROW_LATENT, "heads": 3},
    ),
}
# Of more than 16 packed rows in a tile: Hopper's kernel has these.
MANY_ROWS = {**WIDE_LATENT, "heads": 128, "block_size": 64}
LATENT_MANY = {
    "latent, many rows: 17 heads, blocks of 8": Case(
        sequences=(*FEW_ROWS, (1, 0), (1, 63), (1, 65)),
        **{**MANY_ROWS, "heads": 17, "block_size": 8},
    ),
    "latent, many rows: 32 heads, blocks of 16": Case(
        sequences=((1, 127), (1, 128), (1, 129), (1, 192), (1, 257)),
        **{**MANY_ROWS, "heads": 32, "block_size": 16},
    ),
    "latent, many rows: 40 heads, several queries": Case(
        sequences=((3, 200), (1, 65), (2, 2), (5, 130), (0, 9)),
        more_rows=2,
        sinks=1,
        **{**MANY_ROWS, "heads": 40, "block_size": 16},
    ),
    "latent, many rows: 64 heads, blocks of 24": Case(
        sequences=((1, 100), (1, 383)), **{**MANY_ROWS, "heads": 64, "block_size": 24}
    ),
    "latent, many rows: 128 heads": Case(
        sequences=((1, 0), (1, 1), (1, 63), (1, 64), (1, 65), (1, 330)), **MANY_ROWS
    ),
    "latent, many rows: 128 heads, float16": Case(
        sequences=((1, 300), (1, 65)), dtype="float16", **MANY_ROWS
    ),
    "latent, many rows: many pieces, blocks of 128": Case(
        sequences=tuple((1, 1 + 29 * i % 140) for i in range(14)),
        **{**MANY_ROWS, "heads": 40, "block_size": 128},
    ),
    "latent, many rows: maxima that move": Case(
        sequences=((1, 500), (2, 150)),
        large=40.0,
        **{**MANY_ROWS, "heads": 64, "dtype": "float16"},
    ),
    "latent, many rows: a prefill": Case(
        sequences=((20, 150), (1, 70), (9, 9)), **{**WIDE_LATENT, "heads": 16}
    ),
    "latent, many rows: ids of no block": Case(
        sequences=((1, 48), (3, 120), (1, 250)),
        bad_ids=((0, 1, -1), (1, 0, 10**6), (2, 3, -(2**31)), (2, 29, 2**31 - 1)),
        **{**MANY_ROWS, "heads": 24, "block_size": 8},
    ),
    "latent, many rows: no block at all": Case(
        sequences=((1, 60), (1, 130)),
        bad_ids=((0, 0, -1), (1, 1, 10**6)),
        **{**MANY_ROWS, "heads": 64},
    ),
    "latent, many rows: a window, sinks": Case(
        sequences=((1, 350), (6, 90), (1, 130)),
        window=(40, 0),
        sinks=1,
        **{**MANY_ROWS, "heads": 20, "block_size": 16},
    ),
    "latent, many rows: both sides of a window": Case(
        sequences=((5, 200), (20, 20)),
        window=(70, 4),
        **{**MANY_ROWS, "heads": 18, "block_size": 16},
    ),
    "latent, many rows: heads first, the second layer": Case(
        sequences=FEW_ROWS[:3],
        layout="B L O H T D",
        layers=3,
        layer=1,
        **{**MANY_ROWS, "heads": 48, "block_size": 16},
    ),
    "latent, many rows: no such layer": Case(
        sequences=FEW_ROWS[:2], layers=3, layer=3, **{**MANY_ROWS, "heads": 64}
    ),
    "latent, many rows: a batch with padding": Case(
        padded=3,
        calls=3,
        sequences=((3, 30), (1, 70), (0, 9)),
        **{**WIDE_LATENT, "heads": 20},
    ),
    "latent, many rows: several calls": Case(
        calls=2,
        layers=2,
        layer=1,
        sequences=((1, 30), (2, 20), (1, 9), (1, 140)),
        sinks=2,
        more_rows=1,
        **{**WIDE_LATENT, "heads": 33},
    ),
    "latent, many rows: a start that falls": Case(
        starts=(1, 4, 3, 10**9),
        sequences=((3, 20), (0, 30), (8, 29)),
        **{**WIDE_LATENT, "heads": 20},
    ),
    "latent, many rows: lengths beyond the table": Case(
        sequences=((1, 64), (2, 64), (1, 48)),
        kv_lens=(65, 2**31 - 1, -3),
        **{**WIDE_LATENT, "heads": 64},
    ),
    "latent, many rows: a split": Case(
        split_size=256,
        sequences=((1, 700), (2, 20), (1, 256), (1, 513)),
        sinks=1,
        **{**MANY_ROWS, "heads": 80},
    ),
    "latent, many rows: tables one after the other": Case(
        sequences=((1, 70), (2, 20)), flat=True, **{**WIDE_LATENT, "heads": 64}
    ),
}
# Of two tiles of rows and more: clusters have these.
LATENT_PAIRS = {
    "latent, pairs: 128 heads": Case(
        sequences=((1, 0), (1, 1), (1, 63), (1, 64), (1, 65), (1, 330)), **MANY_ROWS
    ),
    "latent, pairs: 128 heads, two queries": Case(
        sequences=((2, 200), (2, 2), (2, 129)), dtype="float16", **MANY_ROWS
    ),
    "latent, pairs: 72 heads": Case(
        sequences=((1, 250), (3, 129), (0, 70), (2, 2), (1, 64)),
        more_rows=2,
        sinks=1,
        **{**MANY_ROWS, "heads": 72, "block_size": 16},
    ),
    "latent, pairs: 65 heads, no queries": Case(
        sequences=((0, 40), (1, 0), (1, 90), (0, 0), (1, 3)),
        **{**MANY_ROWS, "heads": 65, "block_size": 8},
    ),
    "latent, pairs: no queries at all": Case(
        sequences=((0, 40), (0, 0)), more_rows=3, **MANY_ROWS
    ),
    "latent, pairs: many pieces, blocks of 128": Case(
        sequences=tuple((1, 1 + 29 * i % 140) for i in range(14)),
        **{**MANY_ROWS, "heads": 130, "block_size": 128},
    ),
    "latent, pairs: maxima that move": Case(
        sequences=((1, 500), (2, 150)),
        large=40.0,
        **{**MANY_ROWS, "heads": 96, "dtype": "float16"},
    ),
    "latent, pairs: 16 heads, a prefill": Case(
        sequences=((20, 150), (1, 70), (9, 9)), **{**WIDE_LATENT, "heads": 16}
    ),
    "latent, pairs: ids of no block": Case(
        sequences=((1, 48), (3, 120), (1, 250)),
        bad_ids=((0, 1, -1), (1, 0, 10**6), (2, 3, -(2**31)), (2, 29, 2**31 - 1)),
        **{**MANY_ROWS, "heads": 80, "block_size": 8},
    ),
    "latent, pairs: both sides of a window, sinks": Case(
        sequences=((5, 200), (20, 20), (1, 350)),
        window=(70, 4),
        sinks=1,
        **{**MANY_ROWS, "heads": 70, "block_size": 24},
    ),
    "latent, pairs: several calls": Case(
        calls=2,
        layers=2,
        layer=1,
        sequences=((1, 30), (2, 20), (1, 9), (1, 140)),
        sinks=2,
        more_rows=1,
        **{**WIDE_LATENT, "heads": 66},
    ),
    "latent, pairs: a start that falls": Case(
        starts=(1, 4, 3, 10**9),
        sequences=((3, 20), (0, 30), (8, 29)),
        **{**WIDE_LATENT, "heads": 90},
    ),
    "latent, pairs: a split": Case(
        split_size=256,
        sequences=((1, 700), (2, 20), (1, 256), (3, 513)),
        sinks=1,
        **{**MANY_ROWS, "heads": 80},
    ),
}
LATENT_TYPES = {
    f"{name}, {dtype}": dataclasses.replace(LATENT[f"latent: {name}"], dtype=dtype)
    for dtype, names in (
        ("float16", ("decode", "20 heads, blocks of 5", "128 heads, blocks of 1")),
        ("bfloat16", ("d192", "d192, 20 heads", "d192, a prefill")),
    )
    for name in names
}
