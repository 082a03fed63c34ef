"""What programs of attention over devices send, in which dtype, and in which order.

Programs are read as jaxprs, which say what depends on what, and as compiled, which say
what is left of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import BF16, Call, jit
from context_calls import (
    F32,
    LAYOUTS,
    Cut,
    attend_over,
    by_strategy,
    documents,
    inputs,
    laid_out,
    simple,
    with_gradients,
    zigzag_order,
)
from jax.extend.core import Literal, jaxprs_in_params
from test_strategy import collectives, trace

from jax_kvblock.parallel import (
    pad_documents,
    to_zigzag,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

# ---- a program as steps --------------------------------------------------------------

FORWARD, BACKWARD = "kvblock_attention_forward", "kvblock_attention_backward"
# The same with what the calls before gave, by the names of those without.
JOINED = {
    "kvblock_attention_joined": FORWARD,
    "kvblock_attention_backward_added": BACKWARD,
}
SENDS = ("ppermute", "all_gather", "all_to_all", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of attention, or something that travels.

    Attributes:
      name: of the primitive.
      dtype, shape: of its first operand.
      needs: the places of all steps that it waits for.
      holds: of these, the ones whose results are in what it is given.
      pairs: who sends to whom.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    needs: frozenset[int]
    holds: frozenset[int]
    pairs: Any


def is_step(name: str) -> bool:
    return name in (*SENDS, FORWARD, BACKWARD) or name.startswith(("psum", "pm"))


Behind = tuple[frozenset[int], frozenset[int]]  # what a value needs and holds
NOTHING: Behind = (frozenset(), frozenset())
ORDERS = ("optimization_barrier", "kvblock_after")  # operands come out as they are


def _joined(behind: list[Behind]) -> Behind:
    needs, holds = (
        frozenset().union(*each) for each in zip(NOTHING, *behind, strict=True)
    )
    return needs, holds


def _walk(jaxpr: Any, given: list[Behind], found: list[Step]) -> list[Behind]:
    """Adds a jaxpr's steps; gives what is behind its results."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def behind(x: Any) -> Behind:
        return NOTHING if isinstance(x, Literal) else known.get(x, NOTHING)

    for equation in jaxpr.eqns:
        each = [behind(x) for x in equation.invars]
        needs, holds = _joined(each)
        count = len(equation.outvars)
        name, inner = equation.primitive.name, [*jaxprs_in_params(equation.params)]
        name = JOINED.get(name, name)
        made = [(needs, holds)] * count
        if is_step(name):
            first = equation.invars[0].aval
            pairs = equation.params.get("perm")
            found.append(Step(name, first.dtype, first.shape, needs, holds, pairs))
            here = {len(found) - 1}
            made = [(needs | here, holds | here)] * count
        elif name in ORDERS:
            made = [(needs, each[i][1]) for i in range(count)]
        elif len(inner) == 1 and len(inner[0].invars) == len(each):
            made = _walk(inner[0], each, found)
        else:  # loops and branches have none of the steps
            for other in inner:
                before = len(found)
                _walk(other, [NOTHING] * len(other.invars), found)
                assert len(found) == before
        known |= zip(equation.outvars, made, strict=True)
    return [behind(x) for x in jaxpr.outvars]


def steps_in(made: Any) -> list[Step]:
    """In the order in which they were traced."""
    found: list[Step] = []
    _walk(made.jaxpr, [NOTHING] * len(made.jaxpr.invars), found)
    return found


def steps_of(call: Call, cut: Cut, gradients: bool = False) -> list[Step]:
    there = laid_out(call, cut)
    f, args = attend_over(there, cut), inputs(there)
    if gradients:
        return steps_in(jax.make_jaxpr(with_gradients(f))(*args))
    return steps_in(jax.make_jaxpr(f)(*args[:2]))


def sent(steps: list[Step]) -> Counter[Any]:
    """What travels: by which primitive, in which dtype, how wide in the last dim."""
    return Counter(
        (step.name, jnp.dtype(step.dtype).name, step.shape[-1])
        for step in steps
        if step.name not in (FORWARD, BACKWARD)
    )


