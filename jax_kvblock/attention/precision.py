"""How products of float32 are computed: the two precisions, by any of jax's names."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import shown

Precision: TypeAlias = Literal["default", "highest"]

_PRESET = jax.lax.DotAlgorithmPreset
# More digits than TF32 has, by the names of algorithms.
_FINE = (
    *("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3"),
    *("F32_F32_F32", "F64_F64_F64"),
)


def resolve(where: str, precision: Any, dtype: Any) -> Precision:
    """The precision of a call in this dtype; "highest" where it makes no difference.

    None is `jax_default_matmul_precision`, and "highest" where that is not set. Of a
    pair, one for each operand, the finer one counts.
    """
    if precision is None:
        precision = getattr(jax.config, "jax_default_matmul_precision", None)
    if precision is None:
        return "highest"
    pair = isinstance(precision, tuple) and len(precision) == 2
    names = [_named(where, p) for p in (precision if pair else (precision,))]
    if jnp.dtype(dtype) != jnp.float32 or "highest" in names:
        return "highest"
    return "default"


def _named(where: str, precision: Any) -> Precision:
    if isinstance(precision, _PRESET):
        precision = precision.name
    if isinstance(precision, str) and precision in _PRESET.__members__:
        return "highest" if precision in _FINE else "default"
    try:
        if not isinstance(precision, (str, jax.lax.Precision)):  # an enum of integers
            raise ValueError
        # The finest alone is float32; XLA on a GPU multiplies the others in TF32.
        finest = jax.lax.Precision(precision) == jax.lax.Precision.HIGHEST
    except ValueError:
        raise ValueError(
            f"{where}: precision must be 'default' (TF32), 'highest' (near float32), a "
            f"name that jax has for one, or None, got {shown(precision)}; None follows "
            "jax.default_matmul_precision"
        ) from None
    return "highest" if finest else "default"


def of_products(precision: Precision) -> jax.lax.Precision:
    """For products in plain JAX."""
    return jax.lax.Precision(precision)
