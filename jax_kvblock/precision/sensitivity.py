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
from jax_kvblock.precision.mixed import dequantize, store
from jax_kvblock.precision.packed import check_group_size
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

    To second order the loss grows by half of `e H e`, e being the error that a format
    makes in a part and H the loss's second derivatives. Near a minimum of a negative
    log-likelihood H is the mean of `g g`, of the gradients g of single examples (Fisher
    information), so a cost is half the mean over batches of `(g e)^2`, times the number
    of examples in a batch that the caller's loss is a mean of, which is the same for
    all and left out. Products within a part count, not only its diagonal.

    Args:
      loss: `(params, batch) -> scalar`, with a gradient.
      params: a pytree; nothing here is traced.
      batches: many small ones tell more than few large ones.
      weights: as `find_weights` found them.
      formats: for which costs are wanted.
      group_size: of the formats with groups.

    Returns:
      A `Sensitivity`. In memory are the errors of all weights in every format, in
      bfloat16, and a gradient.

    Raises:
      TypeError, ValueError: no batches, a loss that is no scalar or not finite.
    """
    where = "gradient_sensitivity"
    weights, among, group_size = _checked(where, weights, formats, group_size)
    arrays = leaves_by_name(params)
    errors = [
        {w.name: _error(arrays[w.name], w, format, group_size) for w in weights}
        for format in among
    ]
    slope = jax.jit(jax.value_and_grad(_scalar(where, loss), allow_int=True))
    sums = {w.name: np.zeros((w.parts, len(among))) for w in weights}
    count = 0
    for batch in _some(where, batches):
        value, gradient = slope(params, batch)
        _check_finite(where, value)
        named = leaves_by_name(gradient)
        for column, of_format in enumerate(errors):
            for weight in weights:
                found = _products(named[weight.name], of_format[weight.name], weight)
                sums[weight.name][:, column] += np.square(np.float64(found)) / 2
        count += 1
    costs = {name: total / count for name, total in sums.items()}
    return Sensitivity(weights, among, costs, group_size)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _error(
    array: jax.Array, weight: Weight, format: PrecisionFormat, group_size: int
) -> jax.Array:
    stored = store(array, weight, (format,) * weight.parts, group_size)
    error = dequantize(stored).astype(jnp.float32) - array
    return error.astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=2)
def _products(gradient: jax.Array, error: jax.Array, weight: Weight) -> jax.Array:
    product = gradient.astype(jnp.float32) * error.astype(jnp.float32)
    return weight.split(product).reshape(weight.parts, -1).sum(1)


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
            stored = store(array, weight, (format,) * weight.parts, group_size)
            pieces = weight.split(dequantize(stored, array.dtype).astype(array.dtype))
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
