"""Attention over a sequence that is cut over devices: every result against float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_near
from attention_model import BF16, F16, F32, Call, cast, draw, jit, truth
from context_calls import (
    CUTS,
    HEADS,
    LAYOUTS,
    STRATEGIES,
    Cut,
    assert_right,
    attend_over,
    boundaries,
    by_cut,
    by_kind,
    by_strategy,
    compute,
    covering,
    documents,
    everything,
    expected,
    inputs,
    laid_out,
    mesh_of,
    one_of_each,
    put_back,
    segments,
    simple,
    specs_of,
    table,
    with_gradients,
)
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jax_kvblock import flash_attention
from jax_kvblock.parallel import context_parallel_attention

pytestmark = pytest.mark.usefixtures("four_cpus")

# ---- the table: any two options meet -------------------------------------------------

MASKS: dict[str, dict[str, Any]] = {  # a device has 8 rows, a chunk 4
    "full": {},
    "causal": {"causal": True},
    "2 back": {"causal": True, "window": (2, None)},
    "17 back": {"causal": True, "window": (17, 3)},
    "any back, 9 ahead": {"window": (None, 9)},
    "1 back, any ahead": {"window": (1, None)},
    "5 back, 10 ahead": {"window": (5, 10)},
}


def options_of(rng: np.random.Generator, row: dict[str, Any]) -> dict[str, Any]:
    """What rows of both tables say alike."""
    options = dict(MASKS[row["mask"]])
    if row["cap"]:
        options["softcap"] = 1.5
    if row["sinks"]:
        options["sinks"] = cast(rng.standard_normal(4), F32)
    if row["scale"]:
        options["scale"] = -0.3
    return options


def shown(row: dict[str, Any]) -> set[str]:
    """The kind of mask, and which options a row has."""
    mask = "window" if "window" in MASKS[row["mask"]] else row["mask"]
    named = {name for name in ("ids", "cap", "sinks", "scale") if row.get(name)}
    return {mask, *row["lens"].split()} | named


def poisoned(call: Call) -> Call:
    """NaN in what lies beyond the lengths, of batches and of documents."""
    arrays = {n: np.array(x) for n, x in call.arrays.items()}
    cu_q, cu_kv = boundaries(call)
    for name, lens, cu in (
        ("q", "q_lens", cu_q),
        ("k", "kv_lens", cu_kv),
        ("v", "kv_lens", cu_kv),
    ):
        for i, n in enumerate(np.asarray(call.operands.get(lens, ()))):
            member = arrays[name][i] if cu is None else arrays[name][cu[i] : cu[i + 1]]
            member[max(n, 0) :] = np.nan
    return dataclasses.replace(call, arrays=jax.tree.map(jnp.asarray, arrays))


LENS = {  # in, at and behind the middle of a chunk; none, and more than there are
    "q_lens": np.int32([11, 99, 0]),
    "kv_lens": np.int32([21, 0, 40]),
}
SIZES = {"32 rows": (32, 32), "16 rows": (16, 32), "40 rows": (40, 24)}
BATCHED = covering(
    {
        "cut": CUTS,
        "mask": tuple(MASKS),
        "lens": ("", "q_lens", "kv_lens", "q_lens kv_lens"),
        "ids": ("", "ids", "pair of ids"),
        "cap": ("", "softcap"),
        "sinks": ("", "sinks"),
        "scale": ("", "scale"),
        "heads": tuple(HEADS),
        "dims": ("", "wide values", "narrow values"),
        "size": tuple(SIZES),
    },
    lambda row: row.get("ids") != "ids" or row.get("size", "32 rows") == "32 rows",
)


def batched(rng: np.random.Generator, row: dict[str, Any], dtype: Any = F32) -> Call:
    rows, keys = SIZES[row["size"]]
    wide = {"": (8, 8), "wide values": (8, 24), "narrow values": (16, 8)}[row["dims"]]
    call = draw(
        rng, dtype, batch=3, q_len=rows, kv_len=keys, heads=4,
        kv_heads=HEADS[row["heads"]], dim=wide[0], value_dim=wide[1],
        **options_of(rng, row),
    )  # fmt: skip
    if row["ids"]:
        of_rows, of_keys = segments(rng, 3, rows), segments(rng, 3, keys)
        pair = row["ids"] == "pair of ids"
        call = call.replace(segment_ids=(of_rows, of_keys) if pair else of_rows)
    return call.replace(**{name: LENS[name] for name in row["lens"].split()})


BATCHES = one_of_each(CUTS, BATCHED, shown)


@pytest.mark.wide
@table(BATCHED, often=BATCHES)
def test_batches(rng, row):
    call = batched(rng, row)
    assert_right(call, compute(call, row["cut"]))


# ---- packed documents ----------------------------------------------------------------

# Boundaries of queries and keys. In zigzag over four devices they are multiples of 8;
# contiguous ones are moved to where no device begins.
DOCUMENTS: dict[str, Any] = {
    "long and short": ([0, 8, 48, 56, 64], None),
    "between other rows": ([8, 24, 56], None),
    "empty ones": ([0, 0, 16, 16, 16, 56, 56], None),
    "queries and keys": ([0, 8, 24, 24, 56, 64], [0, 24, 32, 40, 40, 48]),
    "few queries": ([8, 16, 24], [8, 40, 56]),
}
MOVED = (0, 3, -2, 1, -3, 2)  # what a boundary within the rows is moved by
OF_DOCUMENTS = {
    "q_lens": np.int32([7, 0, 9, 99, 5]),
    "kv_lens": np.int32([29, 3, 50, 6, 0]),
}
PACKED = covering(
    {
        "cut": CUTS,
        "mask": ("full", "causal", "2 back", "17 back", "5 back, 10 ahead"),
        "documents": tuple(DOCUMENTS),
        "lens": ("", "q_lens", "kv_lens", "q_lens kv_lens"),
        "cap": ("", "softcap"),
        "sinks": ("", "sinks"),
        "scale": ("", "scale"),
        "heads": tuple(HEADS),
        "dims": ("", "wide values", "narrow values"),
    }
)


def moved(cu: list[int], length: int) -> list[int]:
    """Boundaries that are no multiples of anything; documents stay as many."""
    off = [b + MOVED[i % 6] if 0 < b < length else b for i, b in enumerate(cu)]
    return np.maximum.accumulate(off).tolist()


def packed(rng: np.random.Generator, row: dict[str, Any], dtype: Any = F32) -> Call:
    cu_q, cu_kv = DOCUMENTS[row["documents"]]
    rows, keys = (32, 64) if row["documents"] == "few queries" else (64, 64)
    if row["cut"].layout == "contiguous":
        cu_q = moved(cu_q, rows)
        cu_kv = cu_kv and moved(cu_kv, keys)
    wide = {"": (8, 8), "wide values": (8, 24), "narrow values": (16, 8)}[row["dims"]]
    cu = np.int32(cu_q) if cu_kv is None else (np.int32(cu_q), np.int32(cu_kv))
    call = draw(
        rng, dtype, packed=True, q_len=rows, kv_len=keys, heads=4,
        kv_heads=HEADS[row["heads"]], dim=wide[0], value_dim=wide[1], cu_seqlens=cu,
        **options_of(rng, row),
    )  # fmt: skip
    lens = {n: np.resize(OF_DOCUMENTS[n], len(cu_q) - 1) for n in row["lens"].split()}
    return call.replace(**lens)


PACKS = one_of_each(CUTS, PACKED, shown)


@pytest.mark.wide
@table(PACKED, often=PACKS)
def test_documents(rng, row):
    call = packed(rng, row)
    assert_right(call, compute(call, row["cut"]))


@pytest.mark.parametrize(
    ("rows", "more"), [(BATCHES, {"ids"}), (PACKS, set())], ids=["batches", "documents"]
)
def test_one_row_of_each_cut_is_enough(rows, more):
    """Each strategy and each layout has windows, lengths, sinks and a scale there."""
    assert [row["cut"] for row in rows] == [*CUTS]
    for name in (*STRATEGIES, *LAYOUTS):
        own = [row for row in rows if name in (row["cut"].strategy, row["cut"].layout)]
        options = {"window", "q_lens", "kv_lens", "cap", "sinks", "scale"} | more
        assert options <= set().union(*map(shown, own)), name


# ---- what the tables leave out -------------------------------------------------------


@pytest.mark.wide
@by_cut
@by_kind
def test_what_lies_beyond_lengths_is_never_read(rng, cut, kind):
    """NaN there, in queries, keys and values, changes nothing."""
    call = kind(rng, window=None, segment_ids=None)
    assert_right(call, compute(poisoned(call), cut), expected(call))


def test_the_poison_lies_beyond_lengths(rng):
    call = poisoned(documents(rng))
    at = {n: np.isnan(x).any((1, 2)).nonzero()[0] for n, x in call.arrays.items()
          if n in "qkv"}  # fmt: skip
    keys = [13, 14, 15, 55]
    assert {n: x.tolist() for n, x in at.items()} == {
        "q": list(range(46, 56)), "k": keys, "v": keys,
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 1])
@by_strategy
@by_kind
def test_fewer_devices(rng, kind, strategy, size):
    """Two devices; and one, which is as good as none."""
    call = kind(rng)
    assert_right(call, compute(call, Cut(strategy, "zigzag", size)))


OF_THREE = {
    everything: {"q_len": 48, "kv_len": 48, "heads": 6, "kv_heads": 3},
    documents: {
        "q_len": 72, "kv_len": 72, "heads": 6, "kv_heads": 3,
        "cu_seqlens": np.int32([6, 18, 54]),
    },
}  # fmt: skip


@pytest.mark.cases(2)
@by_cut
@by_kind
def test_three_devices(rng, kind, cut):
    """No power of two, neither of devices nor of heads."""
    own = {"sinks": cast(rng.standard_normal(6), F32)}
    if kind is everything:
        own["segment_ids"] = segments(rng, 2, 48)
    call = kind(rng, **OF_THREE[kind], **own)
    assert_right(call, compute(call, dataclasses.replace(cut, size=3)))


def test_one_array_of_boundaries_twice_for_rows_and_more_keys(rng):
    """A pair, though it is one array: keys behind the last document are padding."""
    bounds = np.int32([0, 16, 32])
    q, k, v = (cast(rng.standard_normal((n, 2, 8)), F32) for n in (32, 64, 64))

    def local(q: Any, k: Any, v: Any) -> Any:
        how = {"axis_name": "c", "causal": True, "layout": "contiguous"}
        return context_parallel_attention(q, k, v, cu_seqlens=(bounds, bounds), **how)

    rows = P("c")
    over = jax.shard_map(local, mesh=mesh_of(), in_specs=rows, out_specs=rows)
    want = flash_attention(
        q, k[:32], v[:32], causal=True, cu_seqlens=(bounds, bounds.copy())
    )
    assert_close(jit(over)(q, k, v), want, F32)


HALVES = [
    *((Cut(s, "zigzag"), BF16) for s in STRATEGIES),
    (Cut("ring", "contiguous"), F16),
    (Cut("ulysses_ring", "zigzag"), F16),
]


@pytest.mark.parametrize(("cut", "dtype"), HALVES, ids=str)
def test_half_precision(rng, cut, dtype):
    """Row by row about as good as plain code in this dtype; lse is float32's."""
    call = everything(rng, dtype, kv_heads=4, dim=16)
    got, want = compute(call, cut), expected(call)
    assert_right(call, got, want)
    assert_near(call, got, want)


