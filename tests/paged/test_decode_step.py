"""The whole decode step: append and attend in a scan over layers, one donated pool.

On a GPU the same tests run its kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import decode_steps
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from decode_steps import BAR, BLOCK, DTYPE, SEQUENCES, TARGETS, WIDTH, Where

import jax_kvblock as kv

ON_GPU = jax.default_backend() == "gpu"
TOKENS = 6  # they begin a second block
by_contiguous = pytest.mark.parametrize(
    "contiguous", [True, False], ids=["one array", "by layers"]
)


class Drawn:
    """A model, tokens of all sequences, and where they go."""

    def __init__(self, rng: np.random.Generator, contiguous: bool = True) -> None:
        self.layers = decode_steps.weights(rng)
        self.x = jnp.asarray(rng.standard_normal((SEQUENCES, TOKENS, WIDTH)), DTYPE)
        self.tables = decode_steps.tables_of(rng)
        self.pool = decode_steps.empty_pool(contiguous)

    def where(self, token: int) -> Where:
        return decode_steps.at(self.tables, token + 1)

    def hold(self, outs: Any, append: str = "rope") -> None:
        """`outs`: `[tokens, sequences, WIDTH]`."""
        want = decode_steps.dense(self.layers, self.x, append)
        got = np.asarray(outs, np.float64).swapaxes(0, 1)
        np.testing.assert_allclose(got, want, rtol=0, atol=BAR)


@pytest.mark.parametrize("append", ["rope", "kv"])
@by_contiguous
def test_the_pool_stays_where_it_is(contiguous, append, rng):
    """No copy of it is compiled, and no step moves it."""
    drawn = Drawn(rng, contiguous)
    step = jax.jit(
        functools.partial(decode_steps.step, append=append), donate_argnums=0
    )
    pool = drawn.pool
    compiled = step.lower(pool, drawn.layers, drawn.x[:, 0], drawn.where(0)).compile()
    assert decode_steps.pool_copies(compiled.as_text(), pool) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes
    before, outs = decode_steps.pointers(pool), []
    for token in range(TOKENS):
        pool, out = step(pool, drawn.layers, drawn.x[:, token], drawn.where(token))
        assert decode_steps.pointers(pool) == before
        outs.append(out)
    drawn.hold(outs, append)


def test_a_copy_would_be_seen(rng):
    """Of a pool that is not donated, and of one that is used again."""
    drawn = Drawn(rng)
    args = (drawn.pool, drawn.layers, drawn.x[:, 0], drawn.where(0))
    kept = jax.jit(decode_steps.step).lower(*args).compile()
    assert decode_steps.pool_copies(kept.as_text(), drawn.pool)

    def twice(*args: Any) -> Any:
        return args[0].data + 1, decode_steps.step(*args)

    again = jax.jit(twice, donate_argnums=0).lower(*args).compile()
    assert decode_steps.pool_copies(again.as_text(), drawn.pool)


@by_contiguous
def test_a_while_loop_over_steps(contiguous, rng):
    """As many steps as an operand says."""
    drawn = Drawn(rng, contiguous)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(pool: kv.KVPool, layers: Any, x: Any, tables: Any, count: Any) -> Any:
        def body(state: Any) -> Any:
            i, pool, outs = state
            where = decode_steps.at(tables, i + 1)
            pool, out = decode_steps.step(pool, layers, x[:, i], where)
            return i + 1, pool, outs.at[i].set(out)

        outs = jnp.zeros((TOKENS, SEQUENCES, WIDTH), DTYPE)
        state = (jnp.int32(0), pool, outs)
        return jax.lax.while_loop(lambda s: s[0] < count, body, state)[1:]

    args = (drawn.layers, drawn.x, drawn.tables)
    lowered = decode.lower(drawn.pool, *args, jnp.int32(TOKENS))
    text = lowered.compile().as_text()
    assert decode_steps.pool_copies(text, drawn.pool) == []
    before = decode_steps.pointers(drawn.pool)
    pool, outs = decode(drawn.pool, *args, jnp.int32(TOKENS))
    assert decode_steps.pointers(pool) == before
    drawn.hold(outs)


# ---- export --------------------------------------------------------------------------


def round_trip(function: Any, *args: Any) -> Any:
    """The function, exported, serialized and back."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    platform = "cuda" if ON_GPU else "cpu"
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(
        function, platforms=[platform], disabled_checks=checks
    )(*args)
    return jax.jit(jax.export.deserialize(exported.serialize()).call)


