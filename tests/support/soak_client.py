"""A client of a soak: threads that ask, leave, lie and check what they get.

    python tests/support/soak_client.py URL SEED THREADS KIND

It runs until it is told to stop by the end of its input, or killed. When it begins,
every second, and at the end, it prints a line of JSON: how often each action ended in
which way so far, and what was wrong.

KIND says what answers can be known: of an "echo" engine, the text; of any other engine
("model"), that greedy answers of the same prompt are alike.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SYSTEM = "You answer questions about blocks, tables and tiers. Be brief and plain. "
QUESTIONS, LENGTHS = 40, (1, 5, 20, 60)


def question(number: int) -> str:
    return f"Question {number}: what is a block?"


class Client:
    """One thread's way of using a server.

    Args:
        url: of the server.
        seed: of what it does.
        kind: what answers can be known, see above.
        counts: where it counts its actions by how they ended.
        wrong: where it notes what should not be.
    """

    def __init__(
        self,
        url: str,
        seed: int,
        kind: str,
        counts: collections.Counter[str],
        wrong: list[str],
    ) -> None:
        self.url, self.kind, self.counts, self.wrong = url, kind, counts, wrong
        self.random = random.Random(seed)
        self.http = httpx.Client(base_url=url, timeout=120)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]
        self.known: dict[str, str] = {}

    def act(self) -> None:
        """Does one of the things that clients do, and counts how it ended."""
        action = self.random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        try:
            ended = action(self)
        except Exception as error:
            self.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")
            ended = "failed"
        self.counts[f"{action.__name__} {ended}"] += 1

    # ---- honest ones ----

    def body(self, *, most: int | None = None, **more: Any) -> dict[str, Any]:
        asked = question(self.random.randrange(QUESTIONS))
        tokens = self.random.choice(LENGTHS) if most is None else most
        given = {"model": self.model, "prompt": SYSTEM + asked}
        return {**given, "max_tokens": tokens, "temperature": 0, **more}

    def whole(self) -> str:
        body = self.body()
        got = self.http.post(TEXT, json=body)
        if got.status_code == 200:
            answer = got.json()
            self.check(body, answer["choices"][0], answer["usage"])
        return self.status(got)

    def streamed(self) -> str:
        body = self.body(stream=True, stream_options={"include_usage": True})
        with self.http.stream("POST", TEXT, json=body) as got:
            if got.status_code != 200:
                got.read()
                return self.status(got)
            parts = list(events(got))
        self.expect(parts[-1] == "[DONE]", f"a stream ends with {parts[-1]}")
        *said, last = parts[:-1]
        texts = "".join(part["choices"][0]["text"] for part in said)
        reason = said[-1]["choices"][0]["finish_reason"]
        choice = {"text": texts, "finish_reason": reason}
        self.check(body, choice, last["usage"])
        return "200"

    def chat(self) -> str:
        messages = [{"role": "system", "content": SYSTEM}]
        messages.append({"role": "user", "content": "What is a tier?"})
        body = {"model": self.model, "messages": messages, "max_tokens": 8}
        return self.status(self.http.post(CHAT, json=body))

    def watch(self) -> str:
        path = self.random.choice(["/pool", "/metrics", "/health", "/", "/v1/models"])
        got = self.http.get(path)
        self.expect(got.status_code == 200, f"{path}: {got.status_code}")
        return "200"

    def check(self, body: dict, choice: dict, usage: dict) -> None:
        """That an answer is what this prompt has for an answer."""
        asked, made = body["max_tokens"], usage["completion_tokens"]
        ended = choice["finish_reason"]
        self.expect(ended in ("stop", "length"), f"an answer ended with {ended}")
        self.expect(made == asked or ended == "stop", f"{made} tokens of {asked}")
        prompt, text = body["prompt"], choice["text"]
        if self.kind == "echo":
            self.expect(text == (prompt * 2)[:asked], f"{prompt!r} gave {text!r}")
            return
        text = text.rstrip("\ufffd")  # a character whose last bytes did not come
        known = self.known.get(prompt, "")
        alike = known.startswith(text) or text.startswith(known)
        self.expect(alike, f"{prompt!r} gave {text!r} after {known!r}")
        self.known[prompt] = max(known, text, key=len)

    def status(self, got: httpx.Response) -> str:
        """The status, which has to be one of those that an honest client may get."""
        expected = got.status_code in (200, 429)
        self.expect(expected, f"{got.status_code}: {got.text}")
        if got.status_code == 429:
            time.sleep(0.05 * self.random.random())
        return str(got.status_code)

    def expect(self, true: bool, message: str) -> None:
        if not true:
            self.wrong.append(message)

    # ---- those that leave ----

    def leave_stream(self) -> str:
        body = self.body(stream=True, most=200)
        with self.http.stream("POST", TEXT, json=body) as got:
            if got.status_code != 200:
                got.read()
                return self.status(got)
            for count, _ in enumerate(events(got)):
                if count == self.random.randrange(20):
                    break
        return "left"

    def leave_whole(self) -> str:
        seconds = 0.03 * self.random.random()
        with contextlib.suppress(httpx.TimeoutException):
            self.http.post(TEXT, json=self.body(most=200), timeout=max(seconds, 0.001))
        return "left"

    def reset(self) -> str:
        """Ends the connection as the system of a killed client does."""
        client = self.connect()
        client.sendall(posted(self.body(stream=True, most=200)))
        if self.random.random() < 0.5:
            client.recv(self.random.randrange(1, 400))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        return "left"

    # ---- those that lie ----

    def garbage(self) -> str:
        with self.connect() as client:
            if self.random.random() < 0.5:
                data = self.random.randbytes(self.random.randrange(1, 3000))
                client.sendall(data + b"\r\n\r\n")
            else:
                data = posted(self.body())
                client.sendall(data[: self.random.randrange(len(data))])
            client.settimeout(0.02)
            with contextlib.suppress(OSError):
                client.recv(1000)
        return "sent"

    def wrong_body(self) -> str:
        wrong: list[Any] = [
            self.body(max_tokens="many"),
            self.body(temperature=-1),
            self.body(prompt=None),
            self.body(model="other"),
            self.body(unknown=1),
            self.body(prompt="x" * 200_000),
            [self.body()],
        ]
        got = self.http.post(TEXT, json=self.random.choice(wrong))
        self.expect(got.status_code in (400, 404, 413), f"wrong: {got.status_code}")
        self.expect(bool(got.json()["error"]["message"]), "an error has no message")
        return "refused"

    def no_json(self) -> str:
        data = bytearray(json.dumps(self.body()).encode())
        data[self.random.randrange(2)] = self.random.choice(b"\xff]\0")
        headers = {"Content-Type": "application/json"}
        got = self.http.post(TEXT, content=bytes(data), headers=headers)
        self.expect(got.status_code == 400, f"no JSON: {got.status_code}")
        return "refused"

    def connect(self) -> socket.socket:
        at = urlsplit(self.url)
        return socket.create_connection((at.hostname, at.port), timeout=30)


# How often each is done, to each other.
ACTIONS: dict[Callable[[Client], str], int] = {
    Client.whole: 6,
    Client.streamed: 6,
    Client.chat: 2,
    Client.watch: 2,
    Client.leave_stream: 3,
    Client.leave_whole: 2,
    Client.reset: 2,
    Client.garbage: 2,
    Client.wrong_body: 2,
    Client.no_json: 1,
}


def posted(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {TEXT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    ]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
    return head.encode() + data


def events(got: httpx.Response) -> Iterator[Any]:
    """The objects of a stream, and "[DONE]"."""
    for line in got.iter_lines():
        if data := line.removeprefix("data: "):
            yield data if data == "[DONE]" else json.loads(data)


def main(url: str, seed: str, threads: str, kind: str) -> None:
    stop = threading.Event()
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []

    def run(number: int) -> None:
        client = Client(url, number, kind, counts, wrong)
        while not stop.is_set():
            client.act()
        client.http.close()

    first = int(seed) * 1000
    running = [
        threading.Thread(target=run, args=[first + i]) for i in range(int(threads))
    ]
    for thread in running:
        thread.start()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    def tell() -> None:
        print(json.dumps({"counts": {**counts}, "wrong": [*wrong]}), flush=True)

    threading.Thread(target=listen, daemon=True).start()
    tell()
    while not stop.wait(1.0):
        tell()
    for thread in running:
        thread.join()
    tell()


if __name__ == "__main__":
    main(*sys.argv[1:])
