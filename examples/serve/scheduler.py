"""Continuous batching: whose tokens go through the model next.

A step takes the next tokens of all that run: the newest one of a sequence that decodes,
and its drafts; as many as there is room for of one that still reads. A sequence joins
when a place and blocks are free, with the blocks of its beginning that are here. Where
blocks run out, the one that comes last makes way: it is parked in a lower tier and
resumed, or, without tiers, it is read again.
"""

import bisect
import logging
from typing import NamedTuple

from jax_kvblock import PoolExhaustedError, PrefixCache
from jax_kvblock.cache import Resuming, TieredCache, park
from serve.drafts import Draft
from serve.sequences import Sequence

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A sequence's rows in a step: its tokens from `start` on, then its drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft: Draft | None = None
    steps: int = 1  # in each, a row: the token that the one before has drawn

    @property
    def num_rows(self) -> int:
        return self.num_tokens + (len(self.draft) if self.draft else 0)

    @property
    def last(self) -> bool:
        """Whether a new token follows."""
        known = len(self.sequence.tokens) + self.sequence.num_unread
        return self.start + self.num_tokens == known


class Scheduler:
    """Sequences that wait and those that run, each in order.

    Args:
        cache: whose blocks they get.
        tiers: over the same cache; None to read again instead of to park.
        places: how many run at the same time.
        rows: tokens of a step, at most.
        drafts: behind a newest token, at most.
        steps: of decoding that are planned together, at most.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tiers: TieredCache | None,
        places: int,
        rows: int,
        drafts: int,
        steps: int = 1,
    ) -> None:
        self.cache, self.tiers = cache, tiers
        self.places, self.rows, self.drafts, self.steps = places, rows, drafts, steps
        self.block_size = cache.manager.spec.block_size
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prompt_tokens = self.cached_tokens = 0
        self.preemptions = self.resumed = 0

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        bisect.insort(self.waiting, sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        """Give back all that a sequence has."""
        for those in (self.waiting, self.running):
            if sequence in those:
                those.remove(sequence)
        self._free(sequence)
        sequence.parked = None

    def plan(self) -> list[Part]:
        """The rows of the next step, with blocks for all of them."""
        self._admit()
        # First of all: what arrives here may leave one token to be computed.
        ready = [each for each in list(self.running) if self._ready(each)]
        decoding = sum(each.num_todo == 1 for each in ready)
        room = self.rows - decoding  # for those that read
        parts: list[Part] = []
        for sequence in ready:
            if sequence.table is None:  # it made way
                continue
            count = sequence.num_todo
            if count > 1:
                count = min(count, room)
                room -= count
            if count > 0 and self._reserve(sequence, sequence.num_cached + count):
                parts.append(Part(sequence, sequence.num_cached, count))
        if self.drafts:
            return self._with_drafts(parts)
        return self._with_steps(parts) if self.steps > 1 else parts

    # ---- who joins ----

    def _admit(self) -> None:
        """Take in those that wait, in order, while there are places and blocks."""
        if not self.waiting:
            return
        promised = sum(self._missing(each, len(each.tokens)) for each in self.running)
        for sequence in list(self.waiting):
            if len(self.running) == self.places:
                return
            if self._follows(sequence):
                continue
            wanted = self._open(sequence, promised)
            if wanted is None:
                return
            promised += wanted
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=lambda each: each.order)

    def _open(self, sequence: Sequence, promised: int) -> int | None:
        """Give a sequence a table; how many blocks it lacks, or None: too many."""
        if sequence.parked is not None:
            if not self._resume(sequence, promised):
                return None
            return self._missing(sequence, len(sequence.tokens) + 1)
        table = sequence.open()
        wanted = self._blocks(len(sequence.tokens) + 1) - len(table)
        if not self._may_take(wanted + promised):
            table.free()
            return None
        sequence.table = table
        if self.tiers is not None:
            sequence.arriving = self.tiers.onboard(table)
        self._found(sequence, table.num_cached_tokens)
        return wanted

    def _resume(self, sequence: Sequence, promised: int) -> bool:
        """Bring a parked sequence back, if there is room."""
        wanted = self._blocks(len(sequence.tokens) + 1)
        if self.tiers is None or not self._may_take(wanted + promised):
            return False
        try:
            sequence.arriving = Resuming(self.tiers, sequence.parked)
        except PoolExhaustedError:
            return False
        sequence.table = sequence.arriving.table
        sequence.num_cached = sequence.table.num_cached_tokens
        return True

    def _resumed(self, sequence: Sequence, coming: Resuming) -> None:
        """Note what of a parked sequence is there again."""
        sequence.table.append(sequence.tokens[sequence.table.num_tokens :])
        sequence.num_cached, sequence.parked = coming.num_written, None
        self.resumed += 1

    def _may_take(self, num_blocks: int) -> bool:
        if self.running:
            return self.cache.can_admit(num_blocks)
        return num_blocks <= self.cache.manager.num_free_blocks  # or nobody ever could

    def _follows(self, sequence: Sequence) -> bool:
        """Whether one that runs is about to publish the block that comes next here.

        Then it is better to wait for that than to compute it, too.
        """
        if sequence.parked is not None or not self.running:
            return False
        sought = sequence.keys_sought(self.block_size)
        for other in self.running:
            first = other.num_cached // self.block_size
            coming = other.table.keys[first:]
            if not sought.isdisjoint(coming):
                return True
        return False

    def _found(self, sequence: Sequence, num_tokens: int) -> None:
        """Note how many tokens need not be computed."""
        more = num_tokens - sequence.num_cached
        sequence.num_cached = num_tokens
        if not sequence.admitted:
            sequence.stream.num_cached_tokens += more
            self.cached_tokens += more

    def _ready(self, sequence: Sequence) -> bool:
        """Whether it can be computed: what it waits for has come."""
        if sequence.arriving is not None:
            try:
                if not sequence.arriving.poll():
                    return False
            except PoolExhaustedError:  # others took the blocks; it stays parked
                self._preempt(sequence)
                return False
            except Exception:  # of a transfer: what was parked is computed again
                _log.exception("a sequence did not come back")
                sequence.parked = None
                self._preempt(sequence)
                return False
            came, sequence.arriving = sequence.arriving, None
            if isinstance(came, Resuming):
                self._resumed(sequence, came)
            else:
                self._found(sequence, sequence.table.match())
        if not sequence.admitted:
            sequence.admitted = True
            self.prompt_tokens += len(sequence.request.prompt)
        return sequence.num_left > 0

    # ---- blocks ----

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that it needs for so many tokens."""
        return max(self._blocks(num_tokens) - len(sequence.table), 0)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens of a sequence; False where it had to make way."""
        manager = self.cache.manager
        if not self._missing(sequence, num_tokens):
            return True
        while self._missing(sequence, num_tokens) > manager.num_free_blocks:
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        if self.tiers is not None:
            self.tiers.make_room(self._missing(sequence, num_tokens))
        sequence.table.reserve(num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.preemptions += 1
        if self.tiers is not None and sequence.arriving is None and sequence.num_cached:
            # Tokens that nobody has read yet are computed again.
            written = min(sequence.num_cached, len(sequence.tokens))
            sequence.parked = park(self.tiers, sequence.table, written)
            sequence.table = None
        self._free(sequence)
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.arriving is not None:
            sequence.arriving.cancel()
        if sequence.table is not None:
            sequence.table.free()
        sequence.table, sequence.arriving, sequence.num_cached = None, None, 0

    # ---- several steps at once ----

    def _with_steps(self, parts: list[Part]) -> list[Part]:
        """The parts for several steps, where all that run decode and nobody can join.

        And where there are blocks for all of that: nobody makes way for later steps.
        They are taken as the step is filled in.
        """
        alone = len(parts) == len(self.running)
        joins = self.waiting and len(self.running) < self.places
        if not alone or joins or not all(p.num_tokens == 1 and p.last for p in parts):
            return parts
        several = [
            Part(p.sequence, p.start, 1, steps=min(self.steps, p.sequence.num_left))
            for p in parts
        ]
        missing = sum(self._missing(p.sequence, p.start + p.steps) for p in several)
        if missing > self.cache.manager.num_free_blocks:
            return parts
        if self.tiers is not None and missing:
            self.tiers.make_room(missing)
        return several

    # ---- drafts ----

    def _with_drafts(self, parts: list[Part]) -> list[Part]:
        """The parts with drafts, where rows and blocks are left over."""
        room = self.rows - sum(part.num_tokens for part in parts)
        made = []
        for part in parts:
            draft = self._draft_for(part, room)
            made.append(part if draft is None else part._replace(draft=draft))
            room -= len(draft or ())
        return made

    def _draft_for(self, part: Part, room: int) -> Draft | None:
        sequence = part.sequence
        if part.num_tokens > 1 or not part.last or sequence.lookup is None:
            return None
        most = min(self.drafts, room, sequence.num_left - 1)
        draft = sequence.lookup.propose(most)
        if draft is None:
            return None
        end = part.start + 1 + len(draft)
        if self._missing(sequence, end) > self.cache.num_free_blocks:
            return None  # no one makes way for a guess, and no idle block
        sequence.table.reserve(end)
        return draft