def test_documents_in_half_precision(rng):
    call = documents(rng, BF16)
    assert_right(call, compute(call, Cut("ring")))


ODD_HEADS = [
    ("ulysses", 8, 8),  # two key heads for each device
    ("ulysses", 12, 4),
    ("ulysses", 8, 1),
    ("ulysses_ring", 6, 6),  # exchanged by two, in a ring of two
    ("ulysses_ring", 4, 2),
    ("ulysses_ring", 6, 3),  # nothing to exchange
    ("ring", 3, 1),
    ("all_gather", 5, 5),
]


@pytest.mark.parametrize(("strategy", "heads", "kv_heads"), ODD_HEADS)
def test_numbers_of_heads(rng, strategy, heads, kv_heads):
    sinks = cast(rng.standard_normal(heads), F32)
    call = simple(rng, heads=heads, kv_heads=kv_heads, sinks=sinks)
    assert_right(call, compute(call, Cut(strategy)))


SHORT = [  # rows and keys of a device
    ("zigzag", 2, 2, {"causal": True}),
    ("zigzag", 2, 6, {"window": (3, 2)}),
    ("contiguous", 1, 1, {"causal": True}),
    ("contiguous", 3, 5, {"causal": True}),
    ("contiguous", 3, 3, {"causal": True, "window": (3, None)}),
]


