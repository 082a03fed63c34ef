"""`benchmark_fusion_performance`: a model op by op, jitted, and fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import check_integer, check_positive
from jax_kvblock.core.models import as_function
from jax_kvblock.fusion.launches import Launches, count_launches
from jax_kvblock.layers.timing import Times, times_in_turns

WAYS = ("op by op", "jitted", "fused")
FEW = 10  # calls that are timed op by op, at most


@dataclasses.dataclass(frozen=True)
class FusionPerformanceStats:
    """What `benchmark_fusion_performance` measured, of three ways.

    Ways are "op by op", the baseline as Python calls it; "jitted", the baseline as one
    program of XLA's; and "fused", the fused model as one program.

    Attributes:
      times: of each way, in milliseconds.
      launches: of each way, kernels that a call ran on the GPU.
      difference: how far the fused results are from the jitted ones, in parts of their
        norm.
      num_runs: calls that were timed, each by itself; op by op at most ten.
      device: what ran it.
    """

    times: dict[str, Times]
    launches: dict[str, Launches]
    difference: float
    num_runs: int
    device: str

    @property
    def speedup(self) -> float:
        """How many times as fast fused is as jitted, by medians."""
        return self.times["jitted"]["p50"] / self.times["fused"]["p50"]

    @property
    def speedup_over_op_by_op(self) -> float:
        """How many times as fast fused is as op by op, by medians."""
        return self.times["op by op"]["p50"] / self.times["fused"]["p50"]

    @property
    def launch_reduction(self) -> float | None:
        """The share of the jitted baseline's kernels that fused does without."""
        return self._reduction("jitted")

    @property
    def launch_reduction_over_op_by_op(self) -> float | None:
        """The share of the kernels of op by op that fused does without."""
        return self._reduction("op by op")

    def _reduction(self, way: str) -> float | None:
        before, after = self.launches[way].kernels, self.launches["fused"].kernels
        return None if not before or after is None else 1 - after / before

    def __str__(self) -> str:
        lines = [f"{self.device}, medians of {self.num_runs} calls"]
        for way in WAYS:
            ms = self.times[way]["p50"]
            lines.append(f"{way:9} {ms:10.4f} ms, {self.launches[way]}")
        for way, ratio, share in (
            ("jitted", self.speedup, self.launch_reduction),
            (
                "op by op",
                self.speedup_over_op_by_op,
                self.launch_reduction_over_op_by_op,
            ),
        ):
            kernels = "kernels not counted"
            if share is not None:
                kernels = (
                    f"{abs(share):.0%} {'fewer' if share >= 0 else 'more'} kernels"
                )
            lines.append(f"fused over {way}: {ratio:.3f} x as fast, {kernels}")
        lines.append(f"results apart by {self.difference:.2g} of their norm")
        return "\n".join(lines)


def benchmark_fusion_performance(
    baseline_model: Callable[..., Any],
    fused_model: Callable[..., Any],
    input_data: Any,
    num_runs: int = 100,
    *,
    warmup: int = 3,
) -> FusionPerformanceStats:
    """Times a model op by op, jitted and fused, and counts the kernels of each.

    Both are compiled as one program, and take turns call by call, each call waited for;
    op by op is the baseline as Python calls it. What a time holds besides is what JAX
    takes to start a program and to wait for it, tens of microseconds.

    Kernels are those that the GPU ran, as JAX's profiler recorded them: those within a
    CUDA graph count one by one. On other devices there is no count, and the stats say
    so.

    Args:
      baseline_model: an nnx module, a callable pytree or a function. One that jits
        itself is one program op by op as well.
      fused_model: the same, as it is fused; of `create_unified_attention_fusion`, say.
      input_data: what both are called with: an array, or a tuple of arguments.
      num_runs: calls that are timed.
      warmup: calls before these.

    Raises:
      TypeError, ValueError: what is no model or number; results of other shapes.

    Example:
      >>> block = TransformerBlock(64, 4, rngs=nnx.Rngs(0))
      >>> fused = create_unified_attention_fusion(block)
      >>> print(benchmark_fusion_performance(block, fused, jnp.ones((1, 16, 64))))
    """
    where = "benchmark_fusion_performance"
    (num_runs,) = check_positive(where, num_runs=num_runs)
    warmup = check_integer(where, "warmup", warmup, "pass 0 for none")
    if warmup < 0:
        raise ValueError(
            f"{where}: warmup must not be negative, got {warmup}; pass 0 for none"
        )
    args = input_data if isinstance(input_data, tuple) else (input_data,)
    args = jax.tree.map(jnp.asarray, args)
    jitted, fused = (
        _compiled(where, model, args) for model in (baseline_model, fused_model)
    )
    calls: dict[str, Callable[[], Any]] = {
        "op by op": lambda: baseline_model(*args),
        "jitted": jitted,
        "fused": fused,
    }
    difference = _difference(where, jitted(), fused())
    few = min(num_runs, FEW)
    (eager,) = times_in_turns([calls["op by op"]], few, min(warmup, 1))
    both = times_in_turns([jitted, fused], num_runs, warmup)
    leaf = jax.tree.leaves(args)[0]
    return FusionPerformanceStats(
        times=dict(zip(WAYS, (eager, *both), strict=True)),
        launches={way: count_launches(calls[way]) for way in WAYS},
        difference=difference,
        num_runs=num_runs,
        device=next(iter(leaf.devices())).device_kind,
    )


def _compiled(where: str, model: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    function, first = as_function(where, model)
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    compiled = jitted.lower(*first, *args).compile()
    return lambda: compiled(*first, *args)


def _difference(where: str, one: Any, other: Any) -> float:
    """How far `other` is from `one`, in parts of the norm of `one`."""
    shapes = [[x.shape for x in jax.tree.leaves(made)] for made in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{where}: fused_model must return what baseline_model does, arrays of "
            f"{shapes[0]}, got {shapes[1]}; pass the same model before and after"
        )
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    away = sum(float(jnp.sum((a - b) ** 2)) for a, b in wide)
    size = sum(float(jnp.sum(a * a)) for a, _ in wide)
    return float((away / size) ** 0.5) if size else float(away**0.5)
