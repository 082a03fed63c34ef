"""The engine: requests come, steps are dispatched and read, streams get their tokens.

    submit ─▶ inbox ─▶ waiting ─▶ running ──plan──▶ batch ──step, one program──▶ tokens
                          ▲          │ blocks run out                              │
                          └──────────┘               streams ◀── text, ends ◀──────┘

Without drafts a step is dispatched before the tokens of the one before are read: they
are on the device already. So the host plans while the device computes.
"""

import itertools
import logging
import os
import threading
import time
import weakref
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_kvblock import BlockManager, BlockTable, PrefixCache
from jax_kvblock.cache import TieredCache, append_tokens, commit_tokens
from serve import counts
from serve.drafts import MOST_DRAFTS, PromptLookup
from serve.inbox import Inbox
from serve.interface import (
    FREE,
    HELD,
    IDLE,
    SHARED,
    Event,
    FinishReason,
    Request,
    Stats,
    Stream,
    check_whole,
)
from serve.models import LoadedModel
from serve.runner import Runner, step_shapes
from serve.scheduler import Part, Scheduler
from serve.sequences import Sequence
from serve.text import TextStream

_log = logging.getLogger(__name__)
POLL = 0.0002  # seconds between looks at transfers, while nothing is computed
COPY_POLL = 0.01  # while nobody waits, and blocks are copied to where they last
GPU_DECODE_STEPS = 4


@dataclass(frozen=True)
class _Flight:
    """A step that was dispatched, or several: whose tokens come from which outputs."""

    parts: list[tuple[Part, int]]
    tokens: jax.Array


