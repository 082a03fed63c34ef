"""Which arrays a step of the trainer writes in place, and which are left."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from eight_bit_models import Block, task
from flax import nnx
from messages import check

from jax_kvblock.training import FP8TrainingEngine, create_fp8_trainer


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


def test_what_is_no_switch_is_refused():
    word: Any = "state"
    refused = lambda: FP8TrainingEngine(Block(nnx.Rngs(0)), donate=word)  # noqa: E731
    words = "donate must be True or False|got 'state'"
    check("FP8TrainingEngine", TypeError, words, refused)
