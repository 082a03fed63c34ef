"""Benchmarks run, count what they move, and notice what is wrong.

Those of attention: test_attention_benchmarks.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from run_benchmarks import FOLDER, imported, small

import jax_kvblock

pytestmark = pytest.mark.early


@pytest.fixture
def decode_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_decode_step", monkeypatch)


@pytest.fixture
def fusion(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_fusion", monkeypatch)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from imported("bench_training", monkeypatch)


def test_a_small_decode_step(tmp_path: Path) -> None:
    document = small(tmp_path, "decode-step")
    rows = {
        (row["implementation"], row["metric"]): row["value"]
        for row in document["rows"]
        if row["case"].endswith("/ decode step")
    }
    read = rows["model", "weights"] + rows["model", "keys and values"]
    unit = {"gpu": 1e12, "cpu": 1e9}[document["versions"]["platform"]]
    copies = [r["value"] for r in document["rows"] if r["case"].startswith("ceiling")]
    for who in ("jax_kvblock", "jax_kvblock, pages gathered first"):
        seconds = rows[who, "time"] / 1e3
        assert rows[who, "bandwidth"] * unit == pytest.approx(read / seconds, 1e-4)
        least = read / (max(copies) * unit)
        assert rows[who, "over reading"] == pytest.approx(seconds / least, 1e-4)


@pytest.mark.slow
def test_small_tiers(tmp_path: Path) -> None:
    rows = {
        (row["case"], row["metric"]): row["value"]
        for row in small(tmp_path, "tiers")["rows"]
    }
    for case in ("offload", "onboard"):
        assert rows[f"tiers / {case}", "bandwidth"] > 0
        assert rows[f"tiers / {case}, beside steps", "bandwidth"] > 0
    assert rows["copies / to device, layer by layer", "bandwidth"] > 0


def test_the_bytes_are_those_of_the_arrays(decode_step: ModuleType) -> None:
    (llama,) = decode_step.CASES
    whole = llama.weight_bytes + (llama.vocab - llama.batch) * llama.width * 2
    assert whole == 2 * 8_030_261_248  # the model's parameters, of 2 bytes
    case = dataclasses.replace(llama, **decode_step.TINY)
    weights, pool = decode_step._weights(case), decode_step._pool(case)
    rest = case.vocab - case.batch  # rows of the embedding that no token has
    held = sum(a.nbytes for a in jax.tree.leaves(weights))
    assert held - rest * case.width * 2 == case.weight_bytes
    assert pool.nbytes == case.cache_bytes


def test_wrong_logits_are_not_timed(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode_step._paged

    def wrong(q: Any, pool: Any, layer: Any, at: Any) -> Any:
        return right(q, pool, layer, at._replace(lens=at.lens - 20))

    monkeypatch.setattr(decode_step, "_paged", wrong)
    options = argparse.Namespace(quick=True, cases="")
    results = sys.modules["support.common"].Results()
    with pytest.raises(AssertionError, match="logits differ"):
        decode_step.bench(options, results)


def test_rounds_by_the_fastest_call_and_without_those_that_warm_up(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only calls move: the first one by far the most, and then less
    from call to call, as chips that get hot do the other way round.
    """
    rounds = sys.modules["support.rounds"]
    clock, calls = 0.0, {"a": 0, "b": 0}

    def call(name: str) -> str:
        nonlocal clock
        calls[name] += 1
        clock += 50 if calls[name] == 1 else 1 + 1 / calls[name]
        return name

    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock)
    waited: list[tuple[str, str]] = []
    how = rounds.Turns(turns=2, rounds=3, seconds=10, warm_up=1)
    times = rounds.median_seconds(
        {name: functools.partial(call, name) for name in calls},
        how=how,
        wait=lambda *key_and_made: waited.append(key_and_made),
    )
    per_round = int(10 / (1 + 1 / rounds.TRIED))
    assert calls == dict.fromkeys("ab", rounds.TRIED + 2 * 4 * per_round)
    assert set(waited) == {("a", "a"), ("b", "b")}
    first = [1 + 1 / n for n in range(rounds.TRIED + 1, calls["a"] + 1)]
    each = [sum(first[i : i + per_round]) for i in range(0, len(first), per_round)]
    counted = sorted(each[1:4] + each[5:8])
    assert times["a"] == pytest.approx(sum(counted[2:4]) / 2 / per_round)
    assert times["b"] == pytest.approx(times["a"])


