"""Norms and products of 8 bits in plain JAX, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_truth as truth
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from norm_cast_launches import EPS, draw, hold
from test_training_product import BAR, BF16, F16, F32, FORMS, near, pulled, scaling_of

from jax_kvblock.training import (
    FP8Config,
    Fp8Scaling,
    fp8_dot_general,
    fp8_norm_dot,
)
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format
from jax_kvblock.training.norm import norm

NAMES = {BF16: "bfloat16", F16: "float16", F32: "float32"}
SCALES = (32.0, 64.0, 2.0**9)


def given(
    rng: Any, shape: tuple[int, ...] = (40, 24), columns: int = 56, dtype: Any = F32
) -> Any:
    """x, a residual, gamma, w and a gradient of the result."""
    x, residual = (rng.standard_normal(shape).astype(dtype) for _ in "xr")
    gamma = (1 + rng.standard_normal(shape[-1]) / 4).astype(F32)
    w = (rng.standard_normal((shape[-1], columns)) / 8).astype(F32)
    d_out = (rng.standard_normal((*shape[:-1], columns)) / 16).astype(dtype)
    return tuple(map(jnp.asarray, (x, residual, gamma, w, d_out)))


def norm_dot(x: Any, residual: Any, gamma: Any, w: Any, *own: Any, **how: Any) -> Any:
    return fp8_norm_dot(x, gamma, w, *own, residual=residual, eps=EPS, **how)


# ---- numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", NAMES.values())
def test_the_specification(dtype, form, residual, rng):
    """It is held to what the kernel is held to."""
    drawn = draw(rng, (80, 1040), dtype, residual, dtype)

    @jax.jit
    def run(x: Any, other: Any, gamma: Any) -> Any:
        total, inverse, normed = norm(x, other, gamma, EPS)
        return total, inverse, narrow(normed, F32(8), FP8Format(form))[0].codes

    total, inverse, codes = map(np.asarray, run(*drawn))
    made = {"inverse_rms": inverse, "out": codes}
    hold(made | ({"sum": total} if residual else {}), drawn, 8.0, form)


def truth_of(dtype: Any, drawn: Any, scales: Any, d_total: Any = 0.0) -> Any:
    """In float64; codes are those of what is normed in float32."""
    x, residual, gamma, w, d_out = drawn
    total, inverse, normed = map(np.asarray, norm(x, residual, gamma, EPS))
    made = truth.product(normed, w, d_out, scales, FORMS["e5m2"])
    total, gamma = total.astype(np.float64), np.asarray(gamma, np.float64)
    # The gradient of what is normed is rounded to x's dtype.
    d_normed = made.d_x.astype(dtype).astype(np.float64)
    inverse = 1 / np.sqrt(np.mean(total**2, -1, keepdims=True) + EPS)
    d_unit = d_normed * gamma
    along = np.sum(d_unit * total, -1, keepdims=True) / total.shape[-1]
    d_x = inverse * d_unit - inverse**3 * total * along + d_total
    d_gamma = np.sum(d_normed * total * inverse, 0)
    return total, made, d_x, d_gamma


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_results_and_gradients(rng, dtype, with_residual):
    x, residual, gamma, w, d_out = given(rng, dtype=dtype)
    other = residual if with_residual else None
    d_total = (x * 0.1).astype(dtype)
    along = (d_out, d_total) if with_residual else d_out
    args = x, other, gamma, w, scaling_of(*SCALES)
    made, (d_x, d_r, d_gamma, d_w, report) = pulled(jax.jit(norm_dot), along, *args)
    out, *total = made if with_residual else (made,)
    add = np.asarray(d_total, np.float64) if with_residual else 0.0
    want = truth_of(dtype, (x, other, gamma, w, d_out), SCALES, add)
    assert (out.dtype, d_x.dtype, d_gamma.dtype, d_w.dtype) == (dtype, dtype, F32, F32)
    near(out, want[1].out, dtype)
    near(d_x, want[2], dtype)
    # XLA may leave out on a GPU that the gradient of what is normed is rounded.
    near(d_gamma, want[3], dtype if jax.default_backend() == "gpu" else F32)
    near(d_w, want[1].d_w, F32)
    np.testing.assert_allclose(report.scale, want[1].report, rtol=1e-5)
    if with_residual:
        np.testing.assert_array_equal(np.asarray(total[0], np.float64), want[0])
        np.testing.assert_array_equal(np.asarray(d_r, F32), np.asarray(d_x, F32))
    else:
        assert d_r is None


def test_the_gradient_of_the_norm_is_its_slope(rng):
    """Where nothing is rounded: differences of float64, along a line."""
    x, residual, gamma, w, d_out = given(rng, (6, 24), 8)
    # Products whose weights pick columns: their gradients are exact in 8 bits.
    w = jnp.eye(24, 8, dtype=F32)
    d_out = jnp.sign(d_out)
    _, (d_x, d_r, d_gamma, *_) = pulled(
        jax.jit(norm_dot), (d_out, jnp.zeros_like(x)), x, residual, gamma, w,
        scaling_of(1.0, 1.0, 1.0),
    )  # fmt: skip
    to = [rng.standard_normal(t.shape) for t in (x, residual, gamma)]

    def value(h: float) -> float:
        moved = (
            np.asarray(t, np.float64) + h * d
            for t, d in zip((x, residual, gamma), to, strict=True)
        )
        a, r, g = moved
        total = a + r
        normed = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + EPS) * g
        return float(np.sum(normed[:, :8] * np.asarray(d_out, np.float64)))

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    got = sum(
        float(np.sum(np.asarray(g, np.float64) * d))
        for g, d in zip((d_x, d_r, d_gamma), to, strict=True)
    )
    np.testing.assert_allclose(got, slope, rtol=1e-5)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_it_is_a_norm_and_a_product(rng, dtype, with_residual, scaling):
    """As both one after the other, whose gradients JAX derives."""
    x, residual, gamma, w, d_out = given(rng, (4, 10, 24), dtype=dtype)
    own = [scaling_of(*SCALES)] if scaling == "delayed" else []
    config = FP8Config(scaling=scaling)

    def composed(x: Any, r: Any, gamma: Any, w: Any, *own: Any) -> Any:
        wide = x.astype(F32) + r.astype(F32) if with_residual else x.astype(F32)
        if dtype == BF16:  # really: XLA may leave out conversions there and back
            wide = jax.lax.reduce_precision(wide, 8, 7)
        total = wide.astype(dtype)
        wide = total.astype(F32)
        wide = wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + EPS) * gamma
        dims = (((2,), (0,)), ((), ()))
        scale = own[0] if own else None
        out = fp8_dot_general(wide, w, dims, None, dtype, scaling=scale, config=config)
        return (out, total) if with_residual else out

    def ours(x: Any, r: Any, gamma: Any, w: Any, *own: Any) -> Any:
        r = r if with_residual else None
        return norm_dot(x, r, gamma, w, *own, config=config)

    along = (d_out, residual) if with_residual else d_out
    args = x, residual, gamma, w, *own
    got, want = (pulled(jax.jit(f), along, *args) for f in (ours, composed))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bar = 4 * BAR[dtype] * float(np.abs(np.asarray(b, F32)).max())
        np.testing.assert_allclose(
            np.asarray(a, F32), np.asarray(b, F32), rtol=0, atol=bar
        )


def test_weights_side_by_side_are_several_products(rng):
    """To the bit, where one scale serves them."""
    x, _, gamma, w, _ = given(rng)
    scaling = scaling_of(*SCALES)
    parts = jnp.split(w, [8, 24], 1)
    got = jax.jit(fp8_norm_dot)(x, gamma, jnp.concatenate(parts, 1), scaling)
    want = [jax.jit(fp8_norm_dot)(x, gamma, part, scaling) for part in parts]
    near(got, np.concatenate(want, 1).astype(np.float64), F32)


def test_the_rounded_sum_is_normed(rng):
    """What the residual adds below x's last digit is seen by nobody."""
    x, _, gamma, w, _ = given(rng, dtype=BF16)
    scaling = scaling_of(*SCALES)
    out, total = fp8_norm_dot(x, gamma, w, scaling, residual=x * BF16(2.0**-10))
    np.testing.assert_array_equal(np.asarray(total, F32), np.asarray(x, F32))
    alone = fp8_norm_dot(x, gamma, w, scaling)
    np.testing.assert_array_equal(np.asarray(out, F32), np.asarray(alone, F32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["x", "residual", "gamma", "w", "d_out"])
def test_what_is_not_finite_is_reported(rng, which, bad):
    drawn = dict(zip(("x", "residual", "gamma", "w", "d_out"), given(rng), strict=True))
    at = (3,) * drawn[which].ndim
    drawn[which] = drawn[which].at[at].set(bad)
    *args, d_out = drawn.values()
    along = (d_out, jnp.zeros_like(args[0]))
    *_, (*_, report) = pulled(
        jax.jit(norm_dot), along, *args, scaling_of(1.0, 1.0, 1.0)
    )
    role = {"w": 1, "d_out": 2}.get(which, 0)
    np.testing.assert_array_equal(np.isfinite(report.scale), np.arange(3) != role)


def test_nothing_at_all():
    x, gamma, w = jnp.zeros((0, 8)), jnp.ones(8), jnp.ones((8, 16))
    out, (d_x, _, d_gamma, d_w, _) = pulled(
        norm_dot, jnp.zeros((0, 16)), x, None, gamma, w, Fp8Scaling.create()
    )
    assert out.shape == (0, 16) and d_x.shape == x.shape
    assert not d_w.any() and not d_gamma.any()


# ---- transforms ----------------------------------------------------------------------


def test_stacked_layers_by_scan_are_layers_one_by_one(rng):
    x, residual, gamma, _, d_out = given(rng, (32, 24), 24)
    w = jnp.asarray(rng.standard_normal((3, 24, 24)) / 5, F32)
    gammas = gamma * jnp.array([[1.0], [1.5], [0.5]])
    scaling = Fp8Scaling.create(layers=(3,))

    def layer(state: Any, own: Any) -> Any:
        gamma, w, scaling = own
        out, total = fp8_norm_dot(state[0], gamma, w, scaling, residual=state[1])
        return (jnp.tanh(out), total), None

    def scanned(x: Any, r: Any, *stacks: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), (x, r), stacks)[0]

    def by_hand(x: Any, r: Any, *stacks: Any) -> Any:
        state = (x, r)
        for i in range(3):
            own = jax.tree.map(lambda t, i=i: t[i], stacks)
            state = layer(state, own)[0]
        return state

    args = x, residual, gammas, w, scaling
    along = d_out, d_out
    got, want = (pulled(jax.jit(f), along, *args) for f in (scanned, by_hand))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), got, want
    )


