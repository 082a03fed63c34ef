"""Scales of a layer's tensors, and what a step reports of their sizes.

Autodiff brings the report: the cotangent of a layer's `Fp8Scaling` is not a derivative
but how large its tensors were beside what their scales serve. Autodiff adds cotangents
where a layer is used more than once, by scan, vmap or devices; so that a sum is still
near the largest, a report is the fourth power of that ratio, and read by its root: k
uses may seem larger by k^(1/4) than the largest of them, and never smaller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import as_int, show, shown
from jax_kvblock.training.config import FP8Config, checked_config

if TYPE_CHECKING:
    from jaxtyping import Float

_POWER = 4
# Ratios are held to these, so that a sum of 2^31 of their fourth powers is a float32.
_LEAST, _MOST = 2.0**-30, 2.0**24
# Exponents of scales: a product of two, and one over it, are normal float32 numbers.
_EXPONENTS = 60
# Scales before anything is known, of inputs, weights and gradients: they serve sizes up
# to 448, 28 and 1.75. The gradients of a mean are small, and what is rounded to 0 tells
# the layers in front of it nothing.
_FIRST = (1.0, 16.0, 2.0**15)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Scaling:
    """The scales of one product with weights, for delayed scaling.

    Attributes:
      scale: float32 `[..., 3]`, of inputs, weights and gradients: what they are
        multiplied by before they are rounded, powers of two.
      history: float32 `[..., 3, steps]`: their largest sizes in the last steps, the
        newest first, 0 where there was none yet.

    Leading axes are those of stacked layers, for scan and vmap.
    """

    scale: Float[jax.Array, "*layers 3"]
    history: Float[jax.Array, "*layers 3 steps"]

    @classmethod
    def create(
        cls, config: FP8Config | None = None, layers: Sequence[int] = ()
    ) -> Fp8Scaling:
        """Scales to begin with, and an empty history.

        Args:
          config: that of the product.
          layers: the leading axes of stacked layers, `(12,)` for twelve.

        Raises:
          TypeError, ValueError: config or layers is something else.
        """
        where = "Fp8Scaling.create"
        config = checked_config(where, config)
        axes = _checked_layers(where, layers)
        return cls(
            jnp.broadcast_to(jnp.array(_FIRST, jnp.float32), (*axes, 3)),
            jnp.zeros((*axes, 3, config.history), jnp.float32),
        )

    def sizes(self, report: Fp8Scaling, config: FP8Config) -> jax.Array:
        """float32 `[..., 3]`: the largest sizes that a report tells of."""
        limits = jnp.array([form.max for form in config.formats], jnp.float32)
        # Two square roots, which are rounded right everywhere, as powers are not.
        return jnp.sqrt(jnp.sqrt(report.scale)) * (limits / self.scale)

    def update(self, report: Fp8Scaling, config: FP8Config | None = None) -> Fp8Scaling:
        """The scales for the next step.

        Sizes that are not finite are passed over. While all sizes are 0, or none is
        known, a scale stays as it is. A product that took no part in the step has a
        report of zeros, and keeps what it knows. A scale that is not finite or not
        above 0, as one may be restored, makes no product: it becomes what the history
        says, or the first one, and what is no size in a history becomes 0.

        Args:
          report: the cotangent of these scales, from `jax.grad`; that of several
            batches or devices is their sum, not their mean.
          config: that of the products.

        Raises:
          TypeError: report or config is something else.
          ValueError: the report is of scales of another shape.
        """
        where = "Fp8Scaling.update"
        config = checked_config(where, config)
        if not isinstance(report, Fp8Scaling):
            raise TypeError(
                f"{where}: report must be an Fp8Scaling, got {show(report)}; pass what "
                "jax.grad gives with respect to these scales"
            )
        if report.scale.shape != self.scale.shape:
            raise ValueError(
                f"{where}: report must be of these scales, {show(self.scale)}, got one "
                f"of {show(report.scale)}; sum or index what vmap made of it"
            )
        serves = _serves(self.scale)
        sizes = self.sizes(report, config)[..., None]
        told = jnp.isfinite(sizes) & serves[..., None]
        is_size = jnp.isfinite(self.history) & (self.history > 0)
        before = jnp.where(is_size, self.history, 0.0)
        moved = jnp.concatenate([sizes, before[..., :-1]], -1)
        used = jnp.any(report.scale != 0, -1)[..., None, None]
        history = jnp.where(used & told, moved, before)
        largest = jnp.max(history, -1)
        fitting = jnp.stack(
            [
                scale_for(largest[..., i], form.max, config.margin)
                for i, form in enumerate(config.formats)
            ],
            -1,
        )
        kept = jnp.where(serves, self.scale, jnp.array(_FIRST, jnp.float32))
        return Fp8Scaling(jnp.where(largest > 0, fitting, kept), history)


def _serves(scale: Any) -> Any:
    """Which scales can be multiplied by, and divided by."""
    return (scale > 0) & (scale < jnp.inf)


def scale_for(largest: jax.Array, limit: float, margin: int) -> jax.Array:
    """The largest power of two by which `largest` stays within `limit`, halved.

    1 where `largest` is 0 or not finite.
    """
    (mantissa, exponent), (most, top) = jnp.frexp(largest), math.frexp(limit)
    exponent = top - exponent - (mantissa > most)
    exponent = jnp.clip(exponent - margin, -_EXPONENTS, _EXPONENTS)
    known = (largest > 0) & jnp.isfinite(largest)
    return jnp.where(known, jnp.ldexp(jnp.float32(1), exponent), jnp.float32(1))


def report_of(largest: jax.Array, scale: jax.Array, limit: float) -> jax.Array:
    """How large a tensor was beside what its scale serves, as autodiff may add it."""
    # A size that float32 does not hold once it is scaled is a large one, and no more.
    known = jnp.isfinite(largest) & jnp.isfinite(scale)
    ratio = largest * scale / limit
    held = jnp.clip(ratio, _LEAST, _MOST) ** _POWER
    return jnp.where(ratio == 0, 0.0, jnp.where(known, held, jnp.nan))


def saturated(report: Fp8Scaling) -> jax.Array:
    """int32: how many tensors had numbers too large for their scale, at most."""
    return jnp.sum(report.scale > 1, dtype=jnp.int32)


def is_finite(report: Fp8Scaling) -> jax.Array:
    return jnp.all(jnp.isfinite(report.scale))


def check_scaling(where: str, scaling: Any, config: FP8Config) -> None:
    """Whether these are the scales of one product, for this config."""
    if config.scaling == "current":
        if scaling is not None:
            raise ValueError(
                f"{where}: scaling must be None with FP8Config(scaling='current'), got "
                f"{type(scaling).__name__}; leave it out"
            )
        return
    fix = "pass Fp8Scaling.create(config), or FP8Config(scaling='current')"
    if not isinstance(scaling, Fp8Scaling):
        raise TypeError(
            f"{where}: scaling must be an Fp8Scaling, got {type(scaling).__name__}; "
            f"{fix}"
        )
    want = (3,), (3, config.history)
    got = scaling.scale.shape, scaling.history.shape
    if got != want:
        raise ValueError(
            f"{where}: scaling must be of one product, float32{list(want[0])} and "
            f"float32{list(want[1])} for a history of {config.history}, got "
            f"{list(got[0])} and {list(got[1])}; {fix}, and scan or vmap over the "
            "scales of stacked layers"
        )
    check_floats(where, "scaling", scaling)


def check_floats(where: str, name: str, scaling: Fp8Scaling) -> None:
    """Whether scales have the dtype that they are made in."""
    for part in ("scale", "history"):
        array = getattr(scaling, part)
        if array.dtype != jnp.float32:
            raise TypeError(
                f"{where}: {name} must be float32, got {show(array)} as {part}; "
                "restore it as Fp8Scaling.create(config) gives it"
            )


def check_values(where: str, name: str, scaling: Fp8Scaling) -> None:
    """Whether scales that are there can be multiplied by."""
    scale = scaling.scale
    if isinstance(scale, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return
    if not getattr(scale, "is_fully_addressable", True):
        return
    values = np.asarray(jax.device_get(scale))
    bad = values[~_serves(values)]
    if bad.size:
        raise ValueError(
            f"{where}: {name} must have scales that are finite and above 0, got "
            f"{bad[0]}; take Fp8Scaling.create(config) in their place"
        )


def _checked_layers(where: str, layers: Any) -> tuple[int, ...]:
    if isinstance(layers, Sequence):
        axes = tuple(axis for axis in map(as_int, layers) if axis is not None)
        if len(axes) == len(layers) and all(axis >= 0 for axis in axes):
            return axes
    elif as_int(layers) is not None:
        raise TypeError(
            f"{where}: layers must be a tuple of integers, got {shown(layers)}; pass "
            f"({layers},)"
        )
    raise TypeError(
        f"{where}: layers must be a tuple of integers of at least 0, got "
        f"{shown(layers)}; pass the leading axes of the stacked weights"
    )
