"""The trainer over flax.nnx models in 8 bits."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_bit_models import ALL, CURRENT, Block, task
from flax import nnx
from messages import check
from orbax import checkpoint

from jax_kvblock.core import ffi
from jax_kvblock.core.checks import show
from jax_kvblock.training import (
    FP8TrainingEngine,
    convert_model_to_fp8,
    create_fp8_trainer,
    fp8_layers,
)
from jax_kvblock.training.loss import mean_loss


def test_it_trains(rng):
    """As S2's example does; as the model learns in float32."""
    x, y = task(rng)
    wide = Block(nnx.Rngs(0))
    plain = nnx.Optimizer(wide, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    optimizer = optax.adam(1e-2)
    model = Block(nnx.Rngs(0))
    losses = []
    with create_fp8_trainer(model, exclude=("head",)) as trainer:
        for _ in range(40):
            loss = trainer.training_step(x, y)
            assert trainer.optimizer_step(optimizer) is True
            losses.append((float(loss), float(step(wide, plain))))
        known = trainer.get_training_statistics()
    assert losses[0][0] == pytest.approx(losses[0][1], rel=0.05)
    assert losses[-1][1] < 0.2 * losses[0][1]
    assert abs(losses[-1][0] - losses[-1][1]) < 0.1 * losses[0][1]
    assert (known["steps"], known["overflows"]) == (40, 0)
    assert set(known["scales"]) == ALL - {"head"}
    assert set(known["scales"]["layers.0"]) == {"input", "weight", "gradient"}
    assert known["scales"]["layers.0"]["gradient"] > 1e3


def test_a_step_that_is_not_finite_is_skipped(rng):
    x, y = task(rng)
    optimizer = optax.adam(1e-2)
    model = Block(nnx.Rngs(0))
    with FP8TrainingEngine(model) as trainer:
        trainer.training_step(x, y)
        assert trainer.optimizer_step(optimizer)
        before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
        assert np.isnan(trainer.training_step(x.at[0, 0, 0].set(np.nan), y))
        assert trainer.optimizer_step(optimizer) is False
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)
        trainer.training_step(x, y)
        assert trainer.optimizer_step(optimizer) is True
        known = trainer.get_training_statistics()
    assert (known["steps"], known["overflows"]) == (2, 1)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize("make", [FP8TrainingEngine, create_fp8_trainer])
@pytest.mark.parametrize("given", ["device", "default device"])
def test_steps_run_on_the_device(rng, make, given):
    """The one that is given, or else JAX's default one, a context's own, too."""
    device = jax.devices("cpu")[1]
    x, y = task(rng)
    model = Block(nnx.Rngs(0))
    own = {"device": device} if given == "device" else {}
    default = jax.default_device(jax.devices("cpu")[0] if own else device)
    optimizer = optax.sgd(0.1)
    with default, make(model, **own) as trainer:
        for _ in range(2):
            loss = trainer.training_step(x, y)
            assert trainer.optimizer_step(optimizer)
            assert loss.devices() == {device}
        arrays = jax.tree.leaves((nnx.state(model, nnx.Param), trainer.state.training))
    assert all(a.devices() == {device} for a in arrays)
    if given == "device":  # arrays were there before the first step, too
        assert trainer._differentiate._cache_size() == trainer._apply._cache_size() == 1


