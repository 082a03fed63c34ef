"""What goes into an engine and what comes out: requests, events, streams.

    stream = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=16))
    for event in stream:            # or: async for event in stream
        print(event.text, end="")

Threads: `submit`, `cancel` and iteration may be called from any thread, and from any
event loop. A stream has one reader.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypedDict

import numpy as np

FinishReason = Literal["stop", "length", "cancelled", "error"]
FREE, HELD, SHARED, IDLE = range(4)  # what `pool_map` says of a block


class QueueFullError(RuntimeError):
    """As many requests wait as may: try again later (HTTP 429)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how to go on from it.

    Attributes:
        prompt: token ids, one at least; they are copied.
        max_new_tokens: how many tokens may follow.
        temperature: 0 takes the likeliest token; 1 draws by the model's probabilities.
        top_k: draws among the k likeliest tokens; 0 among all.
        top_p: draws among the likeliest tokens that together have this probability.
        seed: the same seed gives the same draws, whatever else the engine runs.
        stop_tokens: tokens that end the text, beside the model's own.
        stop: texts that end it. What comes out ends in front of them.
        ignore_end: the model's own end tokens are as any others.
        priority: a higher one is admitted first, and preempted last.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if something has another type.
    """

    prompt: Seq[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: Collection[int] = ()
    stop: Seq[str] = ()
    ignore_end: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            raise TypeError(f"Request: stop must be a list of texts, got {self.stop!r}")
        # Who asks may go on with the same list: add the new tokens to it, for example.
        for name in ("prompt", "stop_tokens"):
            object.__setattr__(self, name, _ints(name, getattr(self, name)))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("max_new_tokens", "top_k", "seed", "priority"):
            _ints(name, [getattr(self, name)])
        if len(self.prompt) == 0:
            raise ValueError("Request: prompt must have a token, got none")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"Request: stop must hold texts, got {list(self.stop)!r}")
        _check_range("max_new_tokens", self.max_new_tokens, 1)
        _check_range("top_k", self.top_k, 0)
        _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("Request: top_p must be above 0; temperature=0 is greedy")


def _ints(name: str, values: Collection[int]) -> tuple[int, ...]:
    """Python's ints, whatever integers these are."""
    if hasattr(values, "__array__"):  # of JAX's arrays the numbers would be arrays
        values = np.asarray(values).tolist()
    if not isinstance(values, Iterable):
        raise TypeError(f"Request: {name} must be a list of ints, got {values!r}")
    values = list(values)
    kinds = set(map(type, values))  # of thousands of tokens there is one
    for kind in kinds:
        if kind is bool or not issubclass(kind, int | np.integer):
            value = next(value for value in values if type(value) is kind)
            raise TypeError(f"Request: {name} must be of int, got {value!r}")
    return tuple(values if kinds <= {int} else map(int, values))


