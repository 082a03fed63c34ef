"""A Llama forward pass in plain JAX whose KV cache lives in a `KVPool`.

    prompt [T] --prefill--> logits, k and v [layers, T, kv heads, head dim]
                               k and v --store_prompt--> blocks of the pool
    token  [ ] --decode_step--> logits, the pool with one more token in its blocks

Activations are float32; the pool keeps K and V in its own dtype. The model has no batch
axis: these functions show one cache moving about, and one sequence is enough for that.
Rows of several sequences go through its parts in `paged_decode.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock import KVPool, append_kv, flash_attention, gather_kv

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """What shapes the model. Frozen, hence hashable, hence static under jit."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale each row of x [T, width] to unit root mean square, then by `weight`."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, inputs] by a weight [outputs, inputs]."""
    return jnp.einsum("ti,oi->to", x, weight)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding of x [T, heads, head_dim] at positions [T].

    GGUF files of the Llama family store the rows of Q and K so that the two coordinates
    of a rotation are neighbours (2i, 2i + 1), not half a head apart as in the original
    checkpoint.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


def project_qkv(
    config: Config, weights: Params, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, N, D], keys and values [T, K, D] of x [T, width]."""
    h = rms_norm(x, weights["attn_norm"], config.norm_eps)
    shape = (len(x), -1, config.head_dim)
    q = rotate(matmul(h, weights["q"]).reshape(shape), positions, config.rope_base)
    k = rotate(matmul(h, weights["k"]).reshape(shape), positions, config.rope_base)
    return q, k, matmul(h, weights["v"]).reshape(shape)


def finish_layer(
    config: Config, weights: Params, x: jax.Array, attended: jax.Array
) -> jax.Array:
    """Add the attention [T, N, D] to x [T, width], then the gated MLP."""
    x = x + matmul(attended.reshape(len(x), -1), weights["out"])
    h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
    gated = jax.nn.silu(matmul(h, weights["gate"])) * matmul(h, weights["up"])
    return x + matmul(gated, weights["down"])


def read_logits(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Logits [T, vocabulary] of x [T, width]; the embedding is also the output."""
    h = rms_norm(x, params["final_norm"], config.norm_eps)
    return matmul(h, params["embedding"])


@partial(jax.jit, static_argnums=0)
def prefill(
    config: Config, params: Params, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the whole prompt at once.

    Args:
        tokens: int32[T].

    Returns:
        The last token's logits [vocabulary], and every layer's keys and values
        [num_layers, T, num_kv_heads, head_dim].
    """
    positions = jnp.arange(len(tokens))

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, tuple]:
        q, k, v = project_qkv(config, weights, x, positions)
        attended = flash_attention(q[None], k[None], v[None], causal=True)[0]
        return finish_layer(config, weights, x, attended), (k, v)

    x, (k, v) = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return read_logits(config, params, x[-1:])[0], k, v


def slots_of(block_ids: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """The pool slot of each position of a sequence: block * block_size + offset."""
    return block_ids[positions // block_size] * block_size + positions % block_size


@partial(jax.jit, donate_argnums=0)
def store_prompt(
    pool: KVPool, block_ids: jax.Array, k: jax.Array, v: jax.Array
) -> KVPool:
    """Write a prompt's k and v [num_layers, T, ...] to its blocks, in place."""
    slots = slots_of(block_ids, jnp.arange(k.shape[1]), pool.spec.block_size)
    k, v = k.astype(pool.dtype), v.astype(pool.dtype)
    return append_kv(pool, None, k, v, slots)  # all layers at once


@partial(jax.jit, static_argnums=0, donate_argnames="pool")
def decode_step(
    config: Config,
    params: Params,
    token: jax.Array,
    position: jax.Array,
    pool: KVPool,
    block_ids: jax.Array,
) -> tuple[jax.Array, KVPool]:
    """Run one token over the cache, and add its own keys and values to it, in place.

    Args:
        token: int32[], the newest token.
        position: int32[], its place in the sequence.
        pool: the cache; donated.
        block_ids: int32[n], the sequence's blocks in order, with room for `position`.

    Returns:
        Logits [vocabulary] and the updated pool.
    """
    positions = position[None]
    slots = slots_of(block_ids, positions, pool.spec.block_size)
    dtype = pool.dtype

    def layer(carry: tuple, weights_at: tuple) -> tuple[tuple, None]:
        (x, pool), (index, weights) = carry, weights_at
        q, k, v = project_qkv(config, weights, x, positions)
        pool = append_kv(pool, index, k.astype(dtype), v.astype(dtype), slots)
        k, v = gather_kv(pool, index, block_ids)
        k, v = k.astype(x.dtype), v.astype(x.dtype)
        attended = jax.nn.dot_product_attention(
            q[None], k[None], v[None], key_value_seq_lengths=positions + 1
        )[0]
        return (finish_layer(config, weights, x, attended), pool), None

    start = (params["embedding"][token][None], pool)
    layers = (jnp.arange(config.num_layers), params["layers"])
    (x, pool), _ = jax.lax.scan(layer, start, layers)
    return read_logits(config, params, x)[0], pool


def generate(
    step: Callable[[jax.Array, jax.Array], jax.Array],
    logits: jax.Array,
    position: int,
    max_tokens: int,
    end: int,
) -> Iterator[int]:
    """Greedy decoding: yield the likeliest token until `end` or `max_tokens`.

    Args:
        step: (token, position) -> the next logits.
        logits: those that follow the prompt.
        position: the place of the first new token.
    """
    for place in range(position, position + max_tokens):
        token = jnp.argmax(logits).astype(jnp.int32)
        if int(token) == end:
            return
        yield int(token)
        logits = step(token, jnp.int32(place))
