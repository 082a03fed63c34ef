"""Products of 8 bits against NumPy: every code, results, gradients and reports."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import training_truth as truth
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check

from jax_kvblock.core.largest import largest_size
from jax_kvblock.training import (
    FP8Config,
    Fp8Scaling,
    fp8_dot,
    fp8_dot_general,
    fp8_norm_dot,
)
from jax_kvblock.training import product as training_product
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
BAR = {BF16: 2**-8, F16: 2**-11, F32: 2**-20}
# Tensor cores of Hopper add up products of 8 bits in about 14 bits.
OF_THE_SUMS = 2**-12
FORMS = {"e5m2": ("e4m3", "e4m3", "e5m2"), "e4m3": ("e4m3", "e4m3", "e4m3")}


def draw(rng, rows=40, inner=24, columns=56, dtype=F32, w_dtype=F32) -> Any:
    x = rng.standard_normal((rows, inner)).astype(dtype)
    w = (rng.standard_normal((inner, columns)) / 8).astype(w_dtype)
    return x, w, (rng.standard_normal((rows, columns)) * 1e-3).astype(dtype)


def scaling_of(*scales: float, history: int = 16) -> Fp8Scaling:
    made = Fp8Scaling.create(FP8Config(history=history))
    return Fp8Scaling(jnp.array(scales, F32), made.history)


def near(got: Any, want: np.ndarray, dtype: Any) -> None:
    of_sums = OF_THE_SUMS if jax.default_backend() == "gpu" else 0.0
    bar = (BAR[dtype] + of_sums) * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=bar)


def pulled(dot: Any, d_out: Any, *args: Any) -> Any:
    out, pull = jax.vjp(dot, *args)
    return out, pull(jax.tree.map(jnp.asarray, d_out))


# ---- codes ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("exponent", [-60, -9, 0, 4, 60])
def test_every_bfloat16_number(form, exponent):
    """Bit for bit what NumPy rounds to, also where numbers are too large."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    cast = jax.jit(narrow, static_argnums=2)
    made, _ = cast(x, F32(2.0**exponent), FP8Format(form))
    want = truth.narrowed(x, 2.0**exponent, form)
    np.testing.assert_array_equal(np.asarray(made.codes).astype(np.float64), want)


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_float32_numbers_between_codes(form):
    """The middles of neighbours, where ties are, and what lies right beside them."""
    codes = np.arange(128, dtype=np.uint8).view(truth.DTYPES[form]).astype(F32)
    codes = codes[np.isfinite(codes)]
    middles = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([middles, *(np.nextafter(middles, F32(y)) for y in (0, 1e9))])
    x = np.concatenate([x, -x])
    made, _ = jax.jit(narrow, static_argnums=2)(x, F32(1), FP8Format(form))
    want = truth.narrowed(x, 1.0, form)
    np.testing.assert_array_equal(np.asarray(made.codes).astype(np.float64), want)


# ---- products ------------------------------------------------------------------------