def calls_of(steps: list[Step], name: str) -> list[int]:
    return [i for i, step in enumerate(steps) if step.name == name]


def compiled(f: Any, *args: Any) -> Counter[str]:
    """The collectives of a compiled program."""
    text = jit(f).lower(*args).compile().as_text()
    kinds = r"all-gather|all-to-all|collective-\w+|all-reduce|reduce-scatter"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


def compiled_both(call: Call, cut: Cut) -> tuple[Counter[str], Counter[str]]:
    """Those of the forward pass, and those of the backward pass."""
    there = laid_out(call, cut)
    f, (arrays, operands, cotangents) = attend_over(there, cut), inputs(there)
    pull = jax.eval_shape(lambda x: jax.vjp(lambda x: f(x, operands), x)[1], arrays)
    backward = compiled(lambda pull, x: pull(x), pull, cotangents)
    return compiled(f, arrays, operands), backward


def plain(rng: np.random.Generator, **changes: Any) -> Call:
    """A causal call in bfloat16, K and V of 8 and 24 wide; nothing else travels."""
    return simple(rng, BF16, value_dim=24, sinks=None, **changes)


def packed(rng: np.random.Generator, **changes: Any) -> Call:
    none = {"sinks": None, "q_lens": None, "kv_lens": None}
    return documents(rng, BF16, value_dim=24, **(none | changes))


by_kind = pytest.mark.parametrize("kind", [plain, packed])
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---- what travels --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@by_layout
@by_kind
def test_a_ring_sends_keys_and_values_to_the_next_device(rng, kind, layout, size):
    """One time fewer than there are devices, and nothing else."""
    changes = {"cu_seqlens": np.int32([0, 24, 48])} if kind is packed else {}
    call = kind(rng, q_len=48, kv_len=48, **changes)
    found = steps_of(call, Cut("ring", layout, size))
    want = {("ppermute", "bfloat16", width): size - 1 for width in (8, 24)}
    assert sent(found) == Counter({n: x for n, x in want.items() if x})
    ring = {(i, (i + 1) % size) for i in range(size)}
    assert all({*step.pairs} == ring for step in found if step.pairs is not None)
    assert len(calls_of(found, FORWARD)) >= size


def test_a_compiled_ring_sends_as_often(rng):
    """Backward as often again, and the gradients of both."""
    forward, backward = compiled_both(plain(rng), Cut("ring"))
    assert forward == {"collective-permute": 2 * 3}
    assert backward == {"collective-permute": 4 * 3}


def steps_seen(window: Any, layout: str, causal: bool) -> int:
    """By how many steps of a ring of four some device sees a key, by their positions.

    There are 32 rows, 8 a device.
    """
    where = zigzag_order(32, 4) if layout == "zigzag" else np.arange(32)
    rows, keys = where.reshape(4, 1, 8, 1), where.reshape(1, 4, 1, 8)
    left, right = window
    seen = np.ones((4, 4, 8, 8), bool)
    if left is not None:
        seen &= keys >= rows - left
    if right is not None:
        seen &= keys <= rows + right
    if causal:
        seen &= keys <= rows
    of, at = np.nonzero(seen.any((2, 3)))
    return len({*((of - at) % 4)})


LEFT = (0, 1, 4, 7, 8, 9, 12, 16, 17, 23, 24, 25, None)
WINDOWS = [
    *(((left, None), True) for left in LEFT),
    *((window, False) for window in ((1, 1), (8, 8), (0, 9), (None, 8), (30, 1))),
]


@pytest.mark.parametrize(("window", "causal"), WINDOWS, ids=str)
@by_layout
def test_windows_shorten_a_ring(rng, layout, window, causal):
    """Shards that no row of any device sees are left out."""
    call = plain(rng, window=window, causal=causal)
    found = sent(steps_of(call, Cut("ring", layout)))
    times = steps_seen(window, layout, causal) - 1
    assert found == Counter({("ppermute", "bfloat16", x): times for x in (8, 24)}) - (
        Counter()
    )


