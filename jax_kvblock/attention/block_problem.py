"""A call as the loops over blocks see it: padded to whole blocks, labelled, listed.

Every mask comes down to one list: `visits` says for each block of queries which blocks
of keys it can see, and the loops walk that list, so blocks that are masked whole cost
nothing. Within a block, positions and labels decide: a query attends to a key when
their labels (sequence, segment) are equal and the key's position is in its window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import dropout
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    Sizes,
    accumulator,
    row_of_each,
    sizes_of,
)
from jax_kvblock.attention.dense import NOT_LISTED, tile_map, window_of

# Of keys, and again of values, a step with few queries holds about this much. On two
# Xeon cores with 2 MiB of second-level cache each 256 keys of 8 heads of 64 in float32
# were the best.
_STEP_BYTES = 2**19


class Labels(NamedTuple):
    """Where queries or keys stand: int32 `[B, length]` each."""

    first: jax.Array  # the keys that a query's window begins and ends with; a key's
    last: jax.Array  # own position, twice
    owner: jax.Array  # the sequence of a packed row; 0 elsewhere
    segment: jax.Array
    valid: jax.Array  # bool: a real row, not padding
    used: jax.Array  # bool: valid, and its sequence has rows on the other side


class Problem(NamedTuple):
    """A call as the loops see it: padded to whole blocks, heads grouped."""

    size: Sizes  # of one padded batch member
    block_q: int
    block_kv: int
    q: jax.Array  # [B, N, T, D]; grouped, XLA would copy it before a loop
    k: Any  # [B, K, S, D]; not of few queries, nor v
    v: Any  # [B, K, S, E]
    bias: Any  # [b, n, T, S], or None
    q_labels: Labels
    kv_labels: Labels
    listed: Any  # bool [b, n, T / block_q, S / block_kv], or None
    tiles: Any = None  # dense.tile_map, shaped alike
    masks: Any = None  # the bits of partial tiles, or None where all are full
    keys_on_left: bool = False  # of the product of queries and keys
    seen: Any = None  # bool [B, T, S], of the only block, beside what labels say
    dropout: Any = None  # dropout.Parts, or None

    @property
    def groups(self) -> tuple[int, int, int]:
        """B, K and G."""
        return self.q.shape[0], self.size.num_kv_heads, self.size.group

    def query_block(self, a: Any, i: Any) -> Any:
        """Block i of `[B, N, T, ...]` as `[B, K, G, block_q, ...]`."""
        a = block_of(a, i, self.block_q, 2)
        return a.reshape(*self.groups, *a.shape[2:])


def block_of(a: Any, index: Any, size: int, axis: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(a, index * size, size, axis)


def _block_size(length: int, most: int) -> int:
    """At most `most`, and little padding for short arrays."""
    return most if length >= most else max(8, -(-length // 8) * 8)


def pad(a: Any, axis: int, length: int, value: Any = 0) -> Any:
    missing = length - a.shape[axis]
    if not missing:
        return a
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, missing)
    return jnp.pad(a, widths, constant_values=value)


def default_blocks(platform: str | None) -> tuple[int, int]:
    """(block_q, block_kv) for long sequences.

    A CPU likes scores that stay in its
    second-level cache: 128 x 256 took 0.4 to 0.9 of the time of 256 x 512 (two EPYC
    cores, T = S = 512 and 2048, head dim 64). Elsewhere each block is a handful of
    kernel launches, so there are fewer of them.
    """
    return (128, 256) if platform == "cpu" else (256, 512)


def block_sizes(
    config: AttentionConfig, size: Sizes, platform: str | None
) -> tuple[int, int]:
    """(block_q, block_kv) of a call: those of its tile lists, its own, or defaults."""
    block_q, block_kv = default_blocks(platform)
    return (
        config.block_q or _block_size(size.q_len, config.xla_block_q or block_q),
        config.block_kv or _block_size(size.kv_len, config.xla_block_kv or block_kv),
    )


def has_few_queries(config: AttentionConfig, x: Operands, platform: str | None) -> bool:
    """Whether all queries are one block, and keys are many more, on a CPU.

    Tile lists speak of whole blocks of queries. With about as many queries as keys in a
    block, what is copied does not matter, and `forward` is a little faster.
    """
    size = sizes_of(config, x)
    if platform != "cpu" or x.tile_indices is not None or 0 in (*x.q.shape, *x.v.shape):
        return False
    if config.dropout:
        return False
    most, _ = default_blocks(platform)
    few = size.q_len <= (config.xla_block_q or most)
    many_keys = size.kv_len > keys_of_a_step(config, x.q.dtype, size)
    return few and (many_keys or size.kv_len >= 32 * size.q_len)


def keys_on_left(size: Sizes) -> bool:
    """Of few queries: whether the scores take less to lay out anew than the keys."""
    return 4 * size.group * size.q_len <= size.head_dim


def keys_of_a_step(config: AttentionConfig, dtype: Any, size: Sizes) -> int:
    """With few queries: a power of two from 256 to 1024, unless the caller says."""
    width = accumulator(dtype).itemsize
    of_a_key = width * size.num_kv_heads * max(size.head_dim, size.value_dim)
    most = min(max(_STEP_BYTES // of_a_key, 256), 1024)
    return config.xla_block_kv or 1 << (most.bit_length() - 1)


def filled(a: Any, length: int, labels: Labels, some: bool) -> Any:
    """`[B, length, heads, D]` in whole blocks; `some` of the rows may not be read.

    What nobody may read may hold NaN: it is zeroed on the way. Without such rows this
    is the array itself, not a copy.
    """
    if length == a.shape[1] and not some:
        return a
    return jnp.where(labels.used[..., None, None], pad(a, 1, length), 0)


def problem_of(
    config: AttentionConfig, x: Operands, compute: Any, platform: str | None
) -> Problem:
    size = sizes_of(config, x)
    on_left = has_few_queries(config, x, platform) and keys_on_left(size)
    if config.packed:
        x = x._replace(q=x.q[None], k=x.k[None], v=x.v[None])
    batch = x.q.shape[0]
    block_q, block_kv = block_sizes(config, size, platform)
    t = max(1, -(-size.q_len // block_q)) * block_q
    s = max(1, -(-size.kv_len // block_kv)) * block_kv

    q_labels, kv_labels = labels_of(config, x, size, batch, t, s)
    compute = compute or x.q.dtype
    packed = config.packed
    q = filled(x.q, t, q_labels, packed or x.q_lens is not None).astype(compute)
    some_keys = packed or x.kv_lens is not None
    k_all = filled(x.k, s, kv_labels, some_keys).astype(compute)
    v_all = filled(x.v, s, kv_labels, some_keys).astype(compute)
    listed = tiles = None
    if x.tile_indices is not None:
        tiles = tile_map(config, x, size.kv_len)
        # An empty array still has one block, of padding.
        tiles = pad(tiles, 2, t // block_q, NOT_LISTED)
        tiles = pad(tiles, 3, s // block_kv, NOT_LISTED)
        listed = tiles != NOT_LISTED
    bias = None
    if x.bias is not None:
        bias = pad(pad(x.bias, 2, t), 3, s)
    return Problem(
        size,
        block_q,
        block_kv,
        jnp.moveaxis(q, 1, 2),
        jnp.moveaxis(k_all, 1, 2),
        jnp.moveaxis(v_all, 1, 2),
        bias,
        q_labels,
        kv_labels,
        listed,
        tiles,
        x.tile_masks,
        keys_on_left=on_left,
        dropout=_dropout(config, x, size, q_labels, kv_labels),
    )


def _dropout(
    config: AttentionConfig, x: Operands, size: Sizes, q: Labels, kv: Labels
) -> dropout.Parts | None:
    """What blocks of pairs need to know which of them are kept."""
    if not config.dropout:
        return None
    padded = size._replace(q_len=q.owner.shape[1], kv_len=kv.owner.shape[1])
    return dropout.parts_of(config, x, padded, q.owner, kv.owner)


def labels_of(
    config: AttentionConfig, x: Operands, size: Sizes, batch: int, t: int, s: int
) -> tuple[Labels, Labels]:
    def side(
        length: int, padded: int, cu: Any, other: Any, lens: Any, segments: Any
    ) -> Labels:
        index = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), (batch, padded))
        valid = index < length
        owner = jnp.zeros_like(index)
        position = index
        if cu is not None:
            owner = jnp.searchsorted(cu, index, side="right").astype(jnp.int32) - 1
            valid &= (owner >= 0) & (owner < size.batch)
            owner = jnp.clip(owner, 0, size.batch - 1)
            position = index - cu[owner]
        if lens is not None:
            valid &= index < lens[:, None]
        used = valid
        if cu is not None:
            used = valid & (other[owner + 1] > other[owner])
        segment = (
            jnp.zeros_like(index) if segments is None else pad(segments, 1, padded)
        )
        return Labels(position, position, owner, segment, valid, used)

    q = side(size.q_len, t, x.cu_q, x.cu_kv, x.q_lens, x.q_segments)
    kv = side(size.kv_len, s, x.cu_kv, x.cu_q, x.kv_lens, x.kv_segments)
    shift = jnp.zeros((), jnp.int32)
    if x.shift is not None:
        shift = x.shift[q.owner] if config.packed else x.shift[:, None]
    first, last = window_of(config, q.first, shift)
    return q._replace(first=first, last=last), kv


def visits(
    config: AttentionConfig, p: Problem, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Which blocks each block visits: indices `[rows, blocks]` and counts `[rows]`.

    Rows are blocks of queries and visit blocks of keys, or, transposed, the reverse. A
    block is visited when some batch member's ranges of positions, sequences and
    segments meet. Exact for one segment a block, and never too little.
    """
    q = _ranges(p.q_labels, p.block_q)
    kv = _ranges(p.kv_labels, p.block_kv)

    def meet(first: str, last: str) -> Any:
        """Where the ranges [first, last] of queries and keys meet."""
        low, high = q[first][0], q[last][1]
        return (kv[last][1][:, None, :] >= low[:, :, None]) & (
            kv[first][0][:, None, :] <= high[:, :, None]
        )

    seen = meet("owner", "owner") & meet("segment", "segment") & meet("first", "last")
    if p.listed is not None:
        seen &= row_of_each(p.listed.any(1), p.q.shape[0])
    seen = seen.any(0)
    if transposed:
        seen = seen.T
    # A stable sort puts the visited ones first, in order.
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32)
    return order, seen.sum(1, dtype=jnp.int32)


def _ranges(labels: Labels, block: int) -> dict[str, tuple[Any, Any]]:
    """Smallest and largest of each label over the valid rows of each block."""

    def range_of(values: Any) -> tuple[Any, Any]:
        shape = (values.shape[0], values.shape[1] // block, block)
        valid = labels.valid.reshape(shape)
        low = jnp.where(valid, values.reshape(shape), 2**31 - 1).min(-1)
        high = jnp.where(valid, values.reshape(shape), -(2**31)).max(-1)
        return low, high

    names = ("first", "last", "owner", "segment")
    return {name: range_of(getattr(labels, name)) for name in names}
