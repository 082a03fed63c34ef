"""Benchmarks of attention run, on one device and several, and time no wrong result."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from run_benchmarks import imported, small

pytestmark = pytest.mark.early


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_sparse", monkeypatch)


@pytest.fixture
def dropout(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_attention_dropout", monkeypatch)


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_attention_fp8", monkeypatch)


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_parallel", monkeypatch)


GROUPS = {"fixed", "threshold", "pooled", "learned"}


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_a_part_of_a_sequence_alone(place: int, parallel: ModuleType) -> None:
    """What one of two devices computes, where there is one; gradients, too."""
    local = functools.partial(
        parallel.context_parallel_attention,
        axis_name="context",
        strategy="ring",
        causal=True,
    )
    timed = parallel._alone(parallel.Length(64), 2, place, local)
    out = timed.run("forward")
    assert out.shape == (1, 32, parallel.HEADS, parallel.DIM)
    again, gradients = timed.run("both")
    assert jax.numpy.abs(out - again).max() < 0.01
    assert [g.shape[2] for g in gradients] == [32, 8, 8]
    assert all(bool(jax.numpy.abs(g).max() > 0) for g in gradients)


@pytest.mark.cpu  # with four devices
def test_the_whole_sequence_on_each_device_at_once(
    parallel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row, and that all of them have it at a time."""
    on: dict[str, set[jax.Device]] = {}

    def seconds(calls: Any, quick: bool, how: Any) -> Any:
        for (name, work), call in calls.items():
            outs = jax.tree.leaves(call())
            on[f"{name} / {work}"] = set().union(*(out.devices() for out in outs))
        return {call: float(i) for i, call in enumerate(calls, start=1)}

    monkeypatch.setattr(parallel, "median_seconds", seconds)
    monkeypatch.setattr(parallel, "STRATEGIES", ())
    results = sys.modules["support.common"].Results()
    parallel._speed(parallel.Length(64), results, True)
    devices = jax.devices()[:4]
    assert len(devices) > 1
    seconds_of = {name: i for i, name in enumerate(on, start=1)}
    rows = {
        (row["case"].split(" / ")[1], row["implementation"]): row["value"]
        for row in results.rows
        if row["metric"] == "time"
    }
    for work in ("forward", "both"):
        assert on[f"one / {work}"] == {devices[0]}
        assert on[f"one on each / {work}"] == set(devices)
        who = f"jax_kvblock, one on each of {len(devices)} GPUs"
        assert rows[work, who] == 1e3 * seconds_of[f"one on each / {work}"]


@pytest.mark.slow
def test_small_lists_of_tiles_and_selectors(tmp_path: Path) -> None:
    cases = "^tiles .*S16384 .*causal|^selectors"
    document = small(tmp_path, "sparse", "--cases", cases)
    rows = {
        (*row["case"].split(" / "), row["implementation"], row["metric"]): row["value"]
        for row in document["rows"]
    }
    (tiles,) = {shape for shape, *_ in rows if shape.startswith("tiles")}
    selected = {shape for shape, *_ in rows if shape.startswith("selectors")}
    assert {shape.rpartition(", ")[2] for shape in selected} == GROUPS
    # Four rows of tiles, of which each of four heads lists the own ones: half of each.
    pairs = {"jax_kvblock": 4 * 4 * 128 * 129 / 2}
    pairs["jax_kvblock, dense"] = 4 * 512 * 513 / 2
    for who, count in pairs.items():
        for work, times in (("forward", 4), ("backward", 10)):
            seconds = rows[tiles, work, who, "time"] / 1e3
            rate = rows[tiles, work, who, "rate"] * 1e12
            assert rate * seconds == pytest.approx(times * 64 * count, 1e-4)
    every = {(s, who) for s, work, who, _ in rows if s in selected and work == "whole"}
    names = {who for _, who in every}
    assert {"jax_kvblock, random", "jax_kvblock, learned, pieces of 32"} < names
    for shape, who in every:
        dense = rows[shape, "dense", "jax_kvblock", "time"]
        whole = rows[shape, "whole", who, "time"]
        of_dense = rows[shape, "whole", who, "dense over it"]
        assert of_dense == pytest.approx(dense / whole, 1e-4)
        selection = rows[shape, "selection", who, "time"]
        share = rows[shape, "selection", who, "of the whole"]
        assert share == pytest.approx(selection / whole, 1e-4)


