"""What compiled steps take by kind: of functions, modules, pytrees; over devices."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from messages import check

import jax_kvblock
from jax_kvblock.hardware import HardwareAbstractionLayer, MemoryUsage
from jax_kvblock.parallel import AttentionConfig, create_attention

pytestmark = pytest.mark.usefixtures("four_cpus")

WIDTH = 64
FLOATS = 4


@pytest.fixture
def hal():
    return HardwareAbstractionLayer(jax.devices("cpu")[0])


def struct(*shape, dtype=jnp.float32, **options):
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def train(weights, x):
    """A step of descent: new weights, and the loss."""
    loss, slopes = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)
    return weights - 0.1 * slopes, loss


def batch(size):
    return struct(WIDTH, WIDTH), struct(size, WIDTH)


WEIGHTS = WIDTH * WIDTH * FLOATS


def test_bytes_by_kind(hal):
    usage = hal.estimate_memory_usage(train, 32, batch)
    assert usage.arguments == WEIGHTS + 32 * WIDTH * FLOATS
    assert WEIGHTS + FLOATS <= usage.outputs < WEIGHTS + 100  # and a table of results
    assert usage.aliased == 0
    assert usage.temporaries > 0
    assert usage.total == (
        usage.arguments + usage.outputs + usage.temporaries + usage.code
    )
    analysis = jax.jit(train).lower(*batch(32)).compile().memory_analysis()
    assert usage.temporaries == analysis.temp_size_in_bytes
    assert usage.code == analysis.generated_code_size_in_bytes


@pytest.mark.parametrize("jitted", [False, True])
def test_donated_memory_counts_once(hal, jitted):
    plain = hal.estimate_memory_usage(train, 32, batch)
    if jitted:
        step = jax.jit(train, donate_argnums=0)
        usage = hal.estimate_memory_usage(step, 32, batch)
    else:
        usage = hal.estimate_memory_usage(train, 32, batch, donate_argnums=0)
    assert usage.aliased == WEIGHTS
    assert usage.total == plain.total - WEIGHTS + usage.temporaries - plain.temporaries


def test_what_is_said_of_usage():
    usage = MemoryUsage(2**20, 2**19, 2**19, 3 * 2**20, 0)
    assert usage.total == 4 * 2**20
    assert str(usage) == (
        "4.0 MiB: arguments 1.0, outputs 0.5, aliased 0.5, temporaries 3.0, code 0.0"
    )


def test_nothing_runs(hal):
    def step(x):
        return jax.pure_callback(lambda x: 1 / 0, struct(*x.shape), x)

    assert hal.estimate_memory_usage(step, 4, lambda b: (struct(b, 8),)).outputs >= 128
    huge = 2**26  # 64 TiB go in
    usage = hal.estimate_memory_usage(jnp.sum, huge, lambda b: (struct(b, 2**18),))
    assert usage.arguments == huge * 2**18 * FLOATS


def test_a_sample_in_place_of_a_function(hal):
    made = hal.estimate_memory_usage(jnp.tanh, 12, lambda b: (struct(b, 8),))
    for sample in (jnp.zeros((1, 8)), np.zeros((5, 8), np.float32), (struct(2, 8),)):
        assert hal.estimate_memory_usage(jnp.tanh, 12, sample) == made


def test_numbers_and_trees_are_arguments(hal):
    def step(rate, tree):
        return rate * tree["x"] + len(tree["more"])

    def arguments(b):
        return 0.5, {"x": struct(b, 3), "more": [struct(7), None]}

    usage = hal.estimate_memory_usage(step, 5, arguments)
    assert usage.outputs == 5 * 3 * FLOATS
    assert usage.arguments >= 5 * 3 * FLOATS + FLOATS


@pytest.mark.parametrize("kind", ["nnx", "pytree"])
def test_models_bring_their_weights(hal, kind):
    models = {
        "nnx": lambda: nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=nnx.Rngs(0)),
        "pytree": lambda: create_attention(AttentionConfig(WIDTH, 2)),
    }
    model = models[kind]()
    usage = hal.estimate_memory_usage(model, 3, struct(1, 16, WIDTH))
    # Both have four squares of weights; they are arguments, and no constants.
    assert usage.arguments == 4 * WEIGHTS + 3 * 16 * WIDTH * FLOATS
    assert usage.aliased == 0


def test_donated_arguments_are_numbered_without_the_weights(hal):
    model = create_attention(AttentionConfig(WIDTH, 2))
    usage = hal.estimate_memory_usage(model, 3, struct(1, 16, WIDTH), donate_argnums=0)
    assert usage.aliased == 3 * 16 * WIDTH * FLOATS


def test_a_batch_is_cut_over_devices():
    devices = jax.devices("cpu")
    one, four = (HardwareAbstractionLayer(devices[:n]) for n in (1, 4))
    alone = one.estimate_memory_usage(train, 32, batch)
    spread = four.estimate_memory_usage(train, 128, batch)
    assert spread.arguments == alone.arguments  # a fourth of a batch, whole weights
    # A dim that is made of the batch size, wherever it is.
    usage = four.estimate_memory_usage(
        jnp.sum, 8, lambda b: (struct(3, 5 * b, dtype=jnp.int8),)
    )
    assert usage.arguments == 3 * 5 * 8 // 4


def test_arguments_that_are_cut_stay_so():
    devices = jax.devices("cpu")
    hal = HardwareAbstractionLayer(devices)
    mesh = Mesh(np.array(devices), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def arguments(b):
        return struct(WIDTH, WIDTH, sharding=rows), struct(b, WIDTH)

    usage = hal.estimate_memory_usage(jnp.dot, 8, lambda b: arguments(b)[::-1])
    assert usage.arguments == (WEIGHTS + 8 * WIDTH * FLOATS) // 4
    given = jax.device_put(jnp.zeros((WIDTH, WIDTH)), rows)
    again = hal.estimate_memory_usage(jnp.dot, 8, lambda b: (struct(b, WIDTH), given))
    assert again.arguments == usage.arguments


# ---- optimize_for_hardware -----------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, decode=False, rngs=rngs, **options
        )
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x + self.attention(x))


class Model(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.first, self.second = Block(rngs, **options), Block(rngs, **options)

    def __call__(self, x):
        return self.second(self.first(x))


def test_modules_attend_without_scores_in_memory(hal, rng, exact_products):
    model = Model()
    better = hal.optimize_for_hardware(model)
    for block in (better.first, better.second):
        assert block.attention.attention_fn is jax_kvblock.attention_fn
    assert model.first.attention.attention_fn is nnx.dot_product_attention
    assert better.first.linear.kernel[...] is model.first.linear.kernel[...]
    x = jnp.asarray(rng.standard_normal((2, 48, WIDTH)), jnp.float32)
    np.testing.assert_allclose(better(x), model(x), rtol=0, atol=2e-6)
    length, heads = 2048, 2
    scores = heads * length * length * FLOATS
    before, after = (
        hal.estimate_memory_usage(m, 1, struct(1, length, WIDTH))
        for m in (model, better)
    )
    assert after.temporaries < scores < before.temporaries


def test_functions_are_jitted_and_donate(hal):
    step = hal.optimize_for_hardware(train, donate_argnums=0)
    weights, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((4, WIDTH))
    want, _ = train(weights, x)
    got, _ = step(weights, x)
    assert weights.is_deleted() and not x.is_deleted()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_has_nothing_to_change_says_so(hal):
    ours = Model(attention_fn=jax_kvblock.attention_fn)
    for model, word in ((ours, "MultiHeadAttention"), (jax.jit(train), "jitted")):
        with pytest.warns(UserWarning, match=f"optimize_for_hardware: .*{word}"):
            assert hal.optimize_for_hardware(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hal.optimize_for_hardware(Model())


# ---- messages ------------------------------------------------------------------------

ESTIMATE, OPTIMIZE = "estimate_memory_usage", "optimize_for_hardware"
ROWS = [
    (ESTIMATE, TypeError, "model|can be called|int",
     lambda hal: hal.estimate_memory_usage(3, 1, struct(1, 2))),
    (ESTIMATE, ValueError, "batch_size|at least 1|0",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 0, struct(1, 2))),
    (ESTIMATE, ValueError, "arguments|depend on the batch size",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 1, lambda b: (struct(1, 2),))),
    (ESTIMATE, TypeError, "arguments|tuple|ShapeDtypeStruct|comma",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 1, lambda b: struct(b))),
    (ESTIMATE, TypeError, "arguments|str|close the step",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 1, lambda b: ("x",))),
    (ESTIMATE, ValueError, "arguments|first dim|float32[]|function of the batch size",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 1, struct())),
    (ESTIMATE, ValueError, "arguments|one structure",
     lambda hal: hal.estimate_memory_usage(jnp.sin, 1, lambda b: (struct(b),) * b)),
    (ESTIMATE, ValueError, "arguments|rank|[1]|[1, 1]",
     lambda hal: hal.estimate_memory_usage(
         jnp.sin, 1, lambda b: (struct(*[1] * b),))),
    (ESTIMATE, ValueError, "batch_size|multiple|4|float32[6]",
     lambda hal: HardwareAbstractionLayer(jax.devices("cpu")).estimate_memory_usage(
         jnp.sin, 6, struct(1))),
    (ESTIMATE, ValueError, "donate_argnums|from 0|-1",
     lambda hal: hal.estimate_memory_usage(
         jnp.sin, 6, struct(1), donate_argnums=-1)),
    (ESTIMATE, TypeError, "donate_argnums|jitted already|(0,)",
     lambda hal: hal.estimate_memory_usage(
         jax.jit(train), 6, batch, donate_argnums=0)),
    (OPTIMIZE, TypeError, "model|Attention|step(*arguments)",
     lambda hal: hal.optimize_for_hardware(create_attention(AttentionConfig(8, 1)))),
    (OPTIMIZE, TypeError, "model|got str|step(*arguments)",
     lambda hal: hal.optimize_for_hardware("model")),
    (OPTIMIZE, TypeError, "model|not jitted",
     lambda hal: hal.optimize_for_hardware(jax.jit(train), donate_argnums=0)),
    (OPTIMIZE, TypeError, "donate_argnums|nnx|(0,)",
     lambda hal: hal.optimize_for_hardware(Model(), donate_argnums=0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "error", "words", "wrong"), ROWS, ids=[f"{r[0]}-{r[2]}" for r in ROWS]
)
def test_what_is_refused(hal, where, error, words, wrong):
    check(where, error, words, lambda: wrong(hal))
