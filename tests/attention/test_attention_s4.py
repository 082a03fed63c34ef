"""The calls on [B, H, N, D]: tiles, (l, m), backward, memory, documented examples."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp_programs import run_cpp
from flax import nnx

import jax_kvblock as kv
from jax_kvblock import (
    FlashAttention,
    estimate_memory_usage,
    flash_attention_backward,
    flash_attention_forward,
    get_optimal_block_sizes,
    lm_to_lse,
    lse_to_lm,
)
from jax_kvblock.attention import bhnd, cuda, memory_estimate
from jax_kvblock.core import ffi

SHAPE = (2, 3, 150, 16)


def plain(q: Any, k: Any, v: Any) -> tuple:
    """(O, l, m) written out in NumPy's float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    m = scores.max(-1)
    weights = np.exp(scores - m[..., None])
    l = weights.sum(-1)
    return weights @ v / l[..., None], l, m


def plain_backward(q: Any, k: Any, v: Any, d_o: Any) -> tuple:
    """(dQ, dK, dV), the same way."""
    q, k, v, d_o = (np.asarray(a, np.float64) for a in (q, k, v, d_o))
    scale = 1 / np.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = d_o @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_o


def draw(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def inputs(rng: np.random.Generator, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [draw(rng, *SHAPE, dtype=dtype) for _ in range(4)]


TILE = "Bc=32, Br=32, use_half=False"
SIGNATURES = {
    flash_attention_forward: f"Q, K, V, {TILE}",
    flash_attention_backward: f"Q, K, V, O, dO, l, m, {TILE}",
    FlashAttention: "bc=32, br=32, use_half=False",
    FlashAttention.__call__: "self, Q, K, V",
    FlashAttention.forward: "self, Q, K, V",
    FlashAttention.backward: "self, Q, K, V, O, dO, l, m",
    get_optimal_block_sizes: "sequence_length, head_dim",
    estimate_memory_usage: "batch_size, num_heads, seq_len, head_dim, use_half=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_the_five_names_have_their_signatures(function: Any) -> None:
    """What is added is by keyword alone, and may be left out."""
    parameters = inspect.signature(function).parameters.values()
    positional = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(positional) == SIGNATURES[function]
    added = [p for p in parameters if p.kind != p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind == p.KEYWORD_ONLY and p.default is not p.empty for p in added)


@pytest.mark.parametrize("tile", [(32, 32), (16, 64), (512, 16), (64, 128)])
def test_forward_and_backward(rng: np.random.Generator, tile: tuple[int, int]) -> None:
    q, k, v, d_o = inputs(rng)
    o, l, m = flash_attention_forward(q, k, v, *tile, return_residuals=True)
    for got, want in zip((o, l, m), plain(q, k, v), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    gradients = flash_attention_backward(q, k, v, o, d_o, l, m, *tile)
    for got, want in zip(gradients, plain_backward(q, k, v, d_o), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6)


def test_the_tile_decides_how_the_work_is_cut(rng: np.random.Generator) -> None:
    x = jax.ShapeDtypeStruct((1, 1, 2048, 16), jnp.float32)

    def temporaries(tile: tuple[int, int]) -> int:
        call = jax.jit(lambda x: flash_attention_forward(x, x, x, *tile))
        return call.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries((512, 512)) > temporaries((32, 32)) + 4 * 512 * 512


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("use_half", [False, True])
def test_dtypes(rng: np.random.Generator, dtype: Any, use_half: bool) -> None:
    q, k, v, d_o = inputs(rng, dtype)
    half = FlashAttention(64, 32, use_half)
    o, l, m = half.forward(q, k, v, return_residuals=True)
    gradients = half.backward(q, k, v, o, d_o, l, m)
    assert {a.dtype for a in (o, *gradients)} == {jnp.dtype(dtype)}
    assert l.dtype == m.dtype == jnp.float32
    eps = 1e-6
    if use_half or dtype != jnp.float32:
        eps = float(jnp.finfo(dtype if dtype == jnp.bfloat16 else jnp.float16).eps)
    wanted = [plain(q, k, v)[0], *plain_backward(q, k, v, d_o)]
    for got, want in zip((o, *gradients), wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error < 5 * eps * max(1, np.abs(want).max())
    if use_half and dtype == jnp.float32:
        full = flash_attention_forward(q, k, v, 64, 32)
        assert not np.array_equal(o, full)


def test_every_pair_with_the_same_lse_serves(rng: np.random.Generator) -> None:
    q, k, v, d_o = inputs(rng)
    o, l, m = flash_attention_forward(q, k, v, return_residuals=True)
    want = flash_attention_backward(q, k, v, o, d_o, l, m)
    for pair in (lse_to_lm(lm_to_lse(l, m)), (l * 4, m - np.log(4))):
        got = flash_attention_backward(q, k, v, o, d_o, *pair)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, atol=3e-6)


def test_l_m_and_lse_convert_both_ways(rng: np.random.Generator) -> None:
    q, k, v, _ = inputs(rng)
    _, l, m = flash_attention_forward(q, k, v, return_residuals=True)
    swapped = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]
    _, lse = kv.flash_attention(*swapped, return_lse=True)
    lse = jnp.swapaxes(lse, 1, 2)
    np.testing.assert_allclose(lm_to_lse(l, m), lse, rtol=1e-6, atol=1e-6)
    for got, want in zip(lse_to_lm(lse, m), (l, m), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert (lse_to_lm(lse)[0] == 1).all()


def test_rows_without_keys_convert_too() -> None:
    lse = jnp.array([-jnp.inf, 0.0, 3.0])
    for m in (None, jnp.array([-jnp.inf, -1.0, 2.0])):
        l, top = lse_to_lm(lse, m)
        assert l[0] == 0 and top[0] == -jnp.inf
        np.testing.assert_allclose(lm_to_lse(l, top), lse, atol=2e-7)


def test_transforms(rng: np.random.Generator) -> None:
    q, k, v, d_o = inputs(rng)
    attend = FlashAttention()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v) * d_o).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    o, l, m = jax.jit(lambda *a: attend.forward(*a, return_residuals=True))(q, k, v)
    own = attend.backward(q, k, v, o, d_o, l, m)
    for one, other in zip(gradients, own, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)

    pairs = [jnp.stack([a, a[::-1]]) for a in (q, k, v, d_o)]
    both = jax.vmap(lambda q, k, v: attend.forward(q, k, v, return_residuals=True))(
        *pairs[:3]
    )
    np.testing.assert_allclose(both[2][0], m, rtol=1e-6)
    mapped = jax.vmap(attend.backward)(*pairs[:3], both[0], pairs[3], *both[1:])
    for one, other in zip(mapped, own, strict=True):
        np.testing.assert_allclose(one[0], other, atol=3e-6)
        np.testing.assert_allclose(one[1], other[::-1], atol=3e-6)


# ---- tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 40, 100, 1024])
def test_the_optimal_tile_is_a_tile(length: int, head_dim: int) -> None:
    tile = get_optimal_block_sizes(length, head_dim)
    on_gpu = jax.default_backend() == "gpu"
    best = cuda.best_kernels()[0] if on_gpu else "xla"
    assert tile in kv.available_tiles(head_dim)[best]


def test_compiled_tiles_are_those_of_the_kernels_and_fit() -> None:
    source = Path(__file__).parents[2] / "cpp/ops/attention/generic/forward/shape.cuh"
    shapes = re.findall(
        r"ForwardShape\{(\d+), (\d+), \d+, \d+, (true|false), (\d)\}",
        source.read_text(),
    )
    tiles = [  # float32 comes first
        *((4, *item) for item in cuda.tiles_of("cuda", jnp.float32).items()),
        *((2, *item) for item in cuda.tiles_of("cuda", jnp.float16).items()),
    ]
    for (size, dim, tile), shape in zip(tiles, shapes, strict=True):
        queries, keys, stages = (int(shape[i]) for i in (0, 1, 3))
        assert tile == (queries, keys)
        # Q and the stages of K and V; one takes Q's place where Q is held.
        q, stage = size * dim * queries, 2 * size * dim * keys
        used = q + stages * stage
        if shape[2] == "true":
            used = max(q, stage) + stage
        assert used <= 96 * 1024


def test_hopper_s_tiles_are_those_of_the_kernels(tmp_path: Path) -> None:
    """Asks the table itself, by compiling it."""
    dims = cuda.FORWARD_TILES["cuda_sm90"]
    rows = "\n".join(
        f"  print({d}, ForwardTilesOf({d}, {d}, InstanceOf({d}, ForwardKind::kWide)));"
        for d in dims
    )
    said = run_cpp(
        tmp_path,
        f"""#include <cstdio>
#include "ops/attention/hopper/forward/tiles.h"
using namespace kvblock::hopper;
void print(int dim, ForwardTiles t) {{
  std::printf("%d %d %d\\n", dim, 64 * t.consumers, t.keys);
}}
int main() {{
{rows}
}}
""",
    )
    found = {int(d): (int(q), int(k)) for d, q, k in map(str.split, said.splitlines())}
    assert found == dims


@pytest.mark.parametrize(
    ("kernels", "tiles"),
    [
        (("cuda",), [(64, 128), (32, 64)]),
        (("cuda_sm90", "cuda"), [(176, 128), (80, 128)]),
    ],
)
def test_the_optimal_tile_on_a_gpu_is_compiled(
    monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, ...], tiles: list
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cuda, "best_kernels", lambda: kernels)
    assert get_optimal_block_sizes(1024, 128) == tiles[0]
    assert get_optimal_block_sizes(1024, 200) == tiles[1]
    with pytest.raises(ValueError, match="multiple of 8 up to 256"):
        get_optimal_block_sizes(1024, 257)


def test_a_tile_stands_for_the_kernels_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "best_kernels", lambda: ("cuda_sm90", "cuda"))
    x = jnp.zeros((1, 1, 32, 64), jnp.float16)
    for tile, implementation, kernels in (
        ((128, 192), None, "cuda_sm90"),
        ((128, 128), None, "cuda"),
        ((32, 32), None, "cuda_sm90"),  # the default
        ((32, 64), "xla", ""),
    ):
        config, _ = bhnd._call("here", x, x, x, *tile, False)
        assert (config.implementation, config.kernels) == (implementation, kernels)
        assert (config.xla_block_kv, config.xla_block_q) == tile


