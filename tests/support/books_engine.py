"""An engine without a model, over the real books: what it serves is an echo, but its
blocks are found, shared, published, evicted and given back as those of any engine.

It runs thousands of tokens a second, so a short run has many requests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time

import jax.numpy as jnp
import numpy as np
from fake_engine import FakeModel, check_request, check_room
from serve.interface import (
    FREE,
    HELD,
    IDLE,
    SHARED,
    Event,
    Request,
    Stats,
    Stream,
)

from jax_kvblock import BlockManager, BlockSpec
from jax_kvblock.cache import PrefixCache
from jax_kvblock.cache.table import BlockTable

BLOCK_SIZE = 8


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request that runs: its stream, its blocks, what it said so far."""

    stream: Stream
    table: BlockTable
    said: list[int] = dataclasses.field(default_factory=list)
    shown: str = ""


class BooksEngine:
    """As `serve.interface.Engine`: the answer is the prompt, over and over.

    Args:
        num_blocks: of the pool, of 8 tokens each.
        max_running: requests that run at a time.
        max_waiting: requests that may wait.
        max_tokens: of a prompt and its answer.
        delay: of a step, in seconds.
    """

    ready, trouble = True, ""  # there are no programs

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        max_running: int = 4,
        max_waiting: int = 8,
        max_tokens: int = 512,
        delay: float = 0.0,
    ) -> None:
        self.model = FakeModel()
        self.max_tokens, self.delay = max_tokens, delay
        spec = BlockSpec(1, 1, BLOCK_SIZE, 1, 1, jnp.float32)
        self.manager = BlockManager.from_spec(spec, num_blocks, device="cpu")
        self.cache = PrefixCache(self.manager, model="echo")
        self.streams: list[Stream] = []  # kept if a test asks for it
        self.keep_streams = False
        self._max_running, self._max_waiting = max_running, max_waiting
        self._changed = threading.Condition()
        self._waiting: collections.deque[Stream] = collections.deque()
        self._running: list[Sequence] = []
        self._cancelled: set[Stream] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._times: collections.deque[float] = collections.deque(maxlen=100_000)
        self.stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    # ---- from any thread ----

    def submit(self, request: Request) -> Stream:
        room = self.manager.num_blocks * BLOCK_SIZE
        check_request(request, min(self.max_tokens, room))
        with self._changed:
            check_room(self.stopped, len(self._waiting), self._max_waiting)
            stream = Stream(request, self._cancel)
            self._waiting.append(stream)
            if self.keep_streams:
                self.streams.append(stream)
            self._changed.notify_all()
        return stream

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            self._cancelled.add(stream)
            self._changed.notify_all()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> Stats:
        with self._changed:
            counts, states = self._counts.copy(), self._states()
            running, waiting = len(self._running), len(self._waiting)
            recent = sum(moment > time.monotonic() - 10 for moment in self._times)
        blocks = np.bincount(states, minlength=4)
        return Stats(
            running=running,
            waiting=waiting,
            max_waiting=self._max_waiting,
            finished=counts["finished"],
            cancelled=counts["cancelled"],
            failed=0,
            steps=counts["steps"],
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            new_tokens=counts["new"],
            drafted_tokens=0,
            accepted_tokens=0,
            preemptions=0,
            offloaded_preemptions=0,
            programs=0,
            tokens_per_second=recent / 10,
            mean_time_to_first_token=math.nan,
            num_blocks=len(states),
            free_blocks=int(blocks[FREE]),
            held_blocks=int(blocks[HELD] + blocks[SHARED]),
            shared_blocks=int(blocks[SHARED]),
            idle_blocks=int(blocks[IDLE]),
        )

    def pool_map(self) -> np.ndarray:
        with self._changed:
            return self._states()

    def _states(self) -> np.ndarray:
        books = self.cache._free_list
        states = np.full(self.manager.num_blocks, FREE, np.uint8)
        for block in range(len(states)):
            holders = books.references(block)
            if holders:
                states[block] = HELD if holders == 1 else SHARED
            elif books.is_published(block):
                states[block] = IDLE
        return states

    # ---- the loop ----

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self.stopped):
                    self._changed.wait()
                if self.stopped:
                    self._cancelled |= {*self._waiting}
                    self._cancelled |= {each.stream for each in self._running}
                self._end_cancelled()
                if self.stopped:
                    return
                self._admit()
                self._counts["steps"] += 1
                for sequence in [*self._running]:
                    self._advance(sequence)
            time.sleep(self.delay)  # others get the lock

    def _end_cancelled(self) -> None:
        for sequence in [*self._running]:
            if sequence.stream in self._cancelled:
                self._end(sequence, Event(None, "", "cancelled"))
        for stream in [*self._waiting]:
            if stream in self._cancelled:
                self._waiting.remove(stream)
                self._count_end("cancelled")
                stream.put(Event(None, "", "cancelled"))
        self._cancelled.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            stream = self._waiting[0]
            most = stream.num_prompt_tokens + stream.request.max_new_tokens
            if not self.cache.can_admit(-(-most // BLOCK_SIZE)):
                return
            table = self.cache.open([int(token) for token in stream.request.prompt])
            table.reserve(most)
            stream.num_cached_tokens = table.num_cached_tokens
            self._counts["prompt"] += stream.num_prompt_tokens
            self._counts["cached"] += stream.num_cached_tokens
            table.commit(stream.num_prompt_tokens)
            self._waiting.popleft()
            self._running.append(Sequence(stream, table))

    def _advance(self, sequence: Sequence) -> None:
        request = sequence.stream.request
        token = int(request.prompt[len(sequence.said) % len(request.prompt)])
        sequence.said.append(token)
        sequence.table.append(token)
        sequence.table.commit(sequence.table.num_tokens)
        self._counts["new"] += 1
        self._times.append(time.monotonic())
        text = self.model.tokenizer.decode(sequence.said).rstrip("\ufffd")
        new, sequence.shown = text[len(sequence.shown) :], text
        stop = token == 0 and not request.ignore_end
        if stop or len(sequence.said) == request.max_new_tokens:
            self._end(sequence, Event(token, new, "stop" if stop else "length"))
        else:
            sequence.stream.put(Event(token, new))

    def _end(self, sequence: Sequence, event: Event) -> None:
        self._running.remove(sequence)
        sequence.table.free()
        self._count_end(str(event.finish_reason))
        sequence.stream.put(event)

    def _count_end(self, reason: str) -> None:
        self._counts["finished"] += 1
        self._counts["cancelled"] += reason == "cancelled"
