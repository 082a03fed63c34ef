"""What fusion leaves alone or refuses, and what it says of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fusion_models import (
    ALL,
    SHAPE,
    Layer,
    TransformerModel,
    attention,
    biased,
    compare,
    drawn,
    used,
)

from jax_kvblock import attention_fn
from jax_kvblock.fusion import (
    CHOICES,
    FusionConfig,
    FusionStrategy,
    Measurement,
    OptimizationLevel,
    TransformerBlock,
    create_unified_attention_fusion,
)
from jax_kvblock.fusion.gelu import kept_gelu
from jax_kvblock.fusion.modules import FusedMultiHeadAttention
from jax_kvblock.layers import AttentionLayer

pytestmark = pytest.mark.usefixtures("exact_products")


class Own(nnx.MultiHeadAttention):
    pass


def reasons(model, **options):
    fused = create_unified_attention_fusion(model, config=ALL, **options)
    return {row.choice: (row.used, row.reason) for row in fused.report}


@pytest.mark.parametrize(
    ("make", "left", "words"),
    [
        (
            lambda: Own(4, 64, rngs=nnx.Rngs(0)),
            {"qkv", "attention"},
            "class of its own",
        ),
        (lambda: attention(normalize_qk=True), {"qkv"}, "norms queries and keys"),
        (lambda: attention(in_kv_features=32), {"qkv"}, "other inputs"),
        (
            lambda: attention(qkv_dot_general=lambda *a, **k: jax.lax.dot_general(*a)),
            {"qkv"},
            "not plain",
        ),
        (
            lambda: attention(attention_fn=lambda q, k, v, **_: v),
            {"attention"},
            "attention_fn of its own",
        ),
    ],
)
def test_layers_that_are_left_alone_say_why(make, left, words):
    found = reasons(make())
    assert {c for c, (who, _) in found.items() if who == "xla"} == left
    assert all(words in found[choice][1] for choice in left)


def test_attention_with_normed_queries_is_still_the_models():
    model, x = biased(attention(normalize_qk=True)), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    assert used(fused)["", "attention"] == "ours"
    compare(fused(x), model(x), 2e-6)


def test_calls_that_are_no_plain_self_attention_go_the_layers_way():
    model, x, other = biased(attention()), drawn(*SHAPE), drawn(2, 9, 64, seed=1)
    fused = create_unified_attention_fusion(model, config=ALL)
    compare(fused(x, other), model(x, other), 2e-6)
    with pytest.raises(ValueError, match=r"inputs_q must be \[\.\.\., 64\]"):
        fused(x[..., :32])


def test_an_option_that_the_layer_does_not_know_is_its_error():
    model, x = attention(), drawn(*SHAPE)
    fused = create_unified_attention_fusion(model, config=ALL)
    assert used(fused)["", "qkv"] == "ours"
    for options in ({"masks": jnp.ones((2, 1, 9, 9), bool)}, {"causal": False}):
        (name,) = options
        for one in (model, fused, fused.model):
            with pytest.raises(TypeError, match=f"'{name}'"):
                one(x, **options)


def test_a_decoding_cache_goes_on():
    model = biased(attention(decode=True))
    fused = create_unified_attention_fusion(model, config=ALL)
    x = drawn(2, 3, 64)
    for one in (model, fused.model):
        one.init_cache((2, 8, 64))
    for i in range(3):
        row = x[:, i : i + 1]
        compare(fused(row), model(row), 2e-6)
    assert int(fused.model.cache_index[...]) == 3  # kept by the jitted call


def test_dropout_is_left_alone_unless_all_is_asked_for(monkeypatch):
    kind = jax.devices()[0].device_kind
    row = Measurement(kind, "float32", (1, 512), 1.2, 1.2, "XLA's", "a.json")
    for name in ("qkv", "attention"):
        choice = dataclasses.replace(CHOICES[name], measured=(row,))
        monkeypatch.setitem(CHOICES, name, choice)
    model, x = biased(attention(dropout_rate=0.5)), drawn(*SHAPE)
    model.train()
    fused = create_unified_attention_fusion(model)
    (why,) = (row for row in fused.report if row.choice == "attention")
    assert why.used == "xla" and "dropout" in why.reason
    # q, k and v are joined, and the same weights are dropped.
    assert used(fused)["", "qkv"] == "ours"
    want = model(x)
    compare(fused(x), want, 2e-6)
    assert np.abs(fused(x) - want).max() > 1e-2  # the stream went on: others
    compare(fused(x, deterministic=True), model(x, deterministic=True), 2e-6)
    model.eval()
    with_eval = create_unified_attention_fusion(model, config=ALL)
    assert used(with_eval)["", "attention"] == "ours"
    compare(with_eval(x), model(x), 2e-6)
    with pytest.raises(ValueError, match="deterministic must be given"):
        model.deterministic = None
        create_unified_attention_fusion(model, config=ALL)(x)


def test_rngs_of_the_call_are_taken():
    model, x = biased(attention(dropout_rate=0.5, keep_rngs=False)), drawn(*SHAPE)
    fused = create_unified_attention_fusion(
        model, "qkv_only", "aggressive", config=None
    )
    want = model(x, rngs=nnx.Rngs(dropout=5), deterministic=False)
    got = fused(x, rngs=nnx.Rngs(dropout=5), deterministic=False)
    compare(got, want, 2e-2)  # the product is in bfloat16; other weights: about 1
    with pytest.raises(ValueError, match="rngs must be given"):
        fused(x, deterministic=False)


def test_what_is_fused_already_is_told():
    layer = AttentionLayer(64, 4, rngs=nnx.Rngs(0))
    assert reasons(layer) == {
        "qkv": ("ours", "an AttentionLayer is so already"),
        "attention": ("ours", "an AttentionLayer is so already"),
    }
    for make in (attention, TransformerModel):
        once = create_unified_attention_fusion(make(), config=ALL)
        again = create_unified_attention_fusion(once, config=ALL)
        assert used(again) == used(once)
        ours = [row for row in again.report if row.used == "ours"]
        assert ours and all(row.reason == "it is so already" for row in ours)


@pytest.mark.parametrize("make", [attention, TransformerModel])
@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_what_was_fused_otherwise_is_refused(make, level):
    model = make()
    once = create_unified_attention_fusion(model, "full_block", "aggressive")
    config = FusionConfig("full_block", level, enable_mixed_precision=False)
    with pytest.raises(
        ValueError,
        match=rf"another way, got 'qkv' of .*bfloat16, for '{level}'; fuse the model",
    ):
        create_unified_attention_fusion(once, config=config)
    # Without bfloat16 as well, where XLA's would ship; not where it is not looked at.
    once = create_unified_attention_fusion(model, config=ALL)
    if level != "aggressive":
        with pytest.raises(ValueError, match="another way, got 'qkv'"):
            create_unified_attention_fusion(once, config=config)
    qkv = create_unified_attention_fusion(model, "qkv_only", "aggressive")
    create_unified_attention_fusion(qkv, "attention_only", level)


@pytest.mark.parametrize("narrow", [False, True])
def test_what_was_fused_before_multiplies_as_it_did(narrow):
    """Fusing something else in a block later on says nothing of its products."""
    model, x = TransformerBlock(64, 4, rngs=nnx.Rngs(0)), drawn(*SHAPE)
    config = FusionConfig("qkv_only", "aggressive", enable_mixed_precision=narrow)
    once = create_unified_attention_fusion(model, config=config)
    again = create_unified_attention_fusion(
        once, "feed_forward_only", "conservative" if narrow else "aggressive"
    )
    compare(again(x), once(x), 2e-6)
    assert (np.abs(again(x) - model(x)).max() > 1e-3) == narrow


@pytest.mark.parametrize("shape", [(0, 5, 64), (2, 0, 64)])
def test_nothing_gives_nothing(shape):
    for model in (attention(), TransformerModel()):
        fused = create_unified_attention_fusion(model, config=ALL)
        for call in (model, fused.model):
            assert call(jnp.zeros(shape)).shape == shape


# ---- strategies, levels, refusals ----------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "choices"),
    [
        ("full_block", {"qkv", "attention", "gelu", "norm"}),
        ("attention_only", {"attention"}),
        ("qkv_only", {"qkv"}),
        (FusionStrategy.FEED_FORWARD_ONLY, {"gelu"}),
    ],
)
def test_strategies_look_at_their_choices_alone(strategy, choices):
    model, x = biased(Layer()), drawn(*SHAPE)
    config = dataclasses.replace(ALL, strategy=strategy)
    fused = create_unified_attention_fusion(model, config=config)
    assert {row.choice for row in fused.report} == choices
    changed = {
        "attention": fused.model.attention.attention_fn is attention_fn,
        "qkv": type(fused.model.attention) is FusedMultiHeadAttention,
        "gelu": fused.model.act is kept_gelu,
    }
    assert changed == {name: name in choices for name in changed}
    compare(fused(x), model(x), 2e-6)


def test_the_summary_has_a_line_for_each_row():
    fused = create_unified_attention_fusion(TransformerModel(), config=ALL)
    lines = fused.summary().splitlines()
    assert len(lines) == len(fused.report) == 10
    assert lines[0].startswith("blocks.0: qkv by ours: one product")


NOTHING = {
    "an MLP": lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu),
    "a norm": lambda: nnx.RMSNorm(8, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("level", OptimizationLevel)
def test_models_without_anything_to_fuse(name, level):
    with pytest.raises(
        ValueError, match=r"model must hold.*full_block.*Attention.*got"
    ):
        create_unified_attention_fusion(NOTHING[name](), optimization_level=level)


@pytest.mark.parametrize("strategy", ["attention_only", "qkv_only"])
def test_a_strategy_that_finds_nothing_says_what_there_is(strategy):
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.gelu)
    with pytest.raises(ValueError, match=rf"{strategy}.*Linear, List, Sequential"):
        create_unified_attention_fusion(model, strategy)
    with pytest.raises(
        ValueError, match=r"feed_forward_only.*jax\.nn\.gelu as an attr"
    ):
        create_unified_attention_fusion(attention(), "feed_forward_only")


def test_a_model_that_could_not_be_changed_is_unchanged():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.gelu)
    with pytest.raises(ValueError, match="model must hold"):
        create_unified_attention_fusion(model, "qkv_only", inplace=True)
    assert model.layers[1] is nnx.gelu


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"fusion_strategy": "all"}, ValueError, "fusion_strategy.*full_block.*'all'"),
        ({"optimization_level": "O3"}, ValueError, "optimization_level.*'O3'"),
        ({"config": "balanced"}, TypeError, "config must be a FusionConfig.*str"),
        ({"config": ALL, "fusion_strategy": "qkv_only"}, ValueError, "with a config"),
        ({"inplace": 1}, TypeError, "inplace"),
        ({"model": jnp.tanh}, TypeError, "model must be a flax.nnx.Module"),
    ],
)
def test_what_is_refused(wrong, error, words):
    arguments = {"model": attention()} | wrong
    with pytest.raises(error, match=words):
        create_unified_attention_fusion(**arguments)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 5}, "num_heads must divide half of d_model"),
        ({"d_model": 65}, "num_heads must divide half of d_model"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads"),
        ({"hidden": 0}, "hidden"),
        ({"theta": -1.0}, "theta"),
    ],
)
def test_blocks_that_do_not_fit(wrong, words):
    with pytest.raises(ValueError, match=words):
        TransformerBlock(
            **({"d_model": 64, "num_heads": 4, "rngs": nnx.Rngs(0)} | wrong)
        )


def test_a_block_is_made_with_streams_of_keys():
    with pytest.raises(TypeError, match=r"rngs must be nnx.Rngs, got int; pass nnx"):
        TransformerBlock(64, 4, rngs=0)


def test_a_block_is_causal_and_knows_positions():
    block, x = biased(TransformerBlock(64, 4, rngs=nnx.Rngs(0))), drawn(*SHAPE)
    y = block(x)
    moved = block(x.at[:, -1].set(0))
    np.testing.assert_allclose(moved[:, :-1], y[:, :-1], rtol=1e-5, atol=1e-5)
    turned = block(x[:, ::-1])[:, ::-1]
    assert np.abs(turned - y).max() > 1e-2
    same = jnp.broadcast_to(x[:, :1], SHAPE).at[:, 3].set(x[:, 3])
    out = block(same)
    assert np.abs(out[:, 4] - out[:, 9]).max() > 1e-4  # how far the other token is
    with pytest.raises(ValueError, match=r"inputs must be \[B, S, 64\]"):
        block(x[0])
