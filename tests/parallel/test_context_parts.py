"""Parts of rows' attention: few are joined by the calls themselves, many in float32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_near
from attention_model import BF16, Call, cast
from context_calls import (
    LAYOUTS,
    Cut,
    compute,
    documents,
    expected,
    segments,
    simple,
)
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_kvblock.parallel import context_parallel_attention, sums

pytestmark = pytest.mark.usefixtures("four_cpus")

# ---- which way, by the number of parts -----------------------------------------------


def primitives(jaxpr: Any, found: Counter[str]) -> Counter[str]:
    """How often there is which operation of attention, at any depth."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("kvblock_attention_"):
            found[name.removeprefix("kvblock_attention_")] += 1
        for inner in jaxprs_in_params(equation.params):
            primitives(inner, found)
    return found


def traced(size: int, segments: bool = False, **how: Any) -> Counter[str]:
    """Of both passes over so many devices, which need not be there."""
    rows = P(None, "c")

    def local(q: Any, k: Any, v: Any) -> Any:
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segments else None
        return context_parallel_attention(
            q, k, v, axis_name="c", causal=True, segment_ids=ids, **how
        )

    mesh = AbstractMesh((size,), ("c",), axis_types=(AxisType.Auto,))
    over = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(over, q, k, v)
        return out, pull(d_out)

    args = [jax.ShapeDtypeStruct((1, 16 * size, n, 8), BF16) for n in (4, 2, 2, 4)]
    return primitives(jax.make_jaxpr(both)(*args).jaxpr, Counter())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_up_to_eight_parts_are_joined_by_their_calls(size, layout):
    found = traced(size, strategy="ring", layout=layout)
    later = {"joined": size - 1, "backward_added": size - 1}
    assert found == Counter({"forward": 1, "backward": 1} | later)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_parts_are_summed_in_float32(layout):
    found = traced(9, strategy="ring", layout=layout)
    assert found == {"forward": 9, "backward": 9}


def test_parts_are_the_calls_of_a_pass():
    """A window leaves shards out; with segments a step may have several calls."""
    found = traced(16, strategy="ring", layout="contiguous", window=(20, None))
    assert found == {"forward": 1, "joined": 2, "backward": 1, "backward_added": 2}
    how = {"strategy": "ring", "window": (100, None), "segments": True}
    few, many = (traced(size, **how) for size in (2, 4))
    assert 2 < few.total() / 2 <= sums.MOST_ROUNDED < many.total() / 2
    assert few["forward"] == few["backward"] == 1
    assert few["joined"] == few["backward_added"] == few.total() / 2 - 1
    assert {*many} == {"forward", "backward"}


def test_gathered_keys_are_two_parts():
    found = traced(16, strategy="all_gather")
    assert found == {"forward": 1, "joined": 1, "backward": 1, "backward_added": 1}


# ---- both ways are right -------------------------------------------------------------


def causal(rng: np.random.Generator) -> Call:
    return simple(rng, BF16, sinks=cast([1, -2, 0, 3], np.float32))


def packed(rng: np.random.Generator) -> Call:
    """With rows of no document."""
    return documents(rng, BF16, cu_seqlens=np.int32([8, 24, 56]), q_lens=None,
                     kv_lens=None)  # fmt: skip


def with_segments(rng: np.random.Generator) -> Call:
    call = simple(rng, BF16, sinks=None)
    batch, length = call.arrays["q"].shape[:2]
    return call.replace(segment_ids=segments(rng, batch, length))


def lengths(rng: np.random.Generator) -> Call:
    """Shards that nobody sees, and devices whose rows are not there."""
    call = simple(rng, BF16, sinks=None)
    lens = np.int32([11, 40, 3])[: call.arrays["q"].shape[0]]
    return call.replace(q_lens=lens, kv_lens=lens[::-1])


@pytest.mark.wide
@pytest.mark.parametrize("most", [0, 8], ids=["float32 between parts", "joined"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("kind", [causal, packed, with_segments, lengths])
def test_either_way_is_right(rng, monkeypatch, kind, strategy, most):
    """In bfloat16, where the two round differently, by the bar of plain jnp."""
    monkeypatch.setattr(sums, "MOST_ROUNDED", most)
    call = kind(rng)
    got = compute(call, Cut(strategy))
    want = expected(call)
    assert got["out"].dtype == got["d_q"].dtype == BF16
    if "cu_seqlens" in call.operands:  # which the bar takes in pairs
        call = call.replace(cu_seqlens=(call.operands["cu_seqlens"],) * 2)
    assert_near(call, got, want, [n for n in got if n != "d_sinks"])


def test_the_two_ways_round_differently(rng, monkeypatch):
    """Else the test above would test one of them twice."""
    call = causal(rng)
    joined = compute(call, Cut("ring"))
    monkeypatch.setattr(sums, "MOST_ROUNDED", 0)
    apart = compute(call, Cut("ring"))
    for name in ("out", "d_q"):
        assert not np.array_equal(joined[name], apart[name])
    for name in ("lse", "d_k", "d_v"):
        np.testing.assert_allclose(
            joined[name].astype(np.float32), apart[name].astype(np.float32),
            rtol=0.02, atol=0.02,
        )  # fmt: skip
