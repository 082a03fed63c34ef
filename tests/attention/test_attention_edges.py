"""Cases at the edges of flash_attention that went wrong once, each with its rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import judge
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import (
    BF16,
    F32,
    by_main_kernel,
    cast,
    f64,
)
from attention_model import KERNELS as MODEL_KERNELS
from meshes import by_axis_type, mesh_of, put

from jax_kvblock import (
    AttentionTiles,
    FlashAttention,
    dot_product_attention,
    estimate_memory_usage,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    get_optimal_block_sizes,
)
from jax_kvblock.core import ffi

B, S, N, D = 4, 24, 4, 8


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(rng: np.random.Generator, dtype: Any = jnp.float32) -> list[Any]:
    return [normal(rng, B, S, N, D, dtype=dtype) for _ in range(3)]


@by_main_kernel()
def test_a_softcap_does_not_see_the_bias(implementation, dtype, rng) -> None:
    """Its slope is that of the score alone, also where the bias is -inf or large."""
    q, k, v = qkv(rng, dtype)
    below = jnp.tril(jnp.ones((S, S), bool))

    def gradient(bias: Any, **how: Any) -> Any:
        def total(q: Any) -> Any:
            how_all = {"softcap": 5.0, "implementation": implementation, **how}
            return flash_attention(q, k, v, bias=bias, **how_all).astype(float).sum()

        return np.asarray(jax.grad(total)(q), np.float32)

    masked = gradient(jnp.where(below, 0.0, -jnp.inf)[None, None])
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(masked, gradient(None, causal=True), atol=tolerance)
    shifted = gradient(jnp.full((1, 1, S, S), 64.0))
    np.testing.assert_allclose(shifted, gradient(None), atol=max(tolerance, 1e-4))


@by_main_kernel()
@pytest.mark.parametrize(
    ("far", "near"),
    [
        (
            {"window": (2**29 + 1000, None), "q_offset": 2**29 + 1000},
            {"window": (0, None)},
        ),
        ({"causal": True, "q_offset": 2**31 - 1, "kv_offset": -5}, {}),
        ({"window": (2**31 - 1, None), "q_offset": 2**31 - 1}, {"window": (0, None)}),
        ({"window": (None, 2**31 - 1), "q_offset": -(2**31) + 1}, {"causal": True}),
    ],
)
def test_far_offsets_do_not_wrap(implementation, dtype, rng, far, near) -> None:
    q, k, v = qkv(rng, dtype)
    got = flash_attention(q, k, v, implementation=implementation, **far)
    want = flash_attention(q, k, v, implementation=implementation, **near)
    np.testing.assert_array_equal(got, want)


def test_tile_lists_of_empty_arrays(rng) -> None:
    q, k, v = qkv(rng)
    none = AttentionTiles(
        jnp.zeros((1, 1, 0, 2), jnp.int32), jnp.zeros((1, 1, 0), "i4")
    )
    assert flash_attention(q[:, :0], k, v, tiles=none).shape == (B, 0, N, D)
    one = AttentionTiles(jnp.zeros((1, 1, 1, 2), jnp.int32), jnp.ones((1, 1, 1), "i4"))
    assert not flash_attention(q, k[:, :0], v[:, :0], tiles=one).any()


@pytest.mark.parametrize("kind", [int, np.int16, np.uint32, np.array, jnp.int32])
def test_what_counts_as_an_integer(kind, rng) -> None:
    """Python's, NumPy's, and arrays without dims, in every place for one."""
    q, k, v = qkv(rng)
    offsets = {"q_offset": kind(3), "kv_offset": kind(2)}
    got = flash_attention(q, k, v, window=(kind(3), None), causal=True, **offsets)
    want = flash_attention(q, k, v, window=(3, None), causal=True, q_offset=1)
    np.testing.assert_array_equal(got, want)
    got = dot_product_attention(q, k, v, local_window_size=(kind(3), kind(0)))
    want = dot_product_attention(q, k, v, local_window_size=(3, 0))
    np.testing.assert_array_equal(got, want)

    lists = jnp.zeros((1, 1, 1, 1), jnp.int32), jnp.ones((1, 1, 1), jnp.int32)
    tiles = AttentionTiles(*lists, kind(256), kind(128))
    got = flash_attention(q, k, v, tiles=tiles)
    np.testing.assert_allclose(got, flash_attention(q, k, v), atol=1e-6)

    assert FlashAttention(kind(32), kind(64)) == FlashAttention(32, 64)
    assert hash(FlashAttention(kind(32))) == hash(FlashAttention(32))
    x = normal(rng, 1, 1, 8, 8)
    got = flash_attention_forward(x, x, x, kind(32), kind(64))
    np.testing.assert_array_equal(got, flash_attention_forward(x, x, x, 32, 64))
    sizes = get_optimal_block_sizes(kind(40), kind(32))
    assert sizes == get_optimal_block_sizes(40, 32)
    used = estimate_memory_usage(*map(kind, (2, 3, 40, 32)), Bc=kind(16), Br=kind(64))
    assert used == estimate_memory_usage(2, 3, 40, 32, Bc=16, Br=64)


def test_a_memory_estimate_does_not_wrap() -> None:
    sizes = [np.int32(n) for n in (2000, 2000, 32000, 16)]
    used = estimate_memory_usage(*sizes)
    assert used["output_memory"] == 2000 * 2000 * 32000 * 16 * 4


@pytest.mark.filterwarnings("error")
def test_numpy_s_float64_is_jax_s_float(rng) -> None:
    """Without a word about what was cast."""
    q, bias, sinks = (
        rng.standard_normal(s) for s in ((B, S, N, D), (1, 1, S, S), (N,))
    )
    got = flash_attention(q, q, q, bias=bias, sinks=sinks)
    assert got.dtype == jnp.float32
    want = flash_attention(*[jnp.asarray(q)] * 3, bias=jnp.asarray(bias), sinks=sinks)
    np.testing.assert_array_equal(got, want)

    o, *rows = flash_attention_forward(q, q, q, return_residuals=True)
    given = (q, q, q, o, q, *(np.asarray(a, np.float64) for a in rows))
    wanted = flash_attention_backward(*map(jnp.asarray, given))
    for got, want in zip(flash_attention_backward(*given), wanted, strict=True):
        assert got.dtype == o.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


# ---- values that are known -----------------------------------------------------------

LISTS = AttentionTiles(np.int32([[[[0, 0]]]]), np.int32([[[2]]]))
FALLING = np.int32([0, 7, 5, 12])


def on_the_cpu(x: np.ndarray) -> jax.Array:
    return jax.device_put(x, jax.devices("cpu")[0])


@pytest.mark.parametrize("kind", [np.asarray, on_the_cpu], ids=["numpy", "jax"])
def test_known_values_are_looked_at_under_transforms_too(kind, rng) -> None:
    """What lies on the host and a jit, vmap or grad closes over is known."""
    q, k, v = map(on_the_cpu, qkv(rng))
    lists = jax.tree.map(kind, LISTS)
    rows = on_the_cpu(normal(rng, 12, N, D))
    cu = kind(FALLING)
    attend = lambda q: flash_attention(q, k, v, tiles=lists).sum()  # noqa: E731
    packed = lambda q: flash_attention(q, rows, rows, cu_seqlens=(cu, cu)).sum()  # noqa: E731
    for f, x, words in ((attend, q, "tile 0 twice"), (packed, rows, "got 7 at 1")):
        for wrap in (lambda f: f, jax.jit, jax.grad, jax.checkpoint):
            with pytest.raises(ValueError, match=words):
                wrap(f)(x)
        with pytest.raises(ValueError, match=words):
            jax.vmap(f)(jnp.stack([x, x]))


@pytest.mark.gpu
def test_a_gpu_s_values_are_not_waited_for(rng) -> None:
    rows = normal(rng, 12, N, D)
    cu = jnp.asarray(FALLING)
    with jax.transfer_guard_device_to_host("disallow"):
        out = flash_attention(rows, rows, rows, cu_seqlens=(cu, cu))
    assert out.shape == rows.shape


def test_traced_values_are_the_caller_s_promise(rng) -> None:
    """No error, and "xla" counts a tile once however often it is listed."""
    q, k, v = qkv(rng)
    attend = lambda tiles: flash_attention(q, k, v, tiles=tiles, implementation="xla")  # noqa: E731
    got = jax.jit(attend)(LISTS)
    np.testing.assert_allclose(got, flash_attention(q, k, v), atol=1e-6)
    rows = normal(rng, 12, N, D)
    packed = lambda cu: flash_attention(rows, rows, rows, cu_seqlens=(cu, cu))  # noqa: E731
    assert jax.jit(packed)(FALLING).shape == rows.shape


def test_entries_that_do_not_count_may_come_twice(rng) -> None:
    """Outside the key tiles, or beyond the counts."""
    q, k, v = qkv(rng)
    indices = np.int32([[[[-1, 0, -1, 1, 1, 2**31 - 1, 2**31 - 1, 0]]]])
    tiles = AttentionTiles(indices, np.int32([[[7]]]))
    got = flash_attention(q, k, v, tiles=tiles)
    np.testing.assert_allclose(got, flash_attention(q, k, v), atol=1e-6)


def test_cudnn_refuses_what_its_residual_does_not_keep(rng) -> None:
    with pytest.raises(ValueError, match="'cudnn' does not serve return_lse"):
        flash_attention(
            *qkv(rng, jnp.bfloat16), implementation="cudnn", return_lse=True
        )


def test_no_batch_on_b_h_n_d() -> None:
    x = jnp.zeros((0, 2, 40, 16))
    o, sums, m = flash_attention_forward(x, x, x, return_residuals=True)
    assert (o.shape, sums.shape, m.shape) == (x.shape, x.shape[:-1], x.shape[:-1])
    gradients = flash_attention_backward(x, x, x, o, o, sums, m)
    assert {a.shape for a in gradients} == {x.shape}


def test_l_and_m_are_float32(rng) -> None:
    q = normal(rng, 1, 2, 64, 16)
    o, sums, m = flash_attention_forward(q, q, q, return_residuals=True)
    with pytest.raises(TypeError, match="l must be float32, got float16"):
        flash_attention_backward(q, q, q, o, o, sums.astype(jnp.float16), m)


# ---- GPUs that the kernels do not serve ----------------------------------------------


def lowered_for_cuda(implementation: str | None, gradient: bool, **options: Any) -> str:
    """The program for a GPU, lowered without one."""
    x = jnp.zeros((1, 16, 1, 16), jnp.bfloat16)

    def call(q: Any) -> Any:
        out = flash_attention(q, x, x, implementation=implementation, **options)
        return out.astype(jnp.float32).sum()

    function = jax.jit(jax.grad(call) if gradient else call)
    return function.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def on_gpus(monkeypatch, *capabilities: tuple[int, int]) -> None:
    """As if this process had these GPUs."""
    monkeypatch.setattr(ffi, "gpu_capabilities", lambda: frozenset(capabilities))
    jax.clear_caches()


KERNELS = ("kvblock_attention_forward", "kvblock_attention_backward_kv")


@pytest.mark.parametrize(
    ("capability", "forward", "backward"),
    [
        ((7, 5), False, False),
        ((8, 0), True, True),
        ((8, 6), True, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((12, 0), True, False),
        (None, True, True),  # an export
    ],
)
def test_none_takes_what_serves_this_gpu(
    monkeypatch, capability, forward, backward
) -> None:
    on_gpus(monkeypatch, *([capability] if capability else []))
    text = lowered_for_cuda(None, gradient=True)
    assert [name in text for name in KERNELS] == [forward, backward]
    if not forward:
        with pytest.raises(ValueError, match=r"compute capability 7\.5 .*'xla' does"):
            lowered_for_cuda("cuda", gradient=False)
    elif not backward:
        assert KERNELS[0] in lowered_for_cuda("cuda", gradient=False)
        with pytest.raises(
            ValueError, match=r"gradients on compute .* 163 KiB .*'xla'"
        ):
            lowered_for_cuda("cuda", gradient=True)
    jax.clear_caches()


HOPPER = "kernels = 1 : i64"  # kvblock_kernels in attention.h


@pytest.mark.parametrize(
    ("capabilities", "architectures", "served"),
    [
        ([(9, 0)], "80,90a-real,90-virtual", True),
        ([(9, 0)], "80", False),
        ([(8, 0)], "80,90a-real,90-virtual", False),
        ([(10, 0)], "80,90a-real,90-virtual", False),
        ([(8, 0), (9, 0)], "80,90a-real,90-virtual", False),
        ([(9, 0), (10, 0)], "80,90a-real,90-virtual", False),
    ],
)
def test_hopper_kernels_are_for_hopper(
    monkeypatch, capabilities, architectures, served
) -> None:
    on_gpus(monkeypatch, *capabilities)
    monkeypatch.setitem(ffi.BUILD, "cuda_architectures", architectures)
    text = lowered_for_cuda(None, gradient=True)
    assert KERNELS[1] in text
    assert (HOPPER in text) == served
    if served:
        assert HOPPER in lowered_for_cuda("cuda_sm90", gradient=True)
        assert HOPPER not in lowered_for_cuda("cuda", gradient=True)
    else:
        words = r"'cuda_sm90' does not serve (compute|this build) .*'cuda' and 'xla' do"
        with pytest.raises(ValueError, match=words):
            lowered_for_cuda("cuda_sm90", gradient=False)
    # The fastest tile is one of kernels that serve.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tile = get_optimal_block_sizes(1024, 128)
    assert tile == ((176, 128) if served else (64, 128))
    jax.clear_caches()


def test_an_export_takes_the_kernels_of_any_gpu(monkeypatch) -> None:
    on_gpus(monkeypatch)
    assert HOPPER not in lowered_for_cuda(None, gradient=True)
    assert HOPPER in lowered_for_cuda("cuda_sm90", gradient=True)
    jax.clear_caches()


# ---- operands that are cut differently -----------------------------------------------

CUTS = {
    "q by heads alone": [(None, None, "h"), (), (), (), ()],
    "q by batch alone": [("b",), (), (), (), ()],
    "bias and sinks whole": [(None, None, "h")] * 3 + [(), ()],
    "sinks too": [("b", None, "h")] * 3 + [(), ("h",)],
    "all by length": [(None, "b")] * 3 + [(), ()],
    "one axis twice": [("h",), (None, None, "h"), (None, None, "h"), (), ()],
}


@pytest.mark.wide
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("four_cpus")
@by_axis_type
def test_gradients_of_operands_that_are_cut_differently(axis_type, cut, rng) -> None:
    arrays = [*qkv(rng), normal(rng, 1, N, S, S), normal(rng, N)]

    def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        o, lse = flash_attention(
            q, k, v, causal=True, bias=bias, sinks=sinks, return_lse=True
        )
        return (o**2).sum() + lse.sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    want = gradients(*arrays)
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        placed = [
            put(a, mesh, *spec) for a, spec in zip(arrays, CUTS[cut], strict=True)
        ]
        got = jax.jit(gradients)(*placed)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.wide
@by_main_kernel()
@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("segments", [False, True], ids=["causal", "segments"])
def test_gradients_of_a_scale_that_is_not_positive(
    implementation, dtype, rng, segments, scale, dim
) -> None:
    """What is masked stays masked, whatever the scale multiplies."""
    rows = 300
    arrays = [normal(rng, 1, rows, 1, dim, dtype=dtype) for _ in range(4)]
    ids = np.sort(rng.integers(0, 3, rows))
    mask = np.equal.outer(ids, ids) if segments else np.tri(rows)
    how: Any = {"segment_ids": jnp.asarray(ids[None])} if segments else {"causal": True}

    def gradients(q: Any, k: Any, v: Any, d_o: Any) -> Any:
        def out(*qkv: Any) -> Any:
            options = {"scale": scale, "implementation": implementation, **how}
            return flash_attention(*qkv, **options)

        return jax.vjp(out, q, k, v)[1](d_o)

    got = gradients(*arrays)
    q, k, v, d_o = (f64(x)[0, :, 0] for x in arrays)
    p = np.exp(scale * (q @ k.T)) * mask
    p /= p.sum(-1, keepdims=True)
    d_s = p * (d_o @ v.T - ((p @ v) * d_o).sum(-1, keepdims=True))
    want = scale * d_s @ k, scale * d_s.T @ q, p.T @ d_o
    for a, b in zip(got, want, strict=True):
        assert_close(a[0, :, 0], b, dtype)


def test_a_softcap_of_a_tiny_scale(rng) -> None:
    """Powers of scale / softcap that float32 does not have."""
    scale, softcap = 1e-5, 50.0
    q, k, v = (
        cast(rng.standard_normal((1, 130, 1, 64)) * size, BF16)
        for size in (300, 300, 1)
    )
    out = flash_attention(q, k, v, scale=scale, softcap=softcap)
    q, k, v = (f64(x)[0, :, 0] for x in (q, k, v))
    scores = np.exp(softcap * np.tanh(scale / softcap * (q @ k.T)))
    assert_close(out[0, :, 0], scores / scores.sum(-1, keepdims=True) @ v, BF16)


@pytest.mark.parametrize(
    ("scale", "softcap", "served"),
    [
        (0.1, 30.0, True),
        (-0.1, 30.0, True),
        (0.0, 30.0, True),
        (1e-6, 1.0, True),
        (9e-7, 1.0, False),
        (9e-7, 1024.0, True),
        (1.0, 1e-5, True),
        (1.0, 9e-6, False),
        (1e38, 1e-5, False),
    ],
)
def test_which_softcaps_the_kernels_serve(monkeypatch, scale, softcap, served) -> None:
    on_gpus(monkeypatch, (9, 0))
    how = {"gradient": False, "scale": scale, "softcap": softcap}
    assert (KERNELS[0] in lowered_for_cuda(None, **how)) == served
    if served:
        assert KERNELS[0] in lowered_for_cuda("cuda", **how)
    else:
        with pytest.raises(ValueError, match=r"scale / softcap = .*'xla' does"):
            lowered_for_cuda("cuda", **how)
    jax.clear_caches()


@pytest.mark.gpu
@pytest.mark.skipif(
    "cuda_sm90" not in MODEL_KERNELS,
    reason="no cuda_sm90 here: a Hopper GPU, and a build for it",
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_pairs_of_query_tiles(dim, value_dim, causal) -> None:
    """The CTAs of a cluster take pairs of query tiles, of which the last is half empty
    here; there are more pairs than the GPU computes at once.
    """
    batch, length, heads = (1, 8192 + 130, 4) if causal else (4, 2048 + 130, 4)
    keys = jax.random.split(jax.random.key(dim), 3)
    q, k, v = (
        jax.random.normal(key, (batch, length, heads, d), BF16)
        for key, d in zip(keys, (dim, dim, value_dim), strict=True)
    )
    options = {"causal": causal, "q_offset": 60 if causal else None}
    got = flash_attention(
        q, k, v, **options, return_lse=True, implementation="cuda_sm90"
    )
    want = flash_attention(
        *(x.astype(F32) for x in (q, k, v)),
        **options,
        return_lse=True,
        implementation="xla",
    )
    judge.assert_rows_alike("out", got[0], want[0])
    judge.assert_lse_near(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.skipif(
    "cuda_sm90" not in MODEL_KERNELS,
    reason="no cuda_sm90 here: a Hopper GPU, and a build for it",
)
@pytest.mark.parametrize(
    "kind", ["full", "causal", "lengths", "packed", "segments", "grouped"]
)
@pytest.mark.parametrize("dim", [128, 96, 64])
def test_gradients_of_tall_tiles(kind, dim) -> None:
    """The backward kernel takes 80 queries at a time where a call is long and has few
    masks, at head dim 128; the first tile is not full here. The others beside it.
    """
    masked = kind in ("causal", "segments", "grouped")
    batch, length, heads = (1, 4096 + 66, 4) if masked else (2, 2218, 2)
    options: dict[str, Any] = {"causal": masked}
    if kind == "segments":
        bounds = jnp.asarray([5, 1000, 1001, 3000])
        ids = jnp.searchsorted(bounds, jnp.arange(length), side="right")
        options["segment_ids"] = ids.astype(jnp.int32)[None]
    if kind == "lengths":
        options["q_lens"] = options["kv_lens"] = jnp.asarray([length, 900], jnp.int32)
    shape: tuple[int, ...] = (batch, length, heads, dim)
    if kind == "packed":
        cu = jnp.asarray([3, 1503, 2 * length - 30], jnp.int32)
        options["cu_seqlens"] = (cu, cu)
        shape = (batch * length, heads, dim)
    *operands, cotangent = (
        jax.random.normal(key, shape, BF16)
        for key in jax.random.split(jax.random.key(7), 4)
    )
    if kind == "grouped":
        operands[1:] = (x[:, :, ::2] for x in operands[1:])

    def gradients(dtype: Any, implementation: str) -> tuple[jax.Array, ...]:
        def call(*x: jax.Array) -> jax.Array:
            return flash_attention(*x, **options, implementation=implementation)

        _, pullback = jax.vjp(call, *(x.astype(dtype) for x in operands))
        return pullback(cotangent.astype(dtype))

    got, want = gradients(BF16, "cuda_sm90"), gradients(F32, "xla")
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        judge.assert_rows_alike(name, x, y)
