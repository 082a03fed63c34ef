"""Dropout of probabilities: the rate, seeds and keys, and which pairs are kept.

Whether a query keeps a key is a function of two words, the keys of a batch member and a
query head, and of both positions. Kernels and plain JAX compute the same function
(cpp/ops/attention/mask/dropout.cuh), so forward and backward passes, and whoever is
asked for a derivative, see the same pairs, and nothing of them is kept.

    x, y   = place of the query, of the key: 8 (position // 16) + position % 8
    z      = (key[0] + QUERY_STEP x) ^ (key[1] + KEY_STEP (y // 2))
    z      = shifted(z FACTORS[0], 15)
    word   = shifted(z KEY_FACTORS[y % 2], 16)
    shift  = 16 (query's position // 8 % 2) + 8 (key's position // 8 % 2)
    number = word >> shift & 127

A pair is kept where its number is at least the threshold. So a word serves the four
pairs of positions {a, a + 8} and {b, b + 8} in a block of 16 by 16: what one thread of
a tensor core's warp holds, whichever of both is its rows. The places are counters (Weyl
sequences); the hash is the one with two multiplications and shifts that the search of
Wellons found ("Prospecting for hash functions", 2018), without its first shift, which
two counters that are joined by exclusive or do not need. Two keys side by side share
the first half of it, and the odd one has another factor in the second.
tests/attention/test_dropout_bits.py holds it to what independent bits are like.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.config import AttentionConfig, Operands, Sizes
from jax_kvblock.core.checks import as_int, check_array, show, shown, to_jax

LEVELS = 128  # a rate is a whole number of so many parts
BLOCK = 16  # positions that a word's pairs lie in, and offsets are a multiple of

# As in cpp/ops/attention/mask/dropout.cuh. 2**32 over the golden ratio, and the digits
# of the root of 2; both odd.
QUERY_STEP, KEY_STEP = np.uint32(0x9E3779B9), np.uint32(0x6A09E667)
FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
KEY_FACTORS = FACTORS[1], np.uint32(0xA54FF53B)  # digits of the root of 7, odd
# Where the two words of a key begin, and what each step adds: digits of pi.
STARTS = np.array([0x243F6A88, 0x85A308D3], np.uint32)
STEPS = np.array([0x13198A2E, 0x03707344], np.uint32)
_WORD = 2**32 - 1


def scale_of(config: AttentionConfig) -> float:
    """What probabilities that are kept are multiplied by."""
    return LEVELS / (LEVELS - config.dropout)


# ---- the rate ------------------------------------------------------------------------


def threshold_of(where: str, rate: float, name: str = "dropout_rate") -> int:
    """Of 128 probabilities, how many become 0; `rate` is a number."""
    if not 0 <= rate < 1:
        raise ValueError(
            f"{where}: {name} must be at least 0 and less than 1, got {rate}; it "
            "is the share of the probabilities that become 0"
        )
    parts = round(LEVELS * rate)
    if rate > 0 and parts in (0, LEVELS):
        raise ValueError(
            f"{where}: {name} must round to 1/{LEVELS} at least and to "
            f"{LEVELS - 1}/{LEVELS} at most, got {rate}; rates are whole numbers of "
            f"{LEVELS} parts, and 0 is none"
        )
    return parts


# ---- seeds ---------------------------------------------------------------------------


def check_seed(where: str, seed: Any, batch: int, heads: int) -> Any:
    """The words of seeds, uint32 `[words]`, `[B, words]` or `[B, N, words]`."""
    forms = f"[{batch}] or [{batch}, {heads}]"
    must = (
        f"{where}: dropout_seed must be an integer, integers of shape {forms}, or a "
        f"key of jax.random, got"
    )
    fix = "a seed for the call, one for each batch member, or one for each head of each"
    number = None if isinstance(seed, jax.Array) else as_int(seed)
    if number is not None:
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"{must} {number}; it must fit in 64 bits")
        return np.array([number & _WORD, number >> 32 & _WORD], np.uint32)
    if isinstance(seed, (list, tuple, range)):
        seed = _of_list(f"{must} {seed!r}; {fix}", seed)
    elif not hasattr(seed, "dtype"):
        raise TypeError(f"{must} {shown(seed)}; {fix}")
    else:
        seed = check_array(where, "dropout_seed", seed)
    is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    if not is_key and not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"{must} {show(seed)}; {fix}")
    if seed.dtype == np.uint32 and seed.ndim:
        if seed.shape != (2,):
            raise ValueError(
                f"{must} {show(seed)}; uint32[2] is a key of jax.random, and other "
                "arrays of uint32 are none: cast integers with .astype(jnp.int32), or "
                "pass keys of jax.random.key"
            )
        return _of_key(seed)
    if seed.shape not in ((), (batch,), (batch, heads)):
        raise ValueError(f"{must} {show(seed)}; {fix}")
    if is_key:
        return _of_key(jax.random.key_data(seed))
    return _words(seed)


def _of_list(message: str, seed: Any) -> Any:
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(seed)):
        return jnp.asarray(seed)
    try:
        return np.asarray(list(seed))
    except ValueError:
        raise ValueError(message) from None


def _of_key(words: Any) -> jax.Array:
    """The words of keys of jax.random, which no integer's are."""
    one_more = [(0, 0)] * (words.ndim - 1) + [(0, 1)]
    return jnp.pad(to_jax(words), one_more)