def test_how_often_windows_let_a_ring_send():
    """The count above, by hand: a device sees so many rows back, and 8 are its own."""
    found = {x: steps_seen((x, None), "contiguous", True) - 1 for x in LEFT[:-1]}
    assert [*found.values()] == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    # The last row of chunk 0 and the first of chunk 1 are neighbours: devices 0 and 1
    # send to each other, one step on or three; chunk 4 and chunk 3 are of one device.
    found = [steps_seen((x, None), "zigzag", True) - 1 for x in (0, 1, 4, 5)]
    assert found == [0, 2, 2, 3]


@pytest.mark.parametrize(("window", "causal"), WINDOWS, ids=str)
@by_layout
def test_windows_shorten_a_ring_of_documents(rng, layout, window, causal):
    """As if there were one document alone; in zigzag all shards may come."""
    cu = np.int32([0, 11, 32] if layout == "contiguous" else [0, 8, 32])
    sizes = {"q_len": 32, "kv_len": 32, "cu_seqlens": cu}
    call = packed(rng, window=window, causal=causal, **sizes)
    found = sent(steps_of(call, Cut("ring", layout)))
    times = {found["ppermute", "bfloat16", x] for x in (8, 24)}
    most = 3 if layout == "zigzag" else steps_seen(window, layout, causal) - 1
    assert len(times) == 1 and times <= {most, steps_seen(window, layout, causal) - 1}


def test_documents_of_other_keys_than_queries_keep_the_whole_ring(rng):
    """Where rows say nothing of positions: the last queries may see the first keys."""
    cu = np.int32([0, 0, 32]), np.int32([0, 24, 32])
    sizes = {"q_len": 32, "kv_len": 32, "cu_seqlens": cu}
    found = sent(steps_of(packed(rng, window=(2, 0), **sizes), Cut("ring", LAYOUTS[1])))
    assert found == {("ppermute", "bfloat16", x): 3 for x in (8, 24)}


def is_gradient(steps: list[Step], step: Step) -> bool:
    return any(steps[i].name == BACKWARD for i in step.holds)


@pytest.mark.parametrize("window", [None, (13, None)], ids=str)
@by_layout
@by_kind
def test_a_ring_sends_sums_of_gradients_in_float32(rng, kind, layout, window):
    """Keys and values go round again in bfloat16, and their gradients beside them.

    What one call alone gives may travel in the dtype that the call gives it in.
    """
    cut, call = Cut("ring", layout), kind(rng, window=window)
    keys = sent(steps_of(call, cut))
    steps = steps_of(call, cut, gradients=True)
    messages = [step for step in steps if step.name == "ppermute"]
    gradients = [step for step in messages if is_gradient(steps, step)]
    assert sent([x for x in messages if x not in gradients]) == keys + keys
    assert Counter(x.shape for x in gradients) == Counter(
        step.shape for step in steps_of(call, cut) if step.name == "ppermute"
    )
    for step in gradients:
        parts = [i for i in step.holds if steps[i].name == BACKWARD]
        assert step.dtype == F32 or (len(parts) == 1 and step.dtype == BF16)
    assert len(gradients) <= 2 or gradients[-1].dtype == F32


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_keys_and_values_of_one_shape_may_travel_together(rng, strategy):
    """Then as much travels as if they did not."""
    for width in (8, 24):
        call = simple(rng, BF16, value_dim=width, sinks=None)
        steps = steps_of(call, Cut(strategy))
        size = sum(
            np.prod(x.shape) * (1 if strategy == "ring" else 3)
            for x in steps
            if x.name in SENDS
        )
        assert size == 3 * (2 * 8 * 2) * (8 + width)


@by_layout
@by_kind
def test_gathered_gradients_are_summed_in_float32(rng, kind, layout):
    """Gathered forward and again backward; every device gets its own rows' sum."""
    cut, call = Cut("all_gather", layout), kind(rng)
    keys = Counter({("all_gather", "bfloat16", x): 1 for x in (8, 24)})
    sums = Counter({("reduce_scatter", "float32", x): 1 for x in (8, 24)})
    assert sent(steps_of(call, cut)) == keys
    assert sent(steps_of(call, cut, gradients=True)) == keys + keys + sums


