"""What few bits would save, and what they would change, for a model and an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import show, shown
from jax_kvblock.precision.config import PrecisionConfig
from jax_kvblock.precision.formats import PrecisionFormat
from jax_kvblock.precision.mixed import dequantize
from jax_kvblock.precision.module import (
    base_bytes_of,
    check_config,
    check_device,
    in_base,
    open_model,
)
from jax_kvblock.precision.plan import PrecisionPlan
from jax_kvblock.precision.sensitivity import loss_sensitivity
from jax_kvblock.precision.weights import (
    IsWeight,
    bytes_of,
    check_finite,
    find_weights,
    other_leaves,
)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The smallest format that changes the outputs little enough.

    Attributes:
      name, part: of the weight.
      format: the recommended one.
      output_error: of the outputs with this part alone in the format: the distance from
        those of the model as it is, relative to their length.
      saved_bytes: beside the base precision.
    """

    name: str
    part: int
    format: PrecisionFormat
    output_error: float
    saved_bytes: int


def analyze_precision_opportunities(
    model: Any,
    sample_input: Any,
    device: jax.Device | None = None,
    *,
    config: PrecisionConfig | None = None,
    tolerance: float = 0.1,
    is_weight: IsWeight | None = None,
    parts: Mapping[str, int] | None = None,
    axis: int | Callable[[str, Any], int] | None = None,
) -> dict[str, Any]:
    """Runs the model on an input with each part of each weight in each format.

    A part is recommended the format of fewest bits whose error of the outputs is at
    most `tolerance / sqrt(number of parts)`, so that errors which are independent of
    each other add up to the tolerance; or none, where no format is so good. The model
    is run once for each part and format.

    Args:
      model, is_weight, parts, axis: as in `create_ultra_precision_module`.
      sample_input: an array, or a tuple of the model's inputs.
      device: where it runs; where the arrays are unless given.
      config: of which base_precision, formats and group_size count.
      tolerance: relative error of the outputs, above 0.

    Returns:
      A dict: `potential_savings`, the share of the bytes in base_precision that all
      recommendations save together; `recommendations`, a list of `Recommendation`, the
      largest savings first; `output_error`, measured with all of them applied;
      `stored_bytes` and `base_bytes`; `plan`, the `PrecisionPlan` of them, with the
      base precision where no format is good enough.

    Raises:
      TypeError, ValueError: as `create_ultra_precision_module`; outputs without floats
        or numbers, or not finite; a tolerance that is not above 0.
    """
    where = "analyze_precision_opportunities"
    config = check_config(where, config)
    check_device(where, device)
    if not isinstance(tolerance, (int, float, np.number)) or not tolerance > 0:
        raise ValueError(
            f"{where}: tolerance must be a number above 0, got {shown(tolerance)}"
        )
    size = config.group_size
    function, params, *cut = open_model(where, model, is_weight, parts, axis, size)
    is_weight, parts, axis = cut
    inputs = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    if device is not None:
        params, inputs = jax.device_put((params, inputs), device)
    weights = find_weights(
        params,
        group_size=size,
        is_weight=is_weight,
        parts=parts,
        axis=axis,
        where=where,
    )
    check_finite(where, params, weights)
    truth = floats_of(where, jax.jit(function)(params, *inputs))
    _check_outputs(where, truth)

    def error(params: Any, inputs: Any) -> jax.Array:
        return relative_error(floats_of(where, function(params, *inputs)), truth)

    found = loss_sensitivity(
        error, params, [inputs], weights, config.formats, group_size=size
    )
    allowed = tolerance / np.sqrt(sum(weight.parts for weight in weights))
    base = config.base_precision
    recommendations, chosen = [], []
    for weight in weights:
        wide = weight.nbytes(base, size)
        formats = []
        for part in range(weight.parts):
            costs = found.costs[weight.name][part]
            good = [
                (weight.nbytes(format, size), format, float(cost))
                for format, cost in zip(found.formats, costs, strict=True)
                if cost <= allowed
            ]
            least = min(good, key=lambda one: one[0]) if good else (wide, base, 0.0)
            formats.append(least[1])
            if least[0] < wide:
                saved = wide - least[0]
                recommendations.append(
                    Recommendation(weight.name, part, least[1], least[2], saved)
                )
        chosen.append(tuple(formats))
    plan = PrecisionPlan(weights, tuple(chosen), size)
    others = other_leaves(in_base(where, params, weights, base), weights)
    stored, whole = (
        plan.nbytes + sum(map(bytes_of, others)),
        base_bytes_of(params, base),
    )
    together = jax.jit(lambda params: error(dequantize(plan.apply(params)), inputs))
    return {
        "potential_savings": 1 - stored / whole,
        "recommendations": sorted(recommendations, key=lambda one: -one.saved_bytes),
        "output_error": float(together(params)),
        "stored_bytes": stored,
        "base_bytes": whole,
        "plan": plan,
    }


def _check_outputs(where: str, truth: list[jax.Array]) -> None:
    """Whether errors can be measured beside these."""
    if not any(x.size for x in truth):
        raise ValueError(
            f"{where}: sample_input must give outputs with numbers in them, got "
            f"{', '.join(map(show, truth))}; pass a batch of at least one"
        )
    if not all(bool(jnp.isfinite(x).all()) for x in truth):
        raise ValueError(
            f"{where}: sample_input must give finite outputs, got inf or nan in them; "
            "look for inf and nan in it"
        )


def floats_of(where: str, outputs: Any) -> list[jax.Array]:
    """The outputs that errors are of."""
    found = [
        jnp.asarray(leaf)
        for leaf in jax.tree.leaves(outputs)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if not found:
        raise TypeError(
            f"{where}: model must return floats, got none; pass a function that "
            "returns its logits"
        )
    return found


def relative_error(found: list[jax.Array], truth: list[jax.Array]) -> jax.Array:
    def square(of: list[jax.Array]) -> jax.Array:
        return sum(
            (jnp.square(x.astype(jnp.float32)).sum() for x in of), jnp.float32(0)
        )

    apart = [
        a.astype(jnp.float32) - b.astype(jnp.float32)
        for a, b in zip(found, truth, strict=True)
    ]
    length = square(truth)
    return jnp.sqrt(square(apart) / jnp.where(length > 0, length, 1))
