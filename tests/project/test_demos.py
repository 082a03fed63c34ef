"""The demos of S2 run, say what they promise to say, and notice a mistake."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from run_examples import Load, run

from jax_kvblock import (
    fusion,
    hardware,
    layers,
    parallel,
    precision,
    sparse,
    training,
)
from jax_kvblock.core import ffi

pytestmark = pytest.mark.early


@pytest.mark.cpu
def test_layers_of_attention_over_four_devices() -> None:
    printed = run("long_attention.py", "--cpu-devices", "4")
    assert "512 tokens over 4 x cpu" in printed
    errors = dict(re.findall(r"^  (\S.*?) +error ([\d.e-]+)$", printed, re.M))
    patterns = ["FULL", "CAUSAL", "SLIDING_WINDOW", "RING", "CONTEXT_PARALLEL"]
    assert list(errors) == [*patterns, "ring, a fifth is padding", "causal, in zigzag"]
    assert all(0 < float(error) < 1e-6 for error in errors.values())
    assert "max_sequence_length = 512, got 1024" in printed
    held = re.findall(r"([\d,]+) tokens: +[\d,]+ MiB a device, ([\d,]+) b", printed)
    assert [tokens for tokens, _ in held] == ["65,536", "1,048,576"]
    first, last = (int(size.replace(",", "")) for _, size in held)
    assert last < 1.1 * first and last < 2000  # x, q, k, v, out: bytes of a token
    assert "memory grows as the length does" in printed


def test_layers_visit_a_tenth_of_the_tiles() -> None:
    printed = run("sparse_attention.py", "--quick")
    found = re.findall(r"^(\w+)" + 3 * r" +([\d.]+)" + "$", printed, re.MULTILINE)
    lines = {name: [float(x) for x in numbers] for name, *numbers in found}
    assert list(lines) == [pattern.value for pattern in sparse.SparsePattern]
    for name, (tiles, recall, error) in lines.items():
        assert 0.08 < tiles < 0.11
        if name in ("dynamic_threshold", "learned"):
            assert recall > 0.99 and error < 0.01
        else:
            assert recall < 0.6 and error > 0.5
    before, after = map(float, re.findall(r"(\d\.\d+)", printed)[:2])
    assert "a gate learns" in printed and after < before / 2


def test_a_model_trains_in_8_bits_as_s2_shows_it() -> None:
    printed = run("eight_bits.py", "--quick")
    wide, narrow = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+), ([\d.]+)", line)[0]]
        for line in printed.splitlines()[:2]
    )
    assert wide[1] < 0.7 * wide[0] and abs(narrow[1] - wide[1]) < 0.1
    assert wide != narrow  # they are rounded
    assert re.search(r"products are (emulated|tensor cores)", printed)
    assert "converted: down, up;" in printed
    assert "Overflows: 1, Steps: 2; taken: [True, False, True]" in printed
    ((one, other),) = re.findall(r"restored: loss ([\d.]+), and ([\d.]+)", printed)
    assert one == other
    ((smooth, plain),) = re.findall(r"as it is ([\d.]+), .* ([\d.]+)$", printed, re.M)
    assert 0.02 < float(smooth) < 0.06 < float(plain)


def test_a_model_trains_in_float32_where_nothing_multiplies_8_bits(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S2's `except`: setting up says why, and the model is as it was."""
    example = load("eight_bits")
    device = types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA A100",
        compute_capability="8.0",
        client=types.SimpleNamespace(platform_version="cuda 13000"),
    )
    monkeypatch.setattr(ffi, "default_device", lambda: device)
    monkeypatch.setattr(sys, "argv", ["eight_bits.py", "--quick"])
    example.main()
    printed = capsys.readouterr().out
    assert re.search("FP8 training unavailable: .*NVIDIA A100", printed)
    assert "trained in float32 instead" in printed and "8 bits:" not in printed