def _words(seed: Any) -> Any:
    """Integers as two words each, alike in every dtype; NumPy's stay on the host."""
    if isinstance(seed, np.ndarray):
        wide = seed.astype(np.uint64 if seed.dtype.kind == "u" else np.int64)
        return np.stack([wide & _WORD, wide >> 32 & _WORD], -1).astype(np.uint32)
    return _split(seed)


@functools.partial(jax.jit, inline=True)
def _split(seed: jax.Array) -> jax.Array:
    bits = 8 * seed.dtype.itemsize
    low = seed.astype(jnp.uint32)
    if bits == 64:
        high = (seed >> 32).astype(jnp.uint32)
    elif jnp.issubdtype(seed.dtype, jnp.signedinteger):
        high = jnp.where(seed < 0, jnp.uint32(_WORD), jnp.uint32(0))
    else:
        high = jnp.zeros_like(low)
    return jnp.stack([low, high], -1)


# ---- keys ----------------------------------------------------------------------------


def keys_of(
    words: Any, batch: int, heads: int, q_offset: Any = None, kv_offset: Any = None
) -> jax.Array:
    """The keys, uint32 `[B, N, 2]`, of the words of seeds.

    Those of one seed for the call depend on the batch member and on the head, and those
    of a seed for each member on the head. Positions begin with the offsets, in whole
    blocks of 16: int32 scalars or `[B]`.
    """
    return _keys_of(batch, heads, to_jax(words), q_offset, kv_offset)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _keys_of(
    batch: int, heads: int, words: jax.Array, q_offset: Any, kv_offset: Any
) -> jax.Array:
    given = words.ndim - 1  # axes that have seeds of their own
    words = words.reshape(*words.shape[:-1], *(1,) * (2 - given), words.shape[-1])
    zero = jnp.zeros((), jnp.uint32)
    member = jnp.arange(batch, dtype=jnp.uint32)[:, None] if given < 1 else zero
    head = jnp.arange(heads, dtype=jnp.uint32)[None, :] if given < 2 else zero
    read = [words[..., i] for i in range(words.shape[-1])]
    state = jnp.asarray(STARTS)
    for word in (*read, member, head):
        state = mixed(state ^ word[..., None]) + jnp.asarray(STEPS)
    return moved(jnp.broadcast_to(state, (batch, heads, 2)), q_offset, kv_offset)


