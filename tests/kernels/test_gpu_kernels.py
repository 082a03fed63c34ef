"""Kernels of one's own as only a GPU has them: what is captured, shared, met and lost.

Everywhere, their sources compile.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import kernels
from jax_kvblock.core.ffi import gpu_capabilities
from jax_kvblock.graphs import BlockBuilder

SOURCES = {
    "step": """
extern "C" __global__ void step(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a + x[i];
}
""",
    "reverse": """
extern __shared__ float held[];
extern "C" __global__ void reverse(const float* x, float* y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
""",
    "ranks": """
extern "C" __global__ void ranks(unsigned* rank, unsigned* size) {
  unsigned own, all;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(own));
  asm("mov.u32 %0, %cluster_nctarank;" : "=r"(all));
  if (threadIdx.x == 0) {
    rank[blockIdx.x] = own;
    size[blockIdx.x] = all;
  }
}
""",
    "meet": """
#include <cooperative_groups.h>
extern "C" __global__ void meet(float* part, float* y) {
  part[blockIdx.x] = blockIdx.x + 1.0f;
  cooperative_groups::this_grid().sync();
  float sum = 0.0f;
  for (int i = 0; i < gridDim.x; ++i) sum += part[i];
  y[blockIdx.x] = sum;
}
""",
    "box": """
// A box of 8 rows of 16 floats, from row 8 y and column 16 x of a tensor map.
struct alignas(64) Map {
  unsigned long long words[16];
};
extern "C" __global__ void box(const __grid_constant__ Map map, float* y) {
  __shared__ alignas(128) float tile[8 * 16];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(at));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(blockIdx.x * 16), "r"(blockIdx.y * 8), "r"(at)
        : "memory");
  }
  __syncthreads();
  unsigned there = 0;
  while (there == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(there)
        : "r"(at)
        : "memory");
  }
  float* mine = y + (blockIdx.y * gridDim.x + blockIdx.x) * 128;
  for (int i = threadIdx.x; i < 128; i += blockDim.x) mine[i] = tile[i];
}
""",
    "keep": """
#include <kvblock/append_buffer.cuh>
extern "C" __global__ void keep(const int* x, int* kept, unsigned* count, int n,
                                unsigned capacity) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x[i] % 3 == 0) kvblock::append(kept, count, capacity, x[i]);
}
""",
    "fault": """
