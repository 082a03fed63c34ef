"""The next token of each row: the likeliest, or one that is drawn.

What is drawn follows from the request's seed and the token's place in the text alone:
noise of both is added to the logits, and the largest sum wins (the Gumbel-max trick).
So a request's tokens do not depend on what else is in the batch, and drafts are
verified for sampled texts as for greedy ones: a draft is right if it is the token that
is drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The least that float32 computes with: chances are larger, and logits by a temperature
# as low are no infinities yet, while no noise outweighs their differences.
LEAST_CHANCE, LEAST_TEMPERATURE = 1e-30, 1e-20


class Sampling(NamedTuple):
    """How each row draws.

    Attributes:
        temperature: float32[n], 0 for the likeliest token.
        top_k: int32[n], 0 for all tokens.
        top_p: float32[n], 1 for all tokens.
        seed: int32[n, 2], the 64 bits of a request's seed.
        place: int32[n], of the token that is drawn, in its text.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    place: jax.Array


def draw(logits: jax.Array, how: Sampling, greedy: bool | None = None) -> jax.Array:
    """The next tokens, int32[n], by logits float32[n, vocabulary].

    greedy: whether all temperatures are 0, if that is known.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if greedy:
        return likeliest

    def drawn() -> jax.Array:
        scaled = logits / jnp.maximum(how.temperature, LEAST_TEMPERATURE)[:, None]
        narrow = ((how.top_k > 0) | (how.top_p < 1)).any()
        scaled = jax.lax.cond(narrow, lambda x: _narrowed(x, how), lambda x: x, scaled)
        sums = scaled + jax.vmap(_noise, (0, 0, None))(
            how.seed, how.place, logits.shape[-1]
        )
        tokens = jnp.argmax(sums, axis=-1).astype(jnp.int32)
        return jnp.where(how.temperature > 0, tokens, likeliest)

    if greedy is False:
        return drawn()
    # Of the two one runs: noise for a whole vocabulary is not free.
    return jax.lax.cond((how.temperature > 0).any(), drawn, lambda: likeliest)


def _noise(seed: jax.Array, place: jax.Array, size: int) -> jax.Array:
    words = jax.lax.bitcast_convert_type(seed, jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, place), (size,))


def _narrowed(logits: jax.Array, how: Sampling) -> jax.Array:
    """-inf for what is not among the top k, then not in the top p of those."""
    size = logits.shape[-1]
    order = _order(logits)
    many = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, size), size)
    least = _threshold(order, jnp.ones_like(logits), many.astype(jnp.float32))
    logits = jnp.where(order >= least[:, None], logits, -jnp.inf)
    chances = jax.nn.softmax(logits, axis=-1)
    least = _threshold(order, chances, jnp.maximum(how.top_p, LEAST_CHANCE))
    least = jnp.where(how.top_p < 1, least, 0)  # sums are not exactly 1
    return jnp.where(order >= least[:, None], logits, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """uint32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | np.uint32(1 << 31))


def _threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest number that values with weights of `wanted` in sum reach, uint32[n].

    Bit by bit, from the highest: 32 sums take a tenth of the time of a sort.
    """

    def bit(i: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | (np.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.where(order >= higher[:, None], weights, 0).sum(-1) >= wanted
        return jnp.where(reached, higher, least)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(len(order), jnp.uint32))