def test_a_tile_that_is_not_there_lists_those_that_are(
    rng: np.random.Generator,
) -> None:
    q, k, v, _ = inputs(rng)
    words = (
        r"\(Bc, Br\) = \(48, 32\) for head dim 16; .*\(128, 128\).*\[16, 32, .*512\]"
    )
    with pytest.raises(ValueError, match=rf"flash_attention_forward: .*{words}"):
        flash_attention_forward(q, k, v, Bc=48)
    with pytest.raises(ValueError, match=r"no tile \(Bc, Br\) = \(32, 1024\)"):
        FlashAttention(br=1024)(q, k, v)


# ---- memory --------------------------------------------------------------------------

MEMORY = [
    (1, 8, 1024, 64, {}),
    (2, 4, 2048, 128, {}),
    (4, 8, 300, 64, {}),
    (1, 2, 4096, 32, {}),
    (1, 8, 1024, 64, {"Bc": 256, "Br": 128}),
    (2, 2, 384, 256, {"Bc": 256, "Br": 128}),
    (1, 4, 1000, 128, {"Bc": 64, "Br": 32}),
    (1, 4, 1024, 64, {"Bc": 512, "Br": 512}),
    (8, 16, 1024, 64, {}),
    (4, 8, 512, 64, {}),
]


