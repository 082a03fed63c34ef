"""What a module is asked to become: strategies, modes, and `PrecisionConfig`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from jax_kvblock.core.checks import shown
from jax_kvblock.precision.formats import (
    PLAIN,
    PrecisionFormat,
    check_format,
    check_formats,
)
from jax_kvblock.precision.packed import check_group_size


class AllocationStrategy(enum.Enum):
    """By what a plan gives bits to weights.

    UNIFORM: one format for all, the one of most bits that fits. ENTROPY_BASED: by the
    entropy of the weights, without data. GRADIENT_WEIGHTED: by gradients and the errors
    that a format really makes. LOSS_BASED: by the loss's growth as it is measured.
    """

    UNIFORM = "uniform"
    ENTROPY_BASED = "entropy_based"
    GRADIENT_WEIGHTED = "gradient_weighted"
    LOSS_BASED = "loss_based"


class QuantizationMode(enum.Enum):
    """What is quantized, and when.

    STATIC: weights, before the module runs, by a plan that does not change. DYNAMIC,
    numbers that are quantized while the module runs, is not built.
    """

    STATIC = "static"
    DYNAMIC = "dynamic"


NEEDS_LOSS = (AllocationStrategy.GRADIENT_WEIGHTED, AllocationStrategy.LOSS_BASED)


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """How `create_ultra_precision_module` chooses formats.

    Attributes:
      base_precision: FP32, FP16 or BF16: of floats that are no weights, and the format
        of all floats that savings are counted against.
      allocation_strategy: by what bits are given.
      quantization_mode: STATIC.
      entropy_threshold: bits, 0 to 8; with ENTROPY_BASED a part of a weight whose
        entropy is below takes the smallest format.
      target_memory_reduction: the share of the bytes in base_precision that is to be
        saved, above 0 and below 1; the rest is the plan's budget.
      formats: that a plan chooses from.
      group_size: neighbours that share a scale, a multiple of 32.
    """

    base_precision: PrecisionFormat = PrecisionFormat.FP16
    allocation_strategy: AllocationStrategy = AllocationStrategy.ENTROPY_BASED
    quantization_mode: QuantizationMode = QuantizationMode.STATIC
    entropy_threshold: float = 1.5
    target_memory_reduction: float = 0.4
    formats: tuple[PrecisionFormat, ...] = (
        PrecisionFormat.INT2,
        PrecisionFormat.INT3,
        PrecisionFormat.INT4,
        PrecisionFormat.INT5,
        PrecisionFormat.INT6,
        PrecisionFormat.INT8,
    )
    group_size: int = 64

    def __post_init__(self) -> None:
        where = "PrecisionConfig"
        check_format(where, "base_precision", self.base_precision, PLAIN)
        _check_member(where, "allocation_strategy", self.allocation_strategy)
        _check_member(where, "quantization_mode", self.quantization_mode)
        if self.quantization_mode is QuantizationMode.DYNAMIC:
            raise NotImplementedError(
                f"{where}: quantization_mode must be QuantizationMode.STATIC, got "
                "QuantizationMode.DYNAMIC; formats are shapes of a compiled program: "
                "weights are quantized before it, activations stay as they are"
            )
        _check_share(where, "entropy_threshold", self.entropy_threshold, 0, 8)
        reduction = self.target_memory_reduction
        _check_share(where, "target_memory_reduction", reduction, 0, 1)
        if not 0 < reduction < 1:
            raise ValueError(
                f"{where}: target_memory_reduction must be above 0 and below 1, the "
                f"share of bytes to save, got {reduction!r}"
            )
        formats = check_formats(where, "formats", self.formats)
        object.__setattr__(self, "formats", formats)
        check_group_size(where, self.group_size)


_KINDS: dict[str, type[enum.Enum]] = {
    "allocation_strategy": AllocationStrategy,
    "quantization_mode": QuantizationMode,
}


def _check_member(where: str, name: str, value: Any) -> None:
    kind = _KINDS[name]
    if not isinstance(value, kind):
        names = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
        raise TypeError(f"{where}: {name} must be one of {names}, got {value!r}")


def _check_share(where: str, name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number:
        raise TypeError(f"{where}: {name} must be a number, got {shown(value)}")
    if not low <= value <= high:
        raise ValueError(
            f"{where}: {name} must be from {low:g} to {high:g}, got {value!r}"
        )
