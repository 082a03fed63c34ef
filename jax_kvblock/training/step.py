"""Training as pure functions: a state, and a jitted step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import show
from jax_kvblock.training import scaling as scales
from jax_kvblock.training.config import FP8Config, checked_config
from jax_kvblock.training.scaling import Fp8Scaling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Optimizer(Protocol):
    """What optax's transformations are."""

    def init(self, params: Any, /) -> Any: ...
    def update(self, grads: Any, state: Any, params: Any, /) -> Any: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8State:
    """All that a step reads and writes: what a checkpoint holds.

    Attributes:
      params: any pytree of arrays, in the dtypes that the optimizer keeps.
      scalings: any pytree with an `Fp8Scaling` for each product; None with current
        scaling.
      opt_state: the optimizer's own.
      steps: int32, steps that the optimizer took.
      overflows: int32, steps that were skipped.
      saturated: int32, how often a tensor had numbers too large for its scale; with
        products that are used more than once in a step, at most so often.
    """

    params: Any
    scalings: Any
    opt_state: Any
    steps: Int[jax.Array, ""]
    overflows: Int[jax.Array, ""]
    saturated: Int[jax.Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Report:
    """What a step tells.

    Attributes:
      loss: before the step.
      aux: what `loss_fn` returned beside it, or None.
      applied: False where the step was skipped.
      saturated: int32, how many tensors had numbers too large for their scale; of
        layers that are used more than once, at most so many.
    """

    loss: Float[jax.Array, ""]
    aux: Any
    applied: Bool[jax.Array, ""]
    saturated: Int[jax.Array, ""]


class Fp8Training(NamedTuple):
    """A pair of pure functions, as optax's transformations are."""

    init: Callable[..., Fp8State]
    train_step: Callable[[Fp8State, Any], tuple[Fp8State, Fp8Report]]


def fp8_training(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    config: FP8Config | None = None,
    *,
    has_aux: bool = False,
) -> Fp8Training:
    """Training of `loss_fn`, whose products are `fp8_dot`, as two pure functions.

    A step whose loss, gradients or sizes of tensors are not finite is skipped:
    parameters, the optimizer's state and its count stay as they were; scales follow the
    sizes that are finite. `FP8Config(skip_saturated=True)` also skips one with numbers
    that were too large for their scale, whose sizes count.

    Args:
      loss_fn: `loss_fn(params, scalings, batch)` gives a scalar, or with has_aux a pair
        of it and anything.
      optimizer: an optax transformation, or any object with its `init` and `update`.
      config: that of the products in `loss_fn`.

    Returns:
      `init(params, scalings=None)`, which gives an `Fp8State` with copies of both, and
      `train_step(state, batch)`, which gives the next one and an `Fp8Report`; jitted,
      with the state donated. A loss or gradients that are never finite take no step,
      and are no error, which a pure function cannot raise: look at `report.applied`,
      or at `state.overflows`.

    Raises:
      TypeError: loss_fn, optimizer, params or scalings is something else, or the loss
        is no scalar.
      ValueError: `init` is given scales of another config, or such as are not finite
        and above 0.

    Example:
      >>> training = fp8_training(loss_fn, optax.adamw(1e-3))
      >>> state = training.init(params, {"up": Fp8Scaling.create()})
      >>> state, report = training.train_step(state, batch)
    """
    where = "fp8_training"
    config = checked_config(where, config)
    if not callable(loss_fn):
        raise TypeError(
            f"{where}: loss_fn must be a function (params, scalings, batch), got "
            f"{type(loss_fn).__name__}"
        )
    check_optimizer(where, optimizer)

    def init(params: Any, scalings: Any = None) -> Fp8State:
        _check_scalings(where, scalings, config)
        _check_params(where, "params", params)
        # Arrays of its own: the state is donated, and must not hold one twice.
        params, scalings = jax.tree.map(jnp.copy, (params, scalings))
        opt_state = jax.tree.map(jnp.copy, optimizer.init(params))
        counts = (jnp.zeros((), jnp.int32) for _ in range(3))
        return Fp8State(params, scalings, opt_state, *counts)

    def train_step(state: Fp8State, batch: Any) -> tuple[Fp8State, Fp8Report]:
        _check_state("train_step", state, config)

        def checked(*given: Any) -> Any:
            made = loss_fn(*given)
            if has_aux and not (isinstance(made, (tuple, list)) and len(made) == 2):
                raise TypeError(
                    "train_step: loss_fn must give a pair of its loss and anything "
                    f"with has_aux=True, got {show(made)}; leave has_aux out where "
                    "there is a loss alone"
                )
            check_loss("train_step", made[0] if has_aux else made)
            return made

        differentiate = jax.value_and_grad(checked, argnums=(0, 1), has_aux=has_aux)
        value, found = differentiate(state.params, state.scalings, batch)
        loss, aux = value if has_aux else (value, None)
        state, applied, saturated = apply(
            "train_step", optimizer, config, state, loss, *found
        )
        return state, Fp8Report(loss, aux, applied, saturated)

    return Fp8Training(init, jax.jit(train_step, donate_argnums=0))


def apply(
    where: str,
    optimizer: Optimizer,
    config: FP8Config,
    state: Fp8State,
    loss: jax.Array,
    grads: Any,
    reports: Any,
) -> tuple[Fp8State, jax.Array, jax.Array]:
    """The next state, whether the optimizer took the step, and what saturated."""
    found = jax.tree.leaves(reports, is_leaf=_is_scaling)
    saturated = sum(map(scales.saturated, found), jnp.int32(0))
    numbers = [jnp.all(jnp.isfinite(x)) for x in (loss, *jax.tree.leaves(grads))]
    good = jnp.all(jnp.stack([*numbers, *map(scales.is_finite, found)]))
    if config.skip_saturated:
        good &= saturated == 0

    def take(params: Any, opt_state: Any) -> Any:
        try:
            updates, opt_state = optimizer.update(grads, opt_state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"{where}: optimizer must need gradients, its state and parameters "
                f"alone, got one that needs more ({error}); take one that does not, as "
                "optax.adamw, or a loop of your own, which gives it the rest"
            ) from error
        add = jax.tree.map(lambda x, d: (x + d).astype(x.dtype), params, updates)
        return add, opt_state

    params, opt_state = jax.lax.cond(
        good, take, lambda *kept: kept, state.params, state.opt_state
    )
    scalings = jax.tree.map(
        lambda own, report: own.update(report, config),
        state.scalings,
        reports,
        is_leaf=_is_scaling,
    )
    took = good.astype(jnp.int32)
    counts = (state.steps + took, state.overflows + 1 - took)
    state = Fp8State(params, scalings, opt_state, *counts, state.saturated + saturated)
    return state, good, saturated


def check_loss(where: str, loss: Any) -> None:
    """Whether a gradient can be taken of what a loss_fn gave."""
    dtype = getattr(loss, "dtype", None)
    good = isinstance(loss, float) if dtype is None else loss.shape == ()
    if not good or (dtype is not None and not jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(
            f"{where}: loss_fn must give a scalar of floats, got {show(loss)}; take "
            "jnp.mean of it, and has_aux=True of fp8_training where there is more"
        )


def check_optimizer(where: str, optimizer: Any) -> None:
    made = not isinstance(optimizer, type)
    own = (getattr(optimizer, name, None) for name in ("init", "update"))
    if not made or not all(map(callable, own)):
        got = type(optimizer).__name__ if made else f"the class {optimizer.__name__}"
        raise TypeError(
            f"{where}: optimizer must have init and update, as optax's transformations "
            f"have, got {got}; pass optax.adamw(1e-3), for example"
        )


def _is_scaling(x: Any) -> bool:
    return isinstance(x, Fp8Scaling)


def _check_state(where: str, state: Any, config: FP8Config) -> None:
    """Whether a state may be one that `init` made, or one like it that was restored."""
    if not isinstance(state, Fp8State):
        raise TypeError(
            f"{where}: state must be an Fp8State, got {type(state).__name__}; "
            "init(params, scalings) makes one"
        )
    _check_scalings(where, state.scalings, config)
    _check_params(where, "state.params", state.params)
    for name in ("steps", "overflows", "saturated"):
        count = jax.typeof(getattr(state, name))
        if count.shape or count.dtype != jnp.int32:
            raise TypeError(
                f"{where}: state.{name} must be int32[], got {show(count)}; restore it "
                "in the shapes and dtypes of init(params, scalings)"
            )


def _check_params(where: str, name: str, params: Any) -> None:
    """Whether there is a gradient of all of them."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact):
            place = jax.tree_util.keystr(path)
            raise TypeError(
                f"{where}: {name} must be floats, which have gradients, got {show(x)} "
                f"as {name}{place}; close loss_fn over it, or pass it in the batch"
            )


def _check_scalings(where: str, scalings: Any, config: FP8Config) -> None:
    found = jax.tree.leaves(scalings, is_leaf=_is_scaling)
    strange = [x for x in found if not _is_scaling(x)]
    if strange:
        raise TypeError(
            f"{where}: scalings must be a pytree of Fp8Scaling, got "
            f"{type(strange[0]).__name__} in it"
        )
    if config.scaling == "current" and found:
        raise ValueError(
            f"{where}: scalings must be None with FP8Config(scaling='current'), got "
            f"{len(found)} of them; leave them out"
        )
    if config.scaling == "delayed" and not found:
        raise ValueError(
            f"{where}: scalings must hold an Fp8Scaling for each product, got none; "
            "pass Fp8Scaling.create(config), or FP8Config(scaling='current')"
        )
    for x in found:
        scales.check_floats(where, "scalings", x)
        if x.history.shape != (*x.scale.shape, config.history):
            raise ValueError(
                f"{where}: scalings must have a history of {config.history} steps, got "
                f"one with {x.history.shape[-1]}; make them with "
                "Fp8Scaling.create(config)"
            )
        scales.check_values(where, "scalings", x)
