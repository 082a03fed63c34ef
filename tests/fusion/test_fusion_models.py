"""Fused models compute what the model did, with the model's parameters."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fusion_models import (
    ALL,
    LEEWAY,
    SHAPE,
    Layer,
    TransformerModel,
    attention,
    biased,
    compare,
    drawn,
    used,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock import attention_fn
from jax_kvblock.fusion import (
    CHOICES,
    Measurement,
    create_unified_attention_fusion,
)
from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.fusion.modules import FusedMultiHeadAttention

pytestmark = pytest.mark.usefixtures("exact_products")


def gradients(model, *args, **options):
    definition, state = nnx.split(model)

    def loss(state, *args):
        out = nnx.merge(definition, state)(*args, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))(state, *args)


MODELS = {
    "attention": lambda: biased(attention()),
    "fewer kv heads": lambda: biased(attention(num_kv_heads=2)),
    "no bias": lambda: attention(use_bias=False),
    "a layer": lambda: biased(Layer()),
    "blocks": lambda: biased(TransformerModel()),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_the_models(name):
    model, x = MODELS[name](), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    assert "ours" in used(fused).values()
    compare(fused(x), model(x), 2e-6)
    want, d_x = gradients(model, x)
    got, fused_d_x = gradients(fused.model, x)
    compare(fused_d_x, d_x, 5e-6)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # The gradient of keys' biases is 0 but for roundings.
    whole = max(float(jnp.abs(w).max()) for w in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=LEEWAY * 2e-6 * whole)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_causal_attention(causal):
    model, x = biased(Layer()), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, (2, 1, 24, 24))
    keep = keep | jnp.eye(24, dtype=bool)
    compare(fused(x, keep, is_causal=causal), model(x, keep, is_causal=causal), 2e-6)
    # The mask and causality count.
    assert np.abs(fused(x, keep) - fused(x)).max() > 1e-3
    assert np.abs(fused(x, is_causal=True) - fused(x, is_causal=False)).max() > 1e-3


def test_bfloat16_is_as_near_to_float32_as_the_model_was():
    model, x = biased(Layer(dtype=jnp.bfloat16)), drawn(*SHAPE, dtype=jnp.bfloat16)
    fused = create_unified_attention_fusion(model, config=ALL)
    truth = biased(Layer())(x.astype(jnp.float32))
    assert fused(x).dtype == model(x).dtype

    def off(y):
        return np.linalg.norm(np.asarray(y, np.float64) - truth)

    assert 0 < off(fused(x)) <= 1.2 * off(model(x))


def test_mixed_precision_is_of_aggressive_alone_and_is_told():
    model, x = biased(attention()), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, optimization_level="aggressive")
    assert all("computed in bfloat16" in row.reason for row in fused.report)
    y = fused(x)
    assert y.dtype == jnp.float32
    away = np.linalg.norm(y - model(x)) / np.linalg.norm(model(x))
    assert 1e-4 < away < 2e-2
    wide = create_unified_attention_fusion(model, config=ALL)
    assert not any("bfloat16" in row.reason for row in wide.report)
    named = create_unified_attention_fusion(
        attention(precision="highest"), optimization_level="aggressive"
    )
    assert not any("bfloat16" in row.reason for row in named.report)


def test_conservative_has_the_bits_of_the_jitted_model():
    model, x = biased(Layer()), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, optimization_level="conservative")
    assert set(used(fused).values()) == {"xla"}
    definition, state = nnx.split(model)
    jitted = jax.jit(lambda s, x: nnx.merge(definition, s)(x))(state, x)
    np.testing.assert_array_equal(fused(x), jitted)


def test_balanced_on_this_device_changes_what_was_measured_alone(monkeypatch):
    model, x = biased(Layer()), drawn(*SHAPE)
    kind = x.devices().pop().device_kind
    row = Measurement(kind, "float32", (1, 512), 1.2, 1.2, "XLA's", "a.json")
    choice = dataclasses.replace(CHOICES["attention"], measured=(row,))
    monkeypatch.setitem(CHOICES, "attention", choice)
    fused = create_unified_attention_fusion(model)
    assert used(fused) == {
        ("attention", "qkv"): "xla",
        ("attention", "attention"): "ours",
        ("act", "gelu"): "xla",
        ("head.layers.1", "gelu"): "xla",
        ("norm", "norm"): "xla",
    }
    assert type(fused.model.attention) is nnx.MultiHeadAttention
    assert fused.model.attention.attention_fn is attention_fn
    compare(fused(x), model(x), 2e-6)


def test_the_program_is_what_the_report_says():
    """One product for q, k and v; no scores; GELU computed again on the way back."""
    model, x = Layer(), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    plain, own = (
        str(jax.make_jaxpr(lambda x, m=m: m(x))(x)) for m in (model, fused.model)
    )
    count = [text.count("= dot_general[") for text in (plain, own)]
    assert count == [9, 5]  # 3 for q, k and v, 2 for scores and values are 1
    assert "kvblock_attention" in own and "kvblock_attention" not in plain
    assert own.count("= remat2[") == 2 and "remat2" not in plain
    assert "= exp " in plain and "= exp " not in own


def test_activations_are_found_in_whatever_holds_them():
    class Holds(nnx.Module):
        def __init__(self):
            self.pair = (jax.nn.relu, jax.nn.gelu)
            self.named = {"act": jax.nn.gelu, "other": jax.nn.silu}
            self.within = nnx.Dict(act=jax.nn.gelu)
            self.listed = nnx.List([nnx.Dict(act=jax.nn.gelu), jax.nn.gelu])

        def __call__(self, x):
            return self.pair[1](x) + self.named["act"](x) + self.listed[1](x)

    model, x = Holds(), drawn(8)
    fused = create_unified_attention_fusion(model, config=ALL)
    assert {row.path for row in fused.report} == {
        "pair.1",
        "named.act",
        "within.act",
        "listed.0.act",
        "listed.1",
    }
    own = fused.model
    for act in (
        *(own.pair[1], own.named["act"], own.within.act),
        *(own.listed[0].act, own.listed[1]),
    ):
        assert act is kept_gelu
    assert own.pair[0] is jax.nn.relu and own.named["other"] is jax.nn.silu
    assert model.pair[1] is jax.nn.gelu
    np.testing.assert_allclose(fused(x), model(x), rtol=1e-6)


def test_a_row_that_sees_no_key_is_zeros_as_the_page_says():
    model, x = attention(use_bias=False), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    mask = jnp.ones((1, 1, 24, 24), bool).at[0, 0, 5].set(False)
    got, want = fused(x, mask=mask), model(x, mask=mask)
    assert not np.any(got[:, 5]) and np.all(np.any(want[:, 5], -1))
    compare(np.delete(got, 5, 1), np.delete(want, 5, 1), 2e-6)


# ---- parameters ----------------------------------------------------------------------


def test_a_copy_leaves_the_model_as_it_is_and_shares_its_arrays():
    model = Layer()
    fused = create_unified_attention_fusion(model, config=ALL)
    assert type(model.attention) is nnx.MultiHeadAttention
    assert model.attention.attention_fn is nnx.dot_product_attention
    assert model.act is jax.nn.gelu
    before, after = nnx.state(model), nnx.state(fused.model)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a is b


def test_inplace_changes_the_model_whose_parameters_stay_the_same_objects():
    model = Layer()
    held, kernel = model.attention, model.attention.query.kernel
    fused = create_unified_attention_fusion(model, config=ALL, inplace=True)
    assert fused.model is model and model.attention is held
    assert type(held) is FusedMultiHeadAttention and held.query.kernel is kernel
    assert model.act is kept_gelu


def test_an_optimizer_of_the_model_goes_on():
    """One that was made before the model was fused in place."""
    model, x = biased(Layer()), drawn(*SHAPE)
    twin = nnx.clone(model)
    steps = []
    for one, fuses in ((model, True), (twin, False)):
        optimizer = nnx.Optimizer(one, optax.adam(1e-3), wrt=nnx.Param)
        call = one
        for step in range(3):
            if step == 1 and fuses:
                call = create_unified_attention_fusion(one, config=ALL, inplace=True)
                assert "ours" in used(call).values()
            grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(one)
            optimizer.update(one, grads)
        steps.append(call(x))
    compare(*steps, 1e-4)
    assert np.abs(steps[0] - Layer()(x)).max() > 1e-2


def test_a_state_of_the_model_loads_into_the_fused_one():
    fused = create_unified_attention_fusion(Layer(), config=ALL)
    trained, x = biased(Layer()), drawn(*SHAPE)
    nnx.update(fused.model, nnx.to_pure_dict(nnx.state(trained)))
    compare(fused(x), trained(x), 2e-6)


def test_gradients_through_the_fused_call_itself():
    model, x = biased(Layer()), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(fused)
    want = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True)
    whole = max(float(jnp.abs(w).max()) for w in jax.tree.leaves(want))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=LEEWAY * 2e-6 * whole)


def test_a_call_is_one_program():
    traced = []

    class Counts(nnx.Module):
        def __init__(self):
            self.attention = attention()

        def __call__(self, x, scale=1.0, flip=False):
            traced.append(isinstance(x, jax.core.Tracer))
            return (1 - 2 * flip) * scale * self.attention(x)

    fused = create_unified_attention_fusion(Counts(), config=ALL)
    x = drawn(*SHAPE)
    y = fused(x)
    np.testing.assert_allclose(fused(2 * x / 2), y)
    assert traced == [True]
    np.testing.assert_allclose(fused(x, 2.0, flip=True), -2 * y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fused(x, flip=False, scale=3.0), 3 * y, rtol=1e-5)
    assert all(traced)


# ---- over devices --------------------------------------------------------------------


def test_batches_and_heads_over_devices(four_cpus):
    model, x = biased(Layer()), drawn(*SHAPE)
    want = model(x)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
    rows = NamedSharding(mesh, P("d"))
    everywhere = NamedSharding(mesh, P())
    spread = jax.tree.map(lambda a: jax.device_put(a, everywhere), nnx.state(model))
    nnx.update(model, spread)
    fused = create_unified_attention_fusion(model, config=ALL)
    assert used(fused)["attention", "qkv"] == "ours"
    y = fused(jax.device_put(x, rows))
    assert y.sharding.is_equivalent_to(rows, y.ndim)
    compare(y, want, 2e-6)

    heads = NamedSharding(mesh, P(None, "d", None))
    for name in ("query", "key", "value"):
        kernel = getattr(model.attention, name).kernel
        kernel[...] = jax.device_put(kernel[...], heads)
    fused = create_unified_attention_fusion(model, config=ALL)
    (why,) = (row for row in fused.report if row.choice == "qkv")
    assert why.used == "xla" and "cut by heads" in why.reason
    compare(fused(jax.device_put(x, everywhere)), want, 2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("approximate", [False, True])
def test_kept_gelu_is_jaxs_and_keeps_its_input_alone(dtype, approximate):
    x = drawn(64, dtype=dtype)
    ours = functools.partial(kept_gelu, approximate=approximate)
    plain = functools.partial(jax.nn.gelu, approximate=approximate)
    np.testing.assert_array_equal(jax.jit(ours)(x), jax.jit(plain)(x))

    def kept(f):
        _, pull = jax.vjp(f, x)
        return sum(a.size for a in jax.tree.leaves(pull))

    assert kept(ours) == x.size < kept(plain)
    slopes = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (ours, plain))
    compare(*slopes, 1e-6 if dtype == jnp.float32 else 1e-2)
