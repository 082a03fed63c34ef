"""S2's functions: modules of few bits, what is said of them, what would be saved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from flax import nnx
from messages import check

from jax_kvblock.layers import AttentionLayer
from jax_kvblock.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    UltraPrecisionModule,
    analysis,
    analyze_precision_opportunities,
    create_ultra_precision_module,
    dequantize,
    find_weights,
    make_plan,
    packed_dot,
    uniform_plan,
)
from jax_kvblock.precision.sensitivity import entropy_sensitivity, gradient_sensitivity

pytestmark = pytest.mark.usefixtures("exact_products")

INT3, INT4, INT8 = (PrecisionFormat[f"INT{bits}"] for bits in (3, 4, 8))
NEEDS_DATA = (AllocationStrategy.GRADIENT_WEIGHTED, AllocationStrategy.LOSS_BASED)


@pytest.fixture
def params(rng):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32) / 8

    return {
        "embedding": draw(32, 64),
        "layers": {"up": draw(2, 128, 64), "down": draw(2, 64, 128)},
        "norm": draw(64),
        "count": jnp.int32(3),
    }


def apply(params, tokens):
    x = params["embedding"][tokens] + params["norm"]
    layers = params["layers"]
    for up, down in zip(layers["up"], layers["down"], strict=True):
        x = x + jnp.tanh(x @ up.T) @ down.T
    return x @ params["embedding"].T


def loss(params, tokens):
    return -jax.nn.log_softmax(apply(params, tokens[:-1]))[
        jnp.arange(len(tokens) - 1), tokens[1:]
    ].mean()


TOKENS = np.arange(32)
BATCHES = [TOKENS[:16], TOKENS[16:]]
NUMBERS = 32 * 64 + 4 * 128 * 64
SMALL = {"formats": (INT3, INT4, INT8), "target_memory_reduction": 0.7}


def data_for(strategy):
    return {"loss": loss, "batches": BATCHES} if strategy in NEEDS_DATA else {}


def test_the_names():
    assert [one.value for one in AllocationStrategy] == [
        "uniform",
        "entropy_based",
        "gradient_weighted",
        "loss_based",
    ]
    assert [one.value for one in QuantizationMode] == ["static", "dynamic"]
    bits = {one.name: one.bits for one in PrecisionFormat}
    floats = {"FP32": 32, "FP16": 16, "BF16": 16, "FP8": 8}
    assert bits == floats | {f"INT{n}": n for n in (8, 6, 5, 4, 3, 2)}
    config = PrecisionConfig()
    assert config.base_precision is PrecisionFormat.FP16
    assert config.allocation_strategy is AllocationStrategy.ENTROPY_BASED
    assert (config.entropy_threshold, config.target_memory_reduction) == (1.5, 0.4)


@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_each_strategy(params, strategy):
    config = PrecisionConfig(allocation_strategy=strategy, **SMALL)
    module = create_ultra_precision_module(
        (apply, params), config, **data_for(strategy)
    )
    assert isinstance(module, UltraPrecisionModule)
    stats = module.get_precision_stats()
    kept = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(module.params))
    base = 2 * (NUMBERS + 64) + 4
    assert (stats.stored_bytes, stats.base_bytes) == (kept, base)
    assert stats.memory_savings_ratio == 1 - kept / base >= 0.7
    assert stats.bits_per_weight == 8 * (kept - 2 * 64 - 4) / NUMBERS
    assert stats.formats == {name: module.plan[name] for name in stats.formats}
    assert set(stats.formats) == {"embedding", "layers.up", "layers.down"}
    assert set().union(*stats.formats.values()) <= {INT3, INT4, INT8}
    if strategy is AllocationStrategy.UNIFORM:
        assert set().union(*stats.formats.values()) == {INT4}
    # The function sees the arrays that are stored, in the dtypes that it knows.
    seen = module.dequantized()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), seen) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )
    plain = module.plan.apply(params)
    np.testing.assert_array_equal(
        seen["layers"]["up"], dequantize(plain)["layers"]["up"]
    )
    np.testing.assert_array_equal(seen["norm"], params["norm"].astype("float16"))
    got = jit(lambda module, tokens: module(tokens))(module, TOKENS)
    np.testing.assert_allclose(got, apply(seen, TOKENS), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "strategy",
    [AllocationStrategy.ENTROPY_BASED, AllocationStrategy.GRADIENT_WEIGHTED],
)
def test_the_plan_is_that_of_the_parts(params, strategy):
    config = PrecisionConfig(allocation_strategy=strategy, **SMALL)
    parts = {"embedding": 4}
    module = create_ultra_precision_module(
        (apply, params), config, parts=parts, **data_for(strategy)
    )
    weights = find_weights(params, parts=parts)
    if strategy is AllocationStrategy.ENTROPY_BASED:
        found = entropy_sensitivity(params, weights, config.formats, threshold=1.5)
    else:
        found = gradient_sensitivity(loss, params, BATCHES, weights, config.formats)
    half = params | {"norm": params["norm"].astype(jnp.float16)}
    budget = int(0.3 * (2 * (NUMBERS + 64) + 4))
    assert module.plan == make_plan(half, found, budget)
    assert len(set(module.plan["embedding"] + module.plan["layers.up"])) > 1


def test_a_function_that_multiplies_with_what_is_stored(params):
    config = PrecisionConfig(allocation_strategy=AllocationStrategy.UNIFORM, **SMALL)
    module = create_ultra_precision_module((apply, params), config)

    def packed(params, tokens):
        x = params["embedding"].dequantize()[tokens] + params["norm"]
        layers = params["layers"]

        def layer(x, weights):
            hidden = jnp.tanh(packed_dot(x, weights["up"]))
            return x + packed_dot(hidden, weights["down"]), None

        x, _ = jax.lax.scan(layer, x, layers)
        return packed_dot(x, params["embedding"])

    got = jit(packed)(module.params, TOKENS)
    np.testing.assert_allclose(got, module(TOKENS), rtol=0, atol=2e-6)


def test_a_module_on_another_device(params, four_cpus):
    device = jax.devices("cpu")[1]
    module = create_ultra_precision_module((apply, params), device=device)
    assert {leaf.device for leaf in jax.tree.leaves(module.params)} == {device}


# ---- flax ----------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(32, 64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, use_running_average=True, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.down(jnp.tanh(self.norm(self.up(self.table(tokens)))))


def test_models_of_flax():
    model = Model(nnx.Rngs(0))
    config = PrecisionConfig(allocation_strategy=AllocationStrategy.UNIFORM, **SMALL)
    module = create_ultra_precision_module(model, config)
    assert {weight.name: weight.axis for weight in module.plan.weights} == {
        "table.embedding": -1,
        "up.kernel": -2,
        "down.kernel": -2,
    }
    want = Model(nnx.Rngs(0))
    seen = module.dequantized()
    for name in ("up", "down"):
        for leaf in ("kernel", "bias"):
            setattr(getattr(want, name), leaf, nnx.Param(seen[name][leaf]))
    want.table.embedding = nnx.Param(seen["table"]["embedding"])
    np.testing.assert_allclose(module(TOKENS), want(TOKENS), rtol=0, atol=1e-6)
    apart = np.abs(np.asarray(module(TOKENS) - model(TOKENS)))
    assert 0 < apart.max() < 0.2  # of numbers of about 1
    found = analyze_precision_opportunities(model, TOKENS, tolerance=0.1)
    assert found["output_error"] < 0.2 and found["potential_savings"] > 0.4


def test_flax_trains_what_gradients_weigh():
    model = Model(nnx.Rngs(0))
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.GRADIENT_WEIGHTED, **SMALL
    )

    def of_down(params, tokens):  # the table does not count
        return jnp.square(params["down"]["kernel"] * tokens.mean()).sum()

    module = create_ultra_precision_module(
        model, config, loss=of_down, batches=[TOKENS]
    )
    found = module.get_precision_stats().formats
    assert found == {
        "down.kernel": (INT4,),
        "table.embedding": (INT3,),
        "up.kernel": (INT3,),
    }


class Attentive(nnx.Module):
    """flax's attention and our own layers, one of them stacked."""

    def __init__(self, width=64):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.own = AttentionLayer(width, 4, 0.0, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return nnx.Linear(width, 64, rngs=rngs)

        self.stack = stack(rngs)

    def __call__(self, x):
        x = self.own(self.attention(x))
        kernel, bias = self.stack.kernel[...], self.stack.bias[...]
        return x @ kernel[0] + bias[0] + x @ kernel[1] + bias[1]


@pytest.mark.parametrize(("width", "last"), [(64, -1), (256, -2)])
def test_groups_lie_along_what_a_layer_sums(width, last):
    """Of flax's attention, too, whose biases `[heads, head_dim]` are no weights."""
    model = Attentive(width)
    module = create_ultra_precision_module(model)
    axes = {weight.name: weight.axis for weight in module.plan.weights}
    first = {f"attention.{name}.kernel": -3 for name in ("query", "key", "value")}
    ours = {"own.qkv": -2, "own.out": -2, "stack.kernel": -2}
    assert axes == first | {"attention.out.kernel": last} | ours
    assert {weight.parts for weight in module.plan.weights} == {1}
    x = jax.random.normal(jax.random.key(0), (2, 5, width))
    want = np.asarray(model(x))
    apart = np.abs(np.asarray(module(x)) - want).max()
    assert 0 < apart < 0.3 * np.abs(want).max()


def test_an_attention_layer_of_flax_alone():
    model = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 64))
    found = analyze_precision_opportunities(model, x, tolerance=0.1)
    assert found["potential_savings"] > 0.3 and found["output_error"] < 0.2


