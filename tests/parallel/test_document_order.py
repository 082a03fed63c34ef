"""Packed documents in an even order, and rings that do not reach beyond documents."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import F32, jit
from context_calls import (
    Cut,
    assert_right,
    attend_over,
    compute,
    documents,
    inputs,
    mesh_of,
    with_gradients,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check
from test_context_programs import sent, steps_of

from jax_kvblock.parallel import (
    context_parallel_attention,
    device_work,
    document_order,
    reorder_documents,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

CONTIGUOUS = Cut("ring", "contiguous")


def boundaries(lens: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def lengths(rng: np.random.Generator, count: int, longest: int = 32) -> np.ndarray:
    """From short to 32 times as long, in any order."""
    return rng.permutation(np.geomspace(64, 64 * longest, count).astype(int))


# ---- the order -----------------------------------------------------------------------


def work_by_loops(cu: np.ndarray, size: int, rows: int, causal: bool) -> np.ndarray:
    """The definition, row by row."""
    own = -(-rows // size)
    work = np.zeros(size)
    for first, end in itertools.pairwise(cu):
        for row in range(first, end):
            work[row // own] += row - first + 1 if causal else end - first
    return work / work.mean()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, 1200])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_work_of_devices(rng, size, rows, causal):
    cu = boundaries(rng.integers(0, 90, 20))
    got = device_work(cu, size, rows=rows, causal=causal)
    want = work_by_loops(cu, size, rows or cu[-1], causal)
    np.testing.assert_allclose(got, want)


EVEN = {  # documents, devices, the most that the busiest device does, of the mean
    "two": (24, 2, 1.02),
    "four": (24, 4, 1.02),
    "many documents": (300, 4, 1.1),
    "eight": (100, 8, 1.2),
}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("causal", [True, False])
def test_an_order_is_as_even_as_asked(rng, name, causal):
    count, size, most = EVEN[name]
    lens = lengths(rng, count)
    cu = boundaries(lens)
    before = device_work(cu, size, causal=causal).max()
    order = document_order(cu, size, causal=causal)
    after = device_work(boundaries(lens[order]), size, causal=causal).max()
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    assert 1 <= after <= min(most, before)


def test_padding_behind_the_last_document_is_no_work(rng):
    """Half of four devices' rows: the last two devices have none, the others all."""
    lens = np.full(16, 64)
    order = document_order(boundaries(lens), 4, rows=2048)
    work = device_work(boundaries(lens[order]), 4, rows=2048)
    np.testing.assert_allclose(work, [2, 2, 0, 0])


def test_the_order_is_the_same_each_time(rng):
    cu = boundaries(lengths(rng, 40))
    one, other = document_order(cu, 4), document_order(cu.tolist(), 4)
    np.testing.assert_array_equal(one, other)
    one[:] = 0  # the caller's own
    np.testing.assert_array_equal(document_order(cu, 4), other)


@pytest.mark.parametrize("lens", [[5], [0, 0], [0, 7, 0], [3, 3]])
def test_few_documents(lens):
    order = document_order(boundaries(lens), 4)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(lens)))
    assert device_work(boundaries(lens), 4).shape == (4,)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_documents_in_another_order_and_back(rng, axis):
    lens, order = np.int32([3, 0, 5, 2]), [2, 0, 3, 1]
    x = rng.standard_normal((12, 12, 12)).astype(np.float32)  # two rows of none
    cu = boundaries(lens)
    got, new = reorder_documents(x, cu, order, axis=axis)
    starts = [range(a, b) for a, b in itertools.pairwise(cu)]
    rows = [row for i in order for row in starts[i]] + [10, 11]
    np.testing.assert_array_equal(got, np.take(x, rows, axis))
    np.testing.assert_array_equal(new, [0, 5, 8, 10, 10])
    assert new.dtype == np.int32
    back, again = reorder_documents(got, new, np.argsort(order), axis=axis)
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(again, cu)


