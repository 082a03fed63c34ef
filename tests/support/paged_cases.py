"""Calls of paged attention that are held to float64, on the emulator and on a GPU.

CASES and BAD (data) have few queries a sequence, for the most part; LEAVING and LONG
have many, NARROW_LONG in 8 bits. The rows of SPLIT and NARROW_SPLIT have the same bits
as those of each sequence alone. Latent caches have latent_cases.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from paged_problems import Case

PREFILL = ((150, 300), (1, 70), (65, 65))
LONG = ((1, 523), (4, 12))
CASES = {
    "decode rows, a chunk, a prefill": Case(),
    "decode": Case(sequences=((1, 9), (1, 130), (1, 1), (1, 16), (1, 700))),
    "one long sequence": Case(sequences=((1, 3000),)),
    "long tables": Case(sequences=((1, 4500), (1, 130), (1, 0), (1, 16))),
    "long tables, d128": Case(
        head_dim=128, value_dim=96, block_size=64, sequences=((1, 4500), (1, 4160))
    ),
    "long tables, all of d128": Case(
        head_dim=128, value_dim=128, heads=8, kv_heads=1, sequences=((1, 4100), (1, 65))
    ),
    "many sequences": Case(
        sequences=tuple((1, 5 + i % 90) for i in range(300)), heads=2, kv_heads=1
    ),
    "chunks of many tiles": Case(sequences=PREFILL),
    "no keys, no queries": Case(sequences=((1, 0), (0, 40), (2, 2), (0, 0)), sinks=1),
    "fewer keys than queries": Case(sequences=((9, 4), (1, 5))),
    "d128": Case(head_dim=128, value_dim=96, sequences=((1, 300), (5, 20))),
    "d256": Case(
        head_dim=256, value_dim=200, dtype="float16", sequences=((1, 300), (5, 20))
    ),
    "d24, groups of 7": Case(heads=14, kv_heads=2, head_dim=24, value_dim=24),
    "one key head": Case(heads=16, kv_heads=1, sequences=((1, 90), (2, 33))),
    "no groups": Case(heads=3, kv_heads=3, dtype="float16"),
    "blocks of 1": Case(block_size=1, sequences=((1, 300), (3, 20))),
    "blocks of 5": Case(block_size=5, sequences=LONG),
    "blocks of 48": Case(block_size=48, sequences=LONG),
    "blocks of 256": Case(block_size=256, sequences=((1, 600), (4, 12))),
    "heads first": Case(layout="B L O H T D", layers=3, layer=1),
    "universal": Case(layout="B H L O T D", layers=3, layer=2),
    "an array for each layer": Case(layout="L B O T H D", layers=3, layer=1),
    "the first layer": Case(layout="B L O T H D", layers=2),
    "a batch with padding": Case(padded=7, calls=4),
    "several calls": Case(calls=2, sinks=2, more_rows=2),
    "rows of nobody": Case(more_rows=5),
    "tables one after the other": Case(flat=True),
    "tables one after the other, several calls": Case(flat=True, calls=2, sinks=2),
    "a window": Case(window=(5, 0), sequences=((1, 700), (70, 90))),
    "both sides": Case(window=(3, 4), sequences=((9, 40), (20, 20))),
    "no band": Case(window=(-1, -1)),
    "a softcap": Case(softcap=2.5),
    "a scale below 0": Case(scale=-0.3, sinks=1),
}
# The same options for decode rows of few keys, which have a kernel of their own where
# there are no more rows than sequences.
DECODE = ((1, 90), (1, 9), (1, 0), (1, 300))


def of_decode(case: Case) -> Case:
    if case.more_rows:
        sequences = ((1, 90), (0, 9), (0, 3), (1, 300))
        return dataclasses.replace(case, sequences=sequences, more_rows=1)
    return dataclasses.replace(case, sequences=DECODE)


DECODE_ROWS = {
    f"decode: {name}": of_decode(case)
    for name, case in CASES.items()
    if max(case.head_dim, case.value_dim) <= 128 and not case.flat
} | {
    "decode: queries of some": Case(sequences=((2, 30), (0, 9), (2, 64), (0, 0))),
    "decode: all are one's": Case(sequences=((9, 30), *((0, 9),) * 8), heads=6),
    "decode: all are the last one's": Case(
        sequences=(*((0, 9),) * 8, (9, 300)), window=(40, 0), block_size=5
    ),
    "decode: fewer keys than queries": Case(sequences=((3, 2), (0, 9), (1, 40))),
    "decode: one key head": Case(heads=16, kv_heads=1, sequences=((2, 90), (0, 33))),
    "decode: groups of 7": Case(heads=14, sequences=((5, 90), *((0, 33),) * 4)),
    "decode: some of each call": Case(
        calls=2, sinks=2, sequences=((2, 90), (0, 9), (0, 40), (2, 30))
    ),
    "decode: a query or more of T": Case(
        padded=4, calls=3, sequences=((4, 90), (1, 9), (2, 30)), sinks=3
    ),
}

NARROW_MIXED = ((1, 300), (5, 20), (40, 90), (1, 64))
NARROW = {
    f"{cache}, scales of {scales}": Case(
        cache=cache, scales=scales, sequences=NARROW_MIXED, layers=2, layer=1
    )
    for cache in ("e4m3", "e5m2", "int8")
    for scales in ("all", "heads", "tokens")
} | {
    "no scales": Case(cache="e4m3", scales="none"),
    "d128": Case(
        cache="e4m3",
        head_dim=128,
        value_dim=96,
        sequences=NARROW_MIXED,
        scales="tokens",
    ),
    "d32": Case(cache="int8", head_dim=32, value_dim=48, dtype="float16", sinks=1),
    "decode": Case(cache="e4m3", sequences=((1, 9), (1, 130), (1, 1), (1, 700))),
    "q beyond float16": Case(cache="e4m3", large=1e6, scale=1e-7),
    "a window, a softcap": Case(cache="int8", window=(40, 0), softcap=2.0),
}
CASES |= NARROW

# Rows that see keys of their own.
TREE = ((8, 300), (8, 61), (1, 70), (8, 8))
WILD = ((-5, 40), (30, 10), (17, 2**31 - 1), (-(2**31), 2**31 - 1), (0, 0), (64, 250))
FAR = ((400, 460), (610, 640), (-1, 2))  # whole tiles lie between them
ROWS = {
    "8 drafts": Case(tree=1, sequences=TREE),
    "8 drafts, d128": Case(
        tree=1, sequences=TREE, head_dim=128, value_dim=128, heads=8, kv_heads=2
    ),
    "40 drafts of two words": Case(tree=2, sequences=((40, 150), (1, 9), (33, 64))),
    "drafts beyond the words": Case(tree=1, sequences=((45, 150), (40, 41))),
    "drafts, not causal": Case(tree=1, window=(-1, -1), sequences=TREE),
    "drafts and a window": Case(tree=1, window=(70, 0), softcap=2.0, sequences=TREE),
    "drafts that see nothing new": Case(tree=1, seen=0.0, sequences=TREE, sinks=1),
    "drafts longer than keys": Case(tree=1, sequences=((9, 4), (40, 20), (3, 0))),
    "drafts, blocks of 5": Case(tree=1, block_size=5, sequences=TREE),
    "drafts, blocks of 1, 8 bits": Case(
        tree=1, block_size=1, sequences=TREE, cache="e4m3", scales="tokens"
    ),
    "drafts, 8 bits, d128": Case(
        tree=1,
        sequences=TREE,
        cache="int8",
        scales="heads",
        head_dim=128,
        value_dim=128,
        heads=12,
    ),
    "a batch of drafts": Case(
        tree=1, padded=9, calls=4, sequences=((8, 90), (1, 33), (0, 9), (9, 9))
    ),
    "drafts beside a prefill": Case(
        tree=3, seen=0.9, sequences=((8, 300), (90, 200), (1, 40)), more_rows=3
    ),
    "ranges": Case(ranges=WILD, sequences=((6, 300), (6, 20), (1, 64), (3, 3))),
    "ranges, not causal": Case(
        ranges=WILD, window=(-1, -1), sequences=((6, 300), (7, 90)), sinks=1
    ),
    "ranges far apart": Case(
        ranges=FAR, sequences=((1, 700), (1, 700), (1, 700), (3, 700)), block_size=5
    ),
    "ranges far apart, d128": Case(
        ranges=FAR,
        sequences=((1, 700), (1, 700), (2, 500), (3, 700)),
        head_dim=128,
        value_dim=128,
        heads=8,
    ),
    "ranges of many queries": Case(
        ranges=((0, 40), (90, 95), (64, 128)), sequences=((150, 300), (1, 70)), heads=8
    ),
    "ranges of one key": Case(
        ranges=((299, 300), (5, 6), (63, 64)), sequences=((1, 300),) * 3, block_size=1
    ),
    "ranges, 8 bits": Case(
        ranges=WILD,
        cache="e5m2",
        scales="tokens",
        sequences=NARROW_MIXED,
        window=(9, 0),
    ),
    "no ranges at all": Case(ranges=((9, 9),), sequences=((1, 300), (20, 90)), sinks=1),
    "ranges and drafts": Case(
        ranges=WILD,
        tree=1,
        calls=2,
        sinks=2,
        more_rows=2,
        sequences=((8, 300), (1, 40), (8, 90), (2, 64)),
    ),
    "ranges and drafts, wrong data": Case(
        ranges=WILD,
        tree=2,
        sequences=((40, 64), (3, 32), (8, 300)),
        kv_lens=(10**6, -5, 300),
        bad_ids=((2, 3, -(2**31)), (2, 18, 2**31 - 1)),
    ),
    "ranges and drafts, a start that falls": Case(
        ranges=WILD,
        tree=1,
        starts=(1, 4, 3, 10**9),
        sequences=((3, 20), (0, 30), (8, 29)),
    ),
}
CASES |= ROWS

FULL = Case(sequences=((1, 64), (2, 64), (1, 48)))
BAD = {
    "no such layer": Case(layout="L B O T H D", layers=3, layer=3),
    "a layer below 0": Case(layers=3, layer=-1),
    "ids of no block": Case(
        sequences=((1, 48), (3, 20), (1, 300)),
        bad_ids=((0, 1, -1), (1, 0, 10**6), (2, 3, -(2**31)), (2, 18, 2**31 - 1)),
    ),
    "a start that falls": Case(
        starts=(1, 4, 3, 10**9), sequences=((3, 20), (0, 30), (8, 29))
    ),
    "starts that all fall": Case(
        starts=(9, 4, 3, -5), sequences=((3, 20), (0, 30), (8, 29))
    ),
    "lengths beyond the table": dataclasses.replace(FULL, kv_lens=(65, 2**31 - 1, 3)),
    "lengths beyond the last of all tables": dataclasses.replace(
        FULL, flat=True, kv_lens=(10**9, 64, 48)
    ),
    "lengths below 0": dataclasses.replace(FULL, kv_lens=(-1, -(2**31), 48)),
}

BAD_DECODE_ROWS = {
    f"decode: {name}": dataclasses.replace(case, sequences=DECODE[:3])
    for name, case in BAD.items()
    if "layer" in name
} | {
    "decode: ids of no block": Case(
        sequences=((1, 48), (1, 20), (1, 300)),
        bad_ids=((0, 1, -1), (1, 0, 10**6), (2, 3, -(2**31)), (2, 18, 2**31 - 1)),
    ),
    "decode: a start that falls": Case(starts=(0, 2, 1, 3), sequences=DECODE[:3]),
    "decode: starts that all fall": Case(starts=(9, 4, 3, -5), sequences=DECODE[:3]),
    "decode: starts behind the first row": Case(
        starts=(1, 2, 2, 10**9), sequences=((1, 90), (0, 9), (2, 30))
    ),
    "decode: lengths beyond the table": Case(
        sequences=((1, 64),) * 3, kv_lens=(65, 2**31 - 1, -5)
    ),
}

LEAVING = {
    "left: a prefill between decode rows": Case(
        sequences=((1, 40), (70, 90), (1, 300), (40, 40)), more_rows=3
    ),
    "left: all": Case(sequences=((70, 90), (40, 41)), more_rows=3),
    "left: none": Case(),
    "left: several calls": Case(
        calls=2, sequences=((1, 40), (40, 90), (50, 60), (2, 30)), sinks=2
    ),
    "left: a batch with padding": Case(
        padded=50, calls=4, sequences=((1, 40), (50, 90), (0, 9), (33, 70))
    ),
    "left: a start that falls": Case(
        starts=(1, 60, 59, 10**9), sequences=((3, 20), (0, 30), (80, 90))
    ),
    "left: no queries": Case(sequences=((0, 40), (0, 0)), more_rows=4),
    "left: many sequences": Case(
        sequences=tuple((40 if i % 50 == 7 else 1, 50) for i in range(150))
    ),
}

MIXED = ((1, 300), (150, 600), (3, 40), (90, 90), (1, 7))
D128 = {"head_dim": 128, "value_dim": 128}
WIDE = {"heads": 8, "kv_heads": 2, **D128}
# Sequences with many queries, whatever the numbers are: where blocks lie, bands, rows
# and keys that are not as they should be, how many sequences there are.
MANY_QUERIES: dict[str, dict[str, Any]] = {
    "heads first": {"layout": "B L O H T D", "layers": 3, "layer": 1},
    "universal": {"layout": "B H L O T D", "layers": 3, "layer": 2},
    "an array for each layer": {"layout": "L B O T H D", "layers": 3, "layer": 1},
    "no such layer": {"layout": "L B O T H D", "layers": 3, "layer": 3},
    "a window": {"window": (70, 0)},
    "a narrow window": {"window": (5, 0)},
    "both sides": {"window": (100, 40)},
    "no band": {"window": (-1, -1)},
    "nothing but ids of no block": {
        "sequences": ((100, 160), (70, 90)),
        "bad_ids": tuple((0, p, -1) for p in range(10)),
        "sinks": 1,
    },
    "fewer keys than queries": {
        "sequences": ((200, 30), (80, 0), (1, 5), (130, 129)),
        "sinks": 1,
    },
    "many": {
        "sequences": tuple((66 + i % 5, 66 + 11 * i % 300) for i in range(70)),
        "heads": 2,
        "kv_heads": 1,
    },
    "few among many": {
        "sequences": tuple((70 if i % 100 == 7 else 1, 75) for i in range(300)),
        "heads": 2,
        "kv_heads": 1,
    },
    "a batch with padding": {
        "padded": 150,
        "calls": 4,
        "sequences": ((150, 300), (1, 70), (0, 9), (97, 97)),
    },
    "a full batch": {
        "padded": 70,
        "full": True,
        "calls": 3,
        "sequences": ((70, 300), (70, 70), (70, 20)),
    },
    "a start that falls": {
        "starts": (1, 150, 149, 10**9),
        "sequences": ((150, 160), (0, 30), (8, 29)),
    },
    "starts beyond the rows": {
        "starts": (-4, 100, 10**9, 10**9),
        "sequences": ((150, 160), (70, 90), (0, 29)),
    },
    "lengths beyond the table": {
        "kv_lens": (10**6, -5, 2**31 - 1),
        "sequences": ((100, 160), (70, 96), (80, 160)),
    },
}


def with_many_queries(name: str, **options: Any) -> Case:
    return Case(**{"sequences": MIXED, **options, **MANY_QUERIES[name]})


LONG = {
    **{f"long: {name}": with_many_queries(name, **WIDE) for name in MANY_QUERIES},
    "long: a prefill": Case(sequences=((300, 700),), **WIDE),
    "long: one tile": Case(sequences=((40, 100),), **WIDE),
    "long: mixed": Case(sequences=MIXED, **WIDE),
    "long: mixed, tables one after the other": Case(flat=True, sequences=MIXED, **WIDE),
    "long: mixed, float16": Case(sequences=MIXED, dtype="float16", **WIDE),
    "long: mixed, rows of nobody": Case(sequences=MIXED, more_rows=9, **WIDE),
    **{
        f"long: blocks of {n}": Case(block_size=n, sequences=MIXED, **WIDE)
        for n in (1, 2, 4, 5, 8, 48, 64, 256)
    },
    # In every place of the rows that a warp has, and where one warp alone has some.
    **{
        f"long: blocks of {n}, ids of no block, {d} columns": Case(
            block_size=n,
            sequences=((150, 400), (70, 290)),
            bad_ids=(
                *((0, 37 * i % (400 // n), -1) for i in range(20)),
                (1, 200 // n, -9),
            ),
            **{**D128, "head_dim": d, "value_dim": d, "dtype": dtype},
        )
        for n in (1, 8)
        for d, dtype in ((128, "bfloat16"), (192, "bfloat16"), (256, "float16"))
    },
    **{
        f"long: groups of {n}": Case(
            heads=n * k, kv_heads=k, sequences=((140, 300), (80, 200), (2, 9)), **D128
        )
        for n, k in ((1, 3), (2, 2), (3, 2), (5, 1), (7, 2), (12, 1), (16, 2), (71, 1))
    },
    **{
        f"long: {d} and {v}, {dtype}": Case(
            head_dim=d, value_dim=v, dtype=dtype, sequences=MIXED, sinks=1
        )
        for dtype in ("bfloat16", "float16")
        for d, v in (
            *((24, 24), (64, 64), (80, 96), (96, 40), (120, 72), (192, 128)),
            *((192, 192), (256, 200), (256, 256)),
        )
    },
    "long: a softcap": Case(softcap=2.5, sequences=MIXED, sinks=1, **WIDE),
    "long: a softcap, window and ids of no block": Case(
        softcap=20.0,
        window=(300, 0),
        sequences=MIXED,
        bad_ids=((1, 20, -1), (1, 37, 10**6), (3, 2, -5)),
        **WIDE,
    ),
    "long: sinks": Case(sinks=2, calls=2, sequences=(*MIXED[:3], *MIXED[2:]), **WIDE),
    "long: a scale below 0": Case(scale=-0.3, sequences=MIXED, **WIDE),
    **{
        f"long: scores that leap, {scale}{name}": Case(
            scale=scale, sequences=((150, 400), (70, 290), (66, 190)), **how
        )
        for scale in (2.0, 30.0)
        for name, how in {
            "": {},
            ", d128": D128,
            ", a window, d128": {**D128, "window": (150, 0)},
            ", ids of no block": {"bad_ids": ((0, 14, -1), (0, 20, -1), (1, 17, -9))},
            ", blocks of 5": {"block_size": 5, "head_dim": 40},
            ", an array for each layer": {
                **{"layout": "L B O T H D", "layers": 3, "layer": 2},
                **{"heads": 6, "sinks": 1},
            },
        }.items()
    },
    "long: ids of no block": Case(
        sequences=((200, 400), (1, 64), (100, 300)),
        bad_ids=(
            *((0, p, -1) for p in (0, 3, 4, 11, 24)),
            *((1, 2, -7), (2, 0, 2**31 - 1), (2, 18, -(2**31))),
        ),
        **WIDE,
    ),
    "long: many without keys": Case(sequences=((70, 0),) * 60, **WIDE),
    "long: several calls": Case(
        calls=2, more_rows=3, sequences=((100, 200), (1, 9), (2, 30), (90, 95)), **WIDE
    ),
}

# Few tiles of many queries that see many keys: on a GPU of 20 multiprocessors, or more,
# these are shared out. Behind a case: the pieces of each tile that has several, on 20.
ONE_GROUP = {"heads": 2, "kv_heads": 1}
SHARED_OUT = {
    "shared out: a chunk behind a prefix": (
        Case(sequences=((70, 2400),), **WIDE),
        (3,) * 6,
    ),
    "shared out: all rows long": (
        Case(
            full=True, padded=70, calls=1, sequences=((70, 1500),), **ONE_GROUP, **D128
        ),
        (2, 2),
    ),
    "shared out: windows, of several lengths": (
        Case(
            window=(1200, 0),
            sequences=((150, 2000), (40, 300), (33, 33), (64, 64)),
            **ONE_GROUP,
            sinks=1,
        ),
        (2, 2, 2, 2),
    ),
    "shared out: some see fewer tiles than there are pieces": (
        Case(sequences=((90, 4000), (80, 80), (66, 130)), **ONE_GROUP, **D128),
        (2, 3, 3),
    ),
    "shared out: beside drafts, rows of nobody": (
        Case(
            sequences=(*((3, 20 * n) for n in range(1, 9)), (66, 1100)),
            more_rows=5,
            **ONE_GROUP,
            **D128,
        ),
        (2, 2),
    ),
    "shared out: a softcap and ids of no block": (
        Case(
            softcap=3.0,
            sequences=((70, 1700), (1, 9)),
            bad_ids=((0, 20, -1), (0, 37, 10**6), (0, 60, -5)),
            **ONE_GROUP,
            **D128,
        ),
        (3, 3),
    ),
    "shared out: without a band": (
        Case(window=(-1, -1), sequences=((70, 1600), (50, 700)), **ONE_GROUP, **D128),
        (3, 3, 3),
    ),
    "shared out: float16, 256 columns": (
        Case(
            sequences=((70, 900),),
            dtype="float16",
            head_dim=256,
            value_dim=256,
            **ONE_GROUP,
        ),
        (2, 2),
    ),
    "shared out: two calls": (
        Case(calls=2, sequences=((70, 1300), (66, 600)), **ONE_GROUP, **D128),
        (2, 2, 2, 2),
    ),
}
NOT_SHARED_OUT = {
    "few keys": Case(sequences=((150, 700),), **ONE_GROUP, **D128),
    "tiles for all": Case(sequences=((300, 1300),), heads=8, kv_heads=4, **D128),
    "a split_size": Case(split_size=512, sequences=((70, 1500),), **ONE_GROUP, **D128),
}

# Both products in 8 bits, of sequences with many queries.
E4M3 = {"cache": "e4m3", "narrow": True}
NARROW_WIDE = {**WIDE, **E4M3, "scales": "heads"}
NARROW_IS_WIDE = ("heads first", "a narrow window", "no band")
NARROW_LONG = {
    **{
        f"8 bits: {name}": with_many_queries(
            name, **(NARROW_WIDE if name in NARROW_IS_WIDE else E4M3)
        )
        for name in MANY_QUERIES
    },
    "8 bits: a prefill": Case(sequences=((300, 700),), **NARROW_WIDE),
    "8 bits: one tile": Case(sequences=((40, 100),), **NARROW_WIDE),
    "8 bits: mixed": Case(sequences=MIXED, **NARROW_WIDE),
    "8 bits: mixed, d64": Case(sequences=MIXED, scales="all", **E4M3),
    "8 bits: no scales": Case(sequences=MIXED, scales="none", **E4M3),
    "8 bits: mixed, rows of nobody": Case(
        sequences=MIXED, more_rows=9, **{**E4M3, "scales": "heads"}
    ),
    **{
        f"8 bits: blocks of {n}": Case(
            block_size=n, sequences=MIXED, heads=8, **{**E4M3, "scales": "heads"}
        )
        for n in (1, 5, 8, 48, 64, 256)
    },
    **{
        f"8 bits: blocks of {n}, d128": Case(
            block_size=n, sequences=MIXED, **NARROW_WIDE
        )
        for n in (1, 64)
    },
    **{
        f"8 bits: blocks of {n}, ids of no block": Case(
            block_size=n,
            sequences=((150, 400), (70, 290)),
            bad_ids=(
                *((0, 37 * i % (400 // n), -1) for i in range(20)),
                (1, 200 // n, -9),
            ),
            **E4M3,
        )
        for n in (1, 8)
    },
    **{
        f"8 bits: groups of {n}": Case(
            heads=n * k, kv_heads=k, sequences=((140, 300), (80, 200), (2, 9)), **E4M3
        )
        for n, k in ((1, 3), (3, 2), (7, 2), (8, 1), (71, 1))
    },
    **{
        f"8 bits: {d} and {v}": Case(
            head_dim=d, value_dim=v, sequences=MIXED, sinks=1, **E4M3
        )
        for d, v in ((16, 16), (32, 48), (64, 32), (80, 96), (96, 32), (112, 128))
    },
    "8 bits: several calls, sinks": Case(
        sinks=2, calls=2, sequences=(*MIXED[:3], *MIXED[2:]), more_rows=3, **E4M3
    ),
    # 33 blocks: the first id that is none, and ids behind the second one's length
    "8 bits: any ids": Case(
        sequences=((150, 400), (70, 90)),
        bad_ids=(
            *((0, 3, 33), (0, 4, 2**31 - 1), (0, 9, -(2**31)), (1, 2, 10**6)),
            *((1, 6, 0), (1, 7, 33), (1, 23, -1), (1, 24, 2**31 - 1)),
        ),
        **E4M3,
    ),
    "8 bits: no queries of many": Case(sequences=((1, 40), (9, 90), (5, 5)), **E4M3),
    "8 bits: small queries": Case(sequences=MIXED, large=1e-20, **E4M3),
}

# Lengths around multiples of the split; rows of one tile, of several, of many.
PARTS = ((1, 1700), (3, 20), (1, 256), (9, 600), (1, 257), (1, 0), (5, 1029), (1, 512))
SPLIT = {
    "split: mixed": Case(split_size=256, sequences=PARTS),
    "split: d128": Case(split_size=512, sequences=PARTS[:5], sinks=1, **D128),
    "split: one key head, rounded up": Case(
        split_size=300, sequences=PARTS, heads=16, kv_heads=1
    ),
    "split: groups of 20": Case(split_size=256, sequences=PARTS, heads=20, kv_heads=1),
    "split: windows": Case(split_size=256, sequences=PARTS, window=(700, 0)),
    "split: a batch with padding": Case(
        split_size=256, padded=9, calls=8, sequences=PARTS
    ),
    "split: several calls": Case(
        split_size=256, calls=2, sequences=PARTS, more_rows=3, sinks=2
    ),
    "split: int8": Case(split_size=256, sequences=PARTS, cache="int8", scales="tokens"),
    "split: ranges and drafts": Case(
        split_size=256, sequences=PARTS, ranges=((0, 900), (100, 2000)), tree=1
    ),
    "split: larger than all": Case(split_size=2**31 - 1, sequences=PARTS),
    "split: long among them": Case(
        split_size=256, sequences=((150, 600), *PARTS[:4]), **WIDE
    ),
}
NARROW_SPLIT = Case(
    split_size=256, sequences=((150, 600), *PARTS[:4], (70, 70)), **NARROW_WIDE
)
