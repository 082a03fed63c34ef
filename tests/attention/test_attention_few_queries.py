"""Few queries over many keys on a CPU: in blocks that are cut where the keys lie."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact
from attention_model import (
    BF16,
    F16,
    F32,
    by_turns,
    cast,
    draw,
    draw_bias,
    jit,
    truth,
)

from jax_kvblock import flash_attention
from jax_kvblock.attention import block_problem, blocked, few_queries
from jax_kvblock.attention.config import AttentionConfig, Operands, sizes_of

# The CPU's own way, also on a machine with a GPU.
on_cpu = pytest.mark.usefixtures("four_cpus")

# Three blocks of 1024 keys, the last of which shares most of its keys with the second.
KEYS, BLOCK = 2100, 1024
SIZES = {"batch": 3, "kv_len": KEYS, "heads": 4, "kv_heads": 2}
# (queries, head dim): keys on the left of the product, and on its right.
SIDES = ((2, 32), (5, 16))
i32 = lambda *values: jnp.asarray(values, jnp.int32)  # noqa: E731
LENS = (700, KEYS, 0)


def spoiled(call):
    """NaN in all keys and values that no query may read."""
    outside = np.arange(KEYS) >= np.asarray(LENS)[:, None]
    junk = {n: call.arrays[n].at[outside].set(jnp.nan) for n in "kv"}
    return call.replace(kv_lens=i32(*LENS), **junk)


def with_bias(rng, call, *shared):
    return call.replace(bias=draw_bias(rng, call, shared))


def with_large_bias(rng, call):
    """Rows that see nothing but a bias of -1e9, and others that see it first."""
    bias = draw_bias(rng, call, (False, True))
    bias = bias.at[:, :, 0].set(-1e9).at[:, :, 1, :1500].set(-1e9)
    return call.replace(bias=bias, q=call.arrays["q"].at[:, 0].set(0))


def with_segments(rng, call):
    rows, keys = call.arrays["q"].shape[1], np.arange(KEYS) // 300
    ids = rng.permutation(7)[keys]
    ask = rng.integers(0, 8, (3, rows))
    kv_ids = np.broadcast_to(ids, (3, KEYS))
    return call.replace(
        segment_ids=(jnp.asarray(ask, jnp.int32), jnp.asarray(kv_ids, jnp.int32))
    )


OPTIONS = {
    "full": lambda rng, call: call,
    "causal": lambda rng, call: call.replace(causal=True, q_offset=i32(2098, 900, 3)),
    "window": lambda rng, call: call.replace(
        window=(300, 40), q_offset=i32(1500, 2095, -20), softcap=2.0
    ),
    "segments": with_segments,
    "junk beyond kv_lens": lambda rng, call: spoiled(call),
    "q_lens and sinks": lambda rng, call: call.replace(
        q_lens=i32(1, 0, 2), sinks=cast([1, -2, 0, 3], F32)
    ),
    "a bias of each": lambda rng, call: with_bias(rng, call, False, False),
    "a shared bias": lambda rng, call: with_bias(rng, call, True, True),
    "a bias of 16 bits": lambda rng, call: call.replace(
        bias=draw_bias(rng, call, (False, True), call.arrays["q"].dtype), causal=True
    ),
    "a large bias": with_large_bias,
}
ROWS = [(name, SIDES[i % 2]) for i, name in enumerate(OPTIONS)]
ROWS += [(name, SIDES[1 - i % 2]) for i, name in enumerate(list(OPTIONS)[:2])]


@by_turns("name, side", ROWS, F32, BF16, F16)
def test_every_option(rng, implementation, dtype, name, side):
    queries, dim = side
    call = draw(rng, dtype, q_len=queries, dim=dim, **SIZES)
    assert_exact(OPTIONS[name](rng, call), implementation, gradients=False)


@by_turns("side", [(side,) for side in SIDES], F32, BF16)
def test_gradients(rng, implementation, dtype, side):
    queries, dim = side
    call = draw(rng, dtype, q_len=queries, dim=dim, **SIZES, causal=True)
    assert_exact(call.replace(q_offset=i32(2095, 900, 3)), implementation)


@by_turns("causal", [(True,), (False,)], F32, BF16)
def test_packed_sequences(rng, implementation, dtype, causal):
    """Of a query or two each; rows and keys of none hold NaN."""
    call = draw(rng, dtype, packed=True, q_len=6, kv_len=KEYS, causal=causal)
    cu_q, cu_kv = i32(1, 2, 2, 4, 5), i32(0, 1000, 1001, 1090, 2050)
    junk = {n: call.arrays[n].at[2050:].set(jnp.nan) for n in "kv"}
    q = call.arrays["q"].at[0].set(jnp.nan).at[5].set(jnp.nan)
    call = call.replace(cu_seqlens=(cu_q, cu_kv), q=q, q_offset=i32(999, 0, 87, 959))
    assert_exact(call.replace(**junk), implementation, gradients=False)


def test_float64(rng):
    """In 64-bit mode, where the default integer is int64, and promotion is strict."""
    call = draw(rng, q_len=2, **SIZES)
    how = {"causal": True, "q_offset": i32(2098, 900, 3), "kv_lens": i32(*LENS)}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        arrays = {n: x.astype(jnp.float64) for n, x in call.arrays.items()}
        bias = jnp.zeros((3, 1, 2, KEYS), jnp.float64)
        got = jit(functools.partial(flash_attention, **how))(**arrays, bias=bias)
        assert got.dtype == jnp.float64
    assert_close(got, truth(call.replace(**how))["out"])


# ---- how it comes about --------------------------------------------------------------


def draw_operands(rng, batch, queries, keys, bias_rows, heads=4, kv_heads=2, dim=16):
    normal = lambda *shape: cast(rng.standard_normal(shape), F32)  # noqa: E731
    q, bias = normal(batch, queries, heads, dim), None
    if bias_rows:
        bias = normal(bias_rows, heads, queries, keys)
    k, v = (normal(batch, keys, kv_heads, dim) for _ in "kv")
    return Operands(q, k, v, bias, kv_lens=jnp.full(batch, keys, jnp.int32))


@on_cpu
@pytest.mark.parametrize("bias_rows", [0, 1, 3, 30])
def test_short_members_take_steps_together(rng, bias_rows):
    """Ten at a time, but where some of them share a bias; as all at once do."""
    config, x = AttentionConfig(scale=0.25), draw_operands(rng, 30, 2, 100, bias_rows)
    together = {0: 10, 1: 10, 3: 1, 30: 10}[bias_rows]
    assert few_queries.steps(config, x, sizes_of(config, x)) == (together, 100)
    found = jit(functools.partial(few_queries.forward, config))(x)
    want = jit(functools.partial(blocked.forward, config))(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


@on_cpu
def test_each_member_visits_its_own_blocks(rng, monkeypatch):
    """Of 5 blocks as many as its keys are in, whatever the others have."""
    seen, cut = [], few_queries._block_of_keys

    def watched(config, x, p, first, j):
        jax.debug.callback(lambda *at: seen.append(at), first, j)
        return cut(config, x, p, first, j)

    monkeypatch.setattr(few_queries, "_block_of_keys", watched)
    config, x = AttentionConfig(scale=0.25), draw_operands(rng, 3, 1, 5 * BLOCK, 0)
    x = x._replace(kv_lens=i32(BLOCK + 1, 0, 5 * BLOCK))
    jax.block_until_ready(jit(functools.partial(few_queries.forward, config))(x))
    jax.effects_barrier()
    found = sorted((int(first), int(j)) for first, j in seen)
    assert found == [(0, 0), (0, 1), *((2, j) for j in range(5))]


@on_cpu
@pytest.mark.parametrize("options", ["full", "causal"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: jnp.dtype(d).name)
def test_nothing_of_the_size_of_the_keys_is_made(dtype, options):
    """Not laid out anew, nor widened, nor padded to whole blocks."""
    q = jax.ShapeDtypeStruct((1, 1, 8, 64), dtype)
    k = jax.ShapeDtypeStruct((1, 8200, 8, 64), dtype)
    how = {}
    if options == "causal":
        how = {"q_offset": i32(8000), "kv_lens": i32(8001)}

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=bool(how), **how)

    compiled = jax.jit(attend).lower(q, k, k).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 2**21  # the keys are 8 MiB in 16 bits


@on_cpu
def test_a_short_call_has_no_loop_and_keys_on_the_left():
    """On the right XLA would lay the keys out anew, and one block is no loop."""
    q = jax.ShapeDtypeStruct((1, 1, 8, 64), F32)
    k = jax.ShapeDtypeStruct((1, 256, 8, 64), F32)
    lowered = jax.jit(flash_attention).lower(q, k, k).as_text()
    assert "stablehlo.while" not in lowered
    assert "stablehlo.sort" not in lowered
    dots = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(dots) == 2
    assert "(tensor<1x8x256x64xf32>, tensor<1x8x1x1x64xf32>)" in dots[0]


@on_cpu
def test_as_many_queries_as_keys_are_not_few():
    """There the general way is a little faster; and it alone knows tile lists."""
    config = AttentionConfig(scale=1.0)

    def few(queries, keys, platform="cpu", **options):
        x = Operands(*(jnp.zeros((1, n, 8, 64)) for n in (queries, keys, keys)))
        return block_problem.has_few_queries(config, x._replace(**options), platform)

    assert few(1, 32) and few(8, 256) and few(128, 300) and few(16, 4096)
    assert not few(1, 31)
    assert not few(9, 256)
    assert not few(129, 4096)
    assert not few(1, 4096, platform="cuda")
    assert not few(1, 4096, tile_indices=i32(0))


def test_the_row_of_a_bias_of_very_many_members():
    """Its number times that of the members is more than an int32 holds."""
    batch, keys = 50_000, 32
    q = jnp.zeros((batch, 1, 1, 8), jnp.float32)
    k = jnp.zeros((batch, keys, 1, 8), jnp.float32)
    v = k.at[:, 0].set(keys)
    bias = jnp.zeros((batch, 1, 1, keys)).at[-1, 0, 0, 1:].set(-1e9)
    o = jit(lambda *x, bias: flash_attention(*x, bias=bias, implementation="xla"))(
        q, k, v, bias=bias
    )
    np.testing.assert_array_equal(o[:-1], 1.0)
    np.testing.assert_array_equal(o[-1], keys)
