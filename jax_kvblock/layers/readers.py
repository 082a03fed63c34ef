"""How the classes of layers that can be validated hold their weights, and are called.

Gradients have the tree of the weights, so one reader serves both.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.core.models import is_nnx_module
from jax_kvblock.layers.levels import precision_of, product_dtype
from jax_kvblock.layers.references import AttentionSizes, attention, linear


@dataclasses.dataclass(frozen=True)
class Reader:
    """A layer as functions of its weights.

    Attributes:
      weights: the layer's own, as a tree.
      named: from such a tree, of weights or gradients, to the reference's arrays.
      run: the layer on a tree of weights: `run(weights, *inputs)`.
      reference: the same by the names of the reference, in the dtype of what goes in.
      dtype: what the layer multiplies, inputs being float32.
      precision: of the reference in that dtype.
    """

    weights: Any
    named: Callable[[Any], dict[str, jax.Array]]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    dtype: jnp.dtype
    precision: str | None = None


def _split(where: str, layer: Any, kinds: tuple[str, ...]) -> Any:
    """The weights, and a function that makes a layer of others."""
    if not is_nnx_module(layer):
        raise TypeError(
            f"{where}: layer must be one of {', '.join(kinds)}, got "
            f"{type(layer).__name__}; others hold their weights in ways that are not "
            "known"
        )
    nnx: Any = sys.modules["flax.nnx"]
    training = sys.modules.get("jax_kvblock.training.nnx")  # who has none has none
    for path, kind in _in_8_bits(training, layer):
        raise NotImplementedError(
            f"{where}: layer must be without products of 8 bits, which plain jnp at no "
            f"dtype stands for, got {kind}{path}; validate it before it is converted"
        )
    definition, weights, rest = nnx.split(layer, nnx.Param, ...)
    return weights, lambda found: nnx.merge(definition, found, rest)


def _in_8_bits(training: Any, layer: Any) -> Iterator[tuple[str, str]]:
    """Where products of 8 bits are, as " at path", and of which class."""
    if training is not None:
        for path, found in training.fp8_layers(layer).items():
            yield path and f" at {path}", type(found).__name__


def read_attention(where: str, layer: Any, d_model: int, num_heads: int) -> Reader:
    """Of an `AttentionLayer`, or an `nnx.MultiHeadAttention` on queries alone."""
    kinds = ("AttentionLayer", "nnx.MultiHeadAttention")
    weights, whole = _split(where, layer, kinds)
    from flax import nnx

    from jax_kvblock.layers.modules import AttentionLayer

    if isinstance(layer, AttentionLayer):
        width, kv_heads, causal = layer.d_model, layer.num_kv_heads, layer.causal
        named, call = _names_of_ours, _call_ours
    elif isinstance(layer, nnx.MultiHeadAttention):
        width, causal = layer.in_features, False
        kv_heads = layer.key.kernel[...].shape[-2]
        named, call = _names_of_flax, _call_flax
        if layer.query_ln is not None:
            raise NotImplementedError(
                f"{where}: layer must be without normalize_qk, which the reference has "
                "not, got True; validate one that is made with normalize_qk=False"
            )
        if layer.in_kv_features != layer.in_features:
            raise NotImplementedError(
                f"{where}: layer must take keys of its queries' width, "
                f"{layer.in_features}, got in_kv_features={layer.in_kv_features}; "
                "validate one that is made without in_kv_features"
            )
    else:
        raise TypeError(
            f"{where}: layer must be one of {', '.join(kinds)}, got "
            f"{type(layer).__name__}; others hold their weights in ways that are not "
            "known"
        )
    for name, told, there in (
        ("d_model", d_model, width),
        ("num_heads", num_heads, layer.num_heads),
    ):
        if told != there:
            raise ValueError(
                f"{where}: {name} must be the layer's, {there}, got {told}; pass that"
            )
    sizes = AttentionSizes(num_heads, kv_heads, causal)

    def run(found: Any, x: jax.Array, keys: jax.Array | None) -> Any:
        return call(whole(found), x, keys)

    def reference(found: Any, x: jax.Array, keys: jax.Array | None) -> Any:
        return attention(sizes, found, x, keys)

    dtype = layer.dtype or jnp.result_type(jnp.float32, *jax.tree.leaves(weights))
    return Reader(
        weights, lambda found: named(whole(found)), run, reference, jnp.dtype(dtype)
    )


def _call_ours(layer: Any, x: jax.Array, keys: jax.Array | None) -> Any:
    return layer(x, keys, deterministic=True)


def _call_flax(layer: Any, x: jax.Array, keys: jax.Array | None) -> Any:
    mask = None if keys is None else keys[:, None, None, :]
    return layer(x, mask=mask, deterministic=True, decode=False)


def _names_of_ours(layer: Any) -> dict[str, jax.Array]:
    names = {"qkv": layer.qkv, "out": layer.out}
    biases = {"qkv bias": layer.qkv_bias, "out bias": layer.out_bias}
    names |= {name: x for name, x in biases.items() if x is not None}
    return {name: x[...] for name, x in names.items()}


def _names_of_flax(layer: Any) -> dict[str, jax.Array]:
    """Three projections `[d_model, N, D]` side by side, and one `[N, D, d_model]`."""
    three = (layer.query, layer.key, layer.value)
    kernels = [part.kernel[...] for part in three]
    out = layer.out.kernel[...]
    found = {
        "qkv": jnp.concatenate([w.reshape(w.shape[0], -1) for w in kernels], axis=1),
        "out": out.reshape(-1, out.shape[-1]),
    }
    if layer.query.bias is not None:
        biases = [part.bias[...].reshape(-1) for part in three]
        found |= {"qkv bias": jnp.concatenate(biases), "out bias": layer.out.bias[...]}
    return found


def read_linear(where: str, layer: Any, in_features: int, out_features: int) -> Reader:
    """Of an `OptimizedLinear` or an `nnx.Linear`."""
    kinds = ("OptimizedLinear", "nnx.Linear")
    weights, whole = _split(where, layer, kinds)
    from flax import nnx

    from jax_kvblock.layers.modules import OptimizedLinear

    if not isinstance(layer, (OptimizedLinear, nnx.Linear)):
        raise TypeError(
            f"{where}: layer must be one of {', '.join(kinds)}, got "
            f"{type(layer).__name__}; others hold their weights in ways that are not "
            "known"
        )
    for name, told, there in (
        ("in_features", in_features, layer.in_features),
        ("out_features", out_features, layer.out_features),
    ):
        if told != there:
            raise ValueError(
                f"{where}: {name} must be the layer's, {there}, got {told}; pass that"
            )

    def named(found: Any) -> dict[str, jax.Array]:
        made = whole(found)
        biases = {} if made.bias is None else {"bias": made.bias[...]}
        return {"kernel": made.kernel[...]} | biases

    level = getattr(layer, "optimization_level", "balanced")
    dtype = getattr(layer, "dtype", None)
    dtype = dtype or jnp.result_type(jnp.float32, *jax.tree.leaves(weights))
    return Reader(
        weights,
        named,
        lambda found, x: whole(found)(x),
        linear,
        product_dtype(jnp.dtype(dtype), level),
        precision_of(level),
    )