def test_plans_keep_more_of_a_model_in_as_many_bytes() -> None:
    printed = run("few_bits.py", "--quick")
    line = r"^  (\w+) +([\d,]+) bytes, ([\d.]+) bits a weight: ([\d.]+) nats$"
    found = re.findall(line, printed, re.MULTILINE)
    costs = {name: float(nats) for name, *_, nats in found}
    assert list(costs) == [strategy.value for strategy in precision.AllocationStrategy]
    assert all(3.4 < float(bits) < 3.6 for _, _, bits, _ in found)
    for name in ("gradient_weighted", "loss_based"):
        assert 0 < costs[name] < 0.7 * costs["uniform"]
        assert costs[name] < costs["entropy_based"]
    savings = re.findall(r"emory savings: ([\d.]+)%", printed)
    assert [float(share) > 40 for share in savings] == [True, True]
    assert "Recommended optimizations: 4" in printed
    assert len(re.findall(r" in INT\d: outputs 0\.0\d+ apart", printed)) == 4


def test_the_batch_that_fits_runs() -> None:
    printed = run("which_hardware.py", "--quick")
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    assert re.match(rf"{platform}: \d+ x ", printed)
    assert re.search(r"^  flash_attention, float32 +(xla|cuda)", printed, re.MULTILINE)
    found = re.search(r"fit: (\d+) as flax has it, (\d+) optimized", printed)
    assert found is not None
    plain, better = map(int, found.groups())
    assert better > 3 * plain
    for size in (plain, better):
        assert f"\n  batch {size}: " in printed and f"\n  batch {size + 1}: " in printed
    assert f"the batch of {better} runs" in printed


def test_layers_are_held_to_float64_and_timed() -> None:
    printed = run("layers.py", "--quick")
    shares = re.findall(r"^(\w+): \d+ arrays, ([\d.]+) of the", printed, re.MULTILINE)
    names = [name for name, _ in shares]
    assert names == ["AttentionLayer", "OptimizedLinear", "OptimizedLinear"]
    assert all(float(share) <= 1 for _, share in shares)
    assert re.search(r"a layer with a mistake: [1-9]\d* arrays are wrong", printed)
    by = "cuda" if jax.default_backend() == "gpu" else "xla"
    assert re.search(rf"Average latency: \d+\.\d\dms by {by}", printed)


def test_a_block_is_fused_where_it_was_measured_to_pay() -> None:
    printed = run("fused_block.py", "--quick")
    _, balanced, aggressive = re.split(
        r"^balanced, .*:$|^aggressive:$", printed, flags=re.M
    )
    row = r"^  the model: (\w+) by (ours|xla): \S.*$"
    ours = [
        [choice for choice, used in re.findall(row, part, re.M) if used == "ours"]
        for part in (balanced, aggressive)
    ]
    on_gpu = jax.default_backend() == "gpu"
    # Attention has been measured at 512 tokens and more, and nowhere on a CPU.
    assert ours == [[], ["qkv", "attention", "gelu"]]
    assert len(re.findall(row, balanced, re.M)) == 5
    apart = re.findall(
        r"results ([\de.+-]+) apart, gradients ([\de.+-]+)$", printed, re.M
    )
    assert len(apart) == 2
    assert on_gpu or apart[0] == ("0.0e+00", "0.0e+00")
    assert all(0 < float(error) < (0.03 if on_gpu else 1e-5) for error in apart[1])
    ratio = r"^over (jitted|op by op): (\d+\.\d\d) x as fast, kernels (.*)$"
    found = re.findall(ratio, printed, re.M)
    assert [way for way, *_ in found] == ["jitted", "op by op"]
    assert all(float(times) > 0 for _, times, _ in found)
    assert all((kernels == "not counted") != on_gpu for *_, kernels in found)


