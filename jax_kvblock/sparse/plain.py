"""What stands for a piece, tiles' shares, what a row keeps, and lists, in plain JAX.

Nothing is sorted on a device. A row keeps what is at least its threshold, and the
threshold is found digit by digit: of four parts the highest one from which on there is
enough. That is 16 passes over the scores, whatever is kept, of which each counts for
three candidates. Lists are counts that are searched.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.sparse.grid import running_count

DIGIT = 2  # bits of a threshold that a pass finds; a divisor of 32
DISTANCES = 32  # classes that have a score of their own
# What the scores of one step take at most, if it is more than one row of tiles: they
# are read several times, and stay in the second-level cache of a GPU (50 MiB).
STEP_BYTES = 1 << 25
# In the order of kvblock_tile_state.
HIDDEN, FREE, ALWAYS = range(3)
# Of pieces: their means in float32; in their own dtype; means with the largest and
# smallest numbers; or these three beside each other, each brought to a mean square of 1
# over a head.
Pooled: TypeAlias = Literal["means", "rounded", "extremes", "normed"]


def pool_pieces(
    x: Any, ends: Any, *, side: int, pieces: int, wanted: Pooled
) -> list[Any]:
    """What stands for pieces.

    Args:
      x: floats `[..., length, H, D]`.
      ends: int32 `[...]`, how many rows count.
      side: rows of a piece.
      pieces: how many there are; those behind the rows, and their own, are 0.
      wanted: see `Pooled`.

    Returns:
      `[..., pieces, H, D]` each, float32 but for means that are rounded; or normed one
      array, `[..., pieces, H, 3 D]`.
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
    if wanted in ("means", "rounded"):
        return [mean.astype(x.dtype) if wanted == "rounded" else mean]
    some = real.any(-3)
    high = jnp.where(some, jnp.where(real, x, -jnp.inf).max(-3), 0)
    low = jnp.where(some, jnp.where(real, x, jnp.inf).min(-3), 0)
    three = [mean, high.astype(jnp.float32), low.astype(jnp.float32)]
    return [side_by_side(three)] if wanted == "normed" else three


def side_by_side(vectors: list[Any]) -> Any:
    """Vectors of one shape in one array, each brought to a mean square of 1."""
    squares = (jnp.mean(jnp.square(x), axis=-1, keepdims=True) for x in vectors)
    factors = (jax.lax.rsqrt(jnp.maximum(square, 1e-30)) for square in squares)
    return jnp.concatenate([x * f for x, f in zip(vectors, factors, strict=True)], -1)


def pieces_seen(bounds: Any, ranges: Any, pieces: int) -> Any:
    """Who sees whom of pieces of queries and of the first `pieces` of keys.

    Args:
      bounds: int32 `[..., P, 2]`, the first one that each sees, and the end.
      ranges: none; or the smallest and largest segment of each piece of queries, int32
        `[..., P, 2]`, and of keys, `[..., S', 2]`: those that meet see each other.

    Returns:
      Bool `[..., P, pieces]`.
    """
    keys = jnp.arange(pieces, dtype=jnp.int32)
    allowed = (keys >= bounds[..., :1]) & (keys < bounds[..., 1:])
    if ranges:
        queries, of_keys = ranges
        low, high = (of_keys[..., None, :pieces, i] for i in range(2))
        allowed = allowed & (queries[..., 1:] >= low) & (queries[..., :1] <= high)
    return allowed


def class_of(apart: Any) -> Any:
    """The class of a distance of either sign, int32: 0, 1, 2, 3, 4–5, 6–7, 8–11, …

    Two classes for each power of two.
    """
    apart = jnp.abs(apart)
    octave = 31 - jax.lax.clz(jnp.maximum(apart, 1))
    half = (apart >> jnp.maximum(octave - 1, 0)) & 1
    made = jnp.where(apart < 2, apart, 2 * octave + half)
    return jnp.minimum(made, DISTANCES - 1)