def same_bits(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_export_of_attention(rng):
    drawn = Drawn(rng)
    pool = drawn.pool.data + jnp.asarray(rng.standard_normal(), DTYPE)
    q = jnp.asarray(rng.standard_normal((SEQUENCES, 4, 16)), DTYPE)

    @jax.jit
    def attend(data: Any, q: Any, where: Where, layer: Any) -> Any:
        pool = kv.KVPool(data, drawn.pool.spec)
        return kv.paged_attention(
            q, pool, layer, where.tables, where.lens, query_start=where.starts
        )

    # Leaves alone: a serialized function knows no types of others.
    args = (pool, q, tuple(drawn.where(5)), jnp.int32(1))
    flat = jax.jit(lambda data, q, where, layer: attend(data, q, Where(*where), layer))
    same_bits(round_trip(flat, *args)(*args), flat(*args))


def test_export_of_the_step(rng):
    drawn = Drawn(rng)

    @jax.jit
    def step(data: Any, layers: Any, x: Any, where: Any) -> Any:
        pool = kv.KVPool(data, drawn.pool.spec)
        layers, where = decode_steps.Layers(*layers), Where(*where)
        pool, out = decode_steps.step(pool, layers, x, where)
        return pool.data, out

    def at(token: int) -> Any:
        return tuple(drawn.layers), drawn.x[:, token], tuple(drawn.where(token))

    again = round_trip(step, drawn.pool.data, *at(0))
    data, outs = drawn.pool.data, []
    for token in range(TOKENS):
        want = step(data, *at(token))
        data, out = again(data, *at(token))
        same_bits((data, out), want)
        outs.append(out)
    drawn.hold(outs)


# ---- what compiles once --------------------------------------------------------------


def test_tables_lengths_and_starts_do_not_compile_again(rng, compiles):
    drawn = Drawn(rng)
    step = jax.jit(decode_steps.step, donate_argnums=0)
    pool, changes = drawn.pool, []
    for token in range(TOKENS):  # what a host hands to each step
        starts = np.arange(SEQUENCES + 1, dtype=np.int32) - (token == 3)
        tables = jnp.asarray(np.roll(drawn.tables, token, 0))
        changes.append(drawn.where(token)._replace(tables=tables, starts=starts))
    x = [drawn.x[:, token] for token in range(TOKENS)]
    pool, out = step(pool, drawn.layers, x[0], changes[0])
    jax.block_until_ready(out)
    del compiles[:]
    for token in range(TOKENS):
        pool, out = step(pool, drawn.layers, x[token], changes[token])
    jax.block_until_ready(out)
    assert compiles == []
    assert step._cache_size() == 1


# ---- command buffers -----------------------------------------------------------------

CAPTURED = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
}


@pytest.mark.gpu
@pytest.mark.parametrize("loop", ["scan", "unrolled"])
def test_command_buffers(loop, rng):
    """Captured once, and right when tables, lengths and addresses change."""
    drawn = Drawn(rng)
    step = jax.jit(unrolled if loop == "unrolled" else decode_steps.step)
    where = drawn.where(0)
    captured = step.lower(drawn.pool, drawn.layers, drawn.x[:, 0], where).compile(
        CAPTURED
    )
    pool, outs = drawn.pool, []
    for token in range(TOKENS):
        args = (drawn.layers, drawn.x[:, token], drawn.where(token))
        want = step(pool, *args)
        for _ in range(3):  # the first run, the one that captures, and a replay
            got = captured(pool, *args)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                x, y = (np.asarray(a, np.float32) for a in (x, y))
                np.testing.assert_allclose(x, y, rtol=0, atol=BAR)
        pool, out = got  # other addresses than before
        outs.append(out)
    drawn.hold(outs)


@pytest.mark.gpu
def test_command_buffers_of_a_donated_pool(rng):
    """Replayed at one address, while tables and lengths change."""
    drawn = Drawn(rng)
    step = jax.jit(unrolled, donate_argnums=0)
    pool = drawn.pool
    captured = step.lower(pool, drawn.layers, drawn.x[:, 0], drawn.where(0)).compile(
        CAPTURED
    )
    before, outs = decode_steps.pointers(pool), []
    for token in range(TOKENS):
        # The same blocks by another table: sequences change places.
        turn = np.roll(np.arange(SEQUENCES), token)
        where = drawn.where(token)._replace(tables=drawn.tables[turn])
        pool, out = captured(pool, drawn.layers, drawn.x[turn, token], where)
        assert decode_steps.pointers(pool) == before
        outs.append(np.asarray(out, np.float32)[np.argsort(turn)])
    drawn.hold(outs)


def unrolled(pool: Any, layers: Any, x: Any, where: Where) -> Any:
    """The step without a loop, whose calls are one command buffer."""
    position = where.lens - 1
    block = jnp.take_along_axis(where.tables, position[:, None] // BLOCK, 1)[:, 0]
    slots = block * BLOCK + position % BLOCK
    for layer in range(decode_steps.LAYERS):
        w = jax.tree.map(lambda a, layer=layer: a[layer], layers)
        q, k, v = ((x @ a).reshape(len(x), -1, 16) for a in (w.q, w.k, w.v))
        q, pool = kv.rope_append(
            q, k, v, pool, layer, slots, position, theta=decode_steps.THETA
        )
        seen = kv.paged_attention(
            q, pool, layer, where.tables, where.lens, query_start=where.starts
        )
        x = x + seen.reshape(len(x), -1) @ w.out
    return pool, x


def test_the_unrolled_step_is_the_step(rng):
    """What the tests of command buffers stand on."""
    drawn = Drawn(rng)
    pool, outs = drawn.pool, []
    step = jax.jit(unrolled, donate_argnums=0)
    for token in range(TOKENS):
        pool, out = step(pool, drawn.layers, drawn.x[:, token], drawn.where(token))
        outs.append(out)
    drawn.hold(outs)
