"""A real server on a real socket: streams as they come, clients that go, stall, lie."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
import httpx
from books_engine import BooksEngine
from fake_engine import FakeEngine
from http_servers import CHAT, HELLO, PROMPT, TEXT, chunks, served
from serve.engine import Engine
from serve.http_answers import Limits
from serve.http_server import listen
from serve.interface import IDLE
from serve.models import random_model
from waiting import wait_until

pytestmark = pytest.mark.cpu
SUPPORT = Path(__file__).parents[1] / "support"
LONG = {**PROMPT, "max_tokens": 500}


def test_tokens_come_as_they_are_made() -> None:
    engine = FakeEngine(delay=0.01)
    body = {**HELLO, "stream": True, "max_tokens": 40}
    with served(engine) as url, httpx.stream("POST", url + CHAT, json=body) as got:
        assert got.status_code == 200
        lines = got.iter_lines()
        first = [next(lines) for _ in range(4)]  # the role, an empty line, a token
        made = engine.stats()["new_tokens"]
        assert '"content":"u"' in first[2] and made < 20, made
        text = "\n".join([*first, *lines]) + "\n"
    assert len(chunks(text)) == 41


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_stream(stream: bool) -> None:
    engine = FakeEngine(delay=0.01)
    with served(engine) as url:
        with httpx.Client() as http:
            if stream:
                given = {"json": {**LONG, "stream": True}}
                with http.stream("POST", url + TEXT, **given) as got:
                    next(got.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(url + TEXT, json=LONG, timeout=0.1)
            wait_until(lambda: engine.cancelled)
        (cancelled,) = engine.cancelled
        assert cancelled.finish_reason == "cancelled"
        assert cancelled.num_new_tokens < 400
        # The server goes on.
        assert httpx.post(url + TEXT, json=PROMPT).status_code == 200
    assert engine.stats()["finished"] == 2


def test_a_client_that_goes_while_it_waits_leaves_the_queue() -> None:
    engine = FakeEngine(delay=0.01, max_waiting=4)
    with served(engine) as url, ThreadPoolExecutor(1) as pool:
        runs = pool.submit(httpx.post, url + TEXT, json={**LONG, "max_tokens": 100})
        wait_until(lambda: engine.stats()["running"])
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                # The stream's headers come at once, its first token does not.
                body = {**LONG, "stream": stream}
                httpx.post(url + TEXT, json=body, timeout=0.1)
        wait_until(lambda: engine.stats()["waiting"] == 0)
        assert [stream.num_new_tokens for stream in engine.cancelled] == [0, 0]
        assert runs.result().json()["usage"]["completion_tokens"] == 100


def test_an_engine_that_stops_ends_its_answers() -> None:
    engine = FakeEngine(delay=0.01)
    with served(engine) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(httpx.post, url + TEXT, json=LONG)
        wait_until(lambda: engine.stats()["running"])
        given = {"json": {**LONG, "stream": True}}
        second = pool.submit(httpx.post, url + TEXT, **given)
        wait_until(lambda: engine.stats()["waiting"])
        engine.stop()
        assert first.result().status_code == 503
        assert first.result().json()["error"]["code"] == "cancelled"
        assert second.result().text.count('"code":"cancelled"') == 1
        assert "[DONE]" not in second.result().text


def connect(url: str) -> socket.socket:
    at = urlsplit(url)
    return socket.create_connection((at.hostname, at.port), timeout=10)


def head(length: int) -> bytes:
    lines = [
        f"POST {TEXT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def posted(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return head(len(data)) + data


def test_a_connection_that_is_reset_cancels() -> None:
    """As of a client that was killed with data unread."""
    engine = FakeEngine(delay=0.01)
    with served(engine) as url:
        client = connect(url)
        client.sendall(posted({**LONG, "stream": True}))
        client.recv(100)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_until(lambda: engine.cancelled)


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux tells of stalled clients"
)
def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is longer than what the sockets hold; the rest of it has no reader."""
    limits = Limits(stalled_seconds=0.5, drain_seconds=30)

    def small(host: str, port: int, limits: Limits) -> socket.socket:
        listener = listen(host, port, limits)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr("http_servers.listen", small)
    engine = BooksEngine(max_tokens=2048)
    with served(engine, limits) as url:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        at = urlsplit(url)
        client.connect((at.hostname, at.port))
        client.sendall(posted({**PROMPT, "stream": True, "max_tokens": 2000}))
        wait_until(lambda: engine.stats()["finished"])
        began = time.monotonic()
    # The server has stopped: within its drain, since nothing was left to wait for.
    assert time.monotonic() - began < 10
    client.close()


def test_a_body_that_does_not_come() -> None:
    limits = Limits(body_seconds=0.2, drain_seconds=1)
    with served(FakeEngine(), limits) as url, connect(url) as client:
        client.sendall(head(100) + b'{"model"')
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_body_that_breaks_off() -> None:
    engine = FakeEngine()
    with served(engine) as url:
        with connect(url) as client:
            client.sendall(head(100) + b'{"model"')
        assert httpx.post(url + TEXT, json=PROMPT).status_code == 200
    assert engine.stats()["finished"] == 1