def test_calls_between_steps_are_their_mean(rng):
    """Two halves of a batch train as the whole does."""
    x, y = task(rng)
    optimizer = optax.sgd(0.5)
    models = []
    for parts in ([slice(None)], [slice(2), slice(2, None)]):
        models.append(Block(nnx.Rngs(0)))
        with FP8TrainingEngine(models[-1], CURRENT) as trainer:
            for _ in range(3):
                for part in parts:
                    trainer.training_step(x[part], y[part])
                trainer.optimizer_step(optimizer)
    whole, halves = (nnx.state(m, nnx.Param) for m in models)
    start = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
    moved = jax.tree.map(jnp.subtract, whole, start)
    for a, b, c in zip(*map(jax.tree.leaves, (halves, whole, moved)), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(c) + 1e-7


def test_variables_that_are_no_parameters_move_on(rng):
    """Dropout draws anew in each call; batch statistics follow."""
    x, y = task(rng)
    model = Noisy(nnx.Rngs(0))
    with FP8TrainingEngine(model, CURRENT) as trainer:
        mean = np.array(model.norm.mean[...])
        first, second = trainer.training_step(x, y), trainer.training_step(x, y)
        assert first != second
        assert np.abs(np.asarray(model.norm.mean[...]) - mean).max() > 1e-3


@pytest.mark.parametrize("targets", ["integers", "numbers"])
def test_losses(rng, targets):
    x, y = task(rng)
    want: Any
    model = convert_model_to_fp8(Block(nnx.Rngs(0)), CURRENT)
    made = model(x)
    if targets == "integers":
        want = optax.softmax_cross_entropy_with_integer_labels(made, y).mean()
    else:
        y = jax.nn.one_hot(y, 8)
        want = jnp.mean((made - y) ** 2)
    # On a GPU other products are in TF32, and what is near a middle gets another code.
    rtol = 0.02 if jax.default_backend() == "gpu" else 1e-6
    with FP8TrainingEngine(model, CURRENT) as trainer:
        np.testing.assert_allclose(trainer.training_step(x, y), want, rtol=rtol)
    own = FP8TrainingEngine(model, CURRENT, loss_fn=lambda out, y: jnp.sum(out))
    own.setup_fp8_training()
    loss, most = own.training_step((x,), y), float(jnp.abs(made).sum())
    np.testing.assert_allclose(loss, jnp.sum(made), rtol=0, atol=rtol * most)


class Noisy(nnx.Module):
    """Dropout and statistics of batches: variables that are no parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(self.linear(x))
        self.sow(nnx.Intermediate, "h", h)
        return self.head(self.drop(jax.nn.relu(h)))


def begun(model: Any) -> Any:
    optimizer, trainer = optax.adam(1e-2), FP8TrainingEngine(model)
    trainer.setup_fp8_training()
    return optimizer, trainer


def go(optimizer: Any, trainer: Any, steps: int, x: Any, y: Any) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(trainer.training_step(x, y)))
        trainer.optimizer_step(optimizer)
    return losses


def test_an_interrupted_run_goes_on(rng, tmp_path):
    """From a checkpoint, bit for bit; also statistics of batches and dropout."""
    x, y = task(rng)
    whole = go(*begun(Noisy(nnx.Rngs(0))), 6, x, y)
    optimizer, trainer = begun(Noisy(nnx.Rngs(0)))
    go(optimizer, trainer, 3, x, y)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", trainer.state)
        saver.wait_until_finished()
        optimizer, trainer = begun(Noisy(nnx.Rngs(7)))
        like = trainer.begin(optimizer)
        trainer.training_step(x, y)  # not taken: dropped
        trainer.restore(saver.restore(tmp_path / "state", like))
    assert go(optimizer, trainer, 3, x, y) == whole[3:]
    assert trainer.get_training_statistics()["steps"] == 6


def test_states_of_something_else_are_refused(rng):
    optimizer, trainer = begun(Noisy(nnx.Rngs(0)))
    where = "FP8TrainingEngine.restore"
    words = "begin(optimizer) first"
    check(where, RuntimeError, words, lambda: trainer.restore(None))
    own = trainer.begin(optimizer)
    other, another = begun(Block(nnx.Rngs(0)))
    for state in (None, own.training, another.begin(other)):
        words = f"of this model and optimizer|got {type(state).__name__}"
        refused = lambda state=state: trainer.restore(state)  # noqa: E731
        check(where, ValueError, words, refused)


@pytest.mark.parametrize("part", ["params", "scalings", "opt_state", "steps"])
def test_states_of_other_shapes_and_dtypes_are_refused(part):
    """By the name of the array; nothing of the trainer has changed."""
    optimizer, trainer = begun(Noisy(nnx.Rngs(0)))
    own = trainer.begin(optimizer)
    before = jax.tree.map(np.array, own.training)
    for error, change in (
        (TypeError, lambda x: x.astype(jnp.float16)),
        (ValueError, lambda x: x[None]),
    ):
        mine = getattr(own.training, part)
        other = jax.tree.map(change, mine)
        given = own._replace(
            training=dataclasses.replace(own.training, **{part: other})
        )
        leaf, bad = (jax.tree.leaves(x)[0] for x in (mine, other))
        words = f"state.training.{part}|must be {show(leaf)}, got {show(bad)}|begin("
        refused = lambda given=given: trainer.restore(given)  # noqa: E731
        check("FP8TrainingEngine.restore", error, words, refused)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.training, before)


def test_a_skipped_step_gives_statistics_back(rng):
    """And the optimizer's state; random keys move on."""
    x, y = task(rng)
    model = Noisy(nnx.Rngs(0))
    optimizer, trainer = begun(model)
    go(optimizer, trainer, 2, x, y)
    before = trainer.state
    trainer.training_step(x, y)
    trainer.training_step(x.at[0, 0, 0].set(np.nan), y)
    assert np.isnan(model.norm.mean[...]).any()
    assert trainer.optimizer_step(optimizer) is False
    after = trainer.state
    jax.tree.map(
        np.testing.assert_array_equal,
        (before.training.params, before.training.opt_state),
        (after.training.params, after.training.opt_state),
    )
    np.testing.assert_array_equal(
        after.variables["norm"]["mean"][...], before.variables["norm"]["mean"][...]
    )
    counts = (
        int(state.variables["drop"]["rngs"]["count"][...]) for state in (before, after)
    )
    assert next(counts) + 2 == next(counts)


def test_leaving_the_context_drops_what_was_not_taken(rng):
    x, y = task(rng)
    model = Noisy(nnx.Rngs(0))
    with FP8TrainingEngine(model) as trainer:
        before = np.array(model.norm.mean[...])
        trainer.training_step(x, y)
    np.testing.assert_array_equal(model.norm.mean[...], before)


def test_what_is_sown_does_not_grow(rng):
    x, y = task(rng)
    model = Noisy(nnx.Rngs(0))
    optimizer, trainer = begun(model)
    model(x)  # sows, too
    go(optimizer, trainer, 3, x, y)
    assert trainer._differentiate._cache_size() == 1
    assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))


