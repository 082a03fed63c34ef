"""Norms in 8 bits by the kernel: on the emulator, and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check
from norm_cast_launches import EPS, hold
from test_training_product import BAR, BF16, F16, F32, pulled, scaling_of

from jax_kvblock.core import ffi
from jax_kvblock.training import FP8Config, fp8_norm_dot
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format
from jax_kvblock.training.norm import norm
from jax_kvblock.training.norm_primitive import norm_narrow

# Codes are those of plain JAX but where float32 adds up a row's squares in another
# order and a number lies that near the middle of two codes: few in a million.
FLIPS = 1e-5
GPU = pytest.param(
    "gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            (9, 0) not in ffi.gpu_capabilities(),
            reason="the kernel runs on GPUs of compute capability 9.0",
        ),
    ],
)


@pytest.fixture(params=["kernel", GPU])
def norms(request: pytest.FixtureRequest) -> str:
    """The test by the kernel on the emulator, and where there is a GPU on that."""
    if request.param == "kernel":
        request.getfixturevalue("cast_as_cuda")
    return request.param


def draw(rng: Any, rows: int, inner: int, dtype: Any = F32, g_dtype: Any = F32) -> Any:
    """x, a residual and gamma."""
    x, residual = (jnp.asarray(rng.standard_normal((rows, inner)), dtype) for _ in "xr")
    return x, residual, jnp.asarray(1 + rng.standard_normal(inner) / 4, g_dtype)


def by_kernel(x: Any, residual: Any, gamma: Any, scale: Any, form: FP8Format) -> Any:
    return norm_narrow(x, residual, gamma, scale, form, EPS)


def in_plain_jax(x: Any, residual: Any, gamma: Any, scale: Any, form: FP8Format) -> Any:
    """The specification, in both orders."""
    total, inverse, normed = norm(x, residual, gamma, EPS)
    made, size = narrow(normed, scale, form)
    turned = jnp.moveaxis(made.codes, -1, 0)
    return (made._replace(transposed=turned), size), total, inverse


def assert_same(got: Any, want: Any) -> None:
    """The sum bit for bit, and all else as near as float32 adds up."""
    (made, size), total, inverse = got
    (codes, most), want_total, want_inverse = want
    np.testing.assert_array_equal(np.asarray(total, F32), np.asarray(want_total, F32))
    np.testing.assert_allclose(inverse, want_inverse, rtol=2**-19)
    np.testing.assert_allclose(size, most, rtol=2**-19)
    for name in ("codes", "transposed"):
        a, b = (np.asarray(getattr(t, name), F32) for t in (made, codes))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert np.sum((a != b) & ~np.isnan(a)) <= 1 + FLIPS * a.size


@pytest.mark.wide
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("dtype", "g_dtype"),
    [(BF16, BF16), (BF16, F32), (BF16, F16), (F16, F16), (F32, F32)],
)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16, 48), (80, 1040)], ids=str)
def test_the_kernel_is_plain_jax(
    shape, form, dtype, g_dtype, with_residual, norms, rng
):
    x, residual, gamma = draw(rng, *shape, dtype, g_dtype)
    x = x.at[3, 5].set(jnp.inf).at[4, 7].set(jnp.nan)
    given = x, residual if with_residual else None, gamma, F32(16), FP8Format(form)
    got, want = (
        jax.jit(f, static_argnums=4)(*given) for f in (by_kernel, in_plain_jax)
    )
    assert_same(got, want)
    (made, _), total, inverse = got
    made = {"out": made.codes, "transposed": made.transposed, "inverse_rms": inverse}
    made |= {"sum": total} if with_residual else {}
    made = {name: np.asarray(array) for name, array in made.items()}
    hold(made, [None if a is None else np.asarray(a) for a in given[:3]], 16.0, form)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_products(dtype, scaling, with_residual, norms, rng):
    """Results, gradients and reports are those of plain JAX."""
    x, residual, gamma = draw(rng, 48, 64, dtype)
    w = jnp.asarray(rng.standard_normal((64, 32)) / 8, F32)
    d_out = jnp.asarray(rng.standard_normal((48, 32)), dtype)
    own = [scaling_of(8.0, 64.0, 2.0**9)] if scaling == "delayed" else []
    made = []
    for implementation in ("cuda", "xla"):
        config = FP8Config(scaling=scaling, implementation=implementation)

        def dot(x: Any, r: Any, g: Any, w: Any, *own: Any, config: Any = config) -> Any:
            r = r if with_residual else None
            return fp8_norm_dot(x, g, w, *own, config=config, residual=r)

        given = x, residual, gamma, w, *own
        along = (d_out, residual) if with_residual else d_out
        made.append(jax.jit(functools.partial(pulled, dot))(along, *given))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t, F32) for t in (a, b))
        bar = 2 * BAR[dtype] * float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bar)


@pytest.mark.parametrize("shape", [(2, 8, 48), (3, 2, 8, 528)], ids=str)
def test_rows_of_rows(shape, norms, rng):
    x, residual, gamma = draw(rng, math.prod(shape[:-1]), shape[-1], BF16)
    given = x.reshape(shape), residual.reshape(shape), gamma, F32(16), FP8Format("e4m3")
    run, plain = (jax.jit(f, static_argnums=4) for f in (by_kernel, in_plain_jax))
    got = run(*given)
    assert_same(got, plain(*given))
    (made, _), total, inverse = got
    assert made.codes.shape == total.shape == shape and inverse.shape == shape[:-1]
    assert made.transposed.shape == (shape[-1], *shape[:-1])


def test_without_gradients_one_order_is_written(cast_as_cuda, rng):
    x, residual, gamma = draw(rng, 32, 48)
    w, scaling = jnp.ones((48, 16)), scaling_of(8.0, 8.0, 8.0)

    def run(config: Any) -> Any:
        dot = functools.partial(fp8_norm_dot, config=config, residual=residual)
        return jax.jit(dot).lower(x, gamma, w, scaling)

    lowered = run(FP8Config(implementation="cuda"))
    (call,) = re.findall(r"@kvblock_norm_cast\(.*", lowered.as_text())
    assert "codes = 1 : i32" in call and "transposed = 0 : i32" in call
    made = (run(FP8Config(implementation=i)).compile() for i in ("cuda", "xla"))
    for a, b in zip(*(f(x, gamma, w, scaling) for f in made), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_one_kernel_norms_and_casts(cast_as_cuda, rng):
    """It, and two casts: of weights, and of gradients."""
    x, residual, gamma = draw(rng, 32, 48)
    w, scaling = jnp.ones((48, 16)), scaling_of(1.0, 1.0, 1.0)
    config = FP8Config(implementation="cuda")

    def loss(x: Any, residual: Any, gamma: Any, w: Any) -> Any:
        out, total = fp8_norm_dot(x, gamma, w, scaling, config, residual=residual)
        return jnp.sum(out) + jnp.sum(total)

    text = jax.jit(jax.grad(loss, range(4))).lower(x, residual, gamma, w).as_text()
    found = re.findall(r"@(kvblock_\w+)\(", text)
    assert sorted(found) == ["kvblock_cast", "kvblock_cast", "kvblock_norm_cast"]


def test_vmap_and_scan(norms, rng):
    x, residual, _ = (
        jnp.stack(t) for t in zip(*(draw(rng, 32, 48) for _ in "abc"), strict=True)
    )
    gamma, scales = draw(rng, 16, 48)[2], jnp.array([1.0, 4.0, 16.0])
    form = FP8Format.E4M3
    over = lambda f: jax.vmap(lambda x, r, s: f(x, r, gamma, s, form))  # noqa: E731
    want = over(in_plain_jax)(x, residual, scales)
    assert_same(jax.jit(over(by_kernel))(x, residual, scales), want)
    one = lambda given: by_kernel(*given[:2], gamma, given[2], form)  # noqa: E731
    loop = jax.jit(lambda *given: jax.lax.map(one, given))
    assert_same(loop(x, residual, scales), want)
    # A batch of gammas, of one array.
    gammas = gamma * jnp.arange(1.0, 4.0)[:, None]
    over = lambda f: jax.vmap(lambda g: f(x[0], None, g, scales[1], form))  # noqa: E731
    assert_same(jax.jit(over(by_kernel))(gammas), over(in_plain_jax)(gammas))


def test_scan_of_layers_with_remat(norms, rng):
    x, _, gamma = draw(rng, 32, 48)
    w = jnp.asarray(rng.standard_normal((3, 48, 48)) / 8, F32)
    scaling = jax.tree.map(lambda t: jnp.stack([t] * 3), scaling_of(8.0, 64.0, 2.0**9))
    made = []
    for implementation in ("cuda", "xla"):
        config = FP8Config(implementation=implementation)

        def loss(x: Any, w: Any, scaling: Any, config: Any = config) -> Any:
            def layer(carry: Any, own: Any) -> Any:
                out, total = fp8_norm_dot(
                    carry[0], gamma, *own, config, residual=carry[1]
                )
                return (jnp.tanh(out), total), None

            start = (x, jnp.zeros_like(x))
            (out, total), _ = jax.lax.scan(jax.checkpoint(layer), start, (w, scaling))
            return jnp.sum(out * total)

        made.append(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, scaling))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        bar = 2**-8 * float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bar)


def on_a_mesh(kind: AxisType, rng: Any) -> Any:
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    return mesh, put, (*draw(rng, 64, 96), jnp.float32(16))


def of_e4m3(x: Any, residual: Any, gamma: Any, scale: Any) -> Any:
    return by_kernel(x, residual, gamma, scale, FP8Format.E4M3)


@pytest.mark.parametrize("rows", ["a", ("a", "b")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind, rows, cast_as_cuda, rng):
    """Each device norms its rows; the largest size is that of all."""
    mesh, put, (x, residual, gamma, scale) = on_a_mesh(kind, rng)
    given = put(x, rows), put(residual, rows), put(gamma), put(scale)
    with jax.set_mesh(mesh):
        compiled = jax.jit(of_e4m3).lower(*given).compile()
        got = jax.jit(of_e4m3)(*given)
    assert_same(got, in_plain_jax(x, residual, gamma, scale, FP8Format.E4M3))
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    (made, _), total, inverse = got
    over_rows = NamedSharding(mesh, P(rows, None))
    assert total.sharding.is_equivalent_to(over_rows, 2)
    assert made.codes.sharding.is_equivalent_to(over_rows, 2)
    turned = NamedSharding(mesh, P(None, rows))
    assert made.transposed.sharding.is_equivalent_to(turned, 2)
    assert inverse.sharding.is_equivalent_to(NamedSharding(mesh, P(rows)), 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_rows_of_rows_on_meshes(kind, cast_as_cuda, rng):
    mesh, put, (x, residual, gamma, scale) = on_a_mesh(kind, rng)
    x, residual = (t.reshape(4, 16, 96) for t in (x, residual))
    given = put(x, "a"), put(residual, "a"), put(gamma), put(scale)
    with jax.set_mesh(mesh):
        text = jax.jit(of_e4m3).lower(*given).compile().as_text()
        (made, size), total, inverse = got = jax.jit(of_e4m3)(*given)
    assert_same(got, in_plain_jax(x, residual, gamma, scale, FP8Format.E4M3))
    assert "all-gather" not in text and "all-to-all" not in text
    for array in (total, inverse, made.codes, made.transposed):
        spec = P(None, "a") if array is made.transposed else P("a")
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    assert size.sharding.is_fully_replicated


def test_columns_that_are_cut_are_gathered(cast_as_cuda, rng):
    mesh, put, (x, residual, gamma, scale) = on_a_mesh(AxisType.Auto, rng)
    given = put(x, "a", "b"), put(residual, None, "b"), put(gamma, "b"), put(scale)
    with jax.set_mesh(mesh):
        text = jax.jit(of_e4m3).lower(*given).compile().as_text()
        got = jax.jit(of_e4m3)(*given)
    assert "all-gather" in text
    assert_same(got, in_plain_jax(x, residual, gamma, scale, FP8Format.E4M3))


@pytest.mark.parametrize("name", ["x", "gamma"])
def test_on_explicit_meshes_they_are_refused(name, cast_as_cuda, rng):
    mesh, put, (x, _, gamma, scale) = on_a_mesh(AxisType.Explicit, rng)
    x = put(x, "a", "b") if name == "x" else put(x, "a")
    gamma = put(gamma, "b") if name == "gamma" else put(gamma)
    with jax.set_mesh(mesh):
        refused = lambda: jax.jit(of_e4m3)(x, None, gamma, put(scale))  # noqa: E731
        check("fp8_norm_dot", ValueError, f"got {name} with|'b'|'xla'|reshard", refused)


def test_shard_map(cast_as_cuda, rng):
    x, residual, gamma = draw(rng, 64, 48)
    w = jnp.asarray(rng.standard_normal((48, 32)) / 8, F32)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    made = []
    for implementation in ("cuda", "xla"):
        config = FP8Config(implementation=implementation)

        def local(x: Any, r: Any, g: Any, w: Any, s: Any, config: Any = config) -> Any:
            return fp8_norm_dot(x, g, w, s, config, residual=r)

        rows = P("data")
        over = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, P(), P(), P()),
            out_specs=(rows, rows),
        )  # fmt: skip

        def run(*given: Any, over: Any = over) -> Any:
            out, pull = jax.vjp(over, *given)
            return out, pull(jax.tree.map(jnp.cos, out))

        made.append(jax.jit(run)(x, residual, gamma, w, scaling_of(8.0, 8.0, 8.0)))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        bar = 2**-9 * float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bar)


CUDA = FP8Config(implementation="cuda")


def refused(words: str, *shape: int, dtype: Any = F32) -> None:
    x, scaling = jnp.ones(shape, dtype), scaling_of(1.0, 1.0, 1.0)
    gamma, w = jnp.ones(shape[1]), jnp.ones((shape[1], 16))
    call = lambda: fp8_norm_dot(x, gamma, w, scaling, CUDA)  # noqa: E731
    check("fp8_norm_dot", ValueError, words, call)


def test_sizes_that_the_kernel_does_not_serve(cast_as_cuda):
    refused("multiples of 16, got [40, 32]|'xla'", 40, 32)
    refused("multiples of 16, got [32, 40]|'xla'", 32, 40)
    refused("up to 8192 numbers of float32, got [16, 8208]|'xla'", 16, 8208)
    refused("up to 16384 numbers of bfloat16|'xla'", 16, 16400, dtype=BF16)


def test_gpus_that_the_kernel_does_not_serve(cast_as_cuda, monkeypatch):
    monkeypatch.setattr(ffi, "gpu_capabilities", lambda: frozenset({(8, 9)}))
    refused("of compute capability 9.0, and this one has 8.9|'xla'", 16, 32)


@pytest.mark.cpu
def test_the_kernel_on_a_cpu():
    refused("needs an NVIDIA GPU|lowered for cpu|'xla'", 16, 32)


def test_current_scales_take_the_kernel_of_casts(cast_as_cuda, rng):
    """The largest size is wanted before anything is rounded."""
    x, _, gamma = draw(rng, 32, 48)
    config = dataclasses.replace(CUDA, scaling="current")
    dot = functools.partial(fp8_norm_dot, config=config)
    text = jax.jit(dot).lower(x, gamma, jnp.ones((48, 16))).as_text()
    found = re.findall(r"@(kvblock_\w+)\(", text)
    assert sorted(found) == ["kvblock_cast", "kvblock_cast"]
