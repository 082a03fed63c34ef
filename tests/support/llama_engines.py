"""Engines of the server over a tiny model, and what is right for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_files import TinyModel, dense_logits
from serve.drafts import Draft
from serve.engine import Engine
from serve.interface import Request, Stream

# Two logits that are nearer than this could change places by rounding.
MARGIN = 1e-4

VOCABULARY = 256  # tokens of prompts are below
# What several prompts begin with.
BEGINNING = np.random.default_rng(1).integers(VOCABULARY, size=40).tolist()


def prompts() -> list[list[int]]:
    """A single token, whole blocks, the same beginning, texts that repeat."""
    random = np.random.default_rng(2)

    def some(size: int) -> list[int]:
        return random.integers(VOCABULARY, size=size).tolist()

    lines = some(6)
    return [
        some(1),
        [*BEGINNING, *some(3)],
        some(16),
        [*BEGINNING, *some(9)],
        lines * 5,
        some(61),
        BEGINNING[:32],
        [*some(2), *lines, *lines[:3]],
    ]


def ask(engine: Engine, prompt: Sequence[int], most: int = 12, **given: Any) -> Stream:
    """Submit a request that only its length ends."""
    request = Request(prompt=prompt, max_new_tokens=most, ignore_end=True, **given)
    return engine.submit(request)


def tokens_of(stream: Stream) -> list[int]:
    return [event.token_id for event in stream if event.token_id is not None]


class Greedy:
    """What the model says token by token, each computed in float64 over all before."""

    def __init__(self, drawn: TinyModel) -> None:
        self._drawn = drawn
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def after(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens behind a prompt, each likelier by a margin."""
        found = self._texts.setdefault(tuple(prompt), [])
        while len(found) < count:
            logits = dense_logits(self._drawn, [*prompt, *found])[-1]
            *_, second, first = np.sort(logits)
            assert first - second > MARGIN, "a tie: the test would say nothing"
            found.append(int(logits.argmax()))
        return found[:count]

    def check(self, prompt: Sequence[int], stream: Stream, count: int) -> None:
        assert tokens_of(stream) == self.after(prompt, count)


class Guesses:
    """Drafts of random trees, in which some rows are right, in place of a lookup.

    Args:
        texts: all texts that will come, whole.
        seed: of the trees.
    """

    def __init__(self, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self._texts = [list(text) for text in texts]
        self._random = np.random.default_rng(seed)
        self.accepted: list[list[int]] = []  # rows, of each tree
        self.learnt: list[int] = []  # how many the engine says

    def __call__(self, tokens: Sequence[int]) -> Guesses.Lookup:
        return Guesses.Lookup(self, tokens)

    class Lookup:
        def __init__(self, guesses: Guesses, tokens: Sequence[int]) -> None:
            self._guesses, self._tokens = guesses, list(tokens)

        def extend(self, tokens: Sequence[int]) -> None:
            self._tokens += tokens

        def propose(self, most: int) -> Draft | None:
            return self._guesses._tree(self._tokens, most)

        def learn(self, num_accepted: int) -> None:
            self._guesses.learnt.append(num_accepted)

    def _tree(self, tokens: list[int], most: int) -> Draft | None:
        size, random = len(tokens), self._random
        # Where a prompt is the beginning of another one, it is the shorter text.
        coming = min((t for t in self._texts if t[:size] == tokens), key=len)[size:]
        made: list[int] = []
        parents: list[int] = []
        right = [0]  # rows, each behind the one before
        for row in range(1, most + 1):
            if random.random() < 0.6 and len(right) <= len(coming):
                parent, token = right[-1], coming[len(right) - 1]
                right.append(row)
            else:
                parent = int(random.integers(row))
                token = int(random.integers(300, 400))  # none of the texts'
            parents.append(parent)
            made.append(token)
        self.accepted.append(right[1:])
        return Draft(tuple(made), tuple(parents)) if made else None


def check_books(engine: Engine) -> None:
    """Nobody holds a block, and none is lost."""
    (engine.tiers or engine.cache).check()
    stats = engine.stats()
    assert stats["held_blocks"] == stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] + stats["idle_blocks"] == stats["num_blocks"]
