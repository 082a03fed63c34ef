"""flax.nnx layers whose products are in 8 bits. Imports flax, so nothing imports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from jax_kvblock.core.checks import plural, shown
from jax_kvblock.core.models import multiplied
from jax_kvblock.training.config import FP8Config, check_flag, checked_config
from jax_kvblock.training.product import fp8_dot_general
from jax_kvblock.training.scaling import Fp8Scaling


class Fp8Variable(nnx.Variable):  # type: ignore[misc, unused-ignore]
    """A layer's `Fp8Scaling`. Its gradient is a report (`Fp8Scaling.update`)."""


class FP8LinearLayer(nnx.Linear):  # type: ignore[misc, unused-ignore]
    """`flax.nnx.Linear` whose products are `fp8_dot`.

    Weights are rounded to 8 bits from `param_dtype`, whatever `dtype` is, and their
    gradients come in it. The result's dtype is `nnx.Linear`'s.

    Args:
      in_features, out_features: sizes of the last axis.
      config: `FP8Config()` unless given.
      rngs, and other keywords: those of `flax.nnx.Linear` but for `dot_general`;
        `precision` is of no product here.

    Attributes:
      scaling: an `Fp8Variable`, or None with current scaling.

    Raises:
      TypeError: there is a dot_general.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        config: FP8Config | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if "dot_general" in options:
            raise TypeError(
                "FP8LinearLayer: dot_general must not be given, since it is fp8_dot; "
                "use nnx.Linear with one of your own"
            )
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.config = checked_config("FP8LinearLayer", config)
        self.scaling = _variable(self.config, self.kernel.shape[:-2])

    @classmethod
    def of(cls, linear: nnx.Linear, config: FP8Config) -> FP8LinearLayer:
        """The layer with the parameters of another, which both have then."""
        kernel, bias = linear.kernel, linear.bias
        layer = cls(
            linear.in_features, linear.out_features, config=config,
            use_bias=linear.use_bias, dtype=linear.dtype,
            param_dtype=linear.param_dtype, promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type, rngs=nnx.Rngs(0),
            kernel_init=lambda *_: kernel[...],  # no memory of its own
            bias_init=lambda *_: None if bias is None else bias[...],
        )  # fmt: skip
        layer.kernel, layer.bias = kernel, bias
        return layer

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        kernel = self.kernel[...]
        inputs, promoted, bias = self.promote_dtype(
            (inputs, kernel, bias), dtype=self.dtype
        )
        dtype = self.preferred_element_type or promoted.dtype
        dims = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = _dot_general(self, inputs, kernel, dims, None, dtype, out_sharding)
        return y if bias is None else y + bias


class Fp8DotGeneral(nnx.Module):  # type: ignore[misc, unused-ignore]
    """`fp8_dot_general` with its scales, for layers of flax that take a dot_general.

    Args:
      config: `FP8Config()` unless given.
      layers: leading axes of stacked layers, for `nnx.scan` and `nnx.vmap`.
    """

    def __init__(
        self, config: FP8Config | None = None, layers: tuple[int, ...] = ()
    ) -> None:
        self.config = checked_config("Fp8DotGeneral", config)
        self.scaling = _variable(self.config, layers)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        return _dot_general(
            self, lhs, rhs, dimension_numbers, precision, preferred_element_type,
            out_sharding,
        )  # fmt: skip


def convert_model_to_fp8(
    model: nnx.Module,
    fp8_config: FP8Config | None = None,
    inplace: bool = True,
    *,
    exclude: Sequence[str] = (),
) -> nnx.Module:
    """A model whose products with weights are in 8 bits.

    Every `nnx.Linear` becomes an `FP8LinearLayer` with the same parameters, every
    `nnx.LinearGeneral` (those of `nnx.MultiHeadAttention`) takes an `Fp8DotGeneral`,
    and so does each matrix of this package's `AttentionLayer`, `OptimizedLinear` and
    `TransformerBlock`; also in lists, tuples and dicts, and stacked by `nnx.vmap` for
    `nnx.scan`. Layers of classes that derive from these, with a dot_general of their
    own or with batch axes, and all others stay as they are: embeddings, norms,
    `nnx.Einsum`, convolutions. What is converted already stays.

    Args:
      model: any flax.nnx module.
      fp8_config: `FP8Config()` unless given.
      inplace: False leaves `model` as it is and converts a copy.
      exclude: paths of layers that stay, and of modules with all that is in them, by
        attributes and keys: "head", "blocks.0.out". A layer that also has another path
        stays there, too. The last layer is often left in 16 bits.

    Returns:
      The model: `model` itself, or the copy.

    Raises:
      TypeError: model is no module.
      ValueError: there is nothing to convert, or exclude names what is not there.
    """
    where = "convert_model_to_fp8"
    config = checked_config(where, fp8_config)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{where}: model must be a flax.nnx.Module, got {type(model).__name__}; "
            "call fp8_dot in functions that are none"
        )
    inplace = check_flag(where, "inplace", inplace)
    if isinstance(exclude, str):
        raise TypeError(
            f"{where}: exclude must be a sequence of paths, got {exclude!r}; pass "
            f"[{exclude!r}]"
        )
    if not isinstance(exclude, Iterable):
        raise TypeError(
            f"{where}: exclude must be a sequence of paths, got {shown(exclude)}; "
            "leave it out, or pass ['head'], for example"
        )
    if type(model) is nnx.Linear:
        raise ValueError(
            f"{where}: model must hold its layers, got an nnx.Linear alone; use "
            "FP8LinearLayer in its place"
        )
    model = model if inplace else nnx.clone(model)
    kept = {id(module) for path in exclude for module in _within(where, model, path)}
    change = _Conversion(config, kept)
    change(model)
    for _, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and (new := change(value)) is not value:
                setattr(module, name, nnx.data(new))
    if not fp8_layers(model):
        raise ValueError(
            f"{where}: model must hold nnx.Linear or nnx.LinearGeneral layers (or "
            f"layers of jax_kvblock) that are not excluded, got {type(model).__name__} "
            "without; use FP8LinearLayer or fp8_dot in its own layers"
        )
    return model


class _Conversion:
    """What becomes of a value that a module holds: the same, or something new."""

    def __init__(self, config: FP8Config, kept: set[int]) -> None:
        self.config, self.kept = config, kept
        self.done: dict[int, tuple[Any, FP8LinearLayer]] = {}  # by the old layer

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            new = [self(x) for x in value]
            changed = any(a is not b for a, b in zip(new, value, strict=True))
            return type(value)(new) if changed else value
        if isinstance(value, dict):
            new_values = {k: self(x) for k, x in value.items()}
            changed = any(new_values[k] is not x for k, x in value.items())
            return new_values if changed else value
        if id(value) in self.kept:
            return value
        if type(value) is nnx.Linear and _is_plain(value.dot_general):
            if id(value) not in self.done:
                self.done[id(value)] = value, FP8LinearLayer.of(value, self.config)
            return self.done[id(value)][1]
        # What derives from a layer of this package may multiply in its own way.
        names = multiplied(type(value))
        if names and value.dot_general is None:
            made = {
                name: Fp8DotGeneral(self.config, getattr(value, name).shape[:-2])
                for name in names
            }
            value.dot_general = nnx.data(nnx.Dict(made))
        if type(value) is nnx.LinearGeneral and _is_general(value):
            own = len(value.in_features) + len(value.out_features)
            layers = value.kernel.shape[: value.kernel.ndim - own]
            value.dot_general = nnx.data(Fp8DotGeneral(self.config, layers))
        return value


def fp8_layers(model: nnx.Module) -> dict[str, Any]:
    """The layers of a model whose products are in 8 bits, by path, in their order.

    Returns:
      Modules with `config`, and `scaling`: an `Fp8Variable`, or None.
    """
    return {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, (FP8LinearLayer, Fp8DotGeneral))
    }


def _variable(config: FP8Config, layers: tuple[int, ...]) -> Any:
    if config.scaling == "current":
        return nnx.data(None)
    return Fp8Variable(Fp8Scaling.create(config, layers))


def _dot_general(layer: Any, lhs: jax.Array, rhs: jax.Array, *options: Any) -> Any:
    scaling = None if layer.scaling is None else layer.scaling.get_value()
    return fp8_dot_general(lhs, rhs, *options, scaling=scaling, config=layer.config)


def _is_plain(dot_general: Any) -> bool:
    return dot_general is None or dot_general is jax.lax.dot_general


def _is_general(layer: nnx.LinearGeneral) -> bool:
    own = _is_plain(layer.dot_general) and layer.dot_general_cls is None
    return own and not layer.batch_axis


def _within(where: str, model: nnx.Module, path: Any) -> list[Any]:
    """A module by its path, and all that are in it."""
    found: Any = model
    try:
        for name in path.split("."):
            found = found[int(name)] if name.isdecimal() else _child(found, name)
    except (AttributeError, KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, nnx.Module):
        known = [".".join(map(str, p)) for p, _ in nnx.iter_modules(model) if p]
        raise ValueError(
            f"{where}: exclude must be paths of modules, got {path!r}; there are "
            f"{plural(len(known), 'module')}: {', '.join(known)}"
        )
    return [found, *(module for _, module in nnx.iter_modules(found))]


def _child(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, (dict, nnx.Dict)) else getattr(value, name)
