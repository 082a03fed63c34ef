"""The simulation finds what an independent model finds, and what the trace's says."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_model import Asked, conversations, replay, write_trace

from jax_kvblock.cache.simulate import SimulationResult, simulate
from jax_kvblock.cache.simulate_command import main, sweep, table
from jax_kvblock.cache.trace import Request, read_trace

DOCS = Path(__file__).parents[2] / "docs"
TRACES = Path(__file__).parents[1] / "support" / "traces"


def requests(*asked: Asked) -> list[Request]:
    """With a token for each second of a stay."""
    return [
        Request(np.array(a.blocks, np.int32), a.arrival, 0, int(a.stay)) for a in asked
    ]


def counts(trace: Path) -> tuple[int, int, int]:
    """Of a file: blocks, those that came before, and those that differ."""
    total = hits = 0
    seen: set[int] = set()
    for line in trace.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        total += len(ids)
        hits += sum(name in seen for name in ids)
        seen.update(ids)
    return total, hits, len(seen)


# ---- against the model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def talks() -> list[Asked]:
    return list(conversations(np.random.default_rng(7), 400))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("clock", [False, True])
@pytest.mark.parametrize("capacity", [1, 7, 23, 60, 150, 2000])
def test_the_model_finds_as_much(
    talks: list[Asked], policy: Any, clock: bool, capacity: int
) -> None:
    result = simulate(
        requests(*talks),
        capacity=capacity,
        policy=policy,
        seconds_per_token=1.0 if clock else None,
    )
    wanted = replay(talks, capacity, policy, clock)
    assert (result.num_hits, result.num_evicted) == (wanted.hits, wanted.evicted)
    assert (result.num_refused, result.num_waited) == (wanted.refused, wanted.waited)
    assert result.seconds_waited == pytest.approx(wanted.seconds if clock else 0)
    assert result.peak_held <= capacity


def test_the_cases_of_the_model_are_all_there(talks: list[Asked]) -> None:
    """Evictions in several ages, policies that differ, and requests that wait."""
    lru, lfu = (replay(talks, 60, policy, False) for policy in ("lru", "lfu"))
    assert lru.hits != lfu.hits and lfu.evicted > 3 * 60
    assert replay(talks, 23, "lru", False).refused > 0
    assert replay(talks, 60, "lru", True).waited > 10


def test_without_bound_all_that_came_before_is_found(
    talks: list[Asked], tmp_path: Path
) -> None:
    write_trace(tmp_path / "trace.jsonl", talks)
    total, hits, differ = counts(tmp_path / "trace.jsonl")
    result = simulate(tmp_path / "trace.jsonl")
    assert result == SimulationResult(
        None,
        "lru",
        num_requests=len(talks),
        num_refused=0,
        num_blocks=total,
        num_hits=hits,
        num_stored=differ,
        num_evicted=0,
        peak_held=max(len(asked.blocks) for asked in talks),
        num_waited=0,
        seconds_waited=0.0,
    )
    assert result.hit_rate == hits / total


# ---- by hand -------------------------------------------------------------------------


def test_the_end_of_a_prefix_goes_first() -> None:
    """Of 1 2 3 in three places, one block more takes the place of 3."""
    trace = requests(Asked([1, 2, 3]), Asked([4]), Asked([1, 2, 3]))
    assert simulate(trace, capacity=3).num_hits == 2


def test_a_block_is_not_found_behind_one_that_is_gone() -> None:
    trace = requests(Asked([1, 2]), Asked([3, 2]))
    assert simulate(trace).num_hits == 0


def test_what_is_asked_for_often_outlives_what_was_asked_for_lately() -> None:
    often = [Asked([1])] * 4
    trace = requests(*often, Asked([2]), Asked([3]), Asked([4]), Asked([1]))
    assert simulate(trace, capacity=2, policy="lru").num_hits == 3
    assert simulate(trace, capacity=2, policy="lfu").num_hits == 4


def test_requests_wait_for_blocks_in_their_order() -> None:
    """The first one holds both places until 10 s, the second one until 20 s."""
    trace = requests(
        Asked([1, 2], arrival=0.0, stay=5),
        Asked([3, 4], arrival=1.0, stay=5),
        Asked([1], arrival=2.0, stay=5),
    )
    result = simulate(trace, capacity=2, seconds_per_token=2.0)
    assert (result.num_waited, result.peak_held) == (2, 2)
    assert result.seconds_waited == (10 - 1) + (20 - 2)
    assert result.num_hits == 0  # by then block 1 was evicted


def test_who_leaves_as_another_one_comes_leaves_first() -> None:
    trace = requests(Asked([1], 0.0, stay=3), Asked([2], 3.0, stay=1))
    assert simulate(trace, capacity=1, seconds_per_token=1.0).num_waited == 0


def test_a_request_of_more_blocks_than_there_are_changes_nothing() -> None:
    trace = requests(Asked([1, 2]), Asked([1, 2, 3]), Asked([1, 2]))
    result = simulate(trace, capacity=2)
    assert (result.num_refused, result.num_hits, result.num_evicted) == (1, 2, 0)
    assert result.hit_rate == 2 / 7  # what was refused was asked for, too


def test_nothing_is_found_in_an_empty_trace() -> None:
    assert simulate([]).hit_rate == 0.0
    assert simulate(requests(Asked([]))).num_requests == 1


@pytest.mark.parametrize(
    "argument, message",
    [
        ({"capacity": 0}, "capacity must be at least 1 block, or None, got 0"),
        ({"policy": "fifo"}, "policy must be 'lru' or 'lfu'"),
        ({"seconds_per_token": -1.0}, "at least 0 seconds, or None, got -1.0"),
        ({"seconds_per_token": float("nan")}, "at least 0 seconds, or None, got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(argument: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        simulate(requests(Asked([1])), **argument)


@pytest.mark.parametrize("capacity", [2.5, "x", True])
def test_what_is_no_capacity(capacity: Any) -> None:
    with pytest.raises(TypeError, match="simulate: capacity must be an integer, got "):
        simulate(requests(Asked([1])), capacity=capacity)


def test_what_is_no_request() -> None:
    with pytest.raises(TypeError, match="have a Request for each request, got 1"):
        simulate([*requests(Asked([1])), 1])  # type: ignore[list-item]


def test_with_a_clock_requests_come_in_order() -> None:
    trace = requests(Asked([1], arrival=2.0), Asked([1], arrival=1.0))
    with pytest.raises(ValueError, match=r"a request of 1\.0 s comes after one of 2"):
        simulate(trace, seconds_per_token=0.0)
    assert simulate(trace).num_hits == 1


# ---- files ---------------------------------------------------------------------------


def test_names_may_be_anything_and_lines_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    late = '{"timestamp": 20, "input_length": 2, "output_length": 3, "hash_ids": '
    early = late.replace("20", "10")
    path.write_text(f'{late}["a", {2**70}]}}\n\n{early}["a", "b"]}}\n')
    first, second = read_trace(path)
    assert (first.arrival, first.input_length, first.output_length) == (0.01, 2, 3)
    assert first.blocks[0] == second.blocks[0] and first.blocks.dtype == np.int32
    assert len({*first.blocks.tolist(), *second.blocks.tolist()}) == 3


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"timestamp": 1}',
        "[1, 2]",
        '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": "1", "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": "ab"}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [[]]}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl:2 is no request"):
        read_trace(path)


# ---- the command ---------------------------------------------------------------------


@pytest.fixture
def trace(talks: list[Asked], tmp_path: Path) -> Path:
    write_trace(tmp_path / "talks.jsonl", talks)
    return tmp_path / "talks.jsonl"


def test_the_table_has_a_line_for_each_capacity(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    main([str(trace), "--capacity", "20,unbounded", "--json", str(out)])
    told = capsys.readouterr().out.splitlines()
    results = {
        (capacity, policy): simulate(trace, capacity=capacity, policy=policy)
        for capacity, policy in itertools.product((20, None), ("lru", "lfu"))
    }
    assert told[0] == "talks.jsonl"
    assert told[2].split() == ["capacity", "(blocks)", "lru", "lfu"]
    for line, (name, capacity) in zip(
        told[3:], (("20", 20), ("unbounded", None)), strict=False
    ):
        rates = [f"{results[capacity, p].hit_rate:.2%}" for p in ("lru", "lfu")]
        assert line.split()[:3] == [name, *rates]
    assert told[3].endswith(f"{results[20, 'lru'].num_refused} refused")
    written = json.loads(out.read_text())["talks.jsonl"]
    assert [SimulationResult(**row) for row in written] == [*results.values()]


def test_by_default_capacities_go_up_to_all_blocks_that_differ(trace: Path) -> None:
    results = sweep(read_trace(trace))
    _, hits, differ = counts(trace)
    assert [result.capacity for result in results[::2]] == [
        *(differ >> shift for shift in (6, 5, 4, 3, 2, 1)),
        None,
    ]
    assert results[-1].num_hits == hits


def test_requests_that_wait_are_told(trace: Path) -> None:
    results = sweep(read_trace(trace), [60], ["lru"], seconds_per_token=1.0)
    assert table(results).endswith(f"  {results[0].num_waited} waited")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["absent.jsonl"], "No such file"),
        (["{trace}", "--policy", "fifo"], "'fifo' is none of ('lru', 'lfu')"),
        (["{trace}", "--capacity", "many"], "invalid _capacities value: 'many'"),
        (["{trace}", "--capacity", "0"], "capacity must be at least 1 block"),
    ],
)
def test_wrong_arguments_are_told(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: Any, message: str
) -> None:
    with pytest.raises(SystemExit):
        main([word.format(trace=trace) for word in arguments])
    assert message in capsys.readouterr().err


def test_it_is_a_command_of_the_package(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jax_kvblock", "simulate", str(trace)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("talks.jsonl\n400 requests, ")


# ---- Mooncake's traces ---------------------------------------------------------------

MOONCAKE = {
    "conversation_trace.jsonl": (12_031, 288_500, 105_710, 182_790),
    "synthetic_trace.jsonl": (3_993, 121_877, 77_953, 43_924),
}


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces, as Mooncake publishes them."""
    folder = tmp_path_factory.mktemp("mooncake")
    for name in MOONCAKE:
        packed = (TRACES / f"{name}.xz").read_bytes()
        (folder / name).write_bytes(lzma.decompress(packed))
    return folder