def test_an_order_inside_of_jit_and_over_explicit_axes(rng):
    cu, order = boundaries([3, 5]), [1, 0]
    x = rng.standard_normal(8).astype(np.float32)
    want = np.concatenate([x[3:], x[:3]])
    traced = jax.jit(lambda x: reorder_documents(x, cu, order)[0])
    np.testing.assert_array_equal(traced(x), want)
    slope = jax.grad(lambda x: (traced(x) * jnp.arange(8.0)).sum())(x)
    np.testing.assert_array_equal(slope, [5, 6, 7, 0, 1, 2, 3, 4])
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        put = jax.device_put(x, NamedSharding(mesh, P("c")))
        got, _ = reorder_documents(put, cu, order)
    assert jax.typeof(got).sharding.spec == P("c")
    np.testing.assert_array_equal(got, want)


WRONG = {
    "traced": (TypeError, "cu_seqlens must be integers on the host",
        lambda: jax.eval_shape(lambda cu: document_order(cu, 4), jnp.arange(3))),
    "falls": (ValueError, "must rise", lambda: document_order([0, 5, 3], 4)),
    "begins late": (ValueError, "cu_seqlens must begin with 0, got 2",
        lambda: document_order([2, 5], 4)),
    "no device": (ValueError, "size", lambda: document_order([0, 5], 0)),
    "few rows": (ValueError, "rows must be at least the end of|5, got 4",
        lambda: document_order([0, 5], 4, rows=4)),
}  # fmt: skip
WRONG_ORDERS = {
    "twice": (
        ValueError,
        "order must have each of the 2 documents once|[0, 0]",
        [0, 0],
    ),
    "too few": (ValueError, "each of the 2 documents once", [0]),
    "floats": (TypeError, "order must be int32[documents]", [0.0, 1.0]),
    "beyond x": (ValueError, "cu_seqlens must rise from at least 0 to at most 4", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_order(name):
    error, words, call = WRONG[name]
    check("document_order", error, words, call)


def test_what_has_no_work():
    check("device_work", ValueError, "must rise", lambda: device_work([0, 5, 3], 4))
    words = "rows must be at least"
    check("device_work", ValueError, words, lambda: device_work([0, 5], 4, rows=4))


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_orders_that_do_not_fit(name):
    error, words, order = WRONG_ORDERS[name]
    cu = [0, 2, 5] if order is None else [0, 2, 4]
    order = [0, 1] if order is None else order
    call = lambda: reorder_documents(jnp.ones(4), cu, order)  # noqa: E731
    check("reorder_documents", error, words, call)


def test_a_traced_order_is_refused():
    words = "order must be integers on the host"
    f = lambda order: reorder_documents(jnp.ones(4), [0, 2, 4], order)[0]  # noqa: E731
    call = lambda: jax.eval_shape(f, jnp.arange(2))  # noqa: E731
    check("reorder_documents", TypeError, words, call)


# ---- attention over them -------------------------------------------------------------


def drawn(
    rng: np.random.Generator, lens: Any, max_seqlen: int | None = None, **changes: Any
) -> Any:
    none = {"sinks": None, "q_lens": None, "kv_lens": None}
    cu = boundaries(lens)
    rows = {"q_len": 64, "kv_len": 64, "cu_seqlens": cu}
    call = documents(rng, F32, **(none | rows | changes))
    static = call.static | ({} if max_seqlen is None else {"max_seqlen": max_seqlen})
    return dataclasses.replace(call, static=static)


def steps(rng: np.random.Generator, lens: Any, **changes: Any) -> int:
    """How often keys travel."""
    found = sent(steps_of(drawn(rng, lens, **changes), CONTIGUOUS))
    (times,) = {*found.values()} or {0}
    return times


LONGEST = [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3), (64, 3)]


@pytest.mark.parametrize(("most", "times"), LONGEST)
def test_a_ring_reaches_as_far_as_documents(rng, most, times):
    """16 rows a device: the last row of a document of 17 is one device on, or none."""
    lens = [*[1] * (64 - most), most]
    assert steps(rng, lens, max_seqlen=most) == times
    assert steps(rng, lens, max_seqlen=most, causal=False) == min(2 * times, 3)
    assert steps(rng, lens) == 3  # traced boundaries: nobody knows


def test_a_window_and_documents_shorten_together(rng):
    lens = [30, 34]
    assert steps(rng, lens, max_seqlen=34) == 3
    assert steps(rng, lens, window=(17, None), max_seqlen=34) == 2
    assert steps(rng, lens, window=(3, None), max_seqlen=34) == 1


@pytest.mark.parametrize("as_pair", [False, True])
def test_boundaries_on_the_host_say_how_long_documents_are(rng, as_pair):
    call = drawn(rng, [10, 12, 8, 16, 17, 1])
    cu = call.operands["cu_seqlens"]
    known = (cu, cu) if as_pair else cu

    def attend(q: Any, k: Any, v: Any) -> Any:
        return context_parallel_attention(
            q, k, v, axis_name="c", causal=True, layout="contiguous", cu_seqlens=known,
            strategy="ring",
        )  # fmt: skip

    over = jax.shard_map(attend, mesh=mesh_of(), in_specs=P("c"), out_specs=P("c"))
    made = jax.make_jaxpr(over)(*(call.arrays[n] for n in "qkv"))
    assert str(made).count(" ppermute[") == 1  # keys with values, to the next device


def random_lengths(rng: np.random.Generator) -> np.ndarray:
    """Of documents in 64 rows, some of no row; a few rows of none behind them."""
    cuts = np.sort(rng.integers(0, 62, int(rng.integers(1, 9))))
    return np.diff([0, *cuts, 62])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "auto"])
