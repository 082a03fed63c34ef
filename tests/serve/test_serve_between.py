"""The kernel between two attentions, its CUDA source run as it is where no GPU is.

It is held to float64 in NumPy, not to what XLA computes in its place.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembler import assemble
from emulated_kernels import INSTRUCTIONS, SHARED, emulate
from llama_engines import ask
from serve import between, llama
from serve.config import Config, frequencies
from serve.engine import Engine
from serve.models import ByteTokenizer, LoadedModel
from serve.runner import row_sizes

from jax_kvblock import BlockSpec, KVPool

# What stands for instructions. All CTAs of the grid run at once; four are a cluster.
PRELUDE = (
    INSTRUCTIONS
    + """
#include <cmath>
#include "device/cluster.cuh"
#include "device/ldmatrix.cuh"
#include "device/tensor_copy.cuh"
inline void LoadMatrices(unsigned (&r)[4], const void* row) {
  kvblock::LoadMatrices(r, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}
template <typename T>
T LoadFresh(const T* from) {
  return *from;
}
inline unsigned AddressOf(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
inline int ClusterRank() { return emulator::cta->rank % 4; }
inline void ClusterArrive() {}
inline void ClusterWait() { emulator::MeetInCluster(4); }
inline void Now(int&) {}
inline void MakeBarrier(unsigned long long* barrier, int bytes) {
  kvblock::BarrierInit(AddressOf(barrier), 1);
  kvblock::BarrierExpect(AddressOf(barrier), bytes);
}
inline void WaitForBytes(unsigned long long* barrier) {
  kvblock::ClusterBarrierWait(AddressOf(barrier), 0);
}
inline void Send(const float* own, float4 x, const unsigned long long* barrier,
                 int rank) {
  const int there = emulator::cta->rank / 4 * 4 + rank;
  const float all[4] = {x.x, x.y, x.z, x.w};
  for (int i = 0; i < 4; ++i) {
    kvblock::SendFloat(AddressOf(own + i), all[i], AddressOf(barrier), there);
  }
}
inline void ShowBarriers() {}
inline void CopyBytes(void* to, const void* from, int bytes,
                      unsigned long long* barrier) {
  kvblock::LoadBytes(AddressOf(to), from, bytes, AddressOf(barrier));
}
inline void GridMeet() { emulator::MeetInGrid(); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define __cluster_dims__(...)
"""
    + SHARED
)
VOCABULARY = ByteTokenizer.vocab_size
# In the emulator: 12 CTAs, whose clusters have unlike numbers of tiles; or 36, of which
# the last four have nothing of two products. Whether rotations are interleaved.
LAUNCHES = {"interleaved": (True, 3), "halves": (False, 3), "spread": (True, 9)}
SMALL = between.Sizes(width=64, heads=128, inner=576, kv=16)
SMOLLM2 = between.Sizes(width=576, heads=576, inner=1536, kv=192)


@pytest.fixture(params=LAUNCHES)
def config(everywhere, request, monkeypatch):
    """Three layers of a model, and how the coordinates of its rotations lie."""
    interleaved, clusters = LAUNCHES[request.param]
    if everywhere == "gpu":  # of the small one most clusters have nothing there
        small = request.param == "spread"
        return config_of(*((SMALL, 16) if small else (SMOLLM2, 64)), interleaved)
    monkeypatch.setattr(between, "CLUSTERS", clusters)
    if everywhere == "emulator":
        request.getfixturevalue("between_runs")
    return config_of(SMALL, 16, interleaved)


@pytest.fixture
def room(monkeypatch):
    """As if every device here were a Hopper."""
    monkeypatch.setattr(between, "_has_room", lambda device: True)


@pytest.fixture(scope="session")
def between_runs(kernel_handlers, tmp_path_factory):
    """The driver that stands in knows the kernel for 16, 32 and 64 rows."""
    made = []
    for interleaved, clusters in LAUNCHES.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(between, "CLUSTERS", clusters)
            config = config_of(SMALL, 16, interleaved)
            made += [between.kernel(config, SMALL, padded) for padded in (16, 32, 64)]
    source = between.SOURCE.read_text()
    emulate(
        kernel_handlers, tmp_path_factory, "between", source, *made, prelude=PRELUDE
    )


def config_of(sizes, dim, interleaved=True):
    return Config(
        num_layers=3,
        width=sizes.width,
        num_heads=sizes.heads // dim,
        num_kv_heads=sizes.kv // dim,
        head_dim=dim,
        vocab_size=VOCABULARY,
        norm_eps=0.25,
        inv_freq=frequencies(1e4, dim),
        interleaved=interleaved,
        max_tokens=128,
    )


def sizes_of(config):
    return SMOLLM2 if config.head_dim == 64 else SMALL


def pool_of(config, blocks=20):
    spec = BlockSpec(3, 2, 4, config.num_kv_heads, config.head_dim, jnp.bfloat16)
    return KVPool.zeros(spec, blocks)


def rows_of(slots, **more):
    return llama.Rows(*[None] * 6, None)._replace(slots=jnp.asarray(slots), **more)


def layers(rng, sizes, count=2):
    """Weights of some layers."""

    def matrix(outputs, inputs):
        x = rng.standard_normal((outputs, inputs)) * inputs**-0.5
        return jnp.asarray(x, jnp.bfloat16)

    def norm():
        return jnp.asarray(rng.uniform(0.5, 1.5, sizes.width), jnp.float32)

    return [
        {
            "attn_norm": norm(),
            "mlp_norm": norm(),
            "qkv": matrix(sizes.heads + 2 * sizes.kv, sizes.width),
            "out": matrix(sizes.width, sizes.heads),
            "gate_up": matrix(2 * sizes.inner, sizes.width),
            "down": matrix(sizes.width, sizes.inner),
        }
        for _ in range(count)
    ]


def params_of(rng, sizes):
    """Of a model of three layers."""
    embedding = rng.standard_normal((VOCABULARY, sizes.width))
    return {
        "embedding": jnp.asarray(embedding, jnp.bfloat16),
        "final_norm": jnp.ones(sizes.width),
        "layers": layers(rng, sizes, count=3),
    }


def truth(config, weights, following, x, attended, cos_sin):
    """x, queries, keys and values in float64."""
    w = {name: np.asarray(y, np.float64) for name, y in weights.items()}
    after = {name: np.asarray(y, np.float64) for name, y in following.items()}

    def normed(x, norm):
        squares = np.mean(x * x, axis=1, keepdims=True)
        return x / np.sqrt(squares + config.norm_eps) * norm

    x = np.asarray(x, np.float64)
    x = x + np.asarray(attended, np.float64).reshape(len(x), -1) @ w["out"].T
    gate, up = np.split(normed(x, w["mlp_norm"]) @ w["gate_up"].T, 2, axis=1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    made = normed(x, after["attn_norm"]) @ after["qkv"].T
    made = made.reshape(len(x), -1, config.head_dim)
    q, k, v = np.split(made, np.cumsum([config.num_heads, config.num_kv_heads]), axis=1)
    return x, turned(config, q, cos_sin), turned(config, k, cos_sin), v


def turned(config, x, cos_sin):
    """Each pair of coordinates as a complex number, times its rotation."""
    cos, sin = np.split(np.asarray(cos_sin, np.float64)[:, None], 2, axis=-1)
    if config.interleaved:
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
    low, high = np.split(x, 2, axis=-1)
    pairs = (low + 1j * high) * (cos + 1j * sin)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def assert_near(got, want):
    """What is multiplied has 8 bits, and sums are of numbers of about 1."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    wrong = np.abs(got - want)
    assert (wrong <= 0.02 + 2**-8 * np.abs(want)).all(), wrong.max()


@pytest.mark.parametrize("count", [1, 16, 23, 37, 64])
def test_between(config, rng, count):
    sizes, pool = sizes_of(config), pool_of(config)
    weights, following = layers(rng, sizes)
    assert between.serves(config, weights, count, pool) or sizes == SMALL
    x = jnp.asarray(rng.standard_normal((count, sizes.width)), jnp.float32)
    shape = count, config.num_heads, config.head_dim
    attended = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    slots = rng.permutation(80)[:count].astype(np.int32)
    slots[2::7] = -1
    slots[3::7] = 80  # behind the last one: nowhere, too
    cos_sin = llama.turns(config, jnp.asarray(rng.integers(0, 500, count), jnp.int32))
    want = truth(config, weights, following, x, attended, cos_sin)
    more = x, attended, llama.Place(pool, jnp.int32(1), rows_of(slots), cos_sin)
    call = jax.jit(between.between, static_argnums=0)
    x, q, filled = call(config, weights, following, *more)
    assert x.dtype == jnp.float32 and q.dtype == jnp.bfloat16
    assert_near(x, want[0])
    assert_near(q, want[1])
    data = np.array(filled.data, np.float64)
    for slot, *of_row in zip(slots, *want[2:], strict=True):
        if 0 <= slot < 80:
            place = data[slot // 4, 1, :, slot % 4]
            assert_near(place, np.stack(of_row))
            place[...] = 0
    assert not data.any()  # nothing else was written
    for one, two in zip(
        (x, q, *filled.arrays),
        jax.tree.leaves(call(config, weights, following, *more)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


def test_a_model_by_it(config, rng):
    """Logits and cache are those of XLA between the layers, and the kernel is used."""
    params, pool = params_of(rng, sizes_of(config)), pool_of(config)
    rows = llama.Rows(
        tokens=jnp.asarray([3, 1, 4, 1, 5], jnp.int32),
        positions=jnp.asarray([0, 1, 2, 0, 1], jnp.int32),
        slots=jnp.asarray([4, 5, 6, 8, 9], jnp.int32),
        tables=jnp.asarray([[1], [2]], jnp.int32),
        kv_lens=jnp.asarray([3, 2], jnp.int32),
        query_start=jnp.asarray([0, 3, 5], jnp.int32),
        tree_mask=None,
    )

    def run(join):
        def forward(params, pool):
            return llama.forward(config, params, pool, rows, jnp.arange(5), join)

        calls = str(jax.make_jaxpr(forward)(params, pool)).count("kernel_call[")
        assert calls == (0 if join is None else 1)  # it is traced once
        return jax.jit(forward)(params, pool)

    (got, filled), (want, as_known) = run(between.between), run(None)
    for one, two in ((got, want), (filled.data, as_known.data)):
        one, two = (np.asarray(x, np.float32) for x in (one, two))
        np.testing.assert_allclose(one, two, atol=0.05 * np.abs(two).max())


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda w: w, 0),
        (lambda w: w, 65),
        (lambda w: w | {"qkv_bias": jnp.zeros(960)}, 8),
        (lambda w: w | {"q_norm": jnp.zeros(64)}, 8),
        (lambda w: w | {"mlp_norm": w["mlp_norm"].astype(jnp.bfloat16)}, 8),
        (lambda w: jax.tree.map(lambda x: x.astype(jnp.float32), w), 8),
        (lambda w: w | {"down": w["down"][:, :1500]}, 8),
        (lambda w: w | {"down": w["down"][:, :128]}, 64),
    ],
    ids=[
        "none",
        "many",
        "biases",
        "norms of heads",
        "narrow norm",
        "float32",
        "odd inner",
        "few inner",
    ],
)
def test_where_xla_computes(room, rng, change, rows):
    config = config_of(SMOLLM2, 64)
    (weights,) = layers(rng, SMOLLM2, count=1)
    params, pool = {"layers": [weights]}, pool_of(config, 4)
    assert between.choose(config, params, 64, pool) is between.between
    other = {"layers": [weights, change(weights)]}  # one layer is enough
    assert between.choose(config, other, rows, pool) is llama.joined


@pytest.mark.parametrize(
    ("capability", "cores"), [("8.0", 108), ("10.0", 148), ("9.0", 56)]
)
def test_gpus_where_xla_computes(rng, monkeypatch, capability, cores):
    """Other architectures, too few multiprocessors; a CPU."""
    config, pool = config_of(SMOLLM2, 64), pool_of(config_of(SMOLLM2, 64), 4)
    params = params_of(rng, SMOLLM2)
    hopper = SimpleNamespace(compute_capability="9.0", core_count=132)
    other = SimpleNamespace(compute_capability=capability, core_count=cores)
    for gpu, join in ((hopper, between.between), (other, llama.joined)):
        monkeypatch.setattr(between.jax, "local_devices", lambda gpu=gpu: [gpu])
        assert between.choose(config, params, 8, pool) is join
    monkeypatch.setattr(between.jax, "local_devices", lambda: jax.devices("cpu"))
    assert between.choose(config, params, 8, pool) is llama.joined


@pytest.mark.parametrize("padded", [16, 32, 64])
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_compiles_for_hopper(tmp_path, padded, interleaved):
    """NVRTC takes the text, and ptxas, where it is, the instructions in it."""
    made = between.kernel(config_of(SMOLLM2, 64, interleaved), SMOLLM2, padded)
    said = assemble(made.image, tmp_path)
    assert "0 bytes spill stores" in said
    (registers,) = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= 128  # two thread blocks on a multiprocessor


def test_without_nvrtc_xla_computes(room, rng, monkeypatch):
    def missing(*_):
        raise RuntimeError("install jax_kvblock[kernels]")

    config = config_of(SMOLLM2, 64)
    monkeypatch.setattr(between, "kernel", missing)
    with pytest.warns(UserWarning, match="XLA computes between layers: install jax_kv"):
        join = between.choose(config, params_of(rng, SMOLLM2), 8, pool_of(config, 4))
    assert join is llama.joined


def test_pools_where_xla_computes(room, rng):
    config = config_of(SMOLLM2, 64)
    params, pool = params_of(rng, SMOLLM2), pool_of(config, 4)
    layered = KVPool.zeros(pool.spec, 4, contiguous=False)
    turned_pool = KVPool.zeros(pool.spec.replace(layout="HND"), 4)
    wide = KVPool.zeros(pool.spec.replace(dtype=jnp.float32), 4)
    for other in (layered, turned_pool, wide):
        assert between.choose(config, params, 8, other) is llama.joined


def test_a_layer_that_does_not_fit():
    """SmolLM2-360M's layers are 20 MB: 156 KB of a thread block's shared memory."""
    large = between.Sizes(width=960, heads=960, inner=2560, kv=320)
    for halves in (False, True):
        assert SMOLLM2.shared_bytes(64, halves) <= between.MOST_SHARED
        assert large.shared_bytes(16, halves) > between.MOST_SHARED


@pytest.mark.parametrize("fuse", [False, True])
def test_an_engine_takes_it(room, rng, monkeypatch, fuse):
    config, params = config_of(SMOLLM2, 64), params_of(rng, SMOLLM2)
    model = LoadedModel("fused", config, params, ByteTokenizer(), jnp.dtype("bfloat16"))
    taken = []

    def spy(*arguments):
        taken.append(len(arguments[3]))
        return llama.joined(*arguments)

    monkeypatch.setattr(between, "between", spy)
    how = {} if fuse else {"fuse_layers": False}  # where it serves, if nothing is said
    engine = Engine(model, num_blocks=32, max_tokens_per_step=128, **how)
    stream = ask(engine, range(20), most=4)
    engine.run()
    engine.stop()
    assert stream.finish_reason == "length" and stream.num_new_tokens == 4
    assert len(taken) % 2 == 0  # between three layers
    assert max(taken, default=0) <= between.MOST_ROWS
    decoding = row_sizes(model.dtype, 8, 0, 128)[0]
    assert (decoding in taken) == fuse
