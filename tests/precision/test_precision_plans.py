"""Plans: weights and their parts, bytes, the best formats for a budget."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check

from jax_kvblock.precision import (
    MixedArray,
    PackedArray,
    PrecisionFormat,
    PrecisionPlan,
    Sensitivity,
    Weight,
    dequantize,
    find_weights,
    make_plan,
    quantize,
    uniform_plan,
)
from jax_kvblock.precision.plan import cheapest, hull

INT2, INT3, INT4, INT8 = (PrecisionFormat[f"INT{bits}"] for bits in (2, 3, 4, 8))
FP8, FP16, BF16 = PrecisionFormat.FP8, PrecisionFormat.FP16, PrecisionFormat.BF16


@pytest.fixture
def params(rng):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "embedding": draw(96, 64),
        "layers": {"norm": draw(64), "up": draw(3, 128, 64)},
        "step": jnp.int32(7),
    }


def test_weights_of_a_pytree(params):
    assert find_weights(params) == (
        Weight("embedding", (96, 64), 1, -1),
        Weight("layers.up", (3, 128, 64), 3, -1),
    )
    parts = {"embedding": 3, "layers.up": 1}
    cut = find_weights(params, parts=parts, axis=-2, group_size=32)
    assert cut == (
        Weight("embedding", (96, 64), 3, -2),
        Weight("layers.up", (3, 128, 64), 1, -2),
    )


def test_a_predicate_and_an_axis_for_each(params):
    found = find_weights(
        params,
        is_weight=lambda name, array: name.startswith("layers.u"),
        axis=lambda name, array: -array.ndim + 1,
    )
    assert found == (Weight("layers.up", (3, 128, 64), 3, -2),)
    lists = find_weights([jnp.ones((2, 64)), {"w": jnp.ones((2, 64), jnp.bfloat16)}])
    assert [weight.name for weight in lists] == ["0", "1.w"]


PLAN_FORMATS = ((INT3, INT3, FP16, INT8), (FP8, INT2, INT2))


def test_a_plan_stores_each_part_in_its_format(params):
    weights = find_weights(params, parts={"embedding": 4})
    plan = PrecisionPlan(weights, PLAN_FORMATS)
    assert hash(plan) == hash(PrecisionPlan(weights, PLAN_FORMATS))
    assert plan["layers.up"] == PLAN_FORMATS[1]
    stored = jit(plan.apply)(params)
    rows, up = stored["embedding"], stored["layers"]["up"]
    assert isinstance(rows, MixedArray) and isinstance(up, MixedArray)
    kinds = [run.dtype if hasattr(run, "dtype") else run.format for run in rows.runs]
    assert kinds == [INT3, jnp.float16, INT8]
    assert [run.format for run in up.runs] == [FP8, INT2]
    assert (rows.shape, rows.ndim, rows.size, len(rows)) == ((96, 64), 2, 6144, 96)
    want = np.asarray(params["embedding"])
    pieces = [
        quantize(want[:48], INT3).dequantize(),
        want[48:72].astype(np.float16).astype(np.float32),
        quantize(want[72:], INT8).dequantize(),
    ]
    whole = dequantize(stored)
    np.testing.assert_array_equal(whole["embedding"], np.concatenate(pieces))
    np.testing.assert_array_equal(whole["layers"]["norm"], params["layers"]["norm"])
    assert whole["step"] == 7
    for i, format in enumerate(PLAN_FORMATS[1]):
        one = quantize(params["layers"]["up"][i], format)
        assert isinstance(up[i], PackedArray) and up[i].format is format
        np.testing.assert_array_equal(up[i].dequantize(), one.dequantize())
        np.testing.assert_array_equal(up[i - 3].dequantize(), one.dequantize())
        np.testing.assert_array_equal(whole["layers"]["up"][i], one.dequantize())
    np.testing.assert_array_equal(rows[50], params["embedding"][50].astype("float16"))
    np.testing.assert_array_equal(rows[80].dequantize(), pieces[2][8])


def test_bytes_of_a_plan_are_those_of_its_arrays(params):
    weights = find_weights(params, parts={"embedding": 4})
    plan = PrecisionPlan(weights, PLAN_FORMATS)
    stored = plan.apply(params)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    rest = params["layers"]["norm"].nbytes + 4
    assert plan.nbytes + rest == kept
    assert stored["embedding"].nbytes + stored["layers"]["up"].nbytes == plan.nbytes
    row, layer = 24 * 64, 128 * 64
    bits = row * (2 * 3.5 + 16 + 8.5) + layer * (8.25 + 2 * 2.5)
    assert plan.nbytes * 8 == bits
    assert plan.bits_per_weight == bits / (4 * row + 3 * layer)


def test_groups_along_the_first_axis_end_with_the_parts(rng):
    """A kernel `[inputs, outputs]` in parts along the axis that groups lie along."""
    params = {"kernel": jnp.asarray(rng.standard_normal((128, 32)), jnp.float32)}
    weights = find_weights(params, axis=-2, parts={"kernel": 2})
    stored = PrecisionPlan(weights, ((INT4, INT2),)).apply(params)
    for piece, format in ((slice(64), INT4), (slice(64, 128), INT2)):
        one = quantize(params["kernel"][piece], format, axis=0).dequantize()
        np.testing.assert_array_equal(dequantize(stored)["kernel"][piece], one)


def test_plans_of_plain_formats(params):
    weights = find_weights(params)
    stored = uniform_plan(weights, BF16).apply(params)
    assert stored["layers"]["up"].dtype == jnp.bfloat16
    assert stored["step"].dtype == jnp.int32


# ---- the best plan for a budget ------------------------------------------------------

OPTIONS = st.lists(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(-5, 50)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


def cost(options, chosen):
    return sum(option[at][1] for option, at in zip(options, chosen, strict=True))


def size(options, chosen):
    return sum(option[at][0] for option, at in zip(options, chosen, strict=True))


@settings(max_examples=150, deadline=None)
@given(OPTIONS, st.integers(1, 80))
def test_choices_beside_all_there_are(options, budget):
    """Within a budget, and never worse by more than the one step that does not fit."""
    fitting = [
        every
        for every in itertools.product(*(range(len(option)) for option in options))
        if size(options, every) <= budget
    ]
    chosen = cheapest(options, budget)
    if chosen is None:
        assert not fitting
        return
    assert size(options, chosen) <= budget
    best = min(cost(options, every) for every in fitting)
    steps = [
        option[first][1] - option[last][1]
        for option in options
        for first, last in itertools.pairwise(hull(option))
    ]
    assert cost(options, chosen) <= best + max(steps, default=0)
    # With the bytes that were spent there is nothing better on the hulls.
    if spent_in_order(options, chosen):
        same = [e for e in fitting if size(options, e) <= size(options, chosen)]
        assert cost(options, chosen) <= min(cost(options, e) for e in same)


def spent_in_order(options, chosen):
    """Whether no step was passed over that takes more off for a byte than one taken."""
    taken, left = [np.inf], [0.0]
    for option, at in zip(options, chosen, strict=True):
        for first, last in itertools.pairwise(hull(option)):
            (bytes_, high), (more, low) = option[first], option[last]
            slope = (high - low) / (more - bytes_)
            (taken if option[last][0] <= option[at][0] else left).append(slope)
    return min(taken) >= max(left)


def test_steps_of_one_size_are_all_the_best(rng):
    """Parts of one size whose costs are convex: greedy choices are exact."""
    for _ in range(20):
        drops = -np.sort(-rng.random((4, 3)), axis=1)
        costs = 5 - np.cumsum(drops, axis=1)
        options = [
            [(8, 5.0), *((8 * (i + 2), c) for i, c in enumerate(row))] for row in costs
        ]
        budget = int(rng.integers(4, 16)) * 8
        every = itertools.product(range(4), repeat=4)
        best = min(cost(options, e) for e in every if size(options, e) <= budget)
        np.testing.assert_allclose(cost(options, cheapest(options, budget)), best)


def sensitivity_of(params, rng, formats=(INT2, INT3, INT4), **options):
    weights = find_weights(params, **options)
    costs = {w.name: -np.sort(-rng.random((w.parts, len(formats)))) for w in weights}
    return Sensitivity(weights, formats, costs)


def test_a_plan_within_a_budget(params, rng):
    found = sensitivity_of(params, rng, parts={"embedding": 4})
    rest = params["layers"]["norm"].nbytes + 4
    low, mid, high = (uniform_plan(found.weights, f).nbytes for f in found.formats)
    assert make_plan(params, found, low + rest) == uniform_plan(found.weights, INT2)
    assert make_plan(params, found, high + rest) == uniform_plan(found.weights, INT4)
    plan = make_plan(params, found, mid + rest)
    assert low < plan.nbytes <= mid
    assert found.of(plan) <= found.of(uniform_plan(found.weights, INT3))
    shapes = jax.eval_shape(lambda: params)
    assert make_plan(shapes, found, mid + rest) == plan
    fewer = make_plan(params, found, high + rest, [INT3, INT2])
    assert fewer == uniform_plan(found.weights, INT3)


def test_bits_go_where_they_count(params):
    weights = find_weights(params)
    costs = {"embedding": np.zeros((1, 3)), "layers.up": np.ones((3, 3))}
    costs["layers.up"][1] = 9, 3, 1
    found = Sensitivity(weights, (INT2, INT3, INT4), costs)
    plan = make_plan(params, found, 10**6)
    assert plan.formats == ((INT2,), (INT2, INT4, INT2))


# ---- what is refused -----------------------------------------------------------------

MATRIX = jnp.ones((4, 64))
FIND = "find_weights"
BAD_WEIGHTS = {
    "no weights": (
        lambda: find_weights({"a": jnp.ones(3)}),
        ValueError,
        "a float32[3]",
    ),
    "one name": (
        lambda: find_weights({"a.b": MATRIX, "a": {"b": MATRIX}}),
        ValueError,
        "different names|a.b|dots",
    ),
    "nothing": (lambda: find_weights({}), ValueError, "no arrays"),
    "integers": (
        lambda: find_weights({"a": jnp.ones((4, 64), int)}, is_weight=lambda *_: True),
        TypeError,
        "a must be bfloat16|int32[4, 64]|is_weight",
    ),
    "groups": (
        lambda: find_weights({"a": jnp.ones((4, 96))}),
        ValueError,
        "a must have a multiple of 64 (group_size)|[4, 96]",
    ),
    "groups of parts": (
        lambda: find_weights({"a": jnp.ones((96, 4))}, axis=0, parts={"a": 3}),
        ValueError,
        "a part of a (of 3) must have a multiple of 64|[32, 4]",
    ),
    "parts": (
        lambda: find_weights({"a": MATRIX}, parts={"a": 3}),
        ValueError,
        "parts of a must divide its first axis, 4|got 3",
    ),
    "no such part": (
        lambda: find_weights({"a": MATRIX}, parts={"b": 2}),
        ValueError,
        "parts must name weights, a, got b",
    ),
    "axis": (
        lambda: find_weights({"a": MATRIX}, axis=2),
        ValueError,
        "axis must be one of the 2 axes of a|got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights_are_errors(name):
    call, error, words = BAD_WEIGHTS[name]
    check(FIND, error, words, call)


def test_bad_plans_are_errors(params, rng):
    found = sensitivity_of(params, rng)
    least = (
        uniform_plan(found.weights, INT2).nbytes + params["layers"]["norm"].nbytes + 4
    )
    where = "make_plan"
    check(
        where,
        ValueError,
        f"at least {least}|INT2, INT3, INT4|got {least - 1}",
        lambda: make_plan(params, found, least - 1),
    )
    assert make_plan(params, found, least).nbytes < least
    refused = {
        "float": (TypeError, "budget_bytes must be an integer|1.5", found, 1.5, None),
        "name": (TypeError, "PrecisionFormat.INT2|'int2'", found, least, ["int2"]),
        "format": (ValueError, "PrecisionFormat.INT3|INT8", found, least, [INT8]),
        "none": (TypeError, "formats must be a sequence|[]", found, least, []),
        "twice": (ValueError, "differ", found, least, [INT2, INT2]),
        "sensitivity": (TypeError, "Sensitivity|dict", {}, least, None),
    }
    for error, words, sensitivity, budget, formats in refused.values():
        check(
            where,
            error,
            words,
            lambda a=sensitivity, b=budget, c=formats: make_plan(params, a, b, c),
        )
    plan = uniform_plan(found.weights, INT3)
    without = {"embedding": params["embedding"]}
    other = params | {"embedding": jnp.ones((8, 64))}
    for wrong, words in (
        (without, "layers.up|nothing of that name"),
        (other, "embedding in the shape [96, 64]|float32[8, 64]"),
    ):
        check("PrecisionPlan", ValueError, words, lambda p=wrong: plan.apply(p))
    with pytest.raises(KeyError, match="no weight 'up', but embedding"):
        plan["up"]
    check("uniform_plan", TypeError, "INT3", lambda: uniform_plan((), "int3"))
    mixed = dataclasses.replace(plan, formats=((INT2,), (INT2, INT3, INT2)))
    stored = mixed.apply(params)["layers"]["up"]
    check("MixedArray", IndexError, "from -3 to 2|got 3", lambda: stored[3])
