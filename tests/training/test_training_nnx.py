"""flax.nnx layers and models in 8 bits."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_bit_models import ALL, CURRENT, Block, task
from flax import nnx
from messages import check

from jax_kvblock.fusion import TransformerBlock, create_unified_attention_fusion
from jax_kvblock.layers import AttentionLayer, OptimizedLinear
from jax_kvblock.training import (
    FP8Config,
    Fp8DotGeneral,
    FP8LinearLayer,
    Fp8Scaling,
    FP8TrainingEngine,
    Fp8Variable,
    convert_model_to_fp8,
    fp8_dot,
    fp8_layers,
)


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


class Ours(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = TransformerBlock(32, 4, num_kv_heads=2, rngs=rngs)
        self.attention = AttentionLayer(32, 4, 0.0, rngs=rngs)
        self.up = OptimizedLinear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(self.attention(self.block(x)))))


def codes_in(model: Any, x: jax.Array) -> int:
    """How many arrays become 8 bits in a call, by XLA or by kernels."""
    definition, state = nnx.split(model)
    text = str(jax.make_jaxpr(lambda s, x: nnx.merge(definition, s)(x))(state, x))
    by_xla = r"convert_element_type\[\s*new_dtype=float8_e4m3fn"
    return len(re.findall(rf"{by_xla}|kvblock_(?:norm_)?cast\[", text))


@pytest.mark.parametrize("config", [FP8Config(), CURRENT], ids=["delayed", "current"])
def test_layers_of_this_package(rng, config):
    model = Ours(nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((2, 9, 32)), jnp.float32)
    want, before = model(x), jax.tree.leaves(nnx.state(model, nnx.Param))
    made = convert_model_to_fp8(model, config)
    of_block = ("query", "key", "value", "out", "up", "down")
    names = [f"block.dot_general.{name}" for name in of_block]
    names += ["attention.dot_general.qkv", "attention.dot_general.out"]
    names += ["up.dot_general.kernel", "down"]
    assert set(fp8_layers(made)) == set(names)
    assert codes_in(made, x) == 2 * len(names)
    after = jax.tree.leaves(nnx.state(made, nnx.Param))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert 1e-4 < apart(made(x), want) < 0.15
    with FP8TrainingEngine(made, config) as trainer:
        trainer.training_step(x, x)
        assert trainer.optimizer_step(optax.sgd(0.1))
    first = Fp8Scaling.create().scale
    assert len(scalings_of(made)) == (0 if config is CURRENT else len(names))
    assert all((s.scale != first).any() for s in scalings_of(made))


def test_layers_of_this_package_that_are_left():
    class Own(OptimizedLinear):
        pass

    model = Ours(nnx.Rngs(0))
    model.up = Own(32, 48, rngs=nnx.Rngs(0))
    left = ["attention", "block"]
    assert list(fp8_layers(convert_model_to_fp8(model, exclude=left))) == ["down"]


def test_a_layer_of_this_package_alone_and_in_a_stack(rng):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return OptimizedLinear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: jax.Array, layer: Any) -> jax.Array:
        return jnp.sin(layer(x))

    layers, x = make(nnx.Rngs(0)), jnp.asarray(rng.standard_normal((5, 8)), jnp.float32)
    want = run(x, layers)
    made = convert_model_to_fp8(layers)
    assert [s.scale.shape for s in scalings_of(made)] == [(3, 3)]
    assert 1e-4 < apart(run(x, made), want) < 0.15


@pytest.mark.parametrize("first", ["fused", "converted"])
@pytest.mark.parametrize("kind", ["flax's", "a block"])
def test_fused_models_in_either_order(rng, first, kind):
    """What is said to be in 8 bits is."""
    if kind == "a block":
        model, products = TransformerBlock(32, 4, rngs=nnx.Rngs(0)), 6
    else:
        options = {"decode": False, "rngs": nnx.Rngs(0)}
        model, products = nnx.MultiHeadAttention(4, 32, **options), 4
    x = jnp.asarray(rng.standard_normal((2, 9, 32)), jnp.float32)
    if first == "fused":
        made = create_unified_attention_fusion(model, "full_block", "aggressive")
        assert codes_in(made.model, x) == 0
        made = convert_model_to_fp8(made)
    else:
        made = convert_model_to_fp8(model)
        made = create_unified_attention_fusion(made, "full_block", "aggressive")
        assert {r.choice: r.used for r in made.report}["qkv"] == "xla"
    assert len(fp8_layers(made)) == products
    assert codes_in(made.model, x) == 2 * products
    again = create_unified_attention_fusion(made, "full_block", "aggressive")
    assert {r.choice: r.used for r in again.report}["qkv"] == "xla"


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
        told = trainer.get_training_statistics()["scales"]
    assert all((s.scale != Fp8Scaling.create().scale).any() for s in scalings_of(made))
    for own, layer in zip(told.values(), fp8_layers(made).values(), strict=True):
        assert list(own) == ["input", "weight", "gradient"]
        want = layer.scaling.get_value().scale  # [layers, 3]
        np.testing.assert_array_equal(np.transpose(list(own.values())), want)


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
    "no sequence": (
        TypeError,
        lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), exclude=None),
        "exclude must be a sequence of paths, got None|leave it out",
    ),
    "a word": (
        TypeError,
        lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), inplace="no"),
        "inplace must be True or False, got 'no'",
    ),
    "a config": (
        TypeError, lambda: convert_model_to_fp8(Block(nnx.Rngs(0)), "e4m3"),
        "got 'e4m3'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_conversions_that_are_refused(name):
    error, call, words = BAD[name]
    check("convert_model_to_fp8", error, words, call)


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
