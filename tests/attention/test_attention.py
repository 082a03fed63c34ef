"""flash_attention's values and gradients are as near to float64 as plain jnp's."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact
from attention_model import (
    BF16,
    F16,
    F32,
    HALVES,
    KERNELS,
    ON_GPU,
    by_kernel,
    cast,
    compute,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    jit,
    served,
    truth,
)
from hypothesis import given, settings

from jax_kvblock import flash_attention

DTYPES = (F32, BF16, F16)

# ---- sizes ---------------------------------------------------------------------------

# Every size in both places; two rows for each of the odd ones.
LENGTHS = [
    (1, 1), (1, 1000), (2, 63), (63, 2), (64, 128), (65, 129), (127, 64), (128, 127),
    (129, 65), (1000, 1), (129, 129), (128, 1000),
]  # fmt: skip
HEADS = ((4, 4), (4, 2), (4, 1))


def test_the_lengths_hold_every_size():
    sizes = {1, 2, 63, 64, 65, 127, 128, 129, 1000}
    assert {t for t, _ in LENGTHS} == {s for _, s in LENGTHS} == sizes


# The dtypes take turns: each row of lengths in one on the CPU, all of them on a GPU.
LENGTH_ROWS = [
    pytest.param(*row.values, t, s, *HEADS[i % 3], id=f"{row.id}-T{t}-S{s}")
    for i, (t, s) in enumerate(LENGTHS)
    for row in (served(DTYPES[i % 3]) if len(served(BF16)) == 1 else served(*DTYPES))
]


@pytest.mark.parametrize("implementation, dtype, t, s, n, k", LENGTH_ROWS)
def test_lengths(rng, implementation, dtype, t, s, n, k):
    """Causal where every row sees something, so that the ends of the mask are odd."""
    call = draw(rng, dtype, batch=1, q_len=t, kv_len=s, heads=n, kv_heads=k)
    offset = jnp.int32(max(0, s - t))
    assert_exact(call.replace(causal=True, q_offset=offset), implementation)


@by_kernel(F32, BF16)
@pytest.mark.parametrize("t, s", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_and_no_keys(rng, implementation, dtype, t, s):
    call = draw(rng, dtype, q_len=t, kv_len=s, sinks=cast([1, -2, 0, 3], F32))
    got = assert_exact(call, implementation)
    want = np.broadcast_to([1, -2, 0, 3], (2, t, 4))
    if s == 0:
        np.testing.assert_array_equal(got["lse"], want)
    got = assert_exact(call.replace(sinks=None), implementation)
    if s == 0:
        assert np.isneginf(got["lse"]).all()


def test_no_batch(rng):
    """Nothing in, nothing out."""
    call = draw(rng, q_len=5, kv_len=6, batch=0, heads=4, kv_heads=2)
    got = compute(call.replace(sinks=cast([1, -2, 0, 3], F32)), None)
    assert got["out"].shape == (0, 5, 4, 16)
    assert got["lse"].shape == (0, 5, 4)
    for name in "qkv":
        assert got[f"d_{name}"].shape == call.arrays[name].shape
    np.testing.assert_array_equal(got["d_sinks"], np.zeros(4))


@pytest.mark.parametrize("batch", [0, 2])
def test_no_heads_are_an_error(rng, batch):
    call = draw(rng, q_len=5, kv_len=6, batch=batch, heads=0, kv_heads=0)
    with pytest.raises(ValueError, match="heads must be a positive multiple of k's"):
        call.run()


@pytest.mark.wide
@pytest.mark.parametrize("implementation, dtype", served(F32, BF16, F16))
def test_every_head_dim(rng, implementation, dtype):
    """On the CPU the dtypes take turns; on a GPU each kernel does all of them."""
    turn = DTYPES.index(dtype)
    dims = range(8, 257, 8) if implementation != "xla" else range(8 + 8 * turn, 257, 24)
    shape = {"batch": 1, "q_len": 3, "kv_len": 5, "heads": 2, "kv_heads": 1}
    for dim in dims:
        call = draw(rng, dtype, **shape, dim=dim)
        got = assert_exact(call, implementation, gradients=False)
        assert got["out"].shape == (1, 3, 2, dim)


@pytest.mark.parametrize(
    "implementation, dtype, dim, value_dim",
    [
        pytest.param(*row.values, d, e, id=f"{row.id}-D{d}-Dv{e}")
        for i, (d, e) in enumerate(
            [(8, 256), (256, 8), (64, 128), (192, 128), (72, 40), (128, 128)]
        )
        for row in served(DTYPES[i % 3])
    ],
)
def test_value_head_dims(rng, implementation, dtype, dim, value_dim):
    call = draw(rng, dtype, q_len=33, kv_len=65, dim=dim, value_dim=value_dim)
    assert_exact(call.replace(causal=True), implementation)


@pytest.mark.gpu
@by_kernel(*HALVES)
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_at_odd_sizes(rng, implementation, dtype, dim):
    """The sizes take turns; attention_sweep.py has many more of them."""
    turn = dim // 8 % 3
    (t, s), (n, k) = [(1, 129), (127, 65), (200, 333)][turn], HEADS[turn]
    call = draw(rng, dtype, q_len=t, kv_len=s, heads=n, kv_heads=k, dim=dim)
    call = call.replace(causal=True, q_offset=jnp.int32(max(0, s - t)))
    assert_exact(call, implementation)


@pytest.mark.gpu
@by_kernel(*HALVES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 70_000, "q_len": 1, "kv_len": 2, "heads": 1, "kv_heads": 1},
        {"batch": 1, "q_len": 2, "kv_len": 3, "heads": 70_000, "kv_heads": 1},
        {"batch": 1, "q_len": 300_000, "kv_len": 1, "heads": 1, "kv_heads": 1},
        {"batch": 1, "q_len": 1, "kv_len": 300_000, "heads": 1, "kv_heads": 1},
    ],
    ids=["batches", "heads", "queries", "keys"],
)
def test_huge_grids(rng, implementation, dtype, sizes):
    """More than 65535 of something, which is a limit of some grid dims."""
    assert_exact(draw(rng, dtype, dim=8, **sizes), implementation)


# ---- drawn calls ---------------------------------------------------------------------


@st.composite
def calls(draw_from, dtypes=DTYPES):
    """Any shape with any options that go together."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    flag = lambda: draw_from(st.booleans())  # noqa: E731
    n, k = draw_from(st.sampled_from(HEADS))
    t = draw_from(st.sampled_from([1, 7, 64, 130, 257]))
    s = draw_from(st.sampled_from([1, 5, 128, 129, 300]))
    b = draw_from(st.integers(1, 3))
    dtype = draw_from(st.sampled_from(dtypes))
    packed = draw_from(st.integers(0, 3)) == 0
    call = draw(
        rng,
        dtype,
        batch=b,
        q_len=t,
        kv_len=s,
        heads=n,
        kv_heads=k,
        dim=draw_from(st.sampled_from([8, 40, 64])),
        value_dim=draw_from(st.sampled_from([None, 24])),
        size=draw_from(st.sampled_from([0.0, 1.0, 5.0])),
        packed=packed,
    )
    options = {"causal": flag()}
    if flag():
        side = st.sampled_from([None, 0, 1, 60, 200])
        options["window"] = (draw_from(side), draw_from(side))
    if flag():
        options["softcap"] = draw_from(st.sampled_from([0.5, 20.0]))
    if flag():
        options["scale"] = draw_from(st.sampled_from([0.25, 1.0]))
    if flag():
        options["sinks"] = cast(rng.standard_normal(n) * 2, F32)
    for name in ("q_offset", "kv_offset"):
        if flag():
            shape = () if flag() else (b,)
            options[name] = jnp.asarray(rng.integers(-s, s + 1, shape), jnp.int32)
    if packed:
        ends = lambda n: np.sort(rng.integers(0, n + 1, b + 1)).astype(np.int32)  # noqa: E731
        return call.replace(**options, cu_seqlens=(ends(t), ends(s)))
    if flag():
        options["segment_ids"] = (draw_segments(rng, b, t), draw_segments(rng, b, s))
    if flag():
        options["q_lens"] = rng.integers(0, t + 1, b).astype(np.int32)
    if flag():
        options["kv_lens"] = rng.integers(0, s + 1, b).astype(np.int32)
    if flag():
        options["bias"] = draw_bias(
            rng, call, (flag(), flag()), F32 if flag() else dtype
        )
    if flag():
        options["tiles"] = draw_tiles(rng, call, (flag(), flag()))
    return call.replace(**options)