def test_vmap_over_layers(rng):
    members = [given(rng) for _ in range(3)]
    x, residual, gamma, w, d_out = (jnp.stack(t) for t in zip(*members, strict=True))
    scaling = Fp8Scaling.create(layers=(3,))
    along = (d_out, d_out[..., :24])
    got = pulled(jax.jit(jax.vmap(norm_dot)), along, x, residual, gamma, w, scaling)
    for i in range(3):
        one = jax.tree.map(lambda t, i=i: t[i], scaling)
        a, r, g, b, d = members[i]
        want = pulled(jax.jit(norm_dot), (d, d[:, :24]), a, r, g, b, one)
        jax.tree.map(
            lambda t, u, i=i: np.testing.assert_allclose(t[i], u, rtol=1e-5, atol=1e-6),
            got, want,
        )  # fmt: skip


# How x and the residual are cut, how w is, and how the result is.
CUTS: dict[str, tuple[Any, Any, Any]] = {
    "members": (("a",), (), ("a",)),
    "members and rows": (("a", "b"), (), ("a", "b")),
    "members and columns": (("a",), (None, "b"), ("a", None, "b")),
}


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_over_devices(rng, kind, cut):
    """As on one device, and nothing is gathered."""
    x, residual, gamma, w, d_out = given(rng, (4, 8, 24), 56)
    scaling = scaling_of(8.0, 8.0, 8.0)
    along = (d_out, x)
    want = pulled(jax.jit(norm_dot), along, x, residual, gamma, w, scaling)
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(kind,) * 2)
    of_x, of_w, of_out = (NamedSharding(mesh, P(*spec)) for spec in CUTS[cut])
    whole = NamedSharding(mesh, P())
    put = jax.device_put(
        (x, residual, gamma, w, scaling, along),
        (of_x, of_x, whole, of_w, whole, (of_out, of_x)),
    )
    out = of_out if kind is AxisType.Explicit else None
    dot = functools.partial(norm_dot, out_sharding=out)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *given: pulled(dot, given[-1], *given[:-1]))
        text = run.lower(*put).compile().as_text()
        got = run(*put)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want
    )
    assert got[0][0].sharding.is_equivalent_to(of_out, 3)
    assert got[0][1].sharding.is_equivalent_to(of_x, 3)
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.usefixtures("four_cpus")
def test_shard_map_adds_gradients(rng):
    x, residual, gamma, w, d_out = given(rng)
    scaling = scaling_of(8.0, 8.0, 8.0)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    rows = P("data")
    over = jax.shard_map(
        norm_dot,
        mesh=mesh,
        in_specs=(rows, rows, P(), P(), P()),
        out_specs=(rows, rows),
    )
    args = (d_out, x), x, residual, gamma, w, scaling
    (*got, report), (*want, whole) = (
        jax.tree.leaves(
            pulled(jax.jit(f), *args), is_leaf=lambda t: isinstance(t, Fp8Scaling)
        )
        for f in (over, norm_dot)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    ratio = (np.asarray(report.scale) / whole.scale) ** 0.25
    assert (ratio > 1 - 1e-5).all() and (ratio <= 4**0.25 * (1 + 1e-5)).all()


def test_training_with_it_lowers_a_loss(rng):
    """A step of scales and parameters, a few times over."""
    x, residual, gamma, w, target = given(rng, (64, 24), 16)
    params, scaling = {"gamma": gamma, "w": w}, Fp8Scaling.create()

    @jax.jit
    def step(params: Any, scaling: Any) -> Any:
        def loss(params: Any, scaling: Any) -> Any:
            out, _ = fp8_norm_dot(
                x, params["gamma"], params["w"], scaling, residual=residual
            )
            return jnp.mean((out - target * 16) ** 2)

        value, (grads, report) = jax.value_and_grad(loss, (0, 1))(params, scaling)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return params, scaling.update(report), value

    losses = []
    for _ in range(20):
        params, scaling, value = step(params, scaling)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]
    assert (np.asarray(scaling.scale) != np.asarray(Fp8Scaling.create().scale)).any()
