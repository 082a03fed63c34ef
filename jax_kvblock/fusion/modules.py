"""flax.nnx modules whose choices are made. Importing this imports flax."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_kvblock.attention import arguments
from jax_kvblock.attention.nnx import attention_fn
from jax_kvblock.core.checks import as_array, check_positive, show
from jax_kvblock.core.models import multiplies_by
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.fusion.choices import FusionDecision
from jax_kvblock.fusion.config import FusionConfig
from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.layers.arguments import check_floats
from jax_kvblock.layers.levels import contract, product
from jax_kvblock.layers.modules import check_rngs

if TYPE_CHECKING:
    from jaxtyping import Float

_KERNEL = nnx.initializers.lecun_normal()
EPSILON = 1e-6
# Options of a call of nnx.MultiHeadAttention: those that one product serves, and those
# that are the layer's own where they are given.
SERVED = ("mask", "deterministic", "rngs", "is_causal")
SPECIAL = ("sow_weights", "decode", "qkv_sharding", "out_sharding")


class FusedMultiHeadAttention(nnx.MultiHeadAttention):  # type: ignore[misc, unused-ignore]
    """`nnx.MultiHeadAttention` that projects queries, keys and values in one product.

    It has the parameters of the layer that it was, at their paths. What is no plain
    self-attention goes the layer's own way: keys of other inputs, a decoding cache,
    weights that are sown, shardings of results, options that are not known here (flax
    says what it makes of them), projections that came to have products of their own
    (`convert_model_to_fp8`).

    Attributes:
      narrow: whether float32 is multiplied in bfloat16.
    """

    narrow: bool

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        other = inputs_k is not None or inputs_v is not None
        unknown = options.keys() - {*SERVED, *SPECIAL}
        decodes = self.decode if options.get("decode") is None else options["decode"]
        special_call = other or unknown or any(options.get(x) for x in SPECIAL)
        plain = all(map(is_plain, (self.query, self.key, self.value)))
        if special_call or decodes is not False or not plain:
            return super().__call__(inputs_q, inputs_k, inputs_v, **options)
        if inputs_q.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: inputs_q must be [..., {self.in_features}], "
                f"got {show(inputs_q)}; make the layer with another in_features"
            )
        query, key, value = self._joined(inputs_q)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=options.get("mask"),
            dtype=self.dtype,
            precision=self.precision,
            is_causal=options.get("is_causal", False),
            **self._dropout(options),
        )
        return self.out(x)

    def _joined(self, x: jax.Array) -> list[jax.Array]:
        """q, k and v, `[..., length, heads, head_dim]`."""
        layers = (self.query, self.key, self.value)
        kernels = [layer.kernel[...] for layer in layers]
        biases = [None if y.bias is None else y.bias[...] for y in layers]
        arrays: Any = (x, *kernels, *biases)
        x, *cast = self.qkv_promote_dtype(arrays, dtype=self.dtype)
        flat = [w.reshape(w.shape[0], -1) for w in cast[:3]]
        bias = [b.reshape(-1) for b in cast[3:] if b is not None]
        made = project(x, flat, bias, self.narrow, self.precision)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [
            y.reshape(*y.shape[:-1], n, y.shape[-1] // n)
            for y, n in zip(made, heads, strict=True)
        ]

    def _dropout(self, options: dict[str, Any]) -> dict[str, Any]:
        """What attention is told of dropout, as the layer tells it."""
        if not self.dropout_rate:
            return {"deterministic": True}
        kept = options.get("deterministic")
        kept = self.deterministic if kept is None else kept
        if kept is None:
            raise ValueError(
                f"{type(self).__name__}: deterministic must be given where there is "
                "dropout; pass deterministic=True in the call, or use eval()"
            )
        key = None
        if not kept:
            rngs = options.get("rngs")
            rngs = self.rngs if rngs is None else rngs
            rngs = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
            if rngs is None:
                raise ValueError(
                    f"{type(self).__name__}: rngs must be given where weights are "
                    "dropped; pass rngs=nnx.Rngs(0), or deterministic=True"
                )
            key = rngs()
        return {
            "dropout_rng": key,
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": kept,
        }


def is_plain(layer: Any) -> bool:
    """An nnx.LinearGeneral over the last axis, with jax's own product."""
    if type(layer) is not nnx.LinearGeneral or layer.batch_axis:
        return False
    own = layer.dot_general not in (None, jax.lax.dot_general) or layer.dot_general_cls
    wide = getattr(layer, "preferred_element_type", None)
    return not own and wide is None and len(layer.in_features) == 1


