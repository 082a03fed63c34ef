"""Training of flax.nnx models with products of 8 bits, an object to call by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_kvblock.training import units
from jax_kvblock.training.config import FP8Config, FP8Format
from jax_kvblock.training.nnx import Fp8Variable, convert_model_to_fp8, fp8_layers
from jax_kvblock.training.product import checked_config
from jax_kvblock.training.step import Fp8State, Optimizer, apply, check_optimizer


class FP8TrainingEngine:
    """Trains a flax.nnx model whose products with weights are in 8 bits.

    A thin object over `fp8_training`'s state: `training_step` computes a loss and
    gradients, `optimizer_step` takes the step or skips it, and the model holds what
    comes of it. As a context it sets itself up.

    Args:
      model: any flax.nnx module; it is converted in place (`convert_model_to_fp8`).
      fp8_config: `FP8Config()` unless given.
      loss_fn: `loss_fn(outputs, targets)` gives a scalar. Unless given, the mean
        cross entropy where targets are integers, else the mean squared error.
      device: a device whose units are looked at; the default one unless given.
      exclude: layers that stay as they are, as for `convert_model_to_fp8`.

    Example:
      >>> with FP8TrainingEngine(model) as trainer:
      ...     loss = trainer.training_step(inputs, targets)
      ...     applied = trainer.optimizer_step(optax.adamw(1e-3))
      ...     trainer.get_training_statistics()["overflows"]
      0
    """

    def __init__(
        self,
        model: nnx.Module,
        fp8_config: FP8Config | None = None,
        *,
        loss_fn: Callable[[Any, Any], jax.Array] | None = None,
        device: jax.Device | None = None,
        exclude: tuple[str, ...] = (),
    ) -> None:
        where = "FP8TrainingEngine"
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"{where}: model must be a flax.nnx.Module, got {type(model).__name__};"
                " fp8_training trains functions"
            )
        self.model = model
        self.config = checked_config(where, fp8_config)
        self._loss_fn = mean_loss if loss_fn is None else loss_fn
        self._device = device
        self._exclude = exclude
        self._implementation = ""
        self._optimizer: Optimizer | None = None
        self._opt_state: Any = None
        self._pending: Any = None
        self._counts = (jnp.int32(0),) * 3

    def setup_fp8_training(self) -> None:
        """Looks for units of 8 bits and converts the model; once.

        Raises:
          RuntimeError: the device has none.
          ValueError: the model has no layers to convert.
        """
        if self._implementation:
            return
        served = units.served_by("FP8TrainingEngine.setup_fp8_training", self._device)
        convert_model_to_fp8(self.model, self.config, exclude=self._exclude)
        self._implementation = served

    def __enter__(self) -> FP8TrainingEngine:
        self.setup_fp8_training()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pending = None

    def training_step(self, inputs: Any, targets: Any) -> jax.Array:
        """The loss; its gradients are kept for `optimizer_step`.

        Those of several calls in a row are added up: their mean is taken.

        Args:
          inputs: what the model is called with; a tuple is several arguments.
          targets: what `loss_fn` takes beside the model's outputs.

        Raises:
          RuntimeError: `setup_fp8_training` has not been called.
          FloatingPointError: the very first loss is not finite.
        """
        where = "FP8TrainingEngine.training_step"
        self._check_is_set_up(where)
        graph, *states = _split(self.model)
        loss, found, rest = _differentiate(
            self._loss_fn, graph, *states, inputs, targets
        )
        first = self._pending is None and self._optimizer is None
        if first and not bool(jnp.isfinite(loss)):
            raise FloatingPointError(
                f"{where}: the loss must be finite at the first step, got {loss}; look "
                "at the inputs and at the model's parameters, in float32 without "
                "products of 8 bits"
            )
        nnx.update(self.model, rest)
        if self._pending is not None:
            total, others, calls = self._pending
            found = jax.tree.map(jnp.add, found, others)
            self._pending = total + loss, found, calls + 1
        else:
            self._pending = loss, found, 1
        return loss

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Takes the step, or skips it where anything in it is not finite.

        Waits for the step to be computed. A skipped one leaves parameters and the
        optimizer's state as they were.

        Args:
          optimizer: an optax transformation, the same one at each step.

        Returns:
          Whether the step was taken.

        Raises:
          RuntimeError: there was no `training_step` before.
          TypeError: optimizer is no such transformation.
          ValueError: it is another one than before.
        """
        where = "FP8TrainingEngine.optimizer_step"
        self._check_is_set_up(where)
        if self._pending is None:
            raise RuntimeError(
                f"{where}: there are no gradients; call training_step first"
            )
        self._take_on(where, optimizer)
        loss, (grads, reports), calls = self._pending
        grads = jax.tree.map(lambda x: x / calls, grads) if calls > 1 else grads
        state, applied, _ = _apply(
            optimizer, self.config, self.state, loss, grads, reports
        )
        self._pending = None
        self.restore(state)
        return bool(applied)

    @property
    def state(self) -> Fp8State:
        """All that a checkpoint has to hold, a pytree of arrays, but for the model's
        variables that are neither parameters nor scales.

        Raises:
          RuntimeError: no optimizer is known: there was no `optimizer_step`, and
            `begin` was not called.
        """
        if self._optimizer is None:
            raise RuntimeError(
                "FP8TrainingEngine.state: there is no optimizer yet; call "
                "begin(optimizer), or optimizer_step"
            )
        _, params, scalings, _ = _split(self.model)
        return Fp8State(params, scalings, self._opt_state, *self._counts)

    def begin(self, optimizer: Optimizer) -> Fp8State:
        """The state before the first step, which `restore` takes a checkpoint for."""
        where = "FP8TrainingEngine.begin"
        self._check_is_set_up(where)
        self._take_on(where, optimizer)
        return self.state

    def restore(self, state: Fp8State) -> None:
        """Goes on from a state: the model's parameters and scales become its."""
        nnx.update(self.model, state.params, state.scalings)
        self._opt_state = state.opt_state
        self._counts = state.steps, state.overflows, state.saturated

    def get_training_statistics(self) -> dict[str, Any]:
        """Counts and scales; waits for the last step.

        Returns:
          "steps" that were taken, "overflows": steps that were skipped, "saturated":
          how often a tensor was too large for its scale, "implementation": "tensor
          cores" or "emulated", and "scales": for each layer by its path, those of
          "input", "weight" and "gradient"; empty with current scaling.
        """
        self._check_is_set_up("FP8TrainingEngine.get_training_statistics")
        steps, overflows, saturated = map(int, self._counts)
        scales = {}
        for path, layer in fp8_layers(self.model).items():
            if layer.scaling is not None:
                found = layer.scaling.get_value().scale.tolist()
                names = ("input", "weight", "gradient")
                scales[path] = dict(zip(names, found, strict=True))
        return {
            "steps": steps,
            "overflows": overflows,
            "saturated": saturated,
            "implementation": self._implementation,
            "scales": scales,
        }

    def _check_is_set_up(self, where: str) -> None:
        if not self._implementation:
            raise RuntimeError(
                f"{where}: the trainer is not set up; use it as a context (with "
                "trainer:), or call setup_fp8_training"
            )

    def _take_on(self, where: str, optimizer: Any) -> None:
        check_optimizer(where, optimizer)
        if self._optimizer is None:
            self._opt_state = optimizer.init(_split(self.model)[1])
            self._optimizer = optimizer
        elif optimizer is not self._optimizer:
            raise ValueError(
                f"{where}: optimizer must be the one of the steps before, whose state "
                "is kept, got another; make it once, before the loop"
            )