@pytest.mark.wide
@pytest.mark.usefixtures("four_cpus")  # the blocks that it counts are the CPU's
@pytest.mark.parametrize(("b", "h", "n", "d", "tile"), MEMORY)
@pytest.mark.parametrize("use_half", [False, True])
def test_the_memory_estimate_agrees_with_the_compiler(
    b: int, h: int, n: int, d: int, tile: dict, use_half: bool
) -> None:
    used = estimate_memory_usage(b, h, n, d, use_half, **tile)
    x = jax.ShapeDtypeStruct((b, h, n, d), jnp.float16 if use_half else jnp.float32)
    row = jax.ShapeDtypeStruct((b, h, n), jnp.float32)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return flash_attention_forward(q, k, v, use_half=use_half, **tile)

    def backward(*args: Any) -> Any:
        return flash_attention_backward(*args, use_half=use_half, **tile)

    stats = jax.jit(forward).lower(x, x, x).compile().memory_analysis()
    assert used["input_memory"] == stats.argument_size_in_bytes
    assert used["output_memory"] == stats.output_size_in_bytes
    assert used["internal_memory"] == pytest.approx(stats.temp_size_in_bytes, rel=0.05)
    whole = sum(used[f"{part}_memory"] for part in ("input", "internal", "output"))
    assert used["total_memory"] == whole
    assert used["total_memory_mb"] == whole / 2**20

    stats = jax.jit(backward).lower(x, x, x, x, x, row, row).compile().memory_analysis()
    assert used["backward_memory"] == pytest.approx(stats.temp_size_in_bytes, rel=0.33)


