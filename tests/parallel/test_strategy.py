"""What strategies cost by the model, what `auto` takes, and what a call says of itself.

The model beside what was measured: test_strategy_measured.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from strategy_work import causal

from jax_kvblock.parallel import arguments, context_parallel_attention
from jax_kvblock.parallel.strategy import (
    H200,
    STRATEGIES,
    Work,
    choose,
    groups,
    largest_group,
    seconds,
    serves_heads,
)

often = settings(max_examples=150, deadline=None, derandomize=True, database=None)


# ---- by hand -------------------------------------------------------------------------

# Four devices of 32,768 rows: the sequence has 131,072, and a row sees half of them.
FLOPS = 4 * 128 * 32 * 32_768 * 65_536  # two products of two operations
KEYS = 32_768 * 8 * (128 + 128) * 2  # bytes of a device's keys and values
ROWS = 32_768 * 32 * 128 * 2  # of its queries; of its outputs as many
ALONE = FLOPS / 725e12
CALL = 32_768 * 32 * 0.33e-9  # what each call of these rows takes beside
ASKED, MEMORY = 15e-6, 4.3e12
GATHERED = 46e-6  # a shard


def passes(parts: int) -> int:
    """How often merging more than eight parts moves as many bytes as one part has.

    Two are read. What is not the last sum goes out in float32, twice a part's bytes,
    and comes back for the next part: 38 for nine parts.
    """
    moved, held = 0, 1
    for part in range(1, parts):
        moved += held + 1  # the sum so far, and the next part
        held = 2 if part < parts - 1 else 1
        moved += held
    return moved


def close(got: float, want: float) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_a_ring_that_waits_for_nothing():
    """Four calls of a quarter each: shards come under them, in a thirtieth."""
    assert KEYS / 286e9 + ASKED < ALONE / 4 / 20
    close(seconds(causal(4, 32_768), "ring"), ALONE + 4 * CALL)


@pytest.mark.parametrize("field", ["head_dim", "value_dim"])
def test_parts_of_wide_heads_merge_in_passes(field):
    """Two are read and one is written, in 16 bits."""
    work = dataclasses.replace(causal(4, 32_768), **{field: 136})
    alone = work.compute(H200) + 4 * CALL
    merged = 3 * 3 * work.queries / 2 / MEMORY
    close(seconds(work, "ring"), alone + merged)


def test_many_parts_merge_in_float32():
    assert passes(9) == 38
    rows = 32_768 * 32 * 128 * 2
    for parts, merged in ((8, 0), (9, passes(9) * rows / MEMORY)):
        work = causal(parts, 32_768)
        want = work.compute(H200) + parts * CALL + merged
        close(seconds(work, "ring"), want)


def test_a_ring_that_waits():
    """256 rows a device: each of three shards takes longer than a call."""
    work = causal(4, 256)
    step = 4 * 128 * 32 * 256 * 512 / 725e12 / 4 + 256 * 32 * 0.33e-9
    way = 256 * 8 * 256 * 2 / 1e9 + ASKED  # at 1 GB/s
    assert way > 10 * step
    slow = dataclasses.replace(H200, permute=1e9)
    close(seconds(work, "ring", 1, slow), step + 3 * way)


def test_gathered_keys_come_under_own_ones():
    """Three shards, under a quarter of the work; then all are laid in order."""
    rest = 3 * ALONE / 4 + CALL + 2 * 4 * KEYS / MEMORY + 3 * GATHERED
    assert 3 * KEYS / 241e9 + ASKED < ALONE / 4
    close(seconds(causal(4, 32_768), "all_gather"), ALONE / 4 + CALL + rest)
    slow = dataclasses.replace(H200, gather=1e9)
    come = 3 * KEYS / 1e9 + ASKED
    close(seconds(causal(4, 32_768), "all_gather", 1, slow), come + rest)


def test_keys_that_engines_send():
    """Three shards one after the other, under a quarter of the work; three in order."""
    work = dataclasses.replace(causal(4, 32_768), direct=True)
    assert 3 * (KEYS / 286e9 + ASKED) < ALONE / 4
    rest = 3 * ALONE / 4 + CALL + 2 * 3 * KEYS / MEMORY
    close(seconds(work, "all_gather"), ALONE / 4 + CALL + rest)
    slow = dataclasses.replace(H200, permute=1e9)
    come = 3 * (KEYS / 1e9 + ASKED)
    close(seconds(work, "all_gather", 1, slow), come + rest)
    free = dataclasses.replace(H200, gather=1e9, gathered=1.0)  # not its rates
    close(seconds(work, "all_gather", 1, free), seconds(work, "all_gather"))
    close(seconds(work, "ring"), seconds(causal(4, 32_768), "ring"))


def test_heads_exchanged_for_rows():
    """q, k, v and out, three quarters of each, and nothing under it; one call."""
    moved = 2 * ROWS + KEYS
    want = ALONE + CALL + 3 / 4 * moved / 247e9 + 2 * moved / MEMORY + 2 * ASKED
    close(seconds(causal(4, 32_768), "ulysses", 4), want)


def test_one_kv_head_is_repeated():
    """Each of four devices gets it, so that four times as much travels."""
    keys = KEYS // 8
    moved = 2 * ROWS + 4 * keys
    want = ALONE + CALL + 3 / 4 * moved / 247e9 + 2 * moved / MEMORY + 2 * ASKED
    close(seconds(causal(4, 32_768, 32, 1), "ulysses", 4), want)


def test_a_ring_of_groups():
    """Heads go half of the way, and a ring of two has two calls."""
    moved = 2 * ROWS + KEYS
    want = moved / 2 / 247e9 + 2 * moved / MEMORY + 2 * ASKED
    want += ALONE + 2 * CALL
    assert KEYS / 286e9 + ASKED < ALONE / 2
    close(seconds(causal(4, 32_768), "ulysses_ring", 2), want)
    slow = dataclasses.replace(H200, permute=1e9)
    want += KEYS / 1e9 + ASKED - ALONE / 2 - CALL
    close(seconds(causal(4, 32_768), "ulysses_ring", 2, slow), want)


def test_one_device_has_its_call_alone():
    close(seconds(causal(1, 32_768), "ring"), ALONE / 4 + CALL)


def test_bytes_are_those_of_what_is_there():
    """Keys and rows of different numbers, dims and sizes of elements."""
    work = Work(4, 100, 300, 6, 2, 64, 32, 4, 50.0, 4)
    assert work.shard == 300 * 2 * (64 + 32) * 4
    assert work.queries == 100 * 6 * (64 + 32) * 4
    close(work.compute(H200), 100 * 50 * 6 * 2 * (64 + 32) / 725e12)


# ---- how it grows --------------------------------------------------------------------


@st.composite
def works(draw: Any) -> Work:
    size = draw(st.sampled_from([1, 2, 3, 4, 8, 64]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    heads = kv_heads * draw(st.integers(1, 8))
    rows, keys = (draw(st.integers(1, 1 << 17)) for _ in range(2))
    seen = draw(st.floats(1, size * keys))
    reach = draw(st.integers(1, size))
    return Work(size, rows, keys, heads, kv_heads, 128, 128, 2, seen, reach)


def ways(work: Work) -> list[tuple[str, int]]:
    """Every strategy that serves these heads, with its groups, found by trial."""
    found = [("ring", 1)] + [("all_gather", 1)] * (work.size > 1)
    for g in range(2, work.size + 1):
        whole = work.heads % g == 0 and work.size % g == 0
        if whole and (work.kv_heads % g == 0 or g % work.kv_heads == 0):
            found.append(("ulysses" if g == work.size else "ulysses_ring", g))
    return found


@pytest.mark.parametrize("name", ["rows", "keys", "seen", "reach", "heads", "itemsize"])
def test_more_to_do_takes_longer(name):
    """In tokens, in how far a window sees, in heads and bytes."""

    @often
    @given(works(), st.sampled_from([1, 2, 7]))
    def check(work, more):
        value = getattr(work, name)
        value = value * (1 + more) if name == "heads" else value + more
        assume(name != "reach" or value <= work.size)
        larger = dataclasses.replace(work, **{name: value})
        for way in ways(work):
            longer = seconds(larger, *way) - seconds(work, *way)
            assert longer >= -1e-12 * seconds(work, *way), way
            if name in ("rows", "seen", "heads"):
                assert longer > 0, way

    check()


RATES = [field.name for field in dataclasses.fields(H200)]
SECONDS = ("row", "launch", "gathered")
# Who feels a rate, where it is not everybody.
FEEL = {
    "permute": ("ring", "ulysses_ring"),
    "gather": ("all_gather",),
    "gathered": ("all_gather",),
    "exchange": ("ulysses", "ulysses_ring"),
    "memory": ("all_gather", "ulysses", "ulysses_ring"),
}


@pytest.mark.parametrize("name", RATES)
def test_slower_rates_take_longer(name):
    """Ten thousand times as slow, whoever feels it takes longer, nobody else."""
    times = 1e4 if name in SECONDS else 1e-4
    slow = dataclasses.replace(H200, **{name: getattr(H200, name) * times})
    work = causal(8, 4096, 32, 4)
    for way in ways(work):
        before, after = seconds(work, *way), seconds(work, *way, slow)
        feels = way[0] in FEEL.get(name, STRATEGIES)
        assert after > 2 * before if feels else after == before, way

    @often
    @given(works(), st.floats(1, 100))
    def check(work, times):
        times = times if name in SECONDS else 1 / times
        slow = dataclasses.replace(H200, **{name: getattr(H200, name) * times})
        for way in ways(work):
            assert seconds(work, *way, slow) >= seconds(work, *way) * (1 - 1e-12)

    check()


# ---- the choice ----------------------------------------------------------------------


@often
@given(works())
@example(causal(1, 1))
@example(causal(64, 1, 8, 1))
def test_the_least_of_all_that_fit(work):
    """Keys are gathered where all take no more than queries and outputs do.

    And where that saves a hundredth of a ring's time: it takes more memory.
    """
    keys = work.size * work.keys * work.kv_heads
    gathered, ring = seconds(work, "all_gather"), seconds(work, "ring")
    fits = keys <= work.rows * work.heads and gathered < 0.99 * ring
    fit = [way for way in ways(work) if way[0] != "all_gather" or fits]
    got = choose(work)
    assert got in fit
    assert seconds(work, *got) == min(seconds(work, *way) for way in fit)


@often
@given(works())
def test_groups(work):
    """Of devices that can have whole heads; the largest one with KV heads of its own.

    It leaves a ring of at least two where any does.
    """
    want = [g for name, g in ways(work) if name.startswith("ulysses")]
    assert list(groups(work)) == [1, *want]
    assert all(serves_heads(work.heads, work.kv_heads, g) for g in want)
    own = [g for g in (1, *want) if work.kv_heads % g == 0]
    smaller = [g for g in own if g < work.size]
    assert largest_group(work) == max(smaller or own)


def sent(work: Work) -> Work:
    return dataclasses.replace(work, direct=True)


# Where gathering costs no more than its way.
FREE = dataclasses.replace(H200, gathered=0)


@pytest.mark.parametrize(
    ("work", "want", "free"),
    [
        # Long sequences hide what travels, and nothing is laid in order.
        (causal(4, 65_536), ("ring", 1), ("ring", 1)),
        # Shorter ones: own keys come first, and two calls are few.
        (causal(4, 8192), ("ring", 1), ("all_gather", 1)),
        # Many parts are merged in passes: a ring of few groups, or two calls.
        (causal(16, 8192, 32, 1), ("ulysses_ring", 8), ("all_gather", 1)),
        # Keys that take more memory than queries and outputs come by.
        (causal(4, 65_536, 8, 8), ("ring", 1), ("ring", 1)),
        (causal(4, 65_536, 16, 8), ("ring", 1), ("ring", 1)),
        (causal(4, 4096, 36, 9), ("ring", 1), ("all_gather", 1)),
        (causal(4, 8192, 27, 9), ("ring", 1), ("ring", 1)),
        # Short ones wait for each collective: three in a ring, two, or one.
        (causal(4, 64), ("ulysses", 4), ("all_gather", 1)),
        (causal(2, 64), ("ring", 1), ("ring", 1)),
        # Heads that do not divide among all are exchanged by fewer, or by none.
        (causal(4, 512, 6, 6), ("ulysses_ring", 2), ("ulysses_ring", 2)),
        (causal(4, 512, 7, 7), ("ring", 1), ("ring", 1)),
        (causal(4, 64, 3, 1), ("ring", 1), ("ring", 1)),
        # A window: two shards beside one's own; others never come.
        (
            dataclasses.replace(causal(8, 8192), seen=1024, reach=2),
            ("ring", 1),
            ("ring", 1),
        ),
        # What engines send costs no more than its way, and laying it in order; where
        # that saves less than a hundredth, a ring needs less memory.
        (sent(causal(4, 8192)), ("all_gather", 1), ("all_gather", 1)),
        (sent(causal(4, 65_536)), ("ring", 1), ("ring", 1)),
        (sent(causal(2, 8192)), ("ring", 1), ("ring", 1)),
        (sent(causal(8, 8192, 64)), ("all_gather", 1), ("all_gather", 1)),
        (sent(causal(4, 8192, 8, 8)), ("ring", 1), ("ring", 1)),
        # One device is a ring of one.
        (causal(1, 4096), ("ring", 1), ("ring", 1)),
    ],
    ids=str,
)
def test_choices(work, want, free):
    assert choose(work) == want
    assert choose(work, FREE) == free


def test_choices_by_rates():
    """What travels slowly is left alone."""
    work = causal(8, 1024, 64, 8)
    takes = {"permute": "ring", "gather": "all_gather", "exchange": "ulysses"}
    for rate, name in takes.items():
        slow = {r: 1e6 for r in takes if r != rate}
        assert choose(work, dataclasses.replace(H200, **slow))[0] == name


# ---- what a call says of itself ------------------------------------------------------


COLLECTIVES = ("ppermute", "all_gather", "all_to_all")


def collectives(jaxpr: Any) -> Counter[Any]:
    """By name, among how many groups, and a device's shape."""
    found: Counter[Any] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in COLLECTIVES:
            among = len(equation.params.get("axis_index_groups") or "x")
            found[equation.primitive.name, among, equation.invars[0].aval.shape] += 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found += collectives(inner) if hasattr(inner, "eqns") else Counter()
    return found


