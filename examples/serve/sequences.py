"""A request while it is served."""

import time
from array import array
from dataclasses import dataclass, field

from jax_kvblock.cache import BlockTable, Onboard, Parked, Resuming
from serve.drafts import PromptLookup
from serve.interface import Event, FinishReason, Request, Stream
from serve.text import TextStream


@dataclass(eq=False)
class Sequence:
    """A request, its tokens, and where their keys and values are.

    Attributes:
        stream: where its tokens go.
        number: requests are counted as they come.
        text: makes text of its tokens.
        ends: tokens that end it.
        lookup: finds drafts; None without drafts.
        prompt: a table without blocks, of the prompt: its tokens are read and its keys
            made once, where it was submitted, and not between two steps.
        tokens: the prompt's, then the new ones that are known; int32. Of a list the
            collector of garbage would look at each of them, whenever Python has it.
        num_cached: of how many the keys and values are in the pool, or on their way
            there by a step that was dispatched.
        num_unread: new tokens that a step has drawn, and nobody has read.
        table: its blocks; None while it waits.
        arriving: blocks that come from a lower tier; no row is computed before.
        parked: what brings it back from a lower tier.
        row: the output of the last step that drew its newest token, while unread.
    """

    stream: Stream
    number: int
    text: TextStream
    ends: frozenset[int]
    lookup: PromptLookup | None
    prompt: BlockTable
    tokens: array
    num_cached: int = 0
    num_unread: int = 0
    table: BlockTable | None = None
    arriving: Onboard | Resuming | None = None
    parked: Parked | None = None
    row: int = -1
    admitted: bool = False  # once, whatever happened since
    began: float = field(default_factory=time.monotonic)
    sought: frozenset[bytes] | None = None  # keys of its blocks, once it was asked
    # Asked for many times in a step, so not properties.
    request: Request = field(init=False)
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.stream.request
        self.num_prompt = len(self.request.prompt)

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first is admitted first, and preempted last."""
        return -self.request.priority, self.number

    @property
    def ended(self) -> bool:
        return self.stream.finish_reason is not None

    @property
    def num_new(self) -> int:
        """New tokens, those among them that nobody has read."""
        return len(self.tokens) + self.num_unread - self.num_prompt

    @property
    def num_left(self) -> int:
        """New tokens that may follow."""
        return self.request.max_new_tokens - self.num_new

    @property
    def num_todo(self) -> int:
        """Tokens whose keys and values are to be computed."""
        return len(self.tokens) + self.num_unread - self.num_cached

    def deliver(self, new: list[int]) -> list[int]:
        """Hand out tokens that come next; returns those up to the text's end."""
        left = self.request.max_new_tokens + self.num_prompt - len(self.tokens)
        plain = not self.request.stop and self.ends.isdisjoint(new)
        if plain and 1 < len(new) < left:
            texts = self.text.push_together(new)
            self.stream.put(*map(Event, new, texts))
            return new
        events: list[Event] = []
        for token in new:
            ends = token in self.ends
            text, stopped = ("", False) if ends else self.text.push(token)
            reason: FinishReason | None = "stop" if ends or stopped else None
            if reason is None and len(events) + 1 == left:
                reason = "length"
            if reason is not None and not stopped:
                text += self.text.finish()
            events.append(Event(token, text, reason))
            if reason is not None:
                break
        self.stream.put(*events)
        return new[: len(events)]

    def open(self) -> BlockTable:
        """A table of all its tokens, with the blocks of its beginning that are here."""
        table = self._table()
        table.match()
        return table

    def keys_sought(self, block_size: int) -> frozenset[bytes]:
        """Of the blocks ahead of its last token; while it waits they stay the same."""
        if self.sought is None:
            table = self._table()
            self.sought = frozenset(table.keys[: (table.num_tokens - 1) // block_size])
        return self.sought

    def _table(self) -> BlockTable:
        """A table of all its tokens, without blocks."""
        table = self.prompt.fork()
        table.append(self.tokens[table.num_tokens :])
        return table

    def extend(self, tokens: list[int]) -> None:
        """Note new tokens that are known; its table is told by the engine."""
        self.tokens.extend(tokens)
        self.sought = None
        if self.lookup is not None:
            self.lookup.extend(tokens)

    def num_publishable(self, block_size: int) -> int:
        """How many tokens are written by steps so far; 0 if they fill no block more."""
        if self.table is None:
            return 0
        known = min(self.num_cached, len(self.tokens))
        fills = known // block_size * block_size > self.table.num_committed_tokens
        return known if fills else 0
