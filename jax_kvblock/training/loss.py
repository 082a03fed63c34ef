"""The loss that a trainer takes where it is given none, and what it looks at before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import checks
from jax_kvblock.core.checks import show


def mean_loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross entropy for integers, else the mean squared error; in float32.

    Args:
      outputs: `[..., classes]` for integers, else any shape.
      targets: `[...]`, classes from 0 on, or numbers in the shape of the outputs.

    Raises:
      TypeError, ValueError: outputs are no array, the shapes do not fit, or targets
        with values are no classes; the loss is NaN of those that are traced.
    """
    where, fix = "mean_loss", "pass a loss_fn of your own"
    if not hasattr(outputs, "dtype"):
        raise TypeError(
            f"{where}: outputs must be an array, got {type(outputs).__name__}; {fix}"
        )
    numbers = integers_of(targets, wait=False)  # also of NumPy's, before they travel
    targets = jnp.asarray(targets)
    integers = jnp.issubdtype(targets.dtype, jnp.integer)
    if targets.shape != (outputs.shape[:-1] if integers else outputs.shape):
        raise ValueError(
            f"{where}: targets must be integers in the shape of the outputs without "
            f"their last axis, or numbers in their shape, got {show(targets)} for "
            f"{show(outputs)}; {fix}"
        )
    outputs = outputs.astype(jnp.float32)
    if not integers:
        return jnp.mean((outputs - targets) ** 2)
    classes = outputs.shape[-1]
    if numbers is not None:
        check_within(where, numbers, classes)
    scores = jax.nn.log_softmax(outputs)
    wide = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    # Indices below 0 would be those of the last classes.
    at = jnp.where(wide < 0, classes, wide)[..., None]
    return -jnp.mean(jnp.take_along_axis(scores, at, axis=-1, mode="fill"))


def integers_of(targets: Any, wait: bool) -> np.ndarray | None:
    """Targets that are integers and have values here; to wait for, also elsewhere."""
    there = isinstance(targets, jax.Array) and not isinstance(targets, jax.core.Tracer)
    if wait and there and targets.is_fully_addressable:
        targets = jax.device_get(targets)
    numbers = checks.known_values(targets)
    return numbers if numbers is not None and numbers.dtype.kind in "iu" else None


def check_within(where: str, targets: np.ndarray, classes: int) -> None:
    bad = targets[(targets < 0) | (targets >= classes)]
    if bad.size:
        raise ValueError(
            f"{where}: targets must be classes from 0 to {classes - 1}, the last axis "
            f"of the outputs, got {bad[0]} ({bad.size} of {targets.size} are none); "
            "pass a loss_fn of your own where some do not count"
        )


def check_finite(where: str, loss: jax.Array, grads: Any) -> None:
    """Of the first step: where it is not finite the next ones will hardly be."""
    look = (
        "look at the inputs, the targets, the loss_fn and the model's parameters, in "
        "float32 without products of 8 bits"
    )
    if not bool(jnp.isfinite(loss)):
        raise FloatingPointError(
            f"{where}: the loss must be finite before the first step, got {loss}; "
            f"{look}"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(grads):
        if not bool(jnp.isfinite(x).all()):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise FloatingPointError(
                f"{where}: gradients must be finite before the first step, got inf or "
                f"nan in that of {name}, of a loss of {loss}; {look}"
            )