def test_an_axis_and_weights_that_are_given_are_taken():
    model = Model(nnx.Rngs(0))
    config = PrecisionConfig(group_size=32)
    for axis in (0, 1):
        module = create_ultra_precision_module(model, config, axis=axis)
        assert {weight.axis for weight in module.plan.weights} == {axis - 2}
    config = PrecisionConfig(group_size=32, target_memory_reduction=0.1)
    module = create_ultra_precision_module(
        model, config, is_weight=lambda name, array: name == "up.kernel"
    )
    assert [weight.name for weight in module.plan.weights] == ["up.kernel"]


def test_what_the_base_precision_does_not_hold_is_an_error():
    model = Model(nnx.Rngs(0))
    model.up.bias[...] = model.up.bias[...].at[3].set(-1e6)
    for where, call in (
        ("create_ultra_precision_module", create_ultra_precision_module),
        (
            "analyze_precision_opportunities",
            lambda model: analyze_precision_opportunities(model, TOKENS),
        ),
    ):
        words = "base_precision FP16 holds, got 1e+06 in up.bias|BF16 or FP32"
        check(where, ValueError, words, lambda call=call: call(model))
    wide = PrecisionConfig(base_precision=PrecisionFormat.BF16)
    assert np.isfinite(create_ultra_precision_module(model, wide)(TOKENS)).all()