def test_a_large_body_is_not_read() -> None:
    limits = Limits(body_bytes=1000, drain_seconds=1)
    with served(FakeEngine(), limits) as url, connect(url) as client:
        client.sendall(head(1 << 40))
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_bytes_that_are_no_http() -> None:
    with served(FakeEngine()) as url:
        for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\0" * 1000):
            with connect(url) as client:
                client.sendall(garbage + b"\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 400 ")
        with connect(url) as client:
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
            assert client.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(url + "/health").status_code == 200


def test_more_connections_than_may() -> None:
    limits = Limits(connections=3, drain_seconds=1)
    with served(FakeEngine(), limits) as url:
        held = [connect(url) for _ in range(3)]
        wait_until(lambda: httpx.get(url + "/health").status_code == 503)
        for client in held:
            client.close()
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)


def test_many_clients_at_a_time_get_their_own_answers() -> None:
    engine = BooksEngine(max_waiting=64)
    prompts = [f"client {i} says " * 3 for i in range(32)]

    def ask(prompt: str) -> str:
        body = {**PROMPT, "prompt": prompt, "max_tokens": 40, "stream": True}
        text = httpx.post(url + TEXT, json=body, timeout=60).text
        return "".join(part["choices"][0]["text"] for part in chunks(text))

    with served(engine) as url, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [prompt[:40] for prompt in prompts]
    assert engine.stats()["held_blocks"] == 0 and IDLE in engine.pool_map()
    engine.cache.check()


# ---- before the first request ----


class Compiling:
    """An engine whose programs are compiled when `gate` opens, `begun` of them."""

    def __init__(self, error: str = "") -> None:
        self.engine = Engine(random_model(), num_blocks=8)
        self.programs = len(self.engine._runner._shapes)
        self.gate, self.begun = Event(), 0

        def compile_one(batch: Any) -> None:
            self.begun += 1
            assert self.gate.wait(60)
            if error:
                raise RuntimeError(error)

        self.engine._runner._call = compile_one  # type: ignore[assignment]


def test_a_server_is_starting_until_its_programs_are_compiled() -> None:
    made = Compiling()
    with served(made.engine) as url:
        health = httpx.get(url + "/health")
        told = {"status": "starting", "model": "random-0"}
        assert (health.status_code, health.json()) == (503, told)
        made.gate.set()
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)
        assert made.begun == made.programs
        assert httpx.get(url + "/health").json() == {**told, "status": "ok"}


def test_programs_that_do_not_compile_are_told() -> None:
    made = Compiling("too little memory")
    made.gate.set()
    with served(made.engine) as url:
        wait_until(lambda: "error" in httpx.get(url + "/health").json())
        health = httpx.get(url + "/health")
    assert health.status_code == 503
    said = "The programs do not compile: RuntimeError: too little memory"
    assert health.json()["error"]["message"] == said


def test_an_engine_that_stops_compiles_no_further() -> None:
    made = Compiling()
    with served(made.engine) as url, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: made.begun)
        stopping = pool.submit(made.engine.stop)
        wait_until(lambda: made.engine.stopped)
        made.gate.set()
        stopping.result(30)
        assert made.begun == 1 < made.programs
        health = httpx.get(url + "/health")
    assert health.status_code == 503
    assert health.json()["error"]["message"] == "the engine has stopped"


# ---- the process ---------------------------------------------------------------------


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[str]
    url: str


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    command = [sys.executable, "-P", str(SUPPORT / "http_process.py"), *request.param]
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, **pipes) as process:
        assert process.stdout is not None
        try:
            yield Server(process, process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("server", [["fake", "0.01"]], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_answers_end_before_the_process(server: Server, number: int) -> None:
    body = {**PROMPT, "stream": True, "max_tokens": 60}
    with httpx.stream("POST", server.url + TEXT, json=body) as got:
        lines = got.iter_lines()
        first = next(lines)
        server.process.send_signal(number)
        text = "\n".join([first, *lines]) + "\n"
    assert len(chunks(text)) == 60
    out, errors = server.process.communicate(timeout=20)
    assert (server.process.returncode, out.strip(), errors) == (0, "stopped", "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.parametrize("server", [["fake", "0.05", "1"]], indirect=True)
def test_answers_that_take_too_long_end_with_the_process(server: Server) -> None:
    with httpx.stream("POST", server.url + TEXT, json={**LONG, "stream": True}) as got:
        lines = got.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    out, errors = server.process.communicate(timeout=20)
    assert (server.process.returncode, out.strip()) == (0, "stopped")
    assert "timeout graceful shutdown exceeded" in errors


def test_an_address_that_is_taken() -> None:
    with listen("127.0.0.1", 0, Limits()) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*pass another"):
            listen("127.0.0.1", port, Limits())