@pytest.mark.wide
@pytest.mark.parametrize("implementation, dtype", served(*DTYPES))
def test_drawn_calls(implementation, dtype):
    @settings(
        max_examples=30 if ON_GPU else 6, deadline=None, derandomize=True, database=None
    )
    @given(calls((dtype,)))
    def check(call):
        assert_exact(call, implementation)

    check()


# ---- values --------------------------------------------------------------------------


@by_kernel()
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_small_and_large_logits(rng, implementation, dtype, size):
    call = draw(rng, dtype, size=size, causal=True, q_offset=jnp.int32(60))
    got = assert_exact(call, implementation)
    assert np.isfinite(np.asarray(got["out"], np.float32)).all()
    assert np.isfinite(np.asarray(got["d_k"], np.float32)).all()


@by_kernel()
def test_logits_that_grow_along_the_keys(rng, implementation, dtype):
    """Every tile has a new maximum, far above the one before."""
    call = draw(rng, dtype, batch=1, q_len=5, kv_len=1000, heads=2, kv_heads=1)
    slope = np.linspace(-60, 60, 1000)[None, :, None, None] / 16
    k = cast(np.broadcast_to(slope, (1, 1000, 1, 16)), dtype)
    q = jnp.full((1, 5, 2, 16), 4, dtype)
    for keys in (k, k[:, ::-1]):
        assert_exact(call.replace(q=q, k=keys), implementation)


