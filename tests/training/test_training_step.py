"""A step as a pure function: what it takes, skips, counts and keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax import checkpoint

from jax_kvblock.training import FP8Config, Fp8Scaling, fp8_dot, fp8_training

D = 16
DELAYED, CURRENT = FP8Config(history=4), FP8Config(scaling="current")


def parameters(rng: np.random.Generator) -> Any:
    shapes = {"up": (D, 4 * D), "down": (4 * D, D)}
    return {
        name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
        for name, shape in shapes.items()
    }


def batch_of(rng: np.random.Generator, rows: int = 64) -> Any:
    x = rng.standard_normal((rows, D)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.tanh(x[:, ::-1]))


def loss_with(config: FP8Config) -> Any:
    def loss(params: Any, scalings: Any, batch: Any) -> jax.Array:
        x, y = batch
        own = scalings or dict.fromkeys(params)
        h = jax.nn.relu(fp8_dot(x, params["up"], own["up"], config))
        return jnp.mean((fp8_dot(h, params["down"], own["down"], config) - y) ** 2)

    return loss


def scalings_of(config: FP8Config) -> Any:
    if config.scaling == "current":
        return None
    return {name: Fp8Scaling.create(config) for name in ("up", "down")}


def begin(rng: np.random.Generator, config: FP8Config, **how: Any) -> Any:
    training = fp8_training(loss_with(config), optax.adamw(1e-2), config, **how)
    return training, training.init(parameters(rng), scalings_of(config))


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x), tree)


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("config", [DELAYED, CURRENT], ids=lambda c: c.scaling)
def test_a_step_is_the_optimizers_and_the_scales_own(rng, config):
    """Written out by hand."""
    training, state = begin(rng, config)
    params, batch = copy(state.params), batch_of(rng)
    scalings = scalings_of(config)
    loss, (grads, reports) = jax.jit(
        jax.value_and_grad(loss_with(config), argnums=(0, 1))
    )(params, scalings, batch)
    updates, _ = optax.adamw(1e-2).update(grads, state.opt_state, params)
    want = optax.apply_updates(params, updates)
    state, report = training.train_step(state, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        want,
    )
    np.testing.assert_allclose(report.loss, loss, rtol=1e-6)
    assert report.applied and report.aux is None
    assert (state.steps, state.overflows) == (1, 0)
    if scalings is not None:
        for name, own in scalings.items():
            assert_equal(
                state.scalings[name].scale, own.update(reports[name], config).scale
            )
    else:
        assert state.scalings is None and report.saturated == 0


@pytest.mark.parametrize("config", [DELAYED, CURRENT], ids=lambda c: c.scaling)
def test_it_learns_as_float32_does(rng, config):
    batches = [batch_of(rng) for _ in range(60)]
    training, state = begin(rng, config)
    params = copy(state.params)
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(params)

    @jax.jit
    def wide(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x, y = batch
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    losses = []
    for batch in batches:
        state, report = training.train_step(state, batch)
        params, opt_state, value = wide(params, opt_state, batch)
        losses.append((float(report.loss), float(value)))
    narrow_, wide_ = np.array(losses)[-10:].mean(0)
    assert wide_ < 0.3 * losses[0][1]
    assert abs(narrow_ - wide_) < 0.05 * wide_


@pytest.mark.parametrize("config", [DELAYED, CURRENT], ids=lambda c: c.scaling)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_loses_nothing(rng, config, bad):
    """Parameters and the optimizer's state stay; the next step is as good as any."""
    training, state = begin(rng, config)
    good, after = batch_of(rng), batch_of(rng)
    state, _ = training.train_step(state, good)
    before = copy(state)
    x, y = batch_of(rng)
    state, report = training.train_step(state, (x, y.at[0, 0].set(bad)))
    assert not report.applied
    assert_equal((state.params, state.opt_state), (before.params, before.opt_state))
    assert (state.steps, state.overflows) == (1, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.scalings))
    state, report = training.train_step(state, after)
    assert report.applied and np.isfinite(report.loss)
    assert (state.steps, state.overflows) == (2, 1)


def test_a_step_that_is_skipped_computes_no_update(rng):
    """A branch, in which the optimizer runs or does not."""
    ran, inner = [], optax.sgd(1e-2)

    def update(grads, state, params=None):
        jax.debug.callback(lambda: ran.append(1))
        return inner.update(grads, state, params)

    optimizer = optax.GradientTransformation(inner.init, update)
    training = fp8_training(loss_with(CURRENT), optimizer, CURRENT)
    state = training.init(parameters(rng), None)
    x, y = batch_of(rng)
    for batch, count in (((x, y), 1), ((x, y.at[0, 0].set(jnp.nan)), 1), ((x, y), 2)):
        state, _ = training.train_step(state, batch)
        jax.effects_barrier()
        assert len(ran) == count


