"""What does not fit is an error that says so and names the fix."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from messages import Table, check, check_row

from jax_kvblock.core import ffi
from jax_kvblock.training import (
    FP8Config,
    FP8Format,
    Fp8Scaling,
    FP8TrainingEngine,
    fp8_dot,
    fp8_dot_general,
    fp8_norm_dot,
    fp8_training,
    units,
)

F32, BF16 = jnp.float32, jnp.bfloat16
CURRENT = FP8Config(scaling="current")


def s(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SCALING = jax.eval_shape(Fp8Scaling.create)
STACKED = jax.eval_shape(lambda: Fp8Scaling.create(layers=(2,)))
ROWS = Table()
X, W = s(4, 8), s(8, 6)
ROWS.value("fp8_dot", "inner", fp8_dot, [X, s(9, 6), SCALING], "[..., K] and [K, N]")
ROWS.value("fp8_dot", "rank", fp8_dot, [X, s(8), SCALING], "x and w|float32[8]")
ROWS.kind(
    "fp8_dot", "integers", fp8_dot, [X, s(8, 6, dtype=jnp.int32), SCALING],
    "w must be bfloat16, float16 or float32|int32[8, 6]|astype",
)  # fmt: skip
ROWS.kind("fp8_dot", "none", fp8_dot, [X, W], "scaling must be an Fp8Scaling|create")
ROWS.kind("fp8_dot", "array", fp8_dot, [X, W, s(3)], "scaling must be an Fp8Scaling")
ROWS.value("fp8_dot", "stacked", fp8_dot, [X, W, STACKED], "one product|[2, 3]|scan")
ROWS.value(
    "fp8_dot", "history", lambda *a: fp8_dot(*a, FP8Config(history=4)), [X, W, SCALING],
    "a history of 4|[3, 16]",
)  # fmt: skip
ROWS.value(
    "fp8_dot", "both", lambda *a: fp8_dot(*a, CURRENT), [X, W, SCALING],
    "scaling must be None|leave it out",
)  # fmt: skip
ROWS.kind(
    "fp8_dot", "config", lambda *a: fp8_dot(*a, config="e4m3"), [X, W],
    "config must be an FP8Config, got 'e4m3'|FP8Config('e4m3')",
)  # fmt: skip
HALF = jax.eval_shape(lambda: jax.tree.map(jnp.bfloat16, Fp8Scaling.create()))
ROWS.kind("fp8_dot", "16 bits", fp8_dot, [X, W, HALF], "float32, got bfloat16[3] as")
G = s(8)


def normed(**how: Any) -> Any:
    return lambda *a: fp8_norm_dot(*a[:3], config=CURRENT, residual=a[3], **how)


for label, shapes in {
    "inner": [X, G, s(9, 6)],
    "gamma": [X, s(9), W],
    "rank of gamma": [X, s(1, 8), W],
    "rank of w": [X, G, G],
    "rank of x": [s(), G, W],
}.items():
    ROWS.value(
        "fp8_norm_dot", label, lambda *a: fp8_norm_dot(*a, config=CURRENT), shapes,
        "x, gamma and w must be [..., K], [K] and [K, N], got float32",
    )  # fmt: skip
ROWS.value(
    "fp8_norm_dot", "residual", normed(), [X, G, W, s(3, 8)],
    "residual must be of x's shape and dtype|float32[3, 8] for float32[4, 8]",
)  # fmt: skip
ROWS.value(
    "fp8_norm_dot", "dtype of the residual", normed(), [X, G, W, s(4, 8, dtype=BF16)],
    "residual must be of x's shape and dtype|bfloat16[4, 8]",
)  # fmt: skip
ROWS.kind(
    "fp8_norm_dot", "integers", normed(), [X, s(8, dtype=jnp.int32), W, X],
    "gamma must be bfloat16, float16 or float32|int32[8]|astype",
)  # fmt: skip
ROWS.kind(
    "fp8_norm_dot", "eps", normed(eps="small"), [X, G, W, X],
    "eps must be a number, got 'small'",
)  # fmt: skip
ROWS.value(
    "fp8_norm_dot", "negative", normed(eps=-1e-6), [X, G, W, X],
    "eps must be finite and at least 0, got -1e-06",
)  # fmt: skip
ROWS.kind(
    "fp8_norm_dot", "none", fp8_norm_dot, [X, G, W],
    "scaling must be an Fp8Scaling|create",
)  # fmt: skip


def general(*dims: Any, **how: Any) -> Any:
    return lambda *a: fp8_dot_general(*a, dims, config=CURRENT, **how)


ROWS.value(
    "fp8_dot_general", "sizes", general(((1,), (1,)), ((), ())), [X, W],
    "same sizes|float32[4, 8]|float32[8, 6]",
)  # fmt: skip
ROWS.append(
    ROWS[0]._replace(
        where="fp8_dot_general", label="batch", shapes=[s(2, 4, 8), s(2, 8, 6)],
        call=general(((2,), (1,)), ((0,), (0,))),
        error=NotImplementedError, words="batch axes|jax.vmap",
    )
)  # fmt: skip
ROWS.append(
    ROWS[0]._replace(
        where="fp8_dot_general", label="an axis", shapes=[X, W],
        call=general(((2,), (0,)), ((), ())), error=ValueError,
        words="contracted axes of lhs must be from -2 to 1, each once, got (2,)",
    )
)  # fmt: skip
for axes in ((0, 0), (0, -2), (0.5,)):
    ROWS.value(
        "fp8_dot_general", f"axes {axes}", general((axes, axes), ((), ())),
        [s(8, 8), s(8, 8)], f"contracted axes of|-2 to 1, each once, got|{axes}",
    )  # fmt: skip
for label, dims in (
    ("numbers", ((1, 0), ((), ()))),
    ("one axis", (((1,), 0), ((), ()))),
):
    ROWS.kind(
        "fp8_dot_general", label, general(*dims), [X, W],
        f"dimension_numbers must be ((lhs_contracting|got {dims}|(((1,), (0,)), ((), (",
    )  # fmt: skip
for dtype, words in (
    ("int32", "of floats, got int32|lhs"),
    ("foo", "like jnp.bfloat16"),
):
    ROWS.kind(
        "fp8_dot_general", dtype,
        general(((1,), (0,)), ((), ()), preferred_element_type=dtype), [X, W],
        f"preferred_element_type must be a dtype|{words}",
    )  # fmt: skip
ROWS.kind(
    "fp8_dot_general", "no axes", general(1), [X, W],
    "dimension_numbers must be ((lhs_contracting, rhs_contracting), ((), ())), got (1,",
)  # fmt: skip


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_products(bad):
    check_row(bad)


CONFIGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a name": (ValueError, {"forward_format": "e4m4"}, "forward_format|E5M2|'e4m4'"),
    "none": (ValueError, {"forward_format": None}, "forward_format must be one of"),
    "a number": (ValueError, {"backward_format": 8}, "backward_format must be one of"),
    "e5m2 forward": (
        ValueError, {"forward_format": "e5m2"}, "no product of two E5M2|HYBRID",
    ),
    "hybrid backward": (
        ValueError, {"backward_format": "hybrid"}, "backward_format|sets both",
    ),
    "hybrid and e4m3": (
        ValueError, {"forward_format": "hybrid", "backward_format": "e4m3"},
        "backward_format must be FP8Format.E5M2|leave it out",
    ),
    "scaling": (ValueError, {"scaling": "block"}, "'delayed', 'current'|'block'"),
    "history": (ValueError, {"history": 0}, "history must be an integer of at least 1"),
    "margin": (ValueError, {"margin": -1}, "margin must be an integer of at least 0"),
    "a half": (ValueError, {"margin": 0.5}, "margin|0.5"),
    "a flag": (TypeError, {"skip_saturated": 1}, "skip_saturated must be True or"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name):
    error, options, words = CONFIGS[name]
    check("FP8Config", error, words, lambda: FP8Config(**options))


@pytest.mark.parametrize(
    ("given", "forms"),
    [
        ({}, "e4m3 e5m2"),
        ({"forward_format": "hybrid"}, "e4m3 e5m2"),
        ({"forward_format": FP8Format.HYBRID}, "e4m3 e5m2"),
        ({"forward_format": "e4m3fn", "backward_format": "E4M3"}, "e4m3 e4m3"),
    ],
    ids=str,
)
def test_formats(given, forms):
    config = FP8Config(**given)
    assert [form.value for form in config.formats[1:]] == forms.split()
    assert config.formats[0] is config.formats[1]
    assert config == FP8Config(*forms.split()) and hash(config)
    assert FP8Format.E4M3.max == 448 and FP8Format.E5M2.max == 57344
    with pytest.raises(ValueError, match="HYBRID is two formats"):
        _ = FP8Format.HYBRID.dtype


def loss(params: Any, scalings: Any, batch: Any) -> Any:
    return jnp.sum(params)


TRAININGS: dict[str, tuple[Any, Any, str]] = {
    "loss": (TypeError, lambda: fp8_training(3, optax.sgd(1)), "loss_fn|got int"),
    "optimizer": (
        TypeError, lambda: fp8_training(loss, 0.1), "optimizer must have init|optax",
    ),
    "a class": (
        TypeError, lambda: fp8_training(loss, optax.GradientTransformation),
        "must have init and update|got the class GradientTransformation",
    ),
    "a count": (
        TypeError,
        lambda: fp8_training(loss, optax.sgd(1), CURRENT).init({"n": jnp.int32(3)}),
        "params must be floats|got int32[] as params['n']|batch",
    ),
    "config": (
        TypeError, lambda: fp8_training(loss, optax.sgd(1), "e4m3"),
        "config|got 'e4m3'",
    ),
    "no scales": (
        ValueError, lambda: fp8_training(loss, optax.sgd(1)).init(jnp.ones(3)),
        "scalings must hold an Fp8Scaling|current",
    ),
    "numbers": (
        TypeError, lambda: fp8_training(loss, optax.sgd(1)).init(0, {"a": 1.0}),
        "scalings must be a pytree of Fp8Scaling, got float",
    ),
    "scales and none": (
        ValueError,
        lambda: fp8_training(loss, optax.sgd(1), CURRENT).init(0, Fp8Scaling.create()),
        "scalings must be None|got 1",
    ),
    "history": (
        ValueError,
        lambda: fp8_training(loss, optax.sgd(1), FP8Config(history=2)).init(
            0, Fp8Scaling.create()
        ),
        "a history of 2 steps, got one with 16",
    ),
    "16 bits": (
        TypeError,
        lambda: fp8_training(loss, optax.sgd(1)).init(
            0, jax.tree.map(jnp.bfloat16, Fp8Scaling.create())
        ),
        "scalings must be float32, got bfloat16[3] as scale|Fp8Scaling.create(config)",
    ),
    "a scale of 0": (
        ValueError,
        lambda: fp8_training(loss, optax.sgd(1)).init(
            0, jax.tree.map(jnp.zeros_like, Fp8Scaling.create())
        ),
        "scalings must have scales that are finite and above 0, got 0.0|create(config)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", ["lbfgs", "reduce_on_plateau"])
def test_optimizers_that_need_more(which):
    reducing = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau())
    optimizer = optax.lbfgs() if which == "lbfgs" else reducing
    words = "optimizer must need gradients|needs more|'value'|optax.adamw"
    training = fp8_training(lambda p, s, b: jnp.sum(p * b), optimizer, CURRENT)
    state = training.init(jnp.ones(3))
    step = lambda: training.train_step(state, jnp.ones(3))  # noqa: E731
    check("train_step", TypeError, words, step)
    with FP8TrainingEngine(nnx.LinearGeneral(4, 2, rngs=nnx.Rngs(0))) as trainer:
        trainer.training_step(jnp.ones((2, 4)), jnp.ones((2, 2)))
        taken = lambda: trainer.optimizer_step(optimizer)  # noqa: E731
        check("FP8TrainingEngine.optimizer_step", TypeError, words, taken)
        # The one that the message tells of serves, with the same gradients.
        assert trainer.optimizer_step(optax.adamw(1e-3))


def test_an_optimizer_stays_that_of_a_state_that_was_restored():
    """Where its first step fails: the state is of no other."""
    optimizer = optax.lbfgs()
    with FP8TrainingEngine(nnx.LinearGeneral(4, 2, rngs=nnx.Rngs(0))) as trainer:
        trainer.restore(trainer.begin(optimizer))
        trainer.training_step(jnp.ones((2, 4)), jnp.ones((2, 2)))
        with pytest.raises(TypeError, match="needs more"):
            trainer.optimizer_step(optimizer)
        with pytest.raises(ValueError, match="the one of the steps before"):
            trainer.optimizer_step(optax.adamw(1e-3))
        assert trainer.state.training.opt_state


def test_other_errors_of_an_optimizer_are_its_own():
    def update(*_: Any) -> Any:
        raise TypeError("mine")

    optimizer = optax.GradientTransformation(lambda params: (), update)
    training = fp8_training(lambda p, s, b: jnp.sum(p * b), optimizer, CURRENT)
    with pytest.raises(TypeError, match="mine"):
        training.train_step(training.init(jnp.ones(3)), jnp.ones(3))


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings(name):
    error, call, words = TRAININGS[name]
    check("fp8_training", error, words, call)


SCALINGS: dict[str, tuple[str, Any, Any, str]] = {
    "a format": (
        "create", TypeError, lambda: Fp8Scaling.create("e4m3"),
        "config must be an FP8Config, got 'e4m3'|FP8Config('e4m3')",
    ),
    "a number of layers": (
        "create", TypeError, lambda: Fp8Scaling.create(layers=3),
        "layers must be a tuple of integers, got 3|pass (3,)",
    ),
    "half a layer": (
        "create", TypeError, lambda: Fp8Scaling.create(layers=(2, 0.5)),
        "layers must be a tuple of integers|(2, 0.5)|leading axes",
    ),
    "fewer than none": (
        "create", TypeError, lambda: Fp8Scaling.create(layers=(-1,)), "at least 0|(-1,)"
    ),
    "a report": (
        "update", TypeError, lambda: Fp8Scaling.create().update(jnp.ones(3)),
        "report must be an Fp8Scaling, got float32[3]|jax.grad",
    ),
    "a report of others": (
        "update", ValueError, lambda: Fp8Scaling.create().update(STACKED),
        "report must be of these scales, float32[3], got one of float32[2, 3]|vmap",
    ),
    "a history": (
        "update", TypeError, lambda: Fp8Scaling.create().update(SCALING, 16),
        "config must be an FP8Config, got 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(name):
    method, error, call, words = SCALINGS[name]
    check(f"Fp8Scaling.{method}", error, words, call)


def test_states_that_were_restored_as_something_else():
    training = fp8_training(loss, optax.sgd(1))
    state = training.init(jnp.ones(3), Fp8Scaling.create())
    half = jax.tree.map(jnp.bfloat16, state.scalings)
    replace = dataclasses.replace
    for words, other in {
        "state must be an Fp8State, got dict|init": vars(state),
        "scalings must be float32, got bfloat16[3] as": replace(state, scalings=half),
        "state.steps must be int32[], got float32[]": replace(state, steps=0.0),
        "state.saturated must be int32[], got int32[1]": replace(
            state, saturated=jnp.zeros(1, jnp.int32)
        ),
    }.items():
        step = lambda other=other: training.train_step(other, 0)  # noqa: E731
        check("train_step", TypeError, words, step)


@pytest.mark.parametrize("has_aux", [False, True])
def test_losses_that_are_no_scalar(has_aux):
    def wide(params: Any, scalings: Any, batch: Any) -> Any:
        return (params, 0) if has_aux else params

    training = fp8_training(wide, optax.sgd(1), has_aux=has_aux)
    state = training.init(jnp.ones(3), Fp8Scaling.create())
    words = "loss_fn must give a scalar of floats, got float32[3]|jnp.mean"
    check("train_step", TypeError, words, lambda: training.train_step(state, 0))


@pytest.mark.parametrize("made", [lambda p: jnp.sum(p), lambda p: (p, 0, 1)])
def test_losses_that_are_no_pair(made):
    training = fp8_training(lambda p, *_: made(p), optax.sgd(1), has_aux=True)
    state = training.init(jnp.ones(3), Fp8Scaling.create())
    words = "loss_fn must give a pair of its loss and anything|leave has_aux out"
    check("train_step", TypeError, words, lambda: training.train_step(state, 0))


class Device:
    """Of another machine."""

    def __init__(self, platform: str, capability: str | None, kind: str) -> None:
        self.platform, self.device_kind = platform, kind
        version = "rocm 70000" if kind.startswith("AMD") else "cuda 13000"
        self.client = types.SimpleNamespace(platform_version=version)
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.1"])
def test_units_of_8_bits(capability):
    assert units.served_by("f", Device("gpu", capability, "NVIDIA")) == "tensor cores"


@pytest.mark.parametrize(
    "device",
    [
        Device("gpu", "8.0", "NVIDIA A100"),
        Device("gpu", "7.5", "NVIDIA T4"),
        Device("gpu", "gfx942", "AMD Instinct MI300X"),
        Device("tpu", None, "TPU v5"),
    ],
    ids=lambda d: d.device_kind,
)
def test_no_units_of_8_bits(device):
    words = f"compute capability 8.9|{device.device_kind}|bfloat16"
    check("f", RuntimeError, words, lambda: units.served_by("f", device))


@pytest.mark.cpu
def test_a_cpu_emulates_and_says_so():
    assert units.served_by("f") == "emulated"


@pytest.mark.parametrize(
    "call", [fp8_dot, fp8_dot_general, fp8_norm_dot], ids=lambda f: f.__name__
)
def test_products_are_refused_where_no_unit_is(monkeypatch, call):
    """By the function that was called."""
    device = Device("gpu", "8.0", "NVIDIA A100")
    monkeypatch.setattr(ffi, "default_device", lambda: device)
    x, gamma, w = jnp.ones((4, 8)), jnp.ones(8), jnp.ones((8, 4))
    given = {
        fp8_dot: (x, w),
        fp8_dot_general: (x, w, (((1,), (0,)), ((), ()))),
        fp8_norm_dot: (x, gamma, w),
    }[call]
    refused = lambda: call(*given, config=CURRENT)  # noqa: E731
    check(call.__name__, RuntimeError, "NVIDIA A100|8.9", refused)
