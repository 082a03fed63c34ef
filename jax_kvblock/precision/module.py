"""Models whose weights are stored by a plan."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.checks import show
from jax_kvblock.core.models import multiplied
from jax_kvblock.precision.config import (
    NEEDS_LOSS,
    AllocationStrategy,
    PrecisionConfig,
)
from jax_kvblock.precision.formats import PrecisionFormat
from jax_kvblock.precision.mixed import is_stored
from jax_kvblock.precision.packed import FLOATS
from jax_kvblock.precision.plan import (
    PrecisionPlan,
    Sensitivity,
    allocate,
    uniform_plan,
)
from jax_kvblock.precision.sensitivity import (
    Loss,
    entropy_sensitivity,
    gradient_sensitivity,
    loss_sensitivity,
)
from jax_kvblock.precision.weights import (
    IsWeight,
    Weight,
    bytes_of,
    check_finite,
    find_weights,
    is_matrix,
    leaves_by_name,
    other_leaves,
)

Function = Callable[..., Any]  # of params and inputs


@dataclasses.dataclass(frozen=True)
class PrecisionStats:
    """What a module stores, counted from the arrays it holds.

    Attributes:
      memory_savings_ratio: the share of base_bytes that is not stored.
      stored_bytes: of all arrays: codes, scales, offsets, and what is no weight.
      base_bytes: the same arrays with all floats in the base precision.
      bits_per_weight: of the weights alone, scales and offsets included.
      formats: of each weight, by name, one for each of its parts.
    """

    memory_savings_ratio: float
    stored_bytes: int
    base_bytes: int
    bits_per_weight: float
    formats: Mapping[str, tuple[PrecisionFormat, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UltraPrecisionModule:
    """A function of params whose weights are stored in few bits; a pytree.

    A call dequantizes them, to the dtypes that they had, and calls the function. Under
    jit pass the module as an argument, so that its arrays are no constants of the
    program: `jax.jit(lambda module, x: module(x))(module, x)`. What a call takes beside
    the stored arrays is up to XLA: nothing is claimed of it.

    Attributes:
      params: the stored pytree. A function of one's own may take it as it is and
        multiply with `packed_dot`.
      function: `(params, *inputs) -> outputs`.
      plan: the formats.
      base_precision: of floats that are no weights.
      dtypes: of the leaves of params as they were.
    """

    params: Any
    function: Function = dataclasses.field(metadata={"static": True})
    plan: PrecisionPlan = dataclasses.field(metadata={"static": True})
    base_precision: PrecisionFormat = dataclasses.field(metadata={"static": True})
    dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self.dequantized(), *inputs, **options)

    def dequantized(self) -> Any:
        """The pytree of arrays, as the function takes it."""
        leaves, tree = jax.tree.flatten(self.params, is_leaf=is_stored)
        made = [
            leaf.dequantize(dtype) if is_stored(leaf) else leaf.astype(dtype)
            for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(tree, made)

    def get_precision_stats(self) -> PrecisionStats:
        """Bytes and formats of what is stored."""
        leaves = leaves_by_name(self.params, is_stored)
        stored = sum(leaf.nbytes for leaf in leaves.values())
        weights = sum(leaves[weight.name].nbytes for weight in self.plan.weights)
        numbers = sum(leaves[weight.name].size for weight in self.plan.weights)
        base = sum(
            _base_bytes(leaf.size, dtype, self.base_precision)
            for leaf, dtype in zip(leaves.values(), self.dtypes, strict=True)
        )
        return PrecisionStats(
            memory_savings_ratio=1 - stored / base,
            stored_bytes=stored,
            base_bytes=base,
            bits_per_weight=8 * weights / numbers,
            formats={
                weight.name: self.plan[weight.name] for weight in self.plan.weights
            },
        )


def create_ultra_precision_module(
    model: Any,
    config: PrecisionConfig | None = None,
    device: jax.Device | None = None,
    *,
    loss: Loss | None = None,
    batches: Iterable[Any] | None = None,
    is_weight: IsWeight | None = None,
    parts: Mapping[str, int] | None = None,
    axis: int | Callable[[str, Any], int] | None = None,
) -> UltraPrecisionModule:
    """The model with its weights in few bits, as many bytes as the config allows.

    Args:
      model: `(function, params)`, with `function(params, *inputs)`, or a `flax.nnx`
        module. Of the latter a call changes no state.
      config: `PrecisionConfig()` unless given.
      device: where stored arrays go; they stay where they are unless given.
      loss: `(params, batch) -> scalar`, for GRADIENT_WEIGHTED and LOSS_BASED; params is
        the pytree, of a `flax.nnx` module the pure dict of its `nnx.Param`s.
      batches: that these two are measured on.
      is_weight, parts, axis: as in `find_weights`. For `flax.nnx` arrays are one piece,
        what is named bias or scale is no weight, nor is a norm of this package's layers
        (also stacked), and the axis unless given is the one that the layer sums over:
        inputs of kernels `[inputs, outputs]` and of the projections `[inputs, heads,
        head_dim]` of `nnx.MultiHeadAttention`. Of its last one, `[heads, head_dim,
        outputs]`, it is head_dim where group_size divides that, else outputs; of other
        arrays the last one.

    Returns:
      An `UltraPrecisionModule`.

    Raises:
      TypeError, ValueError: a model without weights, weights with inf or nan, others
        that base_precision does not hold, groups that do not divide, a reduction that
        no plan reaches, loss or batches that are missing or not used.

    Example:
      >>> config = PrecisionConfig(target_memory_reduction=0.75)
      >>> module = create_ultra_precision_module((apply, params), config)
      >>> module.get_precision_stats().memory_savings_ratio
    """
    where = "create_ultra_precision_module"
    config = check_config(where, config)
    check_device(where, device)
    size = config.group_size
    function, params, *cut = open_model(where, model, is_weight, parts, axis, size)
    is_weight, parts, axis = cut
    strategy = config.allocation_strategy
    if strategy in NEEDS_LOSS and (loss is None or batches is None):
        raise ValueError(
            f"{where}: loss and batches must be given with AllocationStrategy."
            f"{strategy.name}, got none; pass loss=(params, batch) -> scalar and a "
            "list of batches, or take ENTROPY_BASED, which needs no data"
        )
    if strategy not in NEEDS_LOSS and (loss is not None or batches is not None):
        raise ValueError(
            f"{where}: loss and batches must not be given with AllocationStrategy."
            f"{strategy.name}, which has no use for them; take GRADIENT_WEIGHTED"
        )
    weights = find_weights(
        params,
        group_size=size,
        is_weight=is_weight,
        parts=parts,
        axis=axis,
        where=where,
    )
    check_finite(where, params, weights)
    based = in_base(where, params, weights, config.base_precision)
    budget = budget_of(params, config)
    uniform = _fitting(where, params, based, weights, budget, config)
    if strategy is AllocationStrategy.UNIFORM:
        plan = uniform[-1]
    else:
        found = _sensitivity(params, weights, config, loss, batches)
        plan = allocate(where, based, found, budget)
    stored = plan.apply(based)
    if device is not None:
        stored = jax.device_put(stored, device)
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(params))
    return UltraPrecisionModule(stored, function, plan, config.base_precision, dtypes)


def check_config(where: str, config: Any) -> PrecisionConfig:
    if config is None:
        return PrecisionConfig()
    if not isinstance(config, PrecisionConfig):
        raise TypeError(
            f"{where}: config must be a PrecisionConfig, got {show(config)}; "
            "PrecisionConfig(target_memory_reduction=0.75), say"
        )
    return config


def check_device(where: str, device: Any) -> None:
    if not isinstance(device, (jax.Device, jax.sharding.Sharding, type(None))):
        raise TypeError(
            f"{where}: device must be a jax.Device, got {device!r}; "
            "jax.devices('cpu')[0], say"
        )


def open_model(
    where: str, model: Any, is_weight: Any, parts: Any, axis: Any, group_size: int
) -> tuple[Function, Any, Any, Any, Any]:
    """A model's function and params; what weights are, and how they are cut."""
    nnx = sys.modules.get("flax.nnx")  # whoever has such a model has imported it
    if nnx is not None and isinstance(model, nnx.Module):
        graph, state, rest = nnx.split(model, nnx.Param, ...)
        params = nnx.to_pure_dict(state)

        def function(params: Any, *inputs: Any, **options: Any) -> Any:
            filled = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(filled, params)
            return nnx.merge(graph, filled, rest)(*inputs, **options)

        chosen = _is_kernel(model) if is_weight is None else is_weight
        pieces = {n: 1 for n, leaf in leaves_by_name(params).items() if chosen(n, leaf)}
        axis = _kernel_axis(model, group_size) if axis is None else axis
        return function, params, chosen, pieces | dict(parts or {}), axis
    if not isinstance(model, tuple) or len(model) != 2 or not callable(model[0]):
        raise TypeError(
            f"{where}: model must be (function, params) or a flax.nnx module, got "
            f"{show(model)}; pass (model.apply, params), say"
        )
    function, params = model
    wrong = [name for name, x in leaves_by_name(params).items() if not _is_array(x)]
    if wrong:
        raise TypeError(
            f"{where}: params must be a pytree of arrays, got others as "
            f"{', '.join(wrong[:5])}; close the function over them"
        )
    return function, params, is_weight, parts, -1 if axis is None else axis


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_kernel(model: Any) -> IsWeight:
    """Which arrays of an nnx module are weights, by its layers and by their names.

    Biases of heads, and biases and norms of stacked layers, have two axes as well.
    """
    from flax import nnx

    least: dict[str, int] = {}  # axes of the weights that a layer multiplies by
    for path, module in nnx.iter_modules(model):
        place = ".".join(map(str, path))
        for kind in type(module).__mro__:
            for name in multiplied(kind):
                least[place] = getattr(getattr(module, name, None), "ndim", 0)

    def chosen(name: str, array: Any) -> bool:
        named = name.endswith(("bias", "scale"))
        fits = array.ndim >= least.get(name.rpartition(".")[0], 0)
        return is_matrix(name, array) and fits and not named

    return chosen


