"""Requests say what is wrong with them; streams are read from threads and loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import FakeEngine
from serve.interface import Event, QueueFullError, Request, Stream

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": []}, ValueError, "prompt must have a token"),
    ({"prompt": ["a"]}, TypeError, "prompt must be of int, got 'a'"),
    ({"prompt": None}, TypeError, "prompt must be a list of ints, got None"),
    ({"prompt": np.array(3)}, TypeError, "prompt must be a list of ints, got 3"),
    ({"stop": None}, TypeError, "stop must be a list of texts, got None"),
    ({"stop_tokens": 5}, TypeError, "stop_tokens must be a list of ints, got 5"),
    ({"prompt": [True]}, TypeError, "prompt must be of int, got True"),
    ({"max_new_tokens": 0}, ValueError, r"max_new_tokens must be in \[1, inf\], got 0"),
    ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be of int"),
    ({"temperature": -1}, ValueError, "temperature must be in"),
    ({"temperature": float("nan")}, ValueError, "temperature must be in"),
    ({"temperature": "hot"}, TypeError, "temperature must be a number"),
    ({"top_p": 0}, ValueError, "top_p must be above 0"),
    ({"top_p": 1.1}, ValueError, "top_p must be in"),
    ({"top_k": -1}, ValueError, "top_k must be in"),
    ({"seed": 2**64}, ValueError, "seed must be in"),
    ({"stop": "end"}, TypeError, "stop must be a list"),
    ({"stop": [""]}, ValueError, "stop must hold texts"),
    ({"stop_tokens": [None]}, TypeError, "stop_tokens must be of int"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_a_request_says_what_is_wrong(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Request(**{"prompt": [1], **given})


@pytest.mark.parametrize("kind", [np.array, jnp.array, iter], ids=lambda k: k.__name__)
def test_tokens_of_any_kind(kind: Any) -> None:
    prompt = Request(prompt=kind([1, 2]), stop_tokens=kind([3])).prompt
    assert prompt == (1, 2) and set(map(type, prompt)) == {int}


def test_a_stream_is_read_by_another_thread() -> None:
    stream = Stream(Request(prompt=[1, 2]))
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(stream.text()))
    reader.start()
    for event in (Event(3, "a"), Event(4, "b"), Event(5, "c", "length")):
        stream.put(event)
    reader.join(10)
    assert texts == ["abc"] and stream.num_new_tokens == 3
    stream.put(Event(6, "late"))
    assert list(stream) == [] and stream.finish_reason == "length"


def test_a_stream_is_read_by_an_event_loop() -> None:
    stream = Stream(Request(prompt=[1]))

    async def read() -> list[int | None]:
        return [event.token_id async for event in stream]

    async def both() -> tuple[list[int | None], None]:
        return await asyncio.gather(read(), asyncio.to_thread(write))

    def write() -> None:
        for i in range(100):
            stream.put(Event(i, "", "length" if i == 99 else None))

    assert asyncio.run(both())[0] == list(range(100))


def test_a_reader_that_has_gone_harms_nobody() -> None:
    stream = Stream(Request(prompt=[1]))

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(aiter(stream)), 0.01)

    asyncio.run(leave())
    stream.put(Event(1, "a", "stop"))
    assert stream.text() == "a"


def test_cancel_is_told_once_and_not_after_the_end() -> None:
    told: list[Stream] = []
    stream = Stream(Request(prompt=[1]), told.append)
    stream.cancel()
    stream.cancel()
    assert told == [stream]
    ended = Stream(Request(prompt=[1]), told.append)
    ended.put(Event(1, "", "stop"))
    ended.cancel()
    assert told == [stream]


def test_the_fake_engine_answers_and_refuses() -> None:
    engine = FakeEngine(max_waiting=1)
    prompt = engine.model.tokenizer.encode("naïve ")
    first = engine.submit(Request(prompt=prompt, max_new_tokens=10))
    with pytest.raises(QueueFullError):
        engine.submit(Request(prompt=prompt))
    with pytest.raises(ValueError, match="tokens, of at most 512"):
        engine.submit(Request(prompt=prompt, max_new_tokens=600))
    engine.start()
    assert first.text() == "naïve na"[: len("naïve na")]
    engine.stop()
    assert first.finish_reason == "length" and first.num_new_tokens == 10
    with pytest.raises(RuntimeError, match="stopped"):
        engine.submit(Request(prompt=prompt))