@pytest.mark.parametrize(("layout", "rows", "keys", "mask"), SHORT)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses_ring"])
def test_few_rows(rng, strategy, layout, rows, keys, mask):
    """Chunks of one row, and shards of odd lengths."""
    sizes = {"q_len": 4 * rows, "kv_len": 4 * keys, "heads": 2, "dim": 8}
    call = draw(rng, batch=1, **sizes, **mask)
    assert_right(call, compute(call, Cut(strategy, layout)))


@by_strategy
def test_lengths_of_nothing(rng, strategy):
    """Without keys a row has its sink; without queries there is no row."""
    call = simple(rng, q_lens=np.int32([0, 20]), kv_lens=np.int32([9, 0]))
    got = compute(call, Cut(strategy))
    assert_right(call, got)
    assert not np.asarray(got["out"]).any()
    sinks = np.asarray(call.arrays["sinks"])
    np.testing.assert_allclose(got["lse"][1, :20], np.tile(sinks, (20, 1)), rtol=1e-6)
    assert np.isneginf(got["lse"][1, 20:]).all() and np.isneginf(got["lse"][0]).all()


def test_lengths_below_zero_are_zero(rng):
    zero = simple(rng, q_lens=np.int32([0, 32]), kv_lens=np.int32([0, 14]))
    below = np.int32([-(2**31), 32]), np.int32([-5, 14])
    below = zero.replace(q_lens=below[0], kv_lens=below[1])
    assert_right(zero, compute(below, Cut("ring")))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(3, 0), (4, 0), (7, 0), (8, 0), (0, 4), (0, 1)])
