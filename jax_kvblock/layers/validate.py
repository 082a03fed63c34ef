"""`ComponentValidator`: layers beside the same in plain jnp, values and gradients."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi
from jax_kvblock.core.checks import check_integer, check_positive
from jax_kvblock.layers.readers import Reader, read_attention, read_linear
from jax_kvblock.layers.results import Comparison, ValidationResult

# How much further from float64 a layer may be than plain jnp at the same dtype, whose
# order of sums is another; and in units of the dtype's eps, what is always allowed.
TIMES_PLAIN = 4.0
EPSILONS = 4.0
# One draw of plain jnp's roundings may be lucky: where a row looks at few keys, what
# rounding does to its gradient varies from draw to draw by more than 4. So plain jnp is
# judged on so many more problems, which differ from the layer's in the last bits.
MORE_DRAWS = 7

Arrays: TypeAlias = dict[str, np.ndarray]


class ComponentValidator:
    """Holds layers to plain jnp in float64, on inputs that are drawn anew each time.

    A layer runs twice: with its own weights, and with weights that are drawn, biases
    too (fresh layers have zeros there). Its output, and the gradients of a random sum
    of that by each input and weight, are compared with the same in float64. What is
    allowed comes of the reference itself: 4 times the error that it makes at the dtype
    the layer multiplies in, the largest on these inputs and on seven sets that differ
    from them in the last bits (for float64, float32's errors by the ratio of both
    eps); and at least 4 eps of that dtype, or of what a gradient
    is stored in where that is coarser. A layer with infinities or NaNs fails. Nothing
    is dropped meanwhile (`deterministic=True`).

    Args:
      device: where all of it runs; the default device unless given.
      batch_size: B of the inputs.
      length: S of them.
      seed: what they are drawn from. None draws another with each validation; the
        result says which it was.

    Raises:
      TypeError, ValueError: what is no device, no size, no seed.

    Example:
      >>> layer = AttentionLayer(64, 4, rngs=nnx.Rngs(0))
      >>> bool(ComponentValidator().validate_attention_component(layer, 64, 4))
      True
    """

    def __init__(
        self,
        device: jax.Device | None = None,
        *,
        batch_size: int = 2,
        length: int = 37,
        seed: int | None = None,
    ) -> None:
        where = type(self).__name__
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                f"{where}: device must be a device of JAX, got "
                f"{type(device).__name__}; pass jax.devices()[0]"
            )
        self.device = device
        self.batch_size, self.length = check_positive(
            where, batch_size=batch_size, length=length
        )
        if seed is not None:
            seed = check_integer(where, "seed", seed, "or leave it out")
        self.seed = seed

    def validate_attention_component(
        self, layer: Any, d_model: int, num_heads: int
    ) -> ValidationResult:
        """Of an `AttentionLayer` or an `nnx.MultiHeadAttention`, or what inherits them.

        With its own weights every position is seen; with drawn ones a fifth of the keys
        is masked, on average, the second always and the first never.

        Args:
          layer: the layer, called on `[B, S, d_model]` of float32.
          d_model, num_heads: its width and heads.

        Returns:
          What was compared, and how far it was apart.

        Raises:
          TypeError, NotImplementedError: a layer whose weights cannot be read, or one
            with products of 8 bits, normed queries or keys of other widths.
          ValueError: the layer has another width or other heads.
        """
        where = "validate_attention_component"
        d_model, num_heads = check_positive(where, d_model=d_model, num_heads=num_heads)
        reader = read_attention(where, layer, d_model, num_heads)
        shape = (self.batch_size, self.length, d_model)
        rng, seed = self._rng()
        keys = rng.random(shape[:2]) < 0.8
        keys[:, 1:2] = False  # so that one is masked always
        keys[:, 0] = True  # and no row is without one, causal ones too
        cases = {
            "its own weights": (False, None),
            "drawn weights, masked keys": (True, keys),
        }
        return self._validated(layer, reader, shape, cases, rng, seed)

    def validate_linear_component(
        self, layer: Any, in_features: int, out_features: int
    ) -> ValidationResult:
        """Of an `OptimizedLinear` or an `nnx.Linear`, or what inherits them.

        Args:
          layer: the layer, called on `[B, S, in_features]` of float32.
          in_features, out_features: its widths.

        Returns, raises: as `validate_attention_component`.
        """
        where = "validate_linear_component"
        sizes = check_positive(
            where, in_features=in_features, out_features=out_features
        )
        reader = read_linear(where, layer, *sizes)
        shape = (self.batch_size, self.length, sizes[0])
        rng, seed = self._rng()
        cases = {"its own weights": (False,), "drawn weights": (True,)}
        return self._validated(layer, reader, shape, cases, rng, seed)

    def _rng(self) -> tuple[np.random.Generator, int]:
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return np.random.default_rng(seed), seed

    def _validated(
        self,
        layer: Any,
        reader: Reader,
        shape: tuple[int, ...],
        cases: dict[str, tuple[Any, ...]],
        rng: np.random.Generator,
        seed: int,
    ) -> ValidationResult:
        found: list[Comparison] = []
        plain = _reference(_plain(reader), _plain(reader).dtype)
        truth = _reference(reader, jnp.dtype(np.float64))
        with ffi.on_device(self.device):
            for case, (drawn, *masks) in cases.items():
                weights = _drawn(reader, rng) if drawn else reader.weights
                if self.device is not None:
                    weights = jax.device_put(weights, self.device)
                x = rng.standard_normal(shape, np.float32)
                found += _compared(case, reader, plain, truth, weights, x, masks, rng)
        return ValidationResult(type(layer).__name__, seed, tuple(found))


def _plain(reader: Reader) -> Reader:
    """What is run in plain jnp; float32 for float64, which has nothing above it.

    Its errors are then taken times float64's eps over float32's.
    """
    if reader.dtype != np.float64:
        return reader
    return dataclasses.replace(reader, dtype=jnp.dtype(np.float32), precision="highest")


def _drawn(reader: Reader, rng: np.random.Generator) -> Any:
    """Weights of the layer's shapes: matrices that keep lengths, biases of numbers."""

    def draw(w: jax.Array) -> jax.Array:
        values = rng.standard_normal(w.shape) / np.sqrt(w.shape[0] if w.ndim > 1 else 1)
        return jnp.asarray(values, w.dtype)

    return jax.tree.map(draw, reader.weights)


