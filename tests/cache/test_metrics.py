"""Numbers of a cache, and what Prometheus reads of them."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable

import pytest
from managers import BLOCKS, NT, make_manager
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from small_caches import small
from small_tiers import Setup
from tier_stores import MemoryStore

from jax_kvblock.cache import PrefixCache
from jax_kvblock.cache.event_socket import ZmqPublisher
from jax_kvblock.cache.event_wire import BatchEncoder
from jax_kvblock.cache.metrics import CacheCollector, CacheStats


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(make_manager(), model="model")


def use(cache: PrefixCache, tokens: range) -> None:
    with cache.open(tokens) as table:
        table.reserve(len(tokens))
        table.commit(len(tokens))


def read(collector: CacheCollector) -> dict[tuple[str, ...], float]:
    """What a scrape says: a sample's name and its labels, by name -> its value."""
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(map("=".join, sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers_are_those_of_the_books(cache: PrefixCache) -> None:
    use(cache, range(2 * NT + 1))  # two full blocks, and one more that goes back
    use(cache, range(2 * NT + 1))  # finds both
    table = cache.open(range(NT + 1))  # finds one, and holds it
    stats = CacheStats.of(cache)
    assert stats == CacheStats(
        block_size=NT,
        num_blocks=BLOCKS,
        free=BLOCKS - 2,
        idle=1,
        held=1,
        lookups=3,
        queried_blocks=5,
        hit_blocks=3,
        allocated=4,
        published=2,
        evicted=0,
        duplicates=0,
        copied_on_write=0,
        refused=0,
    )
    assert (stats.hit_rate, stats.usage) == (3 / 5, 1 / BLOCKS)
    assert (stats.queried_tokens, stats.hit_tokens) == (5 * NT, 3 * NT)
    table.free()


def test_shares_of_nothing_are_none(cache: PrefixCache) -> None:
    unused = CacheStats.of(cache)
    assert unused.hit_rate == 0
    assert dataclasses.replace(unused, num_blocks=0, free=0).usage == 0


def test_a_scrape_tells_every_number(cache: PrefixCache) -> None:
    use(cache, range(4 * NT))
    use(cache, range(100, 100 + 4 * NT))  # in the place of two others
    with cache.open(range(100, 100 + 2 * NT + 1)):
        found = read(CacheCollector({"device": cache}))
    assert found == {
        ("kvblock_prefix_cache_lookups_total", "tier=device"): 3,
        ("kvblock_prefix_cache_queried_tokens_total", "tier=device"): (3 + 3 + 2) * NT,
        ("kvblock_prefix_cache_hit_tokens_total", "tier=device"): 2 * NT,
        ("kvblock_allocated_blocks_total", "tier=device"): 8,
        ("kvblock_published_blocks_total", "tier=device"): 8,
        ("kvblock_evicted_blocks_total", "tier=device"): 2,
        ("kvblock_duplicate_blocks_total", "tier=device"): 0,
        ("kvblock_copied_blocks_total", "tier=device"): 0,
        ("kvblock_refused_allocations_total", "tier=device"): 0,
        ("kvblock_cache_usage_ratio", "tier=device"): 2 / BLOCKS,
        ("kvblock_blocks", "state=free", "tier=device"): 0,
        ("kvblock_blocks", "state=idle", "tier=device"): BLOCKS - 2,
        ("kvblock_blocks", "state=held", "tier=device"): 2,
    }


def test_each_counter_has_a_number_of_its_own(cache: PrefixCache) -> None:
    """Of numbers that all differ, so that none stands in for another."""
    stats = CacheStats(*range(2, 2 + len(dataclasses.fields(CacheStats))))
    found = read(CacheCollector({"disk": lambda: stats}))
    told = {name.removeprefix("kvblock_"): value for (name, *_), value in found.items()}
    del told["blocks"]
    assert told == {
        "prefix_cache_lookups_total": stats.lookups,
        "prefix_cache_queried_tokens_total": stats.queried_blocks * 2,
        "prefix_cache_hit_tokens_total": stats.hit_blocks * 2,
        "allocated_blocks_total": stats.allocated,
        "published_blocks_total": stats.published,
        "evicted_blocks_total": stats.evicted,
        "duplicate_blocks_total": stats.duplicates,
        "copied_blocks_total": stats.copied_on_write,
        "refused_allocations_total": stats.refused,
        "cache_usage_ratio": stats.held / stats.num_blocks,
    }


def test_places_and_labels_are_told_apart(cache: PrefixCache) -> None:
    host = PrefixCache(make_manager(num_blocks=3), model="model")
    use(host, range(NT))
    collector = CacheCollector({"device": cache, "host": host}, labels={"model": "m"})
    found = read(collector)
    assert found["kvblock_published_blocks_total", "model=m", "tier=device"] == 0
    assert found["kvblock_published_blocks_total", "model=m", "tier=host"] == 1
    assert found["kvblock_blocks", "model=m", "state=free", "tier=host"] == 2


def test_tiers_tell_their_copies() -> None:
    store = MemoryStore()
    store.unanswered = 2  # type: ignore[attr-defined]
    one = Setup(host_blocks=2, store=store)
    with one.computed(range(13)) as table:
        one.tiers.offload(table).wait()
    one.tiers.drain()
    found = read(CacheCollector({"device": one.cache}, tiers=one.tiers))
    for tier, told in one.tiers.stats().items():
        for name, field in {
            "written_bytes": "bytes_in",
            "read_bytes": "bytes_out",
            "skipped_blocks": "skipped",
            "failed_blocks": "failed",
            "lost_blocks": "lost",
        }.items():
            assert found[f"kvblock_tier_{name}_total", f"tier={tier}"] == told[field]
    name = "kvblock_tier_unanswered_blocks_total"
    assert (name, "tier=host") not in found
    assert found[name, "tier=store"] == one.tiers.stats()["store"]["unanswered"] == 2
    assert found["kvblock_tier_written_bytes_total", "tier=host"] == 2 * one.size
    assert found["kvblock_tier_skipped_blocks_total", "tier=host"] == 1
    one.tiers.close()


def test_names_are_as_prometheus_wants_them(cache: PrefixCache) -> None:
    for metric in CacheCollector({"device": cache}).collect():
        assert re.fullmatch(r"kvblock_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.documentation
        assert metric.type in ("counter", "gauge")
        for sample in metric.samples:
            assert sample.name.endswith("_total") == (metric.type == "counter")


def test_losses_of_events_are_told(cache: PrefixCache) -> None:
    publisher = ZmqPublisher("inproc://metrics")
    name = ("kvblock_lost_event_batches_total",)
    assert read(CacheCollector({}, publisher=publisher)) == {name: 0}
    publisher._num_lost = 7
    assert read(CacheCollector({}, publisher=publisher)) == {name: 7}
    publisher.close()


@pytest.mark.parametrize(
    "module, package, build",
    [
        ("prometheus_client", "prometheus-client", lambda: CacheCollector({})),
        ("zmq", "pyzmq", ZmqPublisher),
        ("msgspec", "msgspec", BatchEncoder),
    ],
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    package: str,
    build: Callable[[], object],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"`pip install {package}`"):
        build()


def test_what_are_no_caches() -> None:
    cache = small()
    for bad in ({"device": cache.manager}, {"device": None}, cache, [cache]):
        with pytest.raises(
            TypeError, match="caches must be a PrefixCache, or a functi"
        ):
            CacheCollector(bad)  # type: ignore[arg-type]