def _kernel_axis(model: Any, group_size: int) -> Callable[[str, Any], int]:
    """Along which axis the weights of an nnx module are summed, by its layers."""
    from flax import nnx

    known: dict[str, tuple[int, ...]] = {}  # the best first
    for path, module in nnx.iter_modules(model):
        place = "".join(f"{key}." for key in path)
        if isinstance(module, nnx.LinearGeneral):
            out = len(module.out_features)
            # Several axes are summed, the last of them group by group if it is long.
            several = len(module.in_features) > 1
            known[f"{place}kernel"] = (-out - 1, -1) if several else (-out - 1,)
        for kind in type(module).__mro__:
            known |= {f"{place}{name}": (-2,) for name in multiplied(kind)}
        if isinstance(module, nnx.Linear):
            known[f"{place}kernel"] = (-2,)

    def axis(name: str, array: Any) -> int:
        usual = (-2,) if name.endswith("kernel") and array.ndim == 2 else (-1,)
        axes = known.get(name, usual)
        fitting = (at for at in axes if array.shape[at] % group_size == 0)
        return next(fitting, axes[0])

    return axis


def in_base(
    where: str, params: Any, weights: tuple[Weight, ...], base: PrecisionFormat
) -> Any:
    """The pytree with floats that are no weights in the base precision."""
    named = {weight.name for weight in weights}
    leaves = []
    for name, leaf in leaves_by_name(params).items():
        if name in named or leaf.dtype not in FLOATS:
            leaves.append(leaf)
            continue
        made = leaf.astype(base.dtype)
        lost = jnp.isfinite(leaf) & ~jnp.isfinite(made)
        if bool(lost.any()):
            most = float(jnp.max(jnp.where(lost, jnp.abs(leaf), 0)))
            raise ValueError(
                f"{where}: params must be numbers that base_precision {base.name} "
                f"holds, got {most:g} in {name}; pass base_precision="
                "PrecisionFormat.BF16 or FP32"
            )
        leaves.append(made)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _base_bytes(size: int, dtype: Any, base: PrecisionFormat) -> int:
    return size * jnp.dtype(base.dtype if dtype in FLOATS else dtype).itemsize


