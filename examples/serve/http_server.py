"""An engine behind HTTP: OpenAI's API, numbers, and a page that shows the pool.

    POST /v1/completions, /v1/chat/completions    at once, or as server-sent events
    GET  /v1/models, /v1/models/{model}
    GET  /health, /metrics                        for monitors
    GET  /, /pool                                 for people: a page, and what it shows

    run(engine, port=8000)

There are no users, keys or encryption: what listens beyond this machine belongs behind
a proxy that has them.
"""

import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator

try:
    import msgspec  # noqa: F401  of the modules below
    import uvicorn
    from prometheus_client.registry import Collector
    from starlette.applications import Starlette
    from starlette.types import ASGIApp
except ImportError as error:
    raise ImportError(
        f"serve.http_server: {error.name} is not installed; pip install starlette "
        "uvicorn msgspec prometheus-client"
    ) from error

from serve.http_answers import Limits
from serve.http_endpoints import HANDLERS, Endpoints
from serve.http_hosts import KnownHosts, known_hosts
from serve.http_metrics import Counted, Metrics
from serve.interface import Engine


def create_app(
    engine: Engine,
    *,
    limits: Limits | None = None,
    collectors: Iterable[Collector] = (),
    hosts: Iterable[str] | None = None,
) -> ASGIApp:
    """The ASGI application over an engine that has been started.

    Args:
        engine: what serves requests.
        limits: what a client may ask.
        collectors: further numbers for /metrics.
        hosts: the names by which it may be asked, as for `KnownHosts`; any if None.
    """
    metrics = Metrics(engine, collectors)
    routes = Endpoints(engine, limits or Limits(), metrics).routes()
    app: ASGIApp = Starlette(routes=routes, exception_handlers=HANDLERS)
    if hosts is not None:
        app = KnownHosts(app, hosts)
    return Counted(app, metrics, [route.path for route in routes])


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A socket whose connections notice clients that are gone or take nothing.

    Raises:
        OSError: if the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:  # OverflowError: no number of a port
        number = getattr(error, "errno", None) or errno.EINVAL
        why = getattr(error, "strerror", None) or error
        message = f"cannot listen on {host}:{port}: {why}; pass another host or port"
        raise OSError(number, message) from error
    # Connections have these of their listener.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        milliseconds = int(limits.stalled_seconds * 1000)
        seconds = max(int(limits.stalled_seconds), 1)
        tcp = socket.IPPROTO_TCP
        listener.setsockopt(tcp, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.setsockopt(tcp, socket.TCP_KEEPIDLE, seconds)
    return listener


def make_server(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """A server that is run by `run(sockets=[listener])`."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level=logging.WARNING,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=limits.drain_seconds,
    )
    return uvicorn.Server(config)


def run(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    collectors: Iterable[Collector] = (),
    hosts: Iterable[str] = (),
    ready: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; then open answers may end, and the engine stops.

    Args:
        engine: what serves requests; it is started and stopped here.
        host: an address of this machine.
        port: 0 takes a free one.
        limits: what a client may ask.
        collectors: further numbers for /metrics.
        hosts: names by which it may be asked beside its own. With some, or while it
            listens on this machine alone, requests by other names and posts of other
            sites' pages are refused.
        ready: told the server's URL when it listens.

    Raises:
        OSError: if nothing can listen there.
        ValueError: one of the hosts is no name.
    """
    limits = limits or Limits()
    listener = listen(host, port, limits)
    shown = f"[{host}]" if ":" in host else host
    try:
        known = known_hosts(listener, host, hosts)
        app = create_app(engine, limits=limits, collectors=collectors, hosts=known)
        server = make_server(app, limits)
        with _interrupted_by(signal.SIGTERM):
            engine.start()
            ready(f"http://{shown}:{listener.getsockname()[1]}")
            server.run(sockets=[listener])
    finally:
        engine.stop()
        listener.close()


@contextlib.contextmanager
def _interrupted_by(number: int) -> Iterator[None]:
    """The signal, and SIGINT, end the block quietly.

    uvicorn raises again what it was stopped by; SIGTERM would end the process at once.
    """
    before = signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(number, before)
