"""A gate that learns which tiles attention needs, and the selector that asks it.

A tile of queries and a tile of keys are each pooled to three vectors a head: their
mean, their largest and their smallest numbers, each brought to a mean square of 1, and
a one beside them. A linear map of each, head by head, and a product of the two, is a
tile's score; what it is next to says more: a head has a score for each distance and for
the first tile. A softmax over a row's tiles makes it a share of attention.

    q [B, T, N, D] -> pooled [B, R, N, F] -> [B, N, R, G]       F = 3 D + 1
    k [B, S, K, D] -> pooled [B, C, K, F] -> [B, K, C, G]       product [B, N, R, C]

Without that norm tiles of many different vectors, whose mean is short, lose to tiles of
few, whose products are long whatever they hold.

In a mean over 128 keys a single one drowns. So a gate may be one of pieces, some
queries or keys each: it is trained as one of tiles of that size, and a tile's share is
the sum over its pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import check_positive
from jax_kvblock.sparse.arguments import key_of
from jax_kvblock.sparse.grid import Grid, running_count
from jax_kvblock.sparse.pieces import (
    Nearness,
    check_side,
    pool_pieces,
    tile_shares,
)
from jax_kvblock.sparse.plain import DISTANCES, class_of
from jax_kvblock.sparse.scored import ScoredSelector

# Of the first weights: enough to tell them apart.
NOISE = 1e-3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Gate:
    """A gate's parameters, a pytree: `init_gate` makes one, `train_gate` trains it.

    Attributes:
      q: float32 `[N, 3 D + 1, G]`, of pooled queries.
      k: float32 `[K, 3 D + 1, G]`, of pooled keys.
      distance: float32 `[N, 32]`, a score by how many tiles lie between, in steps that
        grow with it.
      first: float32 `[N]`, a score of the first tile of keys.
    """

    q: jax.Array
    k: jax.Array
    distance: jax.Array
    first: jax.Array

    def __eq__(self, other: object) -> bool:
        """Whether all numbers are the same. A gate has no hash: it holds arrays."""
        if not isinstance(other, Gate):
            return NotImplemented
        fields = [field.name for field in dataclasses.fields(self)]
        both = [(getattr(self, name), getattr(other, name)) for name in fields]
        return all(a is b or np.array_equal(a, b) for a, b in both)


def init_gate(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    gate_dim: int | None = None,
    key: jax.Array | None = None,
) -> Gate:
    """A gate that has learned nothing yet.

    It begins as the product of mean queries and mean keys, but for their lengths: so
    training starts from a selector that is better than chance.

    Args:
      num_heads, num_kv_heads, head_dim: N, K and D.
      gate_dim: G, D unless given.
      key: for the weights, `jax.random.key(0)` unless given.

    Raises:
      TypeError, ValueError: sizes that are no positive integers, or K does not divide
        N; a key that is none.

    Example:
      >>> init_gate(8, 2, 64).q.shape
      (8, 193, 64)
    """
    where = "init_gate"
    n, kv, d = check_positive(
        where, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if n % kv:
        raise ValueError(
            f"{where}: num_kv_heads must divide num_heads, {n}, got {kv}; every key "
            "head serves as many query heads"
        )
    (g,) = check_positive(where, gate_dim=d if gate_dim is None else gate_dim)
    keys = jax.random.split(key_of(where, key), 3)
    start = jnp.eye(d, dtype=jnp.float32)
    if g != d:  # a random projection, of both sides, keeps products on average
        start = jax.random.normal(keys[0], (d, g), jnp.float32) / np.sqrt(g)
    start = jnp.pad(start, ((0, 2 * d + 1), (0, 0)))

    def draw(key: jax.Array, heads: int) -> jax.Array:
        noise = jax.random.normal(key, (heads, 3 * d + 1, g), jnp.float32)
        return start + NOISE * noise

    return Gate(
        draw(keys[1], n),
        draw(keys[2], kv),
        jnp.zeros((n, DISTANCES), jnp.float32),
        jnp.zeros(n, jnp.float32),
    )


def pooled(x: jax.Array, end: Any, block: int, tiles: int) -> jax.Array:
    """Mean, largest and smallest of each tile: float32 `[B, tiles, H, 3 D]`.

    Rows from `end` `[B|1, 1, 1]` on do not count; a tile without rows is zeros. Each of
    the three has a mean square of 1, whatever the tile holds: of a tile of many
    different vectors the mean is short, and the extremes of any are long.
    """
    return pool_pieces(x, end, block, tiles, "normed")


def _mapped(vectors: jax.Array, weights: jax.Array) -> jax.Array:
    """Pooled vectors `[B, tiles, H, 3 D]`, and a one beside each, by `[H, 3 D + 1, G]`.

    The one is added by itself: with it rows would have an odd width, which products on
    a GPU are slow at.
    """
    products = jnp.einsum("bthf,hfg->bthg", vectors, weights[:, :-1])
    return products + weights[:, -1]


def distance_class(grid: Grid) -> Any:
    """Which score of `Gate.distance` a pair of tiles has, int32 `[B|1, 1, R, C]`."""
    cols = np.arange(grid.cols, dtype=np.int32)
    return class_of(jnp.asarray(cols - grid.places(), jnp.int32))


def gate_logits(
    gate: Gate, q: jax.Array, k: jax.Array, grid: Grid, scale: float
) -> jax.Array:
    """Scores of tiles, float32 `[B, N, R, C]`, −inf where the mask does not visit."""
    q_end, kv_end = grid.ends()
    queries = pooled(q, q_end, grid.block_q, grid.rows)
    keys = pooled(k, kv_end, grid.block_kv, grid.cols)
    queries, keys = _mapped(queries, gate.q), _mapped(keys, gate.k)
    batch, rows, heads, _ = queries.shape
    grouped = queries.reshape(batch, rows, keys.shape[2], -1, queries.shape[3])
    logits = jnp.einsum("brkhg,bckg->bkhrc", grouped, keys) * scale
    logits = logits.reshape(batch, heads, *logits.shape[3:])
    visible = grid.visible()
    near = jnp.moveaxis(gate.distance[:, distance_class(grid)[:, 0]], 0, 1)
    first = visible & (running_count(visible) == 1)
    first = gate.first[:, None, None] * first.astype(np.float32)
    return jnp.where(visible, logits + near + first, -jnp.inf)


def shares(logits: jax.Array) -> jax.Array:
    """A softmax over the last axis; zeros where nothing is visible."""
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def gate_mass(
    gate: Gate, q: jax.Array, k: jax.Array, grid: Grid, scale: float, piece: int
) -> jax.Array:
    """Each tile's share of its row, float32 `[B, N, R, C]`: a softmax of the logits.

    Those are of tiles of `piece` × `piece`, of which only some are in memory at once.
    """
    q_end, kv_end = grid.ends()
    per_q, per_kv = grid.block_q // piece, grid.block_kv // piece
    queries = pooled(q, q_end, piece, grid.rows * per_q)
    keys = pooled(k, kv_end, piece, grid.cols * per_kv)
    queries, keys = _mapped(queries, gate.q), _mapped(keys, gate.k)
    nearness = Nearness(gate.distance, gate.first)
    return tile_shares(queries, keys, grid, piece, scale, nearness)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedGate(ScoredSelector):
    """Tiles by a gate that was trained on the model's own attention (S2's LEARNED).

    Attributes:
      gate: a `Gate` for these heads and this head dim, trained with these tiles, or
        with tiles of `piece` × `piece`.
      piece: the side of the pieces that the gate knows, a divisor of both block sizes,
        or None where it knows tiles. Small ones see more and cost more.

    Example:
      >>> size = {"block_q": 32, "block_kv": 32}
      >>> gate, losses = train_gate(init_gate(8, 2, 64), batches, causal=True, **size)
      >>> selector = LearnedGate(gate, piece=32, sparsity_ratio=0.9)

    Source: Gao et al., SeerAttention (arXiv:2410.13276). Here pooled vectors have a
    norm, distances scores of their own in place of a rotary embedding, and pieces may
    be smaller than tiles.
    """

    gate: Gate = dataclasses.field(kw_only=False)
    piece: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = (self.block_q, self.block_kv)
        if self.piece is not None:
            check_side(self.name, "piece", self.piece, blocks)

    def mass(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> jax.Array:
        check_gate(self.name, self.gate, q, k)
        if self.piece is not None:
            return gate_mass(self.gate, q, k, grid, scale, self.piece)
        return shares(gate_logits(self.gate, q, k, grid, scale))


def check_gate(where: str, gate: Any, q: jax.Array, k: jax.Array) -> None:
    """A gate for these heads."""
    if not isinstance(gate, Gate):
        raise TypeError(
            f"{where}: gate must be a Gate, got {type(gate).__name__}; init_gate "
            "makes one"
        )
    (n, features, _), kv = gate.q.shape, gate.k.shape[0]
    heads, kv_heads, dim = q.shape[2], k.shape[2], q.shape[3]
    if (n, kv, features) != (heads, kv_heads, 3 * dim + 1):
        fix = f"init_gate({heads}, {kv_heads}, {dim}) makes one"
        if features == 3 * dim + 1 and n > heads and n * kv_heads == kv * heads:
            fix += (
                "; one for more heads goes into a shard_map over heads with its arrays "
                "cut as the heads are: a PartitionSpec of their axis in in_specs"
            )
        raise ValueError(
            f"{where}: gate must be one for {heads} heads on {kv_heads} of {dim}, got "
            f"one for {n} on {kv} of {features // 3}; {fix}"
        )