def test_calls_that_take_longer_than_a_round_are_tried_twice(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = sys.modules["support.rounds"]
    clock = 0.0
    calls = 0

    def call() -> None:
        nonlocal clock, calls
        calls += 1
        clock += 3

    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock)
    how = rounds.Turns(turns=2, rounds=3, seconds=2, warm_up=1)
    wait = lambda key, made: None  # noqa: E731
    assert rounds.median_seconds({"a": call}, how=how, wait=wait) == {"a": 3}
    assert calls == 2 + 2 * 4


@pytest.mark.slow
def test_small_quality_of_precision_plans(tmp_path: Path) -> None:
    document = small(tmp_path, "precision-quality")
    rows = {
        (row["case"], row["implementation"], row["metric"]): row["value"]
        for row in document["rows"]
    }
    assert document["versions"]["model"] == "random weights"
    whole = rows["all / 32 bits", "random weights", "perplexity"]
    assert 128 < whole < 512  # it has learned nothing of 256 bytes
    numbers = 256 * 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    uniform = {2.5: "uniform INT2", 3.5: "uniform INT3", 4.5: "uniform INT4"}
    plans = [(bits, who) for bits, who in uniform.items()]
    plans += [
        (bits, who)
        for bits in (3.5, 4, 4.5)
        for who in ("entropy", "gradients", "loss")
    ]
    for bits, who in plans:
        case, name = f"all / {bits:g} bits", f"jax_kvblock, {who}"
        found = rows[case, name, "perplexity"]
        excess = rows[case, name, "excess"]
        assert excess == pytest.approx(found - whole, rel=1e-3, abs=1e-2)
        logs = math.log(found / whole)
        assert rows[case, name, "log excess"] == pytest.approx(logs, abs=1e-4)
        stored = rows[case, name, "stored"]
        assert stored <= numbers * bits / 8
        if who.startswith("uniform"):
            assert stored == numbers * bits / 8
            continue
        best = min(
            rows[f"all / {at:g} bits", f"jax_kvblock, {one}", "excess"]
            for at, one in uniform.items()
            if at <= bits
        )
        ratio = rows[case, name, "excess over uniform"]
        assert ratio == pytest.approx(excess / best, rel=1e-3)


def test_norms_and_casts_and_the_copy_beside_them(training: ModuleType) -> None:
    """On CPUs the kernel does not run, which is said; copies move as many bytes."""
    casts, common = training.narrow_casts, sys.modules["support.common"]
    for cast in (casts.NormCast(64, 128, sums, 1) for sums in (True, False)):
        results = common.Results()
        casts.time_norm_casts(cast, results, True)
        ran = {row["implementation"] for row in results.rows}
        assert "xla" in ran and casts.COPY in ran
        if not common.on_gpu():
            assert len(results.failures) == 1 and casts.KERNEL in results.failures[0]
        # In 16 bits x, and the residual and the sum; codes of 8 bits, twice.
        each = 2 + 2 * 2 * cast.with_residual + 1 + 1
        assert cast.bytes == each * cast.rows * cast.columns
        assert 2 * sum(a.nbytes for a in casts.to_copy(cast)) == cast.bytes


