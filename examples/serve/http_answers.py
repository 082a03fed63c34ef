"""The way of a request through HTTP: its body, within limits; its answer, while the
client is there.

A client that goes away cancels its stream, whether it was streamed to or not, and gives
its blocks back.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.interface import Event, Stream
from serve.openai_answers import Shape
from serve.openai_api import ApiError, in_words


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may ask of the server.

    Attributes:
        body_bytes: of a request, at most (413).
        body_seconds: from a request's headers to the end of its body, at most (408).
        answer_seconds: from there to the end of the answer, at most (504).
        stalled_seconds: for which a client may take nothing of what it is sent, or be
            unreachable, before its connection is cut.
        retry_seconds: after which a refused client may try again (429, Retry-After).
        drain_seconds: for which answers may go on when the server is told to stop.
        connections: at one time; further ones get 503.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    answer_seconds: float = 600.0
    stalled_seconds: float = 30.0
    retry_seconds: int = 1
    drain_seconds: int = 10
    connections: int = 1024

    def __post_init__(self) -> None:
        for name in ("body_bytes", "connections"):
            if getattr(self, name) < 1:
                given = getattr(self, name)
                raise ValueError(f"Limits: {name} must be above 0, got {given}")


class JsonResponse(Response):
    """An answer in JSON; what is not a number is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), error.status, headers=error.headers)


async def read_body(request: HttpRequest, limits: Limits) -> bytes:
    """The body of a request, as long as it is small and quick enough.

    Raises:
        ApiError: 408, 413 or 415.
        ClientDisconnect: if the client has gone.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        got = in_words(kind) if kind else "none"
        message = f"Content-Type must be application/json, got {got}"
        raise ApiError(415, message, code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    too_long = ApiError(
        413,
        f"The body may have {limits.body_bytes} bytes at most",
        code="request_too_large",
        headers={"Connection": "close"},  # the rest is not read
    )
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The body took longer than {limits.body_seconds} seconds",
            code="timeout",
            headers={"Connection": "close"},
        ) from error
    return bytes(body)


@dataclass
class Client:
    """Who asked; `gone` once the connection is lost."""

    gone: bool = False


@contextlib.asynccontextmanager
async def cancelled_when_gone(
    stream: Stream, receive: Receive
) -> AsyncIterator[Client]:
    """Cancels a stream when its client goes, and when it is left for any reason."""
    client = Client()

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.gone = True
        stream.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield client
    finally:
        listener.cancel()
        stream.cancel()  # nothing, where it has ended


def _why(last: Event) -> ApiError:
    """Why a stream ended without its text being complete."""
    if last.finish_reason == "cancelled":
        message = "The request was cancelled: the server stops"
        return ApiError(503, message, kind="server_error", code="cancelled")
    message = f"The request failed: {last.error or 'the engine gave no reason'}"
    return ApiError(500, message, kind="server_error", code="engine_error")


@dataclass(frozen=True)
class Answer:
    """The answer to a request: an ASGI application, once.

    Attributes:
        stream: what the engine makes.
        shape: how it is written.
        limits: of the server.
    """

    stream: Stream
    shape: Shape
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_when_gone(self.stream, receive) as client:
            await self.answer(client, scope, receive, send)

    async def answer(
        self, client: Client, scope: Scope, receive: Receive, send: Send
    ) -> None:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[Event]:
        """The stream's events.

        Raises:
            ApiError: instead of a last one that is no proper end.
        """
        seconds = self.limits.answer_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(self.stream)
            except TimeoutError as error:
                message = f"The answer took longer than {seconds} seconds"
                kind = "server_error"
                raise ApiError(504, message, kind=kind, code="timeout") from error
            if event.finish_reason in ("cancelled", "error"):
                raise _why(event)
            yield event
            if event.finish_reason is not None:
                return


class WholeAnswer(Answer):
    """All of the text at once."""

    async def answer(
        self, client: Client, scope: Scope, receive: Receive, send: Send
    ) -> None:
        text, reason = "", ""
        try:
            async for event in self.events():
                text += event.text
                reason = event.finish_reason or ""
            response = JsonResponse(self.shape.whole(text, reason, self.stream))
        except ApiError as error:
            response = error_response(error)
        if not client.gone:
            await response(scope, receive, send)


class StreamedAnswer(Answer):
    """Server-sent events: the text in chunks, as it comes."""

    async def answer(
        self, client: Client, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies pass it on as it comes
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)
        try:
            async for chunk in self.chunks():
                await _send(send, msgspec.json.encode(chunk))
                # Where many tokens are there: others' turn, and that of bad news.
                await asyncio.sleep(0)
        except ApiError as error:  # the status is out: clients look for this
            await _send(send, msgspec.json.encode(error.body()))
        else:
            await _send(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        shape = self.shape
        if shape.chat:
            yield shape.chunk("", first=True)
        async for event in self.events():
            if event.text or event.finish_reason:
                yield shape.chunk(event.text, event.finish_reason)
        if shape.include_usage:
            yield shape.end(self.stream)


async def _send(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
