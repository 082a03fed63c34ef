"""The modules of flax: attention, a linear layer, GELU. Importing this imports flax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_kvblock.attention import arguments
from jax_kvblock.attention.dropout import threshold_of
from jax_kvblock.attention.nnx import attention_fn
from jax_kvblock.core.checks import (
    as_array,
    check_choice,
    check_positive,
    show,
)
from jax_kvblock.core.models import multiplies_by
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.layers.arguments import check_floats, check_of_floats
from jax_kvblock.layers.gelu import gelu
from jax_kvblock.layers.levels import LEVELS, contract, product

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

_KERNEL = nnx.initializers.lecun_normal()
_BIAS = nnx.initializers.zeros_init()


@multiplies_by("qkv", "out")
class AttentionLayer(nnx.Module):
    """Self-attention with flash attention: a projection, attention, and one back.

    Scores are never in memory, and dropout stores nothing (docs/attention.md). After
    `eval()`, or with `deterministic=True`, nothing is dropped.

    Attributes:
      qkv: `[d_model, (N + 2 K) D]`: queries, keys and values side by side.
      qkv_bias: `[(N + 2 K) D]`, or None.
      out: `[N D, d_model]`.
      out_bias: `[d_model]`, or None.
      dot_general: None, or what `convert_model_to_fp8` has put there: "qkv" and "out"
        with a dot_general each.

    Args:
      d_model: the width.
      num_heads: N, which divides it; D is d_model / N.
      dropout: the share of the attention weights that become 0 in training, below 1,
        rounded to a 128th, another choice in each batch member and head.
      bias: whether the projections add one, zeros at first.
      num_kv_heads: K, which divides N; as many unless given.
      causal: a position sees those up to its own alone.
      dtype: what is computed in, that of the inputs and the weights unless given.
      param_dtype: of the weights.
      rngs: keys, "params" for the weights and "dropout".

    Raises:
      TypeError, ValueError: sizes that do not fit, a rate that is none.

    Example:
      >>> layer = AttentionLayer(d_model=64, num_heads=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 64))).shape
      (2, 16, 64)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        where = "AttentionLayer"
        arguments.check_flags(where, bias=bias, causal=causal)
        d_model, num_heads = check_positive(where, d_model=d_model, num_heads=num_heads)
        kv = num_heads if num_kv_heads is None else num_kv_heads
        (kv,) = check_positive(where, num_kv_heads=kv)
        for words, whole, part in (
            ("num_heads must divide d_model", d_model, num_heads),
            ("num_kv_heads must divide num_heads", num_heads, kv),
        ):
            if whole % part:
                raise ValueError(
                    f"{where}: {words}, {whole}, got {part}; each head has the same "
                    "share"
                )
        fix = "pass a Python float; 0.0 drops nothing"
        self.dropout = arguments.finite(where, "dropout", dropout, 0.0, fix)
        threshold_of(where, self.dropout, "dropout")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv
        self.head_dim, self.causal = d_model // num_heads, causal
        check_rngs(where, rngs)
        self.dtype = None if dtype is None else check_floats(where, "dtype", dtype)
        stored = check_floats(where, "param_dtype", param_dtype)
        wide = (num_heads + 2 * kv) * self.head_dim
        self.qkv = nnx.Param(_KERNEL(rngs.params(), (d_model, wide), stored))
        self.out = nnx.Param(_KERNEL(rngs.params(), (d_model, d_model), stored))
        self.qkv_bias = _bias(rngs, wide, stored) if bias else None
        self.out_bias = _bias(rngs, d_model, stored) if bias else None
        self.dot_general: Any = None
        self.deterministic = False
        self.rngs = rngs["dropout"].fork() if self.dropout else None

    def __call__(
        self,
        hidden_states: Float[ArrayIn, "B S d_model"],
        attention_mask: Shaped[ArrayIn, "..."] | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[jax.Array, "B S d_model"]:
        """Attends.

        Args:
          hidden_states: `[B, S, d_model]`, floats.
          attention_mask: bools or integers; `[B, S]`, a key where it is False (0) is
            seen by nobody; or four axes that broadcast to `[B, N, S, S]`, False where a
            query does not see a key. Two axes are always those of keys, also where B is
            S: one of queries and keys is `mask[None, None]`. A row that sees no key:
            see `dot_product_attention`.
          deterministic: True drops nothing; the layer's own unless given.
          rngs: which weights are dropped, in place of the layer's own stream: Rngs
            with "dropout", a stream, or a key.

        Returns:
          `[B, S, d_model]` in the dtype that was computed in.

        Raises:
          TypeError, ValueError: shapes or dtypes that do not fit.
        """
        where = type(self).__name__
        x = as_array(where, "hidden_states", hidden_states)
        check_of_floats(where, "hidden_states", x)
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"{where}: hidden_states must be [B, S, {self.d_model}], got "
                f"{show(x)}; add a batch axis with x[None], or make the layer with "
                "another d_model"
            )
        mask = _mask(where, attention_mask, x, self.num_heads)
        kept = self.deterministic if deterministic is None else deterministic
        arguments.check_flags(where, deterministic=kept)
        dtype = self.dtype or jnp.result_type(x, self.qkv[...])
        wide = self._product("qkv", x.astype(dtype))
        if self.qkv_bias is not None:
            wide += self.qkv_bias[...].astype(dtype)
        n, k = self.num_heads, self.num_kv_heads
        wide = wide.reshape(*x.shape[:2], n + 2 * k, self.head_dim)
        q, keys, values = jnp.split(wide, (n, n + k), axis=2)
        drops = self.dropout > 0 and not kept
        o = attention_fn(
            q,
            keys,
            values,
            mask=mask,
            broadcast_dropout=False,
            dropout_rng=_key(where, rngs, self.rngs) if drops else None,
            dropout_rate=self.dropout if drops else 0.0,
            is_causal=self.causal,
        )
        o = self._product("out", o.reshape(*x.shape[:2], n * self.head_dim))
        if self.out_bias is not None:
            o += self.out_bias[...].astype(dtype)
        return o

    def _product(self, name: str, x: jax.Array) -> jax.Array:
        """x by a weight, in x's dtype."""
        weight = getattr(self, name)[...]
        if self.dot_general is None:
            return jnp.matmul(x, weight.astype(x.dtype))
        return contract(self.dot_general[name], x, weight)

    def set_view(self, deterministic: bool | None = None) -> None:
        """For `nnx.view`: whether nothing is dropped."""
        if deterministic is not None:
            self.deterministic = deterministic