@pytest.mark.cpu
def test_more_kernels_than_jitted_are_called_more(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("fused_block")
    kernels = {"op by op": 20.0, "jitted": 10.0, "fused": 12.0}
    times: Any = {way: {"p50": 1.0} for way in kernels}
    stats = fusion.FusionPerformanceStats(
        times,
        {way: fusion.Launches(count, 0.0) for way, count in kernels.items()},
        difference=0.0,
        num_runs=3,
        device="a GPU",
    )
    monkeypatch.setattr(example, "benchmark_fusion_performance", lambda *of: stats)
    example.benchmark(None, None, jnp.ones(1), 3)
    found = re.findall(r"^over (.*?): .* kernels (.*)$", capsys.readouterr().out, re.M)
    assert found == [("jitted", "20% more"), ("op by op", "40% fewer")]


def fused_from_another(block: Any, *of: Any, **to: Any) -> Any:
    """A fused block with other weights, but for the first one, whose bits count."""
    other = nnx.clone(block)
    if "config" in to:
        other.down[...] = 1.01 * other.down[...]
    return fusion.create_unified_attention_fusion(other, *of, **to)


# What of each demo is another, what it is instead, and what is noticed.
WRONG_DEMOS: dict[str, tuple[str, Any, str]] = {
    "long_attention": ("from_zigzag", lambda x, n: x, "in zigzag is more than"),
    "sparse_attention": ("SHARP", 1.0, "dynamic_threshold does not find the topics"),
    "eight_bits": ("FP8TrainingEngine.restore", lambda *of: None, "bit for bit"),
    "few_bits": ("PARTS", None, "a plan by the loss is 30 % better"),
    "which_hardware": (
        "HardwareAbstractionLayer.optimize_for_hardware",
        lambda self, model: model,
        "twice the batch must fit",
    ),
    "layers": ("ReadsTwice", layers.AttentionLayer, "has not seen a mistake"),
    "fused_block": (
        "create_unified_attention_fusion",
        fused_from_another,
        "must be within 0.0001",
    ),
}


@pytest.mark.cases(99)
@pytest.mark.cpu
@pytest.mark.parametrize("name", WRONG_DEMOS)
def test_demos_notice_a_mistake(
    name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, wrong, noticed = WRONG_DEMOS[name]
    example: Any = load(name)
    *of, attribute = what.split(".")
    owner = functools.reduce(getattr, of, example)
    monkeypatch.setattr(owner, attribute, wrong)
    options = ["--cpu-devices", "0"] if name == "long_attention" else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", *options])
    with pytest.raises(SystemExit, match=noticed):
        example.main()


S2_ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "ring": (
        parallel.create_ring_attention, "d_model num_heads max_sequence_length device"
    ),
    "context": (
        parallel.create_context_parallel_attention,
        "d_model num_heads context_parallel_size device_mesh",
    ),
    "sparse": (
        sparse.create_sparse_attention, "d_model num_heads sparsity_ratio pattern"
    ),
    "trainer": (
        training.create_fp8_trainer, "model forward_format backward_format device"
    ),
    "convert": (training.convert_model_to_fp8, "model fp8_config inplace"),
    "engine": (training.FP8TrainingEngine, "model fp8_config"),
    "precision": (precision.create_ultra_precision_module, "model config device"),
    "analysis": (
        precision.analyze_precision_opportunities, "model sample_input device"
    ),
    "hardware": (hardware.HardwareAbstractionLayer, "target_devices"),
    "attention": (
        layers.AttentionLayer.__init__, "self d_model num_heads dropout bias"
    ),
    "linear": (
        layers.OptimizedLinear.__init__,
        "self in_features out_features bias optimization_level",
    ),
    "benchmark": (
        layers.benchmark_attention_performance, "model input_shape num_trials"
    ),
    "fusion": (
        fusion.create_unified_attention_fusion,
        "model fusion_strategy optimization_level",
    ),
    "launches": (
        fusion.benchmark_fusion_performance,
        "baseline_model fused_model input_data num_runs",
    ),
}  # fmt: skip


@pytest.mark.cases(99)
@pytest.mark.cpu
@pytest.mark.parametrize("name", S2_ARGUMENTS)
def test_arguments_have_the_names_and_order_of_s2(name: str) -> None:
    function, names = S2_ARGUMENTS[name]
    found = list(inspect.signature(function).parameters)
    assert found[: len(names.split())] == names.split()
