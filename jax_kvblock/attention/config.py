"""The static side of an attention call, its operands, and their axes.

Everything that a compiled program is specialised for is in `AttentionConfig`;
everything that may change from call to call is an operand.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

OPEN = -1  # a window side without a bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """The KV tiles that each query tile visits; no other tile is loaded.

    Attributes:
      indices: int32 `[B|1, N|1, ceil(T / block_q), max_tiles]`. Row `i` lists the KV
        tiles that query tile `i` visits: tile `j` holds the keys from `j * block_kv`
        to `(j + 1) * block_kv`. A tile comes at most once in a row, in any order;
        entries outside the KV tiles (−1, say) are skipped. A tile that comes twice is a
        ValueError where the values lie on the host; elsewhere "xla" counts it
        once and the CUDA kernels may count its keys twice.
      counts: int32 `[B|1, N|1, ceil(T / block_q)]`. How many entries of each row
        count, all of them where it is larger; the rest is not looked at.
      block_q, block_kv: the tiles' sizes, integers that are multiples of 128.
    """

    indices: jax.Array
    counts: jax.Array
    block_q: int = dataclasses.field(default=128, metadata={"static": True})
    block_kv: int = dataclasses.field(default=128, metadata={"static": True})


# Exported functions that take or return tile lists name the class so.
jax.export.register_pytree_node_serialization(
    AttentionTiles,
    serialized_name="jax_kvblock.AttentionTiles",
    serialize_auxdata=lambda sizes: json.dumps(sizes, default=operator.index).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
    from_children=lambda sizes, lists: AttentionTiles(*lists, *sizes),
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
    implementation: str | None = None
    kernels: str = ""  # the only kernels that None tries; "" for the best


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


# One letter an axis. B batch, T queries, S keys, N query heads, K key heads, D and E
# the head dims of keys and values, i and m the rows and entries of tile lists. A dim of
# an array may be 1 where a bias, sinks or tiles are shared by the batch (b) or the
# heads (n).
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
