"""flax.nnx layers and models in 8 bits, and the trainer over them."""

from __future__ import annotations

import subprocess
import sys
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

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(16, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.norm(self.linear(x)))

    x, y = task(rng)
    model = Model(nnx.Rngs(0))
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


def test_an_interrupted_run_goes_on(rng):
    """From its state and the model's other variables, bit for bit."""
    x, y = task(rng)

    def start() -> Any:
        model, optimizer = Block(nnx.Rngs(0)), optax.adam(1e-2)
        trainer = FP8TrainingEngine(model)
        trainer.setup_fp8_training()
        return model, optimizer, trainer

    def go(optimizer: Any, trainer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(float(trainer.training_step(x, y)))
            trainer.optimizer_step(optimizer)
        return losses

    _, optimizer, trainer = start()
    whole = go(optimizer, trainer, 6)
    _, optimizer, trainer = start()
    go(optimizer, trainer, 3)
    kept = jax.tree.map(np.array, trainer.state)
    _, optimizer, trainer = start()
    assert jax.tree.structure(trainer.begin(optimizer)) == jax.tree.structure(kept)
    trainer.restore(kept)
    assert go(optimizer, trainer, 3) == whole[3:]
    assert trainer.get_training_statistics()["steps"] == 6


def test_a_loss_that_is_nan_from_the_start(rng):
    x, y = task(rng)
    with FP8TrainingEngine(Block(nnx.Rngs(0))) as trainer:
        check(
            "FP8TrainingEngine.training_step", FloatingPointError,
            "finite at the first step, got nan|float32",
            lambda: trainer.training_step(x * np.nan, y),
        )  # fmt: skip


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


def test_setup_raises_what_it_should(monkeypatch):
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

    class Old:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    model = Block(nnx.Rngs(0))
    old: Any = Old()
    engine = create_fp8_trainer(model, device=old)
    check(
        "FP8TrainingEngine.setup_fp8_training", RuntimeError, "A100|8.9",
        engine.setup_fp8_training,
    )  # fmt: skip
    assert not fp8_layers(model)  # refused before anything was converted


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
    assert "pip install flax" in first and "no_such_name" in second


def test_dot_generals_of_flax_layers(rng):
    x = jnp.asarray(rng.integers(-8, 9, (3, 4, 8)), jnp.float32)
    layer = nnx.LinearGeneral((4, 8), (2, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(rng.integers(-8, 9, (4, 8, 2, 5)), jnp.float32)
    want = layer(x)
    layer.dot_general = nnx.data(Fp8DotGeneral(CURRENT))
    np.testing.assert_array_equal(layer(x), want)
