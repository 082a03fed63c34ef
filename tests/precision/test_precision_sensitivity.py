"""What each format costs: by gradients, by the loss, by entropy, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import check

from jax_kvblock.precision import (
    PrecisionFormat,
    entropy_sensitivity,
    find_weights,
    gradient_sensitivity,
    loss_sensitivity,
    quantize,
)

pytestmark = pytest.mark.usefixtures("exact_products")

FORMATS = (PrecisionFormat.INT4, PrecisionFormat.INT2, PrecisionFormat.FP16)
ORDERED = (PrecisionFormat.INT2, PrecisionFormat.INT4, PrecisionFormat.FP16)


@pytest.fixture
def params(rng):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {"layers": draw(2, 32, 64), "table": draw(8, 64), "bias": draw(32)}


def apply(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer.T + params["bias"]) @ params["table"][:, :32].T
        x = jnp.concatenate([x] * 8, -1)
    return x


def loss(params, x):
    return jnp.square(apply(params, x)).mean()


@pytest.fixture
def batches(rng):
    return [jnp.asarray(rng.standard_normal((4, 64)), jnp.float32) for _ in range(3)]


def stored(array, format):
    if format is PrecisionFormat.FP16:
        return np.asarray(array, np.float16).astype(np.float64)
    return np.float64(quantize(array, format).dequantize())


def test_gradients_weigh_the_errors_that_formats_make(params, batches):
    weights = find_weights(params, parts={"table": 2})
    found = gradient_sensitivity(loss, params, batches, weights, FORMATS)
    assert found.formats == ORDERED and found.weights == weights
    slopes = [jax.grad(loss)(params, batch) for batch in batches]
    for weight in weights:
        array = params[weight.name]
        square = np.mean([np.square(np.float64(g[weight.name])) for g in slopes], 0)
        for column, format in enumerate(ORDERED):
            error = stored(array, format) - np.float64(array)
            want = (square * error**2 / 2).reshape(weight.parts, -1).sum(1)
            np.testing.assert_allclose(found.costs[weight.name][:, column], want, 1e-4)


def test_costs_of_gradients_are_the_growth_of_a_loss_that_they_are_true_of(rng):
    """Half of squared distances of noisy rows: its Fisher information is diagonal."""
    w = rng.standard_normal((2, 64)).astype(np.float32)
    noise = rng.standard_normal((2000, 2, 64)).astype(np.float32)

    def distance(params, batch):
        return jnp.square(params["w"] - w - batch).sum() / 2

    weights = find_weights({"w": w}, parts={"w": 2})
    found = gradient_sensitivity(
        distance, {"w": jnp.asarray(w)}, noise, weights, ORDERED[:2]
    )
    for column, format in enumerate(ORDERED[:2]):
        growth = np.square(stored(w, format) - w).sum(1) / 2
        np.testing.assert_allclose(found.costs["w"][:, column], growth, rtol=0.15)


@pytest.mark.parametrize("inside", [False, True])
def test_the_loss_as_it_grows(params, batches, inside):
    weights = find_weights(params, parts={"table": 2})
    base = params
    if inside:
        base = {n: jnp.round(4 * array) / 4 for n, array in params.items()}
    options = {"inside": base} if inside else {}
    found = loss_sensitivity(loss, params, batches, weights, FORMATS, **options)
    before = np.mean([loss(base, batch) for batch in batches])
    for name, parts in (("layers", 2), ("table", 2)):
        rows = len(params[name]) // parts
        for column, format in enumerate(ORDERED):
            for part in range(parts):
                at = slice(part * rows, (part + 1) * rows)
                piece = stored(params[name], format)[at].astype(np.float32)
                changed = base | {name: base[name].at[at].set(piece)}
                after = np.mean([loss(changed, batch) for batch in batches])
                got = found.costs[name][part, column]
                near = 1e-5 * before  # a difference of float32
                np.testing.assert_allclose(got, after - before, rtol=1e-3, atol=near)


def test_entropy_of_weights(params):
    weights = find_weights(params, parts={"table": 2})
    found = entropy_sensitivity(params, weights, FORMATS)
    for weight in weights:
        pieces = np.asarray(params[weight.name]).reshape(weight.parts, -1)
        for part, piece in enumerate(pieces):
            count, _ = np.histogram(piece, 256)
            share = count[count > 0] / piece.size
            entropy = -(share * np.log2(share)).sum()
            want = [piece.size * 4 ** (entropy - f.bits) for f in ORDERED]
            # A number at the edge of two bins may be in either.
            np.testing.assert_allclose(found.costs[weight.name][part], want, rtol=0.05)


def test_what_lies_below_the_threshold_costs_nothing():
    two = jnp.tile(jnp.asarray([-1.0, 1.0]), (4, 32))  # one bit
    even = jnp.arange(256.0).reshape(4, 64)  # eight bits
    params = {"even": even, "none": jnp.ones((4, 64)), "two": two}
    weights = find_weights(params)
    plain = entropy_sensitivity(params, weights, FORMATS)
    bits = {"even": 8, "two": 1, "none": 0}
    for name, entropy in bits.items():
        want = 256 * 4.0 ** np.array([[entropy - f.bits for f in ORDERED]])
        np.testing.assert_allclose(plain.costs[name], want, rtol=1e-4)
    found = entropy_sensitivity(params, weights, FORMATS, threshold=1.5)
    assert not found.costs["two"].any() and not found.costs["none"].any()
    np.testing.assert_array_equal(found.costs["even"], plain.costs["even"])


# ---- what is refused -----------------------------------------------------------------

BAD = {
    "batches": ({"batches": []}, ValueError, "one batch at least"),
    "vector": (
        {"loss": lambda params, x: x[0]},
        ValueError,
        "scalar, got float32[64]|mean",
    ),
    "loss": ({"loss": 1.0}, TypeError, "function (params, batch)|float"),
    "infinite": ({"loss": lambda params, x: x.sum() / 0}, ValueError, "finite|nan"),
    "weights": ({"weights": []}, TypeError, "find_weights"),
    "names": ({"weights": ["layers"]}, TypeError, "find_weights|'layers'"),
    "formats": ({"formats": ["int4"]}, TypeError, "PrecisionFormat.INT4|'int4'"),
    "group": ({"group_size": 33}, ValueError, "multiple of 32|33"),
}


@pytest.mark.parametrize("measure", [gradient_sensitivity, loss_sensitivity])
@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_errors(params, batches, name, measure):
    changes, error, words = BAD[name]
    options = {
        "loss": loss,
        "batches": batches,
        "weights": find_weights(params),
        "formats": FORMATS,
        **changes,
    }
    check(measure.__name__, error, words, lambda: measure(params=params, **options))
