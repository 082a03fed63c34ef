"""The calls of attention_sweep.py: every option at every pair of head dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from attention_problems import Case

PRECISIONS = {"highest": 0, "default": 1}  # kvblock_precision
# What kernels are compiled for, and smaller ones that are padded to that.
DIMS = (
    *((64, 64), (56, 56), (24, 24), (8, 8), (64, 32), (16, 56)),
    *((96, 96), (88, 88), (72, 72), (96, 64), (40, 96)),
    *((128, 128), (120, 120), (104, 104), (128, 64), (64, 128)),
    *((192, 128), (184, 120), (136, 64)),
    *((192, 192), (184, 184), (152, 152), (192, 136), (128, 192)),
    *((256, 256), (248, 248), (200, 200), (256, 64), (64, 256)),
)
# Sides of tiles, and their neighbours.
EDGES = (
    1,
    2,
    63,
    64,
    65,
    80,
    81,
    127,
    128,
    129,
    160,
    177,
    191,
    193,
    256,
    257,
    383,
    640,
)
GROUPS = ((1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (3, 3), (8, 8))
CAUSAL = (-1, 0)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window": CAUSAL},
    "causal, shift": {"window": CAUSAL, "shift": True},
    "window": {"window": (37, 5)},
    "window behind": {"window": (100, 0)},
    "window ahead": {"window": (-1, 20), "shift": True},
    "lengths": {"lengths": True},
    "lengths, causal": {"lengths": True, "window": CAUSAL, "shift": True},
    "lengths, window": {"lengths": True, "window": (70, 30), "shift": True},
    "packed": {"packed": True},
    "packed, causal": {"packed": True, "window": CAUSAL},
    "packed, window": {"packed": True, "window": (50, 10), "shift": True},
    "segments": {"segments": "sorted"},
    "segments, causal": {"segments": "sorted", "window": CAUSAL},
    "scattered segments": {"segments": "scattered"},
    "softcap": {"softcap": 30.0},
    "small softcap, causal": {"softcap": 0.7, "window": CAUSAL},
    "large softcap": {"softcap": 2e3},
    "softcap, lengths": {"softcap": 5.0, "lengths": True},
    "sinks": {"sinks": 1},
    "sinks, causal": {"sinks": 1, "window": CAUSAL, "lengths": True},
    "large scores, causal": {"scale": 1.0, "window": CAUSAL},  # references move
    "negative scale": {"scale": -0.11},
    "scale of zero": {"scale": 0.0, "window": CAUSAL},
    "bias": {"bias": ("float32", 1, True)},
    "bias of 16 bits": {"bias": ("", 1, True), "window": CAUSAL},
    "shared bias": {"bias": ("", 1, False)},
    "own bias": {"bias": ("float32", 0, True), "lengths": True},
    "tiles": {"tiles": (1, True)},
    "own tiles, causal": {"tiles": (0, False), "window": CAUSAL},
    "partial tiles": {"tiles": (1, True), "masks": 3},
    "own partial tiles, causal": {"tiles": (0, False), "masks": 5, "window": CAUSAL},
    "tiles, softcap": {"tiles": (1, True), "softcap": 5.0},
    "partial tiles, softcap": {"tiles": (1, True), "masks": 3, "softcap": 5.0},
    "partial tiles, segments": {
        **{"tiles": (1, False), "masks": 3},
        **{"segments": "sorted", "lengths": True},
    },
    "partial tiles, bias": {
        **{"tiles": (1, True), "masks": 3},
        "bias": ("float32", 1, True),
    },
    "dropout": {"dropout": 13},
    "dropout, causal": {"dropout": 64, "window": CAUSAL, "shift": True},
    "dropout, lengths": {"dropout": 100, "lengths": True, "sinks": 1},
    "dropout, packed, causal": {"dropout": 38, "packed": True, "window": CAUSAL},
    "dropout, segments": {
        **{"dropout": 1, "segments": "scattered", "window": (70, 30)},
    },
    "dropout, everything": {  # but for Hopper's kernels
        **{"dropout": 65, "window": (90, 40), "lengths": True, "softcap": 5.0},
        **{"bias": ("float32", 1, True), "tiles": (1, True), "masks": 2, "scale": -0.2},
    },
    "everything": {
        **{"window": (90, 40), "shift": True, "lengths": True, "segments": "sorted"},
        **{"softcap": 30.0, "scale": -0.2, "bias": ("float32", 1, False), "sinks": 1},
        **{"tiles": (1, True), "masks": 2},
    },
}


def small(name: str, dtype: str, lens: tuple[int, int], **changes: Any) -> Case:
    """A call with this option, of another seed and other sizes than others.

    lens: queries and keys of the first option; the next one has one more of each.
    changes: head_dim and value_dim, and whatever else is said otherwise.
    """
    number = list(OPTIONS).index(name)
    heads, kv_heads = ((2, 1), (2, 2), (6, 2))[number % 3]
    sizes: dict[str, Any] = {"batch": 2, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"q_len": lens[0] + number, "kv_len": lens[1] + number} | OPTIONS[name]
    if "bias" in sizes:
        of, rows, own = sizes["bias"]
        sizes["bias"] = (of or dtype, rows or 2, own)
    if "tiles" in sizes:
        rows, own = sizes["tiles"]
        sizes["tiles"] = (rows or 2, own)
    return Case(dtype, **(sizes | changes), seed=number, name=name)


FEW = ("full", "causal, shift", "lengths", "lengths, window", "scattered segments",
       "softcap, lengths", "sinks, causal")  # fmt: skip
WHOLE = ("full", "causal", "scattered segments", "softcap", "sinks", "negative scale")
LONG = (2048, 4096, 8192)
PAIRS = 6_000_000  # scores of a call, at most


def draw_cases(seed: int, rounds: int) -> Iterator[Case]:
    """Every option at every pair of head dims, `rounds` times, at random sizes."""
    rng = np.random.default_rng(seed)

    def length() -> int:
        return int(rng.choice(EDGES) if rng.random() < 0.5 else rng.integers(1, 701))

    def few_queries(most: int) -> dict[str, int]:
        kv_len = int(rng.integers(1, most))
        return {"q_len": int(rng.integers(1, 17)), "kv_len": kv_len}

    def case(name: str, dims: tuple[int, int], kind: str = "", **sizes: Any) -> Case:
        options = dict(OPTIONS[name])
        heads, kv_heads = GROUPS[rng.integers(len(GROUPS))]
        dtype = kind or ("bfloat16", "float16")[rng.integers(2)]
        batch = int(rng.integers(1, 5))
        drawn = {"q_len": length(), "kv_len": length(), "heads": heads}
        drawn |= {"kv_heads": kv_heads, "batch": batch} | sizes
        # More CTAs than fit at once: their rounds, and heads that take turns.
        many = not sizes and rng.random() < 0.1
        if many:
            drawn |= {"batch": 24, "heads": 8, "kv_heads": 8 >> int(rng.integers(3))}
            drawn |= {"q_len": int(rng.integers(30, 300)), "kv_len": 150}
        pairs = drawn["heads"] * drawn["q_len"] * drawn["kv_len"]
        batch = drawn["batch"] = min(drawn["batch"], max(1, PAIRS // pairs))
        if "bias" in options:
            of, rows, own = options["bias"]
            options["bias"] = (of or dtype, rows or batch, own)
        if "tiles" in options:
            rows, own = options["tiles"]
            options["tiles"] = (rows or batch, own)
        if options.get("sinks") and rng.random() < 0.5:
            options["sinks"] = batch
        if kind:
            options["precision"] = list(PRECISIONS)[rng.integers(2)]
        number = int(rng.integers(2**31))
        name = f"{name}, many" if many else name
        return Case(dtype, *dims, **drawn, **options, name=name, seed=number)

    for _, name, dims in itertools.product(range(rounds), OPTIONS, DIMS):
        yield case(name, dims)
    # Where kernels take other tiles, or clusters: long rows.
    few = {"heads": 2, "kv_heads": 1, "batch": 1}
    names = ("full", "causal", "segments", "packed, causal", "lengths, causal")
    for _, name, q_len in itertools.product(range(rounds * 2), names, LONG):
        lengths = {"q_len": q_len + int(rng.integers(90)), "kv_len": length() // 3 + 60}
        yield case(name, (128, 128), **lengths, **few)
    # Few queries, whose keys are shared out.
    for _, name, dims in itertools.product(range(rounds), FEW, DIMS):
        yield case(name, dims, **few_queries(5000), batch=int(rng.integers(1, 9)))
    # The same for about as many as a GPU has multiprocessors: each has whole ones.
    for name, dims in itertools.product(WHOLE, DIMS):
        yield case(name, dims, **few_queries(900), batch=128, heads=2, kv_heads=1)
    for name, dims, q_len in itertools.product(("full", "causal"), DIMS, LONG[::2]):
        lengths = {"q_len": q_len + int(rng.integers(90)), "kv_len": length() // 4 + 60}
        yield case(name, dims, **lengths, **few)
    # float32 in both precisions, a few queries among them.
    for _, name, dims in itertools.product(range(rounds), OPTIONS, DIMS):
        yield case(name, dims, "float32")
    for _, name, dims in itertools.product(range(rounds), FEW, DIMS):
        yield case(name, dims, "float32", **few_queries(900), batch=3)