def _compared(
    case: str,
    reader: Reader,
    plain_of: Callable[..., Arrays],
    truth_of: Callable[..., Arrays],
    weights: Any,
    x: np.ndarray,
    masks: list[Any],
    rng: np.random.Generator,
) -> list[Comparison]:
    """The output and each gradient of one case."""
    of_layer = reader.named(weights)
    # A gradient is rounded to the dtype of what it belongs to.
    stored = {"output": reader.dtype, "gradient of the input": x.dtype}
    stored |= {f"gradient of {name}": w.dtype for name, w in of_layer.items()}
    computed = float(jnp.finfo(reader.dtype).eps)
    floors = {
        name: EPSILONS * max(computed, float(jnp.finfo(dtype).eps))
        for name, dtype in stored.items()
    }
    named = {n: np.asarray(w, np.float64) for n, w in of_layer.items()}
    out = jax.eval_shape(lambda w, x: reader.run(w, x, *masks), weights, x)
    shape = jax.eval_shape(lambda w, x: reader.reference(w, x, *masks), named, x).shape
    if out.shape != shape:
        wrong = (out.shape, str(out.dtype), float("inf"), 0.0, floors["output"])
        return [Comparison(case, "output", *wrong)]
    d_out = rng.standard_normal(shape, np.float32)
    got, got_dtypes = _layer(reader, weights, x, masks, d_out)
    # One program of each reference for all cases: one that masks nothing masks, too.
    masks = [np.ones(x.shape[:2], bool) if mask is None else mask for mask in masks]
    operands = (named, x, d_out)
    truth = _exact(truth_of, operands, masks)
    errors = [_errors(plain_of(*operands, masks), truth)]
    of_plain = float(jnp.finfo(_plain(reader).dtype).eps)
    for nudged in _nudged(operands, of_plain, rng):
        exact = _exact(truth_of, nudged, masks)
        errors.append(_errors(plain_of(*nudged, masks), exact))
    found = []
    for name, want in truth.items():
        plain_error = max(of[name] for of in errors) * (computed / of_plain)
        found.append(
            Comparison(
                case=case,
                name=name,
                shape=want.shape,
                dtype=got_dtypes[name],
                error=_error(got[name], want),
                plain_error=plain_error,
                tolerance=max(TIMES_PLAIN * plain_error, floors[name]),
            )
        )
    return found


