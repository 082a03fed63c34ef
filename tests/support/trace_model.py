"""A prefix cache in the plainest words, for comparisons; and requests to try it with.

Everything is a list or a dict that is scanned from its beginning. Blocks are named by
all blocks up to them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Name = tuple[int, ...]


@dataclasses.dataclass
class Asked:
    """One request: its blocks, when it comes, and how long it stays."""

    blocks: list[int]
    arrival: float = 0.0
    stay: float = 0.0

    def names(self) -> list[Name]:
        return [tuple(self.blocks[: i + 1]) for i in range(len(self.blocks))]


class Model:
    """Which blocks are cached, by how many they are held, and who goes first.

    "lfu": idle blocks lie on shelves 0, 1, 2, … by the power of two of their uses; who
    goes is the first on the lowest shelf. After as many evictions as there are places,
    uses count half, and each shelf's blocks go behind those of the shelf below.
    """

    def __init__(self, places: int, policy: str) -> None:
        self.places, self.policy = places, policy
        self.holders: dict[Name, int] = {}
        self.uses: dict[Name, int] = {}
        self.shelves: list[list[Name]] = [[] for _ in range(40)]
        self.evicted = self.in_this_age = 0

    def shelf(self, name: Name) -> list[Name]:
        if self.policy == "lru":
            return self.shelves[0]
        return self.shelves[max(self.uses[name], 1).bit_length() - 1]

    def idle(self) -> list[Name]:
        return [name for shelf in self.shelves for name in shelf]

    def held(self) -> int:
        return sum(count > 0 for count in self.holders.values())

    def hold(self, name: Name) -> None:
        if self.holders[name] == 0:
            next(shelf for shelf in self.shelves if name in shelf).remove(name)
        self.holders[name] += 1

    def drop(self, name: Name) -> None:
        self.holders[name] -= 1
        if self.holders[name] == 0:
            self.shelf(name).append(name)

    def found(self, names: list[Name]) -> int:
        """Holds the longest run that is cached; its length."""
        for count, name in enumerate(names):
            if name not in self.holders:
                return count
            self.uses[name] += 1
            self.hold(name)
        return len(names)

    def compute(self, names: list[Name]) -> bool:
        """Has these held and cached, if there is room for all."""
        if self.held() + len(names) > self.places:
            return False
        while len(self.holders) + len(names) > self.places:
            victim = self.idle()[0]
            next(shelf for shelf in self.shelves if victim in shelf).remove(victim)
            del self.holders[victim], self.uses[victim]
            self.evicted += 1
            self.in_this_age += 1
            if self.policy == "lfu" and self.in_this_age == self.places:
                self.grow_old()
        for name in names:
            self.holders[name], self.uses[name] = 1, 1
        return True

    def grow_old(self) -> None:
        self.in_this_age = 0
        self.uses = {name: count // 2 for name, count in self.uses.items()}
        lowest, *others = self.shelves
        self.shelves = [lowest + others[0], *others[1:], []]


@dataclasses.dataclass
class Outcome:
    hits: int = 0
    evicted: int = 0
    refused: int = 0
    waited: int = 0
    seconds: float = 0.0


def replay(requests: list[Asked], places: int, policy: str, clock: bool) -> Outcome:
    """One request after the other; or each for as long as it stays."""
    model, outcome = Model(places, policy), Outcome()
    waiting: list[tuple[Asked, int]] = []  # and how much of it was found
    running: list[tuple[float, Asked]] = []

    def let_in(now: float) -> None:
        while waiting:
            asked, found = waiting[0]
            names = asked.names()
            found += model.found(names[found:])
            waiting[0] = (asked, found)
            if not model.compute(names[found:]):
                return
            waiting.pop(0)
            outcome.hits += found
            outcome.seconds += now - asked.arrival
            running.append((now + asked.stay if clock else now, asked))
            if not clock:
                let_out(now)

    def let_out(until: float) -> None:
        while running and min(end for end, _ in running) <= until:
            at = min(range(len(running)), key=lambda i: running[i][0])
            end, asked = running.pop(at)
            for name in reversed(asked.names()):
                model.drop(name)
            let_in(end)

    for asked in requests:
        if clock:
            let_out(asked.arrival)
        if len(asked.blocks) > places:
            outcome.refused += 1
            continue
        waiting.append((asked, 0))
        let_in(asked.arrival)
        outcome.waited += bool(waiting)
    let_out(float("inf"))
    assert not waiting and not running
    outcome.evicted = model.evicted
    return outcome


# ---- requests ------------------------------------------------------------------------


def conversations(rng: np.random.Generator, count: int) -> Iterator[Asked]:
    """Some begin with one of three prompts; each goes on from what was said before."""
    open_ones: list[list[int]] = []
    fresh, now = 1000, 0.0
    for _ in range(count):
        now += round(float(rng.exponential(1.0)), 3)
        if not open_ones or rng.random() < 0.4:
            prompt = [range(4), range(10, 12), range(20, 21), range(0)][rng.integers(4)]
            open_ones.append(list(prompt))
        if rng.random() < 0.2:
            said = open_ones.pop(rng.integers(len(open_ones)))
        else:
            # Who spoke lately goes on.
            said = open_ones[-1 - min(int(rng.exponential(3)), len(open_ones) - 1)]
        added = int(rng.integers(1, 5))
        said.extend(range(fresh, fresh + added))
        fresh += added
        yield Asked(list(said), now, float(rng.integers(0, 12)))


def write_trace(path: Path, requests: list[Asked]) -> None:
    """As Mooncake writes it, with a token for each second of a stay."""
    with path.open("w") as file:
        for asked in requests:
            line = {
                "timestamp": round(asked.arrival * 1000),
                "input_length": 512 * len(asked.blocks),
                "output_length": int(asked.stay),
                "hash_ids": asked.blocks,
            }
            file.write(json.dumps(line) + "\n")
