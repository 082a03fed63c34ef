"""The layers' definitions in plain `jax.numpy`, at any dtype: what they are held to."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class AttentionSizes(NamedTuple):
    """What the weights' shapes do not tell."""

    num_heads: int
    num_kv_heads: int
    causal: bool


def attention(
    sizes: AttentionSizes, weights: dict[str, Any], x: Any, keys: Any
) -> jax.Array:
    """Self-attention `[B, S, d_model]`, all scores at once.

    Args:
      sizes: heads, and whether it is causal.
      weights: "qkv" `[d_model, (N + 2 K) D]`, "out" `[N D, d_model]`, and of each
        "… bias" where there is one.
      x: `[B, S, d_model]`, all in one dtype.
      keys: bools `[B, S]`, False where a key is seen by nobody; or None.
    """
    n, k, causal = sizes
    batch, length, _ = x.shape
    wide = _plus(x @ weights["qkv"], weights.get("qkv bias"))
    wide = wide.reshape(batch, length, n + 2 * k, -1)
    q, key, value = jnp.split(wide, (n, n + k), axis=2)
    key, value = (jnp.repeat(a, n // k, axis=2) for a in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", q, key) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((length, length), bool)) if causal else True
    if keys is not None:
        seen = seen & keys[:, None, None, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    # Divided after the product, as kernels do: the gradient of the scores then has the
    # rounding of the outputs, which that of `jax.nn.softmax` has not.
    most = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    p = jnp.exp(scores - most)
    o = jnp.einsum("bnts,bsnd->bntd", p, value) / p.sum(axis=-1, keepdims=True)
    o = o.swapaxes(1, 2).reshape(batch, length, -1)
    return _plus(o @ weights["out"], weights.get("out bias"))


def linear(weights: dict[str, Any], x: Any) -> jax.Array:
    """`x @ kernel + bias`: "kernel" `[in, out]`, and "bias" where there is one."""
    return _plus(x @ weights["kernel"], weights.get("bias"))


def _plus(x: Any, bias: Any) -> jax.Array:
    return x if bias is None else x + bias