def test_a_loss_that_is_nan_from_the_start(rng):
    x, y = task(rng)
    words = "finite before the first step, got nan|float32"
    where = "FP8TrainingEngine.training_step"
    optimizer, trainer = begun(Block(nnx.Rngs(0)))
    refused = lambda: trainer.training_step(x * np.nan, y)  # noqa: E731
    check(where, FloatingPointError, words, refused)
    trainer.begin(optimizer)
    trainer.training_step(x, y)
    check(where, FloatingPointError, words, refused)  # also a second call
    assert trainer.optimizer_step(optimizer)
    assert np.isnan(refused())  # from now on it is a step to skip


def test_gradients_that_are_nan_from_the_start(rng):
    """Of a finite loss: no step would ever be taken, and nobody would say why."""
    x, y = task(rng)
    trainer = FP8TrainingEngine(
        Block(nnx.Rngs(0)), loss_fn=lambda out, y: jnp.sum(jnp.sqrt(0 * out))
    )
    trainer.setup_fp8_training()
    check(
        "FP8TrainingEngine.training_step", FloatingPointError,
        "gradients must be finite before the first step|nan in that of "
        "attention.key.|a loss of 0.0|targets, the loss_fn",
        lambda: trainer.training_step(x, y),
    )  # fmt: skip


def test_targets_in_a_list(rng):
    x, y = task(rng)
    losses = []
    for targets in (y, np.asarray(y).tolist(), list(y)):
        _, trainer = begun(Block(nnx.Rngs(0)))
        losses.append(float(trainer.training_step(x, targets)))
    assert losses[0] == losses[1] == losses[2]
    check(
        "FP8TrainingEngine.training_step", TypeError, "targets must be an array",
        lambda: trainer.training_step(x, ["a", "b"]),
    )  # fmt: skip


