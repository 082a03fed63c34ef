"""OpenAI's API over a fake engine: what it answers, field by field."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

import pytest

pytest.importorskip("starlette")
from books_engine import BooksEngine
from fake_engine import FakeEngine
from http_servers import CHAT, HELLO, JSON, PROMPT, TEXT, call, chunks, started
from serve.http_answers import Limits, StreamedAnswer
from serve.http_server import create_app
from serve.interface import Event, Request, Stats, Stream
from serve.openai_answers import Shape

pytestmark = pytest.mark.cpu


class Recording(FakeEngine):
    """Notes what it is asked, and answers nothing but the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def submit(self, request: Request) -> Stream:
        self.asked.append(request)
        return super().submit(request)


def post(app: Any, path: str, **fields: Any) -> dict[str, Any]:
    """The answer to the smallest body with these fields; it must be one."""
    base = HELLO if path == CHAT else PROMPT
    got = call(app, "POST", path, json={**base, **fields})
    assert got.status_code == 200, got.text
    return got.json()


def test_a_completion_has_all_fields() -> None:
    with started(FakeEngine()) as app:
        got = post(app, TEXT, max_tokens=8)
    assert got.pop("id").startswith("cmpl-") and got.pop("created") > 1.7e9
    assert got == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "hellohel",
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_has_all_fields() -> None:
    with started(FakeEngine()) as app:
        got = post(app, CHAT, max_completion_tokens=11)
    assert got.pop("id").startswith("chatcmpl-") and got.pop("created") > 1.7e9
    message = {"role": "assistant", "content": "user: hello", "refusal": None}
    assert got.pop("choices") == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    ]
    assert got["object"] == "chat.completion"
    assert got["usage"]["total_tokens"] == len("user: hello\nassistant: ") + 11


def test_a_stream_has_the_same_text_in_chunks() -> None:
    with started(FakeEngine()) as app:
        body = {**HELLO, "stream": True, "max_tokens": 4}
        got = call(app, "POST", CHAT, json=body)
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = chunks(got.text)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert all("usage" not in part for part in parts)
    choices = [part["choices"][0] for part in parts]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "user"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None, None, None, None, "length"]


def test_a_streamed_completion_tells_its_usage_if_asked() -> None:
    with started(FakeEngine()) as app:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        got = call(app, "POST", TEXT, json={**PROMPT, **options, "max_tokens": 2})
    *parts, last = chunks(got.text)
    assert {part["object"] for part in parts} == {"text_completion"}
    assert "".join(part["choices"][0]["text"] for part in parts) == "he"
    assert [part["usage"] for part in parts] == [None, None]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2


def test_characters_of_several_tokens_come_whole() -> None:
    """Of two bytes, the first gives no text yet: no chunk without text or an end."""
    with started(FakeEngine()) as app:
        body = {**PROMPT, "prompt": "é", "stream": True, "max_tokens": 4}
        parts = chunks(call(app, "POST", TEXT, json=body).text)
    assert [part["choices"][0]["text"] for part in parts] == ["é", "é"]


def test_a_stream_that_is_ahead_leaves_others_their_turn() -> None:
    stream = Stream(Request(prompt=[1]))
    for i in range(100):
        stream.put(Event(1, "x", "length" if i == 99 else None))
    answer = StreamedAnswer(stream, Shape(chat=False, model="fake"), Limits())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    async def both() -> None:
        task = asyncio.create_task(others())
        await answer({"type": "http"}, never, send)
        task.cancel()

    asyncio.run(both())
    assert turns >= 100