# ---- opportunities -------------------------------------------------------------------


def test_opportunities_are_measured(params):
    found = analyze_precision_opportunities((apply, params), TOKENS, tolerance=0.2)
    plan = found["plan"]
    truth = np.float64(apply(params, TOKENS))

    def error(plan):
        out = np.float64(apply(dequantize(plan.apply(params)), TOKENS))
        return np.linalg.norm(out - truth) / np.linalg.norm(truth)

    np.testing.assert_allclose(found["output_error"], error(plan), rtol=1e-3)
    assert found["output_error"] < 0.3
    base = 2 * (NUMBERS + 64) + 4
    assert found["base_bytes"] == base
    assert found["stored_bytes"] == plan.nbytes + 2 * 64 + 4
    assert found["potential_savings"] == 1 - found["stored_bytes"] / base
    rows = found["recommendations"]
    assert len(rows) == 5  # one for each part
    saved = [row.saved_bytes for row in rows]
    assert saved == sorted(saved, reverse=True)
    assert base - sum(saved) == found["stored_bytes"]
    allowed = 0.2 / np.sqrt(5)
    wide = uniform_plan(plan.weights, PrecisionFormat.FP32)
    for row in rows:
        assert plan[row.name][row.part] is row.format and row.output_error <= allowed

        def alone(format, row=row):
            at = [weight.name for weight in wide.weights].index(row.name)
            formats = list(map(list, wide.formats))
            formats[at][row.part] = format
            changed = tuple(map(tuple, formats))
            return error(type(wide)(wide.weights, changed))

        np.testing.assert_allclose(row.output_error, alone(row.format), rtol=1e-3)
        fewer = [f for f in PrecisionConfig().formats if f.bits < row.format.bits]
        assert all(alone(format) > allowed for format in fewer[-1:])