def weigh_tiles(
    queries: Any,
    keys: Any,
    bounds: Any,
    *more: Any,
    scale: float,
    tiles: tuple[int, int],
    parts: tuple[tuple[int, int, int], ...],
    ranged: bool,
    near: bool,
    fine: bool,
) -> list[Any]:
    """Each tile's share of its row, by the pieces of both.

    In memory are the result and `STEP_BYTES`, or the scores of one row of tiles.

    Args:
      queries: `[..., R · P, N, F]`, P pieces of a tile.
      keys: `[..., C · P', K, F]`.
      bounds: as in `pieces_seen`.
      more: with `ranged` those of queries and keys; with `near` places of pieces of
        queries among those of keys, int32 `[..., R · P]`, what is added by distance
        from there, float32 `[..., N, 32]`, and to the first piece, `[..., N]`.
      scale: of the products.
      tiles: R and C.
      parts: rows of tiles from and to, and how many tiles of keys any of them sees.
      fine: products of float32 are finer than TF32, by jax.default_matmul_precision.

    Returns:
      Float32 `[..., N, R, C]`.
    """
    leading = queries.shape[:-3]
    queries, keys, bounds, *others = (
        x.reshape(-1, *x.shape[len(leading) :]) for x in (queries, keys, bounds, *more)
    )
    ranges, nearness = others[: 2 * ranged], others[2 * ranged :]
    (rows, cols), (batch, _, heads, width) = tiles, queries.shape
    pieces, kv_heads = keys.shape[1:3]
    per_q, per_kv = queries.shape[1] // rows, pieces // cols

    def cut(x: Any) -> jax.Array:
        """Rows of tiles come first: they are what is walked."""
        return jnp.moveaxis(x.reshape(batch, rows, per_q, *x.shape[2:]), 1, 0)

    grouped = queries.reshape(batch, rows, per_q, kv_heads, -1, width)
    of_rows = [grouped.transpose(1, 0, 3, 4, 2, 5), cut(bounds)]
    of_rows += [cut(x) for x in (*ranges[:1], *nearness[:1])]
    keys = keys.transpose(0, 2, 1, 3)

    def of_part(first: int, last: int, cols_seen: int) -> jax.Array:
        number = cols_seen * per_kv
        some = keys[:, :, :number]

        def of_row(row: Any) -> jax.Array:
            vectors, seen, *rest = row
            scores = jnp.einsum(
                "bkgtd,bksd->bkgts", vectors, some, preferred_element_type=jnp.float32
            )
            scores = scores * scale
            allowed = pieces_seen(seen, (rest[0], ranges[1]) if ranged else (), number)
            if near:
                _, distance, of_first = nearness
                added = _nearness(rest[-1], distance, of_first, seen[..., :1], number)
                scores = scores + added.reshape(scores.shape)
            scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
            summed = weights.reshape(*weights.shape[:-1], cols_seen, per_kv).sum(-1)
            total = summed.sum(-1, keepdims=True)
            shares = summed / jnp.where(total > 0, total, 1)
            return shares.mean(-2).reshape(batch, heads, cols_seen)

        given = [x[first:last] for x in of_rows]
        of_one = batch * heads * per_q * pieces * 4  # a symbol, where a batch is one
        at_a_time = max(1, STEP_BYTES // of_one) if isinstance(of_one, int) else 1
        if at_a_time >= last - first:
            made = jax.vmap(of_row)(given)
        else:
            made = jax.lax.map(of_row, given, batch_size=at_a_time)
        return jnp.pad(made, ((0, 0),) * 3 + ((0, cols - cols_seen),))

    made = [of_part(*part) for part in parts]
    mass = made[0] if len(made) == 1 else jnp.concatenate(made)
    return [mass.transpose(1, 2, 0, 3).reshape(*leading, heads, rows, cols)]


def _nearness(
    places: Any, distance: Any, of_first: Any, first: Any, pieces: int
) -> jax.Array:
    """What is added to scores: float32 `[B, N, P, pieces]`."""
    keys = jnp.arange(pieces, dtype=jnp.int32)
    classes = class_of(keys - places[..., None])
    added = jax.vmap(lambda table, of: table[:, of])(distance, classes)
    is_first = (keys == jnp.maximum(first, 0)).astype(jnp.float32)[:, None]
    return added + of_first[..., None, None] * is_first


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
