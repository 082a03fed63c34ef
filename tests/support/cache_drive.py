"""Random operations on a cache and on its model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from cache_world import SIZE, Held, Table, World


def drive(world: World, draw: random.Random, operations: int, every: int) -> None:
    """Random operations on a world, compared after each, and wholly now and then."""

    def tokens(most: int) -> list[int]:
        return [draw.randrange(2) for _ in range(draw.randint(0, most))]

    def table() -> Table:
        return draw.choice(world.tables)

    def some(numbers: Any) -> list[int]:
        numbers = list(numbers)
        return draw.sample(numbers, draw.randint(0, min(3, len(numbers))))

    def full(words: list[int]) -> list[int]:
        return [w for w in words if len(world.words.sequence(w)[1]) % SIZE == 0]

    def of_table(do: Callable[[Table], None]) -> None:
        if world.tables:
            do(table())

    def of_held(do: Callable[[Held], None]) -> None:
        if world.held:
            do(draw.choice(world.held))

    def at_most(number: int) -> int:
        return draw.randint(0, number)

    def some_counts() -> list[int]:
        return [at_most(3) for _ in range(at_most(len(world.tables)))]

    blocks = range(world.books.num_blocks)
    chances: dict[Callable[[], None], int] = {
        lambda: world.open(at_most(1), tokens(11), draw.choice((None, None, 3, 20))): 8,
        lambda: of_table(lambda t: world.append(t, tokens(4))): 8,
        lambda: of_table(lambda t: world.match(t, draw.choice((None, 4)))): 3,
        lambda: of_table(lambda t: world.reserve(t, at_most(3), at_most(2))): 14,
        lambda: of_table(lambda t: world.step(t, 1 + at_most(6))): 18,
        lambda: world.step_of_all(some_counts(), at_most(1)): 6,
        lambda: of_table(lambda t: world.commit(t, at_most(len(t.tokens)))): 14,
        lambda: of_table(lambda t: world.commit(t, len(t.tokens))): 8,
        lambda: of_table(world.fork): 3,
        lambda: of_table(lambda t: world.truncate(t, at_most(len(t.tokens)))): 4,
        lambda: of_table(lambda t: world.free_before(t, at_most(len(t.tokens)))): 2,
        lambda: of_table(lambda t: world.free(t, draw.random() < 0.5)): 10,
        lambda: of_table(lambda t: world.hold_places(t, some(range(len(t.ids))))): 2,
        lambda: world.hold(some(blocks)): 2,
        lambda: world.victims(at_most(3)): 1,
        lambda: world.hold_keys(full(some(range(len(world.words))))): 2,
        lambda: world.onboard(at_most(1), tokens(8), draw.random() < 0.5): 4,
        lambda: world.allocate(at_most(4)): 3,
        lambda: of_held(world.share): 1,
        lambda: of_held(world.export): 1,
        lambda: of_held(lambda h: world.release(h, draw.random() < 0.5)): 12,
        lambda: world.forget(some(world.books.published)): 1,
    }
    rare: list[Callable[[], None]] = [
        world.clear,
        lambda: world.set_policy(draw.choice(("lru", "lfu"))),
    ]
    likely = draw.choices(list(chances), list(chances.values()), k=operations)
    for i, operation in enumerate(likely):
        (draw.choice(rare) if draw.random() < 0.002 else operation)()
        if len(world.tables) > 6 or len(world.held) > 4:
            of_table(lambda t: world.free(t, collected=True))
            of_held(lambda h: world.release(h, collected=True))
        world.check() if i % every else world.check_all()