@multiplies_by("kernel")
class OptimizedLinear(nnx.Module):
    """`x @ kernel + bias`, with the product at one of three levels.

    | optimization_level | products of float32 | on NVIDIA GPUs |
    |-|-|-|
    | "precise" | in float32 (`precision="highest"`) | no TF32 |
    | "balanced" | JAX's default, `jax.default_matmul_precision` | TF32 |
    | "fast" | of x and kernel rounded to bfloat16, gradients' too | bfloat16 |

    Weights, bias and results keep their dtypes at every level. Inputs and weights of 16
    bits are multiplied as they are, whose products are exact in float32: there is one
    level then.

    Attributes:
      kernel: `[in_features, out_features]`.
      bias: `[out_features]`, or None.
      dot_general: None, or what `convert_model_to_fp8` has put there: "kernel" with a
        dot_general, which stands for any level.

    Args:
      in_features, out_features: the widths.
      bias: whether there is one, zeros at first.
      optimization_level: see above; any other is a ValueError.
      param_dtype: of the weights.
      rngs: keys, "params".

    Example:
      >>> OptimizedLinear(64, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 64))).shape
      (2, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        optimization_level: str = "balanced",
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        where = "OptimizedLinear"
        arguments.check_flags(where, bias=bias)
        self.in_features, self.out_features = check_positive(
            where, in_features=in_features, out_features=out_features
        )
        check_choice(where, "optimization_level", optimization_level, LEVELS)
        self.optimization_level = optimization_level
        stored = check_floats(where, "param_dtype", param_dtype)
        check_rngs(where, rngs)
        shape = (self.in_features, self.out_features)
        self.kernel = nnx.Param(_KERNEL(rngs.params(), shape, stored))
        self.bias = _bias(rngs, self.out_features, stored) if bias else None
        self.dot_general: Any = None

    def __call__(
        self, inputs: Float[ArrayIn, "*batch in_features"]
    ) -> Float[jax.Array, "*batch out_features"]:
        """`[..., out_features]`, in the common dtype of inputs and kernel."""
        where = type(self).__name__
        x = as_array(where, "inputs", inputs)
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{where}: inputs must be [..., {self.in_features}], got {show(x)}; "
                "make the layer with another in_features"
            )
        kernel = self.kernel[...]
        if self.dot_general is None:
            y = product(x, kernel, self.optimization_level)
        else:
            x = x.astype(jnp.result_type(x, kernel))
            y = contract(self.dot_general["kernel"], x, kernel)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class FusedGELU(nnx.Module):
    """GELU whose gradient keeps its input alone, and no array between.

    `jax.nn.gelu` keeps three arrays of the input's size for the way back, and five with
    `approximate`; here the derivative is computed from the input again. XLA makes one
    loop of each direction. Values of 16 bits are computed in float32 and rounded once.

    Args:
      approximate: the formula by tanh in place of that by erf.

    Example:
      >>> FusedGELU()(jnp.ones((2, 64))).shape
      (2, 64)
    """

    def __init__(self, approximate: bool = False) -> None:
        arguments.check_flags("FusedGELU", approximate=approximate)
        self.approximate = approximate

    def __call__(self, x: Float[ArrayIn, "..."]) -> Float[jax.Array, "..."]:
        """`x Φ(x)`, in the shape and dtype of x."""
        where = type(self).__name__
        array = as_array(where, "x", x)
        check_of_floats(where, "x", array)
        return gelu(array, self.approximate)


def check_rngs(where: str, rngs: Any) -> None:
    """Streams of keys, as a module is made with."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{where}: rngs must be nnx.Rngs, got {show(rngs)}; pass nnx.Rngs(0)"
        )


