"""Numbers of a server for Prometheus: its engine's, and those of its endpoint."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.interface import Engine

# Of `Stats`: name, what it counts. What is in neither table is told by state, below.
COUNTERS = {
    "finished": "Requests that have ended, whatever the reason",
    "cancelled": "Requests that were cancelled",
    "failed": "Requests that ended with an error",
    "steps": "Steps of the engine",
    "prompt_tokens": "Tokens of prompts that were admitted",
    "cached_tokens": "Tokens of those that were found in the cache",
    "new_tokens": "Tokens that were made",
    "drafted_tokens": "Tokens that were proposed ahead",
    "accepted_tokens": "Tokens of those that were taken",
    "preemptions": "Requests that had to give their blocks back",
    "offloaded_preemptions": "Requests of those that resumed from a lower tier",
}
GAUGES = {
    "running": "Requests that run",
    "waiting": "Requests that wait",
    "max_waiting": "Requests that may wait",
    "programs": "Programs that were compiled",
    "tokens_per_second": "New tokens a second, in the last 10 seconds",
    "mean_time_to_first_token": "Seconds from a request to its first token",
    "num_blocks": "Blocks of the pool",
    "shared_blocks": "Held blocks that several requests hold",
}
STATES = ("free", "held", "idle")
PREFIX = "kvblock_serve_"


class EngineCollector(Collector):
    """An engine's statistics, as they are when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}{name}_total", text, stats[name])
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, stats[name])
        blocks = GaugeMetricFamily(
            f"{PREFIX}blocks", "Blocks of the pool by what they do", labels=["state"]
        )
        for state in STATES:
            blocks.add_metric([state], stats[f"{state}_blocks"])
        yield blocks


class Metrics:
    """What /metrics tells.

    Args:
        engine: whose statistics are told; if it has a `cache`, its books' as well,
            and what its `tiers` copied.
        collectors: further ones.
    """

    def __init__(self, engine: Engine, collectors: Iterable[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvblock_http_requests",
            "Requests that were answered, or whose client left before",
            ["path", "status"],
            registry=self._registry,
        )
        for collector in (EngineCollector(engine), *collectors):
            self._registry.register(collector)
        if hasattr(engine, "cache"):
            from jax_kvblock.cache.metrics import CacheCollector

            tiers = getattr(engine, "tiers", None)
            self._registry.register(
                CacheCollector({"device": engine.cache}, tiers=tiers)
            )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count(self, path: str, status: str) -> None:
        self._requests.labels(path, status).inc()


class Counted:
    """An ASGI application whose answers are counted by path and status.

    Args:
        app: it.
        metrics: where they are counted.
        paths: those that are told apart; others are "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Iterable[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = "none"  # the client went away first

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.count(path, status)
