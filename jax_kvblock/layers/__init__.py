"""Layers as optional flax.nnx modules; layers validated and timed.

It imports `core`, `attention` and `hardware`. Flax is imported with the first of its
modules that is asked for, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax_kvblock.layers.benchmark import benchmark_attention_performance
from jax_kvblock.layers.results import Comparison, ValidationResult
from jax_kvblock.layers.validate import ComponentValidator

if TYPE_CHECKING:
    from jax_kvblock.layers.modules import AttentionLayer, FusedGELU, OptimizedLinear

_MODULES = ("AttentionLayer", "FusedGELU", "OptimizedLinear")


def __getattr__(name: str) -> Any:
    """The modules of flax, where that is installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from jax_kvblock.layers import modules
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flax":
            raise
        raise ImportError(
            f"jax_kvblock.layers: {name} must have flax, whose nnx module it is, and "
            "flax is not installed; `pip install flax`, or make a layer without it by "
            "jax_kvblock.parallel.create_attention"
        ) from None
    return getattr(modules, name)


__all__ = [
    "AttentionLayer",
    "Comparison",
    "ComponentValidator",
    "FusedGELU",
    "OptimizedLinear",
    "ValidationResult",
    "benchmark_attention_performance",
]