def base_bytes_of(params: Any, base: PrecisionFormat) -> int:
    """Of all arrays, with floats in the base precision."""
    leaves = jax.tree.leaves(params)
    return sum(_base_bytes(leaf.size, leaf.dtype, base) for leaf in leaves)


def budget_of(params: Any, config: PrecisionConfig) -> int:
    share = 1 - config.target_memory_reduction
    return int(share * base_bytes_of(params, config.base_precision))


def _sensitivity(
    params: Any,
    weights: tuple[Weight, ...],
    config: PrecisionConfig,
    loss: Loss | None,
    batches: Iterable[Any] | None,
) -> Sensitivity:
    among, shared = config.formats, {"group_size": config.group_size}
    if config.allocation_strategy is AllocationStrategy.ENTROPY_BASED:
        threshold = config.entropy_threshold
        return entropy_sensitivity(
            params, weights, among, threshold=threshold, **shared
        )
    assert loss is not None and batches is not None  # checked by the caller
    by_gradient = config.allocation_strategy is AllocationStrategy.GRADIENT_WEIGHTED
    measure = gradient_sensitivity if by_gradient else loss_sensitivity
    return measure(loss, params, batches, weights, among, **shared)


def _fitting(
    where: str,
    params: Any,
    based: Any,
    weights: tuple[Weight, ...],
    budget: int,
    config: PrecisionConfig,
) -> list[PrecisionPlan]:
    """The plans of one format that take as few bytes as the config wants, most last.

    Raises:
      ValueError: there is none.
    """
    rest = sum(bytes_of(leaf) for leaf in other_leaves(based, weights))
    size = config.group_size
    plans = [uniform_plan(weights, one, group_size=size) for one in config.formats]
    plans.sort(key=lambda plan: plan.nbytes)
    fitting = [plan for plan in plans if plan.nbytes + rest <= budget]
    if fitting:
        return fitting
    least = plans[0].nbytes + rest
    whole = base_bytes_of(params, config.base_precision)
    most = max(0, math.floor((1 - least / whole) * 1e4))
    while most and int((1 - most / 1e4) * whole) < least:
        most -= 1
    raise ValueError(
        f"{where}: target_memory_reduction must be at most {most / 1e4}, what the "
        f"smallest of {', '.join(one.name for one in config.formats)} leaves with "
        f"{rest} bytes of arrays that are no weights, got "
        f"{config.target_memory_reduction}; ask for less, or allow formats of fewer "
        "bits"
    )