def moved(keys: jax.Array, q_offset: Any, kv_offset: Any) -> jax.Array:
    """The keys of positions that begin with these offsets, where they began with 0."""
    moves = (
        _move_of(q_offset, QUERY_STEP, BLOCK // 2),
        _move_of(kv_offset, KEY_STEP, BLOCK // 4),
    )
    return keys + jnp.stack(jnp.broadcast_arrays(*moves), -1)


def _move_of(offset: Any, step: np.uint32, steps: int) -> jax.Array:
    """What an offset adds to a word of the keys, `[1|B, 1]`; a block has `steps`."""
    if offset is None:
        return jnp.zeros((1, 1), jnp.uint32)
    blocks = (jnp.asarray(offset, jnp.int32) >> 4).astype(jnp.uint32)
    return (blocks * np.uint32(steps) * step).reshape(-1, 1)


# ---- pairs ---------------------------------------------------------------------------


def shifted(z: jax.Array, by: int) -> jax.Array:
    return z ^ (z >> np.uint32(by))


def mixed(z: jax.Array) -> jax.Array:
    """Of every word another one, uint32: that hash, with its first shift."""
    z = shifted(shifted(z, 16) * FACTORS[0], 15)
    return shifted(z * FACTORS[1], 16)


class Parts(NamedTuple):
    """What rows and columns of pairs have of their own, uint32.

    Attributes:
      rows, columns: the parts of a word, `[B, N, T]` and `[B, N, S]`.
      row_shifts, column_shifts: where a pair's number is in it, `[B, T]` and `[B, S]`.
      factors: of the columns, `[B, S]`.
    """

    rows: jax.Array
    columns: jax.Array
    row_shifts: jax.Array
    column_shifts: jax.Array
    factors: jax.Array


def parts_of(
    config: AttentionConfig,
    x: Operands,
    size: Sizes,
    q_owner: Any = None,
    kv_owner: Any = None,
) -> Parts:
    """The parts of a call's queries and keys; packed, with the sequences of rows.

    `q_owner` and `kv_owner` are int32 `[1, T]` and `[1, S]`, within the sequences, and
    may be longer than T and S.
    """

    def side(
        which: int, length: int, cu: Any, owner: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = x.dropout_keys[..., which]
        if config.packed:
            index = jnp.arange(owner.shape[1], dtype=jnp.int32)[None]
            position = index - cu[owner]
            keys = jnp.swapaxes(keys[owner], 1, 2)
        else:
            position = jnp.arange(length, dtype=jnp.int32)[None]
            position = jnp.broadcast_to(position, (keys.shape[0], length))
            keys = keys[..., None]
        place = ((position >> 4 << 3) + (position & 7)).astype(jnp.uint32)
        half = (position >> 3 & 1).astype(jnp.uint32)
        return keys, place, half

    row_keys, places, halves = side(0, size.q_len, x.cu_q, q_owner)
    rows, row_shifts = row_keys + QUERY_STEP * places[:, None], 16 * halves
    column_keys, places, halves = side(1, size.kv_len, x.cu_kv, kv_owner)
    columns = column_keys + KEY_STEP * (places >> 1)[:, None]
    factors = jnp.where(places & 1 == 0, *KEY_FACTORS)
    return Parts(rows, columns, row_shifts, 8 * halves, factors)


def kept(config: AttentionConfig, parts: Parts) -> jax.Array:
    """Which pairs are kept, bool: `[..., T, S]` of parts whose last axis is T or S.

    Rows and columns, and their shifts and factors, broadcast in front of that.
    """
    word = parts.rows[..., :, None] ^ parts.columns[..., None, :]
    word = shifted(word * FACTORS[0], 15)
    word = shifted(word * parts.factors[..., None, :], 16)
    shifts = parts.row_shifts[..., :, None] + parts.column_shifts[..., None, :]
    return (word >> shifts & np.uint32(LEVELS - 1)) >= np.uint32(config.dropout)