def project(
    x: jax.Array,
    kernels: list[jax.Array],
    biases: list[jax.Array],
    narrow: bool,
    precision: Any = None,
) -> list[jax.Array]:
    """`x @ w + b` of each kernel `[F, n]`, in one product.

    The biases, all of them or none, are added in front of the cuts, where cuBLASLt's
    epilogue can have them.
    """
    joined = jnp.concatenate(kernels, axis=1)
    if narrow and precision is None:
        y = product(x, joined, "fast")
    else:
        y = jnp.matmul(x, joined, precision=precision)
    if biases:
        y += jnp.concatenate(biases)
    widths = [w.shape[1] for w in kernels[:-1]]
    return jnp.split(y, list(itertools.accumulate(widths)), axis=-1)


def narrow_attention_fn(
    query: jax.Array, key: jax.Array, value: jax.Array, *given: Any, **options: Any
) -> jax.Array:
    """`attention_fn` that computes float32 in bfloat16, and gives float32 back."""
    wide = jnp.result_type(query, key, value)
    if wide != jnp.float32:
        return attention_fn(query, key, value, *given, **options)
    options = {**options, "dtype": jnp.bfloat16}
    return attention_fn(query, key, value, *given, **options).astype(wide)


@multiplies_by("query", "key", "value", "out", "up", "down")
class TransformerBlock(nnx.Module):
    """A pre-norm block: RMSNorm, causal attention with RoPE, RMSNorm, GELU between two
    products; a residual around each half.

    It is written as one would for XLA: three projections, `jax.nn.gelu` and
    `jax.nn.dot_product_attention`. `create_unified_attention_fusion` knows it and
    changes `fusion`.

    Attributes:
      query, key, value: `[d_model, N D]`, `[d_model, K D]`, `[d_model, K D]`.
      out: `[N D, d_model]`.
      up, up_bias: `[d_model, hidden]`, `[hidden]`.
      down, down_bias: `[hidden, d_model]`, `[d_model]`.
      attention_norm, feed_forward_norm: `[d_model]`.
      fusion: names of the choices that are ours: "qkv", "attention", "gelu".
      narrow: those of them that multiply float32 in bfloat16.
      dot_general: None, or what `convert_model_to_fp8` has put there: a dot_general for
        each matrix, by its name. "qkv" is then three products.

    Args:
      d_model: the width.
      num_heads: N, which divides it; D is d_model / N, an even number.
      hidden: of the products around GELU; four times the width unless given.
      num_kv_heads: K, which divides N; as many unless given.
      theta: of the rotation.
      param_dtype: of the weights.
      rngs: keys, "params".

    Raises:
      TypeError, ValueError: sizes that do not fit.

    Example:
      >>> block = TransformerBlock(64, 4, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 16, 64))).shape
      (2, 16, 64)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        hidden: int | None = None,
        *,
        num_kv_heads: int | None = None,
        theta: float = 1e4,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        where = "TransformerBlock"
        kv = num_heads if num_kv_heads is None else num_kv_heads
        hidden = 4 * d_model if hidden is None else hidden
        d_model, num_heads, hidden, kv = check_positive(
            where,
            d_model=d_model,
            num_heads=num_heads,
            hidden=hidden,
            num_kv_heads=kv,
        )
        for words, whole, part in (
            ("num_heads must divide half of d_model", d_model // 2, num_heads),
            ("num_kv_heads must divide num_heads", num_heads, kv),
        ):
            if whole % part or (whole == d_model // 2 and d_model % 2):
                raise ValueError(
                    f"{where}: {words}, {whole}, got {part}; each head has the same "
                    "even share"
                )
        self.theta = arguments.finite(where, "theta", theta, 0.0, "pass 1e4")
        if not self.theta > 0:
            raise ValueError(f"{where}: theta must be above 0, got {theta}; pass 1e4")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv
        self.head_dim, self.hidden = d_model // num_heads, hidden
        stored = check_floats(where, "param_dtype", param_dtype)
        check_rngs(where, rngs)

        def drawn(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(_KERNEL(rngs.params(), shape, stored))

        narrow = kv * self.head_dim
        self.query, self.out = drawn(d_model, d_model), drawn(d_model, d_model)
        self.key, self.value = drawn(d_model, narrow), drawn(d_model, narrow)
        self.up, self.down = drawn(d_model, hidden), drawn(hidden, d_model)
        self.up_bias = nnx.Param(jnp.zeros(hidden, stored))
        self.down_bias = nnx.Param(jnp.zeros(d_model, stored))
        self.attention_norm = nnx.Param(jnp.ones(d_model, stored))
        self.feed_forward_norm = nnx.Param(jnp.ones(d_model, stored))
        self.dot_general: Any = None
        self.fusion: tuple[str, ...] = ()
        self.narrow: tuple[str, ...] = ()

    def __call__(
        self, inputs: Float[ArrayIn, "B S d_model"]
    ) -> Float[jax.Array, "B S d_model"]:
        """`[B, S, d_model]`, in the common dtype of inputs and weights."""
        x = as_array("TransformerBlock", "inputs", inputs)
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"TransformerBlock: inputs must be [B, S, {self.d_model}], got "
                f"{show(x)}; add a batch axis with x[None], or make the block with "
                "another d_model"
            )
        x = x.astype(jnp.result_type(x, self.query[...]))
        y = _norm(x, self.attention_norm[...])
        if "qkv" in self.fusion and self.dot_general is None:
            three = (self.query, self.key, self.value)
            cast = [w[...].astype(x.dtype) for w in three]
            made = project(y, cast, [], "qkv" in self.narrow)
        else:
            made = [self._product(name, y) for name in ("query", "key", "value")]
        d = self.head_dim
        q, k, v = (a.reshape(*x.shape[:2], a.shape[-1] // d, d) for a in made)
        q, k = _turned(q, self.theta), _turned(k, self.theta)
        seen = self._attended(q, k, v).reshape(x.shape)
        x = x + self._product("out", seen)
        y = _norm(x, self.feed_forward_norm[...])
        act = kept_gelu if "gelu" in self.fusion else jax.nn.gelu
        y = act(self._product("up", y) + self.up_bias[...].astype(x.dtype))
        y = self._product("down", y)
        return x + y + self.down_bias[...].astype(x.dtype)

    def _product(self, name: str, x: jax.Array) -> jax.Array:
        """x by a weight, in x's dtype."""
        weight = getattr(self, name)[...]
        if self.dot_general is None:
            return x @ weight.astype(x.dtype)
        return contract(self.dot_general[name], x, weight)

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if "attention" not in self.fusion:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        narrow = "attention" in self.narrow
        attend = narrow_attention_fn if narrow else attention_fn
        return attend(q, k, v, is_causal=True)


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON)
    return (wide * scale * weight).astype(x.dtype)


