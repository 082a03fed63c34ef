"""`kernel_call` over several devices: each runs its part, and nothing is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_kernels import BLOCK, blocks, kernel, scale
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock import kernels


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal(1000, np.float32))


@pytest.fixture
def mesh(driver):
    return jax.make_mesh((4,), ("d",), devices=jax.devices("cpu")[:4])


def sharded(x, a, **options):
    return kernels.kernel_call(
        kernel("scale"),
        x,
        out=x,
        scalars={"n": jnp.int32(250), "a": a},
        grid=lambda x: blocks(x.size),
        block=BLOCK,
        **options,
    )


@pytest.mark.parametrize("waits", [False, True])
def test_each_device_runs_its_part(mesh, x, waits):
    lies = NamedSharding(mesh, P("d"))
    x = jax.device_put(x, lies)
    after = (x.reshape(500, 2),) if waits else ()
    run = jax.jit(lambda x, a: sharded(x, a, sharding="i -> i", after=after))
    text = run.lower(x, 2.0).compile().as_text()
    assert "all-gather" not in text and "f32[250]" in text
    got = run(x, 2.0)
    assert got.sharding.is_equivalent_to(lies, 1)
    np.testing.assert_array_equal(got, 2 * x)


def test_functions_of_shapes_see_a_devices_part(mesh, x):
    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    seen = []

    def grid(x):
        seen.append(x.shape)
        return blocks(x.size)

    run = jax.jit(
        lambda x: kernels.kernel_call(
            kernel("scale"),
            x,
            out=lambda x: x,
            scalars=lambda x: (2.0, x.size),
            grid=grid,
            block=BLOCK,
            sharding="i -> i",
        )
    )
    np.testing.assert_array_equal(run(x), 2 * x)
    assert (250,) in seen


def test_a_fixed_grid_is_refused_with_a_sharding_rule(driver, x):
    with pytest.raises(ValueError, match="grid must be a function of their shapes"):
        scale(x, 2.0, grid=16, sharding="i -> i")


def test_shard_map(mesh, x):
    run = jax.jit(
        jax.shard_map(
            lambda x: scale(x, 2.0), mesh=mesh, in_specs=P("d"), out_specs=P("d")
        )
    )
    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    assert "all-gather" not in run.lower(x).compile().as_text()
    np.testing.assert_array_equal(run(x), 2 * x)
