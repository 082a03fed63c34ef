"""Codes of a few bits in words of 32, without gaps.

32 codes of b bits fill b words: bit j of code i is bit b i + j of the words, counted
from the lowest bit of the first. So 3 bits take three words and lose none, and a code
may lie in two words.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

CODES = 32  # that fill whole words, whatever their bits


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Words uint32 `[..., n * bits / 32]` of codes uint32 `[..., n]`, 32 dividing n."""
    lead = codes.shape[:-1]
    places = jnp.arange(bits, dtype=jnp.uint32)
    single = (codes.reshape(*lead, -1, CODES, 1) >> places) & 1
    single = single.reshape(*lead, -1, bits, 32)  # the same bits, by words
    words = (single << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return words.reshape(*lead, -1)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Codes uint32 `[..., n]` of words uint32 `[..., n * bits / 32]`."""
    lead = words.shape[:-1]
    words = words.reshape(*lead, -1, bits)
    first = np.arange(CODES) * bits
    low, shift = first // 32, (first % 32).astype(np.uint32)
    high = np.minimum(low + 1, bits - 1)
    # A shift by 32 leaves nothing; what else is too much lies above the code.
    codes = (words[..., low] >> shift) | (words[..., high] << (32 - shift))
    return (codes & np.uint32(2**bits - 1)).reshape(*lead, -1)