def _turned(x: jax.Array, theta: float) -> jax.Array:
    """RoPE of `[B, S, N, D]`, position i being row i; halves are pairs."""
    half = x.shape[-1] // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    a, b = jnp.split(wide, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class UnifiedAttentionFusion(nnx.Module):
    """A model with its choices made, whose call is one program.

    Called with arrays it runs under one `nnx.jit`, so that what a call changes in the
    model (keys of dropout, caches) is kept; bools, strings and functions among the
    arguments are compiled in. Called within a program, or within a gradient, it is a
    part of that.

    Attributes:
      model: the model.
      config: what was asked for.
      report: a `FusionDecision` for each choice in each place.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: FusionConfig,
        report: tuple[FusionDecision, ...],
    ) -> None:
        self.model, self.config, self.report = model, config, report

    def __call__(self, *args: Any, **options: Any) -> Any:
        leaves = jax.tree.leaves((nnx.state(self.model), args, options))
        model: Any = self.model
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return model(*args, **options)
        fixed = tuple((i, x) for i, x in enumerate(args) if _is_static(x))
        named = tuple((n, x) for n, x in sorted(options.items()) if _is_static(x))
        given = [None if _is_static(x) else x for x in args]
        other = {name: x for name, x in options.items() if not _is_static(x)}
        return _program(fixed, named)(self.model, given, other)

    def summary(self) -> str:
        """The report as text, a line for each row."""
        return "\n".join(map(str, self.report))


@functools.lru_cache(maxsize=256)
def _program(
    fixed: tuple[tuple[int, Any], ...], named: tuple[tuple[str, Any], ...]
) -> Any:
    """A call of a model, jitted, with these arguments compiled in."""

    def call(model: Any, args: list[Any], options: dict[str, Any]) -> Any:
        positional = list(args)
        for i, x in fixed:
            positional[i] = x
        return model(*positional, **options, **dict(named))

    return nnx.jit(call)


def _is_static(x: Any) -> bool:
    """Whether an argument is no array, nor holds any."""
    if x is None or isinstance(x, (bool, str)):
        return True
    return callable(x) and not isinstance(x, nnx.Pytree)
