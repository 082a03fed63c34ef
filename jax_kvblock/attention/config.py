"""The static side of an attention call, its operands, and their axes.

Everything that a compiled program is specialised for is in `AttentionConfig`;
everything that may change from call to call is an operand.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.mask_tiles import MaskFunction, tiles_of_mask
from jax_kvblock.attention.precision import Precision
from jax_kvblock.core.checks import to_jax
from jax_kvblock.core.types import ArrayIn

if TYPE_CHECKING:
    from jaxtyping import Bool

OPEN = -1  # a window side without a bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """The KV tiles that each query tile visits; no other tile is loaded.

    A tile that is visited is full, or partial: then bits say which of its queries
    attend to which of its keys. `from_mask` makes all of this of a mask.

    Attributes:
      indices: int32 `[B|1, N|1, ceil(T / block_q), max_tiles]`. Row `i` lists the KV
        tiles that query tile `i` visits: tile `j` holds the keys from `j * block_kv`
        to `(j + 1) * block_kv`. A tile comes at most once in a row, in any order;
        entries outside the KV tiles (−1, say) are skipped. A tile that comes twice is a
        ValueError where the values lie on the host and under `debug_checks`; elsewhere
        "xla" counts it once, and the CUDA kernels count its keys twice in out and lse,
        and once in gradients (in that of q twice if it is deterministic).
      counts: int32 `[B|1, N|1, ceil(T / block_q)]`. How many entries of each row
        count, all of them where it is larger; the rest is not looked at.
      block_q, block_kv: the tiles' sizes, integers that are multiples of 16 (of 128 for
        the CUDA kernels, and with `masks` at most 1024).
      partial: int32, shaped like `indices`, or None where all tiles are full. The row
        of each entry's bits in `masks`, or −1 for a full tile. A row from P on, or
        below −1, of an entry that counts is a ValueError where the values lie on the
        host; elsewhere from P on the tile is skipped, and below −1 it is full.
      masks: uint32 `[P, block_q, ceil(block_kv / 32)]`, or None: the bits of P partial
        tiles, which any number of entries may share. Query `r` of a tile attends to
        its key `32 * w + c` where bit `c` (of value `2 ** c`) of `masks[p, r, w]` is 1.
    """

    indices: jax.Array
    counts: jax.Array
    block_q: int = dataclasses.field(default=128, metadata={"static": True})
    block_kv: int = dataclasses.field(default=128, metadata={"static": True})
    partial: jax.Array | None = None
    masks: jax.Array | None = None

    @classmethod
    def from_mask(
        cls,
        mask: Bool[ArrayIn, "*heads T S"] | MaskFunction,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
        block_q: int = 128,
        block_kv: int = 128,
        max_tiles: int | None = None,
        max_masks: int | None = None,
    ) -> AttentionTiles:
        """The tiles of any mask: none where nobody attends, bits where some do.

        They are made on the host, once, and used under jit as an argument. Tiles that
        are alike share their bits: a causal diagonal is one entry of `masks`.

        Args:
          mask: bool `[T, S]` or `[B|1, N|1, T, S]`, True where a query attends; or a
            function of positions `mask(b, h, q, kv)` that gives such bools, for `b` and
            `h` integers (a batch member, a query head) and `q` int32 `[rows, 1]` and
            `kv` int32 `[1, keys]` NumPy arrays. It is called for a piece at a time, and
            for positions that exist alone: no array of T × S is ever made.
          q_len, kv_len: T and S, for a function.
          batch, heads: B and N, where a function's answer depends on `b` and `h`;
            without them it is called with 0, and the tiles serve all members and heads.
          block_q, block_kv: the tiles' sizes, multiples of 16 (of 128 for the CUDA
            kernels, and at most 1024 where some tiles are partial).
          max_tiles, max_masks: room for so many tiles in a list, and for so many
            partial tiles, so that masks of several batches have one shape, and do not
            recompile a program. None is what this mask needs.

        Returns:
          An `AttentionTiles` of JAX arrays, for calls of this T and S. `partial` and
          `masks` are None where no tile is partial and no `max_masks` is given.

        Raises:
          TypeError, ValueError: the mask is traced, or no bools; a size does not fit.

        Example:
          >>> document = np.array([0, 0, 0, 1, 1])
          >>> tiles = AttentionTiles.from_mask(
          ...     lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]),
          ...     q_len=5, kv_len=5)
          >>> tiles.counts.shape, tiles.masks.shape
          ((1, 1, 1), (1, 128, 4))
        """
        made = tiles_of_mask(
            "AttentionTiles.from_mask",
            mask,
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            heads=heads,
            block_q=block_q,
            block_kv=block_kv,
            max_tiles=max_tiles,
            max_masks=max_masks,
        )
        return cls(
            indices=to_jax(made.indices),
            counts=to_jax(made.counts),
            block_q=operator.index(block_q),
            block_kv=operator.index(block_kv),
            partial=None if made.partial is None else to_jax(made.partial),
            masks=None if made.masks is None else to_jax(made.masks),
        )


def _tiles_of_children(aux_data: Any, children: Sequence[Any]) -> AttentionTiles:
    """Tiles from what an export kept; an older one has no masks."""
    indices, counts, *bits = children
    return AttentionTiles(indices, counts, *aux_data, *bits)


# Exported functions that take or return tile lists name the class so.
jax.export.register_pytree_node_serialization(
    AttentionTiles,
    serialized_name="jax_kvblock.AttentionTiles",
    serialize_auxdata=lambda sizes: json.dumps(sizes, default=operator.index).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
    from_children=_tiles_of_children,
)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What is compiled in. A window side is −1 where it is open; causal: right is 0."""

    scale: float
    window_left: int = OPEN
    window_right: int = OPEN
    softcap: float = 0.0
    packed: bool = False
    block_q: int = 0  # of the tile lists; 0 without lists
    block_kv: int = 0
    xla_block_q: int = 0  # the blocks of "xla"; 0 for its own choice
    xla_block_kv: int = 0
    deterministic: bool = False
    precision: Precision = "highest"  # of products of float32
    implementation: str | None = None
    kernels: str = ""  # the only kernels that None tries; "" for the best
    where: str = "flash_attention"  # who was called, for messages
    shares_gpu: bool = False  # with kernels that take multiprocessors meanwhile
    dropout: int = 0  # of 128 probabilities, how many become 0; with dropout_keys


