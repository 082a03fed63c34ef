"""OpenAI's own client finds what it knows: answers, streams, errors by class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
import openai
from books_engine import BooksEngine
from fake_engine import FakeEngine
from http_servers import served
from serve.http_answers import Limits
from serve.interface import Request
from waiting import wait_until

pytestmark = pytest.mark.cpu
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def echo() -> Iterator[Any]:
    """A client of an engine whose blocks are real."""
    with served(BooksEngine()) as url, client(url) as api:
        yield api


def test_models(echo: Any) -> None:
    assert [model.id for model in echo.models.list()] == ["fake"]
    assert echo.models.retrieve("fake").owned_by == "jax_kvblock"


def test_a_chat(echo: Any) -> None:
    got = echo.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=8)
    (choice,) = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "user: he")
    assert choice.finish_reason == "length" and got.usage.completion_tokens == 8
    # The answer goes back, as clients do.
    turns = [*MESSAGES, choice.message, {"role": "user", "content": "and?"}]
    again = echo.chat.completions.create(model="fake", messages=turns, max_tokens=3)
    assert again.choices[0].message.content == "use"
    assert again.usage.prompt_tokens_details.cached_tokens == 24


def test_a_streamed_chat(echo: Any) -> None:
    given = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 8}
    options = {"include_usage": True}
    stream = echo.chat.completions.create(**given, stream=True, stream_options=options)
    *parts, last = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == "user: he"
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_the_client_gathers_a_stream(echo: Any) -> None:
    """Its helper puts chunks together, and is strict about their form."""
    given = {"model": "fake", "messages": MESSAGES, "max_tokens": 8}
    with echo.chat.completions.stream(**given) as stream:
        stream.until_done()
        with pytest.raises(openai.LengthFinishReasonError) as ended:
            stream.get_final_completion()
    assert ended.value.completion.choices[0].message.content == "user: he"


def test_completions(echo: Any) -> None:
    given = {"model": "fake", "prompt": "hello ", "max_tokens": 8, "seed": 1}
    assert echo.completions.create(**given).choices[0].text == "hello he"
    parts = list(echo.completions.create(**given, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "hello he"


def test_refusals(echo: Any) -> None:
    def ask(**fields: Any) -> Any:
        given = {"model": "fake", "messages": MESSAGES, **fields}
        return echo.chat.completions.create(**given)

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=5)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(logprobs=True)
    assert bad.value.param == "logprobs"
    with pytest.raises(openai.NotFoundError) as bad:
        ask(model="other")
    assert bad.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(messages=[{"role": "user", "content": "x" * 600}])
    assert bad.value.code == "context_length_exceeded"


def test_a_full_queue_is_tried_again() -> None:
    """The client honours Retry-After by itself, where it may try again."""
    engine = FakeEngine(max_waiting=1, delay=0.05)
    with served(engine, Limits(retry_seconds=1, drain_seconds=1)) as url:
        first = engine.submit(Request(prompt=[65], max_new_tokens=400))
        wait_until(lambda: first.num_new_tokens)
        engine.submit(Request(prompt=[65], max_new_tokens=4))
        given = {"model": "fake", "prompt": "x", "max_tokens": 1}
        with client(url) as api, pytest.raises(openai.RateLimitError):
            api.completions.create(**given)
        first.cancel()
        with client(url).with_options(max_retries=2) as api:
            assert api.completions.create(**given).choices[0].text == "x"


def test_a_stream_that_fails_raises() -> None:
    with served(FakeEngine(fail=True)) as url, client(url) as api:
        stream = api.completions.create(model="fake", prompt="hello", stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            api.completions.create(model="fake", prompt="hello")


def test_closing_a_stream_cancels_it() -> None:
    engine = FakeEngine(delay=0.01)
    given = {"model": "fake", "prompt": "hello", "max_tokens": 500}
    with served(engine) as url, client(url) as api:
        stream = api.completions.create(**given, stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: engine.cancelled)