@by_kind
def test_ulysses_exchanges_and_does_nothing_else(rng, kind):
    """q, k, v, out and lse, and backward their gradients in the same dtypes."""
    cut, call = Cut("ulysses"), kind(rng)
    narrow = {("all_to_all", "bfloat16", 8): 2, ("all_to_all", "bfloat16", 24): 2}
    there = Counter(narrow | {("all_to_all", "float32", 1): 1})
    assert sent(steps_of(call, cut)) == there
    assert sent(steps_of(call, cut, gradients=True)) == there + there
    assert compiled_both(call, cut) == ({"all-to-all": 5}, {"all-to-all": 5})


@by_strategy
def test_options_that_are_known_everywhere_send_nothing(rng, strategy):
    """Lengths, boundaries and sinks are on every device; only out and lse come back."""
    cut, bare = Cut(strategy), packed(rng)
    more = documents(rng, BF16, value_dim=24)
    assert sent(steps_of(more, cut)) == sent(steps_of(bare, cut))


def test_steps_are_all_that_travels(rng):
    """The steps are as many as the collectives that another search finds."""
    for strategy in ("ring", "all_gather", "ulysses"):
        dims = (2, 8, 8, 4, 2, 8, 24)
        found = trace(strategy, dims, causal=True)
        steps = steps_of(plain(rng), Cut(strategy))
        there = Counter(s.name for s in steps if s.name in SENDS)
        names = Counter({name: 0 for name in there})
        for (name, *_), times in found.items():
            names[name] += times
        assert there == names
        whole = jax.make_jaxpr(attend_over(laid_out(plain(rng), c := Cut(strategy)), c))
        args = inputs(laid_out(plain(rng), c))[:2]
        assert collectives(whole(*args).jaxpr).total() == there.total()


# ---- what waits for what -------------------------------------------------------------


def waits_for(steps: list[Step], places: list[int], among: list[int]) -> list[set[int]]:
    """For each of these steps, which of the others it needs, by their numbers."""
    return [{among.index(x) for x in steps[i].needs if x in among} for i in places]


