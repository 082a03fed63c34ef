"""What is wrong with a request is told: the status, the field, what came, the fix."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")
from fake_engine import FakeEngine
from http_servers import CHAT, HELLO, JSON, PROMPT, TEXT, call, started
from serve.http_answers import Limits
from serve.http_hosts import known_hosts
from serve.http_server import create_app, listen
from serve.interface import Request

pytestmark = pytest.mark.cpu


def refused(app: Any, path: str = TEXT, **given: Any) -> tuple[int, dict[str, Any]]:
    """The status and the error of a POST, which has OpenAI's form."""
    got = call(app, "POST", path, **given)
    assert list(got.json()) == ["error"], got.text
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert got.headers["content-type"] == "application/json"
    return got.status_code, error


NO_JSON = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"\xff\xfe", "JSON"),
    (b'{"a": NaN}', "JSON"),
    (b'{"a": 1e999}', "JSON"),
    (b'{"prompt": "\\ud800 half a pair"}', "JSON"),
    (b"[" * 200_000, "JSON"),
    (b"[1, 2]", "JSON object, got an array of length 2"),
    (b'"text"', "JSON object, got 'text'"),
    (b"null", "JSON object, got None"),
]


@pytest.mark.cases(len(NO_JSON))
@pytest.mark.parametrize(("body", "message"), NO_JSON)
def test_bodies_that_are_no_json_object(body: bytes, message: str) -> None:
    status, error = refused(create_app(FakeEngine()), content=body, headers=JSON)
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_json", "invalid_type")
    assert message in error["message"] and len(error["message"]) < 200


