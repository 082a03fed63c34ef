"""Three ways timed and counted; what is read of a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_kvblock.fusion import (
    FusionConfig,
    FusionPerformanceStats,
    Launches,
    TransformerBlock,
    benchmark_fusion_performance,
    count_launches,
    create_unified_attention_fusion,
)
from jax_kvblock.fusion.launches import read_launches
from jax_kvblock.layers.timing import Times, times_in_turns

ALL = FusionConfig(optimization_level="aggressive", enable_mixed_precision=False)


def times(ms):
    return Times(avg_latency=ms, std=0.0, min=ms, p50=ms, p90=ms, p99=ms, max=ms)


STATS = FusionPerformanceStats(
    times={"op by op": times(8.0), "jitted": times(2.0), "fused": times(1.0)},
    launches={
        "op by op": Launches(40.0, 2.0),
        "jitted": Launches(10.0, 0.0),
        "fused": Launches(8.0, 0.0),
    },
    difference=1e-3,
    num_runs=5,
    device="Some GPU",
)


def test_both_ratios_are_told():
    assert STATS.speedup == 2 and STATS.speedup_over_op_by_op == 8
    assert STATS.launch_reduction == pytest.approx(0.2)
    assert STATS.launch_reduction_over_op_by_op == pytest.approx(0.8)
    lines = str(STATS).splitlines()
    assert lines[0] == "Some GPU, medians of 5 calls"
    assert lines[1].startswith("op by op ")
    assert lines[1].endswith(" 8.0000 ms, 40 kernels, 2 copies and fills")
    assert lines[4] == "fused over jitted: 2.000 x as fast, 20% fewer kernels"
    assert lines[5] == "fused over op by op: 8.000 x as fast, 80% fewer kernels"


def test_more_kernels_and_no_count_are_told_as_such():
    more = {**STATS.launches, "fused": Launches(15.0, 0.0)}
    text = str(dataclasses.replace(STATS, launches=more))
    assert "2.000 x as fast, 50% more kernels" in text
    none = dict.fromkeys(STATS.launches, Launches(None, reason="no profiler"))
    stats = dataclasses.replace(STATS, launches=none)
    assert stats.launch_reduction is stats.launch_reduction_over_op_by_op is None
    assert str(stats).count("not counted: no profiler") == 3
    assert str(stats).count("kernels not counted") == 2


@pytest.mark.host
def test_a_block_three_ways():
    block = TransformerBlock(32, 2, rngs=nnx.Rngs(0))
    fused = create_unified_attention_fusion(block, config=ALL)
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    stats = benchmark_fusion_performance(block, fused, x, 6)
    # A GPU's own products of float32 are less exact.
    most = 1e-2 if jax.default_backend() == "gpu" else 1e-5
    assert stats.num_runs == 6 and stats.difference < most
    for found in stats.times.values():
        assert 0 < found["min"] <= found["p50"] <= found["p90"] <= found["max"]
    # Op by op a program is started for each of some sixty ops.
    assert stats.speedup_over_op_by_op > 2
    if jax.default_backend() == "gpu":
        ops, jitted, own = (stats.launches[w].kernels for w in stats.launches)
        assert ops > jitted > 0 and own > 0
    else:
        assert str(stats).count("kernels are counted on GPUs alone") == 3


def test_results_that_differ_are_told():
    x = jnp.ones(4)
    stats = benchmark_fusion_performance(jnp.sin, lambda x: 1.5 * jnp.sin(x), (x,), 1)
    assert stats.difference == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, jnp.sin, jnp.ones(2)), TypeError, "model must be a function.*got int"),
        (
            (jnp.sin, jnp.sum, jnp.ones(2)),
            ValueError,
            "must return what baseline_model",
        ),
        ((jnp.sin, jnp.sin, jnp.ones(2), 0), ValueError, "num_runs"),
    ],
)
def test_what_is_refused(arguments, error, words):
    with pytest.raises(error, match=f"^benchmark_fusion_performance: .*{words}"):
        benchmark_fusion_performance(*arguments)
    with pytest.raises(ValueError, match="warmup must not be negative"):
        benchmark_fusion_performance(jnp.sin, jnp.sin, jnp.ones(2), warmup=-1)


def test_calls_take_turns():
    seen = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    found = times_in_turns(calls, num_trials=3, warmup=2)
    assert seen == ["a", "b"] * 5 and len(found) == 2


# ---- profiles ------------------------------------------------------------------------


def plane(name, **lines):
    def named(text):
        return types.SimpleNamespace(name=text)

    made = []
    for line, events in lines.items():
        of_line = types.SimpleNamespace(
            name=line.replace("_", " "), events=list(map(named, events))
        )
        made.append(of_line)
    return types.SimpleNamespace(name=name, lines=made)


def test_kernels_of_the_first_gpus_streams_are_counted():
    gpu = plane(
        "/device:GPU:0",
        Stream_7=["gemm", "fusion", "MemcpyD2D"] * 3 + ["Memset"] * 3,
        Stream_8=["gemm"] * 3,
        XLA_Ops=["gemm"] * 30,
    )
    others = [plane("/device:GPU:1", Stream_7=["gemm"] * 30), plane("/host:CPU")]
    found = read_launches([*others, gpu], calls=3)
    assert found == Launches(3.0, 2.0, {"gemm": 2.0, "fusion": 1.0})


def test_a_profile_without_kernels_is_no_count_of_none():
    found = read_launches([plane("/host:CPU", Stream_1=["gemm"])], calls=3)
    assert found.kernels is None and "no kernels of GPU 0" in str(found)


def recorded(monkeypatch, trace):
    """`count_launches` as on a GPU, with a profiler like this one."""
    made = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.profiler, "trace", trace)
    return count_launches(lambda: made.append(1), calls=4), len(made)


def test_a_profiler_that_fails_is_a_reason(monkeypatch):
    @contextlib.contextmanager
    def busy(folder, profiler_options):
        raise RuntimeError("Only one profile may be run at a time.")
        yield

    found, calls = recorded(monkeypatch, busy)
    assert found.kernels is None and "Only one profile" in found.reason
    assert calls == 1  # the one before


def test_a_profiler_that_writes_nothing_is_a_reason(monkeypatch):
    @contextlib.contextmanager
    def idle(folder, profiler_options):
        assert profiler_options.python_tracer_level == 0
        yield

    found, calls = recorded(monkeypatch, idle)
    assert found.kernels is None and found.reason == "the profiler wrote nothing"
    assert calls == 1 + 4


@pytest.mark.gpu
def test_kernels_are_counted_on_a_gpu():
    x = jnp.ones((256, 256))
    f = jax.jit(lambda x: jnp.sin(jnp.sin(x @ x) @ x))
    found = count_launches(lambda: f(x))
    assert found.kernels is not None and 2 <= found.kernels <= 8


@pytest.mark.cpu
def test_without_a_gpu_nothing_is_called():
    found = count_launches(lambda: pytest.fail("called"))
    assert found.kernels is None and "GPUs alone" in found.reason