def results() -> dict[str, list[SimulationResult]]:
    """What the picture and the table of the documents were made of."""
    written = json.loads((DOCS / "cache_hit_rates.json").read_text())
    return {
        name: [SimulationResult(**row) for row in rows]
        for name, rows in written.items()
    }


def test_the_documents_show_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    draw = importlib.import_module("draw_cache_hit_rates")
    drawn = draw.PICTURES["cache_hit_rates.svg"]().svg()
    assert (DOCS / "cache_hit_rates.svg").read_text(encoding="utf-8") == drawn, (
        "run python docs/draw_cache_hit_rates.py"
    )
    text = (DOCS / "cache_events.md").read_text(encoding="utf-8")
    rates: dict[int | None, list[str]] = {}
    for rows in results().values():
        for row in rows:
            rates.setdefault(row.capacity, []).append(f"{row.hit_rate:.1%}")
    for capacity, found in rates.items():
        told = "unbounded" if capacity is None else f"{capacity:,}"
        line = f"| {told} | {' | '.join(found)} |".replace("%", " %")
        assert f"\n{line}\n" in text


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MOONCAKE)
def test_the_results_come_out_again(mooncake: Path, name: str) -> None:
    digest = hashlib.sha256((mooncake / name).read_bytes()).hexdigest()
    assert f"{name}  " in (text := (DOCS / "cache_events.md").read_text())
    assert digest in text
    trace = read_trace(mooncake / name)
    for row in results()[name]:
        assert row == simulate(trace, capacity=row.capacity, policy=row.policy)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MOONCAKE)
def test_hits_of_mooncakes_traces_are_the_known_ones(mooncake: Path, name: str) -> None:
    result = simulate(mooncake / name)
    assert (result.num_blocks, result.num_hits, result.num_stored) == counts(
        mooncake / name
    )
    assert MOONCAKE[name] == (
        result.num_requests,
        result.num_blocks,
        result.num_hits,
        result.num_stored,
    )