@pytest.mark.parametrize("w_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("backward", ["e5m2", "e4m3"])
def test_delayed_scales(rng, backward, dtype, w_dtype):
    x, w, d_out = draw(rng, dtype=dtype, w_dtype=w_dtype)
    scales = (32.0, 0.5, 2.0**20)
    config = FP8Config(backward_format=backward)
    dot = jax.jit(functools.partial(fp8_dot, config=config))
    out, (d_x, d_w, report) = pulled(dot, d_out, x, w, scaling_of(*scales))
    want = truth.product(x, w, d_out, scales, FORMS[backward])
    assert (out.dtype, d_x.dtype, d_w.dtype) == (dtype, dtype, w_dtype)
    near(out, want.out, dtype)
    near(d_x, want.d_x, dtype)
    near(d_w, want.d_w, w_dtype)
    np.testing.assert_allclose(report.scale, want.report, rtol=1e-5)
    assert not np.any(report.history)


# Rows, inner and columns that no tile divides, nor the 16 that cuBLASLt asks for.
ODD = [(1, 1, 1), (7, 13, 5), (33, 17, 31), (1, 130, 3), (64, 48, 9)]


@pytest.mark.cases(99)
@pytest.mark.parametrize("sizes", ODD, ids=str)
@pytest.mark.parametrize("how", ["delayed", "current"])
def test_sizes_that_are_no_multiples_of_anything(rng, how, sizes):
    """No product is refused, and none takes in what lies beside the arrays."""
    x, w, d_out = draw(rng, *sizes, dtype=BF16)
    config = FP8Config(scaling=how)
    scales = [
        truth.scale_for(np.abs(np.asarray(t, np.float64)).max(), form)
        for t, form in zip((x, w, d_out), FORMS["e5m2"], strict=True)
    ]
    scaling = () if how == "current" else (scaling_of(*scales),)
    dot = jax.jit(functools.partial(fp8_dot, config=config))
    out, (d_x, d_w, *report) = pulled(dot, d_out, x, w, *scaling)
    want = truth.product(x, w, d_out, scales, FORMS["e5m2"])
    rows, inner, columns = sizes
    assert (out.shape, d_x.shape, d_w.shape) == (
        (rows, columns), (rows, inner), (inner, columns)
    )  # fmt: skip
    near(out, want.out, BF16)
    near(d_x, want.d_x, BF16)
    near(d_w, want.d_w, F32)
    for made in report:
        np.testing.assert_allclose(made.scale, want.report, rtol=1e-5)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_current_scales(rng, dtype, margin):
    x, w, d_out = draw(rng, dtype=dtype)
    x, d_out = x * dtype(1e3), d_out * dtype(1e-6)
    config = FP8Config(scaling="current", margin=margin)
    dot = jax.jit(functools.partial(fp8_dot, config=config))
    out, (d_x, d_w) = pulled(dot, d_out, x, w)
    scales = [
        truth.scale_for(np.abs(np.asarray(t, np.float64)).max(), form, margin)
        for t, form in zip((x, w, d_out), FORMS["e5m2"], strict=True)
    ]
    want = truth.product(x, w, d_out, scales, FORMS["e5m2"])
    near(out, want.out, dtype)
    near(d_x, want.d_x, dtype)
    near(d_w, want.d_w, F32)


def test_it_is_8_bits_and_no_more(rng):
    """A product of what is already rounded is exact; of anything else it is not."""
    x, w, _ = draw(rng)
    config = FP8Config(scaling="current")
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    off = np.abs(np.asarray(fp8_dot(x, w, config=config), np.float64) - exact)
    assert 0.005 < off.mean() / np.abs(exact).mean() < 0.05
    x, w = (truth.narrowed(t, 1.0, "e4m3").astype(F32) for t in (x * 16, w * 256))
    near(fp8_dot(x, w, config=config), x.astype(float) @ w.astype(float), F32)


def test_numbers_too_large_become_the_largest(rng):
    x, w, d_out = draw(rng)
    scales = (1e3, 1.0, 1.0)
    out, (*_, report) = pulled(fp8_dot, d_out, x, w, scaling_of(*scales))
    want = truth.product(x, w, d_out, scales, FORMS["e5m2"])
    near(out, want.out, F32)
    assert np.abs(truth.narrowed(x, 1e3, "e4m3")).max() == 448
    assert report.scale[0] > 1 and report.scale[1] < 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(3), ids=["x", "w", "d_out"])
def test_what_is_not_finite_is_reported(rng, which, bad):
    given = draw(rng)
    given[which][3, 5] = bad
    x, w, d_out = given
    *_, (*_, report) = pulled(fp8_dot, d_out, x, w, scaling_of(1.0, 1.0, 1.0))
    np.testing.assert_array_equal(np.isfinite(report.scale), np.arange(3) != which)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(256, 1024), (1 << 18,), (4, 64, 1024)], ids=str)
def test_one_of_many_numbers_is_not_finite(rng, shape, dtype):
    """Wherever it is, and whatever its sign."""
    for bad, at in itertools.product((np.nan, -np.nan, -np.inf), (0, 70000, -1)):
        x = rng.standard_normal(shape).astype(dtype)
        x.reshape(-1)[at] = bad
        size = jax.jit(largest_size)(x)
        np.testing.assert_array_equal(size, np.abs(F32(bad)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e23])
