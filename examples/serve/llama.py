"""The forward pass of a Llama over the blocks of a pool, for rows of many sequences.

    x = embedding[tokens]
    for each layer:
      q, k, v = norm(x) @ qkv
      rope_append                      turns q and k, puts k and v into their slots
      x += paged_attention(q) @ out    over the blocks of each row's own sequence
      x += (silu(norm(x) @ gate) * (norm(x) @ up)) @ down
    logits = norm(x[outputs]) @ head

x and all sums are float32; what is multiplied has the weights' dtype. Layers are not a
scan: a scan would copy the weights of each layer out of the stack before it multiplies
by them, and one token then takes twice as long on two cores.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import KVPool, paged_attention, rope_append
from serve.config import Config
from serve.weights import Params

# What computes between the attentions of two layers, called as `joined`.
Join = Callable[..., tuple[jax.Array, jax.Array, KVPool]]


class Rows(NamedTuple):
    """What the model is given for a step.

    Attributes:
        tokens, positions: int32[rows], of all sequences, one after the other.
        slots: int32[rows], where keys and values go; -1 behind the last row.
        tables: int32[places, width], each sequence's blocks in order, then -1.
        kv_lens: int32[places], each sequence's keys, those of its rows included.
        query_start: int32[places + 1], each sequence's first row, then the end.
        tree_mask: int32[rows, words], which rows of its sequence a row sees, or None.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    tables: jax.Array
    kv_lens: jax.Array
    query_start: jax.Array
    tree_mask: jax.Array | None


class Place(NamedTuple):
    """Where a layer's keys and values go.

    Attributes:
        pool: the cache.
        index: int32, the layer's number.
        rows: of the step.
        cos_sin: what their queries and keys are turned by, as `turns` returns it.
    """

    pool: KVPool
    index: jax.Array
    rows: Rows
    cos_sin: jax.Array


def forward(
    config: Config,
    params: Params,
    pool: KVPool,
    rows: Rows,
    outputs: jax.Array,
    join: Join | None = None,
) -> tuple[jax.Array, KVPool]:
    """Run rows through the model.

    Args:
        config, params: the model.
        pool: of the weights' dtype; donated by the caller.
        rows: what is computed.
        outputs: int32[n], the rows whose logits are wanted.
        join: what computes between the attentions of two layers, as `joined`, which
            it is where None.

    Returns:
        Logits, float32[n, vocabulary], and the pool with all rows' keys and values.
    """
    x = params["embedding"][rows.tokens].astype(jnp.float32)
    cos_sin = turns(config, rows.positions)
    layers, join = params["layers"], join or joined
    place = Place(pool, jnp.int32(0), rows, cos_sin)
    q, pool = _append(config, layers[0], x, place)
    for index, weights in enumerate(layers):
        attended = _attend(q, pool, jnp.int32(index), rows)
        if index + 1 == len(layers):
            x = finish(config, weights, x, attended)
        else:
            place = Place(pool, jnp.int32(index + 1), rows, cos_sin)
            x, q, pool = join(config, weights, layers[index + 1], x, attended, place)
    x = rms_norm(x[outputs], params["final_norm"], config.norm_eps)
    return product(x, params.get("head", params["embedding"])), pool


def turns(config: Config, positions: jax.Array) -> jax.Array:
    """Cosines and sines of each row's rotation, float32[rows, head_dim]."""
    with jax.enable_x64(True):  # position 131072 by 1 would be 0.004 off in float32
        angle = positions.astype(jnp.float64)[:, None] * np.array(config.inv_freq)
        angle -= jnp.round(angle / np.float64(2 * np.pi)) * np.float64(2 * np.pi)
        angle = angle.astype(jnp.float32)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


# Jits of their own, so that they are traced for the first layer alone.


@partial(jax.jit, static_argnums=0)
def joined(
    config: Config,
    weights: Params,
    following: Params,
    x: jax.Array,
    attended: jax.Array,
    place: Place,
) -> tuple[jax.Array, jax.Array, KVPool]:
    """From a layer's attention to the queries of the next one.

    Args:
        config: the model's.
        weights, following: the two layers'.
        x: float32[rows, width].
        attended: [rows, N, D], the layer's.
        place: the next layer's.

    Returns:
        x behind the layer, the next one's queries [rows, N, D], turned, and the pool
        with its keys and values.
    """
    x = finish(config, weights, x, attended)
    return x, *_append(config, following, x, place)


def _append(
    config: Config, weights: Params, x: jax.Array, place: Place
) -> tuple[jax.Array, KVPool]:
    """A layer's queries; its keys and values are in the pool."""
    norms = {name: weights[name] for name in ("q_norm", "k_norm") if name in weights}
    return rope_append(
        project(config, weights, x),
        None,
        None,
        place.pool,
        place.index,
        place.rows.slots,
        None,
        cos_sin=place.cos_sin,
        interleaved=config.interleaved,
        norm_eps=config.norm_eps,
        **norms,
    )


@jax.jit
def _attend(q: jax.Array, pool: KVPool, index: jax.Array, rows: Rows) -> jax.Array:
    """Each row over the blocks of its own sequence, [rows, N, D]."""
    return paged_attention(
        q,
        pool,
        index,
        rows.tables,
        rows.kv_lens,
        query_start=rows.query_start,
        tree_mask=rows.tree_mask,
    )


# ---- parts that do not know of the pool ----------------------------------------------


def project(config: Config, weights: Params, x: jax.Array) -> jax.Array:
    """Queries, keys and values [rows, N + 2 K, D], in the weights' dtype."""
    h = rms_norm(x, weights["attn_norm"], config.norm_eps)
    qkv = linear(weights, "qkv", h).astype(weights["qkv"].dtype)
    return qkv.reshape(len(x), -1, config.head_dim)


def finish(
    config: Config, weights: Params, x: jax.Array, attended: jax.Array
) -> jax.Array:
    """Add the attention [rows, N, D] to x [rows, width], then the gated MLP."""
    x = x + linear(weights, "out", attended.reshape(len(x), -1))
    h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
    gate, up = jnp.split(linear(weights, "gate_up", h), 2, axis=-1)
    return x + linear(weights, "down", jax.nn.silu(gate) * up)


def linear(weights: Params, name: str, x: jax.Array) -> jax.Array:
    """x by a matrix of a layer, and its bias where it has one; float32."""
    y = product(x, weights[name])
    bias = weights.get(f"{name}_bias")
    return y if bias is None else y + bias


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, inputs] by a weight [outputs, inputs], summed in float32."""
    return jnp.einsum(
        "ti,oi->to",
        x.astype(weight.dtype),
        weight,
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Each row to unit root mean square, then by `weight`."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight
