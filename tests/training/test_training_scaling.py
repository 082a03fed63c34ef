"""Scales from step to step, against the rule in NumPy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_truth as truth

from jax_kvblock.training import FP8Config, Fp8Scaling, fp8_dot
from jax_kvblock.training.scaling import report_of, scale_for

FORMS = ("e4m3", "e4m3", "e5m2")
LIMITS = np.array([truth.LIMITS[form] for form in FORMS])


def reported(scaling: Fp8Scaling, sizes: np.ndarray) -> Fp8Scaling:
    ratios = np.array(sizes) * np.asarray(scaling.scale, np.float64) / LIMITS
    return Fp8Scaling(jnp.asarray(ratios**4, jnp.float32), scaling.history * 0)


def test_the_scale_is_the_largest_power_of_two_that_fits(rng):
    """Also for sizes right at, below and above a power of two times the limit."""
    limit = truth.LIMITS["e4m3"]
    edges = limit * 2.0 ** np.arange(-20, 20)
    edges = edges.astype(np.float32)
    around = [np.nextafter(edges, np.float32(y)) for y in (0, 1e9)]
    sizes = np.concatenate([edges, *around, np.exp(rng.uniform(-80, 80, 200))])
    sizes = sizes.astype(np.float32)
    for form, margin in itertools.product(("e4m3", "e5m2"), (0, 3)):
        got = jax.jit(scale_for, static_argnums=(1, 2))(
            sizes, truth.LIMITS[form], margin
        )
        want = [truth.scale_for(float(x), form, margin) for x in sizes]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [0.0, np.nan, np.inf])
def test_a_size_that_says_nothing_gives_a_scale_of_1(size):
    assert scale_for(jnp.float32(size), 448.0, 2) == 1


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_a_report_is_read_again(size):
    """Within 2^±30 of what the scale serves; beyond it is held there, and grows on."""
    scaling = Fp8Scaling.create()
    for _ in range(4):  # 2^100 away, 2^30 a step
        report = report_of(jnp.float32(size), scaling.scale[0], 448.0)
        scales = jnp.array([report, 0, 0], jnp.float32)
        scaling = scaling.update(Fp8Scaling(scales, scaling.history), FP8Config())
        scaling = Fp8Scaling(scaling.scale, scaling.history.at[..., 1:].set(0))
    want = truth.scale_for(size, "e4m3")
    np.testing.assert_allclose(scaling.scale, [want, 16, 2**15])


@pytest.mark.parametrize("scale", [2.0, 2.0**10, 2.0**60])
def test_a_size_that_is_too_large_once_it_is_scaled_is_followed(scale):
    """float32 holds it, and not its product with the scale: 2^24 more a step."""
    size, scaling = jnp.float32(3e38), Fp8Scaling.create()
    scaling = Fp8Scaling(scaling.scale.at[0].set(scale), scaling.history)
    for _ in range(8):
        report = report_of(size, scaling.scale[0], 448.0)
        assert jnp.isfinite(report)
        scales = jnp.array([report, 0, 0], jnp.float32)
        scaling = scaling.update(Fp8Scaling(scales, scaling.history), FP8Config())
    assert scaling.scale[0] == 2.0**-60  # the least there is


def test_the_rule_over_many_steps(rng):
    config = FP8Config(history=3, margin=1)
    update = jax.jit(lambda s, r: s.update(r, config))
    scaling = Fp8Scaling.create(config)
    seen: list[np.ndarray] = []
    scales = np.zeros(3)
    for _ in range(12):
        sizes = np.exp(rng.uniform(-6, 6, 3)).astype(np.float32)
        scaling = update(scaling, reported(scaling, sizes))
        seen.append(sizes)
        for i, form in enumerate(FORMS):
            largest = max(float(sizes[i]) for sizes in seen[-3:])
            scales[i] = truth.scale_for(largest, form, 1)
        np.testing.assert_array_equal(scaling.scale, scales)
        np.testing.assert_allclose(scaling.history[:, 0], sizes, rtol=1e-5)


def test_what_is_not_finite_is_passed_over():
    scaling = Fp8Scaling.create(FP8Config(history=2))
    known = scaling.update(reported(scaling, np.array([1.0, 2.0, 3.0])))
    report = Fp8Scaling(jnp.array([jnp.nan, jnp.inf, 0.5]), known.history * 0)
    after = known.update(report, FP8Config(history=2))
    np.testing.assert_array_equal(after.scale[:2], known.scale[:2])
    np.testing.assert_array_equal(after.history[:2], known.history[:2])
    assert after.history[2, 1] == known.history[2, 0]


def test_sizes_that_vanish_leave_the_scale():
    """Gradients that are all zeros, beside inputs and weights that are not."""
    config = FP8Config(history=2)
    scaling = Fp8Scaling.create(config)
    scaling = scaling.update(reported(scaling, np.array([1e-3, 1.0, 1e-5])), config)
    before = scaling.scale
    for _ in range(5):
        sizes = np.array([1e-3, 1.0, 0.0])
        scaling = scaling.update(reported(scaling, sizes), config)
        np.testing.assert_array_equal(scaling.scale, before)
    assert not scaling.history[2].any()


@pytest.mark.parametrize("bad", [0.0, -2.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("known", [True, False])
def test_a_scale_that_serves_nothing_is_repaired(bad, known):
    """In one step, which is skipped; the others are as they would be."""
    config = FP8Config(history=4)
    first = Fp8Scaling.create(config)
    history = first.history.at[:, 0].set(8.0) if known else first.history
    x, w = jnp.full((2, 8), 3.0), jnp.full((8, 2), 0.5)

    def step(scaling):
        def loss(scaling):
            return jnp.sum(fp8_dot(x, w, scaling, config))

        return scaling.update(jax.grad(loss)(scaling), config)

    right = step(Fp8Scaling(first.scale, history))
    broken = Fp8Scaling(first.scale.at[0].set(bad), history)
    made = step(broken)
    assert made.scale[0] == (2.0**5 if known else first.scale[0])
    assert made.scale[1] == right.scale[1]
    assert made.history[0].max() == (8.0 if known else 0.0)
    made, right = step(made), step(right)
    assert np.isfinite(made.history).all() and (made.history[:, 0] > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -3.0])
def test_sizes_of_a_history_that_are_none_are_forgotten(bad):
    first = Fp8Scaling.create()
    scaling = Fp8Scaling(first.scale, first.history.at[:, :3].set(bad))
    report = Fp8Scaling(jnp.ones(3), jnp.zeros_like(first.history))
    fresh, made = first.update(report), scaling.update(report)
    jax.tree.map(np.testing.assert_array_equal, made, fresh)


def test_a_product_that_took_no_part_keeps_what_it_knows():
    config = FP8Config(history=2)
    scaling = Fp8Scaling.create(config)
    scaling = scaling.update(reported(scaling, np.array([100.0, 1.0, 1e-5])), config)
    after = scaling
    for _ in range(5):
        after = after.update(reported(after, np.zeros(3)), config)
    np.testing.assert_array_equal(after.history, scaling.history)
    np.testing.assert_array_equal(after.scale, scaling.scale)


@pytest.mark.parametrize("count", [300, 2**20])
def test_a_sum_of_many_reports_is_a_number(count):
    """Of sizes far beyond their scale: it comes down, and does not stay for ever."""
    scaling = Fp8Scaling.create()
    report = count * report_of(jnp.full(3, 1e30), scaling.scale, 448.0)
    after = scaling.update(Fp8Scaling(report, scaling.history))
    assert np.isfinite(report).all()
    assert (after.scale < scaling.scale / 2**20).all()


def test_stacked_layers(rng):
    config = FP8Config(history=4)
    scaling = Fp8Scaling.create(config, (5,))
    assert scaling.scale.shape == (5, 3) and scaling.history.shape == (5, 3, 4)
    report = Fp8Scaling(jnp.asarray(rng.uniform(0, 2, (5, 3)), jnp.float32), None)
    got = scaling.update(report, config)
    for i in range(5):
        one = Fp8Scaling.create(config).update(
            Fp8Scaling(report.scale[i], None), config
        )
        np.testing.assert_array_equal(got.scale[i], one.scale)