class Operands(NamedTuple):
    """The operands of a call, in the order of the primitives; None where absent."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sinks: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    shift: Any = None  # q_offset - kv_offset
    cu_q: Any = None
    cu_kv: Any = None
    tile_indices: Any = None
    tile_counts: Any = None
    tile_partial: Any = None
    tile_masks: Any = None
    q_scales: Any = None  # of 8 bits, float32: what q, k and v are multiplied by
    k_scales: Any = None
    v_scales: Any = None
    dropout_keys: Any = None  # uint32 (dropout.py)


# One letter an axis. B batch, T queries, S keys, N query heads, K key heads, D and E
# the head dims of keys and values, i and m the rows and entries of tile lists, p, r and
# w the partial tiles, their rows and words, t and s blocks of queries and keys, h the
# words of a key of dropout. A dim of an array may be 1 where a bias, sinks, tiles or
# scales are shared by the batch (b) or the heads (n).
AXES: dict[str, str] = {
    "q": "BTND",
    "k": "BSKD",
    "v": "BSKE",
    "bias": "bnTS",
    "sinks": "bN",
    "q_segments": "BT",
    "kv_segments": "BS",
    "q_lens": "B",
    "kv_lens": "B",
    "shift": "B",
    "tile_indices": "bnim",
    "tile_counts": "bni",
    "tile_partial": "bnim",
    "tile_masks": "prw",
    "q_scales": "bNt",
    "k_scales": "bKs",
    "v_scales": "bKs",
    "dropout_keys": "BNh",
    "o": "BTNE",
    "lse": "BNT",
}


class Sizes(NamedTuple):
    """The sizes of a call; packed calls have the totals as T and S."""

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.num_heads // self.num_kv_heads


def sizes_of(config: AttentionConfig, x: Operands) -> Sizes:
    if config.packed:
        (t, n, d), (s, k, e) = x.q.shape, x.v.shape
        return Sizes(x.cu_q.shape[0] - 1, t, s, n, k, d, e)
    (b, t, n, d), (_, s, k, e) = x.q.shape, x.v.shape
    return Sizes(b, t, s, n, k, d, e)


def result_dtype(x: Operands) -> Any:
    """What comes out: of 8 bits bfloat16."""
    return x.q.dtype if x.q_scales is None else jnp.dtype(jnp.bfloat16)


def members_of_a_row(batch: int, rows: int) -> int:
    """How many batch members share a row of a bias, sinks or tiles; none have none."""
    return batch // rows if rows else 0


def row_of_each(a: Any, batch: int) -> Any:
    """What members share, `[rows, ...]`, as `[batch, ...]`."""
    return jnp.repeat(a, members_of_a_row(batch, a.shape[0]), axis=0)


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def accumulator(dtype: Any) -> np.dtype:
    """What sums of floats of this dtype are made in.

    Not `jnp.promote_types`, which raises where promotion is strict.
    """
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
