"""The largest batch that fits: against all sizes, and of real programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check

from jax_kvblock.hardware import HardwareAbstractionLayer, MemoryUsage, search

WHERE = "find_batch_size"


def usage(total):
    return MemoryUsage(total, 0, 0, 0, 0)


def find(of, limit, unit=1, largest=None):
    return search.search(WHERE, of, unit=unit, largest=largest, limit=limit, devices=1)


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.integers(0, 50),
    each=st.integers(1, 9),
    unit=st.integers(1, 7),
    limit=st.integers(1, 2000),
    largest=st.none() | st.integers(7, 400),
)
def test_it_is_the_largest_of_all(fixed, each, unit, limit, largest):
    asked = []

    def of(size):
        asked.append(size)
        return usage(fixed + each * size)

    fitting = [
        size
        for size in range(unit, 1 + (largest or 3000), unit)
        if fixed + each * size <= limit
    ]
    if not fitting:
        with pytest.raises(MemoryError, match=rf"^{WHERE}: limit .*batch of {unit},"):
            find(of, limit, unit, largest)
        assert asked == [unit]
        return
    found = find(of, limit, unit, largest)
    assert found.size == fitting[-1]
    assert found.usage == usage(fixed + each * found.size)
    if largest is not None and found.size + unit > largest:
        assert found.next_size is None and found.next_usage is None
    else:
        assert found.next_size == found.size + unit
        assert found.next_usage.total > limit
    assert found.programs == len(asked) == len(set(asked))
    assert found.programs <= 2 * (found.size // unit).bit_length() + 1
    assert largest is None or max(asked) <= largest


@given(
    totals=st.lists(st.integers(1, 100), min_size=1, max_size=70),
    limit=st.integers(1, 100),
)
def test_where_memory_falls_again_it_fits_and_the_next_does_not(totals, limit):
    def of(size):
        return usage(totals[size - 1] if size <= len(totals) else 1000)

    try:
        found = find(of, limit)
    except MemoryError:
        assert totals[0] > limit
        return
    assert of(found.size).total <= limit < of(found.next_size).total
    assert found.next_size == found.size + 1


def test_what_the_compiler_refuses_does_not_fit():
    def of(size):
        if size > 5:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")
        return usage(size)

    found = find(of, 100)
    assert found.size == 5 and found.next_size == 6 and found.next_usage is None
    assert "batch 6: the compiler finds no room" in str(found)

    def none(size):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")

    check(WHERE, MemoryError, "limit|batch of 1", lambda: find(none, 100))


def test_other_failures_are_told():
    def of(size):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        find(of, 100)


# ---- real programs -------------------------------------------------------------------


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train(weights, x):
    loss, slopes = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)
    return weights - 0.1 * slopes, loss


def batch(size):
    return struct(32, 32), struct(size, 32)


@pytest.mark.parametrize("count", [1, 4])
def test_the_next_batch_does_not_fit(four_cpus, count):
    hal = HardwareAbstractionLayer(jax.devices("cpu")[:count])
    limit = 60_000
    found = hal.find_batch_size(
        train, batch, limit=limit, multiple_of=6, donate_argnums=0
    )
    unit = 6 if count == 1 else 12
    assert found.size % unit == 0 and found.next_size == found.size + unit
    assert found.devices == count and found.limit == limit
    for size, said in (
        (found.size, found.usage),
        (found.next_size, found.next_usage),
    ):
        assert said == hal.estimate_memory_usage(train, size, batch, donate_argnums=0)
        assert (said.total <= limit) == (size == found.size)
    assert found.usage.aliased == 32 * 32 * 4
    got = hal.get_optimal_batch_size(
        train, batch, limit=limit, multiple_of=6, donate_argnums=0
    )
    assert got == found.size
    assert str(found).startswith(f"batch {found.size}")
    assert ("over 4 devices" in str(found)) == (count == 4)


def test_it_runs(four_cpus):
    """What is found are sizes of real arrays."""
    hal = HardwareAbstractionLayer(jax.devices("cpu")[0])
    size = hal.get_optimal_batch_size(train, batch, limit=200_000)
    weights, x = jnp.ones((32, 32)), jnp.ones((size, 32))
    assert jnp.isfinite(jax.jit(train)(weights, x)[1])
    usage = hal.estimate_memory_usage(train, size, batch)
    assert usage.arguments == weights.nbytes + x.nbytes


def test_without_a_limit_a_cpu_has_the_hosts_memory(four_cpus, monkeypatch):
    from jax_kvblock.hardware import devices

    monkeypatch.setattr(devices, "_host_memory", lambda: 4 * 2**20)
    hal = HardwareAbstractionLayer(jax.devices("cpu")[:2])
    found = hal.find_batch_size(jnp.tanh, struct(1, 1024))
    assert found.limit == 2**20
    assert found.size == 2 * 128


def test_largest_ends_the_search(four_cpus):
    hal = HardwareAbstractionLayer(jax.devices("cpu")[0])
    found = hal.find_batch_size(
        jnp.tanh, struct(1, 8), limit=2**40, multiple_of=3, largest=100
    )
    assert found.size == 99 and found.next_size is None
    assert found.programs == 7  # 3, 6, 12, 24, 48, 96, 99


ROWS = [
    (MemoryError, "limit|batch of 4|100 bytes", dict(limit=100, multiple_of=4)),
    (ValueError, "multiple_of|at least 1|0", dict(multiple_of=0)),
    (ValueError, "largest|at least 8|5", dict(largest=5, multiple_of=8)),
    (TypeError, "limit|whole number|1e+09|int()", dict(limit=1e9)),
]


@pytest.mark.parametrize(("error", "words", "options"), ROWS, ids=[r[1] for r in ROWS])
@pytest.mark.parametrize("name", ["find_batch_size", "get_optimal_batch_size"])
def test_what_is_refused(four_cpus, name, error, words, options):
    hal = HardwareAbstractionLayer(jax.devices("cpu")[0])
    words = words.replace("1e+09", "1000000000.0")
    call = getattr(hal, name)
    check(name, error, words, lambda: call(jnp.tanh, struct(1, 256), **options))