def create_fp8_trainer(
    model: nnx.Module,
    forward_format: FP8Format | str = FP8Format.E4M3,
    backward_format: FP8Format | str | None = None,
    device: jax.Device | None = None,
    **options: Any,
) -> FP8TrainingEngine:
    """An `FP8TrainingEngine` with these formats.

    Args:
      model: any flax.nnx module.
      forward_format, backward_format: as for `FP8Config`.
      device: as for `FP8TrainingEngine`.
      options: `loss_fn` and `exclude` of `FP8TrainingEngine`; the others are
        `FP8Config`'s.

    Raises:
      TypeError, ValueError: see `FP8Config` and `FP8TrainingEngine`.
    """
    names = {"loss_fn", "exclude"} & options.keys()
    own = {name: options.pop(name) for name in names}
    config = FP8Config(forward_format, backward_format, **options)
    return FP8TrainingEngine(model, config, device=device, **own)


def mean_loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross entropy for integers, else the mean squared error; in float32."""
    outputs = outputs.astype(jnp.float32)
    if jnp.issubdtype(jnp.result_type(targets), jnp.integer):
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(outputs), jnp.asarray(targets)[..., None], axis=-1
        )
        return -jnp.mean(chosen)
    return jnp.mean((outputs - targets) ** 2)


def _split(model: nnx.Module) -> Any:
    """The graph, parameters, scales, and all other variables."""
    return nnx.split(model, nnx.Param, Fp8Variable, ...)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _differentiate(
    loss_fn: Any, graph: Any, params: Any, scalings: Any, rest: Any,
    inputs: Any, targets: Any,
) -> Any:  # fmt: skip
    def loss_of(params: Any, scalings: Any) -> Any:
        model = nnx.merge(graph, params, scalings, rest, copy=True)
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        loss = loss_fn(model(*given), targets)
        return loss, _split(model)[3]

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (loss, rest), found = differentiate(params, scalings)
    return loss, found, rest


_apply = functools.partial(jax.jit, static_argnums=(0, 1))(apply)