# Fields, the one that is named, the code, and what the message says.
BOTH = [
    ({"max_tokens": "9"}, "max_tokens", "invalid_type", "expected `int | null`, got"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type", "got `float`"),
    ({"max_tokens": True}, "max_tokens", "invalid_type", "got `bool`"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", ">= 1, got 0"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "got `str`"),
    ({"temperature": -0.5}, "temperature", "invalid_value", ">= 0.0, got -0.5"),
    ({"temperature": 3}, "temperature", "invalid_value", "<= 2.0, got 3"),
    ({"top_p": 0}, "top_p", "invalid_value", "> 0.0, got 0"),
    ({"top_p": 2}, "top_p", "invalid_value", "<= 1.0, got 2"),
    ({"top_k": -1}, "top_k", "invalid_value", ">= 0, got -1"),
    ({"seed": 2**63}, "seed", "invalid_value", "got 9223372036854775808"),
    ({"seed": 10**99}, "seed", "invalid_value", "…"),
    ({"stop": 3}, "stop", "invalid_type", "got `int`"),
    ({"stop": ""}, "stop", "invalid_value", "length >= 1, got ''"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value", "length >= 1, got ''"),
    ({"stop": list("abcde")}, "stop", "invalid_value", "got an array of length 5"),
    ({"stream": "yes"}, "stream", "invalid_type", "expected `bool | null`, got `str`"),
    ({"stream_options": {}}, "stream_options", "invalid_value", "only with stream"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_type",
        "got `int`",
    ),
    ({"model": None}, "model", "invalid_type", "expected `str`, got `null`"),
    ({"n": 2}, "n", "unsupported_parameter", "it may be 1"),
    ({"n": True}, "n", "unsupported_parameter", "it may be 1"),
    ({"presence_penalty": 0.1}, "presence_penalty", "unsupported_parameter", "leave"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "leave it out"),
    ({"temprature": 1}, "temprature", "unknown_parameter", "unknown; leave it out"),
]
TEXTS = [
    ({"prompt": None}, "prompt", "invalid_type", "got `null`"),
    ({"prompt": [None]}, "prompt[0]", "invalid_type", "got `null`"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]", "invalid_type", "got `str`"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type", "got `bool`"),
    ({"prompt": ["a", "b"]}, "prompt", "unsupported_value", "a list of prompts"),
    ({"prompt": [[1], [2]]}, "prompt", "unsupported_value", "a list of prompts"),
    ({"prompt": [1, "a"]}, "prompt", "unsupported_value", "a list of prompts"),
    ({"prompt": ""}, "prompt", "invalid_value", "at least one token, got none"),
    ({"prompt": []}, "prompt", "invalid_value", "at least one token, got none"),
    ({"prompt": [256]}, "prompt", "invalid_value", "none of the model's"),
    ({"logprobs": 0}, "logprobs", "unsupported_parameter", "leave it out"),
    ({"echo": True}, "echo", "unsupported_parameter", "it may be False"),
    ({"messages": []}, "messages", "unknown_parameter", "unknown"),
]
CHATS: list[tuple[Any, str, str, str]] = [
    ({"logprobs": True}, "logprobs", "unsupported_parameter", "it may be False"),
    ({"tools": [{}]}, "tools", "unsupported_parameter", "leave it out"),
    ({"prompt": "x"}, "prompt", "unknown_parameter", "unknown"),
    ({"messages": []}, "messages", "invalid_value", "got an array of length 0"),
    ({"messages": "hi"}, "messages", "invalid_type", "expected `array`, got `str`"),
    ({"messages": [1]}, "messages[0]", "invalid_type", "expected `object`, got `int`"),
    (
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "invalid_value",
        "differs from max_tokens",
    ),
]
MESSAGES: list[tuple[Any, str, str, str]] = [
    ({"content": "x"}, ".role", "missing_required_parameter", "missing"),
    ({"role": "tool", "content": "x"}, ".role", "invalid_value", "got 'tool'"),
    ({"role": "user"}, ".content", "invalid_type", "a text, got null"),
    ({"role": "user", "content": 3}, ".content", "invalid_type", "got `int`"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        ".content[0]",
        "unsupported_value",
        "only parts of type 'text'",
    ),
    (
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        ".tool_calls",
        "unsupported_parameter",
        "not supported",
    ),
]
CASES = [
    *((path, *case) for case in BOTH for path in (TEXT, CHAT)),
    *((TEXT, *case) for case in TEXTS),
    *((CHAT, *case) for case in CHATS),
    *(
        (CHAT, {"messages": [HELLO["messages"][0], turn]}, f"messages[1]{at}", *rest)
        for turn, at, *rest in MESSAGES
    ),
]


@pytest.fixture(scope="module")
def app() -> Any:
    """Over an engine that never runs: what is refused does not reach it."""
    return create_app(FakeEngine(), limits=Limits(answer_seconds=2))


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize(("path", "fields", "param", "code", "message"), CASES)
def test_fields_that_are_wrong(
    app: Any, path: str, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    base = HELLO if path == CHAT else PROMPT
    status, error = refused(app, path, json={**base, **fields})
    assert status == 400 and error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"].startswith(param) and message in error["message"], error
    assert len(error["message"]) < 200


@pytest.mark.parametrize("field", ["model", "messages"])
def test_fields_that_are_missing(app: Any, field: str) -> None:
    body = {name: value for name, value in HELLO.items() if name != field}
    status, error = refused(app, CHAT, json=body)
    assert (status, error["param"]) == (400, field)
    assert error["code"] == "missing_required_parameter"


def test_a_model_that_is_not_here(app: Any) -> None:
    status, error = refused(app, json={**PROMPT, "model": "gpt-4"})
    assert status == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'gpt-4' does not exist here; 'fake' does" in error["message"]
    got = call(app, "GET", "/v1/models/some/other")
    assert got.status_code == 404 and "'some/other'" in got.json()["error"]["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_prompt_that_is_too_long(app: Any, path: str) -> None:
    long = {"prompt": "x" * 600}
    if path == CHAT:
        long = {"messages": [{"role": "user", "content": "x" * 600}]}
    base = HELLO if path == CHAT else PROMPT
    status, error = refused(app, path, json={**base, **long})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert "of 512 at most" in error["message"]


def test_an_answer_that_would_be_too_long(app: Any) -> None:
    status, error = refused(app, json={**PROMPT, "max_tokens": 508})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "has 5 tokens and 508 may follow" in error["message"]


def test_a_template_that_refuses() -> None:
    engine = FakeEngine()

    class Refusing(type(engine.model.tokenizer)):  # type: ignore[misc]
        def encode_chat(self, messages: Any) -> list[int]:
            raise ValueError("encode_chat: roles must alternate")

    engine.model.tokenizer = Refusing()
    status, error = refused(create_app(engine), CHAT, json=HELLO)
    assert (status, error["param"]) == (400, "messages")
    assert error["message"] == "messages: encode_chat: roles must alternate"


def test_a_queue_that_is_full() -> None:
    engine = FakeEngine(max_waiting=1)
    engine.submit(Request(prompt=[1]))
    app = create_app(engine, limits=Limits(retry_seconds=7))
    got = call(app, "POST", TEXT, json=PROMPT)
    assert got.status_code == 429 and got.headers["retry-after"] == "7"
    error = got.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_beyond_the_limit(declared: bool) -> None:
    """By their length as it is told, or by what has come."""
    parts = [b"x" * 50] * 3

    async def streamed() -> Any:
        for part in parts:
            yield part

    app = create_app(FakeEngine(), limits=Limits(body_bytes=100))
    content = b"".join(parts) if declared else streamed()
    got = call(app, "POST", TEXT, content=content, headers=JSON)
    assert ("content-length" in got.request.headers) == declared
    assert got.status_code == 413 and got.headers["connection"] == "close"
    assert "100 bytes at most" in got.json()["error"]["message"]
    small = call(app, "POST", TEXT, content=b"x" * 100, headers=JSON)
    assert small.status_code == 400


def test_a_form_is_no_json(app: Any) -> None:
    status, error = refused(app, data={"model": "fake"})
    assert status == 415 and "application/json" in error["message"]
    status, error = refused(app, content=b"{}")
    assert status == 415 and error["message"].endswith("application/json, got none")


def test_what_is_long_is_told_in_short(app: Any) -> None:
    """Nobody is sent his own 100 kB again."""
    long = "x" * 60_000
    turn = {"role": long, "content": "hi"}
    for path, fields, param in (
        (TEXT, {**PROMPT, long: 1}, "x" * 40 + "…"),
        (TEXT, {**PROMPT, "model": long}, "model"),
        (CHAT, {**HELLO, "messages": [turn]}, "messages[0].role"),
    ):
        _, error = refused(app, path, json=fields)
        assert error["param"] == param and "xxx…" in error["message"]
        assert len(error["message"]) < 200
    for path in (f"/v1/models/{long}", f"/{long}"):
        got = call(app, "GET", path)
        assert got.status_code == 404 and len(got.text) < 300
    _, error = refused(app, content=b"{}", headers={"content-type": long})
    assert len(error["message"]) < 200


# ---- whose pages ask -----------------------------------------------------------------

HERE = (
    *("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "localhost.:8000"),
    *("[::1]:8000", "[0:0:0:0:0:0:0:1]", "proxy.example:443", "proxy.example."),
)
ELSEWHERE = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "", "[::1"),
    *("evil.example@localhost", "localhost#evil", "localhost/evil", "localhost:80:80"),
    *("localhost:a", "[localhost]", "[127.0.0.1]", "http://localhost", "localhost.."),
    *(" localhost", "localhost,evil.example", "proxy.example@evil.example"),
)


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_names_of_this_machine_and_others(host: str) -> None:
    """A page whose name was led here, by DNS, is no page of this server."""
    with listen("127.0.0.1", 0, Limits()) as listener:
        known = known_hosts(listener, "127.0.0.1", ["Proxy.example"])
    app = create_app(FakeEngine(), hosts=known)
    got = call(app, "GET", "/v1/models", headers={"host": host})
    assert got.status_code == (403 if host in ELSEWHERE else 200)
    if got.status_code == 403:
        assert got.json()["error"]["code"] == "unknown_host"
        assert "Host must name this machine" in got.json()["error"]["message"]


FOREIGN = (
    *("http://evil.example", "null", "http://[::1", "http://evil.example@localhost"),
    *("app://localhost", "chrome-extension://localhost", "//localhost", "localhost"),
    "http://localhost/evil",
)


@pytest.mark.parametrize("origin", FOREIGN)
def test_posts_of_other_sites_pages(origin: str) -> None:
    engine = FakeEngine()
    limits = Limits(answer_seconds=1)  # the engine does not run
    app = create_app(engine, limits=limits, hosts=["localhost"])
    headers = {"origin": origin, "host": "localhost"}
    status, error = refused(app, json=PROMPT, headers=headers)
    assert (status, error["code"]) == (403, "foreign_origin")
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    for page in ("http://localhost:3000", "https://127.0.0.1:8000"):
        here = {"origin": page, "host": "localhost"}
        assert refused(app, content=b"{", headers={**here, **JSON})[0] == 400
    assert call(app, "GET", "/health", headers=headers).status_code != 403


def test_a_server_for_others_is_asked_by_any_name() -> None:
    with listen("0.0.0.0", 0, Limits()) as listener:
        anyone = known_hosts(listener, "0.0.0.0")
        named = known_hosts(listener, "0.0.0.0", ["a.example"])

    def status(hosts: Any, host: str) -> int:
        app = create_app(FakeEngine(), hosts=hosts)
        return call(app, "GET", "/v1/models", headers={"host": host}).status_code

    own = ("a.example", "localhost:8000", "127.0.0.1", "[::1]:8000", "0.0.0.0:8000")
    others = ("b.example", "10.0.0.5:8000")
    assert [status(named, host) for host in own] == [200] * len(own)
    assert [status(named, host) for host in others] == [403] * len(others)
    assert [status(anyone, host) for host in own + others] == [200] * 7


# A name as it is allowed, and as it is asked by.
ALLOWED = [
    ("A.example:8000", "a.example"),
    ("b.example.", "b.example:80"),
    ("[fd00::1]", "[fd00::1]:8000"),
    ("fd00:0:0::1", "[FD00::1]"),
    ("10.0.0.5", "10.0.0.5:80"),
    ("bücher.example", "xn--bcher-kva.example"),
    ("my_host", "my_host:8000"),
]
NO_NAMES = (
    *("https://a.example", "a.example/v1", "*.example", "*", "", "a..example", "a b"),
    *("me@a.example", "[a.example]", "[1:2]", "a.example:http", "straße.example"),
    *("x" * 64 + "ü", "https://bücher.example"),
)


@pytest.mark.cases(len(ALLOWED))
@pytest.mark.parametrize(("name", "host"), ALLOWED)
def test_names_that_are_allowed(name: str, host: str) -> None:
    """In each way that they may be written."""
    app = create_app(FakeEngine(), hosts=[name])
    for headers in ({"host": host}, {"host": host, "origin": f"https://{host}"}):
        got = call(app, "POST", TEXT, content=b"{", headers={**JSON, **headers})
        assert got.status_code == 400, got.text
    assert call(app, "GET", "/health", headers={"host": "c.d"}).status_code == 403


@pytest.mark.cases(len(NO_NAMES))
@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_not_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="must be a name or an address") as found:
        create_app(FakeEngine(), hosts=[name])
    assert repr(name)[:40] in str(found.value) and "leave out" in str(found.value)


def test_paths_and_methods_that_are_not(app: Any) -> None:
    got = call(app, "GET", "/v1/embeddings")
    assert got.status_code == 404 and got.json()["error"]["code"] == "unknown_url"
    got = call(app, "GET", CHAT)
    assert got.status_code == 405 and got.headers["allow"] == "POST"
    assert got.json()["error"]["code"] == "method_not_allowed"


def test_an_answer_that_takes_too_long() -> None:
    engine = FakeEngine(delay=0.02)
    with started(engine, limits=Limits(answer_seconds=0.1)) as slow:
        body = {**PROMPT, "max_tokens": 400}
        status, error = refused(slow, json=body)
        assert (status, error["code"]) == (504, "timeout")
        assert [stream.finish_reason for stream in engine.cancelled] == ["cancelled"]
        streamed = call(slow, "POST", TEXT, json={**body, "stream": True})
        assert '"code":"timeout"' in streamed.text.split("\n\n")[-2]
        assert len(engine.cancelled) == 2


def test_a_failure_of_the_server_tells_no_traceback() -> None:
    engine = FakeEngine()
    engine.pool_map = lambda: 1 / 0  # type: ignore[assignment, return-value]
    got = call(create_app(engine), "GET", "/pool")
    assert got.status_code == 500 and got.json()["error"]["type"] == "server_error"
    assert "division" not in got.text
