"""The same model over a whole text, without blocks: greedy tokens are held to it."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from serve.config import Config
from serve.llama import finish, product, project, rms_norm, turns
from serve.models import LoadedModel
from serve.weights import Params

LENGTHS = 128  # texts are padded to multiples, so that few programs are made


def choices(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """The likeliest token behind each of the tokens, int32 [n], by dense attention."""
    padded = np.zeros(-(-len(tokens) // LENGTHS) * LENGTHS, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_choices(model.config, model.params, padded))[: len(tokens)]


@partial(jax.jit, static_argnums=0)
def _choices(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    places = jnp.arange(len(tokens))
    logits = logits_at(config, params, tokens, places)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def logits_at(
    config: Config, params: Params, tokens: jax.Array, places: jax.Array
) -> jax.Array:
    """Logits float32 [n, vocabulary] behind tokens [T], at places [n] of them."""
    x = params["embedding"][tokens].astype(jnp.float32)
    cos_sin = turns(config, jnp.arange(len(tokens)))
    for weights in params["layers"]:
        x = _layer(config, weights, x, cos_sin)
    x = rms_norm(x[places], params["final_norm"], config.norm_eps)
    return product(x, params.get("head", params["embedding"]))


@partial(jax.jit, static_argnums=0)
def _layer(
    config: Config, weights: Params, x: jax.Array, cos_sin: jax.Array
) -> jax.Array:
    cuts = config.num_heads, config.num_heads + config.num_kv_heads
    q, k, v = jnp.split(project(config, weights, x), cuts, axis=1)
    turned = []
    for x_heads, norm in ((q, "q_norm"), (k, "k_norm")):
        heads = x_heads.astype(jnp.float32)
        if norm in weights:
            heads = rms_norm(heads, weights[norm], config.norm_eps)
        turned.append(rotate(heads, cos_sin, config.interleaved).astype(v.dtype))
    q, k = turned
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return finish(config, weights, x, attended)


def rotate(x: jax.Array, cos_sin: jax.Array, interleaved: bool) -> jax.Array:
    """x [T, heads, head_dim], turned as `rope_append` does."""
    cos, sin = jnp.split(cos_sin[:, None], 2, axis=-1)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = jnp.split(x, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape)
    return jnp.concatenate(turned, axis=-1)
