"""Training whose products with weights are in 8 bits.

Layers and trainers of flax.nnx are imported where they are asked for: flax is optional.
"""

from typing import TYPE_CHECKING, Any

from jax_kvblock.training.compiled import Products, count_products
from jax_kvblock.training.config import FP8Config, FP8Format
from jax_kvblock.training.product import fp8_dot, fp8_dot_general, fp8_norm_dot
from jax_kvblock.training.scaling import Fp8Scaling
from jax_kvblock.training.step import Fp8Report, Fp8State, Fp8Training, fp8_training

if TYPE_CHECKING:
    from jax_kvblock.training.nnx import (
        Fp8DotGeneral,
        FP8LinearLayer,
        Fp8Variable,
        convert_model_to_fp8,
        fp8_layers,
    )
    from jax_kvblock.training.trainer import (
        FP8TrainerState,
        FP8TrainingEngine,
        create_fp8_trainer,
    )

__all__ = [
    "FP8Config",
    "FP8Format",
    "FP8LinearLayer",
    "FP8TrainerState",
    "FP8TrainingEngine",
    "Fp8DotGeneral",
    "Fp8Report",
    "Fp8Scaling",
    "Fp8State",
    "Fp8Training",
    "Fp8Variable",
    "Products",
    "convert_model_to_fp8",
    "count_products",
    "create_fp8_trainer",
    "fp8_dot",
    "fp8_dot_general",
    "fp8_layers",
    "fp8_norm_dot",
    "fp8_training",
]

_OF_FLAX = {
    "FP8LinearLayer": "nnx",
    "Fp8DotGeneral": "nnx",
    "Fp8Variable": "nnx",
    "convert_model_to_fp8": "nnx",
    "fp8_layers": "nnx",
    "FP8TrainerState": "trainer",
    "FP8TrainingEngine": "trainer",
    "create_fp8_trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_OF_FLAX[name]}")
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise ImportError(
            f"{__name__}.{name} needs flax, which is not installed; "
            "pip install 'flax>=0.12'"
        ) from error
    return getattr(module, name)
