"""Which arrays a step of the trainer writes in place, and which are left."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_bit_models import Block, task
from flax import nnx
from messages import check

from jax_kvblock.training import (
    Fp8State,
    FP8TrainerState,
    FP8TrainingEngine,
    create_fp8_trainer,
)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_step_writes_in_place(rng, donate):
    """Where it is let; no other arrays go."""
    x, y = task(rng)
    optimizer, model = optax.adam(1e-2), Block(nnx.Rngs(0))
    trainer = create_fp8_trainer(model, donate=donate)
    trainer.setup_fp8_training()
    for bad in (False, True):  # a step that is taken, and one that is skipped
        if bad:
            x = x * np.nan
        loss = trainer.training_step(x, y)
        state = trainer.begin(optimizer) if not bad else trainer.state
        assert trainer.optimizer_step(optimizer) is not bad
        own = jax.tree.leaves((state.training.params, state.training.opt_state))
        assert [a.is_deleted() for a in own] == [donate] * len(own)
        assert not any(a.is_deleted() for a in (x, y, loss))
        for a in jax.tree.leaves((nnx.state(model), trainer.state)):
            assert not getattr(a, "is_deleted", bool)()


def test_donating_changes_no_number(rng):
    """Also of an optimizer whose state begins as the parameters themselves."""
    x, y = task(rng)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda d, a, b: a - b - 0.1 * d, grads, state, params
        ), state

    optimizer = optax.GradientTransformation(lambda params: params, update)
    losses = []
    for donate in (False, True):
        trainer = FP8TrainingEngine(Block(nnx.Rngs(0)), donate=donate)
        trainer.setup_fp8_training()
        losses.append([])
        for _ in range(3):
            losses[-1].append(float(trainer.training_step(x, y)))
            assert trainer.optimizer_step(optimizer)
    assert losses[0] == losses[1]


class Alike(nnx.Module):
    """Parameters and a statistic that begin as one array, in each way."""

    def __init__(self) -> None:
        layers = [nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)) for _ in "abcd"]
        self.a, self.b, self.c, self.d = layers
        kernel = self.a.kernel[...]
        self.b.kernel[...] = kernel  # another object may have the same memory
        self.c.kernel = nnx.Param(kernel)
        self.d.kernel[...] = jax.device_put(kernel, jax.local_devices()[0])
        self.seen = nnx.BatchStat(kernel)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = self.seen[...] + x[:16]
        return self.d(self.c(self.b(self.a(x))))


def test_what_begins_as_one_array_is_donated_once(rng):
    """Of a model, and of a state that is restored; what is not donated stays."""
    x = jnp.asarray(rng.standard_normal((16, 16)), jnp.float32)
    optimizer, found = optax.sgd(0.1, momentum=0.9), []
    for donate in (False, True):
        trainer = create_fp8_trainer(Alike(), scaling="current", donate=donate)
        trainer.setup_fp8_training()

        def step(x: Any, trainer: Any = trainer) -> list[Any]:
            loss = trainer.training_step(x, jnp.zeros_like(x))
            return [float(loss), trainer.optimizer_step(optimizer)]

        found.append([step(x), step(x)])
        training, variables = trainer.state
        kernel, zero = training.params["a"]["kernel"][...], jnp.int32(0)
        given = training.params, training.opt_state, variables
        alike = jax.tree.unflatten(
            jax.tree.structure(given), [kernel] * len(jax.tree.leaves(given))
        )
        training = Fp8State(alike[0], training.scalings, alike[1], zero, zero, zero)
        trainer.restore(FP8TrainerState(training, alike[2]))
        found[-1] += [step(x * np.nan), step(x)]  # a skipped one goes back
        found[-1].append(jax.device_get(trainer.state))
    assert [applied for _, applied in found[1][:4]] == [True, True, False, True]
    assert str(found[0][:4]) == str(found[1][:4])
    for plain, given in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(plain, given)


def test_what_is_no_switch_is_refused():
    word: Any = "state"
    refused = lambda: FP8TrainingEngine(Block(nnx.Rngs(0)), donate=word)  # noqa: E731
    words = "donate must be True or False|got 'state'"
    check("FP8TrainingEngine", TypeError, words, refused)