@pytest.mark.parametrize("bad", [-100, -1, 8])
def test_targets_that_are_no_classes(rng, bad):
    """Before the first step and after it; what is traced gives NaN."""
    x, y = task(rng)
    optimizer, trainer = begun(Block(nnx.Rngs(0)))
    wrong = np.asarray(y).copy()
    wrong.flat[3] = bad
    words = f"targets must be classes from 0 to 7|got {bad} (1 of {y.size}|loss_fn"
    where = "FP8TrainingEngine.training_step"
    there = jnp.asarray(wrong)
    check(where, ValueError, words, lambda: trainer.training_step(x, there))
    trainer.training_step(x, y)
    assert trainer.optimizer_step(optimizer)
    check(where, ValueError, words, lambda: trainer.training_step(x, wrong))
    outputs = jnp.zeros((*y.shape, 8))
    check("mean_loss", ValueError, words, lambda: mean_loss(outputs, wrong))
    small = jnp.asarray(wrong, jnp.int8)
    assert np.isnan(jax.jit(mean_loss)(outputs, small))
    assert np.isfinite(jax.jit(mean_loss)(outputs, jnp.asarray(y, jnp.uint8)))


def test_a_training_under_way_does_not_wait_for_targets(rng, elsewhere):
    """On an accelerator they are looked at before the first step alone."""
    x, y = task(rng)
    optimizer, trainer = begun(Block(nnx.Rngs(0)))
    wrong = np.asarray(y).copy()
    wrong.flat[3] = -1
    there = jax.device_put(wrong)
    with pytest.raises(ValueError, match="targets must be classes"):
        trainer.training_step(x, there)
    trainer.training_step(x, y)
    assert trainer.optimizer_step(optimizer)
    assert np.isnan(trainer.training_step(x, there))


def test_losses_that_are_none(rng):
    x, y = task(rng)
    model: Any = Block(nnx.Rngs(0))
    name: Any = "mse"
    refused = lambda: FP8TrainingEngine(model, loss_fn=name)  # noqa: E731
    check("FP8TrainingEngine", TypeError, "loss_fn must be a function|'mse'", refused)
    for loss_fn, got in (
        (lambda out, y: out, "float32["),
        (lambda out, y: (out.sum(), y), "got tuple"),
        (lambda out, y: jnp.argmax(out), "int32[]"),
    ):
        trainer = FP8TrainingEngine(model, loss_fn=loss_fn)
        trainer.setup_fp8_training()
        check(
            "FP8TrainingEngine.training_step", TypeError,
            f"loss_fn must give a scalar of floats|{got}|jnp.mean",
            lambda trainer=trainer: trainer.training_step(x, y),
        )  # fmt: skip


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_state_with_scales_that_serve_nothing(rng, bad):
    optimizer, trainer = begun(Block(nnx.Rngs(0)))
    own = trainer.begin(optimizer)
    scalings = jax.tree.map(lambda x: x.at[..., 1].set(bad), own.training.scalings)
    training = dataclasses.replace(own.training, scalings=scalings)
    check(
        "FP8TrainingEngine.restore", ValueError,
        f"state.training.scalings|finite and above 0, got {bad}|Fp8Scaling.create",
        lambda: trainer.restore(own._replace(training=training)),
    )  # fmt: skip
    trainer.restore(own)


def test_what_is_out_of_order(rng):
    x, y = task(rng)
    engine = FP8TrainingEngine(Block(nnx.Rngs(0)))
    optimizer = optax.sgd(0.1)
    name = "FP8TrainingEngine"
    for method, call in {
        "training_step": lambda: engine.training_step(x, y),
        "optimizer_step": lambda: engine.optimizer_step(optimizer),
        "begin": lambda: engine.begin(optimizer),
        "get_training_statistics": engine.get_training_statistics,
    }.items():
        words = "not set up|setup_fp8_training"
        check(f"{name}.{method}", RuntimeError, words, call)
    check(f"{name}.state", RuntimeError, "no optimizer|begin", lambda: engine.state)
    engine.setup_fp8_training()
    where = f"{name}.optimizer_step"
    step = engine.optimizer_step
    check(where, RuntimeError, "call training_step first", lambda: step(optimizer))
    for _ in range(2):  # with gradients, and without
        check(where, TypeError, "init and update|got float", lambda: step(0.1))
        check(where, TypeError, "got NoneType|optax.adamw", lambda: step(None))
        check(where, TypeError, "got function", lambda: step(optax.sgd))
        engine.training_step(x, y)
    step(optimizer)
    engine.training_step(x, y)
    check(where, ValueError, "the one of the steps before", lambda: step(optax.sgd(1)))