def once(found: list[Any], count: int) -> list[Any]:
    """Of messages, two each, or one where keys and values travel together."""
    each = len(found) // count
    assert each in (1, 2) and len(found) == count * each
    assert all(found[i] == found[i // each * each] for i in range(len(found)))
    return found[::each]


def alike(rng: np.random.Generator) -> Call:
    """K and V of one shape."""
    return simple(rng, BF16, sinks=None)


by_message = pytest.mark.parametrize("kind", [plain, packed, alike])


@by_layout
@by_message
def test_a_shard_arrives_under_the_work_on_the_one_before(rng, kind, layout):
    """The ring's order, forward, with a call of attention a step.

    Message m brings the shard of step m + 1. It is under way while step m is computed:
    neither waits for the other. It does wait for the work before, so that no more than
    two shards are there.
    """
    steps = steps_of(kind(rng), Cut("ring", layout))
    messages, calls = calls_of(steps, "ppermute"), calls_of(steps, FORWARD)
    assert len(calls) == 4
    works = once(waits_for(steps, messages, calls), 3)
    assert works == [set(), {0}, {0, 1}]  # message m: never that of step m
    each = len(messages) // 3
    arrived = [{i // each for i in x} for x in waits_for(steps, calls, messages)]
    assert arrived == [set(), {0}, {0, 1}, {0, 1, 2}]


@by_layout
@by_message
def test_gradients_go_home_under_the_work_on_ones_own_keys(rng, kind, layout):
    """The ring's order, backward.

    Keys and values come as they do forward, the first ones before anything is done, the
    second ones not before the backward pass begins. Gradients follow them, a step
    behind, and are on their way while the next shard is worked on. A device's own keys
    come last, under the gradients' last way.
    """
    steps = steps_of(kind(rng), Cut("ring", layout), gradients=True)
    calls, last = calls_of(steps, BACKWARD), calls_of(steps, FORWARD)[-1]
    sends = [i for i in calls_of(steps, "ppermute") if i > last]
    gradients = [i for i in sends if is_gradient(steps, steps[i])]
    keys = [i for i in sends if i not in gradients]
    assert len(calls) == 4
    assert once(waits_for(steps, keys, calls), 3) == [set(), set(), {0}]
    forward = once(waits_for(steps, keys, calls_of(steps, FORWARD)), 3)
    assert forward[:2] == [set(), {0, 1, 2, 3}]  # the second one, not before its turn
    homeward = once(waits_for(steps, gradients, calls), 3)
    assert homeward == [{0}, {0, 1}, {0, 1, 2}]
    # Calls wait for their shards, and for none of the gradients on their way.
    each = len(keys) // 3
    arrived = [{i // each for i in x} for x in waits_for(steps, calls, keys)]
    assert arrived == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2}]
    assert waits_for(steps, calls, gradients) == [set()] * 4
    assert 2 in waits_for(steps, calls, calls)[3]


@pytest.mark.parametrize("gradients", [False, True])
@by_message
def test_vmap_keeps_the_order(rng, kind, gradients):
    """Two calls at once: every step waits for the same ones as of one call alone."""
    call = laid_out(kind(rng), cut := Cut("ring"))
    f = attend_over(call, cut)
    f, args = (with_gradients(f), 3) if gradients else (f, 2)
    given = inputs(call)[:args]
    many = jax.tree.map(lambda x: jnp.stack([x, x]), given)
    alone, together = (
        steps_in(jax.make_jaxpr(g)(*x)) for g, x in ((f, given), (jax.vmap(f), many))
    )
    for one, both in zip(alone, together, strict=True):
        assert (one.name, one.needs, one.holds) == (both.name, both.needs, both.holds)


@by_kind
def test_gathered_keys_arrive_under_the_work_on_ones_own(rng, kind):
    """Backward, the sums go home under it."""
    steps = steps_of(kind(rng), Cut("all_gather"), gradients=True)
    gathers, sums = (calls_of(steps, x) for x in ("all_gather", "reduce_scatter"))
    forward, backward = (calls_of(steps, x) for x in (FORWARD, BACKWARD))
    assert len(forward) == len(backward) == 2 and len(gathers) == 4 and len(sums) == 2
    assert waits_for(steps, gathers[:2], forward) == [set(), set()]
    assert waits_for(steps, forward, gathers) == [set(), {0, 1}]
    assert waits_for(steps, gathers[2:], backward) == [set(), set()]
    assert waits_for(steps, sums, backward) == [{0}, {0}]
    assert waits_for(steps, backward, sums) == [set(), set()]
    assert waits_for(steps, backward, backward) == [set(), {0}]  # own keys come last


# ---- even work -----------------------------------------------------------------------

RAGGED = [517, 3, 1, 260, 41, 0, 2100, 88, 129]  # rows of documents
BOUNDS = np.cumsum([0, *RAGGED]).astype(np.int32)


def pairs_of(documents: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """[devices, devices]: how many keys of one rows of the other see, causally.

    Rows without a document see nothing, and are not seen.
    """
    same = (documents[:, None] == documents) & (documents >= 0)[:, None]
    seen = same & (places[None] <= places[:, None])
    rows = len(places) // size
    return seen.reshape(size, rows, size, rows).sum((1, 3))


def ragged(size: int, layout: str) -> np.ndarray:
    owner = np.repeat(np.arange(len(RAGGED)), RAGGED)
    place = np.arange(len(owner)) - BOUNDS[owner]
    there = jnp.stack([jnp.asarray(owner + 1), jnp.asarray(place)], 1)
    padded, cu = pad_documents(there, BOUNDS, size)
    if layout == "zigzag":
        padded = to_zigzag(padded, size, axis=0, cu_seqlens=cu)
    owner, place = np.asarray(padded).T
    return pairs_of(owner - 1, place, size)


def unevenness(work: np.ndarray) -> float:
    return work.max() / work.mean()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ragged_documents_are_even_work(size):
    """Each device sees as many pairs as the others; each at every step of a ring.

    All of them together are those of the documents, which contiguous rows share badly.
    """
    found, device = ragged(size, "zigzag"), np.arange(size)
    assert found.sum() == sum(n * (n + 1) // 2 for n in RAGGED)
    assert unevenness(found.sum(1)) <= 1.02
    for step in range(size):
        assert unevenness(found[device, (device - step) % size]) <= 1.05
    assert unevenness(ragged(size, "contiguous").sum(1)) > 1.2