@pytest.mark.parametrize("which", range(3), ids=["x", "w", "d_out"])
def test_with_current_scales_it_stays_not_finite(rng, which, bad):
    """Or too large for any scale. There is no report: whatever is made of it tells."""
    given = draw(rng)
    given[which][3, 5] = bad
    x, w, d_out = given
    dot = functools.partial(fp8_dot, config=FP8Config(scaling="current"))
    out, (d_x, d_w) = pulled(dot, d_out, x, w)
    made = {0: (out, d_w), 1: (out, d_x), 2: (d_x, d_w)}
    assert all(np.isnan(t).all() for t in made[which])


@pytest.mark.parametrize("how", ["current", "delayed"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_second_derivatives_are_an_error(rng, monkeypatch, how, norm, by_kernels):
    """Those of what is rounded would be zeros; the first ones go on."""
    if by_kernels:  # where a GPU may be, casts are primitives of their own
        monkeypatch.setattr(training_product, "_kernel", lambda config: None)
    x, w, _ = map(jnp.asarray, draw(rng, 4, 8, 6))
    config = FP8Config(scaling=how)
    scaling = None if how == "current" else Fp8Scaling.create(config)
    name = "fp8_norm_dot" if norm else "fp8_dot"

    def product(x: jax.Array) -> jax.Array:
        if norm:
            return fp8_norm_dot(x, jnp.ones(8), w, scaling, config)
        return fp8_dot(x, w, scaling, config)

    def penalty(x: jax.Array) -> jax.Array:
        inner = jax.jit(jax.grad(lambda x: jnp.mean(jnp.tanh(product(x)))))
        return jnp.sum(inner(x) ** 2)

    assert float(penalty(x)) > 0
    for call in (
        lambda: jax.grad(penalty)(x),
        lambda: jax.jit(jax.grad(penalty))(x),
        lambda: jax.vmap(jax.grad(penalty))(x[:, None]),
        lambda: jax.hessian(lambda x: jnp.mean(product(x)))(x),
    ):
        check(name, NotImplementedError, "second derivatives|x @ w|stop_gradient", call)
    constant = lambda x: jnp.sum(x) * penalty(jax.lax.stop_gradient(x))  # noqa: E731
    np.testing.assert_allclose(jax.grad(constant)(x), penalty(x) * jnp.ones_like(x))


def test_nothing_at_all():
    x, w = jnp.zeros((0, 8)), jnp.ones((8, 16))
    out, (d_x, d_w, report) = pulled(
        fp8_dot, jnp.zeros((0, 16)), x, w, Fp8Scaling.create()
    )
    assert out.shape == (0, 16) and d_x.shape == x.shape and not d_w.any()
    np.testing.assert_allclose(report.scale, [0, (16 / 448) ** 4, 0], rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 40, 100])
def test_the_largest_products_are_no_infinities(rows):
    """448 * 448 is no float16 number, in which XLA multiplies codes one by one."""
    x, w = jnp.full((rows, 48), 448.0), jnp.full((48, 80), -448.0)
    config = FP8Config("e4m3", "e4m3", scaling="current")
    dot = jax.jit(functools.partial(fp8_dot, config=config))
    out, (d_x, d_w) = pulled(dot, jnp.full((rows, 80), 448.0), x, w)
    for got, terms, sign in ((out, 48, -1), (d_x, 80, -1), (d_w, rows, 1)):
        want = sign * 448.0**2 * terms
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=2**-12)


# ---- other orders of axes ------------------------------------------------------------

