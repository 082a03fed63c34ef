"""flax.nnx layers and models in 8 bits, and the trainer over them."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import check

from jax_kvblock.training import (
    FP8Config,
    Fp8DotGeneral,
    FP8LinearLayer,
    Fp8Scaling,
    FP8TrainingEngine,
    Fp8Variable,
    convert_model_to_fp8,
    create_fp8_trainer,
    fp8_dot,
    fp8_layers,
    units,
)
from jax_kvblock.training.trainer import mean_loss

CURRENT = FP8Config(scaling="current")


class Block(nnx.Module):
    """Layers as models have them: by themselves, in lists and dicts, and shared."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.layers.append(self.layers[0])
        self.named = nnx.Dict({"up": nnx.Linear(16, 32, use_bias=False, rngs=rngs)})
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(self.drop(jax.nn.relu(self.named["up"](x))))


ATTENTION = [f"attention.{n}.dot_general" for n in ("key", "out", "query", "value")]
ALL = {*ATTENTION, "layers.0", "named.up", "head"}


def task(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(rng.standard_normal((4, 6, 16)), jnp.float32)
    return x, jnp.argmax(x[..., :8], -1)


def apart(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ---- layers --------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_layer_is_fp8_dot(rng, dtype, use_bias):
    layer = FP8LinearLayer(16, 24, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    if use_bias:
        layer.bias[...] = jnp.arange(24.0)
    x = jnp.asarray(rng.standard_normal((3, 5, 16)), jnp.float32)
    own = x if dtype is None else x.astype(dtype)
    want = fp8_dot(own, layer.kernel[...], Fp8Scaling.create())
    if use_bias:
        want = want + layer.bias[...].astype(want.dtype)
    got = layer(x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_a_layers_gradients_and_report(rng):
    layer = FP8LinearLayer(16, 24, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((5, 16)), jnp.bfloat16)

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(layer(x).astype(jnp.float32) ** 2)

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, Fp8Variable))
    found = nnx.grad(loss, argnums=wrt)(layer)

    def by_hand(w: Any, scaling: Any) -> jax.Array:
        return jnp.sum(fp8_dot(x, w, scaling).astype(jnp.float32) ** 2)

    d_w, report = jax.grad(by_hand, (0, 1))(layer.kernel[...], Fp8Scaling.create())
    assert found["kernel"][...].dtype == jnp.float32  # not that of the computation
    np.testing.assert_allclose(found["kernel"][...], d_w, rtol=1e-6)
    got = found["scaling"].get_value()
    np.testing.assert_allclose(got.scale, report.scale, rtol=1e-6)
    scaling = layer.scaling.get_value().update(got)
    layer.scaling.set_value(scaling)
    exact = x.astype(jnp.float32) @ layer.kernel[...]
    assert 0.005 < apart(layer(x), exact) < 0.05


# ---- conversion ----------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("config", [None, CURRENT], ids=["delayed", "current"])
def test_conversion(rng, config, inplace):
    model = Block(nnx.Rngs(0))
    x, _ = task(rng)
    want = model(x)
    kernel = model.head.kernel
    params = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    converted = convert_model_to_fp8(model, config, inplace)
    assert set(fp8_layers(converted)) == ALL
    assert (converted is model) == inplace
    assert (converted.head.kernel is kernel) == inplace
    if not inplace:
        assert not fp8_layers(model)
        np.testing.assert_array_equal(model(x), want)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(converted, nnx.Param), params)
    assert converted.layers[0] is converted.layers[1]  # shared as before
    assert 1e-4 < apart(converted(x), want) < 0.2
    known = nnx.state(converted, Fp8Variable)
    count = len(jax.tree.leaves(known, is_leaf=lambda t: isinstance(t, Fp8Scaling)))
    assert count == (0 if config is CURRENT else len(ALL))


def test_what_is_excluded_stays():
    model = convert_model_to_fp8(Block(nnx.Rngs(0)), exclude=["head", "attention"])
    assert set(fp8_layers(model)) == {"layers.0", "named.up"}
    assert type(model.head) is nnx.Linear
    # Again, without: what is converted stays, the rest follows.
    layer = model.layers[0]
    assert set(fp8_layers(convert_model_to_fp8(model))) == ALL
    assert model.layers[0] is layer


def test_layers_in_containers_of_any_kind(rng):
    """Plain lists, tuples and dicts as data, too, one in the other."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            make = lambda: nnx.Linear(8, 8, rngs=rngs)  # noqa: E731
            self.held = nnx.data([make(), {"a": (make(), make())}])
            self.other = nnx.data((make(), nnx.LinearGeneral(8, 8, rngs=rngs)))

    model = convert_model_to_fp8(Model(nnx.Rngs(0)), exclude=["other.0"])
    found = {"held.0", "held.1.a.0", "held.1.a.1", "other.1.dot_general"}
    assert set(fp8_layers(model)) == found
    assert isinstance(model.held, list) and isinstance(model.held[1]["a"], tuple)


def test_a_shared_layer_that_is_excluded_stays_everywhere():
    model = Block(nnx.Rngs(0))
    for path in ("layers.0", "layers.1"):
        made = convert_model_to_fp8(model, inplace=False, exclude=[path])
        assert set(fp8_layers(made)) == ALL - {"layers.0"}
        assert made.layers[0] is made.layers[1]


def test_stacked_layers(rng):
    """Made by nnx.vmap for nnx.scan: each has scales of its own."""

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs: nnx.Rngs) -> nnx.Module:
                return nnx.Sequential(
                    nnx.Linear(8, 8, rngs=rngs), nnx.LinearGeneral(8, 8, rngs=rngs)
                )

            self.blocks = make(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, block: Any) -> jax.Array:
                return jnp.sin(block(x))

            return run(x, self.blocks)

    model, x = Stack(nnx.Rngs(0)), jnp.asarray(rng.standard_normal((5, 8)), jnp.float32)
    want = model(x)
    made = convert_model_to_fp8(model)
    assert {s.scale.shape for s in scalings_of(made)} == {(3, 3)}
    assert 1e-4 < apart(made(x), want) < 0.15
    with FP8TrainingEngine(made) as trainer:
        optimizer = optax.sgd(0.1)
        trainer.training_step(x, x)
        assert trainer.optimizer_step(optimizer)
    assert all((s.scale != Fp8Scaling.create().scale).any() for s in scalings_of(made))


def scalings_of(model: Any) -> list[Fp8Scaling]:
    known = nnx.state(model, Fp8Variable)
    return jax.tree.leaves(known, is_leaf=lambda t: isinstance(t, Fp8Scaling))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_results_keep_their_dtype(dtype, use_bias):
    options = {"use_bias": use_bias, "dtype": dtype, "rngs": nnx.Rngs(0)}
    layers = nnx.Linear(8, 8, **options), FP8LinearLayer(8, 8, **options)
    for x in (jnp.ones((2, 8)), jnp.ones((2, 8), jnp.bfloat16)):
        assert len({layer(x).dtype for layer in layers}) == 1


def test_a_layer_alone(rng):
    x = jnp.ones((2, 8))
    for layer in (
        FP8LinearLayer(8, 8, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(8, 8, rngs=nnx.Rngs(0)),
    ):
        with FP8TrainingEngine(layer) as trainer:
            assert trainer.training_step(x, x) > 0
            assert len(fp8_layers(layer)) == 1


def test_a_dot_general_of_ones_own_is_refused():
    own: Any = jax.lax.dot_general
    refused = lambda: FP8LinearLayer(8, 8, dot_general=own, rngs=nnx.Rngs(0))  # noqa: E731
    check("FP8LinearLayer", TypeError, "dot_general must not|nnx.Linear", refused)


def test_layers_of_their_own_products_stay():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            own = lambda *a, **k: jax.lax.dot_general(*a, **k)  # noqa: E731
            self.own = nnx.Linear(8, 8, dot_general=own, rngs=rngs)
            self.batched = nnx.LinearGeneral(8, 8, batch_axis={0: 2}, rngs=rngs)
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.convolution = nnx.Conv(8, 8, (3,), rngs=rngs)

    assert set(fp8_layers(convert_model_to_fp8(Model(nnx.Rngs(0))))) == {"linear"}


BAD: dict[str, tuple[Any, Any, str]] = {
    "no module": (TypeError, lambda: convert_model_to_fp8(lambda x: x), "fp8_dot"),
    "no layers": (
        ValueError,
        lambda: convert_model_to_fp8(nnx.LayerNorm(4, rngs=nnx.Rngs(0))),
        "must hold nnx.Linear or nnx.LinearGeneral|got LayerNorm",
    ),
    "a layer": (
        ValueError,
        lambda: convert_model_to_fp8(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
        "nnx.Linear alone|FP8LinearLayer",
    ),
    "all excluded": (
        ValueError,
        lambda: convert_model_to_fp8(
            nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), exclude=["layers"]
        ),
        "not excluded",
    ),
    "a path": (
        ValueError,
        lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), exclude=["haed"]),
        "exclude must be paths of modules, got 'haed'|head",
    ),
    "a string": (
        TypeError,
        lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), exclude="head"),
        "exclude must be a sequence of paths|['head']",
    ),
    "a config": (
        TypeError, lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), "e4m3"), "got str"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_conversions_that_are_refused(name):
    error, call, words = BAD[name]
    check("convert_model_to_fp8", error, words, call)


# ---- the trainer ---------------------------------------------------------------------


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
    with FP8TrainingEngine(model, CURRENT) as trainer:
        np.testing.assert_allclose(trainer.training_step(x, y), want, rtol=1e-6)
    own = FP8TrainingEngine(model, CURRENT, loss_fn=lambda out, y: jnp.sum(out))
    own.setup_fp8_training()
    np.testing.assert_allclose(own.training_step((x,), y), jnp.sum(made), rtol=1e-5)


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
    checkpoint = pytest.importorskip("orbax.checkpoint")
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
    engine.training_step(x, y)
    check(where, TypeError, "init and update|got float", lambda: step(0.1))
    step(optimizer)
    engine.training_step(x, y)
    check(where, ValueError, "the one of the steps before", lambda: step(optax.sgd(1)))


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
    engine = create_fp8_trainer(norm())
    check(
        "convert_model_to_fp8", ValueError, "must hold nnx.Linear",
        engine.setup_fp8_training,
    )  # fmt: skip

    model = Block(nnx.Rngs(0))
    engine = create_fp8_trainer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "default_device", Old)
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
    assert units.default_device().platform == "cpu"


def test_flax_is_asked_for_where_it_is_used():
    script = """
import sys
sys.modules["flax"] = None
import jax_kvblock.training as training
assert not any(m.startswith("flax") for m, x in sys.modules.items() if x)
training.fp8_dot, training.FP8Config()
try:
    training.FP8LinearLayer
except ImportError as error:
    print(error)
try:
    training.no_such_name
except AttributeError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    first, second = ran.stdout.splitlines()
    assert first.startswith("jax_kvblock.training.FP8LinearLayer needs flax")
    assert "pip install 'flax>=0.12'" in first and "no_such_name" in second


def test_dot_generals_of_flax_layers(rng):
    x = jnp.asarray(rng.integers(-8, 9, (3, 4, 8)), jnp.float32)
    layer = nnx.LinearGeneral((4, 8), (2, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(rng.integers(-8, 9, (4, 8, 2, 5)), jnp.float32)
    want = layer(x)
    layer.dot_general = nnx.data(Fp8DotGeneral(CURRENT))
    np.testing.assert_array_equal(layer(x), want)