extern "C" __global__ void fault(float* y) { *reinterpret_cast<float*>(8) = *y; }
""",
}
HOPPER = ("ranks", "box")


def kernel(name: str) -> kernels.Kernel:
    return kernels.from_cuda(SOURCES[name], name)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_compile(name):
    arch = "90a" if name in HOPPER else "80"
    made = kernels.from_cuda(SOURCES[name], name, arch=arch)
    assert made.name == name and made.parameters


@pytest.fixture
def needs_hopper():
    if min(gpu_capabilities()) < (9, 0):
        pytest.skip("clusters and tensor maps need compute capability 9.0")


# ---- capture -------------------------------------------------------------------------


def steps(x, a):
    for i in range(8):
        x = kernels.kernel_call(
            kernel("step"), x, out=x, scalars=(a + i, x.size), grid=4, block=256
        )
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["FUSION,CUSTOM_CALL", ""])
def test_a_hundred_values_captured_or_not(capture):
    x = jnp.arange(1000.0)
    options = {
        "xla_gpu_enable_command_buffer": capture,
        "xla_gpu_graph_min_graph_size": 1,
    }
    run = jax.jit(steps).lower(x, jnp.float32(0)).compile(compiler_options=options)
    for value in range(100):
        got = run(x, jnp.float32(value))
        np.testing.assert_array_equal(got, x + 8 * value + 28)


@pytest.mark.gpu
def test_a_graph_of_many_kernels():
    """Each behind the one before, and one that nothing but order keeps behind."""
    builder = BlockBuilder("Many")
    last = None
    for i in range(20):
        node = builder.add_kernel(
            kernel("step"), block=256, scalars={"a": float(i), "n": "n"}
        )
        if last is None:
            builder.input("X", node.in_("x"), "float32[n]")
        else:
            builder.connect(last.out("y"), node.in_("x"), "float32[n]")
        last = node
    other = builder.add_kernel(
        kernel("step"), block=256, scalars={"a": 1.0, "n": "n"}, after=last
    )
    builder.input("X", other.in_("x"), "float32[n]")
    builder.output("Y", last.out("y"), "float32[n]")
    builder.output("Z", other.out("y"), "float32[n]")
    run, x = jax.jit(builder.commit()), jnp.arange(1000.0)
    for _ in range(5):
        got = run(x)
        np.testing.assert_array_equal(got["Y"], x + 190)
        np.testing.assert_array_equal(got["Z"], x + 1)


# ---- how it is launched --------------------------------------------------------------


@pytest.mark.gpu
def test_shared_memory_beyond_48_kib():
    n = 25_000
    x = jnp.arange(float(n))
    got = kernels.kernel_call(
        *(kernel("reverse"), x),
        out=x,
        scalars=(n,),
        grid=1,
        block=256,
        shared_memory=4 * n,
    )
    np.testing.assert_array_equal(got, x[::-1])


@pytest.mark.gpu
def test_clusters(needs_hopper):
    out = jax.ShapeDtypeStruct((12,), jnp.uint32)
    rank, size = kernels.kernel_call(
        kernel("ranks"), out=(out, out), grid=12, block=32, cluster=4
    )
    np.testing.assert_array_equal(rank, np.arange(12) % 4)
    np.testing.assert_array_equal(size, np.full(12, 4))


@pytest.mark.gpu
def test_blocks_that_meet():
    out = jax.ShapeDtypeStruct((40,), jnp.float32)
    _, got = kernels.kernel_call(
        kernel("meet"), out=(out, out), grid=40, block=32, cooperative=True
    )
    np.testing.assert_array_equal(got, np.full(40, 40 * 41 / 2, np.float32))


@pytest.mark.gpu
def test_a_tensor_map_is_one(needs_hopper, rng):
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    got = kernels.kernel_call(
        kernel("box"),
        x,
        out=jax.ShapeDtypeStruct((4, 4, 8, 16), jnp.float32),
        grid=(4, 4),
        block=64,
        tensor_maps={0: kernels.TensorMap(box=(8, 16))},
    )
    want = np.asarray(x).reshape(4, 8, 4, 16).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [1, 1000, 1 << 20])
def test_many_threads_append(capacity):
    n = 1_000_000
    x = jnp.arange(n, dtype=jnp.int32)
    run = jax.jit(
        lambda x: kernels.kernel_call(
            kernel("keep"),
            x,
            out=jax.ShapeDtypeStruct((capacity,), jnp.int32),
            append=0,
            scalars=(n, capacity),
            grid=-(-n // 256),
            block=256,
        )
    )
    for _ in range(3):
        data, count, overflowed = run(x)
        wanted = -(-n // 3)
        assert int(count) == min(capacity, wanted)
        assert bool(overflowed) == (wanted > capacity)
        kept = np.asarray(data)[: int(count)]
        assert len(set(kept.tolist())) == int(count) and (kept % 3 == 0).all()
        assert not np.asarray(data)[int(count) :].any()


# ---- what goes wrong -----------------------------------------------------------------

FAULT = """
import sys
sys.path.insert(0, {folder!r})
import jax, jax.numpy as jnp
from test_gpu_kernels import kernel
from jax_kvblock import kernels
from jax_kvblock.core.ffi import gpu_capabilities
x = jnp.ones(32)
kernels.kernel_call(
    kernel("fault"), x, out=x, aliases={{0: 0}}, grid=1, block=32, debug=True
).block_until_ready()
"""


@pytest.mark.gpu
def test_a_kernel_that_faults_is_named():
    """In a process of its own, whose GPU context it takes along."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FAULT.format(folder=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Kernel('fault')" in done.stderr and "CUDA_ERROR" in done.stderr


@pytest.mark.gpu
def test_ptx_that_is_newer_than_the_driver():
    text = kernel("step").image.decode()
    version = next(line for line in text.splitlines() if line.startswith(".version"))
    newer = kernels.from_ptx(text.replace(version, ".version 99.0"))
    x = jnp.ones(32)
    with pytest.raises(Exception, match=r"its PTX is of version 99\.0"):
        kernels.kernel_call(
            newer, x, out=x, scalars=(1.0, 32), grid=1, block=32
        ).block_until_ready()


# ---- several GPUs --------------------------------------------------------------------


@pytest.mark.gpu
def test_a_thousand_loads_on_two_gpus():
    """From two threads at once, while kernels run: loading waits for nobody."""
    devices = jax.devices("cuda")[:2]
    if len(devices) < 2:
        pytest.skip("one GPU is here, and this needs two")
    wrong: list[str] = []

    def load(device: jax.Device) -> None:
        with jax.default_device(device):
            x = jnp.arange(32.0)
            for i in range(500):
                source = SOURCES["step"].replace("a + x[i]", f"a + x[i] + {i}.0f")
                own = kernels.from_cuda(source, "step")
                got = kernels.kernel_call(
                    own, x, out=x, scalars=(1.0, 32), grid=1, block=32
                )
                if not np.array_equal(got, np.arange(32) + 1 + i):
                    wrong.append(f"load {i} on {device}")

    threads = [threading.Thread(target=load, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "the loads wait for each other"
    assert not wrong