def test_a_window_that_just_reaches_another_chunk(rng, layout, window):
    """A chunk has 4 rows and a device 8; what is one row away is seen, or is not."""
    call = draw(rng, batch=1, q_len=32, kv_len=32, heads=1, kv_heads=1, dim=8)
    call, cut = call.replace(window=window), Cut("ring", layout)
    there, want = laid_out(call, cut), truth(call)
    out, lse = jit(attend_over(there, cut))(there.arrays, there.operands)
    for name, x in put_back({"out": out, "lse": lse}, call, cut).items():
        assert_close(x, want[name])


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("sizes", [(0, 0), (0, 32), (32, 0)], ids=str)
def test_sequences_of_nothing(rng, sizes, cut):
    """No queries, no keys, or neither; a sink is there for rows without keys."""
    rows, keys = sizes
    sinks = cast(rng.standard_normal(4), F32)
    ids = np.zeros((1, rows), np.int32), np.zeros((1, keys), np.int32)
    call = draw(
        rng, F32, batch=1, q_len=rows, kv_len=keys, heads=4, kv_heads=2, dim=8,
        sinks=sinks, segment_ids=ids,
    )  # fmt: skip
    assert_right(call, compute(call, cut))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_no_rows(rng, layout):
    call = documents(rng, q_len=0, kv_len=0, cu_seqlens=np.int32([0, 0]), q_lens=None,
                     kv_lens=None)  # fmt: skip
    for strategy in STRATEGIES:
        assert_right(call, compute(call, Cut(strategy, layout)))


@by_strategy
def test_scale_and_extreme_ids(rng, strategy):
    """A scale of one's own; ids at the ends of int32 are ids like others."""
    ids = np.where(segments(rng, 2, 32) > 0, 2**31 - 1, -(2**31) + 2)
    call = simple(rng, scale=-0.3, segment_ids=ids.astype(np.int32))
    assert_right(call, compute(call, Cut(strategy)))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_deterministic(rng, strategy):
    """As right, and the same bits every time."""
    call = simple(rng, deterministic=True)
    there = laid_out(call, cut := Cut(strategy))
    f = jit(with_gradients(attend_over(there, cut)))
    once, again = f(*inputs(there)), f(*inputs(there))
    assert_right(call, put_back(once, call, cut))
    for name, x in once.items():
        assert np.array_equal(x, again[name]), name


def calls_in(jaxpr: Any) -> list[tuple[str, bool]]:
    """Of each call of attention, which one it is, and whether it is deterministic."""
    found = []
    for equation in jaxpr.eqns:
        call = equation.params.get("call")
        if hasattr(call, "config"):
            found.append((equation.primitive.name, call.config.deterministic))
        for inner in jaxprs_in_params(equation.params):
            found += calls_in(inner)
    return found


@pytest.mark.cases(2)
@by_kind
def test_determinism_is_handed_on(rng, kind):
    """To each call of attention, forward and backward: a CPU's bits never differ."""
    for cut, wanted in itertools.product(CUTS, (True, False)):
        call = laid_out(kind(rng, deterministic=wanted), cut)
        attend = with_gradients(attend_over(call, cut))
        found = calls_in(jax.make_jaxpr(attend)(*inputs(call)).jaxpr)
        assert [given for _, given in found] == [wanted] * len(found), cut
        names = {name for name, _ in found}
        assert {"kvblock_attention_forward", "kvblock_attention_backward"} <= names


def test_out_alone_is_the_same(rng):
    """Without return_lse, and its gradients."""
    call = simple(rng)
    there = laid_out(call, cut := Cut("ring"))
    arrays, _, rows = specs_of(there)
    attend = jax.shard_map(
        lambda x: context_parallel_attention(**x, causal=True, axis_name="c",
                                             strategy="ring"),
        mesh=mesh_of(), in_specs=(arrays,), out_specs=rows,
    )  # fmt: skip
    out, pull = jax.vjp(jax.jit(attend), there.arrays)
    got = {f"d_{n}": x for n, x in pull(there.cotangents[0])[0].items()}
    want = truth(call, (call.cotangents[0], np.zeros_like(call.cotangents[1])))
    for name, x in put_back(got | {"out": out}, call, cut).items():
        assert_close(x, want[name])
