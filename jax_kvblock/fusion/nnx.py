"""`create_unified_attention_fusion`. It imports flax, so nothing imports it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jax_kvblock.attention import arguments
from jax_kvblock.attention.nnx import attention_fn
from jax_kvblock.core.checks import plural
from jax_kvblock.fusion.choices import LOOKED_AT, OURS, XLA, FusionDecision, decide
from jax_kvblock.fusion.config import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    member,
)
from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.fusion.modules import (
    FusedMultiHeadAttention,
    TransformerBlock,
    UnifiedAttentionFusion,
    is_plain,
    narrow_attention_fn,
)
from jax_kvblock.layers.modules import AttentionLayer

_NARROWED = ("qkv", "attention")  # what may compute float32 in bfloat16
_NORMS = (nnx.RMSNorm, nnx.LayerNorm)
_CUT = "its weights are cut by heads, and joining them would move them"
_OWN = "its projections are not plain (products or classes of their own)"
_WHERE = "create_unified_attention_fusion"


def create_unified_attention_fusion(
    model: nnx.Module,
    fusion_strategy: FusionStrategy | str = FusionStrategy.FULL_BLOCK,
    optimization_level: OptimizationLevel | str = OptimizationLevel.BALANCED,
    *,
    config: FusionConfig | None = None,
    inplace: bool = False,
) -> UnifiedAttentionFusion:
    """A model whose attention, projections and activations are fused where it pays.

    It looks for `nnx.MultiHeadAttention`, for `jax.nn.gelu` among the attributes of
    modules and in `nnx.Sequential` (also as a `functools.partial` with `approximate`),
    and for this package's `TransformerBlock` and `AttentionLayer`. Parameters stay the
    same ones, at the same paths: optimizers and checkpoints of the model go on. What is
    called by name in a module's code cannot be seen, and stays.

    Args:
      model: any flax.nnx module.
      fusion_strategy: which choices are looked at.
      optimization_level: which of them ship; see `OptimizationLevel`.
      config: both, and more; then neither is given besides.
      inplace: True changes `model` itself, False a copy with the same arrays.

    Returns:
      The fused model, with a row for each choice in its `report`.

    Raises:
      TypeError: model is no module, config is none, inplace is no bool.
      ValueError: there is no such strategy or level; there is nothing in the model that
        the strategy looks for; a config and a strategy or level; the model was fused
        before in a way that this config does not ask for.

    Example:
      >>> model = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
      >>> fused = create_unified_attention_fusion(model, "full_block", "aggressive")
      >>> print(fused.summary())
    """
    config = _config(fusion_strategy, optimization_level, config)
    strategy = member(_WHERE, "strategy", config.strategy, FusionStrategy)
    arguments.check_flags(_WHERE, inplace=inplace)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{_WHERE}: model must be a flax.nnx.Module, got {type(model).__name__}; "
            "write functions with flash_attention and one product for q, k and v"
        )
    if isinstance(model, UnifiedAttentionFusion):
        model = model.model
    model = model if inplace else nnx.clone(model)
    edit = _Edit(config)
    edit.check(model)
    edit.all_of(model)
    if not edit.found:
        raise ValueError(
            f"{_WHERE}: model must hold what {strategy.value!r} looks for, "
            f"{_LOOKED_FOR[strategy]}; got {type(model).__name__} with {_held(model)}; "
            "take another strategy, or call jax_kvblock's functions in the model's code"
        )
    return UnifiedAttentionFusion(model, config, tuple(edit.rows))


_GELU = "jax.nn.gelu as an attribute or in nnx.Sequential"
_ATTENTION = "an nnx.MultiHeadAttention, an AttentionLayer or a TransformerBlock"
_LOOKED_FOR = {
    FusionStrategy.FULL_BLOCK: f"{_ATTENTION}, or {_GELU}",
    FusionStrategy.ATTENTION_ONLY: _ATTENTION,
    FusionStrategy.QKV_ONLY: _ATTENTION,
    FusionStrategy.FEED_FORWARD_ONLY: f"a TransformerBlock, or {_GELU}",
}


def _config(strategy: Any, level: Any, config: Any) -> FusionConfig:
    strategy = member(_WHERE, "fusion_strategy", strategy, FusionStrategy)
    level = member(_WHERE, "optimization_level", level, OptimizationLevel)
    if config is None:
        return FusionConfig(strategy, level)
    if not isinstance(config, FusionConfig):
        raise TypeError(
            f"{_WHERE}: config must be a FusionConfig, got {type(config).__name__}; "
            "pass FusionConfig(strategy=..., optimization_level=...)"
        )
    usual = FusionStrategy.FULL_BLOCK, OptimizationLevel.BALANCED
    if (strategy, level) not in (usual, (config.strategy, config.optimization_level)):
        raise ValueError(
            f"{_WHERE}: fusion_strategy and optimization_level must not be given with "
            f"a config, which says both, got {strategy.value!r} and {level.value!r}; "
            "use dataclasses.replace(config, ...)"
        )
    return config


class _Edit:
    """Walks a model, changes it, and notes why."""

    def __init__(self, config: FusionConfig) -> None:
        strategy = member(_WHERE, "strategy", config.strategy, FusionStrategy)
        self.config, self.looked_at = config, LOOKED_AT[strategy]
        self.rows: list[FusionDecision] = []
        self.found = False  # something that could be ours

    def all_of(self, model: nnx.Module) -> None:
        # A module that lies in two places comes once, and has one row.
        modules = list(nnx.iter_modules(model))
        heads = [m for _, m in modules if isinstance(m, nnx.MultiHeadAttention)]
        within = {id(norm) for m in heads for norm in (m.query_ln, m.key_ln)}
        for path, module in modules:
            name = ".".join(map(str, path))
            if isinstance(module, nnx.MultiHeadAttention):
                self._attention(name, module)
            elif isinstance(module, TransformerBlock):
                self._block(name, module)
            elif isinstance(module, AttentionLayer):
                for choice in ("qkv", "attention"):
                    self._add(choice, name, OURS, "an AttentionLayer is so already")
            elif (
                isinstance(module, _NORMS)
                and id(module) not in within
                and "norm" in self.looked_at
            ):
                self.rows.append(self._decided("norm", name, module))
            if "gelu" in self.looked_at:
                self._activations(name, module)

    def check(self, model: nnx.Module) -> None:
        """Whether what was fused before is what this config makes of it, too.

        An `attention_fn` may be the model's own, and is left out.
        """
        for path, module in nnx.iter_modules(model):
            for choice, narrow in _fused(module):
                if choice not in self.looked_at:
                    continue
                row = self._decided(choice, "", module)
                asked = choice in _NARROWED and self._narrows(module)
                if row.used == OURS and (narrow == asked or choice not in _NARROWED):
                    continue
                how = " and computes in bfloat16" if narrow else ""
                level = self.config.optimization_level
                level = member(_WHERE, "optimization_level", level, OptimizationLevel)
                place = ".".join(map(str, path)) or "the model"
                raise ValueError(
                    f"{_WHERE}: model must not have been fused in another way, got "
                    f"{choice!r} of {place}, which is fused{how}, for "
                    f"{level.value!r}; fuse the model that it was made from, or "
                    "take the config that it was fused with"
                )

    def _add(self, choice: str, path: str, used: str, reason: str) -> None:
        if choice in self.looked_at:
            self.found = True
            self.rows.append(FusionDecision(path, choice, used, reason))

    def _decided(self, choice: str, path: str, module: Any) -> FusionDecision:
        narrows = choice in _NARROWED and self._narrows(module)
        dtype = "bfloat16" if narrows else _dtype(module)
        return decide(choice, path, self.config, _device(module), dtype)

    def _ours(self, choice: str, path: str, module: Any) -> bool:
        """Whether a choice is ours; its row is added."""
        if choice not in self.looked_at:
            return False
        self.found = True
        row = self._decided(choice, path, module)
        if row.used == OURS and choice in _NARROWED and self._narrows(module):
            words = f"{row.reason}; float32 is computed in bfloat16"
            row = FusionDecision(path, choice, OURS, words, row.ratio, row.measured)
        self.rows.append(row)
        return row.used == OURS

    def _narrows(self, module: Any) -> bool:
        """Whether what is fused in it computes float32 in bfloat16."""
        bold = self.config.optimization_level is OptimizationLevel.AGGRESSIVE
        allowed = bold and self.config.enable_mixed_precision
        named = getattr(module, "precision", None) is not None
        return allowed and not named and _dtype(module) == "float32"

    # ---- places ----------------------------------------------------------------------

    def _attention(self, path: str, module: Any) -> None:
        for choice, reason in _reasons(module, self.config).items():
            if reason:
                used = OURS if reason.startswith("it is so") else XLA
                self._add(choice, path, used, reason)
            elif not self._ours(choice, path, module):
                continue
            elif choice == "attention":
                narrow = self._narrows(module)
                module.attention_fn = narrow_attention_fn if narrow else attention_fn
            else:
                # The same object, so that whoever holds it holds the fused one.
                module.__class__ = FusedMultiHeadAttention
                module.narrow = self._narrows(module)

    def _block(self, path: str, module: Any) -> None:
        kernels = [w.get_value() for w in (module.query, module.key, module.value)]
        ours = tuple(c for c in ("qkv", "attention", "gelu") if c in module.fusion)
        for choice in ("qkv", "attention", "gelu", "norm", "rope"):
            if choice == "qkv" and module.dot_general is not None:
                self._add(choice, path, XLA, _OWN)
            elif choice in ours:
                self._add(choice, path, OURS, "it is so already")
            elif choice == "qkv" and any(map(_is_cut_by_heads, kernels)):
                self._add(choice, path, XLA, _CUT)
            elif self._ours(choice, path, module):
                ours = (*ours, choice)
                if choice in _NARROWED and self._narrows(module):
                    module.narrow = (*module.narrow, choice)
        module.fusion = ours

    def _activations(self, path: str, module: Any) -> None:
        """Functions among what a module holds that are `jax.nn.gelu`."""

        def changed(value: Any, place: str) -> Any:
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                new = [changed(x, f"{place}.{i}") for i, x in enumerate(value)]
                same = all(a is b for a, b in zip(new, value, strict=True))
                return value if same else type(value)(new)
            if type(value) is dict:
                made = {k: changed(x, f"{place}.{k}") for k, x in value.items()}
                return made if any(made[k] is not value[k] for k in made) else value
            new = _kept(value)
            if new is not None and self._ours("gelu", place, module):
                return new
            return value

        for name, value in list(_values(module)):
            new = changed(value, f"{path}.{name}" if path else str(name))
            if new is not value:
                if isinstance(module, nnx.List):
                    module[int(name)] = new
                else:
                    setattr(module, str(name), new)


def _fused(module: Any) -> Iterator[tuple[str, bool]]:
    """What fusion made of a module: choices, and whether they compute in bfloat16."""
    if type(module) is FusedMultiHeadAttention:
        yield "qkv", module.narrow
    if getattr(module, "attention_fn", None) is narrow_attention_fn:
        yield "attention", True
    if isinstance(module, TransformerBlock):
        for choice in module.fusion:
            yield choice, choice in module.narrow


def _reasons(module: Any, config: FusionConfig) -> dict[str, str]:
    """Why a choice cannot be made in an nnx.MultiHeadAttention; empty where it can."""
    attention = qkv = ""
    known = (nnx.MultiHeadAttention, FusedMultiHeadAttention)
    drops = module.dropout_rate > 0
    if type(module) not in known:
        name = type(module).__name__
        attention = qkv = f"{name} is a class of its own, left as it is"
    else:
        if module.attention_fn in (attention_fn, narrow_attention_fn):
            attention = "it is so already"
        elif module.attention_fn is not nnx.dot_product_attention:
            attention = "it has an attention_fn of its own, left as it is"
        elif drops and config.optimization_level is not OptimizationLevel.AGGRESSIVE:
            attention = (
                "it has dropout, and would drop other weights for the same key; "
                "AGGRESSIVE does"
            )
        qkv = _why_apart(module)
    return {"qkv": qkv, "attention": attention}


def _why_apart(module: Any) -> str:
    layers = (module.query, module.key, module.value)
    if type(module) is FusedMultiHeadAttention and all(map(is_plain, layers)):
        return "it is so already"
    if module.normalize_qk:
        return "it norms queries and keys, left as it is"
    if module.in_kv_features != module.in_features:
        return "keys come of other inputs"
    if not all(map(is_plain, layers)):
        return _OWN
    if any(_is_cut_by_heads(y.kernel.get_value()) for y in layers):
        return _CUT
    return ""


def _is_cut_by_heads(kernel: Any) -> bool:
    """Whether it lies over devices by another axis than its first."""
    sharding = getattr(kernel, "sharding", None)
    if sharding is None or isinstance(kernel, jax.core.Tracer):
        return False
    return bool(sharding.shard_shape(kernel.shape)[1:] != kernel.shape[1:])


def _kept(value: Any) -> Any:
    """What stands for `jax.nn.gelu`, also with `approximate` given; else None."""
    if value is jax.nn.gelu:
        return kept_gelu
    if isinstance(value, functools.partial) and value.func is jax.nn.gelu:
        return functools.partial(kept_gelu, *value.args, **value.keywords)
    return None


def _values(module: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(module, nnx.List):
        return enumerate(module)
    return ((n, x) for n, x in vars(module).items() if not n.startswith("_"))


def _arrays(module: Any) -> list[Any]:
    return jax.tree.leaves(nnx.state(module, nnx.Param))


def _dtype(module: Any) -> str:
    """What a module computes in, if its inputs have its dtype."""
    own = getattr(module, "dtype", None)
    if own is not None:
        return str(jax.numpy.dtype(own))
    arrays = _arrays(module)
    return str(jax.numpy.result_type(*arrays)) if arrays else "float32"


def _device(module: Any) -> str:
    """The kind of device that its weights lie on, or else the default one."""
    for x in _arrays(module):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return next(iter(x.devices())).device_kind
    return jax.devices()[0].device_kind


def _held(model: nnx.Module) -> str:
    names = sorted({type(m).__name__ for _, m in nnx.iter_modules(model)})
    return f"{plural(len(names), 'class')} of modules: {', '.join(names)}"
