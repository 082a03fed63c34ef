"""Training in 8 bits on explicit meshes, of arrays that were made before the mesh."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_bit_models import CURRENT, task
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.training import FP8Config, Fp8Scaling, FP8TrainingEngine, fp8_dot


@pytest.fixture
def mesh(four_cpus):
    devices = np.array(jax.devices("cpu")[:4])
    return jax.sharding.Mesh(devices, "d", axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize("cut", ["x", "w"])
def test_the_other_array_is_whole_on_the_mesh(rng, mesh, cut):
    """As `x @ w` has it, gradients and results lie as on one device."""
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((16, 24)), jnp.float32)
    scaling = Fp8Scaling.create()

    def loss(x: jax.Array, w: jax.Array, scaling: Fp8Scaling) -> jax.Array:
        return jnp.sum(jnp.tanh(fp8_dot(x, w, scaling) / 16))

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    want = run(x, w, scaling)
    x_by, w_by = (P("d"), P()) if cut == "x" else (P(), P(None, "d"))
    with jax.set_mesh(mesh):
        if cut == "x":
            x = jax.device_put(x, x_by)
        else:
            w = jax.device_put(w, w_by)
        got = run(x, w, scaling)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )
    for array, by in zip(got[1], (x_by, w_by), strict=False):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, by), 2)


@pytest.mark.parametrize("config", [FP8Config(), CURRENT], ids=["delayed", "current"])
def test_a_model_of_before_the_mesh_trains(rng, mesh, config):
    x, y = task(rng)
    losses = []
    for over in (None, mesh):
        model = nnx.Sequential(
            nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu,
            nnx.Linear(32, 8, rngs=nnx.Rngs(1)),
        )  # fmt: skip
        optimizer = optax.adam(1e-2)
        with jax.set_mesh(over) if over else contextlib.nullcontext():
            if over:
                x, y = jax.device_put((x, y), P("d"))
            with FP8TrainingEngine(model, config) as trainer:
                losses.append([])
                for _ in range(3):
                    losses[-1].append(trainer.training_step(x, y))
                    assert trainer.optimizer_step(optimizer)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
