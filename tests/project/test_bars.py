"""The table of bars: what it judges, by what, and which row of a case."""

from __future__ import annotations

import collections
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "bars.py"

pytestmark = pytest.mark.early


@pytest.fixture
def bars() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bars_to_test", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bars_to_test"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bars_to_test"]


def row(case: str, who: str, metric: str, value: float) -> dict[str, Any]:
    return {
        "case": case, "implementation": who, "metric": metric, "value": value,
        "unit": "",
    }  # fmt: skip


def judged(bars: ModuleType, *rows: dict[str, Any], platform: str = "gpu") -> Any:
    """Of each bar that judges a row its text, what it found, and whether it is met."""
    document = {"rows": list(rows), "versions": {"platform": platform}}
    return [(v.bar.text, v.ratio, v.met) for v in bars.judge(document)]


def test_the_best_way_of_a_case_is_judged(bars: ModuleType) -> None:
    """Not the worst one; each case and each number of GPUs by itself."""
    case = "B1 H32/8 S16384 D128 causal / forward"
    ways = [
        row(case, f"jax_kvblock, {way}", "efficiency", value)
        for way, value in {
            "2, ring": 0.91, "2, all_gather": 0.93, "2, ulysses": 0.99, "4, ring": 0.8,
            "2, ring, as jit is": 0.98,
        }.items()
    ]  # fmt: skip
    assert judged(bars, *ways) == [
        ("16384 tokens over 2 GPUs, forward, the best way", 0.93, True),
        ("16384 tokens over 4 GPUs, forward, the best way", 0.8, False),
    ]


def test_a_row_by_another_of_its_case(bars: ModuleType) -> None:
    case = "512 blocks, NHD to HND / reshard 4 to 2"
    both = (
        row(case, "jax_kvblock", "bandwidth", 102.0),
        row(case, "ppermute", "bandwidth", 300.0),
    )
    assert judged(bars, *both) == [("reshard_blocks / ppermute", 0.34, False)]
    assert judged(bars, both[0]) == []  # it was not in this run


def test_limits_at_most(bars: ModuleType) -> None:
    case = "B1 H32/8 S16384 D128 causal / both"
    text = "a device's bytes / what it holds and two shards"
    for value, met in ((1.09, True), (1.34, False)):
        memory = row(case, "jax_kvblock, 2, ring", "memory", value)
        assert judged(bars, memory) == [(text, value, met)]
        assert judged(bars, memory, platform="cpu") == []


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_losses_in_8_bits_are_near_those_of_bfloat16(
    bars: ModuleType, platform: str
) -> None:
    """Neither more nor less by over 0.5 %, after as many steps as are asked for."""
    text = "the last ten losses in 8 bits / bfloat16"
    for loss, met in ((2.588, True), (2.61, True), (2.58, False), (2.62, False)):
        for case, count in (("GPT / 300 steps", 2), ("GPT / 40 steps", 0)):
            rows = [
                row(case, f"jax_kvblock, {name}", "mean of the last ten losses", value)
                for name, value in {
                    "bfloat16": 2.6,
                    "8 bits": loss,
                    "float32": 9,
                }.items()
            ]
            found = judged(bars, *rows, platform=platform)
            assert len(found) == count
            if count:
                (least, *of_least), (most, *of_most) = found
                assert least == f"{text}, at least" and most == f"{text}, at most"
                assert of_least[0] == of_most[0] == pytest.approx(loss / 2.6)
                assert (of_least[1] and of_most[1]) == met


def test_what_ships_of_a_block_has_a_bar_of_its_own(bars: ModuleType) -> None:
    """By the best of our ways it would be met where nothing of that ships."""
    case = "B4 S4096 block / forward"
    joined, alone = "jax_kvblock, and q, k, v joined", "jax_kvblock, attention alone"
    rows = [
        row(case, alone, "over xla's best", 0.98),
        row(case, joined, "over xla's best", 1.06),
        row(case, joined, "ours at best over xla's", 1.06),
    ]
    assert judged(bars, *rows) == [
        ("a block, the best of our ways / jitted XLA's best", 1.06, True),
        ("a block, attention alone by ours / jitted XLA's best", 0.98, False),
    ]