def test_numbers_too_large_for_their_scale(rng):
    """Taken and counted, or skipped with FP8Config(skip_saturated=True)."""
    for skip in (False, True):
        config = FP8Config(history=4, skip_saturated=skip)
        training, state = begin(rng, config)
        for _ in range(3):
            state, report = training.train_step(state, batch_of(rng))
        assert report.saturated == 0
        known = int(state.saturated)
        before = copy(state.params)
        x, y = batch_of(rng)
        state, report = training.train_step(state, (x * 64, y))
        assert report.saturated > 0 and state.saturated == known + report.saturated
        assert bool(report.applied) != skip
        same = all(
            np.array_equal(a, b)
            for a, b in zip(
                jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True
            )
        )
        assert same == skip
        # Its sizes count: the batch fits the first layer now, and what came out of that
        # is seen as large as it is, so that it fits the second layer next.
        tries = 0
        while report.saturated:
            state, report = training.train_step(state, (x * 64, y))
            tries += 1
        assert report.applied and tries <= 4


def test_aux(rng):
    def loss(params: Any, scalings: Any, batch: Any) -> Any:
        return loss_with(DELAYED)(params, scalings, batch), {"rows": len(batch[0])}

    training = fp8_training(loss, optax.sgd(0.1), DELAYED, has_aux=True)
    state = training.init(parameters(rng), scalings_of(DELAYED))
    _, report = training.train_step(state, batch_of(rng))
    assert report.aux == {"rows": 64}


def test_one_compilation_and_the_state_is_donated(rng):
    training, state = begin(rng, DELAYED)
    first = state.params["up"]
    for _ in range(3):
        state, _ = training.train_step(state, batch_of(rng))
    assert training.train_step._cache_size() == 1
    assert first.is_deleted()


def test_scales_may_begin_as_the_same(rng):
    training, _ = begin(rng, DELAYED)
    same = dict.fromkeys(("up", "down"), Fp8Scaling.create(DELAYED))
    state, report = training.train_step(
        training.init(parameters(rng), same), batch_of(rng)
    )
    assert report.applied
    assert not np.array_equal(state.scalings["up"].scale, state.scalings["down"].scale)


def test_parameters_of_16_bits_stay_so(rng):
    training, state = begin(rng, DELAYED)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    state = training.init(params, scalings_of(DELAYED))
    state, report = training.train_step(state, batch_of(rng))
    assert report.applied
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("config", [DELAYED, CURRENT], ids=lambda c: c.scaling)
def test_an_interrupted_run_goes_on(rng, tmp_path, config):
    """A checkpoint of the state gives the same next steps, bit for bit."""
    training, state = begin(rng, config)
    batches = [batch_of(rng) for _ in range(4)]
    for batch in batches[:2]:
        state, _ = training.train_step(state, batch)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        like = jax.eval_shape(
            lambda: training.init(parameters(rng), scalings_of(config))
        )
        restored = saver.restore(tmp_path / "state", like)
    for batch in batches[2:]:
        state, report = training.train_step(state, batch)
        restored, other = training.train_step(restored, batch)
        assert_equal(other, report)
    assert_equal(restored, state)


# Run by itself: it trains, saves after two steps, and ends as if killed after a third.
KILLED = """
import os
import sys

import numpy as np
from orbax import checkpoint
from test_training_step import DELAYED, batch_of, begin

rng = np.random.default_rng(7)
training, state = begin(rng, DELAYED)
for step in range(3):
    state, report = training.train_step(state, batch_of(rng))
    print(float(report.loss).hex(), flush=True)
    if step == 1:
        with checkpoint.StandardCheckpointer() as saver:
            saver.save(sys.argv[1], state)
os._exit(9)
"""


@pytest.mark.cpu
def test_a_run_that_is_killed_goes_on(tmp_path):
    """Another process has what was saved, and the losses of a run that was not."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    died = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(tmp_path / "state")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert died.returncode == 9, died.stderr
    rng = np.random.default_rng(7)
    training, state = begin(rng, DELAYED)
    batches = [batch_of(rng) for _ in range(5)]
    whole = []
    for batch in batches:
        state, report = training.train_step(state, batch)
        whole.append(float(report.loss))
    assert [float.fromhex(line) for line in died.stdout.split()] == whole[:3]
    like = jax.eval_shape(lambda: training.init(parameters(rng), scalings_of(DELAYED)))
    with checkpoint.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "state", like)
    assert restored.steps == 2
    losses = []
    for batch in batches[2:]:  # the third step again: it was not saved
        restored, report = training.train_step(restored, batch)
        losses.append(float(report.loss))
    assert losses == whole[2:]
    assert_equal(restored, state)