@by_kernel()
def test_a_row_that_is_not_a_number_stays_alone(rng, implementation, dtype):
    """NaN in a query, and inf in values, come out where they belong."""
    call = draw(rng, dtype)
    q, v = call.arrays["q"], call.arrays["v"]
    q = q.at[0, 3, 1].set(jnp.nan)
    v = v.at[1, 40, 0, 2].set(jnp.inf).at[1, 69, 1, 5].set(-jnp.inf)
    call = call.replace(q=q, v=v)
    got, want = compute(call, implementation, gradients=False), truth(call)
    assert np.isnan(want["lse"]).sum() == 1
    assert np.isinf(want["out"]).sum() == 2 * 2 * 70
    for name in ("out", "lse"):
        assert_close(got[name], want[name])


def merged(attend, cut):
    """Two halves of the keys, put together as docs/attention.md says."""

    def f(arrays):
        halves = []
        for part, start in ((slice(0, cut), 0), (slice(cut, None), cut)):
            one = {n: arrays[n][:, part] for n in "kv"}
            if "bias" in arrays:
                one["bias"] = arrays["bias"][..., part]
            halves.append(attend(arrays | one, start))
        (out_a, lse_a), (out_b, lse_b) = halves
        lse = jnp.logaddexp(lse_a, lse_b)
        out_a, out_b = (x.astype(F32) for x in (out_a, out_b))
        out = (
            jnp.exp(lse_a - lse)[..., None] * out_a
            + jnp.exp(lse_b - lse)[..., None] * out_b
        )
        return out, lse

    return f


@pytest.mark.parametrize(
    "implementation, dtype, cut",
    [
        pytest.param(*row.values, cut, id=f"{row.id}-{cut}")
        for cut, dtype in ((1, F32), (64, BF16), (130, F16), (64, F32))
        for row in served(dtype)
    ],
)
def test_partial_results_merge(rng, implementation, dtype, cut):
    """Values and gradients through lse; rows may miss the second half altogether."""
    call = draw(rng, dtype, kv_len=200, causal=True)
    call = call.replace(bias=draw_bias(rng, call, (True, False)))

    def attend(arrays, start):
        return flash_attention(
            **arrays,
            causal=True,
            kv_offset=start,
            return_lse=True,
            implementation=implementation,
        )

    @jit
    def run(arrays, cotangents):
        got, pull = jax.vjp(merged(attend, cut), arrays)
        return got, pull(cotangents)[0]

    d_out, d_lse = call.cotangents
    (out, lse), grads = run(call.arrays, (d_out.astype(F32), d_lse))
    want = truth(call)
    assert_close(out, want["out"], dtype)
    assert_close(lse, want["lse"])
    for name, grad in grads.items():
        assert_close(grad, want[f"d_{name}"], dtype)