class Engine:
    """Serves requests from one pool of blocks.

    Args:
        model: what computes.
        num_blocks, block_size: of the pool.
        max_batch: sequences that run at the same time.
        max_tokens_per_step: rows of a step, at most: prompts are read in such chunks.
        draft_tokens: guesses behind a sequence's newest token; 0 for none.
        decode_steps: steps of one program where all that run decode: the host is asked
            once for so many tokens of each, and who comes meanwhile waits for them.
            None: 4 on a GPU without drafts, where steps wait for the host; else 1.
        fuse_layers: compute what lies between the attentions of two layers by one
            kernel, where it serves: up to 64 rows of bfloat16, a small model, a Hopper
            (`between.py`).
        max_waiting: requests that may wait.
        max_tokens: of a prompt and its new tokens; what model and pool allow if None.
        host_bytes: memory of a tier below the device, to which sequences that make way
            are moved; 0 for none: they are computed again.
        store: a tier below that one, as for `TieredCache`; what is read and made goes
            there, the rest of it in `stop`.
        disk, disk_bytes: or a folder for it, and how much of its disk it may take.
        policy, reserve: as for `PrefixCache`.

    Attributes:
        ready: whether all programs are compiled.
        trouble: why they do not compile, or why no step can be computed any more;
            empty where all is well.

    Raises:
        ValueError: for sizes that do not go together, or are none.
        TypeError: for sizes that are no whole numbers.

    Example:
        >>> engine = Engine(load_model(), num_blocks=256)
        >>> engine.start()
        >>> engine.submit(Request(prompt=engine.model.tokenizer.encode("Hi"))).text()
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_batch: int = 8,
        max_tokens_per_step: int = 128,
        draft_tokens: int = 0,
        decode_steps: int | None = None,
        fuse_layers: bool = True,
        max_waiting: int = 64,
        max_tokens: int | None = None,
        host_bytes: int = 0,
        store: Any = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int = 1 << 30,
        policy: str = "lru",
        reserve: float = 0.02,
    ) -> None:
        optional = {"decode_steps": decode_steps, "max_tokens": max_tokens}
        check_whole(
            "Engine",
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch=max_batch,
            max_tokens_per_step=max_tokens_per_step,
            draft_tokens=draft_tokens,
            max_waiting=max_waiting,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            **{name: value for name, value in optional.items() if value is not None},
        )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(
                "Engine: max_tokens must be from 1 on, or None for what model and pool "
                f"allow, got {max_tokens}"
            )
        if max_waiting < 1:
            raise ValueError(f"Engine: max_waiting must be above 0, got {max_waiting}")
        if not 1 <= max_batch <= max_tokens_per_step:
            raise ValueError(
                "Engine: max_batch must be from 1 to max_tokens_per_step="
                f"{max_tokens_per_step}, got {max_batch}"
            )
        if not 0 <= draft_tokens <= MOST_DRAFTS:
            raise ValueError(
                f"Engine: draft_tokens must be from 0 to {MOST_DRAFTS}, got "
                f"{draft_tokens}"
            )
        if decode_steps is None:
            gpu = jax.default_backend() == "gpu"
            decode_steps = GPU_DECODE_STEPS if gpu and not draft_tokens else 1
        if decode_steps < 1 or (decode_steps > 1 and draft_tokens):
            raise ValueError(
                "Engine: decode_steps must be from 1 on, and 1 beside draft_tokens, "
                f"got {decode_steps}"
            )
        self.model = model
        self.max_waiting = max_waiting
        most = model.max_tokens if max_tokens is None else max_tokens
        self.max_tokens = min(model.max_tokens, num_blocks * block_size, most)
        config = model.config
        self._manager = BlockManager(
            config.num_layers,
            block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            num_blocks=num_blocks,
        )
        self.cache = PrefixCache(
            self._manager,
            model=f"{model.name} {model.revision}",
            policy=policy,
            reserve=reserve,
        )
        self.tiers = self._disk = None
        if disk is not None:
            if not host_bytes or store is not None:
                raise ValueError(
                    "Engine: a disk lies below host memory; pass host_bytes, and no "
                    "store beside it"
                )
            from jax_kvblock.cache.disk import DiskTier

            self._disk = store = DiskTier(
                disk,
                namespace=self.cache.namespace.digest,
                block_bytes=self._manager.spec.block_bytes,
                max_bytes=disk_bytes,
            )
        if host_bytes:
            # A store is there for the next start, too: all that is idle goes there.
            self.tiers = TieredCache(
                self.cache,
                host_bytes=host_bytes,
                store=store,
                write_through=store is not None,
            )
        self._scheduler = Scheduler(
            self.cache,
            self.tiers,
            max_batch,
            max_tokens_per_step,
            draft_tokens,
            decode_steps,
        )
        width = -(-self.max_tokens // block_size)
        shapes = step_shapes(
            model.dtype,
            max_batch,
            width,
            draft_tokens,
            max_tokens_per_step,
            decode_steps,
        )
        self._runner = Runner(model, self._manager, shapes, fuse_layers)
        self._flights: deque[_Flight] = deque()
        self._ahead = 0 if draft_tokens else 1
        self._counts = counts.Counts()
        self._inbox = Inbox(max_waiting, lambda: len(self._scheduler.waiting))
        self._numbers = itertools.count()
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False  # by `stop`
        self._copies = False  # whether blocks are to be copied though no step comes
        self.ready, self.trouble = False, ""

    # ---- for everybody ----

    @property
    def stopped(self) -> bool:
        """Whether it takes no requests any more."""
        return self._inbox.closed

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
            ValueError: if it is too long, or a token is none of the model's.
            QueueFullError: if `max_waiting` requests wait already.
            RuntimeError: if the engine has stopped.
        """
        self._inbox.check()  # a prompt is read and hashed for nothing else

        def cancel(_: Stream) -> None:
            sequence = known()
            if sequence is not None:
                self._inbox.cancel(sequence)

        stream = Stream(request, cancel)
        sequence = self._sequence(stream, self._prompt(request))
        # Or both would lead to each other, and stay until garbage is collected.
        known = weakref.ref(sequence)
        self._inbox.add(sequence)
        return stream

    def start(self) -> None:
        """Serve in a thread of its own, until `stop`; it compiles all programs first.

        Raises:
            RuntimeError: if it was started, or has stopped.
        """
        if self._thread is not None or self._inbox.closed:
            raise RuntimeError("start: the engine was started before")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; open streams end with "cancelled". Again does nothing.

        Idle blocks are kept in the store, for which threads are started: call it before
        the interpreter ends, not by `atexit`.
        """
        self._inbox.close()
        with self._stepping:
            if self._ended:
                return
            self._ended = True
        if self._thread is not None:
            self._thread.join()
        with self._stepping:
            self._orders()
            for each in (*self._scheduler.running, *self._scheduler.waiting):
                self._end(each, "cancelled")
            self._flights.clear()
            if self.tiers is not None:
                self._keep()
                self.tiers.close()
            if self._disk is not None:
                self._disk.close()

    def _keep(self) -> None:
        """Have what is idle in the store, for the next start."""
        if self.tiers is None or not self.tiers.write_through:
            return
        try:
            self.tiers.flush()
        except Exception:  # it is a cache: the engine stops all the same
            _log.exception("not all blocks were kept")

    def stats(self) -> Stats:
        """Counts, for people and monitors."""
        counted, scheduler = self._counts, self._scheduler
        blocks = np.bincount(self.pool_map(), minlength=4).tolist()
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            max_waiting=self.max_waiting,
            finished=counted.finished,
            cancelled=counted.cancelled,
            failed=counted.failed,
            steps=counted.steps,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            new_tokens=counted.new_tokens,
            drafted_tokens=counted.drafted_tokens,
            accepted_tokens=counted.accepted_tokens,
            preemptions=scheduler.preemptions,
            offloaded_preemptions=scheduler.resumed,
            programs=self._runner.num_programs,
            tokens_per_second=counted.tokens_per_second,
            mean_time_to_first_token=counted.mean_time_to_first_token,
            num_blocks=self._manager.num_blocks,
            free_blocks=blocks[FREE],
            held_blocks=blocks[HELD] + blocks[SHARED],
            shared_blocks=blocks[SHARED],
            idle_blocks=blocks[IDLE],
        )

    def pool_map(self) -> np.ndarray:
        """uint8[num_blocks]: 0 free, 1 held by one, 2 shared by several, 3 idle."""
        return counts.pool_map(self._manager)

    def run(self) -> None:
        """Serve in this thread until nobody waits or runs."""
        while self._busy():
            if not self.step():
                time.sleep(POLL)

    def compile(self) -> None:
        """Compile all programs now, by steps without rows, or until it is stopped."""
        with self._stepping:
            if not self._runner.compile(lambda: self._inbox.closed):
                return
            if self.tiers is not None:
                self.tiers.compile()
        self.ready = True

    def step(self) -> bool:
        """Dispatch a step and read one; whether there was any."""
        with self._stepping:
            try:
                return self._step()
            except Exception as error:
                _log.exception("a step failed")
                self._fail(f"{type(error).__name__}: {error}")
                return True

    # ---- a request comes and goes ----

    def _prompt(self, request: Request) -> BlockTable:
        """A request's prompt, checked: a table without blocks."""
        most = len(request.prompt) + request.max_new_tokens
        if most > self.max_tokens:
            raise ValueError(
                f"submit: prompt and max_new_tokens are {len(request.prompt)} + "
                f"{request.max_new_tokens} tokens, of at most {self.max_tokens}; "
                "shorten the prompt, ask for fewer tokens, or have more blocks"
            )
        vocabulary = self.model.config.vocab_size

        def check(tokens: np.ndarray) -> None:
            for token in (tokens.min(), tokens.max()):
                if not 0 <= token < vocabulary:
                    raise ValueError(
                        f"submit: a token of the prompt is {token}, none of the "
                        f"model's {vocabulary}"
                    )

        try:
            prompt = self.cache.empty_table(request.prompt)
        except (TypeError, ValueError):
            check(np.array(request.prompt, object))  # one may have more than 32 bits
            raise
        check(prompt.tokens)
        return prompt

    def _sequence(self, stream: Stream, prompt: BlockTable) -> Sequence:
        request, tokenizer = stream.request, self.model.tokenizer
        ends = frozenset(request.stop_tokens)
        if not request.ignore_end:
            ends |= tokenizer.end_tokens
        text = TextStream(tokenizer.decode, request.stop, request.prompt)
        lookup = PromptLookup(request.prompt) if self._scheduler.drafts else None
        number = next(self._numbers)
        tokens = array("i", prompt.tokens.tobytes())
        return Sequence(stream, number, text, ends, lookup, prompt, tokens)

    def _orders(self) -> None:
        """Take in what other threads have asked for."""
        came, gone = self._inbox.take()
        for sequence in came:
            self._scheduler.add(sequence)
        for sequence in gone:
            self._end(sequence, "cancelled")

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a stream from outside of its text."""
        if not sequence.ended:
            event = Event(None, sequence.text.finish(), reason, error or None)
            sequence.stream.put(event)
            self._counts.finished += 1
            self._counts.cancelled += reason == "cancelled"
            self._counts.failed += reason == "error"
        self._scheduler.remove(sequence)

    # ---- the loop ----

    def _serve(self) -> None:
        try:
            self._compile_first()
            while not self._inbox.closed:
                if not self.step():  # a transfer may be under way
                    idle = COPY_POLL if self._copies else None
                    self._inbox.wait(POLL if self._busy() else idle)
        except Exception as error:  # of a step that failed nothing could be made good
            _log.exception("no step can be computed any more: the engine stops")
            self.trouble = f"{type(error).__name__}: {error}"
            self._give_up()

    def _compile_first(self) -> None:
        try:
            self.compile()
        except Exception as error:
            _log.exception("the programs do not compile")
            self.trouble = f"{type(error).__name__}: {error}"
            self._fail(self.trouble)

    def _give_up(self) -> None:
        """Whoever waits is told, and nobody may come: what is lost stays lost."""
        self._inbox.close()
        came, _ = self._inbox.take()
        scheduler = self._scheduler
        for sequence in (*scheduler.running, *scheduler.waiting, *came):
            if not sequence.ended:
                sequence.stream.put(Event(None, "", "error", self.trouble))
                self._counts.finished += 1
                self._counts.failed += 1

    def _busy(self) -> bool:
        scheduler = self._scheduler
        waiting = scheduler.waiting or scheduler.running
        return bool(waiting or self._flights or not self._inbox.empty)

    def _step(self) -> bool:
        self._orders()
        if self.tiers is not None:
            self._copies = self.tiers.maintain()
        parts = self._scheduler.plan()
        if parts:
            self._dispatch(parts)
        read = False
        while len(self._flights) > (self._ahead if parts else 0):
            self._read(self._flights.popleft())
            read = True
        return bool(parts) or read

    def _dispatch(self, parts: list[Part]) -> None:
        outputs, tokens = self._runner.dispatch(parts)
        self._counts.steps += max(part.steps for part in parts)
        for part in parts:
            part.sequence.num_cached += part.num_tokens + part.steps - 1
        self._publish([part.sequence for part in parts])
        for part, output in outputs:
            part.sequence.num_unread += part.steps
            part.sequence.row = output
        self._flights.append(_Flight(outputs, tokens))

    def _read(self, flight: _Flight) -> None:
        # Of each output, the tokens of all steps. This waits for them.
        columns = np.atleast_2d(np.asarray(flight.tokens)).T.tolist()
        now, count = time.monotonic(), 0
        came: list[tuple[Sequence, list[int]]] = []
        for part, output in flight.parts:
            sequence, draft = part.sequence, part.draft
            sequence.num_unread -= part.steps
            if sequence.ended:
                continue
            new = columns[output][: part.steps]
            if draft is not None:
                after = columns[output : output + 1 + len(draft)]
                new = draft.accept([token for (token,) in after])
                sequence.lookup.learn(len(new) - 1)
                self._counts.drafted_tokens += len(draft)
            if len(sequence.tokens) == sequence.num_prompt:
                self._counts.first_tokens += 1
                self._counts.seconds_to_first += now - sequence.began
            new = sequence.deliver(new)
            count += len(new)
            if draft is not None:
                self._counts.accepted_tokens += len(new) - 1
                sequence.num_cached += len(new) - 1  # the last one's row is to come
            sequence.extend(new)
            came.append((sequence, new))
        self._append(came)
        self._publish([sequence for sequence, _ in came])
        for sequence, _ in came:
            if sequence.ended:
                self._counts.finished += 1
                self._scheduler.remove(sequence)
        self._counts.read(now, count)

    def _append(self, came: list[tuple[Sequence, list[int]]]) -> None:
        """Tell the tables of tokens that came."""
        held = [(each.table, new) for each, new in came if each.table is not None]
        append_tokens(
            [table for table, _ in held],
            [token for _, new in held for token in new],
            [len(new) for _, new in held],
        )

    def _publish(self, sequences: list[Sequence]) -> None:
        """Have full blocks found by others: the steps that fill them are dispatched."""
        size = self._manager.spec.block_size
        known = [(s.table, n) for s in sequences if (n := s.num_publishable(size))]
        if known:
            commit_tokens([table for table, _ in known], [n for _, n in known])

    def _fail(self, error: str) -> None:
        """End all that run, or else all that wait; the pool is as new."""
        self._flights.clear()
        scheduler = self._scheduler
        for sequence in list(scheduler.running) or list(scheduler.waiting):
            self._end(sequence, "error", error)
        for sequence in scheduler.waiting:  # who made way: its token is drawn again
            sequence.num_unread = 0
        self.cache.clear()
        self._runner.reset()
