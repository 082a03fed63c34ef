"""A CUDA kernel in a graph adds two vectors, as many elements as a parameter says.

The parameter changes a hundred times, and nothing is compiled again. Where there is no
NVIDIA GPU, the fallback computes the same with JAX.

    pip install 'jax_kvblock[kernels]'    # NVRTC, which compiles without a GPU, too
    python examples/vector_add.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import kernels
from jax_kvblock.graphs import BlockBuilder, Engine, Graph

SIZE = 1024
SOURCE = """
extern "C" __global__ void vector_add(const float* a, const float* b, float* c,
                                      unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""


def add_in_jax(a: jax.Array, b: jax.Array, n: jax.Array) -> jax.Array:
    """What the kernel does not write holds anything: here it is not a number."""
    return jnp.where(jnp.arange(a.size) < n, a + b, jnp.nan)


def vector_add() -> Graph:
    """C = A + B, float32 of any size; N, int32: how many elements are added."""
    builder = BlockBuilder("VectorAdd")
    kernel = kernels.from_cuda(SOURCE, "vector_add")
    add = builder.add_kernel(kernel, block=256, fallback=add_in_jax)
    builder.input("A", add.in_("a"), "float32[size]")
    builder.input("B", add.in_("b"), "float32[size]")
    builder.output("C", add.out("c"), "float32[size]")
    builder.input_scalar("N", add.in_("n"), SIZE)
    return builder.commit()


def main() -> None:
    """Run; the exit code is 1 if a sum is wrong, or if anything is compiled again."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, SIZE), np.float32)
    print(f"running on {jax.devices()[0].device_kind}\n{vector_add()}")
    with Engine() as engine:
        block = engine.register(vector_add())
        counts = [SIZE, *rng.choice(SIZE, 100, replace=False).tolist()]
        for n in counts:
            block.set(N=n)
            c = np.asarray(block(a, b)["C"])
            if not np.array_equal(c[:n], (a + b)[:n]):
                raise SystemExit(f"vector_add failed: the sums of {n} are wrong")
        print(
            f"{engine.launches} launches: {engine.cold_rebuilds} compiled, "
            f"{engine.hot_updates} with a new N, of {min(counts)} to {max(counts)}; "
            "all sums are right"
        )
        if (engine.cold_rebuilds, engine.hot_updates) != (1, 100):
            raise SystemExit("vector_add failed: a new N compiled again, or was lost")


if __name__ == "__main__":
    main()
