"""A small GPT over bytes, in plain JAX, whose attention is a function you pass in.

So are its products with the weights of its layers, if you like.

    tokens [B, T] -> embedding + position -> layers -> logits [B, T, 256]

A layer is attention and an MLP, each behind a normalization and added to its input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Product = Callable[[jax.Array, jax.Array, Any], jax.Array]  # of x, weights and scales

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Config:
    """What shapes the model and its batches."""

    num_layers: int
    num_heads: int
    head_dim: int
    context: int
    batch: int
    attention_dtype: Any = jnp.float32

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


def init(config: Config, key: jax.Array) -> Params:
    """Normal weights; what adds to the residual stream starts at zero."""
    width, layers = config.width, config.num_layers
    keys = iter(jax.random.split(key, 4))

    def draw(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "embedding": draw(VOCABULARY, width),
        "position": draw(config.context, width),
        "layers": {
            "norm": jnp.ones((layers, 2, width)),
            "qkv": draw(layers, width, 3 * width),
            "out": jnp.zeros((layers, width, width)),
            "up": draw(layers, width, 4 * width),
            "down": jnp.zeros((layers, 4 * width, width)),
        },
        "norm": jnp.ones(width),
    }


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Scale rows to unit root mean square, then by `weight`."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


WEIGHTS = ("qkv", "out", "up", "down")  # of the products of a layer


def multiply(x: jax.Array, weights: jax.Array, scales: Any) -> jax.Array:
    """In the dtypes that they have."""
    return x @ weights


def logits(
    config: Config,
    params: Params,
    tokens: jax.Array,
    attend: Attention,
    positions: jax.Array | None = None,
    cut: Any = None,
    product: Product = multiply,
    scales: Any = None,
) -> jax.Array:
    """What follows each of `tokens` [B, T]: [B, T, 256].

    positions: [T], where tokens lie in the text; in order unless given. `cut` is the
    sharding of what has [B, T] in front. `product` multiplies with the `WEIGHTS`;
    `scales`, by their names and stacked as they are, are what it takes beside them.
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.arange(length)

    def layer(x: jax.Array, own: tuple[Params, Params]) -> tuple[jax.Array, None]:
        weights, scales = own

        def times(x: jax.Array, name: str) -> jax.Array:
            return product(x, weights[name], scales[name])

        h = normalize(x, weights["norm"][0])
        shape = (batch, length, 3, config.num_heads, config.head_dim)
        qkv = times(h, "qkv").reshape(shape).astype(config.attention_dtype)
        attended = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + times(attended.reshape(x.shape).astype(x.dtype), "out")
        h = normalize(x, weights["norm"][1])
        return x + times(jax.nn.gelu(times(h, "up")), "down"), None

    x = params["embedding"][tokens] + params["position"][positions]
    if cut is not None:
        x = jax.lax.with_sharding_constraint(x, cut)
    scales = dict.fromkeys(WEIGHTS) if scales is None else scales
    x, _ = jax.lax.scan(layer, x, (params["layers"], scales))
    return normalize(x, params["norm"]) @ params["embedding"].T


def loss(
    config: Config,
    params: Params,
    text: jax.Array,
    attend: Attention,
    order: jax.Array | None = None,
    cut: Any = None,
    product: Product = multiply,
    scales: Any = None,
) -> jax.Array:
    """Mean nats a byte of `text` [B, T + 1], each byte predicted from those before.

    order: [T], the order in which the model has the bytes, if it is another one.
    """
    tokens, targets = text[:, :-1], text[:, 1:].astype(jnp.int32)
    if order is not None:
        tokens, targets = tokens[:, order], targets[:, order]
    made = logits(config, params, tokens, attend, order, cut, product, scales)
    scores = jax.nn.log_softmax(made)
    picked = jnp.take_along_axis(scores, targets[:, :, None], axis=-1)
    return -picked.mean()


def adam(
    params: Params, grads: Params, moments: tuple, step: jax.Array, rate: float
) -> tuple[Params, tuple]:
    """One step of Adam (Kingma and Ba, arXiv:1412.6980), with 60 steps of warmup.

    Gradients longer than 1 are shortened to it. A rate that rises faster meets
    gradients a hundred times as long, and then rounding decides what is learned.
    """
    count = step + 1
    rate = rate * jnp.minimum(1.0, count / 60)
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, length), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)

    def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - 0.9**count), v / (1 - 0.99**count)
        return p - rate * m / (jnp.sqrt(v) + 1e-8)

    return jax.tree.map(move, params, first, second), (first, second)