def test_attention_knows_how_long_documents_are(rng, strategy, causal):
    """out, lse and all gradients, of random documents, the longest as said."""
    cut = dataclasses.replace(CONTIGUOUS, strategy=strategy)
    for _ in range(4):
        lens = random_lengths(rng)
        call = drawn(rng, lens, max_seqlen=int(lens.max()), causal=causal)
        assert_right(call, compute(call, cut))


@pytest.mark.parametrize(
    "cut",
    [
        Cut("ring", "zigzag"),
        Cut("ulysses", "contiguous"),
        Cut("ulysses_ring", "contiguous"),
    ],
    ids=str,
)
def test_other_ways_take_it_and_have_no_use_for_it(rng, cut):
    call = drawn(rng, [24, 40], max_seqlen=40)
    assert_right(call, compute(call, cut))


def test_documents_in_an_even_order_are_what_they_were(rng):
    """Attention over documents in another order, put back."""
    lens = np.int32([30, 4, 9, 1, 12, 8])
    call = drawn(rng, lens)
    cu = call.operands["cu_seqlens"]
    order = document_order(cu, 4)
    assert (order != np.arange(6)).any()
    moved = {n: reorder_documents(a, cu, order)[0] for n, a in call.arrays.items()}
    _, new = reorder_documents(call.arrays["q"], cu, order)
    cotangents = tuple(reorder_documents(x, cu, order)[0] for x in call.cotangents)
    there = dataclasses.replace(
        call, arrays=moved, operands={"cu_seqlens": new}, cotangents=cotangents
    )
    f = jit(with_gradients(attend_over(there, CONTIGUOUS)))
    got = {
        n: reorder_documents(x, new, np.argsort(order))[0]
        for n, x in f(*inputs(there)).items()
    }
    assert_right(call, got)


LONGER = {
    "known": (ValueError, "max_seqlen must be at least|40, got 39", [0, 24, 64], 39),
    "none": (ValueError, "max_seqlen is of packed documents|cu_seqlens", None, 39),
    "zero": (ValueError, "max_seqlen", [0, 24, 64], 0),
    "a float": (ValueError, "max_seqlen", [0, 24, 64], 2.5),
}


def over_rows(cu: Any, most: Any) -> Any:
    packed = () if cu is not None else (1,)
    q = jnp.ones((*packed, 64, 2, 8))

    def attend(q: Any) -> Any:
        return context_parallel_attention(
            q, q, q, axis_name="c", causal=True, layout="contiguous", cu_seqlens=cu,
            max_seqlen=most,
        )  # fmt: skip

    rows = P(*[None] * len(packed), "c")
    return jax.shard_map(attend, mesh=mesh_of(), in_specs=rows, out_specs=rows)(q)


@pytest.mark.parametrize("name", LONGER)
def test_documents_that_are_longer_than_said(name):
    error, words, cu, most = LONGER[name]
    where = "context_parallel_attention"
    check(where, error, words, lambda: jax.jit(lambda: over_rows(cu, most))())
