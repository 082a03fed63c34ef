"""What is asked for: which part of a model, how boldly, and for which lengths."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from jax_kvblock.attention import arguments
from jax_kvblock.core.checks import check_positive

_Enum = TypeVar("_Enum", bound=enum.Enum)


class FusionStrategy(enum.Enum):
    """Which choices are looked at. A function takes a member, or its name or value.

    Attributes:
      FULL_BLOCK: all of them.
      ATTENTION_ONLY: attention between the projections.
      QKV_ONLY: the three projections in front of it.
      FEED_FORWARD_ONLY: GELU behind a product.
    """

    FULL_BLOCK = "full_block"
    ATTENTION_ONLY = "attention_only"
    QKV_ONLY = "qkv_only"
    FEED_FORWARD_ONLY = "feed_forward_only"


class OptimizationLevel(enum.Enum):
    """Which of them ship. A function takes a member, or its name or value.

    Attributes:
      CONSERVATIVE: none: the model as it is, in one program. What comes out has the
        bits that jitting the model gives.
      BALANCED: those that were measured to be faster than XLA's on this kind of device,
        in this dtype and at `target_sequence_length`. They round differently.
      AGGRESSIVE: all that there are, measured or not; float32 may be computed in
        bfloat16 (`FusionConfig.enable_mixed_precision`), and dropout drops others.
    """

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """What `create_unified_attention_fusion` does.

    Attributes:
      strategy: which choices are looked at.
      optimization_level: which of them ship.
      enable_mixed_precision: with AGGRESSIVE, what is fused in layers that compute in
        float32 is computed in bfloat16 and comes back as float32. Nothing at the other
        levels.
      enable_memory_optimization: GELU may keep its input alone for the way back and
        compute the rest again. False leaves GELU to XLA at every level.
      target_sequence_length: the length that measurements are looked up for.

    Raises:
      TypeError, ValueError: names that there are not, flags that are no bools, a length
        that is no positive integer.
    """

    strategy: FusionStrategy | str = FusionStrategy.FULL_BLOCK
    optimization_level: OptimizationLevel | str = OptimizationLevel.BALANCED
    enable_mixed_precision: bool = True
    enable_memory_optimization: bool = True
    target_sequence_length: int = 512

    def __post_init__(self) -> None:
        where = "FusionConfig"
        arguments.check_flags(
            where,
            enable_mixed_precision=self.enable_mixed_precision,
            enable_memory_optimization=self.enable_memory_optimization,
        )
        (length,) = check_positive(
            where, target_sequence_length=self.target_sequence_length
        )
        made = {
            "strategy": member(where, "strategy", self.strategy, FusionStrategy),
            "optimization_level": member(
                where,
                "optimization_level",
                self.optimization_level,
                OptimizationLevel,
            ),
            "target_sequence_length": length,
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)


def member(where: str, name: str, given: Any, kind: type[_Enum]) -> _Enum:
    """A member of an enum by itself, its value or its name."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str):
        for one in kind:
            if given in (one.value, one.name):
                return one
    known = ", ".join(f'"{one.value}"' for one in kind)
    error = ValueError if isinstance(given, str) else TypeError
    raise error(
        f"{where}: {name} must be a {kind.__name__} or one of {known}, got {given!r}; "
        f"pass {kind.__name__}.{next(iter(kind)).name}"
    )
