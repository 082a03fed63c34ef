"""Names, levels and the table: what ships where, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jax_kvblock.fusion import (
    CHOICES,
    FusionConfig,
    FusionStrategy,
    Measurement,
    OptimizationLevel,
)
from jax_kvblock.fusion.choices import LEAST, LOOKED_AT, decide

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROW = Measurement("Some GPU", "bfloat16", (512, 4096), 1.3, 1.1, "XLA's", "a/b.json")


@pytest.fixture
def measured(monkeypatch):
    """Makes what was measured of "qkv"."""

    def put(*rows):
        choice = dataclasses.replace(CHOICES["qkv"], measured=rows)
        monkeypatch.setitem(CHOICES, "qkv", choice)

    return put


def decided(level="balanced", device="Some GPU", dtype="bfloat16", name="qkv", **more):
    config = FusionConfig(optimization_level=level, **more)
    return decide(name, "blocks.0", config, device, dtype)


def test_names_are_members_values_or_names():
    for given in (FusionStrategy.QKV_ONLY, "qkv_only", "QKV_ONLY"):
        assert FusionConfig(strategy=given).strategy is FusionStrategy.QKV_ONLY
    for level in OptimizationLevel:
        for given in (level, level.value, level.name):
            assert FusionConfig(optimization_level=given).optimization_level is level


def test_defaults_are_those_of_the_interface_that_is_followed():
    config = FusionConfig()
    assert config.strategy is FusionStrategy.FULL_BLOCK
    assert config.optimization_level is OptimizationLevel.BALANCED
    assert config.enable_mixed_precision and config.enable_memory_optimization
    assert config.target_sequence_length == 512


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"strategy": "everything"}, ValueError, "strategy.*full_block.*'everything'"),
        ({"strategy": 3}, TypeError, "strategy.*FusionStrategy.*got 3"),
        (
            {"optimization_level": "max"},
            ValueError,
            "optimization_level.*conservative.*balanced.*aggressive.*'max'",
        ),
        ({"optimization_level": None}, TypeError, "optimization_level.*got None"),
        ({"optimization_level": FusionStrategy.FULL_BLOCK}, TypeError, "got <Fus"),
        ({"enable_mixed_precision": 1}, TypeError, "enable_mixed_precision"),
        ({"enable_memory_optimization": "no"}, TypeError, "enable_memory_optim"),
        ({"target_sequence_length": 0}, ValueError, "target_sequence_length"),
        ({"target_sequence_length": 2.5}, ValueError, "target_sequence_length"),
    ],
)
def test_what_is_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        FusionConfig(**wrong)


def test_balanced_takes_what_was_measured_to_win_here(measured):
    measured(ROW)
    row = decided()
    assert (row.used, row.ratio) == ("ours", 1.1)
    assert row.measured == "Some GPU, a/b.json" and "1.1 x" in str(row)


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        ({"device": "Other GPU"}, "not measured on Other GPU in bfloat16 at 512"),
        ({"dtype": "float32"}, "not measured on Some GPU in float32"),
        ({"target_sequence_length": 511}, "at 511 tokens"),
        ({"target_sequence_length": 4097}, "at 4097 tokens"),
    ],
)
def test_what_was_not_measured_here_is_xlas(measured, elsewhere, words):
    measured(ROW)
    row = decided(**elsewhere)
    assert (row.used, row.ratio, row.measured) == ("xla", None, "")
    assert words in row.reason
    assert decided("aggressive", **elsewhere).used == "ours"


def test_a_row_that_loses_either_way_is_xlas(measured):
    for forward, training in ((1.5, LEAST - 0.01), (LEAST - 0.01, 1.5)):
        measured(dataclasses.replace(ROW, forward=forward, training=training))
        row = decided()
        assert row.used == "xla" and row.ratio == LEAST - 0.01
        assert "no faster" in row.reason
        assert decided("aggressive").used == "ours"
    measured(dataclasses.replace(ROW, forward=LEAST, training=None))
    assert decided().used == "ours"


def test_conservative_takes_nothing_that_rounds_otherwise(measured):
    measured(ROW)
    row = decided("conservative")
    assert row.used == "xla" and "bits" in row.reason


def test_where_there_is_no_other_way_it_is_xlas_at_every_level():
    for name in ("norm", "rope"):
        for level in OptimizationLevel:
            row = decided(level, name=name)
            assert row.used == "xla" and "no other way" in row.reason


def test_without_memory_optimization_gelu_is_xlas():
    assert decided("aggressive", name="gelu").used == "ours"
    row = decided("aggressive", name="gelu", enable_memory_optimization=False)
    assert row.used == "xla" and "enable_memory_optimization" in row.reason


def test_every_strategy_looks_at_choices_that_there_are():
    assert set(LOOKED_AT) == set(FusionStrategy)
    assert set(LOOKED_AT[FusionStrategy.FULL_BLOCK]) == set(CHOICES)
    for names in LOOKED_AT.values():
        assert names and set(names) <= set(CHOICES)


def test_attentions_row_is_what_its_results_file_says():
    """The least ratio of all shapes of its lengths, forward and with backward."""
    row = CHOICES["attention"].measured[0]
    document = json.loads((RESULTS / row.file).read_text())
    assert document["device"] == row.device
    times = {
        (*r["case"].split(" / "), r["implementation"]): r["value"]
        for r in document["rows"]
        if r["metric"] == "time" and r["case"].split()[2].startswith("S")
    }
    ours, peer = "jax_kvblock", "cudnn in jax"
    forward, both = [], []
    for shape, work, who in times:
        length = int(shape.split()[2][1:])
        usual = "float16" not in shape and "window" not in shape
        if work != "forward" or who != peer or not usual:
            continue
        if not row.lengths[0] <= length <= row.lengths[1]:
            continue
        by = {
            one: [times[shape, w, one] for w in ("forward", "backward")]
            for one in (ours, peer)
        }
        forward.append(by[peer][0] / by[ours][0])
        both.append(sum(by[peer]) / sum(by[ours]))
    assert len(forward) >= 10
    assert row.forward == pytest.approx(min(forward), abs=5e-4)
    assert row.training == pytest.approx(min(both), abs=5e-4)


WAYS = {  # of bench_fusion.py: XLA's, and the one that ships where it wins
    "qkv": ("q, k and v", "xla, three products", "jax_kvblock, joined in each call"),
    "attention": ("attention", "cudnn", "jax_kvblock"),
    "gelu": ("bias and GELU", "xla", "jax_kvblock, input kept"),
}
OF_BLOCKS = [
    (name, row)
    for name in WAYS
    for row in CHOICES[name].measured
    if "/fusion-" in row.file
]


def times_of(file):
    document = json.loads((RESULTS / file).read_text())
    return document["device"], {
        (r["case"], r["implementation"]): r["value"]
        for r in document["rows"]
        if r["metric"] == "time"
    }


def test_where_blocks_were_measured():
    devices = {name: [r.device for n, r in OF_BLOCKS if n == name] for name in WAYS}
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    assert devices == {"qkv": [h100, h200], "attention": [h100], "gelu": [h200]}


@pytest.mark.cases(99)
@pytest.mark.parametrize(("name", "row"), OF_BLOCKS, ids=str)
def test_rows_of_blocks_are_what_their_results_file_says(name, row):
    work, xlas, ours = WAYS[name]
    assert row.lengths == (4096, 4096)
    device, times = times_of(row.file)
    assert device == row.device
    for want, what in (
        (row.forward, "forward"), (row.training, "forward and backward")
    ):  # fmt: skip
        case = f"B4 S4096 {work} / {what}"
        assert want == pytest.approx(times[case, xlas] / times[case, ours], abs=5e-4)


def test_what_ships_in_a_block_and_what_the_document_says_of_it():
    """On an H200 attention alone, which wins over the model as it is given."""
    config = FusionConfig("full_block", "balanced", target_sequence_length=4096)
    ships = {
        name: decide(name, "", config, "NVIDIA H200", "bfloat16").used
        for name in CHOICES
    }
    assert [name for name, used in ships.items() if used == "ours"] == ["attention"]
    _, times = times_of("nvidia-h200/fusion-2026-11-28.json")
    document = (RESULTS.parents[1] / "docs" / "fusion.md").read_text()
    said = re.search(
        r"ships attention alone: ([\d.]+) and ([\d.]+) times as fast as the same block "
        r"jitted with XLA's attention, ([\d.]+) and ([\d.]+) with cuDNN's, "
        r"([\d.]+) and ([\d.]+) with the best",
        " ".join(document.split()),
    )
    found = []
    for peers in (
        ["xla"],
        ["xla, cudnn"],
        ["xla, cudnn", "xla, cudnn, cublaslt alone"],
    ):
        for what in ("forward", "forward and backward"):
            case = f"B4 S4096 block / {what}"
            best = min(times[case, peer] for peer in peers)
            found.append(best / times[case, "jax_kvblock, attention alone"])
    assert [f"{ratio:.2f}" for ratio in found] == list(said.groups())
    assert min(found[:2]) > 1.05
