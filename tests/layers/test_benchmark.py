"""`benchmark_attention_performance`: what it times, and what it says ran."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import check

from jax_kvblock import flash_attention
from jax_kvblock.layers import (
    AttentionLayer,
    benchmark_attention_performance,
    timing,
)
from jax_kvblock.parallel import AttentionConfig, create_attention

SHAPE = (2, 32, 16)


@pytest.mark.parametrize("kind", ["nnx", "pytree", "function", "jitted"])
def test_models_of_each_kind(kind):
    models = {
        "nnx": lambda: AttentionLayer(16, 2, rngs=nnx.Rngs(0)),
        "pytree": lambda: create_attention(AttentionConfig(16, 2)),
        "function": lambda: lambda x: 2 * x,
        "jitted": lambda: jax.jit(lambda x: 2 * x),
    }
    took = benchmark_attention_performance(models[kind](), SHAPE, 5, warmup=1)
    order = [took[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert order[0] > 0 and order == sorted(order)
    assert took["min"] <= took["avg_latency"] <= took["max"]
    assert took["num_trials"] == 5 and took["warmup"] == 1
    assert took["compile_time"] > 0
    assert took["device"] == str(jax.devices()[0])


def test_times_are_milliseconds_of_calls_that_have_ended():
    """A call that sleeps takes as long as it sleeps; a trial is a call."""
    calls = []

    def sleep(x):
        calls.append(x.shape)
        time.sleep(0.02)
        return x

    def model(x):
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    took = benchmark_attention_performance(model, SHAPE, 4, warmup=3)
    assert calls == [SHAPE] * 7
    assert took["min"] >= 20
    assert took["avg_latency"] < 20e3


def test_what_is_said_of_times(monkeypatch):
    """Of calls that take 1 to 100 ms, in any order."""
    took = np.random.default_rng(0).permutation(np.arange(1, 101)) / 1e3
    ends = iter(np.stack([np.zeros(100), took], axis=1).ravel())
    with monkeypatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: float(next(ends)))
        (found,) = timing.times_in_turns([lambda: jnp.zeros(())], 100, 0)
    wanted = {
        "avg_latency": 50.5, "std": np.sqrt((100**2 - 1) / 12), "min": 1, "p50": 50.5,
        "p90": 90.1, "p99": 99.01, "max": 100,
    }  # fmt: skip
    assert found == pytest.approx(wanted)


def test_each_call_is_waited_for(monkeypatch):
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(
        jax, "block_until_ready", lambda x: waited.append(x.shape) or wait(x)
    )
    benchmark_attention_performance(jnp.tanh, SHAPE, 4, warmup=3)
    assert waited == [SHAPE] * 7


def test_the_input_is_of_the_dtype_and_of_random_numbers():
    seen = []

    def model(x):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
        return x

    for seed in (0, 1):
        benchmark_attention_performance(
            model, SHAPE, 1, warmup=0, dtype=jnp.bfloat16, seed=seed
        )
    jax.effects_barrier()
    assert len(seen) == 2 and str(seen[0].dtype) == "bfloat16"
    assert 0.8 < np.float32(seen[0]).std() < 1.2 and (seen[0] != seen[1]).any()


@pytest.mark.usefixtures("four_cpus")
def test_on_a_cpu_plain_jax_ran():
    def model(x):
        x = x[:, :, None]
        return flash_attention(x, x, x)

    took = benchmark_attention_performance(model, SHAPE, 1)
    assert took["implementation"] == "xla"


@pytest.mark.gpu
def test_on_a_gpu_kernels_ran():
    layer = AttentionLayer(128, 2, rngs=nnx.Rngs(0))
    took = benchmark_attention_performance(layer, (1, 256, 128), 3, dtype=jnp.bfloat16)
    assert took["implementation"] in ("cuda", "cuda_sm90")


WHERE = "benchmark_attention_performance"
ROWS = [
    (ValueError, "num_trials|at least 1|0",
     lambda: benchmark_attention_performance(jnp.tanh, SHAPE, 0)),
    (ValueError, "warmup|negative|-1",
     lambda: benchmark_attention_performance(jnp.tanh, SHAPE, warmup=-1)),
    (TypeError, "input_shape|tuple|int|d_model",
     lambda: benchmark_attention_performance(jnp.tanh, 3)),
    (ValueError, "input_shape[1]|at least 1|-2",
     lambda: benchmark_attention_performance(jnp.tanh, (3, -2))),
    (TypeError, "model|called|int",
     lambda: benchmark_attention_performance(3, SHAPE)),
    (TypeError, "dtype|floats|int32",
     lambda: benchmark_attention_performance(jnp.tanh, SHAPE, dtype="int32")),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "wrong"), ROWS, ids=[r[1] for r in ROWS])
def test_what_is_refused(error, words, wrong):
    check(WHERE, error, words, wrong)