ORDERS: dict[str, tuple[Any, Any, Any]] = {
    "rows of rows": ((3, 4, 8), (8, 5), (((2,), (0,)), ((), ()))),
    "one row": ((8,), (8, 5), (((0,), (0,)), ((), ()))),
    "the first axis": ((8, 3), (5, 8), (((0,), (1,)), ((), ()))),
    "heads": ((3, 2, 4), (2, 4, 5), (((1, 2), (0, 1)), ((), ()))),
    "heads in another order": ((3, 2, 4), (4, 5, 2), (((1, 2), (2, 0)), ((), ()))),
    "to heads": ((3, 8), (8, 2, 5), (((1,), (0,)), ((), ()))),
    "of the first matrix": ((8, 3, 2), (5, 8), (((-3,), (-1,)), ((), ()))),
}


@pytest.mark.parametrize("name", ORDERS)
def test_dot_general(rng, name):
    """Numbers that 8 bits hold, so that it is what jax.lax.dot_general gives."""
    left, right, dims = ORDERS[name]
    draws = rng.integers(-8, 9, left), rng.integers(-8, 9, right)
    lhs, rhs = (jnp.asarray(x, F32) for x in draws)
    config = FP8Config(scaling="current")
    ours = functools.partial(fp8_dot_general, config=config)
    out, pull = jax.vjp(lambda a, b: ours(a, b, dims, None, F32), lhs, rhs)
    positive = tuple(
        tuple(i % x.ndim for i in axes)
        for axes, x in zip(dims[0], (lhs, rhs), strict=True)
    )
    want, theirs = jax.vjp(
        lambda a, b: jax.lax.dot_general(a, b, (positive, ((), ()))), lhs, rhs
    )
    np.testing.assert_array_equal(out, want)
    along = jnp.asarray(rng.integers(-4, 5, out.shape), F32)
    jax.tree.map(np.testing.assert_array_equal, pull(along), theirs(along))


@pytest.mark.parametrize("preferred", [F32, F16, None])
def test_the_result_is_rounded_once(rng, preferred):
    """To the dtype that is asked for, from float32."""
    x, w, _ = draw(rng, dtype=BF16, w_dtype=BF16)
    config = FP8Config(scaling="current")
    dims = (((1,), (0,)), ((), ()))
    ours = functools.partial(
        fp8_dot_general, config=config, preferred_element_type=preferred
    )
    out, pull = jax.vjp(lambda x, w: ours(x, w, dims), x, w)
    assert out.dtype == (BF16 if preferred is None else preferred)
    scales = [
        truth.scale_for(np.abs(np.asarray(t, np.float64)).max(), "e4m3") for t in (x, w)
    ]
    want = truth.product(x, w, np.zeros(out.shape), (*scales, 1.0), FORMS["e5m2"])
    near(out, want.out, out.dtype.type)
    d_x, d_w = pull(jnp.ones_like(out))
    assert (d_x.dtype, d_w.dtype) == (BF16, BF16)


# ---- transforms ----------------------------------------------------------------------


