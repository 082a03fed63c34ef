"""Products whose casts are the kernel's: on the emulator, and on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check
from test_training_product import BAR, BF16, F16, F32, draw, pulled, scaling_of

from jax_kvblock.training import FP8Config, fp8_dot
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format
from jax_kvblock.training.primitive import narrow as by_kernel

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["kernel", GPU])
def casts(request: pytest.FixtureRequest) -> str:
    """The test by the kernel on the emulator, and where there is a GPU on that."""
    if request.param == "kernel":
        request.getfixturevalue("cast_as_cuda")
    return request.param


def in_both(x: Any, scale: Any, form: FP8Format) -> Any:
    """Plain JAX, in both orders."""
    made, size = narrow(x, scale, form)
    return made._replace(transposed=made.codes.T), size


def same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16, 48), (144, 272)], ids=str)
def test_the_kernel_is_plain_jax_bit_for_bit(shape, form, dtype, casts, rng):
    x = jnp.asarray(rng.standard_normal(shape) * 30, dtype).at[3, 5].set(jnp.inf)
    given = x, F32(32.0), FP8Format(form)
    same(*(jax.jit(f, static_argnums=2)(*given) for f in (by_kernel, in_both)))


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_products(dtype, scaling, casts, rng):
    x, w, d_out = draw(rng, 48, 32, 64, dtype)
    own = [scaling_of(8.0, 64.0, 2.0**14)] if scaling == "delayed" else []
    made = []
    for implementation in ("cuda", "xla"):
        config = FP8Config(scaling=scaling, implementation=implementation)
        dot = jax.jit(functools.partial(fp8_dot, config=config))
        made.append(pulled(dot, d_out, x, w, *own))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        bar = BAR[dtype] * float(np.abs(np.asarray(b, F32)).max())
        np.testing.assert_allclose(
            np.asarray(a, F32), np.asarray(b, F32), rtol=0, atol=bar
        )


def test_vmap_and_scan(casts, rng):
    x = jnp.asarray(rng.standard_normal((3, 32, 48)), F32)
    scales = jnp.array([1.0, 4.0, 16.0])
    form = FP8Format.E4M3
    got = jax.jit(jax.vmap(lambda x, s: by_kernel(x, s, form)))(x, scales)
    same(got, jax.vmap(lambda x, s: in_both(x, s, form))(x, scales))
    got = jax.jit(lambda x: jax.lax.map(lambda x: by_kernel(x, scales[1], form), x))(x)
    same(got, jax.lax.map(lambda x: in_both(x, scales[1], form), x))


@pytest.mark.parametrize("spec", [("a",), (None, "b"), ("a", "b")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind, spec, cast_as_cuda, rng):
    """Each device casts its part; the largest size is that of the whole."""
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)
    x = jnp.asarray(rng.standard_normal((64, 96)), F32)
    scale, form = jnp.float32(16), FP8Format.E4M3
    put = jax.device_put(x, NamedSharding(mesh, P(*spec)))
    whole = jax.device_put(scale, NamedSharding(mesh, P()))
    f = jax.jit(lambda x, s: by_kernel(x, s, form))
    with jax.set_mesh(mesh):
        compiled = f.lower(put, whole).compile()
        got = f(put, whole)
    same(got, in_both(x, scale, form))
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    both = (*spec, None)[:2]
    assert got[0].codes.sharding.is_equivalent_to(NamedSharding(mesh, P(*both)), 2)
    turned = NamedSharding(mesh, P(*reversed(both)))
    assert got[0].transposed.sharding.is_equivalent_to(turned, 2)


def test_shard_map(cast_as_cuda, rng):
    x, w, d_out = draw(rng, 64, 32, 48)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    made = []
    for implementation in ("cuda", "xla"):
        config = FP8Config(implementation=implementation)
        over = jax.shard_map(
            functools.partial(fp8_dot, config=config),
            mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"),
        )  # fmt: skip
        made.append(pulled(jax.jit(over), d_out, x, w, scaling_of(8.0, 8.0, 8.0)))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


CUDA = FP8Config(scaling="current", implementation="cuda")


def test_sizes_that_the_kernel_does_not_serve(cast_as_cuda):
    refused = lambda: fp8_dot(jnp.ones((40, 32)), jnp.ones((32, 16)), None, CUDA)  # noqa: E731
    check("fp8_dot", ValueError, "multiples of 16, got [40, 32]|'xla'", refused)


@pytest.mark.cpu
def test_the_kernel_on_a_cpu():
    refused = lambda: fp8_dot(jnp.ones((16, 32)), jnp.ones((32, 16)), None, CUDA)  # noqa: E731
    check("fp8_dot", ValueError, "needs an NVIDIA GPU|lowered for cpu|'xla'", refused)
    call = lambda: FP8Config(implementation="triton")  # noqa: E731
    check("FP8Config", ValueError, "'cuda', 'xla', None|'triton'", call)