@pytest.mark.usefixtures("four_cpus")
def test_opportunities_are_measured_on_the_device(params, monkeypatch):
    """Wherever weights and inputs were put: on two devices nothing takes them."""
    want = analyze_precision_opportunities((apply, params), TOKENS)
    places, found = [], analysis.loss_sensitivity

    def noted(error, params, batches, *rest, **more):
        places.extend(a.devices() for a in jax.tree.leaves((params, batches)))
        return found(error, params, batches, *rest, **more)

    monkeypatch.setattr(analysis, "loss_sensitivity", noted)
    _, device, second, third = jax.devices("cpu")[:4]
    params, tokens = jax.device_put(params, second), jax.device_put(TOKENS, third)
    got = analyze_precision_opportunities((apply, params), tokens, device)
    assert places == [{device}] * (len(jax.tree.leaves(params)) + 1)
    assert got["plan"] == want["plan"]
    assert got["output_error"] == pytest.approx(want["output_error"], rel=1e-5)


def test_what_is_too_sensitive_is_not_recommended(params):
    found = analyze_precision_opportunities(
        (apply, params), (TOKENS,), tolerance=1e-9, config=PrecisionConfig()
    )
    assert found["recommendations"] == []
    assert (
        found["potential_savings"] == 0 and found["stored_bytes"] == found["base_bytes"]
    )


# ---- what is refused -----------------------------------------------------------------

CONFIG = {
    "base": ({"base_precision": INT8}, ValueError, "FP32|FP16|BF16|INT8"),
    "base name": ({"base_precision": "fp16"}, TypeError, "PrecisionFormat.FP16|'fp16'"),
    "strategy": (
        {"allocation_strategy": "entropy"},
        TypeError,
        "AllocationStrategy.ENTROPY_BASED|'entropy'",
    ),
    "mode": (
        {"quantization_mode": "static"},
        TypeError,
        "QuantizationMode.STATIC|'static'",
    ),
    "dynamic": (
        {"quantization_mode": QuantizationMode.DYNAMIC},
        NotImplementedError,
        "QuantizationMode.STATIC|DYNAMIC|activations",
    ),
    "threshold": ({"entropy_threshold": 9}, ValueError, "0 to 8|9"),
    "threshold kind": ({"entropy_threshold": "1"}, TypeError, "number|'1'"),
    "reduction": ({"target_memory_reduction": 1.0}, ValueError, "below 1|1.0"),
    "no reduction": ({"target_memory_reduction": 0}, ValueError, "above 0|0"),
    "percent": ({"target_memory_reduction": 40}, ValueError, "from 0 to 1|40"),
    "formats": ({"formats": ("int4",)}, TypeError, "PrecisionFormat.INT4|'int4'"),
    "group": ({"group_size": 48}, ValueError, "multiple of 32|48"),
}


