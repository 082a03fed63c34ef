"""Which tiles of keys a tile of queries can see at all: what selectors choose from.

A grid whose sizes and offsets are Python integers lies on the host, and so does all
that follows from it, in NumPy. Lengths, segments and traced offsets are operands; then
the same lines run in jax.numpy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_FIRST, _LAST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The tiles of a call, and who sees whom.

    Attributes:
      q_len, kv_len: T and S.
      block_q, block_kv: the tiles' sides.
      causal: a query at i sees keys up to i + shift.
      shift: q_offset - kv_offset, an integer, or int32 `[]` or `[B]`.
      left, right: a window: a query at i sees keys from i + shift - left to i + shift +
        right. None is no bound, but for a causal mask's.
      q_lens, kv_lens: int32 `[B]`, or None.
      q_segments, kv_segments: int32 `[B, T]` and `[B, S]`, or None.
      aligned: each query's own position is known to hold a key, of its segment.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    causal: bool = False
    shift: Any = 0
    left: int | None = None
    right: int | None = None
    q_lens: Any = None
    kv_lens: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    aligned: bool = False

    @property
    def rows(self) -> int:
        """Tiles of queries."""
        return -(-self.q_len // self.block_q)

    @property
    def cols(self) -> int:
        """Tiles of keys."""
        return -(-self.kv_len // self.block_kv)

    @property
    def most_own(self) -> int:
        """How many tiles of keys the positions of a tile of queries may lie in."""
        if not isinstance(self.shift, int):
            return min(self.cols, (self.block_q - 1) // self.block_kv + 2)
        first = np.arange(self.rows) * self.block_q + self.shift
        last = np.minimum(first + self.block_q, self.q_len + self.shift) - 1
        most = (last // self.block_kv - first // self.block_kv + 1).max(initial=1)
        return min(self.cols, int(most))

    @property
    def most_always(self) -> int:
        """How many tiles `own` gives a row at most, whatever the segments are."""
        if self.q_segments is None or self.aligned:
            return self.most_own
        return min(self.cols, self.most_own + min(self.block_q, self.q_len))

    @property
    def placed(self) -> bool:
        """Whether positions say who sees whom: under a causal mask or a window."""
        return self.causal or self.left is not None or self.right is not None

    @property
    def reach(self) -> int | None:
        """How far beyond its own position a query sees; None is no bound."""
        return 0 if self.causal else self.right

    @property
    def on_host(self) -> bool:
        operands = (self.q_lens, self.kv_lens, self.q_segments, self.kv_segments)
        return isinstance(self.shift, int) and all(x is None for x in operands)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a grid on the host is known by."""
        sizes = (self.q_len, self.kv_len, self.block_q, self.block_kv)
        return (*sizes, self.causal, self.shift, self.left, self.right)

    # What follows has shape [B|1, 1, ...], like tile lists of all heads.

    def ends(self) -> tuple[Any, Any]:
        """How many queries and keys there are, `[B|1, 1, 1]`."""
        return (
            self._within(self.q_lens, self.q_len),
            self._within(self.kv_lens, self.kv_len),
        )

    def _within(self, lens: Any, length: int) -> Any:
        if lens is None:
            return np.full((1, 1, 1), length, np.int32)
        return jnp.clip(lens, 0, length)[:, None, None]

    def positions(self) -> tuple[Any, Any]:
        """Of the first and last real query of each tile, among keys: `[B|1, 1, R]`."""
        shift = self.shift
        if not isinstance(shift, int):
            shift = jnp.reshape(shift, (-1, 1, 1))
        xp = np if self.on_host else jnp
        first = np.arange(self.rows, dtype=np.int32) * self.block_q
        last = xp.minimum(first + self.block_q, self.ends()[0]) - 1
        return first + shift, last + shift

    def visible(self) -> Any:
        """Which tiles hold a pair that attends: bool `[B|1, 1, R, C]`.

        Of segments the smallest and the largest id in a tile are looked at, as the
        kernels do: exact where ids do not fall, and never too little.
        """
        q_end, kv_end = self.ends()
        rows = np.arange(self.rows, dtype=np.int32) * self.block_q
        cols = np.arange(self.cols, dtype=np.int32) * self.block_kv
        seen = (rows < q_end)[..., None] & (cols < kv_end)[..., None, :]
        first, last = self.positions()
        if self.reach is not None:
            seen = seen & (cols <= last[..., None] + self.reach)
        if self.left is not None:
            ends: Any = np.minimum(cols + self.block_kv, self.kv_len)
            if self.kv_lens is not None:
                ends = jnp.minimum(ends, kv_end)
            seen = seen & (ends[..., None, :] > first[..., None] - self.left)
        if self.q_segments is not None:
            (q_low, q_high), (low, high) = self.q_ranges(), self.kv_ranges()
            seen = seen & (q_high[..., None] >= low[..., None, :])
            seen = seen & (q_low[..., None] <= high[..., None, :])
        return seen

    def q_ranges(self) -> tuple[Any, Any]:
        """The smallest and the largest id of each tile of queries, `[B, 1, R]`."""
        return self._ranges(self.q_segments, self.ends()[0], self.block_q)

    def kv_ranges(self) -> tuple[Any, Any]:
        """The same of each tile of keys, `[B, 1, C]`."""
        return self._ranges(self.kv_segments, self.ends()[1], self.block_kv)

    def _ranges(self, ids: Any, end: Any, block: int) -> tuple[Any, Any]:
        length = ids.shape[1]
        ids = jnp.pad(ids, ((0, 0), (0, -length % block)))[:, None]
        real = np.arange(ids.shape[-1], dtype=np.int32) < end
        low, high = jnp.where(real, ids, _LAST), jnp.where(real, ids, _FIRST)
        low, high = (a.reshape(*a.shape[:2], -1, block) for a in (low, high))
        return low.min(-1), high.max(-1)

    def own(self, visible: Any) -> Any:
        """The tiles without which a row that attends may be left with nothing.

        Under a causal mask, a window or segments not every tile that a row of tiles
        visits holds a key for each of its queries. These do: the tiles of the queries'
        own positions, or of the keys next to them that they see.
        """
        if not self.placed and self.q_segments is None:
            return visible & False
        first, last = self.positions()
        if self.q_segments is None and (
            self.left is not None or self.right is not None
        ):
            # Queries beyond the keys see the nearest of them first.
            xp = np if self.on_host else jnp
            end = self.ends()[1] - 1
            first, last = (xp.clip(x, 0, xp.maximum(end, 0)) for x in (first, last))
        starts = np.arange(self.cols, dtype=np.int32) * self.block_kv
        ends = starts + self.block_kv
        own = visible & (ends > first[..., None]) & (starts <= last[..., None])
        if self.q_segments is None or self.aligned:
            return own
        nearest = self._nearest() & visible
        return own | nearest if self.causal else nearest

    def _nearest(self) -> Any:
        """The tile of the nearest key that each query sees, all of a row's: `[B, 1, R,
        C]`.

        Its own position's, or the last before it, or the first behind it.
        """
        batch = self.q_segments.shape[0]
        q_end, kv_end = self.ends()
        places = np.arange(self.kv_len, dtype=np.int32)
        # Keys by segment and position; what is beyond the length comes last of its own.
        real = jnp.where(places < kv_end[:, 0], places, _LAST)
        keys = (self.kv_segments, jnp.broadcast_to(real, (batch, self.kv_len)))
        ids, at = jax.lax.sort(keys, num_keys=2)
        mine = self.q_segments
        shift = jnp.reshape(jnp.asarray(self.shift, jnp.int32), (-1, 1))
        own = jnp.arange(self.q_len, dtype=jnp.int32) + shift
        own = jnp.broadcast_to(own, mine.shape)

        def entry(i: Any) -> tuple[Any, Any]:
            """Segment and position of the i-th of `ids`; none beyond."""
            inside = (i >= 0) & (i < self.kv_len)
            i = jnp.clip(i, 0, self.kv_len - 1)
            found = jnp.take_along_axis(ids, i, 1), jnp.take_along_axis(at, i, 1)
            return found[0], jnp.where(inside, found[1], _LAST)

        # How many come before (segment, own position), bit by bit.
        count = jnp.zeros_like(own)
        for bit in reversed(range(self.kv_len.bit_length())):
            more = count + (1 << bit)
            segment, place = entry(more - 1)
            less = (segment < mine) | ((segment == mine) & (place < own))
            count = jnp.where(less & (more <= self.kv_len), more, count)
        segment, behind = entry(count)
        ahead = _LAST if self.reach is None else own + self.reach
        is_behind = (segment == mine) & (behind < _LAST) & (behind <= ahead)
        segment, before = entry(count - 1)
        is_before = (segment == mine) & (before < _LAST)
        if self.left is not None:
            is_before = is_before & (before >= own - self.left)
        take_behind = is_behind & ((behind == own) | ~is_before)
        place = jnp.where(take_behind, behind, before)
        real_query = np.arange(self.q_len, dtype=np.int32) < q_end[:, 0]
        known = (take_behind | is_before) & real_query
        tile = jnp.where(known, place // self.block_kv, self.cols)
        missing = self.rows * self.block_q - self.q_len
        tile = jnp.pad(tile, ((0, 0), (0, missing)), constant_values=self.cols)
        return marked(tile.reshape(batch, 1, self.rows, -1), self.cols)

    def places(self) -> Any:
        """Where queries stand among tiles of keys, `[B|1, 1, R, 1]`, for distances.

        Without a causal mask or a window, queries spread over the keys as evenly as
        they lie.
        """
        if self.placed:
            first, last = self.positions()
            return (first + last)[..., None] // (2 * self.block_kv)
        rows = np.arange(self.rows, dtype=np.int32)[:, None]
        at = (2 * rows + 1) * self.cols // (2 * max(self.rows, 1))
        return at[None, None].astype(np.int32)


def array_module(a: Any) -> Any:
    """NumPy for what lies on the host, jax.numpy for anything else."""
    return np if isinstance(a, np.ndarray) else jnp


def marked(at: Any, cols: int) -> Any:
    """Which of `cols` places a row names: bool `[..., cols]` of int32 `[..., entries]`.

    What is not one of them is not looked at.
    """
    rows = jnp.where(at >= 0, at, cols).reshape(-1, at.shape[-1])
    # Made of each row, so that on an explicit mesh it lies where the row does.
    put = jax.vmap(lambda at: jnp.zeros(cols, jnp.bool_).at[at].set(True, mode="drop"))
    return put(rows).reshape(*at.shape[:-1], cols)


def running_count(kept: Any) -> Any:
    """How many are true up to and with each place of the last axis, int32.

    On a device as two products with triangles, which a GPU is faster at than at a scan:
    zeros and ones are exact in every precision, and so are their sums in float32.
    """
    if isinstance(kept, np.ndarray):
        return np.cumsum(kept, axis=-1, dtype=np.int32)
    length = kept.shape[-1]
    piece = min(128, max(length, 1))
    pieces = -(-length // piece)
    widths = [(0, 0)] * (kept.ndim - 1) + [(0, pieces * piece - length)]
    cut = jnp.pad(kept, widths).reshape(*kept.shape[:-1], pieces, piece)
    # `upto[i, j]` is 1 where i comes no later than j.
    upto = np.triu(np.ones((piece, piece), np.float32))
    inside = jnp.matmul(cut.astype(jnp.float32), upto)
    totals = inside[..., -1]
    before = jnp.matmul(totals, np.triu(np.ones((pieces, pieces), np.float32), 1))
    count = (inside + before[..., None]).reshape(*kept.shape[:-1], -1)
    return jax.lax.convert_element_type(count[..., :length], jnp.int32)
