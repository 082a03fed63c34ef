"""The kernel between two attentions, its CUDA source run as it is where no GPU is.

It is held to float64 in NumPy, not to what XLA computes in its place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import emulate
from llama_engines import ask
from serve import between, llama
from serve.config import Config, frequencies
from serve.engine import Engine
from serve.models import ByteTokenizer, LoadedModel

from jax_kvblock import BlockSpec, KVPool, kernels

# What stands for instructions. All CTAs of the grid run at once; four are a cluster.
PRELUDE = """
#define KVBLOCK_EMULATOR
#include <cmath>
#include "device/cluster.cuh"
#include "device/cp_async.cuh"
#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tensor_copy.cuh"
inline void Mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  kvblock::Mma16x8x16<__nv_bfloat16>(c, a, b0, b1);
}
inline void LoadMatrices(unsigned (&r)[4], const void* row) {
  kvblock::LoadMatrices(r, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}
inline void Copy16(void* to, const void* from) { kvblock::CopyAsync<16>(to, from); }
inline void EndCopies() { kvblock::CopyAsyncCommit(); }
template <int kLast>
void WaitForCopies() {
  kvblock::CopyAsyncWait<kLast>();
}
template <typename T>
T LoadFresh(const T* from) {
  return *from;
}
inline unsigned AddressOf(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
inline int ClusterRank() { return emulator::cta->rank % 4; }
inline void ClusterBegin() { emulator::MeetInCluster(4); }
inline void MakeBarrier(unsigned long long* barrier, int bytes) {
  kvblock::BarrierInit(AddressOf(barrier), 1);
  kvblock::BarrierExpect(AddressOf(barrier), bytes);
}
inline void WaitForSent(unsigned long long* barrier) {
  kvblock::ClusterBarrierWait(AddressOf(barrier), 0);
}
inline void Send(const float* own, float x, const unsigned long long* barrier,
                 int rank) {
  const int there = emulator::cta->rank / 4 * 4 + rank;
  kvblock::SendFloat(AddressOf(own), x, AddressOf(barrier), there);
}
inline void Send(const float* own, float x, float y, const unsigned long long* barrier,
                 int rank) {
  Send(own, x, barrier, rank);
  Send(own + 1, y, barrier, rank);
}
inline void GridMeet() { emulator::MeetInGrid(); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define shared kvblock::DynamicShared()
"""
VOCABULARY = ByteTokenizer.vocab_size
CLUSTERS = 3  # in the emulator: 12 CTAs
# Tiles of 8 that three clusters share unevenly, and of qkv fewer than clusters.
SMALL = between.Sizes(width=64, heads=128, inner=192, qkv=16)
# Of a model: 8 heads and 1 KV head of 16.
SMALL_MODEL = SMALL._replace(qkv=160)
SMOLLM2 = between.Sizes(width=576, heads=576, inner=1536, qkv=960)


@pytest.fixture
def sizes(everywhere, request, monkeypatch):
    if everywhere == "gpu":
        return SMOLLM2
    monkeypatch.setattr(between, "CLUSTERS", CLUSTERS)
    if everywhere == "emulator":
        request.getfixturevalue("between_runs")
    return SMALL


@pytest.fixture(scope="session")
def between_runs(kernel_handlers, tmp_path_factory):
    """The driver that stands in knows the kernel for 16, 32 and 64 rows."""
    made = [
        kernels.from_cuda(
            between.SOURCE,
            f"between<{tiles}, {CLUSTERS}, {', '.join(map(str, sizes))}>",
        )
        for sizes, tiles in ((SMALL, 1), (SMALL, 2), (SMALL, 4), (SMALL_MODEL, 1))
    ]
    source = between.SOURCE.read_text()
    emulate(
        kernel_handlers, tmp_path_factory, "between", source, *made, prelude=PRELUDE
    )


def layers(rng, sizes, count=2, **more):
    """Weights of some layers."""

    def matrix(outputs, inputs):
        x = rng.standard_normal((outputs, inputs)) * inputs**-0.5
        return jnp.asarray(x, jnp.bfloat16)

    def norm():
        return jnp.asarray(rng.uniform(0.5, 1.5, sizes.width), jnp.float32)

    made = [
        {
            "attn_norm": norm(),
            "mlp_norm": norm(),
            "qkv": matrix(sizes.qkv, sizes.width),
            "out": matrix(sizes.width, sizes.heads),
            "gate_up": matrix(2 * sizes.inner, sizes.width),
            "down": matrix(sizes.width, sizes.inner),
            **more,
        }
        for _ in range(count)
    ]
    return made


def config_of(sizes, layers=2, dim=16):
    heads = sizes.heads // dim
    return Config(
        num_layers=layers,
        width=sizes.width,
        num_heads=heads,
        num_kv_heads=max(1, (sizes.qkv // dim - heads) // 2),
        head_dim=dim,
        vocab_size=VOCABULARY,
        norm_eps=0.25,
        inv_freq=frequencies(1e4, dim),
        interleaved=True,
        max_tokens=128,
    )


def params_of(rng, sizes):
    """Of a model of three layers."""
    embedding = rng.standard_normal((VOCABULARY, sizes.width))
    return {
        "embedding": jnp.asarray(embedding, jnp.bfloat16),
        "final_norm": jnp.ones(sizes.width),
        "layers": layers(rng, sizes, count=3),
    }


def truth(config, weights, following, x, attended):
    """x and qkv in float64; what is multiplied is rounded once, as in the kernel."""
    w = {name: np.asarray(y, np.float64) for name, y in weights.items()}
    after = {name: np.asarray(y, np.float64) for name, y in following.items()}

    def normed(x, norm):
        squares = np.mean(x * x, axis=1, keepdims=True)
        return x / np.sqrt(squares + config.norm_eps) * norm

    x = np.asarray(x, np.float64)
    x = x + np.asarray(attended, np.float64).reshape(len(x), -1) @ w["out"].T
    gate, up = np.split(normed(x, w["mlp_norm"]) @ w["gate_up"].T, 2, axis=1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    return x, normed(x, after["attn_norm"]) @ after["qkv"].T


@pytest.mark.parametrize("rows", [1, 16, 23, 37, 64])
def test_between(sizes, rng, rows):
    weights, following = layers(rng, sizes)
    assert between.serves(weights, rows)
    x = jnp.asarray(rng.standard_normal((rows, sizes.width)), jnp.float32)
    attended = jnp.asarray(
        rng.standard_normal((rows, sizes.heads // 16, 16)), jnp.bfloat16
    )
    call = jax.jit(between.between, static_argnums=0)
    config = config_of(sizes)
    want = truth(config, weights, following, x, attended)
    got = call(config, weights, following, x, attended)
    assert got[0].dtype == jnp.float32 and got[1].dtype == jnp.bfloat16
    assert got[1].shape == (rows, sizes.qkv // 16, 16)
    # What is multiplied has 8 bits; sums are of numbers of about 1.
    np.testing.assert_allclose(got[0], want[0], atol=0.02)
    wrong = np.abs(np.asarray(got[1], np.float64).reshape(rows, -1) - want[1])
    assert (wrong <= 0.02 + 2**-8 * np.abs(want[1])).all()
    again = call(config, weights, following, x, attended)
    for one, two in zip(got, again, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_model_by_it(sizes, everywhere, rng):
    """Logits and cache are those of XLA between the layers, and the kernel is used."""
    dim = 16
    if everywhere == "gpu":
        dim = 64
    else:
        sizes = SMALL_MODEL
    config = config_of(sizes, layers=3, dim=dim)
    params = params_of(rng, sizes)
    spec = BlockSpec(3, 2, 16, config.num_kv_heads, dim, jnp.bfloat16)
    rows = llama.Rows(
        tokens=jnp.asarray([3, 1, 4, 1, 5], jnp.int32),
        positions=jnp.asarray([0, 1, 2, 0, 1], jnp.int32),
        slots=jnp.asarray([16, 17, 18, 32, 33], jnp.int32),
        tables=jnp.asarray([[1], [2]], jnp.int32),
        kv_lens=jnp.asarray([3, 2], jnp.int32),
        query_start=jnp.asarray([0, 3, 5], jnp.int32),
        tree_mask=None,
    )
    join = between.choose(params, 5)
    assert join is between.between

    def run(join):
        def forward(params, pool):
            return llama.forward(config, params, pool, rows, jnp.arange(5), join)

        calls = str(jax.make_jaxpr(forward)(params, pool)).count("kernel_call[")
        assert calls == (0 if join is None else 1)  # it is traced once
        return jax.jit(forward)(params, pool)

    pool = KVPool.zeros(spec, 4)
    (got, filled), (want, as_known) = run(join), run(None)
    np.testing.assert_allclose(got, want, atol=0.05 * float(np.abs(want).max()))
    near = 0.05 * float(jnp.abs(as_known.data.astype(jnp.float32)).max())
    for one, two in zip(filled.arrays, as_known.arrays, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), two.astype(jnp.float32), atol=near
        )


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda w: w, 0),
        (lambda w: w, 65),
        (lambda w: w | {"qkv_bias": jnp.zeros(16)}, 8),
        (lambda w: jax.tree.map(lambda x: x.astype(jnp.float32), w), 8),
        (lambda w: w | {"qkv": w["qkv"][:12]}, 8),
        (lambda w: w | {"down": w["down"][:, :128]}, 64),
    ],
    ids=["no rows", "many rows", "biases", "float32", "part of a tile", "few inner"],
)
def test_where_xla_computes(rng, change, rows):
    (weights,) = layers(rng, SMOLLM2, count=1)
    assert between.serves(weights, 64)
    weights = change(weights)
    assert not between.serves(weights, rows)
    assert between.choose({"layers": [weights]}, rows) is llama.joined


def test_a_layer_that_does_not_fit(rng):
    """SmolLM2-360M's layers are 20 MB: 156 KB of a thread block's shared memory."""
    large = between.Sizes(width=960, heads=960, inner=2560, qkv=1600)
    assert SMOLLM2.shared_bytes(64) <= between.MOST_SHARED < large.shared_bytes(16)


@pytest.mark.parametrize("fuse", [False, True])
def test_an_engine_takes_it_where_it_is_asked(rng, monkeypatch, fuse):
    config = config_of(SMALL_MODEL, layers=3)
    params = params_of(rng, SMALL_MODEL)
    model = LoadedModel("fused", config, params, ByteTokenizer(), jnp.dtype("bfloat16"))
    taken = []

    def spy(*arguments):
        taken.append(arguments)
        return llama.joined(*arguments)

    monkeypatch.setattr(between, "between", spy)
    engine = Engine(model, num_blocks=32, max_tokens_per_step=128, fuse_layers=fuse)
    stream = ask(engine, range(20), most=4)
    engine.run()
    engine.stop()
    assert stream.finish_reason == "length" and stream.num_new_tokens == 4
    assert len(taken) % 2 == 0  # between three layers
    rows = {len(arguments[3]) for arguments in taken}
    assert max(rows, default=0) <= between.MOST_ROWS
    assert (4 in rows) == fuse  # a step of decoding
