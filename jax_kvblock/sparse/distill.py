"""The model's own map of tiles, and a gate that is trained to know it.

The model is frozen: queries and keys are data, and no gradient reaches them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_kvblock.core.checks import check_choice, check_positive, show, shown
from jax_kvblock.core.spmd import reshard
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.sparse.arguments import check_qk, grid_of, scale_of
from jax_kvblock.sparse.gate import Gate, check_gate, gate_logits
from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.selector import MaskOptions

if TYPE_CHECKING:
    from jaxtyping import Float

Pool = Literal["sum", "max"]
POOLS = ("sum", "max")


class Optimizer(Protocol):
    """What `train_gate` needs of an optax.GradientTransformation."""

    @property
    def init(self) -> Any: ...
    @property
    def update(self) -> Any: ...


def tile_mass(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    *,
    block_q: int = 128,
    block_kv: int = 128,
    scale: float | None = None,
    pool: Pool = "sum",
    **mask: Unpack[MaskOptions],
) -> Float[jax.Array, "B N rows cols"]:
    """How attention is spread over tiles: each tile's share of its row of tiles.

    It takes all of attention's first product, for one row of tiles and one key head at
    a time: `N / K` times block_q × S scores are all that is in memory.

    Args:
      q, k: `[B, T, N, D]` and `[B, S, K, D]`.
      block_q, block_kv: the tiles' sides, which may also be those of pieces of tiles.
      scale: of the scores, `1 / sqrt(D)` unless given.
      pool: "sum" is the mean over a tile's queries of the probability that lies in it;
        "max" takes its largest probability instead, so that a single pair counts.
      **mask: who attends to whom, as in `flash_attention`.

    Returns:
      float32 `[B, N, ceil(T / block_q), ceil(S / block_kv)]`. Rows of tiles sum to 1,
      or are zeros where nobody attends to anything. It has no gradient.

    Raises:
      TypeError, ValueError: shapes, dtypes or options do not fit.

    Example:
      >>> tile_mass(q, k, causal=True).sum(-1)  # ones
    """
    where = "tile_mass"
    check_positive(where, block_q=block_q, block_kv=block_kv)
    check_choice(where, "pool", pool, POOLS)
    q, k = jax.lax.stop_gradient(check_qk(where, q, k))
    sizes = (q.shape[0], q.shape[1], k.shape[1])
    grid = grid_of(where, sizes, (block_q, block_kv), **mask)
    return mass_of(q, k, grid, scale_of(where, scale, q.shape[3]), pool)


def mass_of(
    q: jax.Array, k: jax.Array, grid: Grid, scale: float, pool: str = "sum"
) -> jax.Array:
    """`tile_mass` of checked arguments.

    On an explicit mesh members are cut as the queries', and heads, which are walked,
    come together and are cut again.
    """
    batch, _, heads, dim = q.shape
    members, _, of_heads, _ = jax.typeof(q).sharding.spec
    q, k = (reshard(x, PartitionSpec(members, None, None, None)) for x in (q, k))
    kv_heads = k.shape[2]
    q = _whole(q, grid.rows * grid.block_q)
    k = _whole(k, grid.cols * grid.block_kv)
    q_end, kv_end = (jnp.asarray(end)[:, 0] for end in grid.ends())  # [B|1, 1]
    keys_at = jnp.arange(k.shape[1], dtype=jnp.int32)
    real_keys = keys_at < kv_end
    shift = jnp.reshape(jnp.asarray(grid.shift, jnp.int32), (-1, 1))
    ids = None
    if grid.q_segments is not None:
        ids = tuple(
            jnp.pad(x, ((0, 0), (0, length - x.shape[1])))
            for x, length in (
                (grid.q_segments, q.shape[1]),
                (grid.kv_segments, k.shape[1]),
            )
        )
    # Key heads and rows of tiles come first: they are what is walked.
    q = q.reshape(batch, grid.rows, grid.block_q, heads, dim)
    q = q.reshape(*q.shape[:3], kv_heads, heads // kv_heads, dim)
    q = q.transpose(3, 1, 0, 4, 2, 5)  # [K, R, B, G, block_q, D]
    k = k.transpose(2, 0, 1, 3)  # [K, B, S, D]

    def of_row(keys: jax.Array, of: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, row = of
        at = row * grid.block_q + jnp.arange(grid.block_q, dtype=jnp.int32)
        allowed = (at < q_end)[..., None] & real_keys[:, None]
        if grid.reach is not None:
            allowed = allowed & (keys_at <= (at + shift + grid.reach)[..., None])
        if grid.left is not None:
            allowed = allowed & (keys_at >= (at + shift - grid.left)[..., None])
        if ids is not None:
            start = row * grid.block_q
            mine = jax.lax.dynamic_slice_in_dim(ids[0], start, grid.block_q, 1)
            allowed = allowed & (mine[..., None] == ids[1][:, None])
        scores = jnp.einsum(
            "bgtd,bsd->bgts",
            queries,
            keys,
            preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jnp.where(allowed[:, None], scores * scale, -jnp.inf)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        p = weights / jnp.where(total > 0, total, 1)
        tiles = p.reshape(*p.shape[:-1], grid.cols, grid.block_kv)
        made = tiles.sum((2, 4)) if pool == "sum" else tiles.max((2, 4))
        whole = made.sum(-1, keepdims=True)
        return (made / jnp.where(whole > 0, whole, 1)).astype(jnp.float32)

    def of_head(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, keys = of
        rows = jnp.arange(grid.rows, dtype=jnp.int32)
        return jax.lax.map(functools.partial(of_row, keys), (queries, rows))

    made = jax.lax.map(of_head, (q, k))  # [K, R, B, G, C]
    made = made.transpose(2, 0, 3, 1, 4).reshape(batch, heads, grid.rows, grid.cols)
    return reshard(made, PartitionSpec(members, of_heads, None, None))


def _whole(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def gate_loss(
    gate: Gate,
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    *,
    block_q: int = 128,
    block_kv: int = 128,
    scale: float | None = None,
    pool: Pool = "sum",
    target: Float[ArrayIn, "B N rows cols"] | None = None,
    **mask: Unpack[MaskOptions],
) -> Float[jax.Array, ""]:
    """How far a gate is from the model's own map of tiles: KL(map ‖ gate), in nats.

    The mean over all rows of tiles that attend to anything. It is differentiable in the
    gate alone: q and k are the model's, which is frozen.

    Args:
      gate: for q's and k's heads.
      q, k, block_q, block_kv, scale, pool, **mask: as in `tile_mass`.
      target: the map, if `tile_mass` has made it before.

    Returns:
      float32 `[]`, at least 0 but for rounding.

    Raises:
      TypeError, ValueError: shapes, dtypes or options do not fit.

    Example:
      >>> slopes = jax.grad(gate_loss)(gate, q, k, causal=True)
    """
    where = "gate_loss"
    check_positive(where, block_q=block_q, block_kv=block_kv)
    check_choice(where, "pool", pool, POOLS)
    q, k = jax.lax.stop_gradient(check_qk(where, q, k))
    check_gate(where, gate, q, k)
    sizes = (q.shape[0], q.shape[1], k.shape[1])
    grid = grid_of(where, sizes, (block_q, block_kv), **mask)
    number = scale_of(where, scale, q.shape[3])
    if target is None:
        target = mass_of(q, k, grid, number, pool)
    wanted = jax.lax.stop_gradient(jnp.asarray(target, jnp.float32))
    logits = gate_logits(gate, q, k, grid, number)
    if wanted.shape != logits.shape:
        raise ValueError(
            f"{where}: target must be float32{list(logits.shape)}, got "
            f"{list(wanted.shape)}; tile_mass with the same options makes it"
        )
    seen = jnp.isfinite(logits)
    top = jnp.where(seen, logits, -jnp.inf).max(-1, keepdims=True)
    safe = jnp.where(seen, logits - jnp.where(jnp.isfinite(top), top, 0), 0)
    total = jnp.where(seen, jnp.exp(safe), 0).sum(-1, keepdims=True)
    predicted = safe - jnp.log(jnp.where(total > 0, total, 1))
    some = wanted > 0
    known = jnp.log(jnp.where(some, wanted, 1))
    apart = jnp.where(some & seen, wanted * (known - predicted), 0).sum(-1)
    rows = seen.any(-1)
    return apart.sum() / jnp.maximum(rows.sum(dtype=jnp.int32), 1).astype(jnp.float32)


def train_gate(
    gate: Gate,
    batches: Iterable[tuple[Any, ...]],
    optimizer: Optimizer | None = None,
    *,
    block_q: int = 128,
    block_kv: int = 128,
    scale: float | None = None,
    pool: Pool = "sum",
    **mask: Unpack[MaskOptions],
) -> tuple[Gate, np.ndarray]:
    """Trains a gate on a frozen model's queries and keys.

    Args:
      gate: where it starts from; `init_gate` makes one.
      batches: pairs `(q, k)` as attention is given them (rotated, say), a step each, or
        `(q, k, target)` with their map, if `tile_mass` has made it before: then a step
        takes a small part of the time, and texts may come again. Batches of one shape
        are one program.
      optimizer: an optax.GradientTransformation; `optax.adam(1e-3)` unless given.
      block_q, block_kv, scale, pool, **mask: as in `gate_loss`; the same mask as the
        selector's, and the same tiles, or its pieces for tiles.

    Returns:
      `(gate, losses)`, the loss before each step as float32 `[steps]`.

    Raises:
      TypeError, ValueError: as `gate_loss`; batches that are no pairs, or an optimizer
        that is none.
      ImportError: no optimizer is given, and optax is not installed.

    Example:
      >>> gate, losses = train_gate(init_gate(8, 2, 64), batches, causal=True)

    Source: Gao et al., SeerAttention (arXiv:2410.13276).
    """
    where = "train_gate"
    if optimizer is None:
        optimizer = _adam()
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            raise TypeError(
                f"{where}: optimizer must have init and update, got "
                f"{shown(optimizer)}; optax.adam(1e-3), say, and sides go by name"
            )
    rule = optimizer

    @jax.jit
    def step(
        gate: Gate, state: Any, q: Any, k: Any, target: Any
    ) -> tuple[Gate, Any, jax.Array]:
        loss, slopes = jax.value_and_grad(gate_loss)(
            gate,
            q,
            k,
            block_q=block_q,
            block_kv=block_kv,
            scale=scale,
            pool=pool,
            target=target,
            **mask,
        )
        changes, state = rule.update(slopes, state, gate)
        gate = jax.tree.map(lambda w, change: w + change, gate, changes)
        return gate, state, loss

    state, losses = rule.init(gate), []
    for i, batch in enumerate(_batches(where, batches)):
        q, k, *target = _batch(where, i, batch)
        gate, state, loss = step(gate, state, q, k, target[0] if target else None)
        losses.append(loss)
    return gate, np.asarray(jax.device_get(losses), np.float32)


_PAIRS = "(q, k) or (q, k, target)"


def _batches(where: str, batches: Any) -> Iterable[Any]:
    if hasattr(batches, "shape") or not hasattr(batches, "__iter__"):
        got = type(batches).__name__
        raise TypeError(
            f"{where}: batches must be an iterable of {_PAIRS}, got {got}; one batch "
            "alone is [(q, k)]"
        )
    made: Iterable[Any] = batches
    return made


def _batch(where: str, i: int, batch: Any) -> Sequence[Any]:
    several = isinstance(batch, (tuple, list))
    if not several or len(batch) not in (2, 3):
        got = f"{len(batch)} of them" if several else type(batch).__name__
        if hasattr(batch, "shape"):
            got = show(batch)
        raise TypeError(
            f"{where}: batches[{i}] must be {_PAIRS}, got {got}; one batch alone is "
            "[(q, k)]"
        )
    made: Sequence[Any] = batch
    return made


def _adam() -> Optimizer:
    try:
        import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise ImportError(
            "train_gate: optimizer must be given where optax is not installed; "
            "pip install optax, or pass an object with init and update"
        ) from None
    made: Optimizer = optax.adam(1e-3)
    return made
