"""Training of flax.nnx models with products of 8 bits, an object to call by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kvblock.core import ffi
from jax_kvblock.core.checks import as_array, show, shown
from jax_kvblock.training import units
from jax_kvblock.training.config import (
    FP8Config,
    FP8Format,
    check_flag,
    checked_config,
)
from jax_kvblock.training.donation import apart
from jax_kvblock.training.loss import (
    check_finite,
    check_within,
    integers_of,
    mean_loss,
)
from jax_kvblock.training.nnx import Fp8Variable, convert_model_to_fp8, fp8_layers
from jax_kvblock.training.scaling import Fp8Scaling, check_values
from jax_kvblock.training.step import (
    Fp8State,
    Optimizer,
    apply,
    check_loss,
    check_optimizer,
)


class FP8TrainerState(NamedTuple):
    """All of a training, a pytree of arrays: what a checkpoint holds.

    Attributes:
      training: parameters, scales, the optimizer's state and counts.
      variables: the model's others: statistics of batches, counts of random keys.
    """

    training: Fp8State
    variables: Any


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
      device: where steps run, whose units are looked at; JAX's default device unless
        given.
      exclude: layers that stay as they are, as for `convert_model_to_fp8`.
      donate: whether a step writes parameters and the optimizer's state in place.
        Arrays that were taken from the model or from `state` before it, and those that
        `restore` was given, are gone then. Without it both exist twice in a step.

    Example:
      >>> optimizer = optax.adamw(1e-3)
      >>> with FP8TrainingEngine(model) as trainer:
      ...     loss = trainer.training_step(inputs, targets)
      ...     applied = trainer.optimizer_step(optimizer)
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
        exclude: Sequence[str] = (),
        donate: bool = False,
    ) -> None:
        where = "FP8TrainingEngine"
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"{where}: model must be a flax.nnx.Module, got {type(model).__name__};"
                " fp8_training trains functions"
            )
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                f"{where}: device must be a jax.Device, got {type(device).__name__}; "
                "pass jax.devices()[0], for example"
            )
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(
                f"{where}: loss_fn must be a function (outputs, targets), got "
                f"{shown(loss_fn)}; leave it out for the mean squared error or the "
                "cross entropy"
            )
        self._donate = check_flag(where, "donate", donate)
        self.model = model
        self.config = checked_config(where, fp8_config)
        self._loss_fn = mean_loss if loss_fn is None else loss_fn
        self._device = device
        self._exclude = exclude
        self._implementation = ""
        self._optimizer: Optimizer | None = None
        self._opt_state: Any = None
        self._pending: _Pending | None = None
        self._counts = tuple(jnp.zeros((), jnp.int32) for _ in range(3))
        self._classes: dict[Any, int | None] = {}  # by the shapes of inputs
        self._stepped = False  # a step was taken, skipped or restored
        self._given = True  # some arrays are the user's, not all the last step's
        # Of its own, so that what they hold goes with it.
        self._differentiate = jax.jit(
            functools.partial(_differentiate, self._loss_fn), static_argnums=0
        )
        self._apply: Any = None  # jitted for the optimizer when that is known

    def setup_fp8_training(self) -> None:
        """Looks for units of 8 bits and converts the model; once.

        Raises:
          RuntimeError: the device has none.
          ValueError: the model has no layers to convert, or some that are converted
            already, with another config.
        """
        if self._implementation:
            return
        where = "FP8TrainingEngine.setup_fp8_training"
        served = units.served_by(where, self._device)
        for path, layer in fp8_layers(self.model).items():
            if layer.config != self.config:
                raise ValueError(
                    f"{where}: layers must have the trainer's config, {self.config}, "
                    f"got {path!r} with {layer.config}; pass that one"
                )
        convert_model_to_fp8(self.model, self.config, exclude=self._exclude)
        nnx.update(self.model, self._there(nnx.state(self.model)))
        self._counts = self._there(self._counts)
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
        self._drop()

    def training_step(self, inputs: Any, targets: Any) -> jax.Array:
        """The loss; its gradients are kept for `optimizer_step`.

        Those of several calls in a row are added up: their mean is taken. Variables
        that are no parameters (statistics of batches) move on; where the step is
        skipped, or the context left without one, they go back, but for random keys.
        What the model sows is dropped.

        Args:
          inputs: what the model is called with; a tuple is several arguments.
          targets: what `loss_fn` takes beside the model's outputs.

        Raises:
          RuntimeError: `setup_fp8_training` has not been called.
          TypeError: the loss is no scalar; targets of the default loss are no array.
          ValueError: targets of the default loss are no classes of the outputs.
          FloatingPointError: a loss or a gradient is not finite before any step was
            taken.
        """
        where = "FP8TrainingEngine.training_step"
        self._check_is_set_up(where)
        if self._loss_fn is mean_loss and isinstance(targets, (list, tuple)):
            targets = as_array(where, "targets", targets)
        graph, *states = _split(self.model)
        if self._loss_fn is mean_loss:
            self._check_classes(where, graph, states, inputs, targets)
        with ffi.on_device(self._device):
            made = self._differentiate(graph, *states, inputs, targets)
        loss, found, variables = made
        if not self._stepped:
            check_finite(where, loss, found[0])
        nnx.update(self.model, variables)
        if self._pending is None:
            self._pending = _Pending(loss, found, 1, states[-1])
        else:
            before = self._pending
            found = jax.tree.map(jnp.add, before.found, found)
            total, calls = before.loss + loss, before.calls + 1
            self._pending = _Pending(total, found, calls, before.variables)
        return loss

    def _check_classes(
        self, where: str, graph: Any, states: Any, inputs: Any, targets: Any
    ) -> None:
        """Whether integer targets are classes of the model's outputs.

        Those that lie on an accelerator are looked at before the first step alone: a
        training that is under way does not wait for them.
        """
        numbers = integers_of(targets, wait=not self._stepped)
        if numbers is None:
            return
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        leaves, tree = jax.tree.flatten(given)
        key = tree, tuple(map(show, leaves))
        if key not in self._classes:

            def outputs(states: Any, given: Any) -> Any:
                return nnx.merge(graph, *states, copy=True)(*given)

            made = jax.eval_shape(outputs, states, given)
            fits = getattr(made, "shape", (0,))[:-1] == numbers.shape
            self._classes[key] = made.shape[-1] if fits else None
        classes = self._classes[key]
        if classes is not None:  # else mean_loss says what does not fit
            check_within(where, numbers, classes)

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
          TypeError: optimizer is no such transformation, or needs more than gradients,
            its state and parameters.
          ValueError: it is another one than before.
        """
        where = "FP8TrainingEngine.optimizer_step"
        self._check_is_set_up(where)
        check_optimizer(where, optimizer)
        if self._pending is None:
            raise RuntimeError(
                f"{where}: there are no gradients; call training_step first"
            )
        self._take_on(where, optimizer)
        pending = self._pending
        grads, reports = pending.found
        if pending.calls > 1:
            grads = jax.tree.map(lambda x: x / pending.calls, grads)
        state, variables = self.state
        with ffi.on_device(self._device):
            if self._donate and self._given:
                state = apart(state, (variables, pending))
            try:
                made = self._apply(state, pending.loss, grads, reports)
            except Exception:
                if not self._stepped:  # nothing is of this optimizer: take another
                    self._optimizer = self._opt_state = self._apply = None
                raise
        state, applied, _ = made
        if applied:
            self._pending = None
        self._drop()
        self._take(state)
        return bool(applied)

    def _drop(self) -> None:
        """Goes back to before the calls that no step was taken for."""
        if self._pending is not None:
            nnx.update(self.model, _without_keys(self._pending.variables))
        self._pending = None

    def _take(self, state: Fp8State) -> None:
        nnx.update(self.model, state.params, state.scalings)
        self._opt_state = state.opt_state
        self._counts = state.steps, state.overflows, state.saturated
        self._stepped, self._given = True, False

    @property
    def state(self) -> FP8TrainerState:
        """All that a checkpoint has to hold.

        Raises:
          RuntimeError: no optimizer is known: there was no `optimizer_step`, and
            `begin` was not called.
        """
        if self._optimizer is None:
            raise RuntimeError(
                "FP8TrainingEngine.state: there is no optimizer yet; call "
                "begin(optimizer), or optimizer_step"
            )
        _, params, scalings, variables = _split(self.model)
        training = Fp8State(params, scalings, self._opt_state, *self._counts)
        return FP8TrainerState(training, variables)

    def begin(self, optimizer: Optimizer) -> FP8TrainerState:
        """The state before the first step: what `restore` takes another one for."""
        where = "FP8TrainingEngine.begin"
        self._check_is_set_up(where)
        self._take_on(where, optimizer)
        return self.state

    def restore(self, state: FP8TrainerState) -> None:
        """Goes on from a state of this model and optimizer; `begin` comes before.

        Gradients that no step was taken for are dropped.

        Raises:
          RuntimeError: no optimizer is known.
          ValueError, TypeError: it is a state of something else, or one with arrays of
            other shapes or dtypes, or scales that are not finite and above 0.
        """
        where = "FP8TrainingEngine.restore"
        if self._optimizer is None:
            raise RuntimeError(
                f"{where}: there is no optimizer yet; call begin(optimizer) first"
            )
        _check_like(where, self.state, state)
        for x in jax.tree.leaves(state.training.scalings, is_leaf=_is_scaling):
            if _is_scaling(x):
                check_values(where, "state.training.scalings", x)
        self._drop()
        self._take(state.training)
        self._given = True
        nnx.update(self.model, state.variables)

    def get_training_statistics(self) -> dict[str, Any]:
        """Counts and scales; waits for the last step.

        Returns:
          "steps" that were taken, "overflows": steps that were skipped, "saturated":
          how often a tensor was too large for its scale, "implementation": "tensor
          cores" or "emulated", and "scales": for each layer by its path, those of
          "input", "weight" and "gradient", of stacked layers lists of them; empty
          with current scaling.
        """
        self._check_is_set_up("FP8TrainingEngine.get_training_statistics")
        steps, overflows, saturated = map(int, self._counts)
        scales = {}
        for path, layer in fp8_layers(self.model).items():
            if layer.scaling is not None:
                found = np.asarray(jax.device_get(layer.scaling.get_value().scale))
                names = ("input", "weight", "gradient")
                scales[path] = {n: found[..., i].tolist() for i, n in enumerate(names)}
        return {
            "steps": steps,
            "overflows": overflows,
            "saturated": saturated,
            "implementation": self._implementation,
            "scales": scales,
        }

    def _there(self, tree: Any) -> Any:
        """Arrays that nobody has put anywhere, on the device that was given.

        Steps leave them there; a first one of others would be compiled for itself.
        """

        def put(x: Any) -> Any:
            free = isinstance(x, jax.Array) and not x.committed
            return jax.device_put(x, self._device) if free else x

        return tree if self._device is None else jax.tree.map(put, tree)

    def _check_is_set_up(self, where: str) -> None:
        if not self._implementation:
            raise RuntimeError(
                f"{where}: the trainer is not set up; use it as a context (with "
                "trainer:), or call setup_fp8_training"
            )

    def _take_on(self, where: str, optimizer: Any) -> None:
        check_optimizer(where, optimizer)
        if self._optimizer is None:
            opt_state = self._there(optimizer.init(_split(self.model)[1]))
            # Arrays of its own: the optimizer may hold those that it gives.
            copied = jax.tree.map(jnp.copy, opt_state) if self._donate else opt_state
            self._opt_state, self._optimizer = copied, optimizer
            name = "FP8TrainingEngine.optimizer_step"
            self._apply = jax.jit(
                functools.partial(apply, name, optimizer, self.config),
                donate_argnums=0 if self._donate else (),
            )
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
      options: `loss_fn`, `exclude` and `donate` of `FP8TrainingEngine`; the others
        are `FP8Config`'s.

    Raises:
      TypeError, ValueError: see `FP8Config` and `FP8TrainingEngine`.
    """
    where, of_engine = "create_fp8_trainer", ("donate", "exclude", "loss_fn")
    of_config = [field.name for field in dataclasses.fields(FP8Config)[2:]]
    if strange := options.keys() - {*of_engine, *of_config}:
        known = ", ".join(sorted((*of_engine, *of_config)))
        raise TypeError(
            f"{where}: options must be of {known}, got {min(strange)!r}; leave it out"
        )
    own = {name: options.pop(name) for name in of_engine if name in options}
    config = FP8Config(forward_format, backward_format, **options)
    return FP8TrainingEngine(model, config, device=device, **own)


class _Pending(NamedTuple):
    """Gradients that no step was taken for yet."""

    loss: jax.Array
    found: Any  # gradients and reports
    calls: int
    variables: Any  # before the first call


def _is_scaling(x: Any) -> bool:
    return isinstance(x, Fp8Scaling)


def _split(model: nnx.Module) -> Any:
    """The graph, parameters, scales, and all other variables; what was sown is gone."""
    nnx.pop(model, nnx.Intermediate)
    graph, *states = nnx.split(model, nnx.Param, Fp8Variable, ...)
    # Variables of their own: those of the model change.
    return graph, *jax.tree.map(lambda x: x, states)


def _check_like(where: str, own: FP8TrainerState, given: Any) -> None:
    """Whether a state has the arrays of another, in their shapes and dtypes."""
    fix = "restore it as begin(optimizer) gives it"
    flat: Any = map(jax.tree_util.tree_flatten_with_path, (own, given))
    (ours, tree), (theirs, other) = flat
    if tree != other:
        raise ValueError(
            f"{where}: state must be one of this model and optimizer, got "
            f"{type(given).__name__} with other arrays; {fix}"
        )
    for (path, *leaves), (_, leaf) in zip(ours, theirs, strict=True):
        x, y = (a if hasattr(a, "dtype") else jnp.asarray(a) for a in (*leaves, leaf))
        same = x.shape == y.shape, x.dtype == y.dtype
        if not all(same):
            raise (TypeError if same[0] else ValueError)(
                f"{where}: state{jax.tree_util.keystr(path)} must be {show(x)}, got "
                f"{show(y)}; {fix}"
            )


def _without_keys(variables: Any) -> Any:
    """What goes back where a step is skipped: a key is never used twice."""
    return nnx.filter_state(variables, nnx.Not(nnx.RngState))


def _differentiate(
    loss_fn: Any, graph: Any, params: Any, scalings: Any, variables: Any,
    inputs: Any, targets: Any,
) -> Any:  # fmt: skip
    def loss_of(params: Any, scalings: Any) -> Any:
        model = nnx.merge(graph, params, scalings, variables, copy=True)
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        loss = loss_fn(model(*given), targets)
        check_loss("FP8TrainingEngine.training_step", loss)
        return loss, _split(model)[3]

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (loss, variables), found = differentiate(params, scalings)
    return loss, found, variables