def check_whole(where: str, **numbers: object) -> None:
    """That these are whole numbers.

    Raises:
        TypeError: if one is not.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{where}: {name} must be of int, got {value!r}")


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"Request: {name} must be a number, got {value!r}")
    if not low <= value <= high:  # nan is in no range
        raise ValueError(f"Request: {name} must be in [{low}, {high}], got {value}")


class Event(NamedTuple):
    """A token of a stream; the last event has a `finish_reason`.

    Attributes:
        token_id: the token; None where a stream ends without one.
        text: what can be shown now. It is held back while bytes of a character, or the
            rest of what may be a stop text, are to come: it may be empty. Of tokens
            that come together, the last one has the text.
        finish_reason: "stop": a stop token (which has no text) or text; "length":
            `max_new_tokens`; "cancelled"; "error", which `error` explains.
    """

    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None


class Stream:
    """The events of a request, as they come: `for` and `async for` both end.

    Attributes:
        request: what was asked.
        num_prompt_tokens: its length.
        num_cached_tokens: how many of its keys and values were there already; known
            before the first event.
        num_new_tokens: how many came so far, a stop token among them.
        finish_reason: as the last event's; None before it was put.

    Args:
        request: what was asked.
        on_cancel: called by `cancel`, once, if the stream has not ended.
    """

    def __init__(
        self, request: Request, on_cancel: Callable[["Stream"], None] | None = None
    ) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt)
        self.num_cached_tokens = 0
        self.num_new_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._on_cancel = on_cancel
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._read_all = False

    def cancel(self) -> None:
        """Ask for no more tokens: "cancelled" follows, if the stream has not ended."""
        with self._changed:
            on_cancel, self._on_cancel = self._on_cancel, None
            ended = self.finish_reason is not None
        if on_cancel is not None and not ended:
            on_cancel(self)

    def put(self, *events: Event) -> None:
        """Append events, from the engine; nothing behind the last one."""
        with self._changed:
            for event in events:
                if self.finish_reason is not None:
                    break
                self.num_new_tokens += event.token_id is not None
                self.finish_reason = event.finish_reason
                self._events.append(event)
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads
                loop.call_soon_threadsafe(_wake, future)

    def take(self) -> Event | None:
        """The next event if it has come, without waiting."""
        with self._changed:
            if not self._events:
                return None
            event = self._events.popleft()
            self._read_all = event.finish_reason is not None
            return event

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            if self._read_all:
                raise StopIteration
            while (event := self.take()) is None:
                self._changed.wait()
            return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._changed:
                if self._read_all:
                    raise StopAsyncIteration
                if (event := self.take()) is not None:
                    return event
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def text(self) -> str:
        """All text that is still to come, once it is there."""
        return "".join(event.text for event in self)


def _wake(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)


class Message(TypedDict):
    """A turn of a chat; role is "system", "user" or "assistant"."""

    role: str
    content: str


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    end_tokens: frozenset[int]  # the model's own: they end a text

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the model's first token where it wants one."""

    def decode(self, ids: Seq[int]) -> str:
        """Text of token ids, without special tokens; U+FFFD for broken characters."""

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the answer begins.

        Raises:
            ValueError: if the model's template refuses the messages, or it has none.
        """


class Model(Protocol):
    """What an engine runs."""

    name: str
    tokenizer: Tokenizer
    max_tokens: int  # of a text, what it was trained for


class Stats(TypedDict):
    """Counts since the engine was made, unless said otherwise.

    `num_blocks` = `free_blocks` + `held_blocks` + `idle_blocks`; those that several
    hold, `shared_blocks`, are held ones too.
    """

    running: int  # requests, now
    waiting: int  # requests, now
    max_waiting: int
    finished: int  # requests, whatever their finish_reason
    cancelled: int  # of those
    failed: int  # of those, with "error"
    steps: int
    prompt_tokens: int  # of requests that were admitted
    cached_tokens: int  # of those, found in the cache
    new_tokens: int
    drafted_tokens: int  # proposed
    accepted_tokens: int  # of those, in new_tokens
    preemptions: int
    offloaded_preemptions: int  # of those, resumed from a lower tier
    programs: int  # compiled
    tokens_per_second: float  # new ones, in the last 10 seconds
    mean_time_to_first_token: float  # seconds, from submit; nan before the first
    num_blocks: int
    free_blocks: int
    held_blocks: int
    shared_blocks: int
    idle_blocks: int


class Engine(Protocol):
    """What serves requests."""

    model: Model
    max_tokens: int  # a prompt and its new tokens, at most
    ready: bool  # its programs are compiled: requests do not wait for them
    trouble: str  # why they do not compile, or no step can be computed; or empty

    @property
    def stopped(self) -> bool:
        """Whether it takes no requests any more."""

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
            ValueError: if it is too long, or a token is none of the model's.
            QueueFullError: if `max_waiting` requests wait already.
            RuntimeError: if the engine has stopped.
        """

    def start(self) -> None:
        """Serve in a thread of its own, until `stop`."""

    def stop(self) -> None:
        """End the thread; open streams end with "cancelled"."""

    def stats(self) -> Stats:
        """Counts, for people and monitors."""

    def pool_map(self) -> np.ndarray:
        """uint8[num_blocks]: 0 free, 1 held by one, 2 shared by several, 3 idle."""