def trace(strategy: str, dims: tuple[int, ...], **options: Any) -> Counter[Any]:
    """What travels among four devices; dims: B, T and S of a device, N, K, D, Dv."""
    b, t, s, n, k, d, dv = dims
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), ("c",), (AxisType.Auto,), devices=devices)
    how = {"axis_name": "c", "strategy": strategy} | options
    attend = lambda q, k, v: context_parallel_attention(q, k, v, **how)  # noqa: E731
    rows = P(None, "c")
    over = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    shapes = (b, 4 * t, n, d), (b, 4 * s, k, d), (b, 4 * s, k, dv)
    arrays = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    return collectives(jax.make_jaxpr(over)(*arrays).jaxpr)


CALLS = {  # dims, options, and what is taken
    "long": ((1, 8192, 8192, 32, 8, 128, 128), {"causal": True}, ("ring", 1)),
    "many KV heads": ((1, 65_536, 65_536, 6, 6, 128, 128), {}, ("ring", 1)),
    "window": (
        (1, 65_536, 65_536, 32, 8, 128, 128),
        {"window": (1000, 0)},
        ("ring", 1),
    ),
    "short": ((1, 64, 64, 32, 8, 128, 128), {"causal": True}, ("ulysses", 4)),
    "few rows": ((1, 512, 8192, 32, 32, 128, 128), {}, ("ulysses", 4)),
    "six heads": ((1, 512, 512, 6, 6, 128, 128), {}, ("ulysses_ring", 2)),
    "seven heads": ((1, 512, 512, 7, 7, 128, 128), {}, ("ring", 1)),
    "batch": ((64, 256, 256, 32, 32, 128, 128), {"causal": True}, ("ulysses", 4)),
    "value dim": ((1, 4096, 2048, 8, 2, 64, 128), {}, ("ring", 1)),
}
GATHERED_FREELY = ("long", "value dim")  # with rates by which that costs no more