def _bias(rngs: nnx.Rngs, size: int, dtype: Any) -> nnx.Param:
    return nnx.Param(_BIAS(rngs.params(), (size,), dtype))


def _mask(where: str, mask: Any, x: jax.Array, heads: int) -> jax.Array | None:
    """As `attention_fn` takes it; one of keys with axes for heads and queries."""
    if mask is None:
        return None
    array = as_array(where, "attention_mask", mask)
    if not (array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(
            f"{where}: attention_mask must be bools or integers, got {show(array)}, "
            "where 0 may mean either; pass mask == 0 for one that is added to scores, "
            "or mask != 0 for one of ones and zeros"
        )
    if array.ndim == 2 and array.shape == x.shape[:2]:
        return array[:, None, None, :]
    whole = (x.shape[0], heads, x.shape[1], x.shape[1])
    fits = zip(array.shape, whole, strict=False)
    if array.ndim != 4 or any(size not in (1, full) for size, full in fits):
        raise ValueError(
            f"{where}: attention_mask must be {list(x.shape[:2])} or broadcast to "
            f"[B, N, S, S], here {list(whole)}, got {show(array)}; give it four axes, "
            "each of them 1 or that size"
        )
    return array


def _key(where: str, given: Any, own: Any) -> jax.Array:
    """A key of dropout: of what was given with the call, or of the layer's stream."""
    rngs = own if given is None else given
    if isinstance(rngs, nnx.Rngs):
        return rngs["dropout"]()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    if isinstance(rngs, jax.Array):
        return rngs
    raise TypeError(
        f"{where}: rngs must be nnx.Rngs, a stream of them or a key, got "
        f"{type(rngs).__name__}; pass rngs=nnx.Rngs(dropout=0), or deterministic=True"
    )
