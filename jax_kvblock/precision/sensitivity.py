"""How much the loss grows when a part of a weight is kept in few bits.

Three ways: from gradients and the errors that a format really makes, by measuring the
loss, and from the entropy of the weights alone, which is the baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import show
from jax_kvblock.precision.formats import PrecisionFormat, check_formats
from jax_kvblock.precision.packed import check_group_size, rounded
from jax_kvblock.precision.plan import Sensitivity
from jax_kvblock.precision.weights import Weight, leaves_by_name, name_of

Loss = Callable[[Any, Any], Any]  # of params and a batch: a scalar
BINS = 256  # of the histogram that an entropy is of


def gradient_sensitivity(
    loss: Loss,
    params: Any,
    batches: Iterable[Any],
    weights: Sequence[Weight],
    formats: Sequence[PrecisionFormat],
    *,
    group_size: int = 64,
) -> Sensitivity:
    """The loss's growth by its curvature, from gradients and actual errors.

    A cost is half the sum, over a part's numbers, of the mean square of their gradients
    times the square of the error that the format really makes: to second order the
    loss's growth, with the diagonal of the Fisher information in place of the second
    derivatives (Optimal Brain Damage, LeCun and others 1990; with gradients' squares as
    SqueezeLLM, arXiv:2306.07629). Gradients are of the mean over a batch, so costs of
    batches of n examples are about 1/n of the loss's growth: the same for all parts.

    Args:
      loss: `(params, batch) -> scalar`, with a gradient.
      params: a pytree; nothing here is traced.
      batches: many small ones tell more than few large ones.
      weights: as `find_weights` found them.
      formats: for which costs are wanted.
      group_size: of the formats with groups.

    Returns:
      A `Sensitivity`. In memory are params, a gradient, and the sum of its squares.

    Raises:
      TypeError, ValueError: no batches, a loss that is no scalar or not finite.
    """
    where = "gradient_sensitivity"
    weights, among, group_size = _checked(where, weights, formats, group_size)
    slope = jax.jit(jax.value_and_grad(_scalar(where, loss), allow_int=True))
    arrays = leaves_by_name(params)
    sums = {w.name: jnp.zeros(w.shape, jnp.float32) for w in weights}
    count = 0
    for batch in _some(where, batches):
        value, gradient = slope(params, batch)
        _check_finite(where, value)
        found = leaves_by_name(gradient)
        sums = _add_squares(sums, {name: found[name] for name in sums})
        count += 1
    costs = {}
    for weight in weights:
        name, columns = weight.name, []
        for format in among:
            held = rounded(
                arrays[name], format, group_size=group_size, axis=weight.axis
            )
            each = _weighted_error(held, arrays[name], sums[name], weight)
            columns.append(np.asarray(each, np.float64))
        costs[name] = np.stack(columns, 1) / (2 * count)
    return Sensitivity(weights, among, costs, group_size)


@functools.partial(jax.jit, donate_argnums=0)
def _add_squares(sums: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda a, g: a + jnp.square(g.astype(a.dtype)), sums, gradient)


@functools.partial(jax.jit, static_argnums=3)
def _weighted_error(
    held: jax.Array, array: jax.Array, squares: jax.Array, weight: Weight
) -> jax.Array:
    """Of each part, the sum of squared errors by these weights, float32."""
    error = held.astype(jnp.float32) - array.astype(jnp.float32)
    each = weight.split(squares * jnp.square(error))
    return each.reshape(weight.parts, -1).sum(1)


def loss_sensitivity(
    loss: Loss,
    params: Any,
    batches: Iterable[Any],
    weights: Sequence[Weight],
    formats: Sequence[PrecisionFormat],
    *,
    group_size: int = 64,
    inside: Any = None,
) -> Sensitivity:
    """The loss's growth as measured: each part in each format, all others as they are.

    That is one loss for each part, format and batch. A loss that is a divergence from
    the model's own predictions has less noise than one from the next tokens.

    Args:
      loss, params, batches, weights, formats, group_size: as in `gradient_sensitivity`;
        the loss needs no gradient.
      inside: a pytree like params, the model in which one part at a time is changed:
        one that is quantized already, for costs beside the errors of the others.

    Returns:
      A `Sensitivity`. Costs may be negative where the loss falls.

    Raises:
      TypeError, ValueError: no batches, a loss that is no scalar or not finite.
    """
    where = "loss_sensitivity"
    weights, among, group_size = _checked(where, weights, formats, group_size)
    arrays = leaves_by_name(params)
    base = params if inside is None else inside
    scalar = _scalar(where, loss)

    @functools.partial(jax.jit, static_argnums=0)
    def changed(weight: Weight, base: Any, piece: Any, part: Any, batch: Any) -> Any:
        def put(path: Any, leaf: Any) -> Any:
            if name_of(path) != weight.name:
                return leaf
            split = weight.split(leaf)
            split = jax.lax.dynamic_update_index_in_dim(split, piece, part, 0)
            return split.reshape(leaf.shape)

        return scalar(jax.tree_util.tree_map_with_path(put, base), batch)

    kept = list(_some(where, batches))
    plain = jax.jit(scalar)
    start = [_check_finite(where, plain(base, batch)) for batch in kept]
    costs = {}
    for weight in weights:
        costs[weight.name] = np.zeros((weight.parts, len(among)))
        for column, format in enumerate(among):
            array = arrays[weight.name]
            held = rounded(array, format, group_size=group_size, axis=weight.axis)
            pieces = weight.split(held.astype(array.dtype))
            for part in range(weight.parts):
                apart = [
                    float(changed(weight, base, pieces[part], part, batch)) - before
                    for batch, before in zip(kept, start, strict=True)
                ]
                costs[weight.name][part, column] = np.mean(apart)
    return Sensitivity(weights, among, costs, group_size)


def entropy_sensitivity(
    params: Any,
    weights: Sequence[Weight],
    formats: Sequence[PrecisionFormat],
    *,
    group_size: int = 64,
    threshold: float = 0.0,
) -> Sensitivity:
    """From the weights alone: parts whose numbers are more even need more bits.

    A part's entropy h is that of its numbers in 256 equal bins of its range, 0 to 8
    bits. A cost is `4^(h - bits)` for each number, the rate at which squared errors
    fall with bits; below the threshold it is nothing, so that such a part takes the
    smallest format. It is a baseline: neither the model nor what it reads counts.

    Args:
      params, weights, formats, group_size: as in `gradient_sensitivity`.
      threshold: bits.
    """
    where = "entropy_sensitivity"
    weights, among, group_size = _checked(where, weights, formats, group_size)
    arrays = leaves_by_name(params)
    costs = {}
    for weight in weights:
        found = np.asarray(jax.jit(_entropies)(weight.split(arrays[weight.name])))
        rates = 4.0 ** (found[:, None] - [format.bits for format in among])
        rates = np.where(found[:, None] < threshold, 0.0, rates)
        costs[weight.name] = weight.size * rates
    return Sensitivity(weights, among, costs, group_size)


def _entropies(pieces: jax.Array) -> jax.Array:
    """Bits, of the numbers of each entry along the first axis."""

    def one(piece: jax.Array) -> jax.Array:
        numbers = piece.reshape(-1).astype(jnp.float32)
        low, high = numbers.min(), numbers.max()
        width = jnp.where(high > low, high - low, 1)
        at = jnp.minimum((numbers - low) / width * BINS, BINS - 1).astype(jnp.int32)
        share = jnp.bincount(at, length=BINS) / numbers.size
        return -jax.scipy.special.xlogy(share, share).sum() / jnp.log(2.0)

    return jax.lax.map(one, pieces)


# ---- checks --------------------------------------------------------------------------


def _checked(
    where: str, weights: Any, formats: Any, group_size: Any
) -> tuple[tuple[Weight, ...], tuple[PrecisionFormat, ...], int]:
    weights = tuple(weights)
    if not weights or not all(isinstance(weight, Weight) for weight in weights):
        raise TypeError(
            f"{where}: weights must be those that find_weights found, got {weights!r}"
        )
    among = check_formats(where, "formats", formats)
    return weights, among, check_group_size(where, group_size)


def _scalar(where: str, loss: Any) -> Loss:
    def checked(params: Any, batch: Any) -> jax.Array:
        value = loss(params, batch)
        if jnp.shape(value) != ():
            raise ValueError(
                f"{where}: loss must return a scalar, got {show(value)}; take its mean"
            )
        return jnp.asarray(value)

    if not callable(loss):
        raise TypeError(
            f"{where}: loss must be a function (params, batch) -> scalar, got "
            f"{show(loss)}"
        )
    return checked


def _some(where: str, batches: Any) -> Iterator[Any]:
    """The batches, of which there must be one at least."""
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        raise ValueError(
            f"{where}: batches must hold one batch at least, got none; pass a list, "
            "for an iterator may have been used up"
        )


def _check_finite(where: str, value: Any) -> float:
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(
            f"{where}: loss must be finite for the model as it is, got {number}; look "
            "for inf and nan in params and batches"
        )
    return number
