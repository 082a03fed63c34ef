"""What stands for a piece, which tiles a row keeps, and lists of them, in plain JAX.

Nothing is sorted on a device. A row keeps what is at least its threshold, and the
threshold is found digit by digit: of four parts the highest one from which on there is
enough. That is 16 passes over the scores, whatever is kept, of which each counts for
three candidates. Lists are counts that are searched.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.sparse.grid import running_count

DIGIT = 2  # bits of a threshold that a pass finds; a divisor of 32
# In the order of kvblock_tile_state.
HIDDEN, FREE, ALWAYS = range(3)


def pool_pieces(
    x: Any, ends: Any, *, side: int, pieces: int, extremes: bool
) -> list[Any]:
    """Means of pieces, and where `extremes` says so their largest and smallest numbers.

    Args:
      x: floats `[..., length, H, D]`.
      ends: int32 `[...]`, how many rows count.
      side: rows of a piece.
      pieces: how many there are; those behind the rows, and their own, are 0.

    Returns:
      Float32 `[..., pieces, H, D]` each.
    """
    rows = side * pieces
    *leading, length, heads, dim = x.shape
    x = jnp.pad(x, [(0, 0)] * len(leading) + [(0, rows - length), (0, 0), (0, 0)])
    x = x.reshape(*leading, pieces, side, heads, dim)
    real = jnp.arange(rows, dtype=jnp.int32) < jnp.clip(ends, 0, length)[..., None]
    real = real.reshape(*leading, pieces, side, 1, 1)
    number = jnp.maximum(real.sum(-3, dtype=jnp.int32), 1).astype(jnp.float32)
    # Sums in float32 of what is read once, in its own dtype.
    mean = jnp.where(real, x, 0).sum(-3, dtype=jnp.float32) / number
    if not extremes:
        return [mean]
    some = real.any(-3)
    high = jnp.where(some, jnp.where(real, x, -jnp.inf).max(-3), 0)
    low = jnp.where(some, jnp.where(real, x, jnp.inf).min(-3), 0)
    return [mean, high.astype(jnp.float32), low.astype(jnp.float32)]


def sorted_bits(x: Any) -> jax.Array:
    """uint32 in the order of floats, from 1 to below 2**32 - 1; NaN comes first."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    top = np.uint32(1 << 31)
    ordered = jnp.where(bits >= top, ~bits, bits | top)
    # An infinity's neighbours are NaNs, so that both ends are free.
    return jnp.where(jnp.isnan(x), np.uint32(1), ordered)


def keep_tiles(scores: Any, states: Any, limits: Any, *, tau: float) -> list[Any]:
    """The map of what is kept, and with tau the share of each row's mass that it holds.

    Args:
      scores: float32 `[..., C]`; with tau they are masses.
      states: uint8, shaped like scores: `HIDDEN`, `FREE` or `ALWAYS`.
      limits: int32 `[...]`, how many tiles a row may have; `ALWAYS` is not cut by it.
      tau: the share of a row's mass that is enough; 0 for none.

    Of tiles that are equal the first ones are kept.
    """
    visible, always, free = states != HIDDEN, states == ALWAYS, states == FREE
    keys = jnp.where(free, sorted_bits(scores), np.uint32(0))
    own = count(always)  # which a limit does not cut
    room = jnp.minimum(jnp.maximum(limits, own) - own, count(free))

    every = jnp.where(visible & (scores > 0), scores, 0)
    total, mass = every.sum(-1), jnp.where(always, 0, every)
    # What the others have to hold. A row of which nothing is known takes what it may,
    # one that has all there is no more.
    sure = jnp.where(always, every, 0).sum(-1)
    need = jnp.where(sure < total, np.float32(tau) * total - sure, 0)
    need = jnp.where(total > 0, need, jnp.inf)

    def enough(at: Any) -> Any:
        """Whether what is at least `at` is as much as a row may have, or needs."""
        above = keys >= at[..., None]
        full = count(above) >= room
        if not tau:
            return full
        return full | (jnp.where(above, mass, 0).sum(-1) >= need)

    def digit(i: Any, at: Any) -> Any:
        # Without jit it is a Python integer.
        shift = np.uint32(32 - DIGIT) - np.uint32(DIGIT) * jnp.asarray(i, jnp.uint32)
        # Each on its own: XLA puts sums over the same array into one pass.
        found = [enough(at | (np.uint32(d) << shift)) for d in range(1, 1 << DIGIT)]
        return at | (sum(x.astype(jnp.uint32) for x in found) << shift)

    # The highest threshold that still holds enough.
    start = jnp.zeros(limits.shape, jnp.uint32)
    at = jax.lax.fori_loop(0, 32 // DIGIT, digit, start)[..., None]
    above = keys > at
    equal = free & (keys == at)
    more = room - count(above)  # of those that are equal
    if tau:
        each = jnp.max(jnp.where(equal, mass, 0), -1, initial=0)
        missing = need - jnp.where(above, mass, 0).sum(-1)
        steps = jnp.ceil(missing / jnp.where(each > 0, each, 1))
        steps = jnp.where(jnp.isinf(each), 1, steps)  # which is all there is
        columns = scores.shape[-1]
        wanted = jnp.where(each > 0, jnp.clip(steps, 0, columns), columns)
        more = jnp.minimum(more, wanted.astype(jnp.int32))
        more = jnp.where(missing > 0, more, 0)
    equal = equal & (running_count(equal) <= more[..., None])
    kept = always | above | equal
    if not tau:
        return [kept]
    reached = jnp.where(kept, every, 0).sum(-1)
    held = jnp.where(reached < total, reached / jnp.where(total > 0, total, 1), 1)
    return [kept, held.astype(jnp.float32)]


def list_tiles(kept: Any, *, width: int) -> list[Any]:
    """Indices int32 `[..., width]`, −1 behind them, and counts `[...]` of a map.

    Entry m is the first tile up to which m + 1 are kept.
    """
    upto = running_count(kept)
    counts = jnp.minimum(count(kept), width)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    find = lambda row: jnp.searchsorted(row, wanted)  # noqa: E731
    for _ in counts.shape:
        find = jax.vmap(find)
    indices = find(upto).astype(jnp.int32)
    return [jnp.where(wanted <= counts[..., None], indices, -1), counts]


def count(kept: Any) -> Any:
    """How many of a row."""
    return kept.sum(-1, dtype=np.int32)