def _nudged(operands: Any, eps: float, rng: np.random.Generator) -> Iterator[Any]:
    """The same with last bits of their own, `MORE_DRAWS` times."""
    rng = rng.spawn(1)[0]  # what is drawn here changes nothing that is drawn later

    def nudge(a: np.ndarray) -> np.ndarray:
        return (a * (1 + eps * rng.integers(-1, 2, a.shape))).astype(a.dtype)

    for _ in range(MORE_DRAWS):
        yield jax.tree.map(nudge, operands)


def _exact(truth_of: Callable[..., Arrays], operands: Any, masks: list[Any]) -> Arrays:
    with jax.enable_x64(True):
        return truth_of(*operands, masks)


def _errors(plain: Arrays, truth: Arrays) -> dict[str, float]:
    return {name: _error(plain[name], want) for name, want in truth.items()}


def _layer(
    reader: Reader, weights: Any, x: np.ndarray, masks: list[Any], d_out: np.ndarray
) -> tuple[Arrays, dict[str, str]]:
    """What the layer gives, by name, as float64; and in which dtypes it was."""

    @jax.jit
    def both(weights: Any, x: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda w, x: reader.run(w, x, *masks), weights, x)
        d_weights, d_x = pull(d_out.astype(out.dtype))
        return out, d_x, reader.named(d_weights)

    return _as_arrays(*both(weights, x, d_out))


def _reference(reader: Reader, dtype: jnp.dtype) -> Callable[..., Arrays]:
    """A function that gives the same in plain jnp at a dtype."""

    @jax.jit
    def both(weights: Any, x: Any, d_out: Any, masks: Any) -> Any:
        weights, x, d_out = (
            jax.tree.map(lambda a: a.astype(dtype), given)
            for given in (weights, x, d_out)
        )
        out, pull = jax.vjp(lambda w, x: reader.reference(w, x, *masks), weights, x)
        d_weights, d_x = pull(d_out)
        return out, d_x, d_weights

    def run(*operands: Any) -> Arrays:
        # A layer that names none has what is set around it; so has the reference.
        named = reader.precision
        with jax.default_matmul_precision(named) if named else nullcontext():
            return _as_arrays(*both(*operands))[0]

    return run


def _as_arrays(
    out: jax.Array, d_x: jax.Array, d_weights: dict[str, jax.Array]
) -> tuple[Arrays, dict[str, str]]:
    gradients = {f"gradient of {name}": d for name, d in d_weights.items()}
    found = {"output": out, "gradient of the input": d_x, **gradients}
    dtypes = {name: str(a.dtype) for name, a in found.items()}
    return {name: np.asarray(a, np.float64) for name, a in found.items()}, dtypes


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """See `Comparison`."""
    if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    if not np.isfinite(got).all() or not np.isfinite(want).all():
        return float("inf")
    if not want.size:
        return 0.0
    apart = np.linalg.norm(np.atleast_1d(got - want), axis=-1)
    length = np.sqrt(np.mean(np.linalg.norm(np.atleast_1d(want), axis=-1) ** 2))
    return float(apart.max() / length) if length else float(apart.max())