def test_plans_are_held_to_one_by_entropy(bars: ModuleType) -> None:
    def excess(name: str, value: float, case: str = "all") -> dict[str, Any]:
        return row(f"{case} / 3.5 bits", f"jax_kvblock, {name}", "excess", value)

    found = judged(
        bars, excess("entropy", 1368.0), excess("loss", 43.6),
        excess("gradients", 1500.0), excess("loss", 9.0, "reference 8"), platform="cpu",
    )  # fmt: skip
    text = "excess perplexity of a plan / one by entropy"
    assert found == [
        (text, pytest.approx(43.6 / 1368), True),
        (text, pytest.approx(1500 / 1368), False),
    ]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CACHE_BARS = {  # of a cache and its server, and how many rows of a record each judges
    "Prompt of 4096 tokens, open to free, us": 3,
    "blocks on disk / plain I/O": 14,
    "A server's new tokens a second, two cores": 1,
    "offload to pinned host / memcpy": 2,
    "onboard from pinned host / memcpy": 2,
    "steps beside a transfer slowed by, %": 2,
    "A server's step of decoding / reading": 3,
    "The cache's manager / a server's step": 1,
    "The first token by host memory / computed": 1,
    "Things that are wrong in a soak": 2,
    "Memory in a soak's last third / its second": 2,
}


def test_records_have_the_rows_that_bars_judge(bars: ModuleType) -> None:
    """A row of another name would pass, as if it had never been asked for."""
    found: dict[str, collections.Counter[str]] = {}
    for path in RESULTS.glob("*/*.json"):
        document = json.loads(path.read_text())
        first, *_ = document.get("rows", [{}])
        timed = "platform" in document.get("versions", {}) and "implementation" in first
        if not timed:  # tests that ran, and profiles
            continue
        counts = collections.Counter(v.bar.text for v in bars.judge(document))
        for text, count in counts.items():
            of_date = found.setdefault(text, collections.Counter())
            of_date[document["date"]] = max(of_date[document["date"]], count)
    for text, count in CACHE_BARS.items():
        assert found[text][max(found[text])] == count, text


def soak(
    wrong: int, files: int, memory: float, before: float = 400.0
) -> list[dict[str, Any]]:
    metrics = {
        "actions": 87667, "things that are wrong": wrong, "files open before": 7,
        "files open at the end": files, "memory in the second third": before,
        "memory in the last third": memory,
    }  # fmt: skip
    case = "10 minutes / soak, disk"
    return [row(case, "jax_kvblock", *metric) for metric in metrics.items()]


def test_a_soak_in_which_nothing_is_lost_or_leaked(bars: ModuleType) -> None:
    texts = (
        "Things that are wrong in a soak", "Open files at the end of a soak / before",
        "Memory in a soak's last third / its second",
    )  # fmt: skip
    for platform in ("cpu", "gpu"):
        assert judged(bars, *soak(0, 7, 420.0), platform=platform) == [
            (text, ratio, True) for text, ratio in zip(texts, (0, 1, 1.05), strict=True)
        ]
    for broken, failing in ((0, (1, 7, 400.0)), (1, (0, 8, 400.0)), (2, (0, 7, 421.0))):
        met = [verdict[2] for verdict in judged(bars, *soak(*failing))]
        assert met == [i != broken for i in range(3)]
    # Each soak of a file has its own memory to be held to.
    other = soak(0, 7, 500.0, before=500.0)
    other = [{**r, "case": "10 minutes / soak, random"} for r in other]
    met = [verdict[2] for verdict in judged(bars, *soak(0, 7, 421.0), *other)]
    assert met == [True] * 4 + [False, True]


def test_no_bar_is_there_twice(bars: ModuleType) -> None:
    texts = [(bar.text, bar.work, bar.shape, bar.metric) for bar in bars.BARS]
    assert len(set(texts)) == len(texts)
