"""Fused blocks of transformers: what pays where, and what fusing it is worth.

It imports `core`, `attention`, `hardware` and `layers`. Flax is imported with the first
name that needs it, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax_kvblock.fusion.benchmark import (
    FusionPerformanceStats,
    benchmark_fusion_performance,
)
from jax_kvblock.fusion.choices import CHOICES, Choice, FusionDecision, Measurement
from jax_kvblock.fusion.config import FusionConfig, FusionStrategy, OptimizationLevel
from jax_kvblock.fusion.launches import Launches, count_launches

if TYPE_CHECKING:
    from jax_kvblock.fusion.modules import TransformerBlock, UnifiedAttentionFusion
    from jax_kvblock.fusion.nnx import create_unified_attention_fusion

_OF_FLAX = (
    "TransformerBlock",
    "UnifiedAttentionFusion",
    "create_unified_attention_fusion",
)


def __getattr__(name: str) -> Any:
    """What is flax's, where that is installed."""
    if name not in _OF_FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from jax_kvblock.fusion import modules, nnx
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flax":
            raise
        raise ImportError(
            f"jax_kvblock.fusion: {name} must have flax, whose nnx modules it changes, "
            "and flax is not installed; `pip install flax`, or call flash_attention "
            "and one product for q, k and v in functions of your own"
        ) from None
    return getattr(modules if hasattr(modules, name) else nnx, name)


__all__ = [
    "CHOICES",
    "Choice",
    "FusionConfig",
    "FusionDecision",
    "FusionPerformanceStats",
    "FusionStrategy",
    "Launches",
    "Measurement",
    "OptimizationLevel",
    "TransformerBlock",
    "UnifiedAttentionFusion",
    "benchmark_fusion_performance",
    "count_launches",
    "create_unified_attention_fusion",
]