def test_tokens_found_in_the_cache_are_told() -> None:
    with started(BooksEngine()) as app:
        prompt = "a prompt of more than one block"
        usages = [post(app, TEXT, prompt=prompt)["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 24] and len(prompt) == 31


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_a_prompt_is_a_text_or_tokens(prompt: Any) -> None:
    with started(FakeEngine()) as app:
        got = post(app, TEXT, prompt=prompt, max_tokens=3)
    assert got["choices"][0]["text"] == "hih"


def test_the_engine_is_asked_what_the_client_asked() -> None:
    engine = Recording()
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -3}
    with started(engine) as app:
        post(app, TEXT, **fields, stop="x", max_tokens=2, ignore_eos=True)
        post(app, TEXT, stop=["y", "z"])
        post(app, TEXT)
        post(app, CHAT)
    first, second, third, chat = engine.asked
    assert first == Request(
        prompt=list(b"hello"),
        max_new_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=-3,
        stop=["x"],
        ignore_end=True,
    )
    assert second.stop == ("y", "z") and not second.ignore_end
    # OpenAI's defaults: draws of its own each time, 16 tokens, or as many as fit.
    assert (second.temperature, second.top_p, second.max_new_tokens) == (1, 1, 16)
    assert second.seed != third.seed
    assert chat.max_new_tokens == engine.max_tokens - len(chat.prompt)


def test_roles_and_parts_of_messages() -> None:
    engine = Recording()
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    messages = [
        {"role": "developer", "content": "be brief", "name": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None},
    ]
    with started(engine) as app:
        post(app, CHAT, messages=messages)
    said = engine.model.tokenizer.decode(engine.asked[0].prompt)
    assert said == "system: be brief\nuser: two parts\nassistant: yes\nassistant: "


def test_what_has_no_effect_is_taken() -> None:
    described = {"user": "me", "metadata": {"a": "b"}, "store": False, "n": 1}
    neutral = {"logprobs": None, "presence_penalty": 0.0, "tools": []}
    with started(FakeEngine()) as app:
        post(app, CHAT, **described, **neutral, response_format={"type": "text"})


def test_a_stop_text_ends_an_answer() -> None:
    with started(FakeEngine()) as app:
        got = post(app, TEXT, stop="l", max_tokens=8)
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["usage"]["completion_tokens"] == 3


def test_models() -> None:
    app = create_app(FakeEngine())
    listed = call(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert call(app, "GET", "/v1/models/fake").json() == listed["data"][0]
    model = listed["data"][0]
    assert model["id"] == "fake" and model["object"] == "model"


def test_metrics_tell_all_that_the_engine_tells() -> None:
    with started(BooksEngine(num_blocks=16)) as app:
        post(app, TEXT, max_tokens=4)
        call(app, "POST", TEXT, content=b"{", headers=JSON)
        call(app, "GET", "/nowhere")
        got = call(app, "GET", "/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=")
    told = dict(line.rsplit(" ", 1) for line in got.text.splitlines() if line[0] != "#")
    assert told["kvblock_serve_new_tokens_total"] == "4.0"
    assert told["kvblock_serve_num_blocks"] == "16.0"
    assert told['kvblock_serve_blocks{state="idle"}'] == "1.0"
    assert told['kvblock_published_blocks_total{tier="device"}'] == "1.0"
    requests = 'kvblock_http_requests_total{path="%s",status="%s"}'
    assert told[requests % (TEXT, 200)] == "1.0"
    assert told[requests % (TEXT, 400)] == "1.0"
    assert told[requests % ("other", 404)] == "1.0"
    for name in Stats.__annotations__:
        state = name.removesuffix("_blocks")
        names = {f"kvblock_serve_{name}", f"kvblock_serve_{name}_total"}
        names.add(f'kvblock_serve_blocks{{state="{state}"}}')
        assert names & told.keys(), name


def test_further_collectors_are_told() -> None:
    prometheus = pytest.importorskip("prometheus_client.core")

    class Cache:
        def collect(self) -> list[Any]:
            return [prometheus.GaugeMetricFamily("cache_things", "Things", 3)]

    app = create_app(FakeEngine(), collectors=[Cache()])
    assert "\ncache_things 3.0\n" in call(app, "GET", "/metrics").text


def test_the_pool_is_told_as_digits_and_counts() -> None:
    with started(BooksEngine(num_blocks=16)) as app:
        post(app, TEXT, prompt="x" * 16, max_tokens=8)
        got = call(app, "GET", "/pool")
    told = got.json()
    assert got.headers["cache-control"] == "no-store"
    assert sorted(told["states"]) == ["0"] * 13 + ["3"] * 3
    assert told["model"] == "fake" and told["stats"]["idle_blocks"] == 3
    assert told["stats"]["mean_time_to_first_token"] is None  # there was none


def test_health() -> None:
    engine = FakeEngine()
    with started(engine) as app:
        assert call(app, "GET", "/health").json() == {"status": "ok", "model": "fake"}
    stopped = call(app, "GET", "/health")
    assert stopped.status_code == 503
    assert stopped.json()["error"]["message"] == "the engine has stopped"
    refused = call(app, "POST", TEXT, json=PROMPT)
    assert refused.status_code == 503
    assert "has stopped" in refused.json()["error"]["message"]
    assert call(app, "GET", "/health").status_code == 503


def test_the_page_loads_nothing_from_elsewhere() -> None:
    got = call(create_app(FakeEngine()), "GET", "/")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in got.headers["content-security-policy"]
    assert "://" not in got.text.replace("http://www.w3.org/2000/svg", "")


def test_a_failing_request_ends_with_an_error() -> None:
    with started(FakeEngine(fail=True)) as app:
        whole = call(app, "POST", TEXT, json=PROMPT)
        streamed = call(app, "POST", TEXT, json={**PROMPT, "stream": True})
    assert whole.status_code == 500
    error = whole.json()["error"]
    assert error["type"] == "server_error" and "told to fail" in error["message"]
    assert streamed.status_code == 200
    last = streamed.text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last) == {"error": error}  # and no [DONE]


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "msgspec"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("serve.", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{package}.* is not installed; pip install"):
        importlib.import_module("serve.http_server")