def work_by_hand(dims: tuple[int, ...], options: dict[str, Any]) -> Work:
    """As the model describes a call: batch members are sequences of their own."""
    b, t, s, n, k, d, dv = dims
    reach, seen = 4, 4 * s / (2 if options.get("causal") else 1)
    if "window" in options:  # neighbours to both sides have chunks beside one's own
        reach, seen = 3, 1000
    return Work(4, b * t, b * s, n, k, d, dv, 2, seen, reach)


@pytest.fixture
def asked(monkeypatch, four_cpus):
    """What the model is asked about."""
    found: list[Work] = []
    model = lambda work: found.append(work) or choose(work)  # noqa: E731
    monkeypatch.setattr(arguments, "choose", model)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_work_of_a_call(name, asked):
    """What the model is asked about is what is there."""
    dims, options, _ = CALLS[name]
    trace("auto", dims, **options)
    assert asked == [work_by_hand(dims, options)]


@pytest.mark.parametrize(
    ("options", "direct"),
    [
        ({"causal": True}, True),
        ({}, True),  # in zigzag
        ({"layout": "contiguous"}, False),
        ({"causal": True, "layout": "contiguous"}, True),
        ({"causal": True, "window": (100, 0)}, False),
        ({"window": (100, 100)}, False),
        ({"causal": True, "compiler_options": False}, False),
    ],
    ids=str,
)
def test_where_engines_send_what_is_gathered(options, direct, asked, monkeypatch):
    """Where they can, and own keys and others' are calls apart: auto is told."""
    dims, tuned = (1, 8192, 8192, 32, 8, 128, 128), {"compiler_options": True}
    for engines in (False, True):
        monkeypatch.setattr(arguments, "engines_can_send", lambda it=engines: it)
        taken = trace("auto", dims, **(tuned | options))
        assert asked.pop().direct == (direct and engines)
        names = {name for name, *_ in taken}
        assert names == {"ppermute"}, "a ring, or what engines send"
    gathered = {name for name, *_ in trace("all_gather", dims, **(tuned | options))}
    assert gathered == ({"ppermute"} if direct else {"all_gather"})