@pytest.mark.parametrize("name", CONFIG)
def test_bad_configs_are_errors(name):
    options, error, words = CONFIG[name]
    check("PrecisionConfig", error, words, lambda: PrecisionConfig(**options))


def with_config(**options):
    return {"config": PrecisionConfig(**options)}


MODULES = {
    "model": ({"model": None}, TypeError, "(function, params)|NoneType"),
    "params": ({"model": (apply, {"a": 1})}, TypeError, "pytree of arrays|a"),
    "weightless": (
        {"model": (apply, {"a": jnp.ones(3)})},
        ValueError,
        "weights|a float32[3]",
    ),
    "groups": (
        {"model": (apply, {"a": jnp.ones((4, 96))})},
        ValueError,
        "multiple of 64 (group_size)|[4, 96]|is_weight=lambda name, array: name != 'a'",
    ),
    "nan": (
        {"model": (apply, {"a": jnp.ones((2, 64)).at[1, 2].set(jnp.nan)})},
        ValueError,
        "finite|inf or nan in a",
    ),
    "device": ({"device": "cpu"}, TypeError, "jax.Device|'cpu'"),
    "config": ({"config": 0.4}, TypeError, "PrecisionConfig|float"),
    "no loss": (
        with_config(allocation_strategy=AllocationStrategy.LOSS_BASED),
        ValueError,
        "loss and batches|LOSS_BASED|got none",
    ),
    "loss": ({"loss": loss}, ValueError, "must not be given|ENTROPY_BASED"),
    "budget": (
        with_config(target_memory_reduction=0.9),
        ValueError,
        "target_memory_reduction must be at most 0.8421|INT2|got 0.9|fewer bits",
    ),
    "uniform budget": (
        with_config(
            target_memory_reduction=0.9,
            allocation_strategy=AllocationStrategy.UNIFORM,
        ),
        ValueError,
        "target_memory_reduction must be at most 0.8421|INT2|got 0.9|fewer bits",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_bad_modules_are_errors(params, name):
    changes, error, words = MODULES[name]
    options = {"model": (apply, params), **changes}
    check(
        "create_ultra_precision_module",
        error,
        words,
        lambda: create_ultra_precision_module(**options),
    )


@pytest.mark.parametrize("strategy", ["UNIFORM", "ENTROPY_BASED"])
def test_the_largest_reduction_that_is_named_is_reached(params, strategy):
    def make(reduction):
        config = PrecisionConfig(
            target_memory_reduction=reduction,
            allocation_strategy=AllocationStrategy[strategy],
        )
        return create_ultra_precision_module((apply, params), config)

    assert make(0.8421).get_precision_stats().memory_savings_ratio >= 0.8421
    with pytest.raises(ValueError, match=r"at most 0\.8421, "):
        make(0.8422)


OPPORTUNITIES = {
    "tolerance": ({"tolerance": 0}, ValueError, "above 0|0"),
    "model": ({"model": apply}, TypeError, "(function, params)"),
    "outputs": (
        {"model": (lambda params, x: x, {"a": jnp.ones((2, 64))})},
        TypeError,
        "must return floats",
    ),
    "config": ({"config": {}}, TypeError, "PrecisionConfig|dict"),
    "nan": (
        {
            "model": (jnp.dot, jnp.ones((64, 64))),
            "sample_input": jnp.full((64, 3), jnp.nan),
        },
        ValueError,
        "sample_input must give finite outputs|inf and nan in it",
    ),
    "empty": (
        {"model": (jnp.dot, jnp.ones((64, 64))), "sample_input": jnp.ones((64, 0))},
        ValueError,
        "outputs with numbers in them, got float32[64, 0]|at least one",
    ),
}


@pytest.mark.parametrize("name", OPPORTUNITIES)
def test_bad_analyses_are_errors(params, name):
    changes, error, words = OPPORTUNITIES[name]
    options = {"model": (apply, params), "sample_input": TOKENS, **changes}
    check(
        "analyze_precision_opportunities",
        error,
        words,
        lambda: analyze_precision_opportunities(**options),
    )
