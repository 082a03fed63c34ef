"""What the books of a pool should say, in plain Python.

`BooksModel` keeps the state of each block as docs/cache.md tells it, in sets and lists,
without a thought for speed. Keys are `Words`' numbers: a number stands for a salt and
all tokens up to one, so that two blocks have one number where they hold the same.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

CLASSES = 16  # of how often a block was used, in powers of two


class Words:
    """Beginnings of sequences, as a tree: each has a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._before: list[tuple[int | str, int]] = []

    def __len__(self) -> int:
        return len(self._before)

    def after(self, before: int | str, token: int) -> int:
        """The number of a beginning and one more token; a salt begins."""
        number = self._numbers.setdefault((before, token), len(self._before))
        if number == len(self._before):
            self._before.append((before, token))
        return number

    def along(self, salt: str, tokens: Iterable[int]) -> list[int]:
        """The numbers of all beginnings of a sequence."""
        numbers: list[int] = []
        for token in tokens:
            numbers.append(self.after(numbers[-1] if numbers else salt, token))
        return numbers

    def sequence(self, number: int | str) -> tuple[str, list[int]]:
        """The salt and the tokens that a number stands for."""
        tokens = []
        while not isinstance(number, str):
            number, token = self._before[number]
            tokens.append(token)
        return number, tokens[::-1]


class BooksModel:
    """The books of a pool of so many blocks."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        self.num_blocks, self.policy = num_blocks, policy
        self.free = set(range(num_blocks))
        self.references = [0] * num_blocks
        self.exports: collections.Counter[int] = collections.Counter()
        self.published: dict[int, int] = {}  # a number of `Words` to its block
        self.key_of: dict[int, int] = {}  # and back
        self.idle: list[list[int]] = [[] for _ in range(CLASSES)]
        self.uses = [0] * num_blocks
        self.evictions = 0  # since uses were halved
        self.counters = dict.fromkeys(
            (
                *("lookups", "queried_blocks", "hit_blocks", "allocated", "published"),
                *("evicted", "duplicates", "copied_on_write", "refused"),
            ),
            0,
        )

    @property
    def num_idle(self) -> int:
        return sum(map(len, self.idle))

    @property
    def num_available(self) -> int:
        return len(self.free) + self.num_idle

    def is_idle(self, block: int) -> bool:
        return block in self.key_of and self.references[block] == 0

    def is_shared(self, block: int) -> bool:
        """Whether others than one holder see what is in it."""
        return block in self.key_of or self.references[block] > 1

    def victims(self, count: int) -> list[int]:
        """Who is evicted next."""
        return [block for blocks in self.idle for block in blocks][:count]

    # ---- transitions ----

    def class_of(self, block: int) -> int:
        if self.policy == "lru":
            return 0
        return min(max(self.uses[block].bit_length() - 1, 0), CLASSES - 1)

    def hold(self, block: int) -> None:
        assert block not in self.free
        if self.is_idle(block):
            (held,) = [blocks for blocks in self.idle if block in blocks]
            held.remove(block)
        self.references[block] += 1

    def drop(self, block: int) -> None:
        assert self.references[block] > 0
        self.references[block] -= 1
        if self.references[block]:
            return
        if block not in self.key_of:
            self.free.add(block)
        else:
            self.idle[self.class_of(block)].append(block)

    def can_take(self, count: int) -> bool:
        if count <= self.num_available:
            return True
        self.counters["refused"] += 1
        return False

    def take(self, blocks: list[int]) -> None:
        """These were taken: first all that are free, in any order, then victims."""
        for block in blocks:
            if self.free:
                assert block in self.free, f"{block} is not free, and others are"
            else:
                (victim,) = self.victims(1)
                assert block == victim, f"{block} was evicted before {victim}"
                self.evict(block)
            self.free.remove(block)
            self.references[block] += 1
        self.counters["allocated"] += len(blocks)

    def evict(self, block: int) -> None:
        self.forget(block)
        self.counters["evicted"] += 1
        if self.policy == "lru":
            return
        self.evictions += 1
        if self.evictions < self.num_blocks:
            return
        self.evictions = 0
        self.uses = [uses // 2 for uses in self.uses]
        first, second, *others = self.idle
        self.idle = [first + second, *others, []]

    def match(self, key: int) -> int | None:
        """The block of a key, held once more."""
        block = self.published.get(key)
        if block is not None:
            self.uses[block] += 1
            self.hold(block)
        return block

    def publish(self, block: int, key: int) -> int:
        assert self.references[block] > 0 and block not in self.key_of
        if key in self.published:
            self.counters["duplicates"] += 1
            return self.published[key]
        self.published[key], self.key_of[block] = block, key
        self.uses[block] = 1
        self.counters["published"] += 1
        return block

    def forget(self, block: int) -> None:
        if self.is_idle(block):
            (held,) = [blocks for blocks in self.idle if block in blocks]
            held.remove(block)
            self.free.add(block)
        del self.published[self.key_of.pop(block)]

    def set_policy(self, policy: str) -> None:
        self.policy = policy
        self.idle = [self.victims(self.num_blocks), *([] for _ in range(CLASSES - 1))]
