"""A step of the engine: all of it is one program, with the pool donated."""

import jax
import jax.numpy as jnp

from jax_kvblock import KVPool, append_kv
from serve import sampling
from serve.batch import Shape, rows_of, sampling_of, unpack
from serve.between import choose
from serve.config import Config
from serve.llama import Join, Rows, forward
from serve.weights import Params

_Carried = tuple[KVPool, Rows, sampling.Sampling, jax.Array]


def step(
    pool: KVPool,
    params: Params,
    last: jax.Array,
    buffer: jax.Array,
    *,
    config: Config,
    shape: Shape,
    fuse_layers: bool = True,
) -> tuple[KVPool, tuple[jax.Array, ...]]:
    """Compute rows, draw the tokens behind them, and bring accepted drafts home.

    With several steps, each computes the tokens that the one before has drawn.

    Args:
        pool: the cache; donated.
        params: the model's.
        last: int32[most_outputs], what the last step returned.
        buffer: a `Batch`'s.
        fuse_layers: take `between` where it serves.

    Returns:
        The pool with the rows' keys and values, and the token behind each output of
        the last step, int32[most_outputs]; of several steps also those of each,
        int32[steps, outputs].
    """
    parts = unpack(buffer, shape)
    feed, outputs = parts["feed"], parts["outputs"]
    tokens = jnp.where(feed < 0, parts["tokens"], last[jnp.maximum(feed, 0)])
    join = choose(config, params, shape.rows, pool) if fuse_layers else None
    if shape.steps > 1:
        pool, drawn = _steps(pool, params, tokens, parts, config, shape, join)
        return pool, (jnp.zeros_like(last).at[: shape.outputs].set(drawn[-1]), drawn)
    rows = rows_of(parts, tokens)
    logits, pool = forward(config, params, pool, rows, outputs, join)
    drawn = sampling.draw(logits, sampling_of(parts), shape.greedy)
    if shape.drafts:
        accepted = accept(tokens[outputs], drawn, parts["parents"], shape.drafts)
        homes = jnp.where(accepted, parts["homes"], -1)
        pool = move(pool, parts["slots"][outputs], homes)
    return pool, (jnp.zeros_like(last).at[: len(drawn)].set(drawn),)


def _steps(
    pool: KVPool,
    params: Params,
    tokens: jax.Array,
    parts: dict[str, jax.Array],
    config: Config,
    shape: Shape,
    join: Join | None,
) -> tuple[KVPool, jax.Array]:
    """Steps of decoding: a row of each sequence, and its next one; all draw.

    A step's slots are picked by a comparison, and its tokens put in place by one. As
    `xs` and `ys` of a scan they would be slices at a place that the loop's counter
    tells. XLA lets a kernel read such a slice where it lies, and then has to change its
    CUDA graph for each kernel in each step: 0.4 ms of the host's time for 4 steps.

    Returns:
        The pool, and the tokens of each step, int32[steps, outputs].
    """
    steps = jnp.arange(shape.steps)[:, None]
    slots_of_all = parts["slots"]

    def one(i: jax.Array, carried: _Carried) -> _Carried:
        pool, rows, how, drawn_by_all = carried
        slots = jnp.max(jnp.where(steps == i, slots_of_all, -1), axis=0)
        more = (slots >= 0).astype(jnp.int32)
        lens = rows.kv_lens.at[: shape.rows].add(more)
        rows = rows._replace(slots=slots, kv_lens=lens)
        logits, pool = forward(config, params, pool, rows, parts["outputs"], join)
        drawn = sampling.draw(logits, how, shape.greedy)
        rows = rows._replace(tokens=drawn, positions=rows.positions + 1)
        how = how._replace(place=how.place + 1)
        return pool, rows, how, jnp.where(steps == i, drawn, drawn_by_all)

    rows = rows_of(parts | {"slots": slots_of_all[0]}, tokens)
    nothing = jnp.zeros((shape.steps, shape.outputs), jnp.int32)
    pool, _, _, drawn = jax.lax.fori_loop(
        0, shape.steps, one, (pool, rows, sampling_of(parts), nothing)
    )
    return pool, drawn


def accept(
    tokens: jax.Array, drawn: jax.Array, parents: jax.Array, depth: int
) -> jax.Array:
    """Whether each output is right, and so are those that it stands behind, bool[n]."""
    parent = jnp.maximum(parents, 0)
    newest = parents < 0
    right = tokens == drawn[parent]
    accepted = newest
    for _ in range(depth):
        accepted = newest | (right & accepted[parent])
    return accepted


def move(pool: KVPool, source: jax.Array, target: jax.Array) -> KVPool:
    """Copy keys and values of all layers from slots [n] to slots [n]; -1 to nowhere.

    Only slots with a target are read as they are.
    """
    size = pool.spec.block_size
    slots = jnp.where(target < 0, 0, source)
    # [n, layers, 2, heads, head_dim]: a slot is a block's token, in the layout NHD.
    found = pool.data[slots // size, :, :, slots % size]
    found = jnp.moveaxis(found, 0, 2)
    return append_kv(pool, None, found[:, 0], found[:, 1], target)
