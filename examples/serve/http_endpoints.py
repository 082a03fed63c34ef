"""What answers at each path of a server, and how its errors are told."""

import asyncio
import base64
import hashlib
import time
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serve.http_answers import (
    Answer,
    JsonResponse,
    Limits,
    StreamedAnswer,
    WholeAnswer,
    error_response,
    read_body,
)
from serve.http_metrics import Metrics
from serve.interface import Engine, QueueFullError, Stream
from serve.openai_answers import Shape, model_object
from serve.openai_api import (
    MOST_SHOWN,
    ApiError,
    Asked,
    ChatRequest,
    CompletionRequest,
    in_words,
    read,
)

PAGE = Path(__file__).parent / "pages" / "index.html"


def page_headers(page: str) -> dict[str, str]:
    """The page runs its own script and no other, and talks to this server alone."""
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


class Endpoints:
    """What answers at each path.

    Args:
        engine: what serves requests; it has been started.
        limits: what a client may ask.
        metrics: what /metrics tells.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.stopped = ""  # why the engine takes no requests any more
        self.created = int(time.time())
        self.page = PAGE.read_text()
        self.page_headers = page_headers(self.page)

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.told),
            Route("/pool", self.pool),
            Route("/", self.index),
        ]

    # ---- texts ----

    async def completions(self, request: HttpRequest) -> ASGIApp:
        asked = read(await read_body(request, self.limits), CompletionRequest)
        return await self.answer(asked, chat=False)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        asked = read(await read_body(request, self.limits), ChatRequest)
        return await self.answer(asked, chat=True)

    async def answer(
        self, asked: CompletionRequest | ChatRequest, *, chat: bool
    ) -> Answer:
        self.check_model(asked.model)
        # Long texts take a while: others' tokens go on.
        prompt = await asyncio.to_thread(asked.tokens, self.engine.model.tokenizer)
        stream = self.submit(asked, prompt, "messages" if chat else "prompt")
        shape = Shape(chat, self.engine.model.name, asked.include_usage)
        kind = StreamedAnswer if asked.stream else WholeAnswer
        return kind(stream, shape, self.limits)

    def submit(self, asked: Asked, prompt: list[int], param: str) -> Stream:
        """Hands a request to the engine; its refusals become answers."""
        room = self.engine.max_tokens - len(prompt)
        most = asked.most_tokens(room)
        if most > room:
            message = (
                f"{param}: the prompt has {len(prompt)} tokens and {most} may follow, "
                f"of {self.engine.max_tokens} at most in all; shorten it, or pass "
                "fewer max_tokens"
            )
            code = "context_length_exceeded"
            raise ApiError(400, message, param=param, code=code)
        try:
            return self.engine.submit(asked.request(prompt, room))
        except QueueFullError as error:
            raise ApiError(
                429,
                f"Too many requests wait: {error}; try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(self.limits.retry_seconds)},
            ) from error
        except ValueError as error:
            message, code = f"{param}: {error}", "invalid_value"
            raise ApiError(400, message, param=param, code=code) from error
        except RuntimeError as error:
            self.stopped = str(error)
            raise self.unavailable() from error

    def unavailable(self) -> ApiError:
        kind, code, why = "server_error", "unavailable", self.engine.trouble
        message = f"{self.stopped}: {why}" if why else self.stopped
        return ApiError(503, message, kind=kind, code=code)

    # ---- models ----

    def check_model(self, name: str) -> None:
        known = self.engine.model.name
        if name != known:
            message = f"The model {in_words(name)} does not exist here; {known!r} does"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def models(self, request: HttpRequest) -> Response:
        models = [model_object(self.engine.model.name, self.created)]
        return JsonResponse({"object": "list", "data": models})

    async def model(self, request: HttpRequest) -> Response:
        self.check_model(request.path_params["model"])
        return JsonResponse(model_object(self.engine.model.name, self.created))

    # ---- monitors and people ----

    async def health(self, request: HttpRequest) -> Response:
        if self.engine.stopped:
            self.stopped = self.stopped or "the engine has stopped"
            raise self.unavailable()
        if self.engine.trouble:
            raise ApiError(
                503,
                f"The programs do not compile: {self.engine.trouble}",
                kind="server_error",
                code="unavailable",
            )
        # Requests may be sent by now: they wait for the programs.
        status, code = ("ok", 200) if self.engine.ready else ("starting", 503)
        told = {"status": status, "model": self.engine.model.name}
        return JsonResponse(told, code)

    async def told(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def pool(self, request: HttpRequest) -> Response:
        """The state of each block, a digit each, as `pool_map` has them."""
        digits = (self.engine.pool_map() + ord("0")).tobytes().decode()
        told = {"model": self.engine.model.name, "states": digits}
        return JsonResponse(
            {**told, "stats": self.engine.stats()},
            headers={"Cache-Control": "no-store"},
        )

    async def index(self, request: HttpRequest) -> Response:
        return HTMLResponse(self.page, headers=self.page_headers)


# ---- errors --------------------------------------------------------------------------


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    asked = asked if len(asked) <= 2 * MOST_SHOWN else f"{asked[: 2 * MOST_SHOWN]}…"
    message = f"{asked}: {error.detail}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    told = ApiError(error.status_code, message, code=code, headers=error.headers)
    return error_response(told)


async def _gone(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=400)  # to nobody: the body broke off


async def _failure(request: HttpRequest, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    message = "The server failed; its log says why"
    told = ApiError(500, message, kind="server_error", code="internal_error")
    return error_response(told)


HANDLERS = {
    ApiError: _api_error,
    HTTPException: _http_error,
    ClientDisconnect: _gone,
    Exception: _failure,
}