def test_an_optimizer_that_has_no_hash(rng):
    """Any object with init and update serves."""

    @dataclasses.dataclass
    class Descent:
        rate: float
        __hash__ = None  # type: ignore[assignment]

        def init(self, params: Any) -> Any:
            return ()

        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return jax.tree.map(lambda d: -self.rate * d, grads), state

    x, y = task(rng)
    trained = []
    for optimizer in (Descent(0.1), optax.sgd(0.1)):
        _, trainer = begun(Block(nnx.Rngs(0)))
        trained.append(go(optimizer, trainer, 3, x, y))
    assert trained[0] == trained[1]


class Old:
    """A device without units of 8 bits."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"
    client = types.SimpleNamespace(platform_version="cuda 13000")


def test_setup_raises_what_it_should():
    def norm() -> Any:
        return nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    number: Any = 3
    refused = lambda: FP8TrainingEngine(number)  # noqa: E731
    check("FP8TrainingEngine", TypeError, "flax.nnx.Module|got int", refused)
    check("FP8Config", ValueError, "E5M2", lambda: create_fp8_trainer(norm(), "e5m2"))
    check("FP8Config", ValueError, "'e3m4'", lambda: create_fp8_trainer(norm(), "e3m4"))
    refused = lambda: create_fp8_trainer(norm(), foo=1)  # noqa: E731
    words = "options must be of donate, exclude, history|loss_fn|got 'foo'|leave it out"
    check("create_fp8_trainer", TypeError, words, refused)
    engine = create_fp8_trainer(norm())
    check(
        "convert_model_to_fp8", ValueError, "must hold nnx.Linear",
        engine.setup_fp8_training,
    )  # fmt: skip

    model = Block(nnx.Rngs(0))
    engine = create_fp8_trainer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "default_device", Old)
        check(
            "FP8TrainingEngine.setup_fp8_training", RuntimeError, "A100|8.9",
            engine.setup_fp8_training,
        )  # fmt: skip
    assert not fp8_layers(model)  # refused before anything was converted
    place: Any = "gpu"
    refused = lambda: FP8TrainingEngine(model, device=place)  # noqa: E731
    check("FP8TrainingEngine", TypeError, "device must be a jax.Device|str", refused)
    engine = FP8TrainingEngine(convert_model_to_fp8(model, CURRENT))
    check(
        "FP8TrainingEngine.setup_fp8_training", ValueError,
        "the trainer's config|scaling='current'", engine.setup_fp8_training,
    )  # fmt: skip


def test_losses_that_do_not_fit():
    fit = jnp.zeros((4, 3))
    for outputs, targets, words in (
        (fit, jnp.zeros(4), "float32[4] for float32[4, 3]"),
        (jnp.zeros((4, 1)), jnp.zeros(4), "float32[4] for float32[4, 1]"),
        (fit, jnp.zeros((4, 3), int), "int32[4, 3] for float32[4, 3]"),
    ):
        refused = lambda o=outputs, t=targets: mean_loss(o, t)  # noqa: E731
        check("mean_loss", ValueError, f"targets must be|{words}|loss_fn", refused)
    several: Any = (fit, fit)
    refused = lambda: mean_loss(several, fit)  # noqa: E731
    check("mean_loss", TypeError, "outputs must be an array, got tuple", refused)


@pytest.mark.cpu
def test_it_says_that_a_cpu_emulates():
    with create_fp8_trainer(Block(nnx.Rngs(0))) as trainer:
        assert trainer.get_training_statistics()["implementation"] == "emulated"
    assert ffi.default_device().platform == "cpu"
