"""`benchmark_attention_performance`: how long a call of a layer takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_kvblock.core.checks import check_integer, check_positive
from jax_kvblock.core.models import as_function
from jax_kvblock.hardware.programs import attention_in
from jax_kvblock.layers.arguments import check_floats
from jax_kvblock.layers.timing import Times, times_in_turns


class Latency(Times):
    """What `benchmark_attention_performance` measured; times in milliseconds."""

    num_trials: int
    warmup: int
    compile_time: float
    implementation: str
    device: str


def benchmark_attention_performance(
    model: Callable[..., Any],
    input_shape: Sequence[int],
    num_trials: int = 100,
    *,
    warmup: int = 10,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
) -> Latency:
    """Times a call of a layer, compiled, each call waited for.

    The call is one program: the layer on one array of random numbers, as the layer is
    (an nnx module after `eval()` drops nothing; in training each trial drops the same).
    What a time holds besides is what JAX takes to start a program and to wait for it,
    tens of microseconds.

    Args:
      model: an nnx module, a callable pytree or a function, of one array.
      input_shape: its shape, `[batch, length, d_model]`.
      num_trials: calls that are timed, each by itself.
      warmup: calls before these, not timed; compilation is apart.
      dtype: of the input, floats.
      seed: of its numbers.

    Returns:
      A dict. In milliseconds: "avg_latency", the mean, "std", "min", "p50", "p90",
      "p99", "max", and "compile_time". "num_trials" and "warmup". "implementation" of
      attention, read from the compiled program: "cuda_sm90", "cuda", "cudnn", several
      with commas, or "xla" where no kernel is called. The "device" that ran it.

    Raises:
      TypeError, ValueError: what is no model, shape or number.

    Example:
      >>> model = AttentionLayer(64, 4, rngs=nnx.Rngs(0))
      >>> took = benchmark_attention_performance(model, (1, 128, 64), num_trials=20)
      >>> print(f"{took['avg_latency']:.2f} ms by {took['implementation']}")
    """
    where = "benchmark_attention_performance"
    (num_trials,) = check_positive(where, num_trials=num_trials)
    warmup = check_integer(where, "warmup", warmup, "pass 0 for none")
    if warmup < 0:
        raise ValueError(
            f"{where}: warmup must not be negative, got {warmup}; pass 0 for none"
        )
    shape = _shape(where, input_shape)
    dtype = check_floats(where, "dtype", dtype)
    x = jax.random.normal(jax.random.key(seed), shape, dtype)
    function, first = as_function(where, model)
    started = time.perf_counter()
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    compiled = jitted.lower(*first, x).compile()
    compile_time = time.perf_counter() - started
    (times,) = times_in_turns([lambda: compiled(*first, x)], num_trials, warmup)
    return Latency(
        **times,
        num_trials=num_trials,
        warmup=warmup,
        compile_time=1e3 * compile_time,
        implementation=", ".join(attention_in(compiled.as_text())),
        device=str(next(iter(x.devices()))),
    )


def _shape(where: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list)):
        raise TypeError(
            f"{where}: input_shape must be a tuple of sizes, got "
            f"{type(given).__name__}; pass (batch, length, d_model)"
        )
    names = {f"input_shape[{i}]": size for i, size in enumerate(given)}
    return check_positive(where, **names)