def test_the_estimate_of_the_kernels_counts_what_they_work_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ffi, "platform_of", lambda device: "cuda")
    monkeypatch.setattr(
        memory_estimate, "find_tile", lambda _, bc, br, *call: (bc, br, "cuda_sm90")
    )
    used = estimate_memory_usage(2, 4, 1000, 64, True)
    one, row = 2 * 4 * 1000 * 64 * 2, 2 * 4 * 1000 * 4
    # dq in float32 and whole tiles of 64 rows, which have three words each.
    sums = 2 * 4 * 16 * (64 * 64 * 4 + 3 * 4)
    assert used["internal_memory"] == 3 * one
    assert used["backward_memory"] == 4 * one + sums + 2 * row


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("b", "h", "n", "d"),
    [(2, 4, 1024, 64), (1, 8, 2048, 128), (4, 2, 512, 256), (2, 16, 1000, 128)],
)
def test_the_estimate_of_the_kernels_agrees_with_the_compiler(
    b: int, h: int, n: int, d: int
) -> None:
    bc, br = get_optimal_block_sizes(n, d)
    used = estimate_memory_usage(b, h, n, d, True, Bc=bc, Br=br)
    x = jax.ShapeDtypeStruct((b, h, n, d), jnp.float16)
    row = jax.ShapeDtypeStruct((b, h, n), jnp.float32)
    attend = FlashAttention(bc, br)
    forward = jax.jit(attend.forward).lower(x, x, x).compile().memory_analysis()
    assert used["internal_memory"] == pytest.approx(
        forward.temp_size_in_bytes, rel=0.05
    )
    if "cuda_sm90" in cuda.best_kernels():  # the others' is not within 5 %
        backward = jax.jit(attend.backward).lower(x, x, x, x, x, row, row).compile()
        assert used["backward_memory"] == pytest.approx(
            backward.memory_analysis().temp_size_in_bytes, rel=0.05
        )


# ---- S4's examples, in JAX -----------------------------------------------------------


def test_basic_usage(rng: np.random.Generator) -> None:
    Q, K, V = (draw(rng, 4, 8, 512, 64) for _ in range(3))
    output = flash_attention_forward(Q, K, V)
    assert output.shape == (4, 8, 512, 64)
    np.testing.assert_allclose(output, plain(Q, K, V)[0], atol=5e-6)

    output = flash_attention_forward(Q, K, V, Bc=64, Br=32, use_half=False)
    np.testing.assert_allclose(output, plain(Q, K, V)[0], atol=5e-6)


class TransformerBlock(nnx.Module):
    """S4's training example: attention of x to itself, and an MLP."""

    def __init__(self, embed_dim: int, rngs: nnx.Rngs) -> None:
        self.attention = FlashAttention(use_half=True)
        self.norm1 = nnx.LayerNorm(embed_dim, rngs=rngs)
        self.norm2 = nnx.LayerNorm(embed_dim, rngs=rngs)
        self.up = nnx.Linear(embed_dim, 4 * embed_dim, rngs=rngs)
        self.down = nnx.Linear(4 * embed_dim, embed_dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Self-attention
        attn_out = self.attention(x, x, x)
        x = self.norm1(x + attn_out)

        # MLP
        mlp_out = self.down(nnx.gelu(self.up(x)))
        return self.norm2(x + mlp_out)


def test_training_loop(rng: np.random.Generator) -> None:
    block = TransformerBlock(32, nnx.Rngs(0))
    x, target = draw(rng, 2, 4, 64, 32), draw(rng, 2, 4, 64, 32)

    @nnx.jit
    def step(block: TransformerBlock) -> jax.Array:
        def loss(block: TransformerBlock) -> jax.Array:
            return ((block(x) - target) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(block)
        params = nnx.state(block, nnx.Param)
        nnx.update(block, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return value

    losses = [float(step(block)) for _ in range(20)]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]


def test_memory_optimization(capsys: pytest.CaptureFixture) -> None:
    batch_size, num_heads, seq_len, head_dim = 8, 16, 2048, 64
    mem_info = estimate_memory_usage(
        batch_size, num_heads, seq_len, head_dim, use_half=True
    )
    print(f"Total memory: {mem_info['total_memory_mb']:.1f} MB")
    assert "Total memory: " in capsys.readouterr().out
    assert set(mem_info) == {
        "input_memory",
        "internal_memory",
        "output_memory",
        "total_memory",
        "total_memory_mb",
        "backward_memory",
    }
    scores = 4 * batch_size * num_heads * seq_len**2
    assert mem_info["total_memory"] < scores / 4

    bc, br = get_optimal_block_sizes(seq_len, head_dim)
    assert any((bc, br) in tiles for tiles in kv.available_tiles(head_dim).values())
