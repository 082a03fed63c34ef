"""Servers for tests: an application called without a socket, or behind a real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import fake_engine  # noqa: F401  puts the examples on the path
import httpx
from serve.http_answers import Limits
from serve.http_hosts import known_hosts
from serve.http_server import create_app, listen, make_server
from serve.interface import Engine

HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"model": "fake", "prompt": "hello"}
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def call(app: Any, method: str, path: str, **given: Any) -> httpx.Response:
    """One request to an ASGI application; what it raises is an answer, too."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            return await http.request(method, path, **given)

    return asyncio.run(ask())


@contextlib.contextmanager
def started(engine: Engine, **given: Any) -> Iterator[Any]:
    """An application over an engine that runs meanwhile."""
    engine.start()
    try:
        yield create_app(engine, **given)
    finally:
        engine.stop()


@contextlib.contextmanager
def served(engine: Engine, limits: Limits | None = None) -> Iterator[str]:
    """A server on a socket of this machine, in a thread; gives its URL."""
    limits = limits or Limits(drain_seconds=1)
    listener = listen("127.0.0.1", 0, limits)
    port = listener.getsockname()[1]
    hosts = known_hosts(listener, "127.0.0.1")
    with started(engine, limits=limits, hosts=hosts) as app:
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON objects of server-sent events, which end with [DONE]."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts), text
    assert parts.pop() == "data: [DONE]", text
    return [json.loads(part.removeprefix("data: ")) for part in parts]
