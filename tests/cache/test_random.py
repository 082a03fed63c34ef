"""Random operations on a cache and on its model: the books never differ.

`test_random_operations` is fast and wide; hypothesis draws fewer operations, and says
in the fewest of them what went wrong.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from cache_drive import drive
from cache_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

TOKENS = st.lists(st.integers(0, 1), max_size=9)
COUNTS = st.integers(0, 8)
# KVBLOCK_TEST_WALK=1, or any other text, draws other operations.
WALK = os.environ.get("KVBLOCK_TEST_WALK", "")


@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_random_operations(policy: str) -> None:
    """100,000 of them, half with each policy."""
    world = World(policy)
    drive(world, random.Random(policy + WALK), 50_000, every=10)
    world.end()
    counted = world.books.counters
    assert min(counted.values()) > 200, counted  # each transition, again and again


def of_tables(function: Callable[..., None]) -> Any:
    """A rule that needs a table, and has one drawn by its number."""
    return precondition(lambda self: self.world.tables)(function)


class CacheMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "lfu"]))
    def start(self, policy: str) -> None:
        self.world = World(policy, num_blocks=6)

    def table(self, number: int) -> Any:
        return self.world.tables[number % len(self.world.tables)]

    @rule(salt=st.integers(0, 1), tokens=TOKENS, limit=st.none() | COUNTS)
    def open(self, salt: int, tokens: list[int], limit: int | None) -> None:
        self.world.open(salt, tokens, limit)

    @of_tables
    @rule(i=COUNTS, tokens=TOKENS)
    def append(self, i: int, tokens: list[int]) -> None:
        self.world.append(self.table(i), tokens)

    @of_tables
    @rule(i=COUNTS)
    def match(self, i: int) -> None:
        self.world.match(self.table(i))

    @of_tables
    @rule(i=COUNTS, more=st.integers(0, 3), spare=st.integers(0, 2))
    def reserve(self, i: int, more: int, spare: int) -> None:
        self.world.reserve(self.table(i), more, spare)

    @of_tables
    @rule(i=COUNTS, count=COUNTS)
    def step(self, i: int, count: int) -> None:
        self.world.step(self.table(i), count)

    @of_tables
    @rule(i=COUNTS, tokens=st.integers(0, 20))
    def commit(self, i: int, tokens: int) -> None:
        self.world.commit(self.table(i), tokens)

    @of_tables
    @rule(i=COUNTS)
    def fork(self, i: int) -> None:
        self.world.fork(self.table(i))

    @of_tables
    @rule(i=COUNTS, tokens=COUNTS)
    def truncate(self, i: int, tokens: int) -> None:
        table = self.table(i)
        self.world.truncate(table, min(tokens, len(table.tokens)))

    @of_tables
    @rule(i=COUNTS, token=COUNTS)
    def free_before(self, i: int, token: int) -> None:
        self.world.free_before(self.table(i), token)

    @of_tables
    @rule(i=COUNTS, collected=st.booleans())
    def free(self, i: int, collected: bool) -> None:
        self.world.free(self.table(i), collected)

    @rule(salt=st.integers(0, 1), tokens=TOKENS, handles=st.booleans())
    def onboard(self, salt: int, tokens: list[int], handles: bool) -> None:
        self.world.onboard(salt, tokens, handles)

    @rule(blocks=st.lists(st.integers(0, 5), max_size=3))
    def hold(self, blocks: list[int]) -> None:
        self.world.hold(blocks)

    @rule(count=st.integers(0, 3))
    def victims(self, count: int) -> None:
        self.world.victims(count)

    @precondition(lambda self: self.world.books.published)
    @rule(i=COUNTS)
    def hold_keys(self, i: int) -> None:
        words = sorted(self.world.books.published)
        self.world.hold_keys([words[i % len(words)]])

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        self.world.allocate(count)

    @precondition(lambda self: self.world.held)
    @rule(i=COUNTS, what=st.sampled_from(["share", "export", "give back", "drop"]))
    def held(self, i: int, what: str) -> None:
        held = self.world.held[i % len(self.world.held)]
        if what in ("share", "export"):
            getattr(self.world, what)(held)
        else:
            self.world.release(held, collected=what == "drop")

    @precondition(lambda self: self.world.books.published)
    @rule(i=COUNTS)
    def forget(self, i: int) -> None:
        words = sorted(self.world.books.published)
        self.world.forget([words[i % len(words)]])

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @invariant()
    def both_say_the_same(self) -> None:
        if hasattr(self, "world"):
            self.world.check_all()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