def test_stacked_layers_by_scan_are_layers_one_by_one(rng):
    x, _, d_out = draw(rng, 32, 24, 24)
    w = jnp.asarray(rng.standard_normal((3, 24, 24)) / 5, F32)
    scaling = Fp8Scaling.create(layers=(3,))

    def scanned(x: Any, w: Any, scaling: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            return jnp.tanh(fp8_dot(x, *own)), None

        return jax.lax.scan(jax.checkpoint(layer), x, (w, scaling))[0]

    def by_hand(x: Any, w: Any, scaling: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(fp8_dot(x, w[i], jax.tree.map(lambda t, i=i: t[i], scaling)))
        return x

    got = pulled(scanned, d_out, x, w, scaling)
    want = pulled(by_hand, d_out, x, w, scaling)
    # On a GPU sums differ, and then some numbers are rounded to other codes.
    share = 0.02 if jax.default_backend() == "gpu" else 1e-6

    def same(a: Any, b: Any) -> None:
        largest = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=2 * share, atol=share * largest)

    jax.tree.map(same, got, want)


def test_vmap_over_rows_reports_near_the_largest(rng):
    x, w, d_out = draw(rng, 32)
    scaling = scaling_of(4.0, 4.0, 4.0)
    over = jax.vmap(fp8_dot, (0, None, None))
    out, (d_x, d_w, report) = pulled(over, d_out, x, w, scaling)
    want = truth.product(x, w, d_out, (4.0,) * 3, FORMS["e5m2"])
    near(out, want.out, F32)
    near(d_x, want.d_x, F32)
    near(d_w, want.d_w, F32)
    seemed = scaling.sizes(report, FP8Config())
    largest = [np.abs(t).max() for t in (x, w, d_out)]
    assert (seemed >= np.array(largest) * (1 - 1e-5)).all()
    assert (seemed <= np.array(largest) * 32**0.25).all()


def test_vmap_over_layers(rng):
    draws = [draw(rng) for _ in range(3)]
    x, w, d_out = (np.stack(t) for t in zip(*draws, strict=True))
    scaling = Fp8Scaling.create(layers=(3,))
    scales = (1.0, 16.0, 2.0**15)
    np.testing.assert_array_equal(scaling.scale, [scales] * 3)
    out, (_, d_w, report) = pulled(jax.vmap(fp8_dot), d_out, x, w, scaling)
    for i in range(3):
        want = truth.product(*draws[i], scales, FORMS["e5m2"])
        near(out[i], want.out, F32)
        near(d_w[i], want.d_w, F32)
        np.testing.assert_allclose(report.scale[i], want.report, rtol=1e-5)


# How x and w are cut, how the result is, and what may travel: sums alone.
CUTS: dict[str, tuple[Any, Any, Any]] = {
    "members": (("a",), (), ("a",)),
    "members and rows": (("a", "b"), (), ("a", "b")),
    "columns": ((), (None, "b"), (None, None, "b")),
    "members and columns": (("a",), (None, "b"), ("a", None, "b")),
    "the contracted axis": ((None, None, "b"), ("b",), ()),
}


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_over_devices(rng, kind, cut):
    """As on one device: sizes are those of the whole, and nothing is gathered."""
    x, w, d_out = draw(rng, 32)
    x, d_out = x.reshape(4, 8, -1), d_out.reshape(4, 8, -1)
    scaling = scaling_of(8.0, 8.0, 8.0)
    want = pulled(fp8_dot, d_out, x, w, scaling)
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)
    of_x, of_w, of_out = (NamedSharding(mesh, P(*spec)) for spec in CUTS[cut])
    whole = NamedSharding(mesh, P())
    put = jax.device_put((x, w, scaling, d_out), (of_x, of_w, whole, of_out))
    out = of_out if kind is AxisType.Explicit else None
    dot = functools.partial(fp8_dot, out_sharding=out)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda x, w, s, g: pulled(dot, g, x, w, s))
        text = run.lower(*put).compile().as_text()
        got = run(*put)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )
    assert got[0].sharding.is_equivalent_to(of_out, 3)
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_vmap_over_a_batch_that_is_cut(rng, kind):
    x, w, d_out = draw(rng, 32)
    x, d_out = x.reshape(4, 8, -1), d_out.reshape(4, 8, -1)
    scaling = scaling_of(8.0, 8.0, 8.0)
    over = jax.vmap(fp8_dot, (0, None, None))
    want = pulled(over, d_out, x, w, scaling)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("a",), axis_types=(kind,))
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    put = jax.device_put((x, w, scaling, d_out), (rows, whole, whole, rows))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, w, s, g: pulled(over, g, x, w, s))(*put)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )


@pytest.mark.usefixtures("four_cpus")
def test_shard_map_adds_reports(rng):
    x, w, d_out = draw(rng)
    scaling = scaling_of(8.0, 8.0, 8.0)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))

    def local(x: Any, w: Any, scaling: Any) -> Any:
        return fp8_dot(x, w, scaling)

    over = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )
    out, (d_x, d_w, report) = pulled(over, d_out, x, w, scaling)
    want = truth.product(x, w, d_out, (8.0,) * 3, FORMS["e5m2"])
    near(out, want.out, F32)
    near(d_x, want.d_x, F32)
    near(d_w, want.d_w, F32)
    ratio = (np.asarray(report.scale) / want.report) ** 0.25
    assert (ratio > 1 - 1e-5).all() and (ratio <= 4**0.25 * (1 + 1e-5)).all()
