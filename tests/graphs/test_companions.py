"""Counts of what is appended to, when they leave a graph apart from it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import kernels
from jax_kvblock.graphs import BlockBuilder, Engine, Graph, State

SOURCE = """
#include <kvblock/append_buffer.cuh>

extern "C" __global__ void keep(const float* x, float* kept, unsigned* counter, int n,
                                unsigned capacity) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x[i] > 0) kvblock::append(kept, counter, capacity, x[i]);
}
"""


def keep_in_jax(x, n, capacity):
    (at,) = jnp.nonzero(x > 0, size=capacity, fill_value=0)
    return x[at], jnp.sum(x > 0)


def keep(capacity: int) -> Graph:
    builder = BlockBuilder("Keep")
    node = builder.add_kernel(
        kernels.from_cuda(SOURCE, "keep"),
        block=256,
        grid=1,
        scalars={"n": "n", "capacity": capacity},
        fallback=keep_in_jax,
    )
    builder.input("X", node.in_("x"), "float32[n]")
    pins = node.out("kept"), node.out("counter")
    builder.append_output("Kept", *pins, capacity, "float32[]")
    return builder.commit()


@pytest.mark.cpu
def test_the_engine_knows_counts_that_are_exposed_alone() -> None:
    """What was appended goes through another node; how many there are does not."""
    builder = BlockBuilder("Doubled")
    kept = builder.add_child(keep(3))
    double = builder.add_captured(lambda x: 2 * x, inputs=["x"], outputs=["y"])
    builder.connect(kept.out("Kept"), double.in_("x"))
    builder.expose_input("X", kept, "X")
    builder.expose_output("Y", double, "y")
    builder.expose_output("Y Count", kept, "Kept Count")
    builder.expose_output("Y Overflowed", kept, "Kept Overflowed")
    with Engine() as engine:
        block = engine.register(builder.commit())
        assert block(np.array([1, -1, 3, -2, 0], np.float32))["Y"].tolist() == [2, 6, 0]
        info = block.debug_info
        assert info.append_counts == {"Y": 2} and info.state is State.OK
        block(np.ones(5, np.float32))
        info = block.debug_info
        assert info.append_counts == {"Y": 3} and info.state is State.WARNING
        assert info.message == "full, and there would have been more: 'Y'"
