"""An engine without a model: it answers with the prompt's own tokens, over and over."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

from serve.interface import (  # noqa: E402
    FREE,
    HELD,
    IDLE,
    SHARED,
    Event,
    QueueFullError,
    Request,
    Stats,
    Stream,
)


def check_request(request: Request, max_tokens: int) -> None:
    """What every engine refuses of a request."""
    most = len(request.prompt) + request.max_new_tokens
    if most > max_tokens:
        raise ValueError(f"submit: {most} tokens, of at most {max_tokens}")
    if any(not 0 <= token < 256 for token in request.prompt):
        raise ValueError("submit: a token is none of the model's")


def check_room(stopped: bool, waiting: int, max_waiting: int) -> None:
    """What every engine refuses at some times."""
    if stopped:
        raise RuntimeError("submit: the engine has stopped")
    if waiting >= max_waiting:
        raise QueueFullError(f"submit: {max_waiting} requests wait")


class FakeTokenizer:
    """A token is a byte; 0 ends a text."""

    vocab_size = 256
    end_tokens = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not messages:
            raise ValueError("encode_chat: there must be a message")
        turns = [f"{turn['role']}: {turn['content']}\n" for turn in messages]
        return self.encode("".join(turns) + "assistant: ")


class FakeModel:
    name = "fake"
    tokenizer = FakeTokenizer()
    max_tokens = 512


class FakeEngine:
    """As `serve.interface.Engine`; a token takes `delay` seconds.

    Args:
        delay: between the tokens of a request, seconds.
        max_waiting: requests that may wait for the one that runs.
        fail: requests end with "error" after their first token.
    """

    ready, trouble = True, ""  # there are no programs

    def __init__(
        self, *, delay: float = 0.0, max_waiting: int = 4, fail: bool = False
    ) -> None:
        self.model = FakeModel()
        self.max_tokens = self.model.max_tokens
        self.delay, self.max_waiting, self.fail = delay, max_waiting, fail
        self.cancelled: list[Stream] = []
        self._lock = threading.Condition()
        self._waiting: list[Stream] = []
        self._running: Stream | None = None
        self._finished = self._new = self._prompt = self._failed = 0
        self._thread: threading.Thread | None = None
        self.stopped = False

    def submit(self, request: Request) -> Stream:
        check_request(request, self.max_tokens)
        with self._lock:
            check_room(self.stopped, len(self._waiting), self.max_waiting)
            stream = Stream(request, self._cancel)
            self._waiting.append(stream)
            self._prompt += stream.num_prompt_tokens
            self._lock.notify_all()
        return stream

    def _cancel(self, stream: Stream) -> None:
        with self._lock:
            self.cancelled.append(stream)
            if stream in self._waiting:
                self._waiting.remove(stream)
        stream.put(Event(None, "", "cancelled"))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
        for stream in self._waiting:
            stream.put(Event(None, "", "cancelled"))

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self.stopped:
                    self._lock.wait()
                if self.stopped:
                    return
                stream = self._running = self._waiting.pop(0)
            self._answer(stream)
            with self._lock:
                self._running = None
                self._finished += 1

    def _answer(self, stream: Stream) -> None:
        request, seen = stream.request, ""
        ids: list[int] = []
        for i in range(request.max_new_tokens):
            time.sleep(self.delay)
            if self.stopped:
                stream.put(Event(None, "", "cancelled"))
            if stream.finish_reason is not None:
                return
            ids.append(int(request.prompt[i % len(request.prompt)]))
            text = self.model.tokenizer.decode(ids).rstrip("\ufffd")
            new, seen = text[len(seen) :], text
            last = i + 1 == request.max_new_tokens
            stop = ids[-1] == 0 or any(text in seen for text in request.stop)
            reason = "stop" if stop else "length" if last else None
            stream.put(Event(ids[-1], new, reason))
            self._new += 1
            if self.fail:
                stream.put(Event(None, "", "error", "FakeEngine was told to fail"))
                self._failed += 1

    def stats(self) -> Stats:
        counts = np.bincount(self.pool_map(), minlength=4)
        return Stats(
            running=int(self._running is not None),
            waiting=len(self._waiting),
            max_waiting=self.max_waiting,
            finished=self._finished,
            cancelled=len(self.cancelled),
            failed=self._failed,
            steps=self._new,
            prompt_tokens=self._prompt,
            cached_tokens=0,
            new_tokens=self._new,
            drafted_tokens=0,
            accepted_tokens=0,
            preemptions=0,
            offloaded_preemptions=0,
            programs=0,
            tokens_per_second=0.0,
            mean_time_to_first_token=float("nan"),
            num_blocks=int(counts.sum()),
            free_blocks=int(counts[FREE]),
            held_blocks=int(counts[HELD] + counts[SHARED]),
            shared_blocks=int(counts[SHARED]),
            idle_blocks=int(counts[IDLE]),
        )

    def pool_map(self) -> np.ndarray:
        """Changes with every token, so that a page has something to show."""
        states = np.full(64, FREE, np.uint8)
        states[: self._new % 48] = HELD
        states[:8] = SHARED
        states[48:56] = IDLE
        return states
