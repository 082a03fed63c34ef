"""Continuous batching: which tokens go through the model next, and where keys go.

A step takes the next tokens of all running sequences: one of a sequence that decodes,
as many as there is room for of one that still reads its prompt. Sequences join when a
place and blocks are free, and leave when they end. A sequence gets a block when its
tokens reach it. Where none is left, the sequence that came last gives its blocks back,
waits, and is read again.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jax_kvblock import BlockList, BlockManager


@dataclass(eq=False)
class Sequence:
    """A prompt and what follows it.

    Attributes:
        tokens: the prompt's tokens, then the new ones.
        most_new: how many new ones there may be.
        num_prompt: how many are the prompt's.
        blocks: where keys and values of the first `num_cached` tokens lie.
        num_rows: how many of the next tokens are in the present step.
        history: a letter for each step, see `letter`.
    """

    name: str
    tokens: list[int]
    most_new: int
    num_prompt: int = field(init=False)
    blocks: BlockList | None = None
    num_cached: int = 0
    num_rows: int = 0
    ended: bool = False
    history: str = ""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def letter(self) -> str:
        """What it does in this step: wait, decode or read; nothing once it ended."""
        if self.ended:
            return " "
        return ".dR"[min(self.num_rows, 2)]


class Batch(NamedTuple):
    """What the model is given for a step.

    Attributes:
        tokens, positions: int32[rows], those of all sequences, one after the other.
        slots: int32[rows], where keys and values go; -1 behind the last row.
        tables: int32[places, width], each sequence's blocks in order, then -1.
        kv_lens: int32[places], each sequence's length, the rows of this step included.
        query_start: int32[places + 1], each sequence's first row, then the end.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    kv_lens: np.ndarray
    query_start: np.ndarray


class Scheduler:
    """Sequences that wait, and those that run, the oldest first.

    Args:
        manager: whose blocks they get.
        places: how many run at the same time.
        rows: tokens of a step, at most.
        width: blocks of a sequence, at most.
        end: the token that ends a sequence; -1 for none.
    """

    def __init__(
        self, manager: BlockManager, places: int, rows: int, width: int, end: int
    ) -> None:
        self.manager = manager
        self.places, self.rows, self.width, self.end = places, rows, width, end
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_put_back = 0

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        longest = self._blocks_for(sequence.num_prompt + sequence.most_new)
        if longest > min(self.width, self.manager.num_blocks):
            raise ValueError(f"{sequence.name} may need {longest} blocks, too many")
        self.waiting.append(sequence)

    def next_batch(self) -> Batch | None:
        """The rows of the next step, with blocks for their keys; None at the end."""
        self._let_join()
        room, index = self.rows, 0
        while index < len(self.running):  # which gets shorter where blocks run out
            sequence = self.running[index]
            todo = len(sequence.tokens) - sequence.num_cached
            if self._reserve(sequence, min(todo, room)):
                room -= sequence.num_rows
                index += 1
        return self._batch() if self.running else None

    def take(self, next_tokens: np.ndarray) -> int:
        """Note what follows the last row of each sequence; returns how many are new."""
        num_new = 0
        for sequence, token in zip(list(self.running), next_tokens, strict=False):
            sequence.num_cached += sequence.num_rows
            if sequence.num_cached < len(sequence.tokens):
                continue  # the next step reads on
            sequence.tokens.append(int(token))
            num_new += 1
            if token == self.end or len(sequence.new_tokens) == sequence.most_new:
                sequence.ended = True
                self._leave(sequence)
        return num_new

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.manager.spec.block_size)

    def _let_join(self) -> None:
        """Take in those that wait, in order, while there are places and blocks."""
        free = self.manager.num_free_blocks
        while self.waiting and len(self.running) < self.places:
            free -= self._blocks_for(len(self.waiting[0].tokens))
            if free < 0:
                return
            sequence = self.waiting.popleft()
            sequence.blocks = self.manager.allocate_blocks(0)
            self.running.append(sequence)

    def _reserve(self, sequence: Sequence, num_rows: int) -> bool:
        """Blocks for the next tokens of a sequence; False where it had to leave."""
        wanted = self._blocks_for(sequence.num_cached + num_rows) - len(sequence.blocks)
        while wanted > self.manager.num_free_blocks:
            last = self.running[-1]
            self._leave(last)
            self.waiting.appendleft(last)
            self.num_put_back += 1
            if last is sequence:
                return False
        sequence.blocks += self.manager.allocate_blocks(wanted)
        sequence.num_rows = num_rows
        return True

    def _leave(self, sequence: Sequence) -> None:
        sequence.blocks.free()
        sequence.blocks, sequence.num_cached, sequence.num_rows = None, 0, 0
        self.running.remove(sequence)

    def _batch(self) -> Batch:
        counts = [sequence.num_rows for sequence in self.running]
        # Two shapes, hence two programs: a row for each place, or room for prompts.
        rows = self.places if max(counts) == 1 else self.rows
        batch = Batch(
            tokens=np.zeros(rows, np.int32),
            positions=np.zeros(rows, np.int32),
            slots=np.full(rows, -1, np.int32),
            tables=np.full((self.places, self.width), -1, np.int32),
            kv_lens=np.zeros(self.places, np.int32),
            query_start=np.full(self.places + 1, sum(counts), np.int32),
        )
        row = 0
        for i, sequence in enumerate(self.running):
            start, count = sequence.num_cached, sequence.num_rows
            batch.tokens[row : row + count] = sequence.tokens[start : start + count]
            batch.positions[row : row + count] = range(start, start + count)
            batch.slots[row : row + count] = sequence.blocks.slots(start, count)
            batch.tables[i] = sequence.blocks.page_table(self.width)
            batch.kv_lens[i] = start + count
            batch.query_start[i] = row
            row += count
        return batch