def test_float64_where_jax_has_it(rng):
    """The path in plain JAX has no float32 inside."""
    with jax.enable_x64(True):
        call = draw(rng, causal=True, softcap=3.0, window=(50, None))
        arrays = {n: jnp.asarray(x, jnp.float64) for n, x in call.arrays.items()}
        arrays["bias"] = jnp.asarray(rng.standard_normal((1, 4, 70, 130)))
        call = call.replace(**arrays, sinks=cast([0, 1, 2, -9], F32))

        @jit
        def f(arrays, cotangent):
            attend = lambda x: flash_attention(**x, **call.static)  # noqa: E731
            got, pull = jax.vjp(attend, arrays)
            return got, pull(cotangent)[0]

        got, grads = f(call.arrays, call.cotangents[0].astype(jnp.float64))
        want = truth(call, (call.cotangents[0], 0 * call.cotangents[1]))
        assert got.dtype == jnp.float64
        assert_close(got, want["out"])
        for name in ("q", "k", "v", "bias"):
            assert grads[name].dtype == jnp.float64
            assert_close(grads[name], want[f"d_{name}"])


# ---- the same bits -------------------------------------------------------------------


@by_kernel(BF16)
def test_deterministic_gradients(rng, implementation, dtype):
    call = draw(rng, dtype, kv_len=300, causal=True, deterministic=True)
    call = call.replace(q_offset=jnp.int32(200), sinks=cast([1, 2, 3, 4], F32))
    first = assert_exact(call, implementation)
    again = compute(call, implementation)
    for name, x in first.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "options"),
    [(64, {"causal": True}), (128, {}), (256, {"window": (300, 200)})],
)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("implementation", [name for name in KERNELS if name != "xla"])
def test_deterministic_gradients_of_a_big_case(
    rng, implementation, dtype, dim, options
):
    call = draw(
        rng, dtype, batch=4, q_len=2048, kv_len=2048, heads=16, kv_heads=4, dim=dim
    )
    call = call.replace(deterministic=True, **options)
    bits = lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}")  # noqa: E731
    first = {name: bits(x) for name, x in compute(call, implementation).items()}
    for _ in range(5):
        for name, x in compute(call, implementation).items():
            assert (first[name] == bits(x)).all(), name


# ---- what is compiled in -------------------------------------------------------------


def varying(rng):
    """Calls that differ in the values of operands alone."""
    call = draw(rng, q_len=40, kv_len=140)
    for i in range(3):
        other = call.replace(
            causal=True,
            q_offset=jnp.int32(100 * i),
            kv_offset=jnp.asarray([i, -i], jnp.int32),
            q_lens=jnp.asarray([i, 40], jnp.int32),
            kv_lens=jnp.asarray([70 * i, 140], jnp.int32),
            segment_ids=(
                jnp.asarray(draw_segments(rng, 2, 40)),
                jnp.asarray(draw_segments(rng, 2, 140)),
            ),
        )
        tiles = draw_tiles(rng, call)
        yield other.replace(tiles=tiles)


def packed_varying(rng):
    call = draw(rng, q_len=40, kv_len=140, packed=True, causal=True)
    for i in range(3):
        cu = jnp.asarray([i, 5 * i, 40], jnp.int32), jnp.asarray([0, 9 * i, 140])
        yield call.replace(cu_seqlens=cu, q_offset=jnp.asarray([i, -i], jnp.int32))


@pytest.mark.parametrize("make", [varying, packed_varying])
def test_new_values_of_operands_are_traced_and_compiled_once(rng, make):
    traces = []

    @jax.jit
    def f(arrays, operands):
        traces.append(1)
        return flash_attention(**arrays, **operands, causal=True, return_lse=True)

    for call in make(rng):
        out, lse = f(call.arrays, call.operands)
        want = truth(call)
        assert_close(out, want["out"])
        assert_close(lse, want["lse"])
    assert len(traces) == 1
    assert f._cache_size() == 1


def test_eager_calls_with_new_python_offsets_compile_once(rng, monkeypatch):
    """Python ints are operands too."""
    call = draw(rng, q_len=12, kv_len=20, causal=True)
    compiled = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for i, offset in enumerate([3, 8, -1, 0]):
            got = call.replace(q_offset=offset, kv_offset=offset // 2).run()
            want = truth(call.replace(q_offset=offset, kv_offset=offset // 2))
            assert_close(got, want["out"])
            if i == 0:
                assert compiled
                compiled.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
