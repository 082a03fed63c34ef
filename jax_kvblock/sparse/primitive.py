"""The primitives that choose tiles: how they transform, who computes them.

Rows are computed each for itself, whatever axes are in front. So a batch is more rows;
and where the compiler cuts a program over several devices, plain JAX is what it cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jax_kvblock.attention import tile_lists
from jax_kvblock.attention.precision import resolve
from jax_kvblock.core.spmd import is_partitioned, lower_local, vary_alike
from jax_kvblock.sparse import cuda, plain

Compute = Callable[..., list[Any]]


def pool_pieces(
    x: Any, ends: Any, *, side: int, pieces: int, wanted: plain.Pooled
) -> list[Any]:
    """`plain.pool_pieces`."""
    operands = vary_alike([x, ends])
    return pool_pieces_p.bind(*operands, side=side, pieces=pieces, wanted=wanted)


def weigh_tiles(
    queries: Any,
    keys: Any,
    bounds: Any,
    *,
    ranges: Sequence[Any] = (),
    near: Sequence[Any] = (),
    scale: float,
    tiles: tuple[int, int],
    parts: tuple[tuple[int, int, int], ...],
) -> Any:
    """`plain.weigh_tiles`."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    fine = asked is not None and queries.dtype == jnp.float32
    (shares,) = weigh_tiles_p.bind(
        *vary_alike([queries, keys, bounds, *ranges, *near]),
        scale=float(scale),
        tiles=tiles,
        parts=parts,
        ranged=bool(ranges),
        near=bool(near),
        fine=fine and resolve("weigh_tiles", asked, jnp.float32) == "highest",
    )
    return shares


def keep_tiles(scores: Any, states: Any, limits: Any, tau: float = 0.0) -> list[Any]:
    """`plain.keep_tiles`, without a gradient."""
    operands = vary_alike([jax.lax.stop_gradient(scores), states, limits])
    return keep_tiles_p.bind(*operands, tau=tau)


def list_tiles(kept: Any, width: int) -> list[Any]:
    """`plain.list_tiles`."""
    return list_tiles_p.bind(kept, width=width)


# ---- evaluation ----------------------------------------------------------------------


def _pool_pieces_avals(
    x: Any,
    ends: Any,
    *,
    pieces: int,
    wanted: plain.Pooled,
    **static: Any,
) -> list[Any]:
    *leading, _, heads, dim = x.shape
    spec = list(x.sharding.spec)
    spec[-3] = None
    if wanted == "normed":
        spec[-1], dim = None, 3 * dim
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*spec))
    made = x.update(
        shape=(*leading, pieces, heads, dim),
        dtype=jnp.dtype(jnp.float32),
        weak_type=False,
        sharding=sharding,
    )
    if wanted == "rounded":
        made = made.update(dtype=x.dtype)
    return [made] * (3 if wanted == "extremes" else 1)


def _weigh_tiles_avals(
    queries: Any, *operands: Any, tiles: tuple[int, int], **static: Any
) -> list[Any]:
    *leading, _, heads, _ = queries.shape
    *cut, _, of_heads, _ = queries.sharding.spec
    spec = PartitionSpec(*cut, of_heads, None, None)
    made = queries.update(
        shape=(*leading, heads, *tiles),
        dtype=jnp.dtype(jnp.float32),
        weak_type=False,
        sharding=NamedSharding(queries.sharding.mesh, spec),
    )
    return [made]


def _keep_tiles_avals(
    scores: Any, states: Any, limits: Any, *, tau: float
) -> list[Any]:
    kept = _like(scores, scores.shape, jnp.bool_)
    return [kept, _like(scores, scores.shape[:-1], jnp.float32)] if tau else [kept]


def _list_tiles_avals(kept: Any, *, width: int) -> list[Any]:
    leading = kept.shape[:-1]
    return [_like(kept, shape, jnp.int32) for shape in ((*leading, width), leading)]


def _like(x: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Rows that lie where the rows of `x` do, each on one device."""
    spec = [*x.sharding.spec[: x.ndim - 1], None][: len(shape)]
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*spec))
    dtype = jnp.dtype(dtype)
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _primitive(
    name: str, avals: Callable[..., list[Any]], plainly: Compute, kernel: Compute
) -> core.Primitive:
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    def lower(ctx: Any, *operands: Any, platform: str | None, **static: Any) -> Any:
        serves = cuda.serves(name, ctx.avals_in, platform, **static)
        run = kernel if serves and not is_partitioned(ctx) else plainly
        return lower_local(ctx, functools.partial(run, **static), *operands)

    for platform in (None, "cpu", "cuda"):
        rule = functools.partial(lower, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)

    def batch(
        operands: Sequence[Any], dims: Sequence[Any], **static: Any
    ) -> tuple[list[Any], list[int]]:
        size = next(
            x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
        )
        given = [
            jnp.broadcast_to(x[None], (size, *x.shape))
            if d is None
            else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        results = primitive.bind(*given, **static)
        return results, [0] * len(results)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> Any:
        if any(type(tangent) is not ad.Zero for tangent in tangents):
            # Then plain JAX computes all of it.
            run = functools.partial(plainly, **static)
            along = [*map(ad.instantiate_zeros, tangents)]
            return jax.jvp(run, list(primals), along)
        results = primitive.bind(*primals, **static)
        zeros = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
        return results, zeros

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


pool_pieces_p = _primitive(
    cuda.POOL_PIECES, _pool_pieces_avals, plain.pool_pieces, cuda.pool_pieces
)
weigh_tiles_p = _primitive(
    cuda.WEIGH_TILES, _weigh_tiles_avals, plain.weigh_tiles, cuda.weigh_tiles
)
keep_tiles_p = _primitive(
    cuda.KEEP_TILES, _keep_tiles_avals, plain.keep_tiles, cuda.keep_tiles
)
list_tiles_p = _primitive(
    tile_lists.LIST_TILES, _list_tiles_avals, plain.list_tiles, tile_lists.list_tiles
)
