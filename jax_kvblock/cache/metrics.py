"""Numbers of a cache: what its blocks are doing, and metrics for Prometheus.

Every number comes from the pool's books at the moment that it is asked for. Nothing is
counted twice or sampled, and a request pays nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

    from jax_kvblock.cache.event_socket import ZmqPublisher
    from jax_kvblock.cache.prefix import PrefixCache
    from jax_kvblock.cache.tiers import TieredCache


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a pool's blocks are doing, and what has happened since it was made.

    Attributes:
      block_size: tokens to a block.
      num_blocks: blocks of the pool; each is free, idle or held.
      free: hold nothing.
      idle: are found by their keys, and held by nobody.
      held: somebody has a reference to them.
      lookups: how often sequences were looked up.
      queried_blocks: full blocks of these sequences.
      hit_blocks: those of them that were found.
      allocated: blocks that were taken.
      published: blocks that were made to be found.
      evicted: idle blocks whose place was taken.
      duplicates: blocks that were published already when they were computed.
      copied_on_write: shared blocks that were copied to be written to.
      refused: allocations that found too few blocks.
    """

    block_size: int
    num_blocks: int
    free: int
    idle: int
    held: int
    lookups: int
    queried_blocks: int
    hit_blocks: int
    allocated: int
    published: int
    evicted: int
    duplicates: int
    copied_on_write: int
    refused: int

    @classmethod
    def of(cls, cache: PrefixCache) -> CacheStats:
        """The numbers of a cache, all of one moment.

        Example:
          >>> CacheStats.of(cache).hit_rate
        """
        return cls(cache.namespace.spec.block_size, **cache.stats())

    @property
    def hit_rate(self) -> float:
        """The share of full blocks that were found, 0 to 1; 0 before any lookup."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0

    @property
    def usage(self) -> float:
        """The share of blocks that are held, 0 to 1. Idle ones can be taken."""
        return self.held / self.num_blocks if self.num_blocks else 0.0

    @property
    def queried_tokens(self) -> int:
        """Tokens of the full blocks that were looked up."""
        return self.queried_blocks * self.block_size

    @property
    def hit_tokens(self) -> int:
        """Tokens of those that were found: these were not computed again."""
        return self.hit_blocks * self.block_size


# Name, what it counts, where it comes from. Units are in the names.
COUNTERS = (
    (
        "kvblock_prefix_cache_lookups_total",
        "Sequences that were looked up",
        "lookups",
    ),
    (
        "kvblock_prefix_cache_queried_tokens_total",
        "Tokens of full blocks that were looked up",
        "queried_tokens",
    ),
    (
        "kvblock_prefix_cache_hit_tokens_total",
        "Tokens of full blocks that were found, and not computed again",
        "hit_tokens",
    ),
    (
        "kvblock_allocated_blocks_total",
        "Blocks that were taken from the pool",
        "allocated",
    ),
    (
        "kvblock_published_blocks_total",
        "Blocks that were made to be found",
        "published",
    ),
    (
        "kvblock_evicted_blocks_total",
        "Idle blocks whose place was taken by another one",
        "evicted",
    ),
    (
        "kvblock_duplicate_blocks_total",
        "Blocks that were computed while an equal one was there",
        "duplicates",
    ),
    (
        "kvblock_copied_blocks_total",
        "Shared blocks that were copied to be written to",
        "copied_on_write",
    ),
    (
        "kvblock_refused_allocations_total",
        "Allocations that found too few blocks",
        "refused",
    ),
)

# Of `TieredCache.stats`, the label `tier` is "host" or "store".
TIER_COUNTERS = (
    (
        "kvblock_tier_written_bytes_total",
        "Bytes of blocks that were written there",
        "bytes_in",
    ),
    (
        "kvblock_tier_read_bytes_total",
        "Bytes of blocks that were read from there",
        "bytes_out",
    ),
    (
        "kvblock_tier_skipped_blocks_total",
        "Blocks that found no room there",
        "skipped",
    ),
    (
        "kvblock_tier_failed_blocks_total",
        "Blocks whose copy or look-up failed",
        "failed",
    ),
    (
        "kvblock_tier_lost_blocks_total",
        "Blocks that were said to be there and were missing, damaged or unreadable",
        "lost",
    ),
    (
        "kvblock_tier_unanswered_blocks_total",
        "Blocks taken for misses, since a store did not tell of them in time",
        "unanswered",
    ),
)


def _checked(caches: Any) -> dict[str, Any]:
    """Caches, or functions, by their places."""
    from jax_kvblock.cache.prefix import PrefixCache

    named = isinstance(caches, Mapping)
    given = caches.values() if named else [caches]
    wrong = [x for x in given if not callable(x) and not isinstance(x, PrefixCache)]
    if wrong or not named:
        got = wrong[0] if wrong else caches
        raise TypeError(
            "CacheCollector: caches must be a PrefixCache, or a function that returns "
            f"CacheStats, by the name of each place, got {got!r}; pass "
            "{'device': cache}"
        )
    return dict(caches)


class CacheCollector:
    """Metrics of caches, for a registry of prometheus-client.

    Args:
      caches: by the place that they keep blocks in, which is the label `tier`: a
        `PrefixCache`, or what gives the numbers of another place.
      tiers: below one of them, whose copies are told.
      publisher: of events, whose losses are told.
      labels: names and values that all metrics have, such as a model's name.

    Raises:
      ImportError: prometheus-client is not installed.
      TypeError: for caches that are none.

    Example:
      >>> from prometheus_client import REGISTRY
      >>> REGISTRY.register(CacheCollector({"device": cache}))
    """

    def __init__(
        self,
        caches: Mapping[str, PrefixCache | Callable[[], CacheStats]],
        *,
        tiers: TieredCache | None = None,
        publisher: ZmqPublisher | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        try:
            from prometheus_client import metrics_core
        except ImportError as error:
            raise ImportError(
                "CacheCollector: metrics are prometheus-client's, which is not "
                "installed; `pip install prometheus-client`"
            ) from error
        self._core = metrics_core
        self._caches = _checked(caches)
        self._tiers = tiers
        self._publisher = publisher
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """The metrics, as they are now; the registry calls it."""
        stats = {
            tier: cache() if callable(cache) else CacheStats.of(cache)
            for tier, cache in self._caches.items()
        }
        names = [*self._labels, "tier"]
        values = list(self._labels.values())
        for name, text, field in COUNTERS:
            counter = self._core.CounterMetricFamily(name, text, labels=names)
            for tier, told in stats.items():
                counter.add_metric([*values, tier], getattr(told, field))
            yield counter
        usage = self._core.GaugeMetricFamily(
            "kvblock_cache_usage_ratio", "Share of blocks that are held", labels=names
        )
        blocks = self._core.GaugeMetricFamily(
            "kvblock_blocks", "Blocks by what they do", labels=[*names, "state"]
        )
        for tier, told in stats.items():
            usage.add_metric([*values, tier], told.usage)
            for state in ("free", "idle", "held"):
                blocks.add_metric([*values, tier, state], getattr(told, state))
        yield from (usage, blocks)
        if self._tiers is not None:
            copied = self._tiers.stats()
            for name, text, field in TIER_COUNTERS:
                counter = self._core.CounterMetricFamily(name, text, labels=names)
                for tier, numbers in copied.items():
                    if field in numbers:
                        counter.add_metric([*values, tier], numbers[field])
                yield counter
        if self._publisher is not None:
            lost = self._core.CounterMetricFamily(
                "kvblock_lost_event_batches_total",
                "Batches of events that left the log unsent",
                labels=list(self._labels),
            )
            lost.add_metric(values, self._publisher.num_lost)
            yield lost
