"""Weights in few bits: packed arrays, plans that say which has how many, modules.

It imports `core` alone.
"""

from jax_kvblock.precision.analysis import (
    Recommendation,
    analyze_precision_opportunities,
)
from jax_kvblock.precision.config import (
    AllocationStrategy,
    PrecisionConfig,
    QuantizationMode,
)
from jax_kvblock.precision.formats import PrecisionFormat
from jax_kvblock.precision.mixed import MixedArray, dequantize
from jax_kvblock.precision.module import (
    PrecisionStats,
    UltraPrecisionModule,
    create_ultra_precision_module,
)
from jax_kvblock.precision.packed import PackedArray, packed_dot, quantize
from jax_kvblock.precision.plan import (
    PrecisionPlan,
    Sensitivity,
    make_plan,
    uniform_plan,
)
from jax_kvblock.precision.sensitivity import (
    entropy_sensitivity,
    gradient_sensitivity,
    loss_sensitivity,
)
from jax_kvblock.precision.weights import Weight, find_weights

__all__ = [
    "AllocationStrategy",
    "MixedArray",
    "PackedArray",
    "PrecisionConfig",
    "PrecisionFormat",
    "PrecisionPlan",
    "PrecisionStats",
    "QuantizationMode",
    "Recommendation",
    "Sensitivity",
    "UltraPrecisionModule",
    "Weight",
    "analyze_precision_opportunities",
    "create_ultra_precision_module",
    "dequantize",
    "entropy_sensitivity",
    "find_weights",
    "gradient_sensitivity",
    "loss_sensitivity",
    "make_plan",
    "packed_dot",
    "quantize",
    "uniform_plan",
]