@pytest.mark.slow
def test_small_training(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    results = sys.modules["support.common"].Results()
    training.bench(argparse.Namespace(quick=True, cases=""), results)
    assert not results.failures
    rows = {
        (row["case"].split(" / ")[1], row["implementation"], row["metric"]): row[
            "value"
        ]
        for row in results.rows
    }
    ours = training.OURS
    for work, who in {
        "product": f"{ours}, quantized",
        "layer, forward and backward": ours,
        "step with AdamW": ours,
    }.items():
        over = rows[work, training.BF16, "time"] / rows[work, who, "time"]
        assert rows[work, who, "over bfloat16"] == pytest.approx(over, 1e-4)
    assert rows["product", f"{ours}, quantized", "error"] > 0.01  # it was rounded

    # A product with other weights is noticed, and not timed.
    right = training.fp8_dot
    monkeypatch.setattr(
        training, "fp8_dot", lambda x, w, *rest, **more: right(x, -w, *rest, **more)
    )
    results = sys.modules["support.common"].Results()
    training._products(training.Product(256), results, True)
    wrong = [failure.split(": ")[1] for failure in results.failures]
    assert wrong == ["AssertionError"] * len(training._served())


def test_small_choices_of_a_block(tmp_path: Path) -> None:
    cases = "S4096 (q, k|RoPE|attention)|S1 (block|bias)"
    document = small(tmp_path, "fusion", "--cases", cases)
    rows = {
        (row["case"], row["implementation"], row["metric"]): row["value"]
        for row in document["rows"]
    }
    first = {
        "B4 S4096 q, k and v": "xla, three products",
        "B4 S4096 RoPE and append": "xla, rotation and scatter",
        "B4 S4096 attention": "xla",
        "B64 S1 block, decoding": "xla",
        "B64 S1 bias and GELU": "xla",
    }
    works = {case.partition(" / ")[0] for case, *_ in rows}
    assert works == set(first)
    backward = {c.partition(" / ")[0] for c, *_ in rows if c.endswith("and backward")}
    assert backward == {"B4 S4096 q, k and v", "B4 S4096 attention"}
    times = {key[:2]: x for key, x in rows.items() if key[2] == "time"}
    for (case, who), seconds in times.items():
        plain = first[case.partition(" / ")[0]]
        others = [
            t
            for (at, one), t in times.items()
            if at == case and one != "op by op" and not one.startswith("jax_kvblock")
        ]
        if who != plain:
            over = rows[case, who, f"over {plain}"]
            assert over == pytest.approx(times[case, plain] / seconds, 1e-4)
        if who.startswith("jax_kvblock"):
            over = rows[case, who, "over xla's best"]
            assert over == pytest.approx(min(others) / seconds, 1e-4)
    for case in {case for case, _ in times}:
        ours = {at: x for at, x in rows.items() if at[0] == case and "over" in at[2]}
        best = [x for at, x in ours.items() if at[2] == "ours at best over xla's"]
        assert best == [max(x for at, x in ours.items() if at[2] == "over xla's best")]
    assert ("B64 S1 block, decoding / forward", "op by op") in times


def test_the_best_of_xla_is_cudnn_where_that_is_faster(fusion: ModuleType) -> None:
    """Of attention alone cuDNN's way has no "xla" in its name."""
    choice = fusion.choices.Choice({"xla": None, "cudnn": None}, None, [], False)
    seconds = {"xla": 8.0, "cudnn": 3.0, "op by op": 1.0, "jax_kvblock, a": 2.0}
    times = {(who, fusion.FORWARD): x for who, x in seconds.items()}
    results = sys.modules["support.common"].Results()
    fusion._add(choice, times, "B4 S4096 attention", 1, results)
    found = {(r["implementation"], r["metric"]): r["value"] for r in results.rows}
    assert found["jax_kvblock, a", "over xla"] == 4
    assert found["jax_kvblock, a", "over xla's best"] == 1.5
    assert found["jax_kvblock, a", "ours at best over xla's"] == 1.5


def test_a_choice_whose_results_differ_is_not_timed(
    fusion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = fusion.choices

    def wrong(w: dict[str, Any]) -> dict[str, Any]:
        return right(w | {"k": w["v"]})  # values in place of keys

    right = choices.join
    monkeypatch.setattr(choices, "join", wrong)
    results = sys.modules["support.common"].Results()
    fusion.bench(argparse.Namespace(quick=True, cases="S1 q, k"), results)
    # Kept joined and joined in each call are both wrong.
    assert len(results.failures) == 2
    assert all("of their norm apart" in failure for failure in results.failures)
    assert {row["implementation"] for row in results.rows} == {"xla, three products"}


def test_what_kernel_call_answers_where_its_peers_are_asked() -> None:
    paths = [str(Path(jax_kvblock.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    # On a CPU wherever it runs: it looks like four devices.
    own = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "kernel_peers.py"), "--only", "jax_kvblock"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^  (.*?): (.*)$", done.stdout, re.MULTILINE))
    assert lines["a traced scalar"] == "lowered"
    assert lines["vmap, as it offers"] == lines["grad, as it offers"] == "traced"
    assert lines["a result's type on a mesh"].endswith("the result by P('d',)")
    assert lines["shard_map"] == "lowered"
    assert lines["vmap"].startswith("NotImplementedError: kernel_call: ")
    if importlib.util.find_spec("flatbuffers") is not None:
        assert re.fullmatch(r"\d+ bytes", lines["export, its check off"])
    assert lines["on a CPU"] == "[1. 3. 5. 7.]"


def test_a_small_server(tmp_path: Path) -> None:
    document = small(tmp_path, "serve")
    values = {
        (row["case"].partition(" / ")[2], row["implementation"], row["metric"]): row[
            "value"
        ]
        for row in document["rows"]
    }
    near = functools.partial(pytest.approx, rel=2e-3)  # four digits are kept
    step = "a step of decoding", "jax_kvblock"
    seconds = values[*step, "time of a step"] / 1e3
    assert values[*step, "new tokens"] == near(3 / seconds)
    copy = max(  # in GB/s
        row["value"] * {"GB/s": 1, "TB/s": 1e3}[row["unit"]]
        for row in document["rows"]
        if row["case"].endswith("copy")
    )
    reading = values[*step, "read"] / copy  # MB by GB/s: ms
    assert values[*step, "over reading"] == near(seconds * 1e3 / reading)
    assert values["the host's part of a step", "jax_kvblock", "host time"] > 0
    token = "the first token"
    by_host = values[token, "jax_kvblock, from host memory", "time"]
    computed = values[token, "jax_kvblock, computed", "time"]
    ratio = values[token, "jax_kvblock", "of computing it"]
    assert ratio == near(by_host / computed)


@pytest.mark.parametrize(
    ("cases", "parts"),
    [
        ("by XLA", set()),
        ("host", {"the host's part of a step"}),
        ("prefix", {"the first token"}),
        ("other steps", {"a step of decoding, 1 in a program"}),
    ],
)
def test_parts_of_a_small_server(cases: str, parts: set[str], tmp_path: Path) -> None:
    rows = small(tmp_path, "serve", "--cases", cases)["rows"]
    found = {row["case"].partition(" / ")[2] for row in rows}
    assert found == {"a step of decoding", "device copy"} | parts


def test_small_blocks_on_disk(tmp_path: Path) -> None:
    document = small(tmp_path, "disk")
    rows = {
        (row["case"], row["implementation"], row["metric"]) for row in document["rows"]
    }
    works = {case for case, _, metric in rows if metric == "of plain"}
    assert len(works) == 2 * 6  # cases that differ in tickets alone are one here
    for work in works:
        assert {(work, who, "bandwidth") for who in ("jax_kvblock", "plain")} < rows


def test_a_small_prompt_in_a_cache(tmp_path: Path) -> None:
    document = small(tmp_path, "cache-host")
    works = {row["case"].partition(" / ")[2] for row in document["rows"]}
    of_a_step = "a step of decoding, all of them"
    assert {"cold prompt", "cached prompt", "keys", of_a_step} < works
    assert all(row["value"] > 0 for row in document["rows"])
    parts = [
        row["implementation"].partition(", ")[2]
        for row in document["rows"]
        if row["case"].endswith("/ cold prompt")
    ]
    assert parts == ["", "open", "reserve", "page_table", "commit", "free"]