@pytest.mark.slow
def test_small_quality_of_selectors(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept.npz")
    first = small(tmp_path / "first", "sparse-quality", "--save-activations", kept)
    again = small(tmp_path / "again", "sparse-quality", "--activations", kept)
    assert first["versions"]["model"] == "random weights"
    assert again["versions"] == first["versions"]
    rows, same = (
        {
            (row["case"], row["implementation"], row["metric"]): row["value"]
            for row in document["rows"]
            if row["implementation"] != "random weights"
        }
        for document in (first, again)
    )
    assert rows == same  # gates among them
    nats = [row["value"] for row in first["rows"] if row["metric"] == "loss"]
    assert len(nats) == 2 and all(abs(x - math.log(256)) < 1 for x in nats)
    case = "all, 1024 tokens / 0.75 left out"
    recall = {
        who: x for (at, who, what), x in rows.items() if (at, what) == (case, "recall")
    }
    tiles = {who: rows[case, who, "share of tiles"] for who in recall}
    assert len(recall) == 18 and "jax_kvblock, pooled, pieces of 64" in recall
    best = "jax_kvblock, oracle"
    for who, value in recall.items():
        if tiles[who] == tiles[best]:
            assert 0 < value <= recall[best] + 1e-4


def test_attention_to_other_tiles_is_not_timed(
    sparse: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sparse._ours

    def wrong(case: Any, tiles: Any) -> Any:
        if tiles is not None:  # the heads' lists the other way round
            indices, counts = tiles.indices[:, ::-1], tiles.counts[:, ::-1]
            tiles = dataclasses.replace(tiles, indices=indices, counts=counts)
        return right(case, tiles)

    monkeypatch.setattr(sparse, "_ours", wrong)
    options = argparse.Namespace(quick=True, cases="^tiles .*S16384 .*full")
    results = sys.modules["support.common"].Results()
    sparse.bench(options, results)
    (failure,) = results.failures
    assert "rows are wrong" in failure and not results.rows


SMALL = argparse.Namespace(quick=True, cases="D64")


@pytest.mark.cpu
def test_whose_kernels_attention_is_timed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in imported("bench_attention", monkeypatch):
        assert module.choose_kernels() == "xla"


def test_small_attention_with_dropout(
    dropout: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = sys.modules["support.common"]
    monkeypatch.setattr(common, "on_gpu", lambda: True)
    results = common.Results()
    dropout.bench(SMALL, results)
    assert not results.failures
    rows = {
        (row["case"].split(" / ")[1], row["implementation"], row["metric"]): row[
            "value"
        ]
        for row in results.rows
    }
    for work in ("forward", "forward and backward"):
        with_it, without = (
            rows[work, who, "time"] for who in (dropout.DROPOUT, dropout.OURS)
        )
        over = rows[work, dropout.DROPOUT, "over none"]
        assert over == pytest.approx(with_it / without, 1e-4)
    assert {name for name, _, what in rows if what == "error"} == {*dropout.NAMES}


def test_attention_that_drops_other_pairs_is_not_timed(
    dropout: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = sys.modules["support.common"]
    monkeypatch.setattr(common, "on_gpu", lambda: True)
    right = dropout._attend

    def wrong(case: Any, rate: float, implementation: str | None = None) -> Any:
        attend = right(case, rate, implementation)
        return lambda q, k, v, seed: attend(q, k, v, seed + (implementation is None))

    monkeypatch.setattr(dropout, "_attend", wrong)
    results = common.Results()
    dropout.bench(SMALL, results)
    (failure,) = results.failures
    assert "out is off by" in failure
    assert {row["metric"] for row in results.rows} == {"error"}


def prefills(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, attend: Any
) -> dict[tuple[str, str], float]:
    """Rows of two short prefills, (who, metric): value; `attend` is of plain JAX."""
    common = sys.modules["support.common"]
    monkeypatch.setattr(common, "on_gpu", lambda: True)
    monkeypatch.setattr(bench, "_errors", lambda *_: None)
    monkeypatch.setattr(bench, "paged_attention", attend)
    case = dataclasses.replace(bench.PAGED[0].case, num_heads=8, num_kv_heads=2)
    monkeypatch.setattr(bench, "PAGED", (bench.Paged(case),))
    results = common.Results()
    bench.bench(argparse.Namespace(quick=True, cases="^pages"), results)
    assert not results.failures
    of = ((row["implementation"], row["metric"], row["value"]) for row in results.rows)
    return {(who, metric): value for who, metric, value in of}


def test_small_prefills_in_8_bits(
    eight_bits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = functools.partial(eight_bits.paged_attention, implementation="xla")
    rows = prefills(eight_bits, monkeypatch, attend)
    narrow, wide = (f"{eight_bits.OURS}, {x}" for x in ("8 bits", "e4m3 widened"))
    assert 0.005 < rows[narrow, "off the widened"] < 0.1
    flops = 2 * 2 * 8 * 256 * 512 * 512 / 2
    for who in (eight_bits.BF16, narrow, wide):
        seconds = rows[who, "time"] / 1e3
        assert rows[who, "rate"] * 1e12 * seconds == pytest.approx(flops, 1e-4)
    for who in (narrow, wide):
        over = rows[eight_bits.BF16, "time"] / rows[who, "time"]
        assert rows[who, "over bfloat16"] == pytest.approx(over, 1e-4)


def test_prefills_that_round_nothing_are_not_timed(
    eight_bits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = eight_bits.paged_attention

    def wide(*arrays: Any, quantize_queries: bool = False, **options: Any) -> Any:
        return right(*arrays, **options, implementation="xla")

    with pytest.raises(AssertionError, match="8 bits is off by 0"):
        prefills(eight_bits, monkeypatch, wide)
