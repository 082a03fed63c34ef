"""Requests replayed over a pool's books, without the pool: what would have been found?

The books are the ones that serve (`FreeList`, `BlockTable`): lookups, eviction and
references are not modelled, they are run. A block of a trace is a block of one token,
the block's number, so that its key follows from its number and those before it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import os
from collections.abc import Iterable, Sequence
from typing import Literal

from jax_kvblock._native import BlockTable, FreeList
from jax_kvblock.cache.trace import Request, read_trace
from jax_kvblock.core import checks

Policy = Literal["lru", "lfu"]
_ROOT = bytes(32)


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """What happened to the requests of a trace.

    Attributes:
      capacity: blocks of the pool; None if there was one for each block of the trace.
      policy: "lru" or "lfu".
      num_requests: all of them, those that were refused included.
      num_refused: requests of more blocks than the pool has; they change nothing.
      num_blocks: blocks of the inputs of all requests.
      num_hits: those that were found: the longest run from the first block on.
      num_stored: blocks that were published, some of them again.
      num_evicted: blocks whose place was taken by another one.
      peak_held: the most blocks that requests held at one time.
      num_waited: requests that found too few blocks when they arrived.
      seconds_waited: how long these waited, together, on the trace's clock.
    """

    capacity: int | None
    policy: Policy
    num_requests: int
    num_refused: int
    num_blocks: int
    num_hits: int
    num_stored: int
    num_evicted: int
    peak_held: int
    num_waited: int
    seconds_waited: float

    @property
    def hit_rate(self) -> float:
        """The share of blocks that were found, 0 to 1; 0 for a trace without blocks."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def simulate(
    trace: str | os.PathLike[str] | Iterable[Request],
    *,
    capacity: int | None = None,
    policy: Policy = "lru",
    seconds_per_token: float | None = None,
) -> SimulationResult:
    """Replays a trace over the books of a pool.

    A request holds the blocks of its input. Those that are not found it computes and
    publishes at once. Blocks of its output take no place: where a conversation goes on,
    the next request's input has them.

    Args:
      trace: a file for `read_trace`, or requests in the order of their arrival.
      capacity: blocks of the pool; None for as many as the trace has.
      policy: whose place is taken first, "lru" or "lfu".
      seconds_per_token: how long a request holds its blocks for each token that it
        writes. Requests wait for blocks in the order of their arrival. None: one
        request after the other, without a clock.

    Raises:
      TypeError: a capacity that is no integer, or what is no request.
      ValueError: a capacity, policy or time that is none; or requests that are not in
        order.

    Example:
      >>> simulate("conversation_trace.jsonl", capacity=10_000).hit_rate
    """
    if capacity is not None:
        fix = "pass a number of blocks, or None"
        capacity = checks.check_integer("simulate", "capacity", capacity, fix)
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"simulate: capacity must be at least 1 block, or None, got {capacity}"
        )
    if seconds_per_token is not None and not 0 <= seconds_per_token < float("inf"):
        raise ValueError(
            "simulate: seconds_per_token must be at least 0 seconds, or None, got "
            f"{seconds_per_token}"
        )
    if isinstance(trace, str | os.PathLike):
        requests: Sequence[Request] = read_trace(trace)
    else:
        requests = list(trace)
        wrong = [x for x in requests if not isinstance(x, Request)]
        if wrong:
            raise TypeError(
                "simulate: trace must be a path, or have a Request for each request, "
                f"got {wrong[0]!r}"
            )
    total = sum(len(request.blocks) for request in requests)
    books = FreeList(total if capacity is None else capacity)
    books.set_policy(policy)
    replay = _Replay(books, seconds_per_token)
    for request in requests:
        replay.arrive(request)
    replay.finish(float("inf"))
    counted = books.counters()
    return SimulationResult(
        capacity,
        policy,
        num_requests=len(requests),
        num_refused=replay.num_refused,
        num_blocks=total,
        num_hits=replay.num_hits,
        num_stored=counted["published"],
        num_evicted=counted["evicted"],
        peak_held=replay.peak_held,
        num_waited=replay.num_waited,
        seconds_waited=replay.seconds_waited,
    )


class _Replay:
    """Requests that wait, hold blocks and leave, on the trace's clock."""

    def __init__(self, books: FreeList, seconds_per_token: float | None) -> None:
        self._books, self._seconds = books, seconds_per_token
        self._now = 0.0
        self._waiting: collections.deque[tuple[Request, BlockTable]] = (
            collections.deque()
        )
        # When each ends; a number, so that tables are never compared.
        self._running: list[tuple[float, int, BlockTable]] = []
        self.num_refused = self.num_hits = self.num_waited = self.peak_held = 0
        self.seconds_waited = 0.0
        self._num_admitted = 0

    def arrive(self, request: Request) -> None:
        if self._seconds is not None:
            if request.arrival < self._now:
                raise ValueError(
                    f"simulate: a request of {request.arrival} s comes after one of "
                    f"{self._now} s; sort them by their arrival"
                )
            self.finish(request.arrival)
            self._now = request.arrival
        if len(request.blocks) > self._books.num_blocks:
            self.num_refused += 1
            return
        table = BlockTable(self._books, _ROOT, 1)
        table.append(request.blocks)
        self._waiting.append((request, table))
        self._admit()
        self.num_waited += bool(self._waiting)

    def finish(self, until: float) -> None:
        """Has the requests leave that end by then, and those come that can."""
        while self._running and self._running[0][0] <= until:
            self._now, _, table = heapq.heappop(self._running)
            table.release()
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            request, table = self._waiting[0]
            # Who is next keeps what it has found, and looks for the rest again.
            table.match(len(request.blocks))
            if not table.reserve(len(request.blocks)):
                return
            self._waiting.popleft()
            self.num_hits += table.num_cached
            table.commit(len(request.blocks))
            self.peak_held = max(
                self.peak_held, self._books.num_blocks - len(self._books)
            )
            if self._seconds is None:
                table.release()
                continue
            self.seconds_waited += self._now - request.arrival
            self._num_admitted += 1
            end = self._now + request.output_length * self._seconds
            heapq.heappush(self._running, (end, self._num_admitted, table))