def test_engines_send_within_a_process(asked, monkeypatch):
    """Of several processes none sends so: auto is told, and XLA gathers."""
    monkeypatch.setattr(arguments, "engines_can_send", lambda: True)
    dims = (1, 8192, 8192, 32, 8, 128, 128)
    options = {"causal": True, "compiler_options": True}
    for processes, sends in ((1, "ppermute"), (2, "all_gather")):
        monkeypatch.setattr(jax, "process_count", lambda it=processes: it)
        trace("auto", dims, **options)
        assert asked.pop().direct == (processes == 1)
        gathered = {name for name, *_ in trace("all_gather", dims, **options)}
        assert gathered == {sends}


SEEN = {  # by a window, of 4,096 keys
    None: 4096, (None, 0): 2048, (100, 0): 100, (100, 30): 130, (9999, 0): 2048,
    (None, 9999): 4096, (0, None): 2048,
}  # fmt: skip


@pytest.mark.parametrize("window", SEEN, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_keys_that_a_row_sees(batch, window, asked):
    """In the mean: half of its sequence before it and half behind, or the window."""
    trace("auto", (batch, 512, 1024, 8, 2, 64, 32), window=window)
    (work,) = asked
    assert work.seen == SEEN[window]
    assert (work.rows, work.keys) == (batch * 512, batch * 1024)


BOUNDS = np.array([0, 64, 192, 448], np.int32)  # of 512 rows; 64 are in no document
KEYS_OF = np.array([0, 128, 192, 512], np.int32)  # of as many documents


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": True}, (64 * 32 + 128 * 64 + 256 * 128) / 512),
        ({}, (64 * 64 + 128 * 128 + 256 * 256) / 512),
        ({"window": (40, 0)}, (64 * 32 + 128 * 40 + 256 * 40) / 512),
        ({"cu_seqlens": (BOUNDS, KEYS_OF)}, (64 * 128 + 128 * 64 + 256 * 320) / 512),
        ({"cu_seqlens": (BOUNDS,)}, (64 * 64 + 128 * 128 + 256 * 256) / 512),
        ({"traced": True}, 512),
        # It is the most rows, not the most keys, of a document.
        ({"traced": True, "keys": KEYS_OF, "max_seqlen": 300}, 512),
        ({"traced": True, "max_seqlen": 300}, 300),
        ({"traced": True, "max_seqlen": 900}, 512),
    ],
    ids=str,
)
def test_keys_that_a_row_of_documents_sees(options, seen, asked):
    """In the mean of all rows; of boundaries that nobody knows, one document's."""
    mesh = jax.make_mesh((4,), ("c",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    how = {"axis_name": "c", "strategy": "auto", "cu_seqlens": BOUNDS} | options
    traced, keys = how.pop("traced", False), how.pop("keys", None)

    def attend(q, k, v, cu):
        bounds = {"cu_seqlens": cu if keys is None else (cu, keys)} if traced else {}
        return context_parallel_attention(q, k, v, **(how | bounds))

    over = jax.shard_map(
        attend, mesh=mesh, in_specs=(P("c"),) * 3 + (P(),), out_specs=P("c")
    )
    q, k = (jax.ShapeDtypeStruct((512, n, 64), jnp.bfloat16) for n in (8, 2))
    jax.make_jaxpr(over)(q, k, k, jax.ShapeDtypeStruct((4,), jnp.int32))
    (work,) = asked
    assert work.seen == seen


@pytest.mark.parametrize(
    ("name", "rates"),
    [(name, H200) for name in CALLS] + [(name, FREE) for name in GATHERED_FREELY],
    ids=[*CALLS, *(f"{name}, gathered freely" for name in GATHERED_FREELY)],
)
def test_auto_runs_what_the_model_takes(name, rates, four_cpus, monkeypatch):
    """Its collectives are those of the strategy that `choose` names, and no other's."""
    dims, options, want = CALLS[name]
    want = ("all_gather", 1) if rates == FREE else want
    work = work_by_hand(dims, options)
    assert choose(work, rates) == want
    monkeypatch.setattr(arguments, "choose", lambda work: choose(work, rates))
    taken = trace("auto", dims, **options)
    assert taken == trace(want[0], dims, **options)
    for other in {name for name, _ in ways(work)} - {want[0]}:
        assert taken != trace(other, dims, **options), other


def test_heads_that_no_group_serves_go_round(four_cpus):
    """Three KV heads for four devices: nothing is exchanged."""
    found = trace("ulysses_ring", (1, 64, 64, 6, 3, 16, 16))
    assert found == trace("ring", (1, 64, 64, 6, 3, 16, 16))
    assert {name for name, *_ in found} == {"ppermute"}


def test_what_strategies_send(four_cpus):
    """Ring: keys and values, n - 1 times. Gathered: once. Heads: q, k, v and out."""
    dims, options = (1, 64, 64, 8, 2, 16, 24), {"causal": True}
    keys, values, q, out = (1, 64, 2, 16), (1, 64, 2, 24), (1, 64, 8, 16), (1, 256, 2)
    found = {s: trace(s, dims, **options) for s in STRATEGIES[1:]}
    assert found["ring"] == {("ppermute", 1, x): 3 for x in (keys, values)}
    assert found["all_gather"] == {("all_gather", 1, x): 1 for x in (keys, values)}
    repeated = [(1, 64, 4, 16), (1, 64, 4, 24)]
    sent = {("all_to_all", 1, x): 1 for x in (q, *repeated)}
    back = {("all_to_all", 1, (*out, n)): 1 for n in (24, 1)}  # the lse, too
    assert found["ulysses"] == sent | back
    sent = {("all_to_all", 2, x): 1 for x in (q, keys, values)}
    back = {("all_to_all", 2, (1, 128, 4, n)): 1 for n in (24, 1)}
    halves = {("ppermute", 1, (1, 128, 1, n)): 1 for n in (16, 24)}
    assert found["ulysses_ring"] == sent | back | halves
