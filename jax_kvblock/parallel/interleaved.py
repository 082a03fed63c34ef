"""Sequences that are dealt out to devices block by block: a device's part of a call.

A device's keys of a sequence do not lie at contiguous positions. So who sees which, by
position, becomes `ranges` of the device's own keys by number, and bits of a tree of
drafts are picked for those of the drafts that it holds.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention.config import OPEN
from jax_kvblock.paged.call import Paged, PagedConfig

MOST = 2**31 - 1


class Deal(NamedTuple):
    """Blocks of `block_size` keys, dealt out to `size` devices; `own` is this one."""

    block_size: int
    size: int
    own: jax.Array

    def local_len(self, keys: jax.Array) -> jax.Array:
        """How many of so many first keys of a sequence the device holds."""
        rounds, rest = jnp.divmod(jnp.maximum(keys, 0), self.size * self.block_size)
        part = jnp.clip(rest - self.own * self.block_size, 0, self.block_size)
        return rounds * self.block_size + part

    def position(self, number: jax.Array) -> jax.Array:
        """Where in its sequence the device's key of this number is."""
        block, place = jnp.divmod(number, self.block_size)
        return (block * self.size + self.own) * self.block_size + place

    def number(self, position: jax.Array) -> jax.Array:
        """Which of the device's keys is at a position; below 0 where none is."""
        block, place = jnp.divmod(position, self.block_size)
        own = block % self.size == self.own
        return jnp.where(own, block // self.size * self.block_size + place, -1)


class _Queries(NamedTuple):
    """Of each row of q, int32 `[C, R]`, what its sequence is; anything for nobody's.

    Attributes:
      position: where in the sequence the row is.
      later: how many queries of its sequence come after it.
      kv_len, q_len: of the sequence.
    """

    position: jax.Array
    later: jax.Array
    kv_len: jax.Array
    q_len: jax.Array


def sequence_of_rows(starts: jax.Array, rows: int) -> jax.Array:
    """Whose each of so many rows is, int32 `[C, R]`, by starts `[C, S + 1]`; or −1."""
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    # Compared with all, in one step: a search would be a loop of launches.
    number = (row >= starts[:, None, 1:]).sum(-1, dtype=jnp.int32)
    falls = (starts[:, 1:] < starts[:, :-1]).any(1, keepdims=True)
    there = (row[:, 0] >= starts[:, :1]) & (number < starts.shape[1] - 1) & ~falls
    return jnp.where(there, number, -1)


def local_call(config: PagedConfig, x: Paged, deal: Deal) -> tuple[PagedConfig, Paged]:
    """A device's part of a call of whole sequences over its own pages and tables."""
    scores = config.scores
    several = x.q.shape[1] > 1  # one query is its sequence's last position
    bounded = scores.window_left != OPEN or (scores.window_right != OPEN and several)
    some = x.kv_lens.shape[0] > 0
    # A length below 0 stays one, for `debug_checks`.
    local = x._replace(kv_lens=jnp.minimum(x.kv_lens, deal.local_len(x.kv_lens)))
    if x.sinks is not None:  # they count once
        local = local._replace(sinks=jnp.where(deal.own == 0, x.sinks, -jnp.inf))
    if some and (bounded or x.ranges is not None or x.tree_mask is not None):
        of = _queries(x, deal)
        local = local._replace(ranges=_ranges(config, x, of, deal))
        if x.tree_mask is not None:
            local = local._replace(tree_mask=_tree_mask(x, of, deal))
    scores = dataclasses.replace(scores, window_left=OPEN, window_right=OPEN)
    return dataclasses.replace(config, scores=scores), local


def _queries(x: Paged, deal: Deal) -> _Queries:
    calls, rows = x.q.shape[:2]
    starts = x.query_start
    if starts is None:
        lens = jnp.full(calls, rows, jnp.int32) if x.q_lens is None else x.q_lens
        starts = jnp.stack([jnp.zeros_like(lens), lens], 1)
    starts = jnp.clip(starts, 0, rows)
    sequence = sequence_of_rows(starts, rows)

    def of_each(a: jax.Array) -> jax.Array:
        return jnp.take_along_axis(a, sequence, 1, mode="clip")

    most = min(deal.size * x.tables.shape[1] * deal.block_size, MOST)
    kv_len = of_each(jnp.clip(x.kv_lens, 0, most).reshape(calls, -1))
    first, end = of_each(starts[:, :-1]), of_each(starts[:, 1:])
    later = end - 1 - jnp.arange(rows, dtype=jnp.int32)
    return _Queries(kv_len - 1 - later, later, kv_len, end - first)


def _ranges(config: PagedConfig, x: Paged, of: _Queries, deal: Deal) -> jax.Array:
    """The device's keys that each row sees, int32 `[C, R, 2]`, by number."""
    left, right = config.scores.window_left, config.scores.window_right
    at = jnp.maximum(of.position, 0)
    first = jnp.zeros_like(at) if left == OPEN else at - jnp.minimum(left, at)
    end = of.kv_len
    if right != OPEN:
        end = of.position + 1 + jnp.minimum(right, of.later)
    if x.ranges is not None:
        first = jnp.maximum(first, x.ranges[..., 0])
        end = jnp.minimum(end, x.ranges[..., 1])
    return deal.local_len(jnp.stack([first, end], -1))


def _tree_mask(x: Paged, of: _Queries, deal: Deal) -> jax.Array:
    """Which of the device's last q_len keys each row sees, int32 `[C, R, words]`.

    Bit j is that of the device's key `local_len - q_len + j`, as `paged_attention` has
    it: draft j of the whole sequence or an earlier one, or no draft at all.
    """
    assert x.tree_mask is not None
    given = x.tree_mask.shape[-1]
    words = given if x.query_start is not None else -(-x.q.shape[1] // 32)
    bit = jnp.arange(32 * words, dtype=jnp.int32)
    kv_len, q_len = of.kv_len[..., None], of.q_len[..., None]
    number = deal.local_len(kv_len) - q_len + bit
    draft = deal.position(number) - (kv_len - q_len)
    word = jnp.take_along_axis(x.tree_mask, draft >> 5, 2, mode="clip")
    masked = (draft >= 0) & (draft < 32 * given) & (q_len <= 32 * words)
    bits = jnp.where(masked, word >> (draft & 31) & 1, 1) << (bit & 31)
    return bits.reshape(*bits.shape[:2], words, 32).sum(-1, dtype=jnp.int32)
